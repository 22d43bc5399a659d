"""`TableFormat`: how the rows of a table become the inputs of a model; it is stored with the model.

A row is first a list of numbers, one per column: the number itself, 0 or 1, the days since 1970, or the position of a
category; NaN is a missing value. A feature is computed from one column: its number, whether it is a certain category,
or whether it is missing. Then it is shifted and scaled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.memory_limits import check_memory
from fedtailor.errors import DataError

BOOLEAN, DATE, NUMBER, CATEGORY = "boolean", "date", "number", "category"
KINDS = (BOOLEAN, DATE, NUMBER, CATEGORY)  # of columns; the first one that fits at all sites is used
ALL_SITES = ""  # key of statistics that all sites share
UNKNOWN = -1.0  # of a category that the format does not know
_BLOCK_ROWS = 2**14  # rows that are encoded at once
_MAX_FEATURES = 10**6
Array = NDArray[Any]


@dataclass(frozen=True)
class TableColumn:
    """A column of the table."""

    name: str
    kind: str  # one of `KINDS`
    categories: tuple[str, ...] = ()
    has_other: bool = False  # whether other categories are one more category


@dataclass(frozen=True)
class Feature:
    """A feature of the model, computed from one column."""

    column: int
    category: int | None = None  # the feature is 1 for this category; None: the number itself
    is_missing: bool = False  # the feature is 1 if the value is missing


@dataclass(frozen=True)
class Statistics:
    """What was fitted on training rows."""

    fill: tuple[float, ...]  # of each column, instead of a missing value
    mean: tuple[float, ...]  # of each feature, subtracted
    std: tuple[float, ...]  # of each feature, divided by after that


@dataclass(frozen=True)
class TableFormat:
    """Columns, features, and the statistics of each site, or of all sites together.

    >>> columns = (TableColumn("age", "number"), TableColumn("sex", "category", ("f", "m")))
    >>> features = (Feature(0), Feature(1, category=0), Feature(1, category=1))
    >>> fitted = Statistics(fill=(50, 1), mean=(50, 0, 0), std=(10, 1, 1))
    >>> table = TableFormat(columns, features, {ALL_SITES: fitted})
    >>> table.encode(np.array([[70, 0], [np.nan, np.nan]])).tolist()
    [[2.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    >>> table.feature_names
    ['age', 'sex=f', 'sex=m']
    """

    columns: tuple[TableColumn, ...]
    features: tuple[Feature, ...]
    statistics: Mapping[str, Statistics]  # by site, or one for `ALL_SITES`
    missing: tuple[str, ...] = ()  # texts that mark a missing value, besides the usual ones
    schema: str = ""  # checksum of the schema that the sites agreed on, if there is one

    def __post_init__(self) -> None:
        numbers = [n for s in self.statistics.values() for part in (s.fill, s.mean, s.std) for n in part]
        valid = (
            0 < len(self.features) <= _MAX_FEATURES
            and all(column.kind in KINDS for column in self.columns)
            and all(type(f.column) is int and 0 <= f.column < len(self.columns) for f in self.features)
            and all(f.category is None or type(f.category) is int for f in self.features)
            and all(isinstance(t, str) for c in self.columns for t in (c.name, *c.categories))
            and all(len(found.fill) == len(self.columns) for found in self.statistics.values())
            and all(len(found.mean) == len(found.std) == len(self.features) for found in self.statistics.values())
            and all(map(isfinite, numbers))
            and all(min(found.std) > 0 for found in self.statistics.values())
        )
        if not valid:
            raise DataError("The format of a table is invalid: check its columns, features, and statistics.")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "TableFormat":
        """Return the format that `dataclasses.asdict` described; an invalid one raises a ValueError or TypeError."""
        columns = (TableColumn(c["name"], c["kind"], tuple(c["categories"]), c["has_other"]) for c in values["columns"])
        features = (Feature(f["column"], f["category"], f["is_missing"]) for f in values["features"])
        parts = {n: [tuple(s[part]) for part in ("fill", "mean", "std")] for n, s in values["statistics"].items()}
        statistics = {name: Statistics(*found) for name, found in parts.items()}
        return cls(tuple(columns), tuple(features), statistics, tuple(values["missing"]), values["schema"])

    @property
    def feature_names(self) -> list[str]:
        """The names of the features, such as age, sex=f, and age missing."""
        return [self._feature_name(feature) for feature in self.features]

    def _feature_name(self, feature: Feature) -> str:
        column = self.columns[feature.column]
        if feature.is_missing:
            return f"{column.name} missing"
        if feature.category is None:
            return column.name
        return f"{column.name}={(*column.categories, 'other')[feature.category]}"

    def of_site(self, site: str) -> "TableFormat":
        """Return the format with the statistics of one site only, so that an exported model contains no other's."""
        if ALL_SITES in self.statistics:
            return self
        if site not in self.statistics:
            known = ", ".join(self.statistics)
            raise DataError(f"The table was fitted by site, but not for '{site}'; there are {known}.")
        return replace(self, statistics={site: self.statistics[site]})

    def only_statistics(self) -> Statistics:
        """Return the statistics of the only site."""
        if len(self.statistics) != 1:
            raise DataError("The table was fitted by site; choose the model of one client.")
        return next(iter(self.statistics.values()))

    def encode(self, rows: Array, site: str | None = None) -> NDArray[np.float32]:
        """Return the features of rows, which have one number per column."""
        found = self.only_statistics() if site is None else self.of_site(site).only_statistics()
        check_memory(8 * len(rows) * len(self.features), "The features of a table")
        arrays = self.arrays(found)
        x = np.empty((len(rows), len(self.features)), np.float32)
        for start in range(0, len(rows), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            x[block] = _encode(rows[block], *arrays)
        return x

    def arrays(self, found: Statistics) -> tuple[Array, ...]:
        """Return the column, category (NaN: a number), and kind of each feature, and its fill, mean, and std."""
        source = np.array([feature.column for feature in self.features])
        category = np.array([np.nan if f.category is None else f.category for f in self.features])
        is_missing = np.array([feature.is_missing for feature in self.features])
        return source, category, is_missing, np.array(found.fill)[source], np.array(found.mean), np.array(found.std)


def _encode(
    rows: Array, source: Array, category: Array, is_missing: Array, fill: Array, mean: Array, std: Array
) -> Array:
    value = rows[:, source]
    absent = np.isnan(value)
    filled = np.where(absent, fill, value)
    features = np.where(np.isnan(category), filled, filled == category)
    return np.asarray((np.where(is_missing, absent, features) - mean) / std)
