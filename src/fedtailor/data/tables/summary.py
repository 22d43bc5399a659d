"""What a site reports about its table: names and kinds of columns, frequent categories, and sums; never rows.

A category or a statistic with fewer than `min_count` rows is not reported, nor are minimum and maximum, which are the
values of single rows.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import fsum, sqrt
from typing import Any

import numpy as np

from fedtailor.data.tables.cells import Numbers
from fedtailor.data.tables.columns import Column
from fedtailor.data.tables.settings import SiteSettings
from fedtailor.data.tables.site import Site
from fedtailor.data.tables.table_format import DATE, KINDS, NUMBER
from fedtailor.errors import DataError

FORMAT = "fedtailor table summary 1"
# Settings that all sites must share.
SHARED = ("target", "ignore", "categories", "missing", "regression", "survival", "test")
_MAX_CATEGORIES = 1000  # reported by a site


@dataclass(frozen=True)
class Moments:
    """Count, sum, and sum of squared deviations from the mean of some numbers.

    >>> Moments.of(np.array([1.0, 3.0, np.nan]))
    Moments(count=2, sum=4.0, squares=2.0)
    """

    count: int = 0
    sum: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Numbers) -> "Moments":
        """Return the moments of all numbers that are not NaN."""
        present = values[~np.isnan(values)]
        if not len(present):
            return cls()
        total = fsum(present)
        return cls(len(present), total, fsum(np.square(present - total / len(present))))

    @classmethod
    def merge(cls, parts: "list[Moments]") -> "Moments":
        """Return the moments of all numbers together; the order of the parts does not matter.

        >>> Moments.merge([Moments.of(np.array([1.0, 3.0])), Moments.of(np.array([8.0]))])
        Moments(count=3, sum=12.0, squares=26.0)
        """
        parts = [part for part in parts if part.count]
        if not parts:
            return cls()
        count, total = sum(part.count for part in parts), fsum(part.sum for part in parts)
        between = (part.count * (part.mean - total / count) ** 2 for part in parts)
        return cls(count, total, fsum([*(part.squares for part in parts), *between]))

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """The standard deviation with n − 1; 1 if the numbers are constant, so that they are only shifted."""
        return 1.0 if self.is_constant else sqrt(self.squares / (self.count - 1))

    @property
    def is_constant(self) -> bool:
        """Whether the numbers are equal up to rounding errors."""
        return self.count < 2 or sqrt(self.squares / (self.count - 1)) <= 1e-9 * abs(self.mean)


@dataclass(frozen=True)
class ColumnSummary:
    """What a site reports about a column of its training rows."""

    kinds: tuple[str, ...]  # what its values can be read as
    missing: int
    moments: Moments = field(default_factory=Moments)  # of numbers, booleans, and dates
    categories: Mapping[str, int] = field(default_factory=dict)  # rows of each frequent category
    has_other: bool = False  # whether there are rarer categories
    words: tuple[str, str] | None = None  # of booleans
    integers: bool = False
    distinct: int = 0  # different values of a target


@dataclass(frozen=True)
class SiteSummary:
    """What a site reports about its training rows."""

    site: str
    rows: int
    seed: int
    settings: Mapping[str, Any]
    targets: Mapping[str, ColumnSummary]
    columns: Mapping[str, ColumnSummary]

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain values."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], source: str) -> "SiteSummary":
        """Return an untrusted summary after checking it."""
        try:
            if values["format"] != FORMAT:
                raise ValueError("another format")
            found = cls(
                str(values["site"]), int(values["rows"]), int(values["seed"]), dict(values["settings"]),
                {str(name): _parse(column) for name, column in dict(values["targets"]).items()},
                {str(name): _parse(column) for name, column in dict(values["columns"]).items()},
            )  # fmt: skip
            if found.settings.keys() != set(SHARED):
                raise ValueError("other settings")
            if SiteSettings(**found.settings).targets != tuple(found.targets) or not found.targets:
                raise ValueError("other targets")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            fix = "create one with: fedtailor tables summarize FILE --target COLUMN --out summary.json"
            raise DataError(f"{source} is not the summary of a table; {fix}.") from error
        return found


def by_frequency(counts: Mapping[str, int]) -> list[str]:
    """Return categories from the most frequent one on, in alphabetical order where counts are equal.

    >>> by_frequency({"x": 2, "b": 5, "a": 2})
    ['b', 'a', 'x']
    """
    return sorted(counts, key=lambda text: (-counts[text], text))


def _parse(values: Mapping[str, Any]) -> ColumnSummary:
    given = values["moments"]
    moments = Moments(int(given["count"]), float(given["sum"]), float(given["squares"]))
    categories = {str(name): int(count) for name, count in dict(values["categories"]).items()}
    words = None if values["words"] is None else (str(values["words"][0]), str(values["words"][1]))
    kinds = tuple(kind for kind in values["kinds"] if kind in KINDS)
    numbers = [moments.count, moments.sum, moments.squares, *categories.values()]
    if not np.isfinite(numbers).all() or moments.squares < 0 or not kinds or len(categories) > _MAX_CATEGORIES:
        raise ValueError("invalid numbers")
    return ColumnSummary(
        kinds,
        int(values["missing"]),
        moments,
        categories,
        bool(values["has_other"]),
        words,
        bool(values["integers"]),
        int(values["distinct"]),
    )


def summarize(site: Site, settings: SiteSettings, seed: int) -> SiteSummary:
    """Return the summary of a site's training rows."""
    shared = {name: getattr(settings, name) for name in SHARED}

    def columns(found: Mapping[str, Column], is_target: bool) -> dict[str, ColumnSummary]:
        return {n: _summarize(c.take(site.train), settings.min_count, is_target) for n, c in found.items()}

    return SiteSummary(
        site.name, len(site.train), seed, _plain(shared), columns(site.targets, True), columns(site.columns, False)
    )


def _plain(value: Any) -> Any:
    """Return settings as JSON gives them back."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def _summarize(column: Column, min_count: int, is_target: bool) -> ColumnSummary:
    counts = column.counts()
    count = sum(counts.values())
    kinds = column.kinds if count else KINDS
    facts: dict[str, Any] = {"words": column.words, "integers": column.are_integers}
    facts |= {"distinct": len(counts)} if is_target else {}
    if count < min_count:
        return ColumnSummary(kinds, len(column.codes), **facts)
    missing = len(column.codes) - count
    moments = Moments() if column.numbers is None else Moments.of(column.values)
    if DATE in kinds or (NUMBER in kinds and not (is_target and column.are_integers)):
        return ColumnSummary(kinds, missing, moments, **facts)
    frequent = [text for text in by_frequency(counts) if counts[text] >= min_count]
    categories = {text: counts[text] for text in frequent[:_MAX_CATEGORIES]}
    return ColumnSummary(kinds, missing, moments, categories, len(categories) < len(counts), **facts)
