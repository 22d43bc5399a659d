"""The data that trackers receive of a run: its settings, the metrics of every round, and the final summary."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.updates import UPDATE_COSINE, UPDATE_NORM
from fedtailor.runs.records import Record
from fedtailor.runs.run import MOMENTS, Run, method_label
from fedtailor.runs.summaries import plain_mean
from fedtailor.runs.toml import flatten_settings

MAX_SETTING_LENGTH = 500  # characters; the limit of old MLflow servers
_COST = ("bytes_up", "bytes_down", "seconds", "seconds_evaluating", "peak_memory", "peak_memory_reserved")
_METRIC_AT_MOMENT = re.compile(rf"(.+)_({'|'.join(MOMENTS)})(_mean)?")


@dataclass(frozen=True)
class RunInfo:
    """The description of a run that a tracker receives first."""

    folder: Path
    key: str  # identifies the run, even if its folder is moved or copied
    started_at: float  # seconds since 1970
    experiment: Mapping[str, Any]
    tags: dict[str, str]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the experiment by dotted names."""
        return flatten_settings(self.experiment)


@dataclass(frozen=True)
class Point:
    """A metric's value in a round, or an array of values (one per client, say)."""

    name: str
    round: int
    time: float  # seconds since 1970
    value: float | NDArray[np.float64]
    is_final: bool = False  # belongs to the summary of a finished run


def select_new_points(points: Sequence[Point], latest: dict[str, int]) -> list[Point]:
    """Return the points that a tracker does not have yet, and update `latest`, the last round it has of every metric.

    >>> points = [Point("loss", 2, 0.0, 0.7), Point("loss", 3, 1.0, 0.5)]
    >>> [point.round for point in select_new_points(points, {"loss": 2})]
    [3]
    """
    new = [point for point in points if point.round > latest.get(point.name, -1)]
    latest |= {point.name: point.round for point in new}
    return new


def describe_run(folder: Path, experiment: Mapping[str, Any], info: Mapping[str, Any], first_record: bytes) -> RunInfo:
    """Describe a run whose first round is finished.

    The key is a hash of the settings and the first record, whose durations differ between runs.
    """
    settings = folder / "experiment.toml"
    tags = {"version": info.get("fedtailor", ""), "method": method_label(experiment["method"])}
    tags |= {part: experiment[part]["name"] for part in ("data", "network")}
    tags |= {name: info[name] for name in ("device", "engine", "torch")}
    return RunInfo(
        folder,
        sha256(settings.read_bytes() + first_record).hexdigest()[:16],
        settings.stat().st_mtime,  # written once, when the run starts
        experiment,
        {f"fedtailor.{name}": str(value) for name, value in tags.items()},
    )


def record_metrics(record: Record) -> dict[str, float]:
    """Return all scalar metrics of a round's record by the names that trackers show.

    Use it in an `on_round_end` callback to send a run to any tracker.

    >>> record = {"round": 1, "clients": [0, 2], "failed": {1: "error"}, "bytes_up": 80, "accuracy_trained_mean": 0.5}
    >>> record_metrics(record)
    {'cost/bytes_up': 80.0, 'accuracy/trained_mean': 0.5, 'clients/failed': 0.3333333333333333, 'clients/missed': 0.0}
    """
    found = {
        _tracker_name(name): float(value) for name, value in record.items() if name != "round" and _is_number(value)
    }
    selected = len(record["clients"]) + len(record.get("failed", {})) + len(record.get("missed", {}))
    if selected:
        found |= {f"clients/{kind}": len(record.get(kind, {})) / selected for kind in ("failed", "missed")}
    if "diverged" in record:
        found["clients/diverged"] = float(len(record["diverged"]))
    metrics = record.get("method_metrics", {})
    found |= {f"method_metrics/{name}": float(value) for name, value in metrics.items() if _is_number(value)}
    for name, values in record.get("per_client", {}).items():  # the record has no mean of a method's client metrics
        if name not in record and f"{name}_mean" not in record and (mean := plain_mean(values)) is not None:
            group = "updates" if name in (UPDATE_NORM, UPDATE_COSINE) else "method_metrics"
            found[f"{group}/{name}_mean"] = float(mean)
    return found


def record_distributions(record: Record) -> dict[str, NDArray[np.float64]]:
    """Return the per-client metrics and the arrays among the method metrics, without values that are not finite.

    >>> record_distributions({"per_client": {"accuracy_trained": {0: 0.5, 3: 1.0}}})
    {'per_client/accuracy_trained': array([0.5, 1. ])}
    """
    tables = {f"per_client/{name}": list(values.values()) for name, values in record.get("per_client", {}).items()}
    metrics = record.get("method_metrics", {})
    arrays = {f"method_metrics/{name}": value for name, value in metrics.items() if isinstance(value, list)}
    found = {name: np.asarray(values, dtype=np.float64).ravel() for name, values in (tables | arrays).items()}
    finite = {name: values[np.isfinite(values)] for name, values in found.items()}
    return {name: values for name, values in finite.items() if values.size}


def round_points(record: Record, time: float) -> list[Point]:
    """Return all points of a round."""
    values: dict[str, Any] = record_metrics(record) | record_distributions(record)
    return [Point(name, record["round"], time, value) for name, value in values.items()]


def summary_points(run: Run, local: Run | None, time: float) -> list[Point]:
    """Return the summary of a finished run, each value at the round it belongs to, and the run's total cost.

    `local` is local training on the same clients.
    """
    last = len(run.records)
    costs = ("bytes_up", "bytes_down", "seconds")
    points = [Point(f"final/{name}", last, time, run.total(name), is_final=True) for name in costs]
    for moment, choices in run.summary(local).items():
        for choice, found in choices.items():
            if found is None:
                continue
            statistics = {name: value for name, value in found.items() if name not in ("metrics", "clients")}
            others = ("round", "better_than_local", "worse_than_local")
            tree: dict[str, Any] = {name: statistics.pop(name) for name in others if name in statistics}
            tree |= {run.info["score"]: statistics} | found["metrics"]
            values = flatten_settings({"final": {moment: {choice: tree}}}, "/").items()
            points += [Point(n, found["round"], time, float(v), is_final=True) for n, v in values if v is not None]
    return points


def setting_text(value: Any, max_length: int = MAX_SETTING_LENGTH) -> str:
    """Return a setting as a string; long ones are truncated.

    >>> setting_text([[0, 1], [2, 3]]), setting_text("digits"), setting_text(list(range(100)), 27)
    ('[[0, 1], [2, 3]]', 'digits', '[0, 1, 2,… (390 characters)')
    """
    text = value if isinstance(value, str) else json.dumps(value)
    end = f"… ({len(text)} characters)"
    return text if len(text) <= max_length else text[: max_length - len(end)] + end


def _tracker_name(name: str) -> str:
    """Return a metric's name with the group that trackers show it in."""
    if name in _COST:
        return f"cost/{name}"
    if name in ("loss", "loss_mean"):  # on the training data
        return name.replace("loss", "loss/training")
    if found := _METRIC_AT_MOMENT.fullmatch(name):
        metric, moment, mean = found.groups()
        return f"{metric}/{moment}{mean or ''}"
    return f"privacy/{name}" if name == "epsilon" else f"method_metrics/{name}"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
