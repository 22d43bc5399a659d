"""FEMNIST: handwritten digits and letters of 3,550 people."""

import string
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.leaf.files import User, read_users
from fedtailor.data.leaf.table import make_table, to_labels, to_numbers
from fedtailor.data.sample_table import Array, SampleTable

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase  # in the order of LEAF's labels
_SIDE = 28  # pixels
_PIXELS = np.arange(256, dtype=np.float32) / np.float32(255)  # what training makes of bytes


def read_femnist(folder: Path) -> SampleTable:
    """Return LEAF's FEMNIST: x uint8 [n, 1, 28, 28] with 255 as white, y from 0 to 61 (0-9, A-Z, a-z), and the writers.

    LEAF writes each pixel as k / 255. If other values occur, x is float32 instead.
    """
    return make_table(read_users(folder, "femnist"), _convert, CHARACTERS, _join)


def _convert(user: User) -> tuple[Array, NDArray[np.int64]]:
    pixels = to_numbers(user.x, "images that are not lists of 784 numbers")
    if pixels.shape != (len(user.y), _SIDE**2):
        raise ValueError("has images that are not lists of 784 numbers")
    if not 0 <= pixels.min() <= pixels.max() <= 1:
        raise ValueError("has pixels that are not from 0 to 1")
    images = pixels.reshape(-1, 1, _SIDE, _SIDE)
    return _to_bytes(images), to_labels(user.y, len(CHARACTERS))


def _to_bytes(images: Array) -> Array:
    """Return images as bytes if these are the same numbers in training, otherwise as float32."""
    numbers, as_bytes = images.astype(np.float32), np.rint(images * 255).astype(np.uint8)
    return as_bytes if np.array_equal(_PIXELS[as_bytes], numbers) else numbers


def _join(blocks: list[Array]) -> Array:
    if all(block.dtype == np.uint8 for block in blocks):
        return np.concatenate(blocks)
    return np.concatenate([_PIXELS[block] if block.dtype == np.uint8 else block for block in blocks])
