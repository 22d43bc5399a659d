"""The commands that repeat runs, and what there is to say of how they ran."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from fedtailor.data.datasets import Data
from fedtailor.errors import Refused
from fedtailor.experiment import Experiment, make
from fedtailor.flags import read_flags
from fedtailor.methods import METHODS
from fedtailor.networks import NETWORKS
from fedtailor.run import Run
from fedtailor.simulate import describe, describe_settings
from fedtailor.sweeps.sweep import Plan, read_sweep
from fedtailor.toml import flat

_TEXT = ("data.folder",)  # names of folders, which flags take as they are


def commands(runs: Sequence[Run]) -> list[str]:
    """One command that compares all these methods again, where there is one; else a command a run. Empty where no
    command can: a method, a network or data of one's own are given in Python."""
    try:
        for run in runs:
            make(run.experiment)  # of a folder from elsewhere: what could not be asked for is refused here
        whole = _compare(runs) if len(runs) > 1 else None
        return [whole] if whole else [_run(run) for run in runs]
    except Refused:
        return []


def sweep_command(plan: Plan) -> str | None:
    """The `fedtailor sweep` that makes the same grid; None where flags cannot say it."""
    try:
        words = ["fedtailor", "sweep", *_flags(plan.fixed)]
        words += ["--moment", plan.moment] if plan.moment != "trained" else []
        for axis in plan.axes:
            given = {json.dumps(values[axis]): values[axis] for values in plan.runs.values() if axis in values}
            words += _axis(axis, list(given.values()))
        found = read_sweep(words[2:]).plan
    except Refused:
        return None
    same = found.axes == plan.axes and found.moment == plan.moment and found.runs == plan.runs
    return shlex.join(words) if same and _named(found.fixed) == _named(plan.fixed) else None


def _axis(axis: str, values: Sequence[Any]) -> list[str]:
    """A flag with all its values; where they are lists or odd texts, the flag as often as there are values."""
    texts = [_word(value, axis) for value in values]
    if any(isinstance(value, list) or "," in text for value, text in zip(values, texts, strict=True)):
        return [word for text in texts for word in (_flag(axis), text)]
    return [_flag(axis), ",".join(texts) if len(texts) > 1 or axis == "seed" else json.dumps(list(values))]


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """By dotted names; a part may be given by its name alone."""
    return {name.removesuffix(".name"): value for name, value in flat(settings).items()}


def _run(run: Run) -> str:
    words = ["fedtailor", "run", *_flags(_given(run.experiment))]
    if make(read_flags(words[2:]).over({})) != make(run.experiment):
        raise Refused("The run's settings cannot be written as flags.")
    return shlex.join(words)


def _compare(runs: Sequence[Run]) -> str | None:
    """`fedtailor compare` with the same methods, if that takes the same settings and seeds for all."""
    methods = {run.method: run.experiment["method"] for run in runs}
    seeds = sorted({run.experiment["seed"] for run in runs})
    cells = sorted((run.method, run.experiment["seed"]) for run in runs)
    plain = all(name in METHODS for name in methods) and "local" in methods
    if not plain or cells != sorted((name, seed) for name in methods for seed in seeds):
        return None
    if any(run.experiment["method"] != methods[run.method] for run in runs):
        return None
    given = _given(runs[0].experiment)
    given.pop("method"), given.pop("seed", None)
    if all(run.experiment["data"].get("seed") == run.experiment["seed"] for run in runs):
        given["data"].pop("seed", None)
    own = {name: {k: v for k, v in _own_fields(method).items() if k != "name"} for name, method in methods.items()}
    flags = _flags(given | {name: fields for name, fields in own.items() if fields})
    names = sorted(methods, key=lambda name: name != "local")  # it always comes first
    words = ["fedtailor", "compare", *names, *flags, "--seeds", ",".join(map(str, seeds))]
    return shlex.join(words) if all(_repeats(words[2:], run) for run in runs) else None


def _repeats(words: Sequence[str], run: Run) -> bool:
    """Whether `fedtailor compare` with these words does this run."""
    flags = read_flags(words)
    flags.settings.pop("seeds")
    settings = flags.over({})
    own = {name: settings.pop(name, {}) for name in flags.words}[run.method]
    found = replace(make(settings | {"method": {"name": run.method, **own}}), seed=run.experiment["seed"])
    if found.data.seed is None:  # the split follows the run's seed
        found = replace(found, data=replace(found.data, seed=found.seed))
    return found == make(run.experiment)


def _given(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not as they are by default; of the parts always the names."""
    usual = describe_settings(Experiment()) | {"rounds": None}
    found: dict[str, Any] = {"method": _own_fields(experiment["method"])}
    found["data"] = _beyond(experiment["data"], asdict(Data()), "name")
    network = dict(experiment["network"])
    if network.get("name") not in NETWORKS:
        raise Refused("The network is one's own.")
    found["network"] = _beyond(network, vars(NETWORKS[network["name"]]()), "name")
    for name, value in experiment.items():
        if name in ("method", "data", "network"):
            continue
        part = _beyond(value, usual[name]) if isinstance(value, Mapping) else value
        if part != usual.get(name) and part != {}:
            found[name] = part
    return found


def _own_fields(method: Mapping[str, Any]) -> dict[str, Any]:
    """A method's name and the fields that are not as usual; a method inside is treated alike."""
    if method.get("name") not in METHODS:
        raise Refused("The method is one's own.")
    found = _beyond(method, describe(METHODS[method["name"]]()), "name")
    if isinstance(method.get("inner"), Mapping):
        found["inner"] = _own_fields(method["inner"])
    return found


def _beyond(settings: Mapping[str, Any], usual: Mapping[str, Any], always: str = "") -> dict[str, Any]:
    def same(value: Any, other: Any) -> bool:
        return (list(value) if isinstance(value, (list, tuple)) else value) == (
            list(other) if isinstance(other, (list, tuple)) else other
        )

    return {k: v for k, v in settings.items() if k == always or not same(v, usual.get(k))}


def _flags(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Nested settings as flags; a part's name is its own flag, which comes first."""
    words: list[str] = []
    for name, value in settings.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            part = dict(value)
            if "name" in part:
                words += [_flag(path), _word(part.pop("name"), path)]
            words += _flags(part, f"{path}.")
        else:
            words += [_flag(path), _word(value, path)]
    return words


def _flag(path: str) -> str:
    return f"--{path.replace('_', '-')}"


def _word(value: Any, path: str) -> str:
    if isinstance(value, str):
        parsed = read_flags([f"--{path}={value}"]).settings.get(path)
        return value if parsed == value or path in _TEXT else json.dumps(value)
    if isinstance(value, (list, tuple)) and len(value) > 1 and all(type(part) in (int, float) for part in value):
        return ",".join(map(json.dumps, value))
    return json.dumps(value)
