"""Sequences of characters, of which the next one is predicted.

A reader of texts returns a `SampleTable` with one row per character, in the order of each owner's text: `x` is the
token, and `y` the class. `cut_sequences` makes the samples from it, so that one cached table serves all settings.
"""

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.memory_limits import check_memory
from fedtailor.data.leaf.shakespeare import LENGTH
from fedtailor.data.sample_table import SampleTable
from fedtailor.errors import DataError

TEST_SHARE = 5  # the last fifth of an owner's text is for testing


def cut_sequences(text: SampleTable, step: int, min_characters: int = 1) -> SampleTable:
    """Return sequences of 80 characters as samples, whose class is the next character; a sequence starts every `step`
    characters of a role's text.

    The last fifth of a role's text is the test set. No character is in training and test sequences. Roles with fewer
    than `min_characters` are left out, and so are those that are too short for a test sequence.

    >>> one = SampleTable(np.ones(500, np.uint8), np.zeros(500, np.uint8), 80, np.zeros(500, int), ("a: B",))
    >>> cut_sequences(one, step=81).is_test
    array([False, False, False, False,  True])
    """
    assert isinstance(text.x, np.ndarray) and text.owner is not None
    lengths = np.bincount(text.owner, minlength=len(text.owner_names))
    ends = np.cumsum(lengths).tolist()
    parts = [_starts(first, end, step) for first, end in zip([0, *ends], ends, strict=False)]
    minimum = max(min_characters, TEST_SHARE * (LENGTH + 1))  # a test sequence and its class
    kept = np.flatnonzero(lengths >= minimum).tolist()
    if not kept:
        raise DataError(
            f"No role has {minimum:,} characters; set data.min_characters to a smaller number, at least 405."
        )
    start, sizes = np.concatenate([part for n in kept for part in parts[n]]), [sum(map(len, parts[n])) for n in kept]
    check_memory(4 * LENGTH * len(start), "The sequences of characters")
    views = np.lib.stride_tricks.sliding_window_view(text.x, LENGTH)
    return SampleTable(
        views[start].astype(np.int32),  # training would take bytes as pixels
        text.y[start + LENGTH].astype(np.int64),
        text.classes,
        owner=np.repeat(np.arange(len(kept)), sizes),
        owner_names=tuple(text.owner_names[n] for n in kept),
        is_test=np.concatenate([np.repeat([False, True], list(map(len, parts[n]))) for n in kept]),
        class_names=text.class_names,
    )


def _starts(first: int, end: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the training and the test sequences start in the text from `first` to `end`."""
    cut = end - (end - first) // TEST_SHARE
    return np.arange(first, cut - LENGTH, step), np.arange(cut, end - LENGTH, step)
