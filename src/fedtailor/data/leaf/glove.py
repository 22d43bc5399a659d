"""GloVe vectors of a vocabulary, from a file of the publisher such as glove.6B.300d.txt."""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.memory_limits import check_memory
from fedtailor.errors import DataError

_MAX_LINE = 2**16  # bytes; a word and 300 numbers take about 3,000


def glove_matrix(path: str | Path, vocabulary: Sequence[str]) -> NDArray[np.float32]:
    """Return one row per token: row k is the vector of the k-th word, and row 0 (padding and unknown words) is zero.

    Words that the file does not have are zero, too. Save the matrix with `np.save` for a network's frozen embedding.

    >>> glove_matrix("nowhere.txt", ["good", "bad"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.DataError: 'nowhere.txt' cannot be read: No such file or directory; ...
    """
    path = Path(path)
    token_of = {word.encode(): token for token, word in enumerate(vocabulary, start=1)}
    try:
        if path.exists() and not path.is_file():  # reading a pipe may never end
            raise DataError(f"'{path}' is not a file.")
        with path.open("rb") as file:
            return _read(file, token_of)
    except OSError as error:
        source = "download glove.6B.zip from https://nlp.stanford.edu/projects/glove and unpack it"
        raise DataError(f"'{path}' cannot be read: {error.strerror}; {source}.") from error
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"'{path}' is not a file of GloVe vectors: {error}.") from error


def _read(file: BinaryIO, token_of: dict[bytes, int]) -> NDArray[np.float32]:
    width = file.readline(_MAX_LINE).count(b" ")
    if not width:
        raise ValueError("its first line is not a word and numbers")
    check_memory(4 * width * (len(token_of) + 1), "The matrix of word vectors")
    matrix = np.zeros((len(token_of) + 1, width), np.float32)
    file.seek(0)
    number = 0
    while line := file.readline(_MAX_LINE):
        number += 1
        word, *numbers = line.rstrip(b"\n").rsplit(b" ", width)
        if len(numbers) != width:
            raise ValueError(f"line {number} does not have {width} numbers")
        if (token := token_of.get(word)) is not None:
            matrix[token] = _to_vector(numbers, number)
    return matrix


def _to_vector(numbers: list[bytes], line: int) -> NDArray[np.float32]:
    try:
        vector = np.array([float(number) for number in numbers], np.float32)
    except ValueError as error:
        raise ValueError(f"line {line} contains text after its word") from error
    if not np.isfinite(vector).all():
        raise ValueError(f"line {line} contains NaN or infinity")
    return vector
