"""Read the distinct texts of a column as numbers, dates, or booleans; a reading exists only if all texts have it."""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from math import isfinite, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.errors import ConfigError, reason

Numbers = NDArray[np.float64]

MISSING = frozenset({"", "na", "n/a", "#n/a", "#na", "<na>", "nan", "nat", "null", "?", "-", "--", "."})
_PAIRS = (("false", "true"), ("no", "yes"), ("f", "t"), ("n", "y"))
_BOOLEANS = {word: float(value) for pair in _PAIRS for value, word in enumerate(pair)}
_DATE_FORMATS = ("ISO8601", "%Y/%m/%d", "%d.%m.%Y", "%d.%m.%y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y")
_ISO_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}([T ]\d{1,2}:\d{2}.*)?")
_MS_PER_DAY = 86_400_000
_SAMPLE = 20  # texts that are tried first, because text is no date in most formats
_GROUPS = " '\u2019\u00a0\u202f"  # separators of thousands besides the comma and the point


def is_missing(text: str, more: Iterable[str] = ()) -> bool:
    """Return whether a text marks a missing value.

    >>> is_missing(" NA "), is_missing("none"), is_missing("-999", ["-999"])
    (True, False, True)
    """
    stripped = text.strip()
    return stripped.lower() in MISSING or stripped in more


def read_numbers(texts: Sequence[str], decimal: str | None = None) -> dict[str, Numbers]:
    """Return the numbers of texts for each decimal separator with which all are numbers; thousands may be separated.

    >>> {decimal: values.tolist() for decimal, values in read_numbers(["1.234,5", "7"]).items()}
    {',': [1234.5, 7.0]}
    >>> {decimal: values.tolist() for decimal, values in read_numbers(["1,234"]).items()}
    {'.': [1234.0], ',': [1.234]}
    """
    found = {mark: parse_numbers(texts, mark) for mark in ([decimal] if decimal else [".", ","])}
    return {mark: values for mark, values in found.items() if not np.isnan(values).any()}


def parse_numbers(texts: Sequence[str], decimal: str) -> Numbers:
    """Return the number of each text; NaN for one that is not a number."""
    pattern, thousands = _number_pattern(decimal), "," if decimal == "." else "."
    drop = str.maketrans(dict.fromkeys(thousands + _GROUPS) | {"\u2212": "-"})
    numbers = [
        float(text.translate(drop).replace(decimal, ".")) if pattern.fullmatch(text.replace("\u2212", "-")) else nan
        for text in texts
    ]
    return np.array([number if isfinite(number) else nan for number in numbers], dtype=np.float64)


@cache
def _number_pattern(decimal: str) -> re.Pattern[str]:
    """A text such as 0123 is a code, not a number."""
    mark, group = re.escape(decimal), f"[{_GROUPS}{',' if decimal == '.' else '.'}]"
    plain = rf"(?:0|[1-9]\d*)(?:{mark}\d*)?|{mark}\d+"
    grouped = rf"[1-9]\d{{0,2}}({group})\d{{3}}(?:\1\d{{3}})*(?:{mark}\d+)?"
    return re.compile(rf"[+-]?(?:{plain}|{grouped})(?:[eE][+-]?\d{{1,3}})?")


def read_dates(texts: Sequence[str], date_format: str | None = None) -> dict[str, Numbers]:
    """Return the days since 1970 of texts for each format in which all are dates.

    >>> {form: days.tolist() for form, days in read_dates(["1970-01-03", "1970-01-01 12:00"]).items()}
    {'ISO8601': [2.0, 0.5]}
    >>> list(read_dates(["13/02/2020"])), list(read_dates(["01/02/2020"]))
    (['%d/%m/%Y'], ['%d/%m/%Y', '%m/%d/%Y'])
    """
    formats = [date_format] if date_format else _DATE_FORMATS
    likely = [form for form in formats if not np.isnan(parse_dates(texts[:_SAMPLE], form)).any()]
    found = {form: parse_dates(texts, form) for form in likely}
    return {form: days for form, days in found.items() if not np.isnan(days).any()}


def parse_dates(texts: Sequence[str], date_format: str) -> Numbers:
    """Return the days since 1970 of each text; NaN for one that is not a date in this format."""
    import pandas as pd

    if date_format == "ISO8601":  # pandas would also read a year or 20200131, which are numbers
        texts = [text if _ISO_DATE.fullmatch(text) else "" for text in texts]
    series = pd.Series(texts, dtype=object)
    try:
        return days_since_1970(pd.to_datetime(series, format=date_format, errors="coerce", utc=True))
    except ValueError as error:
        raise ConfigError(f"date_format cannot be '{date_format}': {reason(error)}.") from error


def days_since_1970(dates: Any) -> Numbers:
    """Return the dates of a pandas Series as numbers, with the time of day as a fraction."""
    naive = dates if dates.dt.tz is None else dates.dt.tz_convert(None)
    times = naive.to_numpy().astype("datetime64[ms]")
    return np.where(np.isnat(times), nan, times.astype(np.int64) / _MS_PER_DAY)


def read_booleans(texts: Sequence[str]) -> tuple[Numbers, tuple[str, str]] | None:
    """Return 0 or 1 for each text and the two words that are used, if all texts are such words.

    >>> read_booleans(["Yes", "no"])
    (array([1., 0.]), ('no', 'yes'))
    >>> read_booleans(["f", "m"]) is None
    True
    """
    words = [text.lower() for text in texts]
    if not all(word in _BOOLEANS for word in words):
        return None
    used = [pair for pair in _PAIRS if any(word in pair for word in words)]
    return np.array([_BOOLEANS[word] for word in words]), used[0] if len(used) == 1 else _PAIRS[0]


def number_text(value: float) -> str:
    """Return a number as the text of a category: 2.0 is 2.

    >>> number_text(2.0), number_text(0.5)
    ('2', '0.5')
    """
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
