"""Reader of untrusted .npz files; it opens no pickles and checks declared sizes before it allocates memory."""

import math
import mmap
import struct
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedtailor.core.memory_limits import check_memory
from fedtailor.errors import DataError, FedTailorError

Members = dict[str, zipfile.ZipInfo]  # by array name

_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # those of numpy; others can need gigabytes to decode
_MAX_HEADER = 10_000  # bytes; the limit of numpy, which numpy checks only after it has read the header
_MIN_MAPPED = 1 << 20  # bytes; smaller arrays are read
_HEADER_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npz(path: Path, names: Collection[str] | None = None) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Return the named arrays that a file contains, or all of them, and the names of all its arrays.

    >>> read_npz(Path("nowhere.npz"), ["x"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.DataError: 'nowhere.npz' cannot be read as an .npz file of plain arrays; save it...
    """
    with _opened(path) as archive:
        members = _members(archive)
        names = members if names is None else names
        check_memory(_total_size(members, names), repr(path.name))
        return {name: _read_member(archive, members[name]) for name in names if name in members}, list(members)


def map_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Return all arrays of a file; large arrays of bytes that are not compressed are mapped into memory, not read.

    Changes of a mapped array are private to this process and do not reach the file. The file may be replaced or
    removed in the meantime, but must not be changed in place.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(Path(folder, "a.npz"), x=np.arange(3))
    ...     map_npz(Path(folder, "a.npz"))
    {'x': array([0, 1, 2])}
    """
    with _opened(path) as archive, path.open("rb") as file:
        members = _members(archive)
        check_memory(_total_size(members, members), repr(path.name))
        return {
            name: _map_member(archive, member, file)
            if member.file_size >= _MIN_MAPPED
            else _read_member(archive, member)
            for name, member in members.items()
        }


def read_object_array(path: Path, name: str) -> bytes | None:
    """Return the pickle of an array of Python objects without opening it; None if the file has no such array.

    >>> read_object_array(Path("nowhere.npz"), "data")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.DataError: 'nowhere.npz' cannot be read as an .npz file of plain arrays; save it...
    """
    with _opened(path) as archive:
        member = _members(archive).get(name)
        if member is None:
            return None
        check_memory(member.file_size, repr(path.name))
        with _opened_member(archive, member) as stream:
            _, _, dtype = _read_header(stream)
            return stream.read() if dtype.hasobject else None


def npz_bytes(path: Path, names: Collection[str]) -> int:
    """Return the maximum size of the named arrays in bytes, from the table of contents of the file."""
    with _opened(path) as archive:
        return _total_size(_members(archive), names)


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except FedTailorError:
        raise
    except Exception as error:  # zipfile, zlib, and numpy raise many types on broken files
        hint = "save it with numpy.savez, without object arrays"
        raise DataError(f"{path.name!r} cannot be read as an .npz file of plain arrays; {hint}.") from error


def _members(archive: zipfile.ZipFile) -> Members:
    return {member.filename.removesuffix(".npy"): member for member in archive.infolist()}


def _total_size(members: Members, names: Collection[str]) -> int:
    # zipfile never decompresses more than file_size
    return sum(members[name].file_size for name in names if name in members)


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with _opened_member(archive, member) as stream:
        shape, _, dtype = _read_header(stream)
        rows = shape[0] if shape else 1
        if min(shape, default=0) < 0 or max(math.prod(shape) * dtype.itemsize, rows) > member.file_size:
            raise ValueError("more elements than the file contains, or samples without bytes")
        stream.seek(0)
        array: NDArray[Any] = npy.read_array(stream, allow_pickle=False)
        return array


def _map_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: BinaryIO) -> NDArray[Any]:
    """Map an array, or read it if it is compressed, not in C order, or of values that may not be aligned."""
    with _opened_member(archive, member) as stream:
        shape, in_fortran_order, dtype = _read_header(stream)
        header_size = stream.tell()
    if member.compress_type != zipfile.ZIP_STORED or in_fortran_order or dtype.itemsize != 1 or dtype.hasobject:
        return _read_member(archive, member)
    file.seek(member.header_offset + 26)  # of the member's own header, whose last two fields have variable lengths
    start = member.header_offset + 30 + sum(struct.unpack("<HH", file.read(4))) + header_size
    size = math.prod(shape)
    if min(shape, default=0) < 0 or size > member.file_size - header_size:
        raise ValueError("more elements than the file contains")
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return np.frombuffer(mapped, dtype, size, start).reshape(shape)


def _opened_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> IO[bytes]:
    if member.compress_type not in _COMPRESSIONS:
        raise ValueError("a compression that numpy does not use")
    return archive.open(member)


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, the order, and the dtype of an array; the stream is then at its content."""
    head = stream.read(12)  # magic, version, and length of the header in two or four bytes
    if int.from_bytes(head[8 : 10 if head[6:7] == b"\1" else 12], "little") > _MAX_HEADER:
        raise ValueError("an invalid header")
    stream.seek(0)
    return _HEADER_READERS[npy.read_magic(stream)](stream)
