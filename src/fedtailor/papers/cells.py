"""The cells of a table: their settings, the objects that these describe, and a fingerprint that finds results."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

from fedtailor.core.method import Method
from fedtailor.data.dataset import Data
from fedtailor.data.datasets import DATASETS
from fedtailor.errors import ConfigError, unknown_name
from fedtailor.methods import METHODS
from fedtailor.networks import NETWORKS
from fedtailor.networks.layers import Network
from fedtailor.papers.definition import Column, Paper, PaperTable, Report, Row, Settings, merge, number_at
from fedtailor.training.config import TrainingConfig
from fedtailor.training.simulate import make_config

_PARTS = ("data", "network", "training")
_WITHOUT_EFFECT = (  # on a run's scores
    "seed", "engine", "actors", "actor_engine", "ray_address", "chunk_size", "device", "checkpoint_every",
    "max_failures",
)  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """What a run needs: all settings, built and checked."""

    method: Method
    data: Data
    network: Network
    config: TrainingConfig

    def describe(self) -> dict[str, Any]:
        """Return all settings that affect a result, including defaults, without those that are off or none."""
        config = {k: v for k, v in asdict(self.config).items() if k not in _WITHOUT_EFFECT}
        if self.config.precision == "float32":  # full precision: mixed precision is off
            del config["precision"]
        if not self.config.robust.is_on:
            del config["robust"]
        data = {k: v for k, v in asdict(self.data).items() if k not in ("seed", "folder")}
        network = {"name": _network_name(self.network), **asdict(self.network)}
        parts = {"method": _describe_method(self.method), "data": {"name": self.data.name, **data}, "network": network}
        described: dict[str, Any] = _without_off({**config, **parts})
        return described

    @property
    def fingerprint(self) -> str:
        """A hash of the settings. A new option that is off by default changes no fingerprint, and another default
        changes the fingerprints of the cells that use it."""
        return sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Cell:
    """One number of a table."""

    paper: Paper
    table: PaperTable
    row: Row
    column: Column
    overrides: Settings

    @property
    def label(self) -> str:
        return f"{self.table.id}, {self.row.label}, {self.column.key}"

    @property
    def report(self) -> Report:
        """Which of a run's scores is printed, and how."""
        return replace(self.paper.report, **self.table.report)

    @property
    def printed(self) -> float | None:
        return number_at(self.row.values, self._position)

    @property
    def printed_std(self) -> float | None:
        return number_at(self.row.std, self._position)

    @property
    def missing(self) -> str:
        """Why the cell cannot be run; empty if it can."""
        return self.table.missing or self.column.missing or self.row.missing

    @property
    def why_not(self) -> str:
        """Why the cell cannot be run here; empty if it can."""
        if self.missing or data_state(data := self.setup.data) != "missing":
            return self.missing
        return f"the data set {data.name} is missing; {getattr(data, 'how_to_get', 'get it')} and override data.folder"

    @property
    def _position(self) -> int:
        return self.table.columns.index(self.column)

    @cached_property
    def setup(self) -> Setup:
        """The method, data, network, and settings of the cell."""
        parts = [self.paper.settings, self.table.settings, self.column.settings, self.row.settings, self.overrides]
        settings = merge(parts)
        training = settings.get("training", {})
        own = {**({} if self.row.ours else self.column.fields), **self.row.fields}
        return Setup(
            _make_method(self.row, training, own),
            _make_named("data set", settings.get("data", {}), DATASETS),
            _make_named("network", settings.get("network", {}), NETWORKS),
            make_config(**{name: _frozen(name, value) for name, value in settings.items() if name not in _PARTS}),
        )

    @property
    def score(self) -> tuple[str, str]:
        """The keys of the printed score in a result: the metric with its moment and statistic, and last, best, or a
        round, such as round_10."""
        report, setup = self.report, self.setup
        wanted = self.row.moment or report.moment
        moment = setup.method.ranking_moment if wanted == "ranked" else wanted
        name = f"global_{self.column.metric}_received" if self.row.common_model else f"{self.column.metric}_{moment}"
        choice = report.choice if self.column.round is None else f"round_{self.column.round}"
        return f"{name}/{self.column.statistic or report.statistic}", choice


def data_state(data: Data) -> str:
    """Return whether a data set is cached, downloadable, or missing.

    >>> from fedtailor.data.datasets import DATASETS
    >>> data_state(DATASETS["digits"]()), data_state(DATASETS["sent140"](folder="leaf"))
    ('cached', 'cached')
    """
    if data.is_available or getattr(data, "folder", None) is not None:
        return "cached"
    return "missing" if getattr(data, "source", None) is None else "downloadable"


def make_cells(
    paper: Paper, table: PaperTable, only: Sequence[str] = (), overrides: Settings | None = None
) -> list[Cell]:
    """Return the cells of a table; `only` keeps those whose column, row, method, or data set has one of the words.

    >>> from fedtailor.papers.definition import load_paper
    >>> paper = load_paper("fedapa")
    >>> len(make_cells(paper, paper.select("table-4")[0], only=["mu=0.5"]))
    5
    """
    cells = [
        Cell(paper, table, row, column, overrides or {})
        for row in table.all_rows
        for column in table.columns
        if row.columns is None or column.key in row.columns
    ]
    return [cell for cell in cells if not only or any(_has_word(cell, word) for word in only)]


def parse_words(text: str) -> list[str]:
    """Return the words of a command line, separated by commas; a comma before a space is part of a word, as in labels.

    >>> parse_words("FedAvg, as in the code,FedProx")
    ['FedAvg, as in the code', 'FedProx']
    """
    return [word for word in re.split(r",(?! )", text) if word]


def _has_word(cell: Cell, word: str) -> bool:
    """Return whether a word is in the cell's names as a whole: cifar10 is not in cifar100."""
    data = merge([cell.table.settings, cell.column.settings, cell.row.settings]).get("data", {}).get("name", "")
    names = " ".join([cell.column.key, cell.row.label, cell.row.method, data])
    return re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.])", names) is not None


def _make_method(row: Row, training: Settings, own: Settings) -> Method:
    """Return the method of a row; the common settings of training apply as far as the method has them."""
    if row.method not in METHODS:
        raise unknown_name("method", row.method, METHODS)
    kind = METHODS[row.method]
    known = {f.name for f in fields(kind)} - kind.fixed_settings.keys()
    for name in own:
        if name not in known:
            raise unknown_name(f"field of {row.method}", name, sorted(known))
    inner = {} if row.inner is None else {"inner": _make_method(Row(row.inner, row.inner), training, {})}
    return kind(**{name: value for name, value in training.items() if name in known} | inner | dict(own))


def _make_named(what: str, settings: Settings, registry: Mapping[str, type[Any]]) -> Any:
    """Return a data set or network from its name and fields; lists become tuples."""
    rest = dict(settings)
    name = rest.pop("name", None)
    if name not in registry:
        raise unknown_name(what, str(name), registry)
    known = [f.name for f in fields(registry[name])]
    for setting in rest:
        if setting not in known:
            raise unknown_name(f"field of the {what} {name}", setting, known)
    return registry[name](**{key: tuple(v) if isinstance(v, list) else v for key, v in rest.items()})


def _frozen(name: str, value: Any) -> Any:
    return tuple(value) if name == "participation" and isinstance(value, list) else value


def _network_name(network: Network) -> str:
    return next(name for name, kind in NETWORKS.items() if kind is type(network))


def _describe_method(method: Method) -> dict[str, Any]:
    values = {f.name: getattr(method, f.name) for f in fields(method)}
    plain = {name: _describe_method(v) if isinstance(v, Method) else v for name, v in values.items()}
    return {"name": type(method).__name__.lower(), **plain}


def _without_off(value: Any) -> Any:
    """Return settings as JSON values, without those that are None or false, and without empty parts."""
    if isinstance(value, Mapping):
        plain = {str(name): _without_off(part) for name, part in value.items()}
        return {name: part for name, part in plain.items() if part is not None and part is not False and part != {}}
    if isinstance(value, list | tuple):
        return [_without_off(part) for part in value]
    if isinstance(value, bool | str) or value is None:
        return value
    return float(value)


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Return nested settings from words such as data.name=digits; values are JSON where they can be read as such.

    >>> parse_overrides(["rounds=2", "data.name=digits"])
    {'rounds': 2, 'data': {'name': 'digits'}}
    """
    return merge(_parse_overrides(words))


def _parse_overrides(words: Sequence[str]) -> Iterator[Settings]:
    for word in words:
        path, equals, text = word.partition("=")
        if not equals or not path:
            raise ConfigError(f"An override is a setting and its value, such as rounds=2, got '{word}'.")
        try:
            value: Any = json.loads(text)
        except ValueError:
            value = text
        for name in reversed(path.split(".")):
            value = {name: value}
        yield value
