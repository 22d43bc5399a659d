"""Pickles of data frames as pandas 1 wrote them with protocol 1; newer versions of pandas cannot read them."""

import pickle
import pickletools
from typing import Any

import numpy as np

RECONSTRUCTOR, OBJECT = b"ccopy_reg\n_reconstructor\n", b"c__builtin__\nobject\n"
FRAME, MANAGER = b"cpandas.core.frame\nDataFrame\n", b"cpandas.core.internals.managers\nBlockManager\n"
NEW_INDEX, INDEX = b"cpandas.core.indexes.base\n_new_Index\n", b"cpandas.core.indexes.base\nIndex\n"
RANGE, SLICE = b"cpandas.core.indexes.range\nRangeIndex\n", b"c__builtin__\nslice\n"


def plain(value: Any) -> bytes:
    """Return the operations that make plain values and arrays."""
    return pickletools.optimize(pickle.dumps(value, protocol=1))[:-1].replace(b"numpy._core", b"numpy.core")


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def table(**entries: bytes) -> bytes:
    return b"}(" + b"".join(plain(name) + value for name, value in entries.items()) + b"u"


def data_frame(columns: dict[str, Any]) -> bytes:
    """Return the operations that make a data frame; columns of floats come before those of integers."""
    names = np.array(list(columns), dtype=object)
    rows = len(next(iter(columns.values())))
    index = call(NEW_INDEX, INDEX, table(data=plain(names), name=b"N"))
    numbers = call(NEW_INDEX, RANGE, table(name=b"N", start=plain(0), stop=plain(rows), step=plain(1)))
    axes, blocks, start = b"](" + index + numbers + b"e", b"", 0
    for dtype in (np.float64, np.int64):
        own = [np.asarray(values) for values in columns.values() if np.asarray(values).dtype == dtype]
        place = call(SLICE, *map(plain, (start, start + len(own), 1)))
        blocks += table(values=plain(np.stack(own)), mgr_locs=place)
        start += len(own)
    content = b"}(" + plain("0.14.1") + table(axes=axes, blocks=b"](" + blocks + b"e") + b"u"
    manager = call(RECONSTRUCTOR, MANAGER, OBJECT, b"N") + b"(" + axes + b"]]" + content + b"tb"
    state = table(_data=manager, _typ=plain("dataframe"), _metadata=b"]", attrs=b"}")
    return call(RECONSTRUCTOR, FRAME, OBJECT, b"N") + state + b"b"


def data_frames(frames: dict[int, list[dict[str, Any]]]) -> bytes:
    """Return the pickle of a dict of lists of data frames, given their columns."""
    items = (plain(key) + b"](" + b"".join(map(data_frame, own)) + b"e" for key, own in frames.items())
    return b"}(" + b"".join(items) + b"u."
