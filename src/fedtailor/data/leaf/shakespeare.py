"""Shakespeare: the next character in the lines of a role."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.leaf.files import User, read_users
from fedtailor.data.leaf.table import make_table
from fedtailor.data.sample_table import Array, SampleTable

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"  # LEAF's order
_NAMES = {"\n": "newline", " ": "space"}
_LENGTH = 80  # characters of an input
_NUMBERS = np.full(128, len(CHARACTERS) - 1)  # by code; the position -1 of unknown characters is the last one in LEAF
_NUMBERS[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))


def read_shakespeare(folder: Path) -> SampleTable:
    """Return LEAF's Shakespeare: x int32 [n, 80], y from 0 to 79, and the roles.

    y is the position in LEAF's list of 80 characters, and tokens are these positions plus 1, because networks take
    token 0 as padding. Other characters are read as the last one, as in LEAF.
    """
    names = [_NAMES.get(character, character) for character in CHARACTERS]
    return make_table(read_users(folder, "shakespeare", skipped=_LENGTH - 1), _convert, names, _join)


def _convert(user: User) -> tuple[Array, NDArray[np.int64]]:
    return (_encode(user.x, _LENGTH) + 1).astype(np.uint8), _encode(user.y, 1)[:, 0]


def _join(blocks: list[Array]) -> Array:
    return np.concatenate(blocks, dtype=np.int32)  # training would take bytes as pixels


def _encode(texts: list[object], length: int) -> NDArray[np.int64]:
    if not all(isinstance(text, str) and len(text) == length for text in texts):
        raise ValueError(f"has {'inputs' if length > 1 else 'targets'} that are not {length} characters")
    codes = np.frombuffer("".join(map(str, texts)).encode("utf-32-le", "surrogatepass"), np.uint32)
    return _NUMBERS[np.minimum(codes, 127)].reshape(-1, length)
