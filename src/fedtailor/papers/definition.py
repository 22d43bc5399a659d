"""What a paper printed and with which settings: one TOML file per paper, read into dataclasses."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from math import isnan
from typing import Any, Literal, TypeVar

from fedtailor.core.fields import check_fields
from fedtailor.errors import ConfigError, unknown_name

PAPERS = ("fedapa", "fedapm", "fedlag", "selffl")
Settings = Mapping[str, Any]  # of a run: settings of training, and the tables data, network, and training
CURVE_ROUNDS = (10, 50, 100, 200, 300)  # at which results keep all metrics
T = TypeVar("T")


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    key: str
    settings: Settings = field(default_factory=dict)
    fields: Settings = field(default_factory=dict)  # of the methods in the paper's rows
    metric: str = "accuracy"
    round: int | None = None  # of the printed value, instead of the paper's choice: one of CURVE_ROUNDS
    statistic: str | None = None  # instead of the paper's: weighted, mean, worst_tenth, or largest_tenth_weighted
    missing: str = ""  # why this column cannot be run

    def __post_init__(self) -> None:
        check_fields(self, "column.")
        if self.round not in (None, *CURVE_ROUNDS):
            raise ConfigError(f"column.round must be one of {CURVE_ROUNDS}, got {self.round}.")


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
    """A table or figure of a paper."""

    id: str
    title: str
    metric: str  # what the numbers are, in words
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    settings: Settings = field(default_factory=dict)
    report: Settings = field(default_factory=dict)  # where it differs from the paper's
    variant: str = ""  # how the settings differ from the paper's; empty: they do not
    baselines: bool = True  # whether our baselines are run beside the paper's rows
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
        return (*self.rows, *OURS) if self.baselines and not self.missing else self.rows


@dataclass(frozen=True)
class Variant:
    """Tables once more, with other settings than the paper's: the table-1 of a variant small is table-1-small."""

    key: str
    what: str
    why: str
    tables: tuple[str, ...]
    settings: Settings

    def apply(self, table: PaperTable) -> PaperTable:
        """Return the table with the settings of this variant."""
        settings = merge([table.settings, self.settings])
        title = f"{table.title}; not the paper's setting: {self.what}"
        return replace(table, id=f"{table.id}-{self.key}", title=title, settings=settings, variant=self.what)


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
    answer: str = ""  # the evidence and its command, or the run that will answer it


@dataclass(frozen=True)
class Claim:
    """What a paper says about its tables, if possible as comparisons of cells that can be checked: in each column, a
    row is ahead of other rows (`row`), or in each row, a column is ahead of the other columns (`column`)."""

    text: str
    where: str = ""  # in the paper
    tables: tuple[str, ...] = ()  # ids, or their beginnings
    row: str | None = None
    over: tuple[str, ...] = ()  # labels of the rows that it is ahead of; (): all other rows of the paper
    columns: tuple[str, ...] = ()  # (): all
    column: str | None = None
    margin: float = 0  # ahead by more than this, in the unit of the table
    at_least: int | None = None  # in so many comparisons; None: in all
    lower_is_better: bool = False
    missing: str = ""  # why a claim that has neither row nor column cannot be checked with these tables
    found: str = ""  # what our results say about such a claim

    def __post_init__(self) -> None:
        check_fields(self, "claim.")
        if self.row is not None and self.column is not None:
            raise ConfigError(f"The claim '{self.text}' must have either a row or a column.")

    @property
    def has_rule(self) -> bool:
        """Whether the claim is checked by comparisons of cells."""
        return self.row is not None or self.column is not None


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
    claims: tuple[Claim, ...] = ()
    choices: tuple[Choice, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    variants: tuple[Variant, ...] = ()

    def select(self, table: str | None = None) -> list[PaperTable]:
        """Return the table with an id, or else its parts, such as table-1-20-clients of table-1, or figure-4a of
        figure-4.

        >>> [table.id for table in load_paper("fedapa").select("table-1")]
        ['table-1-20-clients', 'table-1-50-clients']
        """
        exact = [one for one in self.tables if table is None or one.id == table]
        found = exact or [one for one in self.tables if re.fullmatch(rf"{re.escape(str(table))}([a-z]|-.*)", one.id)]
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
    raw_tables = rest.pop("table", [])
    tables = tuple(_parse_table({k: v for k, v in one.items() if k != "claims"}) for one in raw_tables)
    variants = tuple(_make(Variant, _frozen_values(one)) for one in rest.pop("variant", []))
    tables += tuple(one.apply(table) for one in variants for table in tables if table.id in one.tables)
    claims = _parse_claims(rest.pop("claim", []), raw_tables)
    choices = tuple(_make(Choice, one) for one in rest.pop("choice", []))
    suspects = tuple(_make(Suspect, one) for one in rest.pop("suspect", []))
    made = {"key": key, "report": _make(Report, rest.pop("report", {})), "settings": rest.pop("settings", {})}
    made |= {"tables": tables, "claims": claims, "choices": choices, "suspects": suspects, "variants": variants}
    return _make(Paper, rest | made)


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
    rows = tuple(_make(Row, _frozen_values(one)) for one in raw.get("rows", []))
    return _make(PaperTable, {**raw, "columns": columns, "rows": rows})


def _parse_claims(raw: Sequence[Mapping[str, Any]], raw_tables: Sequence[Mapping[str, Any]]) -> tuple[Claim, ...]:
    """Return the claims of a paper and those inside its tables; a claim that several tables have is returned once."""
    inside = [{"tables": [table["id"]], **one} for table in raw_tables for one in table.get("claims", [])]
    tables: dict[Claim, tuple[str, ...]] = {}
    for one in [*raw, *inside]:
        claim = _make(Claim, _frozen_values(one))
        key = replace(claim, tables=())
        tables[key] = tables.get(key, ()) + claim.tables
    return tuple(replace(claim, tables=found) for claim, found in tables.items())


def _frozen_values(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}


def _make(kind: type[T], values: Mapping[str, Any]) -> T:
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise unknown_name(f"key of a {kind.__name__}", name, known)
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"A {kind.__name__} of a paper's definition is incomplete: {error}.") from error
