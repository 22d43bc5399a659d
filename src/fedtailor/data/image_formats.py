"""Readers of untrusted image data sets in the publishers' formats: IDX, CIFAR-10's binary version, and PNG sheets.

Pickles are never opened, and every size that a file declares is compared with a limit before memory is allocated.
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
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedtailor.data.folder_entries import check_entry
from fedtailor.data.sample_table import SampleTable
from fedtailor.errors import DataError, reason

Images = tuple[NDArray[np.uint8], NDArray[np.int64]]  # x [n, channels, height, width] and y [n]
Files = Mapping[str, bytes]  # content by the publisher's file name

MAX_FILE_BYTES = 1 << 30  # of one file; twice the largest published IDX file
_MAX_SHEET_PIXELS = 1 << 24  # of one sheet; the published ones have 10,240,000, and pillow warns from 89 million
_MAX_LABEL_BYTES = 1 << 20  # of a list of labels; the published ones have 150,000
NUM_CLASSES = 10  # of each data set here
_AR_MAGIC = b"!<arch>\n"  # start of a Debian package, which is an ar archive
_RECORD = 1 + 3 * 32 * 32  # bytes per image in CIFAR-10's binary version: the label, then three planes of color
_PARTS = [f"data_batch_{n}" for n in range(1, 6)]


@dataclass(frozen=True)
class Layout:
    """The file names of a data set and its reader; `read` takes the files and a description of their location."""

    names: frozenset[str]
    read: Callable[[Files, str], SampleTable]


def publisher_name(name: str) -> str:
    """Return the publisher's name of a file that may be gzipped, or renamed as some unpacking programs do.

    >>> publisher_name("train-images.idx3-ubyte.gz")
    'train-images-idx3-ubyte'
    """
    return name.removesuffix(".gz").replace(".idx", "-idx")


def parse_idx(data: bytes, what: str = "The IDX file") -> NDArray[np.uint8]:
    """Return the array in an IDX file of unsigned bytes, gzipped or not.

    >>> parse_idx(bytes([0, 0, 8, 2, 0, 0, 0, 1, 0, 0, 0, 3, 7, 8, 9])).tolist()
    [[7, 8, 9]]
    """
    file = io.BytesIO(data)
    stream = gzip.GzipFile(fileobj=file) if data[:2] == b"\x1f\x8b" else file
    try:
        head = stream.read(4)
        if len(head) < 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 4:
            raise DataError(f"{what} is not an IDX file of unsigned bytes; replace it with the publisher's file.")
        shape = struct.unpack(f">{head[3]}I", stream.read(4 * head[3]))
        size = math.prod(shape)
        if size > MAX_FILE_BYTES:
            raise DataError(
                f"{what} declares {size:,} bytes; the limit is {MAX_FILE_BYTES:,}, so it may be the wrong file."
            )
        body = _read_at_most(size + 1, stream)  # one more byte, to detect a file that is too long
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise DataError(f"{what} is damaged or truncated ({reason(error)}); download it again.") from error
    if len(body) != size:
        actual = f"{len(body):,}" if len(body) < size else "more"
        raise DataError(f"{what} declares {size:,} bytes but contains {actual}; download it again.")
    return np.frombuffer(body, np.uint8).reshape(shape)


def _read_at_most(size: int, stream: io.BufferedIOBase) -> bytes:
    """Read up to `size` bytes of a stream; memory grows only with the data that is read."""
    parts: list[bytes] = []
    while size > 0 and (part := stream.read(min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def parse_sheet(data: bytes, what: str = "The sheet") -> NDArray[np.uint8]:
    """Return the 32×32 color images of a PNG sheet, whose pixels in row order are the concatenated images.

    >>> png = io.BytesIO()
    >>> Image.new("RGB", (1024, 2), "red").save(png, "PNG")
    >>> parse_sheet(png.getvalue()).shape
    (2, 3, 32, 32)
    """
    if data[:8] != b"\x89PNG\r\n\x1a\n" or data[12:16] != b"IHDR" or len(data) < 26:
        raise DataError(f"{what} is not a PNG file; replace it with the file of the package.")
    width, height, depth, color_type = struct.unpack(">IIBB", data[16:26])
    if not 0 < width * height <= _MAX_SHEET_PIXELS or width * height % 1024 or (depth, color_type) != (8, 2):
        raise DataError(f"{what} of {width}×{height} pixels is not a sheet of 32×32 images in 8-bit RGB.")
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            if image.size != (width, height) or image.mode != "RGB":  # a second header follows the first
                raise ValueError("two headers")
            pixels = np.asarray(image, np.uint8)
    except Exception as error:  # decoders raise many types on broken files
        raise DataError(f"{what} is damaged or truncated ({reason(error)}); download it again.") from error
    return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)


def read_publisher_folder(layout: Layout, folder: Path) -> SampleTable:
    """Return the images in a folder of the publisher's files.

    >>> read_publisher_folder(MNIST, Path("nowhere"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.DataError: The folder nowhere cannot be read (...); use the folder with the publisher's files.
    """
    where, files = f"The folder {folder}", dict[str, bytes]()
    try:
        for path in sorted(folder.expanduser().iterdir()):  # sorted, so that a file comes before its gzipped copy
            name = publisher_name(path.name)
            if name not in layout.names or name in files or not path.is_file():
                continue
            check_entry(path, folder.expanduser())
            if path.stat().st_size > MAX_FILE_BYTES:
                raise DataError(f"{where} has a file {path.name} that is too large; is it the right file?")
            files[name] = path.read_bytes()
    except (OSError, RuntimeError) as error:  # RuntimeError: expanduser finds no home folder
        raise DataError(f"{where} cannot be read ({error}); use the folder with the publisher's files.") from error
    return layout.read(files, where)


def read_archive(layout: Layout, file: BinaryIO, where: str) -> SampleTable:
    """Return the images in a registry's package, a .tgz or .deb, which is unpacked in memory and never to disk.

    The caller must have compared the archive's checksum: Python 3.11 loops forever on some invalid archives.

    >>> read_archive(MNIST, io.BytesIO(b"nonsense"), "The file")
    Traceback (most recent call last):
    fedtailor.errors.DataError: The file cannot be unpacked (file could not be opened successfully); download it again.
    """
    try:
        data = file.read()
        with tarfile.open(fileobj=io.BytesIO(_deb_data(data) if data.startswith(_AR_MAGIC) else data)) as archive:
            files = _read_members(archive, layout)
    except (tarfile.TarError, lzma.LZMAError, zlib.error, OSError, EOFError) as error:
        raise DataError(f"{where} cannot be unpacked ({reason(error)}); download it again.") from error
    return layout.read(files, where)


def _read_members(archive: tarfile.TarFile, layout: Layout) -> Files:
    files = dict[str, bytes]()
    for member in archive:
        name = publisher_name(PurePosixPath(member.name).name)
        if name in layout.names and (stream := archive.extractfile(member) if member.isreg() else None):
            if member.size > MAX_FILE_BYTES:
                raise tarfile.ReadError(f"{name} is larger than a data set")
            files[name] = stream.read()
    return files


def _deb_data(data: bytes) -> bytes:
    """Return the data.tar.* of a Debian package: an `ar` archive, in which each member follows a header of 60 bytes."""
    offset = len(_AR_MAGIC)
    while len(header := data[offset : offset + 60]) == 60:
        digits, offset = header[48:58].strip(), offset + 60
        if not digits.isdigit():
            raise tarfile.ReadError("a member without a size")
        if header.startswith(b"data.tar"):
            return data[offset : offset + int(digits)]
        offset += int(digits) + int(digits) % 2  # members start at even offsets
    raise tarfile.ReadError("it contains no data.tar")


def _require_files(files: Files, names: list[str], where: str, hint: str) -> list[bytes]:
    missing = [name for name in names if name not in files]
    if missing:
        raise DataError(f"{where} has no {', '.join(missing)}; {hint}.")
    return [files[name] for name in names]


def _concatenate(parts: list[Images], where: str) -> SampleTable:
    """Concatenate the training and the test set; check that all images have a valid label and the same size."""
    hint = "it must contain the files of one data set"
    for x, y in parts:
        if not len(x) or len(x) != len(y):
            raise DataError(f"{where} has {len(x):,} images but {len(y):,} labels; {hint}.")
        if x.shape[1:] != parts[0][0].shape[1:]:
            raise DataError(f"{where} has images of several sizes; {hint}.")
        if y.min() < 0 or y.max() >= NUM_CLASSES:
            raise DataError(f"{where} has a label outside 0 to {NUM_CLASSES - 1}; {hint}.")
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    is_test = np.arange(len(y)) >= len(y) - len(parts[-1][1])
    return SampleTable(np.ascontiguousarray(x), y, NUM_CLASSES, is_test=is_test)


def _read_mnist(files: Files, where: str) -> SampleTable:
    parts: list[Images] = []
    for part in ("train", "t10k"):
        names = [f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"]
        found = _require_files(files, names, where, "it must contain the publisher's four IDX files, gzipped or not")
        x, y = (parse_idx(data, f"{where} has a file {name} that") for data, name in zip(found, names, strict=True))
        if x.ndim != 3 or y.ndim != 1:
            raise DataError(f"{where} has {part} files that are not images and labels; use the publisher's files.")
        parts.append((x[:, None], y.astype(np.int64)))
    return _concatenate(parts, where)


def _parse_labels(data: bytes, what: str) -> NDArray[np.int64]:
    try:
        values = json.loads(data) if len(data) <= _MAX_LABEL_BYTES else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < NUM_CLASSES for value in values):
        raise DataError(
            f"{what} is not a JSON list of labels from 0 to {NUM_CLASSES - 1}; replace it with the file of the package."
        )
    return np.array(values, np.int64)


def _parse_records(data: bytes, what: str) -> Images:
    if not data or len(data) % _RECORD:
        raise DataError(f"{what} does not consist of records of {_RECORD:,} bytes; download it again.")
    table = np.frombuffer(data, np.uint8).reshape(-1, _RECORD)
    return table[:, 1:].reshape(-1, 3, 32, 32), table[:, 0].astype(np.int64)


def _read_cifar10(files: Files, where: str) -> SampleTable:
    sheets = [f"{part}.png" for part in [*_PARTS, "test_batch"]]
    if not any(name in files for name in sheets):
        names = [f"{part}.bin" for part in [*_PARTS, "test_batch"]]
        hint = "it must contain the publisher's binary version; the Python version is a pickle, which is never opened"
        found = _require_files(files, names, where, hint)
        return _concatenate(
            [_parse_records(d, f"{where} has a file {n} that") for d, n in zip(found, names, strict=True)], where
        )
    names = [*sheets, "train_lables.json", "test_lables.json"]  # the package spells them so
    found = _require_files(files, names, where, "it must contain all sheets and label files of the package")
    *train, test = [parse_sheet(d, f"{where} has a file {n} that") for d, n in zip(found[:6], sheets, strict=True)]
    y, test_y = (_parse_labels(d, f"{where} has a file {n} that") for d, n in zip(found[6:], names[6:], strict=True))
    return _concatenate([(np.concatenate(train), y), (test, test_y)], where)


MNIST = Layout(
    frozenset(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")),
    _read_mnist,
)
CIFAR10 = Layout(
    frozenset(
        [f"{part}.{end}" for part in [*_PARTS, "test_batch"] for end in ("png", "bin")]
        + ["train_lables.json", "test_lables.json"]
    ),
    _read_cifar10,
)
