"""The commands that reproduce runs and sweeps."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from fedtailor.core.code_reference import PARTS, find_references, is_reference, short_name
from fedtailor.core.untrusted_input import check_settings
from fedtailor.data.dataset import Data
from fedtailor.data.datasets import DATASETS
from fedtailor.errors import FedTailorError, RunError
from fedtailor.experiments.experiment import Experiment, make_experiment
from fedtailor.experiments.grid import parse_grid
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.experiments.own_code import check_importable
from fedtailor.experiments.sweep import RANKED, Plan, parse_sweep
from fedtailor.methods import METHODS
from fedtailor.networks import NETWORKS
from fedtailor.runs.run import Run
from fedtailor.runs.toml import flatten_settings
from fedtailor.training.simulate import describe_config, describe_method

_STRING_SETTINGS = ("data.folder",)  # flags that are never parsed as JSON


def run_commands(runs: Sequence[Run]) -> list[str]:
    """Return one `fedtailor compare` command for all runs if possible, else one command per run.

    The list is empty if no command can reproduce a run, because its method, network, or data were defined in a script.
    Own code is not imported, so its settings are taken as they are.
    """
    try:
        for run in runs:
            for part, reference in find_references(run.experiment).items():
                check_importable(part, reference)
            _comparable(run.experiment)  # raises for settings that no command could have
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
        if references := _references_in(plan):
            for reference in references:
                check_importable("method", reference)
            return shlex.join(arguments) if _names_grid(arguments[2:], plan) else None
        found = parse_sweep(arguments[2:]).plan
    except FedTailorError:
        return None
    same = found.axes == plan.axes and found.moment == plan.moment and found.runs == plan.runs
    return shlex.join(arguments) if same and _dotted(found.fixed) == _dotted(plan.fixed) else None


def _references_in(plan: Plan) -> list[str]:
    """Return the references to users' own code in a sweep."""
    named = [{part: values.get(part) for part in PARTS} for values in plan.runs.values()]
    inner = [{"method": {"name": values.get("method.inner")}} for values in plan.runs.values()]
    found = [find_references(settings) for settings in (plan.fixed, *named, *inner)]
    return list(dict.fromkeys(reference for references in found for reference in references.values()))


def _names_grid(arguments: Sequence[str], plan: Plan) -> bool:
    """Return whether arguments name the fixed settings and the values of all axes of a sweep."""
    _, given = parse_grid(arguments)
    for axis in plan.axes:
        wanted = [values[axis] for values in plan.runs.values() if axis in values]
        found = [value for one in given.get(axis, []) for value in (one if isinstance(one, list) else [one])]
        if any(isinstance(value, list) for value in wanted) or any(value not in found for value in wanted):
            return False
    return all(given.get(name, [None])[-1] == value for name, value in _dotted(plan.fixed).items())


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
    if _comparable(parse_overrides(arguments[2:]).apply_to({})) != _comparable(run.experiment):
        raise RunError("The run's settings cannot be written as flags.")
    return shlex.join(arguments)


def _comparable(settings: Mapping[str, Any]) -> tuple[Experiment, dict[str, Any]]:
    """Return the experiment with these settings, and the settings of parts with own code, which is not imported."""
    check_settings(settings, "The run")  # own code may accept any value, but a command must be safe to copy
    own = {part: _as_table(settings[part]) for part in PARTS if find_references({part: settings.get(part)})}
    experiment = make_experiment({name: value for name, value in settings.items() if name not in own})
    if "data" in own:
        own["data"] = {"seed": experiment.seed} | own["data"]  # by default, the split uses the run's seed
    elif isinstance(experiment.data, Data) and experiment.data.seed is None:
        experiment = replace(experiment, data=replace(experiment.data, seed=experiment.seed))
    return experiment, own


def _as_table(part: Any) -> dict[str, Any]:
    """Return the settings of a part, which may be given as a name only, as a nested dict."""
    settings = dict(part) if isinstance(part, Mapping) else {"name": part}
    return {n: _as_table(v) if isinstance(v, Mapping) or n == "inner" else v for n, v in settings.items()}


def _compare_command(runs: Sequence[Run]) -> str | None:
    """Return the `fedtailor compare` command if all methods have the same settings and seeds, else None."""
    local = {run.experiment["seed"]: run.experiment["method"] for run in runs if _is_local(run, sampled=False)}
    sampled = {run.experiment["seed"]: run.experiment["method"] for run in runs if _is_local(run, sampled=True)}
    if local and sampled:  # a reference row
        command = _compare_command([run for run in runs if not _is_local(run, sampled=True)])
        same = sampled == {seed: {**method, "sampled": True} for seed, method in local.items()}
        return f"{command} --sampled-local" if command is not None and same else None
    methods = {_method_name(run): run.experiment["method"] for run in runs}
    seeds = sorted({run.experiment["seed"] for run in runs})
    pairs = sorted((_method_name(run), run.experiment["seed"]) for run in runs)
    known = all(name in METHODS or is_reference(name) for name in methods) and "local" in methods
    if not known or len({short_name(name).lower() for name in methods}) < len(methods):
        return None
    if pairs != sorted((name, seed) for name in methods for seed in seeds):
        return None
    if any(run.experiment["method"] != methods[_method_name(run)] for run in runs):
        return None
    settings = _non_default_settings(runs[0].experiment)
    settings.pop("method"), settings.pop("seed", None)
    repeats = _repeat_flags(settings["data"], runs)
    if all(run.experiment["data"].get("seed") == run.experiment["seed"] for run in runs):
        settings["data"].pop("seed", None)
    fields = {
        short_name(name): {k: v for k, v in _non_default_fields(method).items() if k != "name"}
        for name, method in methods.items()
    }
    flags = _flags(settings | {name: changed for name, changed in fields.items() if changed})
    names = sorted(methods, key=lambda name: name != "local")  # compare runs local training first
    arguments = ["fedtailor", "compare", *names, *flags, *(repeats or ["--seeds", ",".join(map(str, seeds))])]
    return shlex.join(arguments) if all(_reproduces(arguments[2:], run) for run in runs) else None


def _repeat_flags(data: dict[str, Any], runs: Sequence[Run]) -> list[str]:
    """Return the flags for redrawn splits, and remove their settings; an empty list if the runs are not such splits."""
    numbers = sorted({run.experiment["data"].get("repeat", -1) for run in runs})
    folds, first = runs[0].experiment["data"].get("folds") or 1, numbers[0]
    whole = len(numbers) % folds == first % folds == 0
    if first < 0 or numbers != [*range(first, first + len(numbers))] or not whole:
        return []
    for name in ("repeat", "folds"):
        data.pop(name, None)
    seed = first // folds
    if data.get("seed", 0) == seed:  # the default with --seeds
        data.pop("seed", None)
    flags = ["--repeats", str(len(numbers) // folds)] + (["--folds", str(folds)] if folds > 1 else [])
    return [*flags, *(["--seeds", str(seed)] if seed else [])]


def _is_local(run: Run, sampled: bool) -> bool:
    method = run.experiment["method"]
    return method["name"] == "local" and bool(method.get("sampled")) == sampled


def _reproduces(arguments: Sequence[str], run: Run) -> bool:
    """Return whether `fedtailor compare` with these arguments includes this run."""
    flags = parse_overrides(arguments)
    first, repeats = flags.settings.pop("seeds", 0), flags.settings.pop("repeats", None)
    if repeats is not None:  # each run has a split of its own, of clients that are drawn with the first seed
        own = {"data.repeat": run.experiment["seed"], "data.folds": flags.settings.pop("folds", None)}
        seed = {"data.seed": first} if "seed" in run.experiment["data"] else {}
        flags.settings.update(seed | flags.settings | own)
    settings = flags.apply_to({})
    name = _method_name(run)
    fields = {other: settings.pop(short_name(other), {}) for other in flags.positional}[name]
    settings |= {"method": {"name": name, **fields}, "seed": run.experiment["seed"]}
    return _comparable(settings) == _comparable(run.experiment)


def _method_name(run: Run) -> str:
    """Return the name by which `compare` knows a method; a wrapper method has another name, unknown to it."""
    method = run.experiment["method"]
    return run.method if any(isinstance(value, Mapping) for value in method.values()) else str(method["name"])


def _non_default_settings(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from their defaults, and the names of method, data, and network."""
    defaults = describe_config(Experiment()) | {"rounds": None}
    found: dict[str, Any] = {"method": _non_default_fields(experiment["method"])}
    data, network = dict(experiment["data"]), dict(experiment["network"])
    found["data"] = data if is_reference(data["name"]) else _differing(data, asdict(DATASETS[data["name"]]()), "name")
    names = [one["name"] for one in network.get("networks", [network])]
    if not all(name in NETWORKS or is_reference(name) for name in names):
        raise RunError("The network was defined in Python.")
    built_in = NETWORKS.get(network["name"])
    found["network"] = network if built_in is None else _differing(network, vars(built_in()), "name")
    for name, value in experiment.items():
        if name in ("method", "data", "network"):
            continue
        part = _differing(value, defaults[name]) if isinstance(value, Mapping) else value
        if part != defaults.get(name) and part != {}:
            found[name] = part
    return found


def _non_default_fields(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's name and the fields that differ from their defaults, also of an inner method."""
    if find_references({"method": method}):
        return dict(method)  # the defaults of own code are unknown
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
