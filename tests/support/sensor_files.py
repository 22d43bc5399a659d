"""Tiny recordings in the layouts of KU-HAR and HAPT."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.data_frame_pickles import data_frames

Array = NDArray[Any]
RNG = np.random.default_rng(5)
LABELS = [
    (1, 1, 5, 3, 40),
    (1, 1, 7, 41, 50),
    (1, 1, 1, 51, 79),
    (2, 1, 1, 0, 39),
    (3, 12, 12, 10, 59),
]  # of HAPT: experiment, user, activity, first and last row


def write_ku_har(folder: Path, files: dict[str, int]) -> dict[str, Array]:
    """Write recordings with these numbers of rows, and return their rows."""
    tables = {}
    for name, rows in files.items():
        path = folder / "2.Trimmed_interpolated_data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        table = RNG.normal(size=(rows, 8)).round(4)
        table[:, [0, 4]] = np.arange(rows)[:, None] / 100
        np.savetxt(path, table, delimiter=",", fmt="%.4f")
        tables[name] = table
    return tables


def write_hapt(folder: Path) -> dict[tuple[int, int], Array]:
    """Write three recordings of two users, and return the six channels of each."""
    (folder / "RawData").mkdir(parents=True)
    channels = {(1, 1): RNG.normal(size=(80, 6)), (2, 1): RNG.normal(size=(40, 6)), (3, 12): RNG.normal(size=(60, 6))}
    for (experiment, user), table in channels.items():
        for sensor, own in (("acc", table[:, :3]), ("gyro", table[:, 3:])):
            path = folder / "RawData" / f"{sensor}_exp{experiment:02}_user{user:02}.txt"
            path.write_text("".join(" ".join(map(repr, row)) + "\n" for row in own.tolist()))
    (folder / "RawData" / "labels.txt").write_text("".join(f"{a} {b} {c} {d} {e} \n" for a, b, c, d, e in LABELS))
    return channels


def packaged_hapt(channels: dict[tuple[int, int], Array]) -> bytes:
    """Return the same recordings as the package's file HAPT.pkl.gz."""
    frames: dict[int, list[dict[str, Any]]] = {}
    for (experiment, user), table in channels.items():
        label = np.full(len(table), -1)
        for own_experiment, _, activity, first, last in LABELS:
            if own_experiment == experiment:
                label[first : last + 1] = activity
        names = [f"{sensor}-{axis}" for sensor in ("acc", "gyro") for axis in "xyz"]
        columns = dict(zip(names, table.T, strict=True))
        frames.setdefault(user, []).append({**columns, "sequence": np.arange(len(table)), "label": label})
    return gzip.compress(data_frames(frames))
