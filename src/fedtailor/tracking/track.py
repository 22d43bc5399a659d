"""Runs in TensorBoard and MLflow: read from their folders, finished or while they are written."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from fedtailor.errors import Refused
from fedtailor.lines import Record, restore
from fedtailor.reading import LONGEST, Tail, folders, is_alone, peek, reading_record
from fedtailor.record import holds_run, is_finished, read_info, read_settings
from fedtailor.run import Run, go_on_with
from fedtailor.tracking.points import About, Point, about, of_end, of_round

EXPERIMENT = "fedtailor"  # in MLflow, unless another is named
_LINES = 20  # of a record that are in memory at once
_PAUSE = 2.0  # seconds between two looks at a run that is followed


class Session(Protocol):
    """One run in a tracker, which takes nothing twice."""

    where: str

    def add(self, points: Sequence[Point]) -> bool:
        """Take what is new of these; whether something was."""

    def flush(self) -> None: ...
    def finish(self, time: float) -> bool:
        """The run is finished; whether that was told, or files sent, for the first time."""

    def close(self) -> None: ...


class Tracker(Protocol):
    """Where runs are sent."""

    def open(self, about: About) -> Session: ...


def track(
    runs: Sequence[str | Path],
    *,
    tensorboard: str | Path | None = None,
    mlflow: str | None = None,
    experiment: str | None = None,
    artifacts: bool = False,
    follow: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
    wait: Callable[[], object] = lambda: time.sleep(_PAUSE),
) -> None:
    """Send runs, or all runs in a folder, to a folder of TensorBoard, to an MLflow store, or to both; called again, it
    adds what is new. `artifacts` sends finished runs' files too, to MLflow. `follow` goes on until the runs are
    finished; in a folder of runs more may begin, so there it goes on until it is interrupted. `say` is told what
    happened, and `wait` is called between two looks.

    >>> track(["nowhere"], tensorboard="boards")
    Traceback (most recent call last):
    fedtailor.errors.Refused: There is no run in 'nowhere'.
    """
    paths = [Path(path) for path in runs]
    folders(paths)  # refuses what is no run before a store is made
    trackers = _trackers(tensorboard, mlflow, experiment, artifacts)
    open_ended = not all(holds_run(path) for path in paths)
    known: dict[Path, _Followed] = {}
    try:
        while True:
            found = folders(paths)
            for folder in found:
                followed = known.setdefault(folder.resolve(), _Followed(folder, trackers, say))
                followed.go_on(found)
                if not follow:
                    followed.close()
            if not follow or (not open_ended and all(followed.done for followed in known.values())):
                return
            wait()
    finally:
        for followed in known.values():
            followed.close()


def _trackers(tensorboard: str | Path | None, mlflow: str | None, experiment: str | None, files: bool) -> list[Tracker]:
    if tensorboard is None and mlflow is None:
        raise Refused("Say where the runs shall go: --tensorboard FOLDER, --mlflow URI, or both.")
    if mlflow is None and (files or experiment is not None):
        raise Refused("An experiment's name and artifacts are MLflow's; say where that is: --mlflow URI.")
    trackers: list[Tracker] = []
    if tensorboard is not None:
        with _needing("TensorBoard", "tensorboard"):
            from fedtailor.tracking.tensorboard import TensorBoard
        trackers.append(TensorBoard(Path(tensorboard)))
    if mlflow is not None:
        with _needing("MLflow", "mlflow"):
            from fedtailor.tracking.mlflow import MLflow
        trackers.append(MLflow(mlflow, experiment or EXPERIMENT, files))
    return trackers


@contextmanager
def _needing(what: str, extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != extra:
            raise
        raise Refused(f"{what} is not installed: pip install 'fedtailor[{extra}]'.") from error


class _Followed:
    """A run that is sent as far as it is written."""

    def __init__(self, folder: Path, trackers: Sequence[Tracker], say: Callable[[str], None]) -> None:
        self._folder, self._trackers, self._say = folder, trackers, say
        self._about: About | None = None
        self._sessions: list[Session] = []
        self._tail = Tail(folder / "rounds.jsonl", 0)
        self._round, self._seconds = 0, 0.0  # how far it was read, and how long that took
        self._told: set[str] = set()  # what was said
        self.done = False

    def go_on(self, others: Sequence[Path]) -> None:
        """Send what was written since the last look; `others` are the runs among which training alone may be."""
        if self.done:
            return
        finished = is_finished(self._folder)  # asked first: then no line comes after those that are read now
        if not self._begun():
            if finished:
                raise Refused(f"The record in '{self._folder}' lost its rounds; {go_on_with(self._folder)}.")
            self._tell("no round is written yet")
            return
        assert self._about is not None
        new = self._send_rounds(self._about)
        if finished:
            run, end = peek(self._folder), self._about.began + self._seconds
            points = of_end(run, _alone(run, tuple(others)), end)
            for position, session in enumerate(self._sessions):
                new[position] |= session.add(points) | session.finish(end)
        for session, some in zip(self._sessions, new, strict=True):
            session.flush()
            how = "up to" if some else "nothing new, all up to"
            self._tell(f"{how} round {self._round} is in {session.where}", f"{finished} {session.where}")
        if finished:
            self.done = True
            self.close()

    def close(self) -> None:
        while self._sessions:
            self._sessions.pop().close()

    def _begun(self) -> bool:
        """Whether there is a round; with the first, the trackers are asked what they have of the run."""
        if self._about is None:
            with reading_record(self._folder) as path:
                if not path.is_file():  # a run that has just begun
                    return False
                with path.open("rb") as file:
                    first = file.readline(LONGEST)
            if not first.endswith(b"\n"):
                return False
            self._about = about(self._folder, read_settings(self._folder), read_info(self._folder), first)
            for tracker in self._trackers:
                self._sessions.append(tracker.open(self._about))
        return True

    def _send_rounds(self, about: About) -> list[bool]:
        """Send the new rounds; of every tracker, whether it did not have them all."""
        new = [False] * len(self._sessions)
        self._tail.clients = len(read_info(self._folder)["clients"])  # real ones may have joined
        more = True
        while more:
            with reading_record(self._folder):
                again, lines, more = self._tail.read(_LINES)
            if again:  # a run that was resumed wrote its last rounds anew
                self._seconds = 0.0
            for line in (restore(line) for _, line in lines):
                self._round, self._seconds = line["round"], self._seconds + _took(line)
                points = of_round(line, about.began + self._seconds)
                new = [session.add(points) or told for session, told in zip(self._sessions, new, strict=True)]
        return new

    def _tell(self, words: str, about: str = "") -> None:
        """Say something, but once of each thing it is about: who follows a run does not want a line a look."""
        if about not in self._told:
            self._told.add(about)
            self._say(f"{self._folder.resolve().name}: {words}.")


def _took(line: Record) -> float:
    return float(line["seconds"] + line.get("seconds_evaluating", 0.0))


def _alone(run: Run, others: Sequence[Path]) -> Run | None:
    """The finished run of training alone on the same clients, if it is among the others."""
    if run.method == "local":
        return None
    seed = run.experiment["seed"]
    for folder in others:
        settings = read_settings(folder)
        if settings["method"]["name"] == "local" and settings["seed"] == seed and is_finished(folder):
            found = _peek(folder.resolve())
            if is_alone(found, run):
                return found
    return None


_peek = lru_cache(maxsize=4)(peek)  # training alone is compared with many
