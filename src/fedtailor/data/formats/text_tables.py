"""Reader of untrusted text that contains a table of numbers."""

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.memory_limits import check_memory
from fedtailor.errors import DataError

_EXPANSION = 8  # bytes in memory per character of a file: a number of two characters takes 8 bytes, and is copied


def read_table(path: Path, columns: int, delimiter: str | None = None) -> NDArray[np.float64]:
    """Return the numbers in a text file; see `parse_table`.

    >>> read_table(Path("nowhere.csv"), 8)
    Traceback (most recent call last):
    fedtailor.errors.DataError: 'nowhere.csv' cannot be read: No such file or directory.
    """
    try:
        check_memory(_EXPANSION * path.stat().st_size, f"'{path}'")
        return parse_table(path.read_bytes(), columns, delimiter, f"'{path}'")
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}.") from error


def parse_table(content: bytes, columns: int, delimiter: str | None, what: str) -> NDArray[np.float64]:
    """Return the rows of a text, each with `columns` finite numbers; the delimiter None is white space.

    >>> parse_table(b"1,2\\n3,4\\n", 2, ",", "The file").tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of an empty file, which is an error below
        try:
            table: NDArray[Any] = np.loadtxt(
                io.BytesIO(content), np.float64, comments=None, delimiter=delimiter, ndmin=2, encoding="utf-8"
            )
        except ValueError:
            table = np.empty((0, columns))
    if table.shape[1] != columns or not len(table) or not np.isfinite(table).all():
        raise DataError(f"{what} must contain rows of {columns} numbers; download it again.")
    return table
