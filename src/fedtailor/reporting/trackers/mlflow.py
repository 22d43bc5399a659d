"""Sends runs to MLflow with its Python client. A tag identifies the run, and only new data is sent."""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # must be set before the import

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from fedtailor.errors import FedTailorError, RunError, reason
from fedtailor.reporting.trackers.points import Point, RunInfo, select_new_points, setting_text
from fedtailor.runs.files import TEMPORARY_SUFFIX

_RUN_TAG = "fedtailor.run"  # contains the run's key
_ARTIFACTS_TAG = "fedtailor.artifacts"  # set when all files have been sent
_MAX_METRICS, _MAX_PARAMS = 1000, 100  # MLflow's limits per request
_MAX_NAME_LENGTH = 250
_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"  # MLflow reads this variable for every request


class MLflow:
    """An experiment in an MLflow store."""

    def __init__(self, uri: str, experiment: str, artifacts: bool) -> None:
        logging.getLogger("mlflow.store.db").setLevel(logging.WARNING)  # hides messages about new database tables
        self._uri, self._name, self._artifacts = uri, experiment, artifacts
        with _mlflow_errors(uri), _few_retries():
            self._client = MlflowClient(tracking_uri=uri)
            found = self._client.get_experiment_by_name(experiment)
            if found is not None and found.lifecycle_stage == "deleted":
                raise RunError(f"The experiment '{experiment}' was deleted in MLflow; restore it, or use another name.")
            self._experiment = self._client.create_experiment(experiment) if found is None else found.experiment_id

    def open(self, info: RunInfo) -> "MLflowSession":
        """Open the run in MLflow, or create it."""
        with _mlflow_errors(self._uri):
            found = self._client.search_runs([self._experiment], f"tags.`{_RUN_TAG}` = '{info.key}'", max_results=1)
            start, tags = round(1000 * info.started_at), {_RUN_TAG: info.key, **info.tags}
            run = found[0] if found else self._client.create_run(self._experiment, start, tags, info.name)
            where = f"MLflow's experiment '{self._name}'"
            return MLflowSession(self._client, self._uri, where, run, info, self._artifacts)


class MLflowSession:
    """Sends one run to MLflow."""

    def __init__(self, client: MlflowClient, uri: str, where: str, run: Any, info: RunInfo, artifacts: bool) -> None:
        self.where = where
        self._client, self._uri, self._run, self._info, self._artifacts = client, uri, run, info, artifacts
        self._id, self._pending = run.info.run_id, list[Metric]()
        histories = {name: client.get_metric_history(self._id, name) for name in run.data.metrics}
        self._latest = {name: max(metric.step for metric in history) for name, history in histories.items() if history}
        settings = {_valid_name(name): setting_text(value) for name, value in info.settings.items()}
        new = [Param(name, value) for name, value in settings.items() if name not in run.data.params]
        for start in range(0, len(new), _MAX_PARAMS):
            client.log_batch(self._id, params=new[start : start + _MAX_PARAMS])

    def add(self, points: Sequence[Point]) -> bool:
        """Send the new scalar points; MLflow has no histograms. Return whether there were any."""
        scalars = [replace(p, name=_valid_name(p.name)) for p in points if not isinstance(p.value, np.ndarray)]
        new = select_new_points(scalars, self._latest)
        self._pending += [Metric(p.name, float(p.value), round(1000 * p.time), p.round) for p in new]
        if len(self._pending) >= _MAX_METRICS:
            self.flush()
        return bool(new)

    def flush(self) -> None:
        """Send all pending metrics."""
        with _mlflow_errors(self._uri):
            while self._pending:
                self._client.log_batch(self._id, metrics=self._pending[:_MAX_METRICS])
                del self._pending[:_MAX_METRICS]

    def finish(self, time: float) -> bool:
        """Send the files of a finished run if requested, and mark it as finished; return whether files were sent."""
        self.flush()
        sends_files = self._artifacts and _ARTIFACTS_TAG not in self._run.data.tags
        with _mlflow_errors(self._uri):
            if sends_files:
                folder = self._info.folder.resolve()
                for path in _run_files(folder):
                    subfolder = path.relative_to(folder).parent.as_posix()
                    self._client.log_artifact(self._id, str(path), None if subfolder == "." else subfolder)
                self._client.set_tag(self._id, _ARTIFACTS_TAG, "complete")
            if self._run.info.status != "FINISHED":
                self._client.set_terminated(self._id, "FINISHED", round(1000 * time))
        return sends_files

    def close(self) -> None:
        """Send all pending metrics."""
        self.flush()


def _run_files(folder: Path) -> list[Path]:
    """Return all files of a run except its lock, temporary files, and links, which point outside the run."""
    files = {path: path.relative_to(folder).parts for path in sorted(folder.rglob("*")) if path.is_file()}
    return [
        path
        for path, parts in files.items()
        if path.resolve() == path and parts != ("lock",) and not any(part.endswith(TEMPORARY_SUFFIX) for part in parts)
    ]


def _valid_name(name: str) -> str:
    """Replace characters that MLflow does not allow in names; a user's method may use any name for its metrics.

    >>> _valid_name("method_metrics/drift (mean)"), _valid_name("method_metrics//x/../y")
    ('method_metrics/drift _mean_', 'method_metrics/x/_/y')
    """
    parts = [part for part in re.sub(r"[^/\w.\- ]", "_", name).split("/") if part]
    return "/".join("_" if set(part) == {"."} else part for part in parts)[:_MAX_NAME_LENGTH]


@contextmanager
def _few_retries() -> Iterator[None]:
    """Retry only once, for the first request: by default, MLflow tries to reach a missing server for four minutes."""
    is_set = _RETRIES in os.environ
    os.environ.setdefault(_RETRIES, "1")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[_RETRIES]


@contextmanager
def _mlflow_errors(uri: str) -> Iterator[None]:
    """Raise errors of MLflow, its database or its server as a `RunError` with one sentence."""
    try:
        yield
    except FedTailorError:
        raise
    except Exception as error:  # every type of store raises other classes
        why = reason(error)
        if "Max retries exceeded" in why or "Failed to establish" in why:
            why = "the server does not respond"
        is_path = "://" not in uri or uri.startswith("file:")
        hint = "; for a local store, use sqlite:///mlflow.db" if is_path else ""
        raise RunError(f"MLflow at '{uri}' cannot be used: {why}{hint}.") from error
