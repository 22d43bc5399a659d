"""Reader of pickled pandas data frames in an untrusted file, with `PickleMachine`.

It knows the few names in a pickle of protocol 0 or 1 that pandas 1 wrote, and maps them to stand-ins without behavior:
neither pandas nor any other code is called. A data frame becomes a dict of its columns, which are views of the bytes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.formats.numpy_pickle import ARRAY_NAMES, PickledArray
from fedtailor.data.formats.pickle_machine import Names, PickleMachine
from fedtailor.errors import DataError, FedTailorError

Columns = dict[str, NDArray[Any]]  # name -> values

_MAX_OPERATIONS = 200_000  # a data frame takes about 350, however many rows it has
_NO_FRAMES = "It does not contain a dict of lists of data frames with columns of numbers"


def unpickle_data_frames(data: bytes) -> dict[int, list[Columns]]:
    """Return the columns of the data frames in a pickled dict of lists of data frames.

    >>> import pickle
    >>> unpickle_data_frames(pickle.dumps({1: []}, protocol=1))
    {1: []}
    """
    too_long = f"{_NO_FRAMES}: it has more than {_MAX_OPERATIONS:,} operations."
    try:
        content = PickleMachine(_names(len(data)), _MAX_OPERATIONS, too_long).run(data)
        return {int(key): [dict(frame.columns()) for frame in frames] for key, frames in content.items()}
    except FedTailorError:
        raise
    except Exception as error:  # a malformed program fails in many ways
        raise DataError(f"{_NO_FRAMES}.") from error


class _Latin1Encoder:
    """`codecs.encode(text, "latin1")`: protocols 0 to 2 contain bytes as text.

    A pickle can name the same text many times, so the bytes of all results together are limited to its own size.
    """

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes

    def __call__(self, text: str, encoding: str) -> bytes:
        self._left -= len(text)
        if encoding != "latin1" or self._left < 0:
            raise DataError("It contains a pickle that encodes more text than it contains, or not as latin1.")
        return text.encode("latin1")


class _Index:
    """The names of a data frame's columns, or the numbers of its rows, which are ignored."""

    def __init__(self, kind: Any, content: dict[str, Any]) -> None:
        data = content.get("data")
        self.names: list[str] = data.value if isinstance(data, PickledArray) else []


class _BlockManager:
    """The content of a data frame: blocks of columns with the same dtype, values [columns, rows]."""

    def set_state(self, state: tuple[Any, ...]) -> None:
        content = state[3]["0.14.1"]  # the version of pandas that introduced this layout
        self.names: list[str] = content["axes"][0].names
        self.blocks = [(block["values"].value, block["mgr_locs"]) for block in content["blocks"]]


class _DataFrame:
    def set_state(self, state: dict[str, Any]) -> None:
        self._content: _BlockManager = state["_data"]

    def columns(self) -> Iterator[tuple[str, NDArray[Any]]]:
        for values, place in self._content.blocks:
            names = self._content.names[place]
            valid = isinstance(values, np.ndarray) and values.ndim == 2 and len(values) == len(names)
            if not valid or not all(isinstance(name, str) for name in names):  # nested lists may not fit into a string
                raise DataError(f"{_NO_FRAMES}.")
            yield from zip(names, values, strict=True)


def _reconstruct(kind: Any, *_: Any) -> Any:
    """Stand in for `copyreg._reconstructor`, which makes an empty object of a class."""
    if kind is not _DataFrame and kind is not _BlockManager:
        raise DataError(f"{_NO_FRAMES}.")
    return kind()


def _names(max_bytes: int) -> Names:
    """Return the names that a pickle may contain; `max_bytes` limits the bytes that it makes from text."""
    return {
        **ARRAY_NAMES,
        ("_codecs", "encode"): _Latin1Encoder(max_bytes),
        ("copy_reg", "_reconstructor"): _reconstruct,
        ("__builtin__", "object"): None,
        ("__builtin__", "slice"): slice,
        ("pandas.core.frame", "DataFrame"): _DataFrame,
        ("pandas.core.internals.managers", "BlockManager"): _BlockManager,
        ("pandas.core.indexes.base", "_new_Index"): _Index,
        ("pandas.core.indexes.base", "Index"): None,
        ("pandas.core.indexes.range", "RangeIndex"): None,
    }
