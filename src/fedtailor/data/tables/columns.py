"""Columns of a table: the distinct values of each, and what they can be read as."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.untrusted_input import sanitize
from fedtailor.data.tables.cells import (
    Numbers,
    days_since_1970,
    is_missing,
    number_text,
    parse_dates,
    parse_numbers,
    read_booleans,
    read_dates,
    read_numbers,
)
from fedtailor.data.tables.reading import RawTable, import_pandas
from fedtailor.data.tables.settings import SiteSettings
from fedtailor.data.tables.table_format import BOOLEAN, CATEGORY, DATE, KINDS, NUMBER
from fedtailor.errors import DataError

_MOSTLY = 0.5  # of the rows: a column with so many numbers, and some text such as <5, contains errors
_DIGITS = ("0", "1")


@dataclass(frozen=True, eq=False)
class Column:
    """A column: each row has one of the distinct values, or none. `make_column` merges equal values."""

    codes: NDArray[np.int64]  # position in `texts` of each row's value; -1: missing
    texts: tuple[str, ...]  # distinct values
    kinds: tuple[str, ...]  # what all values can be read as, in the order of `KINDS`
    numbers: Numbers | None = None  # of each distinct value: the number, 0 or 1, or the days since 1970
    words: tuple[str, str] | None = None  # the two words of booleans

    def take(self, rows: Any) -> "Column":
        """Return some of the rows."""
        return Column(self.codes[rows], self.texts, self.kinds, self.numbers, self.words)

    @property
    def values(self) -> Numbers:
        """The number of each row; NaN if it is missing."""
        assert self.numbers is not None
        return np.append(self.numbers, np.nan)[self.codes]

    @property
    def missing(self) -> NDArray[np.bool_]:
        return self.codes < 0

    def counts(self) -> dict[str, int]:
        """Return the number of rows of each value that occurs."""
        counted = np.bincount(self.codes[self.codes >= 0], minlength=len(self.texts)).tolist()
        return {text: count for text, count in zip(self.texts, counted, strict=True) if count}

    @property
    def are_integers(self) -> bool:
        return self.numbers is not None and bool((self.numbers == self.numbers.round()).all())


def make_column(
    codes: NDArray[np.int64],
    texts: Sequence[str],
    kinds: tuple[str, ...],
    numbers: Numbers | None = None,
    words: tuple[str, str] | None = None,
) -> Column:
    """Return a column in which texts that are equal, such as Yes and yes or 1 and 1.0 after reading, are one value.

    >>> make_column(np.array([0, 1, -1]), ["yes", "yes"], (BOOLEAN, CATEGORY), np.ones(2)).codes.tolist()
    [0, 0, -1]
    """
    first = dict[str, int]()  # of each distinct text
    for position, text in enumerate(texts):
        first.setdefault(text, position)
    number_of = {text: number for number, text in enumerate(first)}
    merged = np.array([*(number_of[text] for text in texts), -1], np.int64)  # the last one for missing values
    return Column(merged[codes], tuple(first), kinds, None if numbers is None else numbers[[*first.values()]], words)


def read_columns(
    raw: RawTable, settings: SiteSettings, names: Collection[str] | None = None, kinds: dict[str, str] | None = None
) -> dict[str, Column]:
    """Return the named columns of a table, or all that are not ignored; `kinds` are those that are already agreed."""
    kinds = kinds or {}
    chosen = [name for name in raw.frame.columns if (name not in settings.ignore if names is None else name in names)]
    as_text = {*settings.categories, *(name for name, kind in kinds.items() if kind == CATEGORY)}
    typed = {name for name in chosen if _is_typed(raw.frame[name])}
    found = {name: _read_typed(raw, name, settings.missing) for name in typed}
    texts = {name: _distinct_texts(raw, name, settings.missing) for name in chosen if name not in typed}
    numbers = {n: read_numbers(v, settings.decimal) if n not in as_text else {} for n, (_, v) in texts.items()}
    decimal = _file_decimal(numbers)
    for name, (codes, values) in texts.items():
        if name in as_text:
            found[name] = _category_column(codes, values)
            continue
        found[name] = _from_texts(_Place(raw, name, codes), values, _choose(numbers[name], decimal), settings, kinds)
    return {name: _as_category(found[name]) if name in as_text else found[name] for name in chosen}


@dataclass(frozen=True, eq=False)
class _Place:
    """Where the values of a column are, for error messages."""

    raw: RawTable
    name: str
    codes: NDArray[np.int64]

    def error(self, texts: Sequence[str], value: int, problem: str) -> DataError:
        row = self.raw.rows[int(np.flatnonzero(self.codes == value)[0])]
        shown = texts[value][:40]
        return DataError(f"Row {row} of {self.raw.source} has '{shown}' in the column '{self.name}', {problem}.")


def require_kind(column: Column, kind: str, name: str, raw: RawTable) -> None:
    """Raise an error that names the row unless a column can be read as a kind."""
    if kind in column.kinds:
        return
    bad, place = 0, _Place(raw, name, column.codes)
    if kind == BOOLEAN and column.numbers is not None:
        bad = int(np.flatnonzero(~np.isin(column.numbers, (0, 1)))[0])
    elif kind == NUMBER and column.numbers is None:
        bad = int(np.flatnonzero(np.isnan(parse_numbers(column.texts, ".")))[0])
    raise place.error(column.texts, bad, f"which must be a {kind}; correct the value, or leave it empty")


def _is_typed(series: Any) -> bool:
    """Return whether a column of a data frame has numbers, booleans, or dates instead of text."""
    types = import_pandas().api.types
    checks = (
        types.is_bool_dtype, types.is_numeric_dtype, types.is_datetime64_any_dtype, types.is_timedelta64_dtype
    )  # fmt: skip
    return any(check(series.dtype) for check in checks) and not _is_categorical(series)


def _is_categorical(series: Any) -> bool:
    return isinstance(series.dtype, import_pandas().CategoricalDtype)


def _read_typed(raw: RawTable, name: str, missing: Sequence[str]) -> Column:
    pd, series = import_pandas(), raw.frame[name]
    if pd.api.types.is_datetime64_any_dtype(series.dtype):
        codes, days = pd.factorize(days_since_1970(series))
        return Column(codes.astype(np.int64), tuple(map(number_text, days.tolist())), (DATE, CATEGORY), days)
    if pd.api.types.is_timedelta64_dtype(series.dtype):
        raise DataError(f"{raw.subject} has durations in the column '{name}'; use numbers, such as days.")
    values = series.to_numpy(dtype=np.float64, na_value=np.nan)
    marked = [number for text in missing for number in parse_numbers([text], ".")]
    values = np.where(np.isin(values, marked), np.nan, values)
    if np.isinf(values).any():
        row = raw.rows[int(np.flatnonzero(np.isinf(values))[0])]
        raise DataError(f"Row {row} of {raw.source} has infinity in the column '{name}'; correct or remove it.")
    codes, numbers = pd.factorize(values)
    if pd.api.types.is_bool_dtype(series.dtype):
        texts = tuple("true" if value else "false" for value in numbers.tolist())
        return Column(codes.astype(np.int64), texts, (BOOLEAN, CATEGORY), numbers, ("false", "true"))
    return _number_column(codes.astype(np.int64), numbers)


def _distinct_texts(raw: RawTable, name: str, missing: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    """Return the code of each row, and the distinct texts without those that mark missing values."""
    pd, series = import_pandas(), raw.frame[name]
    cells = (series.astype(object) if _is_categorical(series) else series).to_numpy(dtype=object, na_value="")
    given = ["" if cell is None else _text(cell) for cell in cells]
    clean = {cell: sanitize(" ".join(cell.split())) for cell in set(given)}
    kept = {cell: None if is_missing(text, missing) else text for cell, text in clean.items()}
    codes, distinct = pd.factorize(np.array([kept[cell] for cell in given], dtype=object))
    return codes.astype(np.int64), list(distinct)


def _text(cell: Any) -> str:
    """Return a cell of a data frame as text; a column of objects may contain numbers."""
    is_number = isinstance(cell, int | float) and not isinstance(cell, bool) and np.isfinite(cell)
    return number_text(cell) if is_number else str(cell)


def _number_column(codes: NDArray[np.int64], numbers: Numbers) -> Column:
    is_boolean = bool(np.isin(numbers, (0, 1)).all())
    kinds = (BOOLEAN, NUMBER, CATEGORY) if is_boolean else (NUMBER, CATEGORY)
    texts = list(map(number_text, numbers.tolist()))
    return make_column(codes, texts, kinds, numbers, _DIGITS if is_boolean else None)


def _category_column(codes: NDArray[np.int64], texts: Sequence[str]) -> Column:
    """Return a column of categories; codes such as 1 and 1.0 are the same."""
    numbers = parse_numbers(texts, ".").tolist()
    plain = [text if number != number else number_text(number) for text, number in zip(texts, numbers, strict=True)]
    return make_column(codes, plain, (CATEGORY,))


def _as_category(column: Column) -> Column:
    return Column(column.codes, column.texts, (CATEGORY,))


def _file_decimal(numbers: dict[str, dict[str, Numbers]]) -> str | None:
    """Return the decimal separator of the columns that have only one reading, if they agree."""
    votes = {mark for readings in numbers.values() if len(readings) == 1 for mark in readings}
    return votes.pop() if len(votes) == 1 else None


def _choose(readings: dict[str, Numbers], decimal: str | None) -> dict[str, Numbers]:
    """Return the readings of a column that differ; the separator of other columns decides between two."""
    if len(readings) < 2 or np.array_equal(readings["."], readings[","]):
        return dict(list(readings.items())[:1])
    return {decimal: readings[decimal]} if decimal else readings


def _from_texts(
    place: _Place, texts: list[str], numbers: dict[str, Numbers], settings: SiteSettings, kinds: dict[str, str]
) -> Column:
    codes = place.codes
    if not texts:
        return Column(codes, (), KINDS, np.empty(0))
    if len(numbers) > 1:
        value = int(np.flatnonzero(numbers["."] != numbers[","])[0])
        one, other = (number_text(float(numbers[mark][value])) for mark in (".", ","))
        raise place.error(texts, value, f"which can be {one} or {other}; set decimal to '.' or ','")
    if numbers:
        return _number_column(codes, next(iter(numbers.values())))
    if (booleans := read_booleans(texts)) is not None:
        return make_column(codes, [text.lower() for text in texts], (BOOLEAN, CATEGORY), *booleans)
    dates = read_dates(texts, settings.date_format)
    readings = list(dates.values())
    if any(not np.array_equal(readings[0], other) for other in readings[1:]):
        raise place.error(texts, 0, f"which can be {' or '.join(dates)}; set date_format to one of them")
    if readings:
        return Column(codes, tuple(texts), (DATE, CATEGORY), readings[0])
    _reject_stray_text(place, texts, settings, kinds)
    return Column(codes, tuple(texts), (CATEGORY,))


def _reject_stray_text(place: _Place, texts: list[str], settings: SiteSettings, kinds: dict[str, str]) -> None:
    """Raise an error for text in a column whose other values are numbers or dates, or must be."""
    rows = np.bincount(place.codes[place.codes >= 0], minlength=len(texts))
    attempts = [(NUMBER, parse_numbers(texts, mark)) for mark in (settings.decimal or ".,")]
    attempts += [(DATE, parse_dates(texts, form)) for form in (settings.date_format or "ISO8601", "%d.%m.%Y")]
    for kind, values in attempts:
        valid = ~np.isnan(values)
        if kinds.get(place.name) == kind or rows[valid].sum() >= max(_MOSTLY * rows.sum(), 2):
            value = int(np.flatnonzero(~valid)[0])
            fix = f"correct it, add it to missing, or add '{place.name}' to categories"
            raise place.error(texts, value, f"where {rows[valid].sum()} of {rows.sum()} values are {kind}s; {fix}")
