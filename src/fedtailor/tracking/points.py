"""What trackers are told of a run: its settings, every round's numbers by name, and those of its end."""

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

from fedtailor.evaluation import plain_mean
from fedtailor.lines import Record
from fedtailor.run import MOMENTS, Run, name_of
from fedtailor.toml import flat

LONGEST = 500  # letters of a setting that trackers take; old MLflow servers take no more
_COST = ("bytes_up", "bytes_down", "seconds", "seconds_evaluating")
_AT_A_MOMENT = re.compile(rf"(.+)_({'|'.join(MOMENTS)})(_mean)?")


@dataclass(frozen=True)
class About:
    """What a tracker is told of a run before its first number."""

    folder: Path
    key: str  # by which the run is known again, wherever its folder lies
    began: float  # seconds since 1970
    settings: dict[str, Any]  # by dotted names
    tags: dict[str, str]

    @property
    def name(self) -> str:
        return self.folder.resolve().name


@dataclass(frozen=True)
class Point:
    """A number of a round, or the numbers that clients have in it."""

    name: str
    round: int
    time: float  # seconds since 1970
    value: float | NDArray[np.float64]


def fresh(points: Sequence[Point], latest: dict[str, int]) -> list[Point]:
    """The points a tracker does not have, if `latest` is the last round it has of every name; that is brought up to
    date.

    >>> [point.round for point in fresh([Point("loss", 2, 0.0, 0.7), Point("loss", 3, 1.0, 0.5)], {"loss": 2})]
    [3]
    """
    new = [point for point in points if point.round > latest.get(point.name, -1)]
    latest |= {point.name: point.round for point in new}
    return new


def about(folder: Path, experiment: Mapping[str, Any], info: Mapping[str, Any], first_line: bytes) -> About:
    """What there is to tell of a run whose first round is written. By that line it is known again: its seconds are
    those of no other run, and a folder may be moved or copied."""
    written = folder / "experiment.toml"
    tags = {"version": info.get("fedtailor", ""), "method": name_of(experiment["method"])}
    tags |= {part: experiment[part]["name"] for part in ("data", "network")}
    tags |= {name: info[name] for name in ("device", "engine", "torch")}
    return About(
        folder,
        sha256(written.read_bytes() + first_line).hexdigest()[:16],
        written.stat().st_mtime,  # it is written when the run begins, and never again
        flat(experiment),
        {f"fedtailor.{name}": str(value) for name, value in tags.items()},
    )


def numbers(line: Record) -> dict[str, float]:
    """Every number of a round's line by the name that trackers show it under; to be used in a `record` function too.

    >>> numbers({"round": 1, "clients": [0, 2], "failed": {1: "why"}, "bytes_up": 80, "accuracy_trained_mean": 0.5})
    {'cost/bytes_up': 80.0, 'accuracy/trained_mean': 0.5, 'clients/failed': 0.3333333333333333, 'clients/missed': 0.0}
    """
    found = {_grouped(name): float(value) for name, value in line.items() if name != "round" and _is_number(value)}
    asked = len(line["clients"]) + len(line.get("failed", {})) + len(line.get("missed", {}))
    if asked:
        found |= {f"clients/{what}": len(line.get(what, {})) / asked for what in ("failed", "missed")}
    if "diverged" in line:
        found["clients/diverged"] = float(len(line["diverged"]))
    found |= {f"monitor/{n}": float(value) for n, value in line.get("monitor", {}).items() if _is_number(value)}
    for name, values in line.get("per_client", {}).items():  # what a method notes of its clients has no mean yet
        if name not in line and f"{name}_mean" not in line and (mean := plain_mean(values)) is not None:
            found[f"monitor/{name}_mean"] = float(mean)
    return found


def distributions(line: Record) -> dict[str, NDArray[np.float64]]:
    """What is more than one number: those of the clients, and a monitor's arrays. Clients that diverged have none.

    >>> distributions({"per_client": {"accuracy_trained": {0: 0.5, 3: 1.0}}})
    {'per_client/accuracy_trained': array([0.5, 1. ])}
    """
    tables = {f"per_client/{name}": list(values.values()) for name, values in line.get("per_client", {}).items()}
    arrays = {f"monitor/{name}": value for name, value in line.get("monitor", {}).items() if isinstance(value, list)}
    found = {name: np.asarray(values, dtype=np.float64).ravel() for name, values in (tables | arrays).items()}
    finite = {name: values[np.isfinite(values)] for name, values in found.items()}
    return {name: values for name, values in finite.items() if values.size}


def of_round(line: Record, time: float) -> list[Point]:
    """All points of a round."""
    values: dict[str, Any] = numbers(line) | distributions(line)
    return [Point(name, line["round"], time, value) for name, value in values.items()]


def of_end(run: Run, alone: Run | None, time: float) -> list[Point]:
    """The summary of a finished run, each number in the round that it is of, and what all of it cost."""
    last = len(run.records)
    points = [Point(f"final/{name}", last, time, run.total(name)) for name in ("bytes_up", "bytes_down", "seconds")]
    for moment, choices in run.summary(alone).items():
        for choice, found in choices.items():
            if found is None:
                continue
            own = {name: value for name, value in found.items() if name not in ("metrics", "clients")}
            shares = {name: own.pop(name) for name in ("round", "better_than_alone", "worse_than_alone") if name in own}
            tree = shares | {run.info["score"]: own} | found["metrics"]
            named = flat({"final": {moment: {choice: tree}}}, "/").items()
            points += [Point(name, found["round"], time, float(value)) for name, value in named if value is not None]
    return points


def in_words(value: Any, longest: int = LONGEST) -> str:
    """A setting as text; of one that is too long the beginning.

    >>> in_words([[0, 1], [2, 3]]), in_words("digits"), in_words(list(range(100)), 24)
    ('[[0, 1], [2, 3]]', 'digits', '[0, 1, 2,… (390 letters)')
    """
    text = value if isinstance(value, str) else json.dumps(value)
    end = f"… ({len(text)} letters)"
    return text if len(text) <= longest else text[: longest - len(end)] + end


def _grouped(name: str) -> str:
    """A number's name with the group that trackers show it in."""
    if name in _COST:
        return f"cost/{name}"
    if name in ("loss", "loss_mean"):  # of the training data
        return name.replace("loss", "loss/training")
    if found := _AT_A_MOMENT.fullmatch(name):
        metric, moment, mean = found.groups()
        return f"{metric}/{moment}{mean or ''}"
    return f"privacy/{name}" if name == "epsilon" else f"monitor/{name}"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
