"""Reader of untrusted image files: PNG, JPEG, BMP, TIFF, and WebP."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedtailor.errors import DataError, FedTailorError

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp"}
_FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP")  # for other formats such as EPS, pillow would run an external program
_MAX_BYTES = 2**30  # of one file; twice the largest possible file with _MAX_PIXELS pixels
_MAX_PIXELS = 2**26  # 8192×8192; below the limit where pillow warns
_MAX_SCANS = 100  # of one JPEG; programs write about ten, and each takes time to decode but few bytes


def is_image(path: Path) -> bool:
    """Return whether a path is a file with an image suffix.

    >>> is_image(Path("nowhere.png"))
    False
    """
    return path.suffix.lower() in _SUFFIXES and path.is_file()


def read_image_size(path: Path) -> tuple[int, int]:
    """Return the width and height of an image from its header."""
    with _opened(*_read(path)) as image:
        return image.size


def read_image(path: Path, size: tuple[int, int]) -> NDArray[np.uint8] | None:
    """Return an image as uint8, [channels, height, width] with 1 or 3 channels.

    If its (width, height) is not `size`, return None without decoding it.
    """
    return decode_image(*_read(path), size)


def decode_image(content: bytes, where: str, size: tuple[int, int]) -> NDArray[np.uint8] | None:
    """Return the image in the content of a file, as `read_image` does; `where` starts error messages.

    >>> file = io.BytesIO()
    >>> Image.new("L", (4, 2)).save(file, "PNG")
    >>> decode_image(file.getvalue(), "'a.png'", (4, 2)).shape
    (1, 2, 4)
    """
    with _opened(content, where) as image:
        mode = image.mode
        if image.size != size:
            return None
        if mode in ("I", "F"):  # the range of values is unknown, so they cannot be converted to bytes
            raise DataError(f"{where} has 32-bit pixels; save it with 8 or 16 bits or as .npz.")
        pixels: NDArray[Any]
        if mode.startswith("I;16"):  # 16-bit gray, as scanners write: keep the upper 8 bits
            pixels = (np.asarray(image) >> 8).astype(np.uint8)
        else:
            pixels = np.asarray(image.convert("L" if mode in ("1", "L", "LA") else "RGB"))
        return np.moveaxis(np.atleast_3d(pixels), 2, 0)


def _read(path: Path) -> tuple[bytes, str]:
    """Return the content of a file and its name for error messages."""
    where = f"'{path.name}' in '{path.parent}'"
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{where} is too large for an image file.")
        return path.read_bytes(), where
    except OSError as error:
        raise DataError(f"{where} cannot be read as an image; remove or replace it.") from error


@contextmanager
def _opened(content: bytes, where: str) -> Iterator[Image.Image]:
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise DataError(f"{where} has too many pixels ({image.width}×{image.height}); scale it down.")
            if image.format in ("JPEG", "MPO") and content.count(b"\xff\xda") > _MAX_SCANS:
                raise DataError(f"{where} has more than {_MAX_SCANS} scans; save it again as an ordinary JPEG.")
            yield image
    except FedTailorError:
        raise
    except Exception as error:  # decoders raise many types on broken files
        raise DataError(f"{where} cannot be read as an image; remove or replace it.") from error
