"""The form for a new experiment: its schema from the fields of the dataclasses, and the parsing of submitted values."""

import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedtailor.core.augmentation import Augmentation
from fedtailor.core.method import Method
from fedtailor.core.robust import Robust
from fedtailor.data.dataset import BY_INDICES, BY_OWNER, PartitionedData
from fedtailor.data.datasets import DATASETS
from fedtailor.data.splits.class_fractions import PARTITIONS
from fedtailor.errors import RunError, unknown_name
from fedtailor.experiments.experiment import Experiment, make_experiment
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.experiments.parsing import field_help, first_line
from fedtailor.methods import METHODS
from fedtailor.methods.catalog import catalog
from fedtailor.networks import NETWORKS
from fedtailor.training.attacks import ATTACKS
from fedtailor.training.channel.channel import Channel
from fedtailor.training.engines import ENGINES, RAY
from fedtailor.training.participation import make_schedule
from fedtailor.training.unreliable import Unreliable

_SECTIONS: dict[str, tuple[str, type[Any]]] = {  # tables of an experiment with fixed fields
    "augmentation": ("Augmentation", Augmentation),
    "unreliable": ("Unreliable clients", Unreliable),
    "channel": ("Channel", Channel),
    "robust": ("Robust aggregation", Robust),
}
_CHOICES = {  # string fields that accept only these values
    "partition": [*PARTITIONS, BY_OWNER, BY_INDICES],
    "engine": ["auto", *ENGINES, RAY],
    "attack": ["none", *ATTACKS],
}
_FAST_DATASETS = ("digits",)  # data sets that load immediately, so that an experiment can be checked on its data
_MAX_FIELDS = 400  # of a submitted form


@cache
def form_schema() -> dict[str, Any]:
    """Return all sections of the form with their fields, as JSON values; the first call takes one or two seconds.

    >>> [section["title"] for section in form_schema()["sections"]]
    ['Run', 'Augmentation', 'Unreliable clients', 'Channel', 'Robust aggregation']
    """
    run_fields = [f for f in _fields(Experiment, "") if f["name"] not in ("method", "data", "network", *_SECTIONS)]
    sections = [{"key": "", "title": "Run", "fields": run_fields}]
    sections += [{"key": k, "title": title, "fields": _fields(cls, k)} for k, (title, cls) in _SECTIONS.items()]
    return {
        "sections": sections,
        "methods": {
            name: {"description": paper.paper, "family": paper.family, "fields": _fields(METHODS[name], "")}
            for name, paper in catalog().items()
        },
        "data": _described(DATASETS),
        "networks": _described(NETWORKS),
    }


def parse_form(values: Mapping[str, Any]) -> tuple[dict[str, Any], Experiment]:
    """Return the settings and the experiment of a submitted form; errors are the same as for the command.

    >>> parse_form({"method": "fedprox", "method.mu": "0.5", "rounds": ""})[1].method.mu
    0.5
    """
    settings = parse_overrides(_arguments(values)).apply_to({})
    experiment = make_experiment(settings)
    experiment.check_method(experiment.method)
    data, participation = experiment.data, experiment.participation
    # the clients of a folder and owners are unknown; zero is an error later
    if isinstance(data, PartitionedData) and data.clients is not None and data.clients > 0:
        rounds = experiment.rounds if experiment.schedule is not None else min(experiment.num_rounds, 1)
        make_schedule(data.clients, rounds, participation, experiment.seed, experiment.schedule, experiment.unreliable)
    return settings, experiment


def check_form(values: Mapping[str, Any]) -> tuple[dict[str, Any], Experiment]:
    """Parse a form, and check the experiment on its data if these load immediately."""
    settings, experiment = parse_form(values)
    if experiment.data.name in _FAST_DATASETS:
        experiment.check(experiment.load())
    return settings, experiment


def equivalent_command(values: Mapping[str, Any], root: Path) -> str:
    """Return the command that starts the same experiment.

    >>> equivalent_command({"method": "fedavg", "data.clients": "5"}, Path("my runs"))
    "fedtailor run --method=fedavg --data.clients=5 '--out=my runs'"
    """
    out = [] if str(root) == "runs" else [f"--out={root}"]
    return shlex.join(["fedtailor", "run", *_arguments(values), *out])


def _arguments(values: Mapping[str, Any]) -> list[str]:
    """Return the values as the command's arguments, without empty ones."""
    if (
        not isinstance(values, Mapping)
        or len(values) > _MAX_FIELDS
        or not all(isinstance(v, str) for v in values.values())
    ):
        raise RunError(f"The form must be an object of at most {_MAX_FIELDS} strings by field name.")
    for name in values:
        if name in ("out", "name") or not name or set(name) - set("abcdefghijklmnopqrstuvwxyz0123456789_."):
            raise unknown_name("field of the experiment", name, ["method", "data", "network", "rounds", *_SECTIONS])
    return [f"--{name}={value.strip()}" for name, value in values.items() if value.strip()]


def _described(known: Mapping[str, type[Any]]) -> dict[str, dict[str, Any]]:
    return {name: {"description": first_line(cls), "fields": _fields(cls, "")} for name, cls in known.items()}


def _fields(cls: type[Any], prefix: str) -> list[dict[str, Any]]:
    hints = get_type_hints(cls)
    return [
        _field(f"{prefix}.{name}" if prefix else name, hints[name], default, help_text)
        for name, (default, help_text) in field_help(cls).items()
    ]


def _field(name: str, hint: Any, default: str, help_text: str) -> dict[str, Any]:
    """Return a field's input type and choices (from its annotation), its default, and its help."""
    kind, choices = _input_type(name, hint)
    shown = default.strip("()").replace(", ", ",").strip(",") if kind == "text" else default
    if kind in ("integer", "number") and default == "None":
        shown = "none"
    if kind == "choice" and hint is bool:
        shown = default.lower()
    return {"name": name, "label": name.rpartition(".")[2].replace("_", " "), "type": kind, "choices": choices,
            "default": "none" if shown == "None" else shown, "help": help_text}  # fmt: skip


def _input_type(name: str, hint: Any) -> tuple[str, list[str]]:
    if name in _CHOICES:
        return "choice", _CHOICES[name]
    if hint is Method:
        return "method", [*METHODS]
    if hint is bool:
        return "choice", ["true", "false"]
    if get_origin(hint) is Literal:
        return "choice", [str(value) for value in get_args(hint)]
    types = [
        part for part in (get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)) if part is not NoneType
    ]
    if types in ([int], [float]):
        return ("integer" if types == [int] else "number"), []
    suggestions = [str(value) for part in types if get_origin(part) is Literal for value in get_args(part)]
    return "text", suggestions
