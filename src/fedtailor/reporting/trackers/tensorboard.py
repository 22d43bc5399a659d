"""Writes runs as TensorBoard event files: one folder per run, one event per round."""

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.metadata import SESSION_END_INFO_TAG, SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import histogram, hparams, scalar, text

from fedtailor.reporting.trackers.points import Point, RunInfo, select_new_points, setting_text
from fedtailor.runs.files import folder_lock, write_atomic, write_errors
from fedtailor.runs.writer import unused_folder

_KEY_FILE = "fedtailor.json"  # in folders written by FedTailor: identifies the run
_EVENT_FILE_PREFIX = "events.out.tfevents"
_EVENT_FILE_VERSION = "brain.Event:2"
_HISTOGRAM_BINS = 30  # the number that TensorBoard shows


def open_session(directory: Path, info: RunInfo) -> "TensorBoardSession":
    """Open the run's subfolder of a log directory, or create one with an unused name."""
    with write_errors(f"TensorBoard's folder '{directory}' cannot be written"):
        directory.mkdir(parents=True, exist_ok=True)
        folder = next((path for path in sorted(directory.iterdir()) if _run_key(path) == info.key), None)
        if folder is None:
            folder = unused_folder(directory, info.name)
            folder.mkdir()
            write_atomic(folder / _KEY_FILE, (json.dumps({"run": info.key}) + "\n").encode())
    return TensorBoardSession(folder, info)


class TensorBoardSession:
    """Writes one run. Existing event files are read to find what is new, and never modified."""

    def __init__(self, folder: Path, info: RunInfo) -> None:
        self.where = f"TensorBoard's folder '{folder}'"
        self._folder, self._info, self._resources = folder, info, ExitStack()
        self._file: BinaryIO | None = None
        self._resources.enter_context(folder_lock(folder))  # prevents two processes from writing the same points
        self._latest = _latest_steps(folder)

    def add(self, points: Sequence[Point]) -> bool:
        """Write the new points, all points of a round in one event, so that a round is never written partially."""
        new = select_new_points(points, self._latest)
        if not new:
            return False
        if SESSION_START_INFO_TAG not in self._latest:
            self._write_settings()
        for number in dict.fromkeys(point.round for point in new):
            same_round = [point for point in new if point.round == number]
            self._write(number, same_round[0].time, [_summary(point) for point in same_round])
        return True

    def flush(self) -> None:
        """Write all data to disk."""
        if self._file is not None:
            with write_errors(f"{self.where} cannot be written"):
                self._file.flush()
                os.fsync(self._file.fileno())

    def finish(self, time: float) -> bool:
        """Mark the run as finished; return whether it was not marked before."""
        if SESSION_END_INFO_TAG in self._latest:
            return False
        self._latest[SESSION_END_INFO_TAG] = 0
        self._write(0, time, [hparams({}, {})[2]])
        return True

    def close(self) -> None:
        """Close the file and unlock the folder."""
        with self._resources, write_errors(f"{self.where} cannot be written"):
            if self._file is not None:
                self._file.close()

    def _write_settings(self) -> None:
        """Write the settings as hyperparameters and as text.

        The hyperparameters come without the list of their names (`_hparams_/experiment`), so that TensorBoard builds
        one list from all runs and can compare different methods.
        """
        info = self._info
        values = {
            n: v if isinstance(v, float) or (isinstance(v, int) and abs(v) < 2**63) else setting_text(v)
            for n, v in info.settings.items()
        }
        toml = (info.folder / "experiment.toml").read_text(encoding="utf-8")
        markdown = "".join(f"    {line}\n" for line in toml.splitlines())  # a code block
        start = hparams_pb({**values, **info.tags}, trial_id=info.key, start_time_secs=info.started_at)
        self._latest[SESSION_START_INFO_TAG] = 0
        self._write(0, info.started_at, [start, text("experiment", markdown)])

    def _write(self, step: int, time: float, summaries: Sequence[Any]) -> None:
        combined = Summary(value=[value for summary in summaries for value in summary.value])
        with write_errors(f"{self.where} cannot be written"):
            if self._file is None:  # created by the first write, so that a call without new data leaves no file
                # TensorBoard reads files in the order of their names, so these are numbered
                number = len(_event_files(self._folder)) + 1
                self._file = (self._folder / f"{_EVENT_FILE_PREFIX}.{number:010d}.fedtailor").open("xb")
                header = Event(wall_time=time, file_version=_EVENT_FILE_VERSION)
                RecordWriter(self._file).write(header.SerializeToString())
            RecordWriter(self._file).write(Event(wall_time=time, step=step, summary=combined).SerializeToString())


def _summary(point: Point) -> Any:
    if isinstance(point.value, np.ndarray):
        return histogram(point.name, point.value, _HISTOGRAM_BINS)
    return scalar(point.name, point.value)  # float32: TensorBoard's fast loader does not show float64


def _run_key(folder: Path) -> Any:
    """Return the key of the run in a folder, or None if FedTailor did not write the folder."""
    try:
        return json.loads((folder / _KEY_FILE).read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _event_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_EVENT_FILE_PREFIX}.*"))


def _latest_steps(folder: Path) -> dict[str, int]:
    """Return the last step of every tag in a folder's event files; incomplete events are ignored."""
    latest: dict[str, int] = {}
    for path in _event_files(folder):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                latest[value.tag] = max(event.step, latest.get(value.tag, 0))
    return latest
