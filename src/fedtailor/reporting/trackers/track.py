"""Send runs from their folders to TensorBoard, MLflow, or W&B, while they are running or after they have finished."""

import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from fedtailor.analysis.comparability import is_local_baseline
from fedtailor.errors import RunError
from fedtailor.reporting.trackers.points import Point, RunInfo, describe_run, round_points, summary_points
from fedtailor.runs.reader import find_run_folders, is_finished, is_run_folder, read_info, read_settings
from fedtailor.runs.records import restore_record
from fedtailor.runs.run import Run, client_counts, resume_hint
from fedtailor.runs.tail import MAX_LINE_BYTES, RecordTail, read_partial_run, record_errors

DEFAULT_EXPERIMENT = "fedtailor"  # in MLflow
_MAX_RECORDS = 20  # read at a time, which limits the memory
_POLL_SECONDS = 2.0
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")  # prefixes of MLflow's URIs


class Session(Protocol):
    """Sends one run to a tracker, without duplicates."""

    where: str

    def add(self, points: Sequence[Point]) -> bool:
        """Send the new points; return whether there were any."""

    def flush(self) -> None: ...
    def finish(self, time: float) -> bool:
        """Mark the run as finished; return whether it was not marked before or files were sent."""

    def close(self) -> None: ...


Tracker = Callable[[RunInfo], Session]  # opens a run at its destination


def track(
    runs: Sequence[str | Path],
    *,
    tensorboard: str | Path | None = None,
    mlflow: str | None = None,
    experiment: str | None = None,
    artifacts: bool = False,
    wandb: str | None = None,
    wandb_mode: str | None = None,
    follow: bool = False,
    echo: Callable[[str], None] = lambda message: None,
    wait: Callable[[], object] = lambda: time.sleep(_POLL_SECONDS),
) -> None:
    """Send runs, or all runs in a folder, to one or several trackers. Repeated calls add only new data.

    `tensorboard` is a log directory. `mlflow` is the URI of a store, and `experiment` a name in it; `artifacts` also
    sends the files of finished runs there. `wandb` is a project of W&B, with its entity as in "entity/project" if that
    is not the default one, and `wandb_mode` is "online" or "offline" (by default, as the variable WANDB_MODE says, or
    online). `follow` continues until all runs are finished; for a folder of runs,
    where new runs may start, it continues until it is interrupted. `echo` is called with messages about the progress,
    and `wait` is called between two polls.

    >>> track(["nowhere"], tensorboard="boards")
    Traceback (most recent call last):
    fedtailor.errors.RunError: There is no run in 'nowhere'.
    """
    paths = [Path(path) for path in runs]
    find_run_folders(paths)  # raises an error for an invalid path before a store is created
    trackers = _make_trackers(tensorboard, mlflow, experiment, artifacts, wandb, wandb_mode)
    is_open_ended = not all(is_run_folder(path) for path in paths)
    known: dict[Path, _TrackedRun] = {}
    try:
        while True:
            found = find_run_folders(paths)
            for folder in found:
                run = known.setdefault(folder.resolve(), _TrackedRun(folder, trackers, echo))
                run.update(found)
                if not follow:
                    run.close()
            if not follow or (not is_open_ended and all(run.done for run in known.values())):
                return
            wait()
    finally:
        for run in known.values():
            run.close()


def _make_trackers(
    tensorboard: str | Path | None,
    mlflow: str | None,
    experiment: str | None,
    artifacts: bool,
    wandb: str | None,
    wandb_mode: str | None,
) -> list[Tracker]:
    if tensorboard is None and mlflow is None and wandb is None:
        raise RunError("No tracker was given; use --tensorboard FOLDER, --mlflow URI, or --wandb PROJECT.")
    if wandb is None and wandb_mode is not None:
        raise RunError("--wandb-mode needs --wandb PROJECT.")
    if mlflow is None and (artifacts or experiment is not None):
        raise RunError("--experiment and --artifacts need --mlflow URI.")
    trackers: list[Tracker] = []
    if tensorboard is not None:
        _require("TensorBoard", "tensorboard")
        from fedtailor.reporting.trackers.tensorboard import open_session

        trackers.append(partial(open_session, Path(tensorboard)))
    if mlflow is not None:
        _require("MLflow", "mlflow")
        if mlflow.startswith(_DATABASES):
            _require("MLflow's support for databases", "mlflow", "sqlalchemy", "alembic")
        from fedtailor.reporting.trackers.mlflow import MLflow

        trackers.append(MLflow(mlflow, experiment or DEFAULT_EXPERIMENT, artifacts).open)
    if wandb is not None:
        _require("W&B", "wandb")
        from fedtailor.reporting.trackers.wandb import Wandb

        trackers.append(Wandb(wandb, wandb_mode).open)
    return trackers


def _require(what: str, extra: str, *libraries: str) -> None:
    """Raise `RunError` with the installation command if a library is missing; by default, it is named as the extra."""
    if not all(map(find_spec, libraries or [extra])):
        raise RunError(f"{what} is not installed: pip install 'fedtailor[{extra}]'.")


class _TrackedRun:
    """A run whose new rounds are sent to all trackers."""

    def __init__(self, folder: Path, trackers: Sequence[Tracker], echo: Callable[[str], None]) -> None:
        self._folder, self._trackers, self._echo = folder, trackers, echo
        self._info: RunInfo | None = None
        self._sessions: list[Session] = []
        self._tail = RecordTail(folder / "rounds.jsonl", (0, 0))
        self._round, self._seconds = 0, 0.0  # last round that was read, and the time until then
        self._reported: set[str] = set()
        self.done = False

    def update(self, others: Sequence[Path]) -> None:
        """Send the new rounds, and the summary if the run is finished; `others` may include local training."""
        if self.done:
            return
        finished = is_finished(self._folder)  # checked before reading, so that no later record is missed
        if not self._open():
            if finished:
                raise RunError(f"The records in '{self._folder}' are missing; {resume_hint(self._folder)}.")
            self._report("no round is finished yet")
            return
        assert self._info is not None
        has_new = self._send_rounds(self._info)
        if finished:
            run, end = read_partial_run(self._folder), self._info.started_at + self._seconds
            points = summary_points(run, _find_local_training(run, tuple(others)), end)
            for index, session in enumerate(self._sessions):
                has_new[index] |= session.add(points) | session.finish(end)
        for session, is_new in zip(self._sessions, has_new, strict=True):
            session.flush()
            rounds = f"all rounds up to {self._round}"
            message = f"sent {rounds} to" if is_new else f"nothing new; {rounds} are in"
            self._report(f"{message} {session.where}", topic=f"{finished} {session.where}")
        if finished:
            self.done = True
            self.close()

    def close(self) -> None:
        while self._sessions:
            self._sessions.pop().close()

    def _open(self) -> bool:
        """Open the run in all trackers once its first round is finished; return whether it is."""
        if self._info is None:
            with record_errors(self._folder) as path:
                if not path.is_file():  # the run has just started
                    return False
                with path.open("rb") as file:
                    first = file.readline(MAX_LINE_BYTES)
            if not first.endswith(b"\n"):
                return False
            self._info = describe_run(self._folder, read_settings(self._folder), read_info(self._folder), first)
            for tracker in self._trackers:
                self._sessions.append(tracker(self._info))
        return True

    def _send_rounds(self, info: RunInfo) -> list[bool]:
        """Send the new rounds; return for each tracker whether it received any."""
        has_new = [False] * len(self._sessions)
        self._tail.clients = client_counts(read_info(self._folder))  # deployed clients may have joined
        more = True
        while more:
            with record_errors(self._folder):
                restarted, records, more = self._tail.read(_MAX_RECORDS)
            if restarted:  # a resumed run rewrote its last rounds
                self._seconds = 0.0
            for record in (restore_record(record) for _, record in records):
                self._round = record["round"]
                self._seconds += record["seconds"] + record.get("seconds_evaluating", 0.0)
                points = round_points(record, info.started_at + self._seconds)
                has_new = [session.add(points) or new for session, new in zip(self._sessions, has_new, strict=True)]
        return has_new

    def _report(self, message: str, topic: str = "") -> None:
        """Print a message, but only once per topic, so that following a run does not print at every poll."""
        if topic not in self._reported:
            self._reported.add(topic)
            self._echo(f"{self._folder.resolve().name}: {message}.")


def _find_local_training(run: Run, others: Sequence[Path]) -> Run | None:
    """Return the finished run of local training on the same clients, if it is among the others."""
    if run.experiment["method"]["name"] == "local":
        return None
    seed = run.experiment["seed"]
    for folder in others:
        settings = read_settings(folder)
        if settings["method"]["name"] == "local" and settings["seed"] == seed and is_finished(folder):
            found = _read_cached(folder.resolve())
            if is_local_baseline(found, run):
                return found
    return None


_read_cached = lru_cache(maxsize=4)(read_partial_run)  # many runs are compared with the same baseline
