"""The form for a new experiment, made from the fields of the dataclasses, and what is written into it."""

import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedtailor.catalogue import catalogue
from fedtailor.channel import Channel
from fedtailor.data.datasets import DATASETS, Data
from fedtailor.data.partition import PARTITIONS
from fedtailor.engines import ENGINES
from fedtailor.errors import Refused, unknown
from fedtailor.experiment import Experiment, field_notes, make
from fedtailor.flags import read_flags
from fedtailor.method import Method
from fedtailor.methods import METHODS
from fedtailor.networks import NETWORKS
from fedtailor.schedule import make_schedule
from fedtailor.unreliable import Unreliable

_PARTS = {"data": Data, "unreliable": Unreliable, "channel": Channel}  # tables of an experiment with fixed fields
_TITLES = {"": "The run", "data": "Data", "unreliable": "Unreliable clients", "channel": "Channel"}
_NAMES = {  # texts that are one of a few names
    "data.name": [*DATASETS, "folder"],
    "data.partition": [*PARTITIONS],
    "engine": ["auto", *ENGINES],
}
_AT_HAND = ("digits",)  # data sets that are loaded in an instant, so that more can be tried before a start
_MOST = 400  # fields of a form that was sent


@cache
def form() -> dict[str, Any]:
    """All parts of the form with their fields, for JSON; to read the notes in the sources takes a second or two.

    >>> [part["title"] for part in form()["parts"]]
    ['The run', 'Data', 'Unreliable clients', 'Channel']
    """
    own = [f for f in _fields(Experiment, "") if f["name"] not in ("method", "network", *_PARTS)]
    parts = [{"key": "", "title": _TITLES[""], "fields": own}]
    parts += [{"key": key, "title": _TITLES[key], "fields": _fields(kind, key)} for key, kind in _PARTS.items()]
    told = catalogue()
    about = {name: {"about": told[name].paper, "family": told[name].family} for name in METHODS if name in told}
    return {
        "parts": parts,
        "methods": {n: {**about.get(n, {}), "fields": _fields(kind, "")} for n, kind in METHODS.items()},
        "networks": {n: {"about": _first_line(kind), "fields": _fields(kind, "")} for n, kind in NETWORKS.items()},
        "data": {name: dataset.about for name, dataset in DATASETS.items()}
        | {"folder": "your own clients: one .npz or one folder of pictures each"},
    }


def read(values: Mapping[str, Any]) -> tuple[dict[str, Any], Experiment]:
    """What was written into the form, as settings and as the experiment they are; refused as the command refuses it.

    >>> read({"method": "fedprox", "method.mu": "0.5", "rounds": ""})[1].method.mu
    0.5
    """
    settings = read_flags(_words(values)).over({})
    experiment = make(settings)
    experiment.channel.check(experiment.method)
    asked, share = experiment.data.clients, experiment.participation
    if experiment.data.name != "folder" and asked > 0:  # a folder's are not counted yet; none at all are refused below
        first = experiment.rounds if experiment.schedule is not None else min(experiment.length, 1)
        make_schedule(asked, first, share, experiment.seed, experiment.schedule, experiment.unreliable)
    return settings, experiment


def check(values: Mapping[str, Any]) -> tuple[dict[str, Any], Experiment]:
    """The same, and tried on its data where these are at hand."""
    settings, experiment = read(values)
    if experiment.data.name in _AT_HAND:
        experiment.check(experiment.load())
    return settings, experiment


def command(values: Mapping[str, Any], root: Path) -> str:
    """The command that does the same.

    >>> command({"method": "fedavg", "data.clients": "5"}, Path("my runs"))
    "fedtailor run --method=fedavg --data.clients=5 '--out=my runs'"
    """
    out = [] if str(root) == "runs" else [f"--out={root}"]
    return shlex.join(["fedtailor", "run", *_words(values), *out])


def _words(values: Mapping[str, Any]) -> list[str]:
    """As the command takes them; what is left empty is left out."""
    if not isinstance(values, Mapping) or len(values) > _MOST or not all(isinstance(v, str) for v in values.values()):
        raise Refused("A form is a table of texts by the names of its fields.")
    for name in values:
        if name in ("out", "name") or not name or set(name) - set("abcdefghijklmnopqrstuvwxyz0123456789_."):
            raise unknown("field of the experiment", name, ["method", "network", "rounds", *_PARTS])
    return [f"--{name}={value.strip()}" for name, value in values.items() if value.strip()]


def _fields(kind: type[Any], prefix: str) -> list[dict[str, Any]]:
    hints = get_type_hints(kind)
    return [
        _field(f"{prefix}.{name}" if prefix else name, hints[name], default, note)
        for name, (default, note) in field_notes(kind).items()
    ]


def _field(name: str, hint: Any, default: str, note: str) -> dict[str, Any]:
    """An input: its kind from the annotation, its default and the comment beside it."""
    kind, choices = _kind(name, hint)
    shown = default.strip("()").replace(", ", ",").strip(",") if kind == "text" else default
    if kind in ("whole", "number") and default == "None":
        shown = "none"
    if kind == "choice" and hint is bool:
        shown = default.lower()
    return {"name": name, "label": name.rpartition(".")[2].replace("_", " "), "kind": kind, "choices": choices,
            "default": "none" if shown == "None" else shown, "note": note}  # fmt: skip


def _kind(name: str, hint: Any) -> tuple[str, list[str]]:
    if name in _NAMES:
        return "choice", _NAMES[name]
    if hint is Method:
        return "method", [*METHODS]
    if hint is bool:
        return "choice", ["true", "false"]
    if get_origin(hint) is Literal:
        return "choice", [str(value) for value in get_args(hint)]
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    some = [part for part in parts if part is not NoneType]
    if some in ([int], [float]):
        return ("whole" if some == [int] else "number"), []
    known = [str(value) for part in some if get_origin(part) is Literal for value in get_args(part)]
    return "text", known  # suggested where other texts are allowed


def _first_line(kind: type[Any]) -> str:
    return (kind.__doc__ or "").strip().partition("\n")[0]
