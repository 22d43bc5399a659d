"""The letters a to j of FEMNIST or EMNIST, which Self-FL and FedProx use."""

from dataclasses import replace

import numpy as np

from fedtailor.data.leaf.femnist import CHARACTERS
from fedtailor.data.sample_table import SampleTable

LETTERS = "abcdefghij"
_FIRST = CHARACTERS.index(LETTERS[0])


def select_letters(table: SampleTable) -> SampleTable:
    """Return the samples of the letters a to j, which get the labels 0 to 9; the table has LEAF's 62 labels.

    >>> select_letters(SampleTable(np.zeros(3), np.array([36, 5, 45]), 62)).y
    array([0, 9])
    """
    rows = np.flatnonzero((table.y >= _FIRST) & (table.y < _FIRST + len(LETTERS)))
    assert isinstance(table.x, np.ndarray)
    return replace(
        table,
        x=table.x[rows],
        y=table.y[rows] - _FIRST,
        classes=len(LETTERS),
        owner=None if table.owner is None else table.owner[rows],
        is_test=None if table.is_test is None else table.is_test[rows],
        class_names=tuple(LETTERS),
    )
