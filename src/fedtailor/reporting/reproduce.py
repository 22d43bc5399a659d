"""The commands that reproduce runs and sweeps."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from fedtailor.data.datasets import Data
from fedtailor.errors import FedTailorError, RunError
from fedtailor.experiments.experiment import Experiment, make_experiment
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.experiments.sweep import RANKED, Plan, parse_sweep
from fedtailor.methods import METHODS
from fedtailor.networks import NETWORKS
from fedtailor.runs.run import Run
from fedtailor.runs.toml import flatten_settings
from fedtailor.training.simulate import describe_config, describe_method

_STRING_SETTINGS = ("data.folder",)  # flags that are never parsed as JSON


def run_commands(runs: Sequence[Run]) -> list[str]:
    """Return one `fedtailor compare` command for all runs if possible, else one command per run.

    The list is empty if no command can reproduce a run, because its method, network, or data were defined in Python.
    """
    try:
        for run in runs:
            make_experiment(run.experiment)  # raises for settings that no command could have
        compare = _compare_command(runs) if len(runs) > 1 else None
        return [compare] if compare else [_run_command(run) for run in runs]
    except FedTailorError:
        return []


def sweep_command(plan: Plan) -> str | None:
    """Return the `fedtailor sweep` command with the same grid; None if flags cannot express it."""
    try:
        arguments = ["fedtailor", "sweep", *_flags(plan.fixed)]
        arguments += ["--moment", plan.moment] if plan.moment != RANKED else []
        for axis in plan.axes:
            axis_values = {json.dumps(values[axis]): values[axis] for values in plan.runs.values() if axis in values}
            arguments += _axis_flags(axis, list(axis_values.values()))
        found = parse_sweep(arguments[2:]).plan
    except FedTailorError:
        return None
    same = found.axes == plan.axes and found.moment == plan.moment and found.runs == plan.runs
    return shlex.join(arguments) if same and _dotted(found.fixed) == _dotted(plan.fixed) else None


def _axis_flags(axis: str, values: Sequence[Any]) -> list[str]:
    """Return a flag with all its values; the flag is repeated if values are lists or contain commas."""
    texts = [_flag_value(value, axis) for value in values]
    if any(isinstance(value, list) or "," in text for value, text in zip(values, texts, strict=True)):
        return [argument for text in texts for argument in (_flag_name(axis), text)]
    return [_flag_name(axis), ",".join(texts) if len(texts) > 1 or axis == "seed" else json.dumps(list(values))]


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted names, with `part.name` shortened to `part`."""
    return {name.removesuffix(".name"): value for name, value in flatten_settings(settings).items()}


def _run_command(run: Run) -> str:
    arguments = ["fedtailor", "run", *_flags(_non_default_settings(run.experiment))]
    if make_experiment(parse_overrides(arguments[2:]).apply_to({})) != make_experiment(run.experiment):
        raise RunError("The run's settings cannot be written as flags.")
    return shlex.join(arguments)


def _compare_command(runs: Sequence[Run]) -> str | None:
    """Return the `fedtailor compare` command if all methods have the same settings and seeds, else None."""
    methods = {run.method: run.experiment["method"] for run in runs}
    seeds = sorted({run.experiment["seed"] for run in runs})
    pairs = sorted((run.method, run.experiment["seed"]) for run in runs)
    known = all(name in METHODS for name in methods) and "local" in methods
    if not known or pairs != sorted((name, seed) for name in methods for seed in seeds):
        return None
    if any(run.experiment["method"] != methods[run.method] for run in runs):
        return None
    settings = _non_default_settings(runs[0].experiment)
    settings.pop("method"), settings.pop("seed", None)
    if all(run.experiment["data"].get("seed") == run.experiment["seed"] for run in runs):
        settings["data"].pop("seed", None)
    fields = {
        name: {k: v for k, v in _non_default_fields(method).items() if k != "name"} for name, method in methods.items()
    }
    flags = _flags(settings | {name: changed for name, changed in fields.items() if changed})
    names = sorted(methods, key=lambda name: name != "local")  # compare runs local training first
    arguments = ["fedtailor", "compare", *names, *flags, "--seeds", ",".join(map(str, seeds))]
    return shlex.join(arguments) if all(_reproduces(arguments[2:], run) for run in runs) else None


def _reproduces(arguments: Sequence[str], run: Run) -> bool:
    """Return whether `fedtailor compare` with these arguments includes this run."""
    flags = parse_overrides(arguments)
    flags.settings.pop("seeds")
    settings = flags.apply_to({})
    fields = {name: settings.pop(name, {}) for name in flags.positional}[run.method]
    found = replace(make_experiment(settings | {"method": {"name": run.method, **fields}}), seed=run.experiment["seed"])
    if found.data.seed is None:  # the split uses the run's seed
        found = replace(found, data=replace(found.data, seed=found.seed))
    return found == make_experiment(run.experiment)


def _non_default_settings(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from their defaults, and the names of method, data, and network."""
    defaults = describe_config(Experiment()) | {"rounds": None}
    found: dict[str, Any] = {"method": _non_default_fields(experiment["method"])}
    found["data"] = _differing(experiment["data"], asdict(Data()), "name")
    network = dict(experiment["network"])
    if network.get("name") not in NETWORKS:
        raise RunError("The network was defined in Python.")
    found["network"] = _differing(network, vars(NETWORKS[network["name"]]()), "name")
    for name, value in experiment.items():
        if name in ("method", "data", "network"):
            continue
        part = _differing(value, defaults[name]) if isinstance(value, Mapping) else value
        if part != defaults.get(name) and part != {}:
            found[name] = part
    return found


def _non_default_fields(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's name and the fields that differ from their defaults, also of an inner method."""
    if method.get("name") not in METHODS:
        raise RunError("The method was defined in Python.")
    found = _differing(method, describe_method(METHODS[method["name"]]()), "name")
    if isinstance(method.get("inner"), Mapping):
        found["inner"] = _non_default_fields(method["inner"])
    return found


def _differing(settings: Mapping[str, Any], defaults: Mapping[str, Any], required: str = "") -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    return {k: v for k, v in settings.items() if k == required or plain(v) != plain(defaults.get(k))}


def _flags(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return nested settings as flags; the name of a part comes first, as `--part NAME`."""
    arguments: list[str] = []
    for name, value in settings.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            part = dict(value)
            if "name" in part:
                arguments += [_flag_name(path), _flag_value(part.pop("name"), path)]
            arguments += _flags(part, f"{path}.")
        else:
            arguments += [_flag_name(path), _flag_value(value, path)]
    return arguments


def _flag_name(path: str) -> str:
    return f"--{path.replace('_', '-')}"


def _flag_value(value: Any, path: str) -> str:
    if isinstance(value, str):
        parsed = parse_overrides([f"--{path}={value}"]).settings.get(path)
        return value if parsed == value or path in _STRING_SETTINGS else json.dumps(value)
    if isinstance(value, (list, tuple)) and len(value) > 1 and all(type(part) in (int, float) for part in value):
        return ",".join(map(json.dumps, value))
    return json.dumps(value)
