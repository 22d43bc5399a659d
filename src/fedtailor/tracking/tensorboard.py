"""Runs in TensorBoard, by its own library: a folder a run, an event a round."""

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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

from fedtailor.files import locked, write, writing
from fedtailor.record import free_folder
from fedtailor.tracking.points import About, Point, fresh, in_words

_MARK = "fedtailor.json"  # says of a run's folder that it is ours, and which run it holds
_EVENTS = "events.out.tfevents"  # how names of event files begin
_VERSION = "brain.Event:2"  # of event files
_BINS = 30  # of a histogram: as many as TensorBoard draws


@dataclass(frozen=True)
class TensorBoard:
    """A folder that TensorBoard shows, with one folder a run."""

    folder: Path

    def open(self, about: About) -> "BoardSession":
        """The run's folder: the one it has already, or a new one beside whatever else has its name."""
        with writing(f"TensorBoard's folder '{self.folder}' cannot be written"):
            self.folder.mkdir(parents=True, exist_ok=True)
            own = next((path for path in sorted(self.folder.iterdir()) if _key(path) == about.key), None)
            if own is None:
                own = free_folder(self.folder, about.name)
                own.mkdir()
                write(own / _MARK, (json.dumps({"run": about.key}) + "\n").encode())
        return BoardSession(own, about)


class BoardSession:
    """One run while it is written. The event files themselves say what is there already; what is new goes into a file
    of its own, so nothing is ever changed."""

    def __init__(self, folder: Path, about: About) -> None:
        self.where = f"TensorBoard's folder '{folder}'"
        self._folder, self._about, self._held = folder, about, ExitStack()
        self._file: BinaryIO | None = None
        self._held.enter_context(locked(folder))  # two that write the same run would write it twice
        self._latest = _latest(folder)

    def add(self, points: Sequence[Point]) -> bool:
        """Write what is new among these points of a round, all of it in one event: it is there whole, or not."""
        new = fresh(points, self._latest)
        if not new:
            return False
        if SESSION_START_INFO_TAG not in self._latest:
            self._begin()
        for number in dict.fromkeys(point.round for point in new):
            here = [point for point in new if point.round == number]
            self._write(number, here[0].time, [_summary(point) for point in here])
        return True

    def flush(self) -> None:
        """See to it that all is on the disk."""
        if self._file is not None:
            with writing(f"TensorBoard's folder '{self._folder}' cannot be written"):
                self._file.flush()
                os.fsync(self._file.fileno())

    def finish(self, time: float) -> bool:
        """The run is finished; whether that is new."""
        if SESSION_END_INFO_TAG in self._latest:
            return False
        self._latest[SESSION_END_INFO_TAG] = 0
        self._write(0, time, [hparams({}, {})[2]])
        return True

    def close(self) -> None:
        """Write what is left, and let go of the folder."""
        with self._held, writing(f"TensorBoard's folder '{self._folder}' cannot be written"):
            if self._file is not None:
                self._file.close()

    def _begin(self) -> None:
        """The settings, for the page of hyperparameters and as text. No list of names belongs to them: TensorBoard
        then makes one of all runs' settings, and runs of different methods lie beside each other."""
        about = self._about
        plain = {
            n: v if isinstance(v, float) or (isinstance(v, int) and abs(v) < 2**63) else in_words(v)
            for n, v in about.settings.items()
        }
        toml = (about.folder / "experiment.toml").read_text(encoding="utf-8")
        as_code = "".join(f"    {line}\n" for line in toml.splitlines())  # in Markdown
        start = hparams_pb({**plain, **about.tags}, trial_id=about.key, start_time_secs=about.began)
        self._latest[SESSION_START_INFO_TAG] = 0
        self._write(0, about.began, [start, text("experiment", as_code)])

    def _write(self, step: int, time: float, summaries: Sequence[Any]) -> None:
        whole = Summary(value=[value for summary in summaries for value in summary.value])
        with writing(f"TensorBoard's folder '{self._folder}' cannot be written"):
            if self._file is None:  # only now: who has nothing to say leaves no file
                # TensorBoard reads files in the order of their names; those of its own writer may have the wrong one
                self._file = (self._folder / f"{_EVENTS}.{len(_files(self._folder)) + 1:010d}.fedtailor").open("xb")
                RecordWriter(self._file).write(Event(wall_time=time, file_version=_VERSION).SerializeToString())
            RecordWriter(self._file).write(Event(wall_time=time, step=step, summary=whole).SerializeToString())


def _summary(point: Point) -> Any:
    if isinstance(point.value, np.ndarray):
        return histogram(point.name, point.value, _BINS)
    return scalar(point.name, point.value)  # in 32 bits: TensorBoard's fast loader shows nothing of numbers in 64


def _key(folder: Path) -> Any:
    """Which run a folder holds; None if it is not ours."""
    try:
        mark = json.loads((folder / _MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return mark.get("run") if isinstance(mark, dict) else None


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_EVENTS}.*"))


def _latest(folder: Path) -> dict[str, int]:
    """The last step of every name in a folder's event files; what was being written when a process died is passed
    over."""
    latest: dict[str, int] = {}
    for path in _files(folder):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                latest[value.tag] = max(event.step, latest.get(value.tag, 0))
    return latest
