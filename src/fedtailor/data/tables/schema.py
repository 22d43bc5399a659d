"""`Schema`: what sites agree on before they train. It is a JSON file that people can read."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from math import isfinite
from typing import Any

import numpy as np

from fedtailor.data.tables.cells import Numbers
from fedtailor.data.tables.columns import BOOLEAN, CATEGORY, KINDS, NUMBER, Column, require_kind
from fedtailor.data.tables.reading import RawTable
from fedtailor.data.tables.settings import SiteSettings
from fedtailor.data.tables.site import Site
from fedtailor.data.tables.summary import Moments
from fedtailor.data.tables.table_format import ALL_SITES, UNKNOWN, Array, Feature, Statistics, TableColumn, TableFormat
from fedtailor.errors import DataError

FORMAT = "fedtailor table schema 1"


@dataclass(frozen=True)
class ColumnSchema:
    """An agreed column; its statistics are those of all sites, and None if each site fits its own."""

    kind: str
    categories: tuple[str, ...] = ()
    has_other: bool = False
    indicator: bool = False  # whether a feature says that the value is missing
    fill: float | str | None = None
    mean: float | None = None
    std: float | None = None


@dataclass(frozen=True)
class Schema:
    """What all sites use: the targets, the columns, and how they become features."""

    targets: tuple[str, ...]
    classes: tuple[str, ...] | None  # names of the classes; None: the targets are numbers
    words: tuple[str, str] | None  # if the classes are booleans
    columns: Mapping[str, ColumnSchema]
    fit: str  # federation or site
    standardize: bool
    sites: tuple[str, ...]
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)  # of reading a table, which the sites share

    def to_json(self) -> dict[str, Any]:
        """Return the schema as plain values, without those that are empty."""
        columns = {
            n: {k: v for k, v in asdict(c).items() if v not in (None, ()) and v is not False}
            for n, c in self.columns.items()
        }
        return {"format": FORMAT, **asdict(replace(self, columns={})), "columns": columns}

    @property
    def checksum(self) -> str:
        """A checksum by which a deployment checks that all clients use the same schema."""
        return sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def from_json(cls, values: Mapping[str, Any], source: str) -> "Schema":
        """Return an untrusted schema after checking it."""
        try:
            if values["format"] != FORMAT or values["fit"] not in ("federation", "site"):
                raise ValueError("another format")
            if SiteSettings(**values["settings"]).targets != _names(values["targets"]):
                raise ValueError("other targets")
            return cls(
                targets=_names(values["targets"]),
                classes=None if values["classes"] is None else _names(values["classes"]),
                words=None if values["words"] is None else (str(values["words"][0]), str(values["words"][1])),
                columns={
                    str(name): _parse_column(column, values["fit"] == "federation")
                    for name, column in dict(values["columns"]).items()
                },
                fit=str(values["fit"]), standardize=bool(values["standardize"]), sites=_names(values["sites"]),
                seed=int(values["seed"]), settings=dict(values["settings"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            fix = "create one with: fedtailor tables agree SUMMARY... --out schema.json"
            raise DataError(f"{source} is not a schema of tables; {fix}.") from error

    def site_settings(self, **own: Any) -> SiteSettings:
        """Return the settings with which a site reads its table; `own` are those that sites need not share."""
        return SiteSettings(**{**self.settings, **own})

    def table_format(self, statistics: Mapping[str, Statistics]) -> TableFormat:
        """Return the format of the model's inputs."""
        columns = tuple(TableColumn(n, c.kind, c.categories, c.has_other) for n, c in self.columns.items())
        features = []
        for number, column in enumerate(self.columns.values()):
            if column.kind == CATEGORY:
                count = len(column.categories) + column.has_other
                features += [Feature(number, category) for category in range(count)]
            else:
                features.append(Feature(number))
            features += [Feature(number, is_missing=True)] * column.indicator
        missing = tuple(self.settings.get("missing", ()))
        return TableFormat(columns, tuple(features), statistics, missing, self.checksum)

    def fit_site(self, site: Site) -> dict[str, Statistics]:
        """Return the statistics by which a site encodes its rows: those of all sites, or of its own training rows."""
        if self.fit == "federation":
            return {ALL_SITES: self._statistics(self.columns)}
        columns = {name: site.columns.get(name) for name in self.columns}
        return {
            site.name: self._statistics(
                {name: fit_column(schema, columns[name], site.train) for name, schema in self.columns.items()}
            )
        }

    def _statistics(self, fitted: Mapping[str, ColumnSchema]) -> Statistics:
        fill, mean, std = list[float](), list[float](), list[float]()
        for column in fitted.values():
            is_scaled = self.standardize and column.kind not in (CATEGORY, BOOLEAN)
            is_category = column.kind == CATEGORY
            fill.append(float(category_code(column, str(column.fill)) if is_category else column.fill or 0.0))
            count = len(column.categories) + column.has_other if is_category else 1
            mean += [column.mean or 0.0 if is_scaled else 0.0] * count + [0.0] * column.indicator
            std += [column.std or 1.0 if is_scaled else 1.0] * count + [1.0] * column.indicator
        return Statistics(tuple(fill), tuple(mean), tuple(std))


def fit_column(schema: ColumnSchema, column: Column | None, train: Any) -> ColumnSchema:
    """Return a column with the statistics of a site's own training rows; a column without values becomes 0."""
    own = None if column is None else column.take(train)
    if own is None or own.missing.all():
        return replace(schema, fill="" if schema.kind == CATEGORY else 0.0, mean=0.0, std=1.0)
    if schema.kind == CATEGORY:
        counts = own.counts()
        return replace(schema, fill=max(sorted(counts), key=lambda text: counts[text]))
    return with_moments(schema, Moments.of(own.values))


def with_moments(column: ColumnSchema, moments: Moments) -> ColumnSchema:
    """Return a column of numbers with its statistics; a missing boolean becomes the more frequent value."""
    fill = float(moments.mean >= 0.5) if column.kind == BOOLEAN else moments.mean
    return replace(column, fill=fill, mean=moments.mean, std=moments.std)


def category_code(column: ColumnSchema | TableColumn, text: str) -> float:
    """Return the number of a category; that of all others if the column has them, else `UNKNOWN`."""
    if text in column.categories:
        return float(column.categories.index(text))
    return float(len(column.categories)) if column.has_other else UNKNOWN


def row_numbers(columns: Mapping[str, Column], wanted: tuple[TableColumn, ...], raw: RawTable) -> Array:
    """Return one number per row and column, as `TableFormat.encode` takes them; absent columns are missing."""
    rows = np.full((len(raw.rows), len(wanted)), np.nan)
    for number, column in enumerate(wanted):
        found = columns.get(column.name)
        if found is None:
            continue
        if column.kind == CATEGORY:
            codes: Numbers = np.array([*(category_code(column, text) for text in found.texts), np.nan])
            rows[:, number] = codes[found.codes]
        else:
            require_kind(found, column.kind, column.name, raw)
            rows[:, number] = found.values
    return rows


def target_numbers(schema: Schema, site: Site) -> Array:
    """Return the classes of a site's rows, −1 for one that is not agreed, or the numbers to predict."""
    columns = [site.targets[name] for name in schema.targets]
    if schema.classes is None:
        for name, column in zip(schema.targets, columns, strict=True):
            require_kind(column, NUMBER if NUMBER in column.kinds else BOOLEAN, name, site.raw)
        if schema.settings.get("survival"):
            _check_survival(columns[0], columns[1], site.raw, schema.targets)
        values = np.stack([column.values for column in columns], 1).astype(np.float32)
        return values[:, 0] if len(columns) == 1 else values
    column = columns[0]
    if schema.words is not None:
        require_kind(column, BOOLEAN, schema.targets[0], site.raw)
        return column.values.astype(np.int64)
    position = {label: number for number, label in enumerate(schema.classes)}
    return np.array([position.get(text, -1) for text in column.texts], np.int64)[column.codes]


def _check_survival(event: Column, time: Column, raw: RawTable, names: tuple[str, ...]) -> None:
    """Raise an error that names the row of an event that is not 0 or 1, or of a time below 0."""
    for name, column, wrong, problem in (
        (names[0], event, ~np.isin(event.values, (0, 1)), "which must be 0 or 1 (the target is event,time)"),
        (names[1], time, time.values < 0, "which must be a time of at least 0"),
    ):
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            value = column.texts[column.codes[row]]
            raise DataError(f"Row {raw.rows[row]} of {raw.source} has '{value}' in the column '{name}', {problem}.")


def _names(values: Any) -> tuple[str, ...]:
    if isinstance(values, str):
        raise TypeError("a list is expected")
    return tuple(str(value) for value in values)


def _parse_column(values: Mapping[str, Any], is_fitted: bool) -> ColumnSchema:
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    column = ColumnSchema(**given)
    numbers: list[Any] = [column.mean, column.std] if is_fitted and column.kind != CATEGORY else []
    numbers += [column.fill] if column.kind != CATEGORY and column.fill is not None else []
    if column.kind not in KINDS or not all(isinstance(n, int | float) and isfinite(n) for n in numbers):
        raise ValueError("invalid column")
    if not all(isinstance(category, str) for category in column.categories) or not (
        column.std is None or column.std > 0
    ):
        raise ValueError("invalid column")
    return column
