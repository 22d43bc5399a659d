"""Arrays from .npz files, from whoever's hands. Never pickle, and no memory for what a file merely claims."""

import math
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.lib import format as npy
from numpy.typing import NDArray

from fedtailor.errors import Refused
from fedtailor.room import check_room

Members = dict[str, zipfile.ZipInfo]  # by the names of their arrays

_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # as numpy writes; others may ask for gigabytes before they unpack
_HEADER = 10_000  # bytes of an array's header: numpy's own limit, which it looks at when it has read the header
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npz(path: Path, names: Collection[str]) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Those of the named arrays that a file has, and the names of all it has.

    >>> read_npz(Path("nowhere.npz"), ["x"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.Refused: 'nowhere.npz' cannot be read as a .npz of plain arrays; write it with numpy.savez...
    """
    with _opened(path) as archive:
        members = _members(archive)
        check_room(_size(members, names), repr(path.name))
        return {name: _read(archive, members[name]) for name in names if name in members}, list(members)


def npz_bytes(path: Path, names: Collection[str]) -> int:
    """How many bytes the named arrays of a file will take at most; read from its table of contents alone."""
    with _opened(path) as archive:
        return _size(_members(archive), names)


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except Refused:
        raise
    except Exception as error:  # zipfile, zlib and numpy have many ways to say that a file is broken
        hint = "write it with numpy.savez, without objects inside"
        raise Refused(f"{path.name!r} cannot be read as a .npz of plain arrays; {hint}.") from error


def _members(archive: zipfile.ZipFile) -> Members:
    return {member.filename.removesuffix(".npy"): member for member in archive.infolist()}


def _size(members: Members, names: Collection[str]) -> int:
    return sum(members[name].file_size for name in names if name in members)  # zipfile never unpacks more than that


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    if member.compress_type not in _PACKED:
        raise ValueError("a packing that numpy does not write")
    with archive.open(member) as stream:
        head = stream.read(12)  # magic, version, length of the header in two bytes or in four
        if int.from_bytes(head[8 : 10 if head[6:7] == b"\1" else 12], "little") > _HEADER:
            raise ValueError("a header that is none")
        stream.seek(0)
        shape, _, dtype = _HEADERS[npy.read_magic(stream)](stream)
        rows = shape[0] if shape else 1
        if min(shape, default=0) < 0 or max(math.prod(shape) * dtype.itemsize, rows) > member.file_size:
            raise ValueError("more numbers than the file holds, or samples of no bytes")
        stream.seek(0)
        array: NDArray[Any] = npy.read_array(stream, allow_pickle=False)
        return array
