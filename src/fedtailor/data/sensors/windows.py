"""Windows of sensor recordings.

Readers of recordings return a `SampleTable` with one row per measurement: `x` has the parts `accelerometer` and
`gyroscope` [rows, 3], `y` is the activity, and `owner` is the recording, whose name is "person/recording".
`cut_windows` makes the samples from it, so that one cached table serves all lengths of windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.memory_limits import check_memory
from fedtailor.data.sample_table import SampleTable
from fedtailor.errors import DataError

Signals = dict[str, NDArray[np.float32]]  # accelerometer and gyroscope: [rows, 3]

_EPSILON = 1e-5  # added to a standard deviation; a signal may be constant


@dataclass(frozen=True)
class Windowing:
    """How windows are cut from one segment, which is a part of a recording with one activity.

    Every `every`-th row of the segment is kept. A window of `length` rows starts after each `step` rows, as long as
    both `length` and `step` rows are left. With `standardize`, each channel of a window is shifted and scaled to mean 0
    and standard deviation 1.
    """

    length: int
    step: int
    every: int = 1
    standardize: bool = False

    def count(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of windows in segments with these numbers of rows.

        >>> Windowing(length=4, step=2).count(np.array([3, 4, 9]))
        array([0, 1, 3])
        """
        kept = -(-rows // self.every)
        return np.maximum(0, (kept - max(self.length, self.step)) // self.step + 1)

    def cut(self, segment: NDArray[Any], count: int) -> NDArray[Any]:
        """Return `count` windows of a segment [rows, channels]: [count, length, channels]."""
        views = np.lib.stride_tricks.sliding_window_view(segment[:: self.every], self.length, axis=0)
        windows = views[: (count - 1) * self.step + 1 : self.step].transpose(0, 2, 1)
        if not self.standardize:
            return windows
        windows = windows.astype(np.float64)
        mean, std = windows.mean(1, keepdims=True), windows.std(1, keepdims=True)
        return np.asarray((windows - mean) / (std + _EPSILON))


def join_recordings(
    recordings: Sequence[tuple[str, Signals, NDArray[np.int64]]], class_names: Sequence[str]
) -> SampleTable:
    """Return the table of recordings with the given names, signals, and activity in each row.

    >>> walk = {"accelerometer": np.zeros((4, 3), np.float32), "gyroscope": np.ones((4, 3), np.float32)}
    >>> join_recordings([("ann/1", walk, np.zeros(4, int))], ["walking"]).num_samples
    4
    """
    names, signals, labels = zip(*recordings, strict=True)
    return SampleTable(
        {part: np.concatenate([signal[part] for signal in signals]) for part in signals[0]},
        np.concatenate(labels),
        len(class_names),
        owner=np.repeat(np.arange(len(names)), [len(label) for label in labels]),
        owner_names=names,
        class_names=tuple(class_names),
    )


def last_recordings(names: Sequence[str]) -> NDArray[np.bool_]:
    """Return which recordings are the last one of a person, who has several.

    >>> last_recordings(["ann/1", "ann/2", "bob/1"])
    array([False,  True, False])
    """
    people = [name.partition("/")[0] for name in names]
    last = {person: number for number, person in enumerate(people)}
    return np.array([people.count(p) > 1 and last[p] == number for number, p in enumerate(people)])


def cut_windows(
    recordings: SampleTable,
    activities: Sequence[int],
    windowing: Windowing,
    is_test: NDArray[np.bool_] | None = None,
) -> SampleTable:
    """Return windows of recordings as samples, owned by the people who were recorded; label i is `activities[i]`.

    A window never crosses a change of activity. `is_test` says which recordings are in the test set.

    >>> walk = {"accelerometer": np.zeros((9, 3), np.float32), "gyroscope": np.ones((9, 3), np.float32)}
    >>> recordings = join_recordings([("ann/1", walk, np.zeros(9, int))], ["walking"])
    >>> cut_windows(recordings, [0], Windowing(length=4, step=2)).x["gyroscope"].shape
    (3, 4, 3)
    """
    assert isinstance(recordings.x, dict) and recordings.owner is not None and recordings.class_names is not None
    starts, stops = _segments(recordings.y, recordings.owner)
    chosen = np.isin(recordings.y[starts], activities)
    starts, stops = starts[chosen], stops[chosen]
    counts = windowing.count(stops - starts)
    total = int(counts.sum())
    if total == 0:
        names = ", ".join(recordings.class_names[activity] for activity in activities)
        raise DataError(
            f"The recordings have no window of {windowing.length:,} rows with {names}; use shorter windows."
        )
    channels = sum(part.shape[1] for part in recordings.x.values())
    check_memory(total * windowing.length * channels * 4, "The windows of the recordings")
    label = {activity: number for number, activity in enumerate(activities)}
    people = np.array([name.partition("/")[0] for name in recordings.owner_names])
    owner_names, owner = np.unique(np.repeat(people[recordings.owner[starts]], counts), return_inverse=True)
    return SampleTable(
        {name: _fill(part, starts, stops, counts, windowing) for name, part in recordings.x.items()},
        np.repeat(np.array([label[y] for y in recordings.y[starts].tolist()], np.int64), counts),
        len(activities),
        owner=owner.astype(np.int64),
        owner_names=tuple(owner_names.tolist()),
        is_test=None if is_test is None else np.repeat(is_test[recordings.owner[starts]], counts),
        class_names=tuple(recordings.class_names[activity] for activity in activities),
    )


def summarize_windows(table: SampleTable) -> SampleTable:
    """Return the windows as vectors of five statistics of each channel: mean, standard deviation, minimum, maximum, and
    mean absolute change from row to row. The length of a sensor's vector, √(x² + y² + z²), is a fourth channel.

    >>> still = {"accelerometer": np.ones((2, 4, 3), np.float32), "gyroscope": np.zeros((2, 4, 3), np.float32)}
    >>> summarize_windows(SampleTable(still, np.zeros(2, int), 1)).x.shape
    (2, 40)
    """
    assert isinstance(table.x, dict)
    parts = []
    for part in table.x.values():
        signals = np.concatenate([part, np.linalg.norm(part, axis=2, keepdims=True)], axis=2)
        change = np.abs(np.diff(signals, axis=1)).sum(1) / max(1, signals.shape[1] - 1)
        parts += [signals.mean(1), signals.std(1), signals.min(1), signals.max(1), change]
    return replace(table, x=np.concatenate(parts, axis=1, dtype=np.float32))


def _segments(y: NDArray[Any], owner: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first row and the end of each part of a recording with one activity."""
    changes = np.flatnonzero((np.diff(y) != 0) | (np.diff(owner) != 0)) + 1
    return np.r_[0, changes], np.r_[changes, len(y)]


def _fill(
    part: NDArray[Any], starts: NDArray[Any], stops: NDArray[Any], counts: NDArray[Any], windowing: Windowing
) -> NDArray[np.float32]:
    windows = np.empty((int(counts.sum()), windowing.length, part.shape[1]), np.float32)
    ends = np.cumsum(counts)
    for start, stop, count, end in zip(starts.tolist(), stops.tolist(), counts.tolist(), ends.tolist(), strict=True):
        if count:
            windows[end - count : end] = windowing.cut(part[start:stop], count)
    return windows
