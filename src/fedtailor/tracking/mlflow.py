"""Runs in MLflow, by its own client: found again by a tag, told only what is new."""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # who tracks a run does not want to tell others of it

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from fedtailor.errors import Refused
from fedtailor.files import WRITING
from fedtailor.tracking.points import About, Point, fresh, in_words

_KEY = "fedtailor.run"  # the tag that names the run
_WHOLE = "fedtailor.artifacts"  # the tag of a run whose files are all there
_MOST = 1000  # numbers that MLflow takes at once; of settings a tenth of it
_LONGEST_NAME = 250
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")  # how addresses of such stores begin
_PATIENCE = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"  # MLflow reads it for every question


class MLflow:
    """An experiment in an MLflow store."""

    def __init__(self, uri: str, experiment: str, artifacts: bool) -> None:
        logging.getLogger("mlflow.store.db").setLevel(logging.WARNING)  # it would tell of the tables it makes
        self._uri, self._name, self._artifacts = uri, experiment, artifacts
        if uri.startswith(_DATABASES):
            _check_database()
        with _asking(uri), _impatient():
            self._client = MlflowClient(tracking_uri=uri)
            found = self._client.get_experiment_by_name(experiment)
            if found is not None and found.lifecycle_stage == "deleted":
                raise Refused(f"The experiment '{experiment}' was deleted in MLflow; restore it, or name another.")
            self._experiment = self._client.create_experiment(experiment) if found is None else found.experiment_id

    def open(self, about: About) -> "MLflowSession":
        """The run as MLflow has it, or a new one."""
        with _asking(self._uri):
            found = self._client.search_runs([self._experiment], f"tags.`{_KEY}` = '{about.key}'", max_results=1)
            run = found[0] if found else self._create(about)
            session = MLflowSession(self._client, self._uri, run, about, self._artifacts)
        session.where = f"MLflow's experiment '{self._name}'"
        return session

    def _create(self, about: About) -> Any:
        tags = {_KEY: about.key, **about.tags}
        return self._client.create_run(self._experiment, round(1000 * about.began), tags, about.name)


class MLflowSession:
    """One run while MLflow is told of it."""

    where = "MLflow"

    def __init__(self, client: MlflowClient, uri: str, run: Any, about: About, artifacts: bool) -> None:
        self._client, self._uri, self._run, self._about, self._artifacts = client, uri, run, about, artifacts
        self._id, self._waiting = run.info.run_id, list[Metric]()
        histories = {name: client.get_metric_history(self._id, name) for name in run.data.metrics}
        self._latest = {name: max(metric.step for metric in history) for name, history in histories.items() if history}
        settings = {_allowed(name): in_words(value) for name, value in about.settings.items()}
        new = [Param(name, value) for name, value in settings.items() if name not in run.data.params]
        for start in range(0, len(new), _MOST // 10):
            client.log_batch(self._id, params=new[start : start + _MOST // 10])

    def add(self, points: Sequence[Point]) -> bool:
        """Tell what is new among these points; MLflow has no distributions."""
        named = [replace(p, name=_allowed(p.name)) for p in points if not isinstance(p.value, np.ndarray)]
        new = fresh(named, self._latest)
        self._waiting += [Metric(p.name, float(p.value), round(1000 * p.time), p.round) for p in new]
        if len(self._waiting) >= _MOST:
            self.flush()
        return bool(new)

    def flush(self) -> None:
        """Send what waits."""
        with _asking(self._uri):
            while self._waiting:
                self._client.log_batch(self._id, metrics=self._waiting[:_MOST])
                del self._waiting[:_MOST]

    def finish(self, time: float) -> bool:
        """The run is finished: its files, where they are wanted, and its state. Whether files were sent."""
        self.flush()
        sends = self._artifacts and _WHOLE not in self._run.data.tags
        with _asking(self._uri):
            if sends:
                folder = self._about.folder.resolve()
                for path in _own_files(folder):
                    inside = path.relative_to(folder).parent.as_posix()
                    self._client.log_artifact(self._id, str(path), None if inside == "." else inside)
                self._client.set_tag(self._id, _WHOLE, "whole")
            if self._run.info.status != "FINISHED":
                self._client.set_terminated(self._id, "FINISHED", round(1000 * time))
        return sends

    def close(self) -> None:
        """Send what waits."""
        self.flush()


def _own_files(folder: Path) -> list[Path]:
    """All files of a run but its lock, so that what MLflow keeps of it can be opened like the folder itself. Links are
    left out, for they lead to what is not the run's."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.resolve() == path]
    whole = [path for path in files if not any(part.endswith(WRITING) for part in path.relative_to(folder).parts)]
    return [path for path in whole if path != folder / "lock"]


def _allowed(name: str) -> str:
    """A name as MLflow takes it: a method of one's own may call its numbers as it likes.

    >>> _allowed("monitor/drift (mean)"), _allowed("monitor//x/../y")
    ('monitor/drift _mean_', 'monitor/x/_/y')
    """
    parts = [part for part in re.sub(r"[^/\w.\- ]", "_", name).split("/") if part]
    return "/".join("_" if set(part) == {"."} else part for part in parts)[:_LONGEST_NAME]


def _check_database() -> None:
    """MLflow's client alone reaches servers; a store in a database needs two libraries more."""
    try:
        import alembic  # noqa: F401
        import sqlalchemy  # noqa: F401
    except ModuleNotFoundError as error:
        raise Refused("MLflow needs more than is here for a database: pip install 'fedtailor[mlflow]'.") from error


@contextmanager
def _impatient() -> Iterator[None]:
    """For the first question: MLflow asks a server that is not there for four minutes. Later ones may take that long,
    for a server that was there may come back."""
    told = _PATIENCE in os.environ
    os.environ.setdefault(_PATIENCE, "1")
    try:
        yield
    finally:
        if not told:
            del os.environ[_PATIENCE]


@contextmanager
def _asking(uri: str) -> Iterator[None]:
    """What MLflow, its database or its server say against it, as one sentence."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:  # of whatever kind: every store has its own
        first = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0].rstrip(".")
        if "Max retries exceeded" in first or "Failed to establish" in first:
            first = "no server answers there"
        local = "://" not in uri or uri.startswith("file:")
        hint = "; a store on this machine is sqlite:///mlflow.db" if local else ""
        raise Refused(f"MLflow at '{uri}' cannot be used: {first[:300]}{hint}.") from error
