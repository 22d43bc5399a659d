"""Grids of settings: which flags have several values, and the experiments of all their combinations."""

import reprlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from hashlib import sha256
from itertools import pairwise, product
from math import prod
from typing import Any, get_args, get_origin, get_type_hints

from fedtailor.analysis.formatting import format_value
from fedtailor.core.augmentation import Augmentation
from fedtailor.core.code_reference import short_name
from fedtailor.core.robust import Robust
from fedtailor.data.dataset import Data
from fedtailor.data.datasets import DATASETS
from fedtailor.errors import ConfigError, FedTailorError
from fedtailor.experiments.experiment import Experiment, make_experiment
from fedtailor.experiments.overrides import Overrides, parse_overrides
from fedtailor.experiments.own_code import NO_CONSENT, CodeConsent, check_distinct_names
from fedtailor.experiments.own_parts import OwnData, OwnPart, part_types
from fedtailor.methods import METHODS
from fedtailor.networks import NETWORKS
from fedtailor.runs.files import safe_file_name
from fedtailor.training.attacks import ATTACKS
from fedtailor.training.channel.channel import Channel
from fedtailor.training.unreliable import Unreliable

REPEATS = ("data.seed", "data.repeat", "seed")  # axes that repeat an experiment and are not tuned
_MAX_RUNS = 10_000  # a larger grid is probably a mistake
_MAX_LABEL_LENGTH = 120  # of a run's folder name
_CLASSES: dict[str, list[type[Any]]] = {
    "data": [*DATASETS.values()],
    "augmentation": [Augmentation],
    "unreliable": [Unreliable],
    "channel": [Channel],
    "robust": [Robust],
    "attack": [*ATTACKS.values()],
    "network": [*NETWORKS.values()],
}
_NAMED_PARTS = ("method", "network", "data", "attack", "method.inner")
Axes = Mapping[str, list[Any]]  # dotted name of a setting -> its values
Values = Mapping[str, Any]  # axis -> value, without fields that the method does not have


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    label: str  # name of its folder
    method: str  # registry key, or a reference to the user's own class
    values: Values
    experiment: Experiment

    @property
    def setting(self) -> str:
        """A key that is equal for all repetitions of a setting."""
        return str({axis: value for axis, value in self.values.items() if axis not in REPEATS})

    @property
    def data_key(self) -> tuple[Data | OwnData, int | None]:
        """The settings of the data, and the seed if the split depends on it; equal keys mean equal data."""
        data = self.experiment.data
        return data, self.experiment.seed if data.seed is None else None


def short_names(axes: Sequence[str]) -> dict[str, str]:
    """Return axis -> the name of its field, or the dotted name where fields are ambiguous.

    >>> short_names(["method.rho", "method.lr", "method.inner.lr", "seed"])
    {'method.rho': 'rho', 'method.lr': 'method.lr', 'method.inner.lr': 'method.inner.lr', 'seed': 'seed'}
    """
    ends = [axis.rpartition(".")[2] for axis in axes]
    return {axis: end if ends.count(end) == 1 else axis for axis, end in zip(axes, ends, strict=True)}


def value_label(axis: str, value: Any) -> str:
    """Return a value of an axis for tables and sentences: a method by its proper name, own code without its module.

    >>> value_label("method", "selffl"), value_label("method.lr", 0.1), value_label("network", "my_module:MyNet")
    ('Self-FL', '0.1', 'MyNet')
    """
    kind = METHODS.get(str(value)) if axis in ("method", "method.inner") else None
    text = short_name(value) if axis in _NAMED_PARTS and isinstance(value, str) else format_value(value)
    return text if kind is None else kind.class_title()


def parse_grid(words: Sequence[str]) -> tuple[list[str], dict[str, list[Any]]]:
    """Return positional arguments, and flag -> the values of all its occurrences."""
    starts = [index for index, word in enumerate(words) if word.startswith("--")]
    files, given = list(words[: starts[0]] if starts else words), dict[str, list[Any]]()
    for start, end in pairwise([*starts, len(words)]):
        flags = parse_overrides(words[start:end])
        files += flags.positional
        for name, value in flags.settings.items():
            given.setdefault(name.removesuffix(".name"), []).append(value)
    return files, given


def find_axes(
    given: Axes, base: Mapping[str, Any], consent: CodeConsent = NO_CONSENT
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Return the flags with several values, the seed last, and the flags with one value. For a field that is a list,
    commas separate the elements of one value, and several values need several flags."""
    axes, single = dict[str, list[Any]](), dict[str, Any]()
    named = _named_types(given, base, consent)
    for name, found in given.items():
        is_list = _takes_list(name, named)
        values = found if is_list else [v for value in found for v in (value if isinstance(value, list) else [value])]
        if not values or "" in values:
            raise ConfigError(
                f"--{name.replace('_', '-')} must have values such as 0.01,0.1, got {reprlib.repr(found[-1])}."
            )
        if len(values) > 1 or (not is_list and isinstance(found[0], list)) or name == "seed":
            axes[name] = values
        else:
            single[name] = values[0]
    seeds = axes.pop("seed", [base.get("seed", 0)])
    return axes | {"seed": seeds}, single


def _named_types(given: Axes, base: Mapping[str, Any], consent: CodeConsent) -> dict[str, list[Mapping[str, Any]]]:
    """Return part -> the types of the settings of each method, network, or data set that the sweep names."""
    found = dict[str, list[Mapping[str, Any]]]()
    for part in _NAMED_PARTS:
        before = _part(base, part)
        names = [before.get("name") if isinstance(before, Mapping) else before]
        names += [name for value in given.get(part, []) for name in (value if isinstance(value, list) else [value])]
        for name in dict.fromkeys(name for name in names if isinstance(name, str)):
            found.setdefault(part.partition(".")[0], []).append(part_types(part, name, consent))
    return found


def _takes_list(name: str, named: Mapping[str, list[Mapping[str, Any]]]) -> bool:
    """Return whether a field can be a list; fields with the same name agree about it in all built-in methods."""
    *part, field = name.split(".")
    first = part[0] if part else ""
    root = first if first in (*_CLASSES, "") else "method"
    kinds = _CLASSES.get(root, [*METHODS.values()]) if part else [Experiment]
    types = [known[field] for known in named.get(root, []) if field in known]
    types = types or [get_type_hints(kind)[field] for kind in kinds if field in {f.name for f in fields(kind)}]
    return any(map(_is_list, types))


def _is_list(hint: Any) -> bool:
    return get_origin(hint) in (list, tuple) or any(map(_is_list, get_args(hint)))


def make_points(
    axes: Axes, single: Mapping[str, Any], base: Mapping[str, Any], consent: CodeConsent = NO_CONSENT
) -> tuple[list[Point], dict[str, str]]:
    """Return all points of the grid, and label -> error message of invalid ones; raise an error if all are invalid."""
    if (runs := prod(map(len, axes.values()))) > _MAX_RUNS:
        raise ConfigError(f"The grid has {runs:,} runs, but at most {_MAX_RUNS:,} are allowed; remove some values.")
    for part in _NAMED_PARTS:
        check_distinct_names([name for name in axes.get(part, []) if isinstance(name, str)])
    points, invalid = dict[str, Point](), dict[str, str]()
    for seed in axes["seed"]:
        for values in product(*([seed] if axis == "seed" else found for axis, found in axes.items())):
            here = dict(zip(axes, values, strict=True))
            settings = _settings({**single, **here}, axes, base, consent)
            paths = _paths(axes, settings)
            try:
                experiment = make_experiment(settings, consent)
            except FedTailorError as error:
                raw = {axis: here[axis] for axis in paths}
                invalid.setdefault(_label(_method(settings), axes, raw), str(error))
                continue
            own = {axis: _value(experiment, path, here[axis]) for axis, path in paths.items()}
            label = _label(_method(settings), axes, own)
            points.setdefault(label, Point(label, _method(settings), own, experiment))
    if not points:
        raise ConfigError(next(iter(invalid.values())))
    groups = dict[Any, list[Point]]()
    for point in points.values():
        groups.setdefault(point.data_key, []).append(point)
    return [point for group in groups.values() for point in group], invalid


def _settings(flags: Mapping[str, Any], axes: Axes, base: Mapping[str, Any], consent: CodeConsent) -> dict[str, Any]:
    """Return the nested settings of one point; each method, network, and data set gets only the fields that it has."""
    labels = {short_name(str(name)) for name in axes.get("method", [flags.get("method", _method(base))])}
    own = {name: value for name, value in flags.items() if name.partition(".")[0] in (*METHODS, *labels)}
    settings = Overrides([], {name: value for name, value in flags.items() if name not in own}).apply_to(base)
    for part in _NAMED_PARTS:
        found, names = _part(settings, part), axes.get(part, [])
        known = {field for name in names for field in part_types(part, str(name), consent)}
        if isinstance(found, dict) and (had := part_types(part, str(found.get("name")), consent)):
            for field in [field for field in found if field != "name" and field not in had and field in known]:
                del found[field]
    for name, value in own.items():
        method, _, field = name.partition(".")
        if not field:
            raise ConfigError(f"--{method} needs a field, such as --{method}.lr 0.1.")
        if method not in labels:
            raise ConfigError(
                f"--{name} is invalid: {method} is not in the sweep; add it with --method fedavg,{method}."
            )
        if method == short_name(_method(settings)):
            settings = Overrides([], {f"method.{field}": value}).apply_to(settings)
    return settings


def _paths(axes: Axes, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return axis -> path of its value in the settings, for the axes that this method and network have."""
    found, method = dict[str, str](), short_name(_method(settings))
    for axis in axes:
        first, _, field = axis.partition(".")
        overridden = first == "method" and field and f"{method}.{field}" in axes  # the more specific flag wins
        if first == method:
            found[axis] = f"method.{field}"
        elif not overridden and (axis == "seed" or _part(settings, axis) is not None):
            found[axis] = axis
    return found


def _part(settings: Any, path: str) -> Any:
    """Return the value at a dotted name, or None."""
    for part in path.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings


def _method(settings: Mapping[str, Any]) -> str:
    found = settings.get("method", "fedavg")
    return str(found.get("name", "fedavg") if isinstance(found, Mapping) else found)


def _value(experiment: Experiment, path: str, given: Any) -> Any:
    """Return the validated value, such as 1.0 for 1 in a float field; a part is represented by its name."""
    if path in _NAMED_PARTS or path.endswith(".inner"):
        return given
    value: Any = experiment
    for part in path.split("."):
        is_argument = isinstance(value, OwnPart) and part in value.arguments
        value = value.arguments[part] if is_argument else getattr(value, part)
    return "none" if value is None else list(value) if isinstance(value, tuple) else value


def _label(method: str, axes: Mapping[str, Any], values: Values) -> str:
    """Return the unique folder name of a run, which stays the same when values are added to the sweep."""
    names = short_names(list(axes))
    swept = {axis: format_value(value) for axis, value in values.items() if axis != "method"}
    swept |= {axis: short_name(text) for axis, text in swept.items() if axis in _NAMED_PARTS}
    parts = [f"{names[axis].replace('.', '-')}{text}" for axis, text in swept.items()]
    text = "-".join([short_name(method), *parts]).replace(",", "x")
    word = safe_file_name(text)
    if word == text and len(word) <= _MAX_LABEL_LENGTH:
        return word
    return f"{word[:_MAX_LABEL_LENGTH]}-{sha256(text.encode()).hexdigest()[:8]}"


def fixed_settings(axes: Axes, single: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are the same in all runs."""
    settings = Overrides([], dict(single)).apply_to(deepcopy(dict(base)))
    for axis in axes:
        part, _, field = axis.rpartition(".")
        parent = _part(settings, part) if part else settings
        if isinstance(parent, dict):
            found = parent.pop(field, None)
            if isinstance(found, Mapping):  # only the part's name is swept, not its other fields
                parent[field] = {name: value for name, value in found.items() if name != "name"}
    return settings
