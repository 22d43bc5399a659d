"""What a paper printed and with which settings: one TOML file per paper, read into dataclasses."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib.resources import files
from math import isnan
from typing import Any, Literal, TypeVar

from fedtailor.core.fields import check_fields
from fedtailor.errors import ConfigError, unknown_name

PAPERS = ("fedapa", "fedapm", "fedlag", "selffl")
Settings = Mapping[str, Any]  # of a run: settings of training, and the tables data, network, and training
T = TypeVar("T")


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    key: str
    settings: Settings = field(default_factory=dict)
    fields: Settings = field(default_factory=dict)  # of the methods in the paper's rows
    metric: str = "accuracy"
    statistic: str | None = None  # instead of the paper's: weighted, mean, worst_tenth, or largest_tenth_weighted
    missing: str = ""  # why this column cannot be run

    def __post_init__(self) -> None:
        check_fields(self, "column.")


@dataclass(frozen=True)
class Row:
    """A row of a table: a method, and what the paper printed for each column; NaN where it printed nothing."""

    method: str
    label: str
    values: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    fields: Settings = field(default_factory=dict)
    inner: str | None = None  # of a method that wraps another one
    settings: Settings = field(default_factory=dict)
    columns: tuple[str, ...] | None = None  # keys of the columns in which the row stands; None: all
    moment: Literal["received", "trained", "ranked"] | None = None  # None: the paper's
    common_model: bool = False  # the global model's score is printed
    ours: bool = False  # a baseline that the paper does not have
    missing: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "row.")


OURS = (
    Row("local", "Local training", moment="ranked", ours=True),
    Row("local", "Local training, same budget", fields={"sampled": True}, moment="ranked", ours=True),
    Row("fedavgft", "FedAvg-FT", moment="ranked", ours=True),
    Row("averaged", "Averaged(FedAvg)", inner="fedavg", moment="ranked", ours=True),
)


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper."""

    id: str
    title: str
    metric: str  # what the numbers are, in words
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    settings: Settings = field(default_factory=dict)
    missing: str = ""  # why the table cannot be run

    def __post_init__(self) -> None:
        check_fields(self, "table.")
        for row in self.rows:
            for numbers in filter(None, (row.values, row.std)):
                if len(numbers) != len(self.columns):
                    raise ConfigError(
                        f"{self.id}: the row '{row.label}' has {len(numbers)} numbers, but there are "
                        f"{len(self.columns)} columns; write nan where the paper printed nothing."
                    )

    @property
    def all_rows(self) -> tuple[Row, ...]:
        """The paper's rows, and the baselines that are run beside them."""
        return self.rows if self.missing else (*self.rows, *OURS)


@dataclass(frozen=True)
class Choice:
    """A setting that the paper does not state."""

    what: str
    why: str


@dataclass(frozen=True)
class Suspect:
    """Printed numbers that seem inconsistent."""

    where: str
    why: str


@dataclass(frozen=True)
class Report:
    """Which of a run's scores the paper prints."""

    choice: Literal["last", "best"] = "last"
    moment: Literal["received", "trained", "ranked"] = "ranked"  # ranked: the moment that ranks the method
    statistic: Literal["weighted", "mean"] = "weighted"  # over all test samples, or over clients
    scale: float = 100
    digits: int = 2

    def __post_init__(self) -> None:
        check_fields(self, "report.")


@dataclass(frozen=True)
class Paper:
    """A paper: its tables, its settings, and our choices where it does not state them."""

    key: str
    name: str
    venue: str
    report: Report
    settings: Settings
    tables: tuple[PaperTable, ...]
    choices: tuple[Choice, ...] = ()
    suspects: tuple[Suspect, ...] = ()

    def select(self, table: str | None = None) -> list[PaperTable]:
        """Return the table with an id, or all tables whose ids start with it, such as table-1-20-clients for table-1.

        >>> [table.id for table in load_paper("fedapa").select("table-1")]
        ['table-1-20-clients', 'table-1-50-clients']
        """
        found = [one for one in self.tables if table is None or one.id == table or one.id.startswith(f"{table}-")]
        if not found:
            raise unknown_name(f"table of {self.name}", str(table), [one.id for one in self.tables])
        return found


def load_paper(name: str) -> Paper:
    """Return the definition of a paper.

    >>> load_paper("fedapa").select("table-4")[0].rows[0].values[2]
    85.85
    """
    if name not in PAPERS:
        raise unknown_name("paper", name, PAPERS)
    text = files("fedtailor.papers").joinpath("definitions", f"{name}.toml").read_text(encoding="utf-8")
    return parse_paper(name, tomllib.loads(text))


def parse_paper(key: str, raw: Mapping[str, Any]) -> Paper:
    """Return a paper from the content of its file; an unknown key raises `ConfigError`."""
    rest = dict(raw)
    tables = tuple(_parse_table(one) for one in rest.pop("table", []))
    choices = tuple(_make(Choice, one) for one in rest.pop("choice", []))
    suspects = tuple(_make(Suspect, one) for one in rest.pop("suspect", []))
    made = {"key": key, "report": _make(Report, rest.pop("report", {})), "settings": rest.pop("settings", {})}
    return _make(Paper, rest | made | {"tables": tables, "choices": choices, "suspects": suspects})


def merge(parts: Iterable[Settings]) -> dict[str, Any]:
    """Return nested settings in which later parts have precedence.

    >>> merge([{"rounds": 5, "data": {"name": "digits", "alpha": 1}}, {"data": {"alpha": 2}}])
    {'rounds': 5, 'data': {'name': 'digits', 'alpha': 2}}
    """
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            old = merged.get(name)
            merged[name] = merge([old, value]) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def number_at(numbers: tuple[float, ...], position: int) -> float | None:
    """Return a printed number, or None where there is none."""
    return None if not numbers or isnan(numbers[position]) else numbers[position]


def _parse_table(raw: Mapping[str, Any]) -> PaperTable:
    columns = tuple(_make(Column, one) for one in raw.get("columns", []))
    rows = tuple(_make(Row, {name: _frozen(value) for name, value in one.items()}) for one in raw.get("rows", []))
    return _make(PaperTable, {**raw, "columns": columns, "rows": rows})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _make(kind: type[T], values: Mapping[str, Any]) -> T:
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise unknown_name(f"key of a {kind.__name__}", name, known)
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"A {kind.__name__} of a paper's definition is incomplete: {error}.") from error
