"""Shakespeare: the next character in the lines of a role."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.leaf.files import User, read_users
from fedtailor.data.leaf.table import make_table
from fedtailor.data.sample_table import Array, SampleTable

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"  # LEAF's order
_NAMES = {"\n": "newline", " ": "space"}
LENGTH = 80  # characters of an input
_NUMBERS = np.full(128, len(CHARACTERS) - 1)  # by code; the position -1 of unknown characters is the last one in LEAF
_NUMBERS[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))


def read_shakespeare(folder: Path) -> SampleTable:
    """Return LEAF's Shakespeare: x int32 [n, 80], y from 0 to 79, and the roles.

    y is the position in LEAF's list of 80 characters, and tokens are these positions plus 1, because networks take
    token 0 as padding. Other characters are read as the last one, as in LEAF.
    """
    return make_table(read_users(folder, "shakespeare", skipped=LENGTH - 1), _convert, character_names(), _join)


def character_names() -> tuple[str, ...]:
    """Return the names of the 80 classes.

    >>> character_names()[:3]
    ('newline', 'space', '!')
    """
    return tuple(_NAMES.get(character, character) for character in CHARACTERS)


def character_numbers(text: str) -> NDArray[np.int64]:
    """Return the position of each character in LEAF's list; that of others is the last one.

    >>> character_numbers("\\n !é")
    array([ 0,  1,  2, 79])
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return _NUMBERS[np.minimum(codes, 127)]


def _convert(user: User) -> tuple[Array, NDArray[np.int64]]:
    return (_encode(user.x, LENGTH) + 1).astype(np.uint8), _encode(user.y, 1)[:, 0]


def _join(blocks: list[Array]) -> Array:
    return np.concatenate(blocks, dtype=np.int32)  # training would take bytes as pixels


def _encode(texts: list[object], length: int) -> NDArray[np.int64]:
    if not all(isinstance(text, str) and len(text) == length for text in texts):
        raise ValueError(f"has {'inputs' if length > 1 else 'targets'} that are not {length} characters")
    return character_numbers("".join(map(str, texts))).reshape(-1, length)
