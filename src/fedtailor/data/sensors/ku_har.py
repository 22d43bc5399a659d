"""Reader of KU-HAR: recordings of an accelerometer and a gyroscope of 89 people with 18 activities.

    2.Trimmed_interpolated_data/
      0.Stand/1001_A_1.csv ...    one file per recording, named after the participant; 100 rows per second
      ...
      17.Table-tennis/...

A row has eight columns: time, acceleration x, y, z, time, rotation x, y, z. The shorter one of both signals ends with
zeros.
"""

import re
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.memory_limits import check_memory
from fedtailor.data.formats.folder_entries import check_entry, list_entries
from fedtailor.data.formats.text_tables import parse_table, read_table
from fedtailor.data.sample_table import SampleTable
from fedtailor.data.sensors.windows import join_recordings
from fedtailor.errors import DataError

ACTIVITIES = (
    "Stand", "Sit", "Talk-sit", "Talk-stand", "Stand-sit", "Lay", "Lay-stand", "Pick", "Jump", "Push-up", "Sit-up",
    "Walk", "Walk-backwards", "Walk-circle", "Run", "Stair-up", "Stair-down", "Table-tennis",
)  # fmt: skip
_FOLDERS = ("2.Trimmed_interpolated_data", "Trimmed_interpolated_data")
_FILE = re.compile(r"(?:.*/)?(\d{1,2})\.[^/]*/(\d+)(?:_[^/]*)?\.csv")  # number of the activity, participant
_LEFT_OUT = "1101"  # a participant whom FedMultimodal leaves out
_EXPECTED = "expected 0.Stand/1001_A_1.csv and so on, as in 2.Trimmed_interpolated_data.zip of the publisher"
_EXPANSION = 4  # bytes in memory per character of all files: half as many as recordings, which are then joined
Rows = NDArray[np.float64]


def read_ku_har(folder: Path) -> SampleTable:
    """Return the recordings in the publisher's folder, as `fedtailor.data.sensors.windows` describes them.

    >>> read_ku_har(Path("nowhere"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.DataError: 'nowhere' has no recordings of KU-HAR; expected 0.Stand/1001_A_1.csv and so on, ...
    """
    root = next((folder / name for name in _FOLDERS if (folder / name).is_dir()), folder)
    check_entry(root, folder)
    list_entries(root, "*", Path.is_dir, root=folder)  # rejects folders of activities that are links out of the folder
    files = list_entries(root, "*/*.csv", Path.is_file, root=folder)
    check_memory(_EXPANSION * sum(path.stat().st_size for path in files), f"The data in '{folder}'")
    return _join({str(path.relative_to(root)): partial(read_table, path, 8, ",") for path in files}, folder)


def read_ku_har_archive(archive: Path) -> SampleTable:
    """Return the recordings in the publisher's archive, whose checksum has been compared."""
    with zipfile.ZipFile(archive) as opened:
        names = sorted(name for name in opened.namelist() if name.endswith(".csv"))
        check_memory(_EXPANSION * sum(opened.getinfo(name).file_size for name in names), f"'{archive}'")
        return _join({name: partial(_read_member, opened, name) for name in names}, archive)


def _read_member(archive: zipfile.ZipFile, name: str) -> Rows:
    return parse_table(archive.read(name), 8, ",", name)


def _join(files: Mapping[str, Callable[[], Rows]], where: Path) -> SampleTable:
    recordings = []
    for name, read in files.items():
        found = _FILE.fullmatch(name.replace("\\", "/"))
        if found is None or int(found[1]) >= len(ACTIVITIES) or found[2] == _LEFT_OUT:
            continue
        rows = read().astype(np.float32)
        signals = {"accelerometer": rows[:, 1:4].copy(), "gyroscope": rows[:, 5:8].copy()}  # without the times
        recordings.append((f"{found[2]}/{Path(name).stem}", signals, np.full(len(rows), int(found[1]), np.int64)))
    if not recordings:
        raise DataError(f"'{where}' has no recordings of KU-HAR; {_EXPECTED}.")
    return join_recordings(recordings, ACTIVITIES)
