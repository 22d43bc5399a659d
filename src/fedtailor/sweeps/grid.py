"""A grid of settings: which flags have several values, and the experiments that they make."""

import reprlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from hashlib import sha256
from itertools import pairwise, product
from math import prod
from typing import Any, get_args, get_origin, get_type_hints

from fedtailor.channel import Channel
from fedtailor.data.datasets import Data
from fedtailor.errors import Refused
from fedtailor.experiment import Experiment, make
from fedtailor.files import file_name
from fedtailor.flags import Flags, read_flags
from fedtailor.methods import METHODS
from fedtailor.networks import NETWORKS
from fedtailor.unreliable import Unreliable

REPEATS = ("data.seed", "seed")  # axes of which no value is better than another: they show what chance does
_MOST = 10_000  # runs; a grid beyond is a slip
_LONGEST = 120  # letters of a run's name, which is a folder's
_KINDS: dict[str, list[type[Any]]] = {
    "data": [Data],
    "unreliable": [Unreliable],
    "channel": [Channel],
    "network": [*NETWORKS.values()],
}
_CHOSEN: dict[str, Mapping[str, type[Any]]] = {"method": METHODS, "network": NETWORKS, "method.inner": METHODS}
Axes = Mapping[str, list[Any]]  # a flag's name -> its values
Values = Mapping[str, Any]  # axis -> value; a field that a method has not is left out


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    label: str  # its folder
    method: str  # its name
    values: Values
    experiment: Experiment

    @property
    def setting(self) -> str:
        """What it has in common with its repetitions, as text."""
        return str({axis: value for axis, value in self.values.items() if axis not in REPEATS})

    @property
    def source(self) -> tuple[Data, int | None]:
        """By what its data are known: their settings, and the seed where the split follows it."""
        data = self.experiment.data
        return data, self.experiment.seed if data.seed is None else None


def short_names(axes: Sequence[str]) -> dict[str, str]:
    """Every axis by its field alone, where that is clear.

    >>> short_names(["method.rho", "method.lr", "method.inner.lr", "seed"])
    {'method.rho': 'rho', 'method.lr': 'method.lr', 'method.inner.lr': 'method.inner.lr', 'seed': 'seed'}
    """
    ends = [axis.rpartition(".")[2] for axis in axes]
    return {axis: end if ends.count(end) == 1 else axis for axis, end in zip(axes, ends, strict=True)}


def text_of(value: Any) -> str:
    """A value as people write it.

    >>> [text_of(value) for value in (0.010, 1.0, 1e-5, [64, 32], True, "iid")]
    ['0.01', '1', '1e-05', '64,32', 'true', 'iid']
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return ",".join(map(text_of, value)) if isinstance(value, list | tuple) else str(value)


def gather(words: Sequence[str]) -> tuple[list[str], dict[str, list[Any]]]:
    """Words without a flag, and for every flag what it was given each time."""
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    files, given = list(words[: starts[0]] if starts else words), dict[str, list[Any]]()
    for start, end in pairwise([*starts, len(words)]):
        flags = read_flags(words[start:end])
        files += flags.words
        for name, value in flags.settings.items():
            given.setdefault(name.removesuffix(".name"), []).append(value)
    return files, given


def find_axes(given: Axes, base: Mapping[str, Any]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """The flags with several values, the seed last, and those with one. Where a field takes a list itself, a comma is
    inside a value, and several values are several flags."""
    axes, single = dict[str, list[Any]](), dict[str, Any]()
    for name, found in given.items():
        whole = _takes_list(name)
        values = found if whole else [v for value in found for v in (value if isinstance(value, list) else [value])]
        if not values or "" in values:
            raise Refused(f"--{name.replace('_', '-')} takes values such as 0.01,0.1, not {reprlib.repr(found[-1])}.")
        if len(values) > 1 or (not whole and isinstance(found[0], list)) or name == "seed":
            axes[name] = values
        else:
            single[name] = values[0]
    seeds = axes.pop("seed", [base.get("seed", 0)])
    return axes | {"seed": seeds}, single


def _takes_list(name: str) -> bool:
    """Whether a field may be a list; methods that share a field's name agree about it."""
    *part, field = name.split(".")
    kinds = _KINDS.get(part[0], []) if part else [Experiment]
    if part and part[0] in ("method", *METHODS):
        kinds = [*METHODS.values()]
    return any(_is_list(get_type_hints(kind)[field]) for kind in kinds if field in {f.name for f in fields(kind)})


def _is_list(hint: Any) -> bool:
    return get_origin(hint) in (list, tuple) or any(map(_is_list, get_args(hint)))


def make_points(axes: Axes, single: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[list[Point], dict[str, str]]:
    """All of the grid, each run once, and what cannot be made; if nothing can, that is refused."""
    if (runs := prod(map(len, axes.values()))) > _MOST:
        raise Refused(f"These are {runs:,} runs, and {_MOST:,} are the most; leave out some values.")
    points, refused = dict[str, Point](), dict[str, str]()
    for seed in axes["seed"]:
        for values in product(*([seed] if axis == "seed" else found for axis, found in axes.items())):
            here = dict(zip(axes, values, strict=True))
            settings = _settings({**single, **here}, axes, base)
            paths = _paths(axes, settings)
            try:
                experiment = make(settings)
            except Refused as why:
                raw = {axis: here[axis] for axis in paths}
                refused.setdefault(_label(_method(settings), axes, raw), str(why))
                continue
            own = {axis: _value(experiment, path, here[axis]) for axis, path in paths.items()}
            label = _label(_method(settings), axes, own)
            points.setdefault(label, Point(label, _method(settings), own, experiment))
    if not points:
        raise Refused(next(iter(refused.values())))
    groups = dict[Any, list[Point]]()
    for point in points.values():
        groups.setdefault(point.source, []).append(point)
    return [point for group in groups.values() for point in group], refused


def _settings(flags: Mapping[str, Any], axes: Axes, base: Mapping[str, Any]) -> dict[str, Any]:
    """The nested settings of one point. Of several methods, or networks, each gets the fields that it has."""
    own = {name: value for name, value in flags.items() if name.partition(".")[0] in METHODS}
    settings = Flags([], {name: value for name, value in flags.items() if name not in own}).over(base)
    for part, kinds in _CHOSEN.items():
        found, names = _part(settings, part), axes.get(part, [])
        known = {f.name for name in names if name in kinds for f in fields(kinds[name])}
        if isinstance(found, dict) and found.get("name") in kinds:
            had = {"name", *(f.name for f in fields(kinds[found["name"]]))}
            for field in [field for field in found if field not in had and field in known]:
                del found[field]
    for name, value in own.items():
        method, _, field = name.partition(".")
        if not field:
            raise Refused(f"--{method} has fields, such as --{method}.lr 0.1, and no value of its own.")
        if method not in axes.get("method", [_method(settings)]):
            raise Refused(f"--{name} has no meaning, for {method} is not swept; name it: --method fedavg,{method}.")
        if method == _method(settings):
            settings = Flags([], {f"method.{field}": value}).over(settings)
    return settings


def _paths(axes: Axes, settings: Mapping[str, Any]) -> dict[str, str]:
    """Axis -> where in the settings its value is, for those that this method and this network have."""
    found, method = dict[str, str](), _method(settings)
    for axis in axes:
        first, _, field = axis.partition(".")
        overruled = first == "method" and field and f"{method}.{field}" in axes  # the same value twice
        if first == method:
            found[axis] = f"method.{field}"
        elif not overruled and (axis == "seed" or _part(settings, axis) is not None):
            found[axis] = axis
    return found


def _part(settings: Any, path: str) -> Any:
    """What lies at a dotted name; None if nothing does."""
    for part in path.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings


def _method(settings: Mapping[str, Any]) -> str:
    found = settings.get("method", "fedavg")
    return str(found.get("name", "fedavg") if isinstance(found, Mapping) else found)


def _value(experiment: Experiment, path: str, given: Any) -> Any:
    """A value as the experiment has it: 1 is 1.0 where a field is a float. A part is known by its name."""
    if path in (*_CHOSEN, "data") or path.endswith(".inner"):
        return given
    value: Any = experiment
    for part in path.split("."):
        value = getattr(value, part)
    return "none" if value is None else list(value) if isinstance(value, tuple) else value


def _label(method: str, axes: Mapping[str, Any], values: Values) -> str:
    """The name of a run's folder, which no other run has and which stays when values are added."""
    names = short_names(list(axes))
    swept = {axis: text_of(value) for axis, value in values.items() if axis != "method"}
    parts = [f"{names[axis].replace('.', '-')}{text}" for axis, text in swept.items()]
    text = "-".join([method, *parts]).replace(",", "x")
    word = file_name(text)
    if word == text and len(word) <= _LONGEST:
        return word
    return f"{word[:_LONGEST]}-{sha256(text.encode()).hexdigest()[:8]}"


def fixed_settings(axes: Axes, single: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for besides the grid."""
    settings = Flags([], dict(single)).over(deepcopy(dict(base)))
    for axis in axes:
        part, _, field = axis.rpartition(".")
        within = _part(settings, part) if part else settings
        if isinstance(within, dict):
            found = within.pop(field, None)
            if isinstance(found, Mapping):  # a part of which the name is swept, and not its fields
                within[field] = {name: value for name, value in found.items() if name != "name"}
    return settings
