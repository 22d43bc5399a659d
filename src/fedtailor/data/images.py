"""Pictures from folders and archives in the publishers' formats: IDX, CIFAR-10's records, PNG sheets. Never pickle.

Nothing is allocated for a size that a file merely claims: every claim is compared with a bound first.
"""

import gzip
import io
import json
import lzma
import math
import struct
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedtailor.data.entries import check_entry
from fedtailor.errors import Refused

Pictures = tuple[NDArray[np.uint8], NDArray[np.int64]]  # x [n, channels, height, width] and y [n]
Files = Mapping[str, bytes]  # what the files hold, by the publisher's file name

LARGEST = 1 << 30  # bytes of one file: twice the largest published IDX file
_SHEET = 1 << 24  # pixels of one sheet: the published ones have 10,240,000, and PIL itself warns from 89 million
_LABELS = 1 << 20  # bytes of a list of labels: the published ones have 150,000
_UNPACKER = 1 << 28  # bytes that unpacking an .xz may take: four times what its strongest setting needs
CLASSES = 10  # of each of these data sets
_AR = b"!<arch>\n"  # how the container of a Debian package begins
_RECORD = 1 + 3 * 32 * 32  # CIFAR-10's binary version: the label, then the red, green and blue planes
_EMPTY = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
_PARTS = [f"data_batch_{n}" for n in range(1, 6)]


@dataclass(frozen=True)
class Layout:
    """The files a data set can be read from, and how; `read` takes them and the words for where they lie."""

    names: frozenset[str]
    read: Callable[[Files, str], Pictures]


def plain(name: str) -> str:
    """The publisher's name of a file that may be zipped or renamed as unpacking programs do.

    >>> plain("train-images.idx3-ubyte.gz")
    'train-images-idx3-ubyte'
    """
    return name.removesuffix(".gz").replace(".idx", "-idx")


def idx(data: bytes, what: str = "The IDX file") -> NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes, gzipped or not.

    >>> idx(bytes([0, 0, 8, 2, 0, 0, 0, 1, 0, 0, 0, 3, 7, 8, 9])).tolist()
    [[7, 8, 9]]
    """
    file = io.BytesIO(data)
    stream = gzip.GzipFile(fileobj=file) if data[:2] == b"\x1f\x8b" else file
    try:
        head = stream.read(4)
        if len(head) < 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 4:
            raise Refused(f"{what} is not an IDX file of unsigned bytes; put the publisher's own file there.")
        shape = struct.unpack(f">{head[3]}I", stream.read(4 * head[3]))
        size = math.prod(shape)
        if size > LARGEST:
            raise Refused(
                f"{what} claims {size:,} bytes, more than the {LARGEST:,} that are read; is it the right file?"
            )
        body = _at_most(size + 1, stream)  # one more than promised, so that a file which is too long is noticed
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise Refused(f"{what} is damaged or cut short ({_reason(error)}); download that file again.") from error
    if len(body) != size:
        held = f"{len(body):,}" if len(body) < size else "more"
        raise Refused(f"{what} promises {size:,} bytes and holds {held}; download that file again.")
    return np.frombuffer(body, np.uint8).reshape(shape)


def sheet(data: bytes, what: str = "The sheet") -> NDArray[np.uint8]:
    """The 32×32 colour pictures of a PNG sheet, whose pixels in row order are the pictures one after another.

    >>> png = io.BytesIO()
    >>> Image.new("RGB", (1024, 2), "red").save(png, "PNG")
    >>> sheet(png.getvalue()).shape
    (2, 3, 32, 32)
    """
    if data[:8] != b"\x89PNG\r\n\x1a\n" or data[12:16] != b"IHDR" or len(data) < 26:
        raise Refused(f"{what} is not a PNG file; put the file of the package there.")
    width, height, depth, colour = struct.unpack(">IIBB", data[16:26])
    if not 0 < width * height <= _SHEET or width * height % 1024 or (depth, colour) != (8, 2):
        raise Refused(f"{what} of {width}×{height} pixels is not a sheet of 32×32 pictures in 8-bit red, green, blue.")
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as picture:
            if picture.size != (width, height) or picture.mode != "RGB":  # a second header came after the first
                raise ValueError("two headers")
            pixels = np.asarray(picture, np.uint8)
    except Exception as error:  # whatever a decoder raises on a broken file
        raise Refused(f"{what} is damaged or cut short ({_reason(error)}); download that file again.") from error
    return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)


def from_folder(layout: Layout, folder: Path) -> Pictures:
    """The pictures in a folder of the publisher's files.

    >>> from_folder(MNIST, Path("nowhere"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.Refused: The folder nowhere cannot be read (...); name the folder with the publisher's files.
    """
    where, files = f"The folder {folder}", dict[str, bytes]()
    try:
        for path in sorted(folder.expanduser().iterdir()):  # sorted: an unzipped file comes before its .gz twin
            name = plain(path.name)
            if name not in layout.names or name in files or not path.is_file():
                continue
            check_entry(path, folder.expanduser())
            if path.stat().st_size > LARGEST:
                raise Refused(f"{where} has a file {path.name} that is too large for {name}; is it the right file?")
            files[name] = path.read_bytes()
    except (OSError, RuntimeError) as error:  # RuntimeError: a ~ that stands for nobody's home
        raise Refused(f"{where} cannot be read ({error}); name the folder with the publisher's files.") from error
    return layout.read(files, where)


def from_archive(layout: Layout, file: io.BufferedReader, where: str) -> Pictures:
    """The pictures in a package of a registry, a .tgz or a .deb, read in memory; no path in it is ever written to.

    >>> from_archive(MNIST, io.BufferedReader(io.BytesIO(b"nonsense")), "The archive")
    Traceback (most recent call last):
    fedtailor.errors.Refused: The archive cannot be unpacked (truncated header); fetch it again.
    """
    try:
        data = file.read()
        files = _members(_unpacked(_deb_data(data) if data.startswith(_AR) else data), layout)
    except (tarfile.TarError, lzma.LZMAError, zlib.error, OSError, EOFError) as error:
        raise Refused(f"{where} cannot be unpacked ({_reason(error)}); fetch it again.") from error
    return layout.read(files, where)


def _reason(error: Exception) -> str:
    """What an error says, as a part of a sentence."""
    return str(error).partition("\n")[0].partition(". ")[0].rstrip(" .")[:100] or type(error).__name__


def _at_most(size: int, stream: io.BufferedIOBase) -> bytes:
    """What a stream holds, up to a size; memory is only taken for what comes."""
    parts: list[bytes] = []
    while size > 0 and (part := stream.read(min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _deb_data(data: bytes) -> bytes:
    """The data.tar.* of a Debian package: an `ar` container, in which every member follows a header of 60 bytes."""
    at = len(_AR)
    while len(header := data[at : at + 60]) == 60:
        digits, at = header[48:58].strip(), at + 60
        if not digits.isdigit():
            raise tarfile.ReadError("a member without a size")
        if header.startswith(b"data.tar"):
            return data[at : at + int(digits)]
        at += int(digits) + int(digits) % 2  # members start at even places
    raise tarfile.ReadError("no data.tar in it")


def _unpacked(data: bytes) -> bytes:
    """What gzip or xz has packed."""
    if data.startswith(b"\x1f\x8b"):
        unpacked = _at_most(LARGEST + 1, gzip.GzipFile(fileobj=io.BytesIO(data)))
    elif data.startswith(b"\xfd7zXZ\0"):
        xz = lzma.LZMADecompressor(lzma.FORMAT_XZ, _UNPACKER)
        unpacked = xz.decompress(data, LARGEST + 1)
        if not xz.eof and len(unpacked) <= LARGEST:
            raise EOFError("cut short")
    else:
        unpacked = data
    if len(unpacked) > LARGEST:
        raise tarfile.ReadError("it unpacks to more than a data set")
    return unpacked


def _members(data: bytes, layout: Layout) -> Files:
    """The publisher's files in a tar. Its headers are walked through here, for the tarfile of Python 3.11 runs in a
    circle where a size is below 0, and takes hours over some headers of its own kinds; these are passed over."""
    files, at = dict[str, bytes](), 0
    while (block := data[at : at + tarfile.BLOCKSIZE]).strip(b"\0") or not at:
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        at += tarfile.BLOCKSIZE
        size = 0 if member.type in _EMPTY else member.size
        if not 0 <= size <= len(data) - at:
            raise tarfile.ReadError("a member is cut short")
        name = plain(PurePosixPath(member.name).name)
        if member.isreg() and name in layout.names:
            files[name] = data[at : at + size]
        at += -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    return files


def _take(files: Files, names: list[str], where: str, hint: str) -> list[bytes]:
    missing = [name for name in names if name not in files]
    if missing:
        raise Refused(f"{where} has no {', '.join(missing)}; {hint}.")
    return [files[name] for name in names]


def _joined(parts: list[Pictures], where: str) -> Pictures:
    """The parts one after another, once every picture is known to have a label and a size like the others."""
    for x, y in parts:
        if not len(x) or len(x) != len(y):
            raise Refused(
                f"{where} has {len(x):,} pictures with {len(y):,} labels; put the files of one data set there."
            )
        if x.shape[1:] != parts[0][0].shape[1:]:
            raise Refused(f"{where} has pictures of several sizes; put the files of one data set there.")
        if y.min() < 0 or y.max() >= CLASSES:
            raise Refused(f"{where} has a label outside 0 to {CLASSES - 1}; put the files of one data set there.")
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return np.ascontiguousarray(x), y


def _mnist(files: Files, where: str) -> Pictures:
    parts: list[Pictures] = []
    for part in ("train", "t10k"):
        names = [f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"]
        found = _take(files, names, where, "put the publisher's four IDX files there, gzipped or not")
        x, y = (idx(data, f"{where} has a file {name} that") for data, name in zip(found, names, strict=True))
        if x.ndim != 3 or y.ndim != 1:
            raise Refused(
                f"{where} has {part} files that are not pictures and labels; put the publisher's files there."
            )
        parts.append((x[:, None], y.astype(np.int64)))
    return _joined(parts, where)


def _numbers(data: bytes, what: str) -> NDArray[np.int64]:
    try:
        values = json.loads(data) if len(data) <= _LABELS else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < CLASSES for value in values):
        raise Refused(
            f"{what} is not a JSON list of labels from 0 to {CLASSES - 1}; put the file of the package there."
        )
    return np.array(values, np.int64)


def _records(data: bytes, what: str) -> Pictures:
    if not data or len(data) % _RECORD:
        raise Refused(f"{what} is not made of records of {_RECORD:,} bytes; download that file again.")
    table = np.frombuffer(data, np.uint8).reshape(-1, _RECORD)
    return table[:, 1:].reshape(-1, 3, 32, 32), table[:, 0].astype(np.int64)


def _cifar10(files: Files, where: str) -> Pictures:
    sheets = [f"{part}.png" for part in [*_PARTS, "test_batch"]]
    if not any(name in files for name in sheets):
        names = [f"{part}.bin" for part in [*_PARTS, "test_batch"]]
        hint = "put the publisher's binary version there, as the Python version is pickled and never opened"
        found = _take(files, names, where, hint)
        return _joined([_records(d, f"{where} has a file {n} that") for d, n in zip(found, names, strict=True)], where)
    names = [*sheets, "train_lables.json", "test_lables.json"]  # spelt so in the package
    found = _take(files, names, where, "put all the sheets and label files of the package there")
    *pictures, test = [sheet(d, f"{where} has a file {n} that") for d, n in zip(found[:6], sheets, strict=True)]
    y, test_y = (_numbers(d, f"{where} has a file {n} that") for d, n in zip(found[6:], names[6:], strict=True))
    return _joined([(np.concatenate(pictures), y), (test, test_y)], where)


MNIST = Layout(
    frozenset(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")),
    _mnist,
)
CIFAR10 = Layout(
    frozenset(
        [f"{part}.{end}" for part in [*_PARTS, "test_batch"] for end in ("png", "bin")]
        + ["train_lables.json", "test_lables.json"]
    ),
    _cifar10,
)
