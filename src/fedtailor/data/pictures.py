"""Picture files from whoever's hands: PNG, JPEG, BMP, TIFF and WebP, as bytes."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedtailor.errors import Refused

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp"}
_FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP")  # no others: to open an EPS, pillow would run another program
_BYTES = 2**30  # of one file: twice the largest there can be of so many pixels
_PIXELS = 2**26  # 8192×8192: below where pillow warns, above what anybody trains on whole
_SCANS = 100  # of one JPEG: programs write about ten, and every further one takes time and hardly a byte


def is_picture(path: Path) -> bool:
    """Whether a path is a file that calls itself a picture.

    >>> is_picture(Path("nowhere.png"))
    False
    """
    return path.suffix.lower() in _SUFFIXES and path.is_file()


def read_size(path: Path) -> tuple[int, int]:
    """Width and height of a picture, of which only the header is looked at."""
    with _opened(path) as picture:
        return picture.size


def read_picture(path: Path, size: tuple[int, int]) -> NDArray[np.uint8] | None:
    """A picture of this width and height as bytes, [channels, height, width], grey or in colour. Of another size: None,
    and nothing is unpacked."""
    with _opened(path) as picture:
        mode = picture.mode
        if picture.size != size:
            return None
        if mode in ("I", "F"):  # no known range, so no way to make bytes of them
            raise Refused(f"'{path.name}' in '{path.parent}' has 32-bit pixels; save it with 8 or 16 bits, or as .npz.")
        pixels: NDArray[Any]
        if mode.startswith("I;16"):  # sixteen bits of grey, as scanners write: keep the upper eight
            pixels = (np.asarray(picture) >> 8).astype(np.uint8)
        else:
            pixels = np.asarray(picture.convert("L" if mode in ("1", "L", "LA") else "RGB"))
        return np.moveaxis(np.atleast_3d(pixels), 2, 0)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    where = f"'{path.name}' in '{path.parent}'"
    try:
        if path.stat().st_size > _BYTES:
            raise Refused(f"{where} is too large for a picture.")
        content = path.read_bytes()
        with Image.open(io.BytesIO(content), formats=_FORMATS) as picture:
            if picture.width * picture.height > _PIXELS:
                raise Refused(
                    f"{where} has {picture.width}×{picture.height} pixels, too many to train on; scale it down."
                )
            if picture.format in ("JPEG", "MPO") and content.count(b"\xff\xda") > _SCANS:
                raise Refused(f"{where} paints itself over more than {_SCANS} times; save it again.")
            yield picture
    except Refused:
        raise
    except Exception as error:  # whatever a decoder raises on a broken file
        raise Refused(f"{where} is not a picture that can be read.") from error
