"""Format scores, names, and quantities for people."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf, isfinite, log10
from re import match
from typing import Any, TypeVar

import numpy as np

from fedtailor.runs.records import COMMON, GLOBAL, HELD_OUT, TRAIN

PERCENT_METRICS = (
    "accuracy", "balanced_accuracy", "macro_f1", "weighted_f1", "auc", "auc_absent_zero", "average_precision", "ece",
)  # fmt: skip
_METRIC_NAMES = {
    "balanced_accuracy": "balanced accuracy", "macro_f1": "macro F1", "weighted_f1": "weighted F1", "auc": "AUC",
    "auc_absent_zero": "AUC (absent 0)", "average_precision": "average precision", "ece": "calibration error",
    "brier": "Brier score", "mse": "MSE", "rmse": "RMSE", "mae": "MAE", "r2": "R²", "c_index": "C-index",
}  # fmt: skip
_ERRORS = ("brier", "mse", "rmse", "mae")  # at least 0
_PREFIXES = {COMMON: "common ", HELD_OUT: "held-out ", TRAIN: "train ", GLOBAL: "global "}
_MAX_NAME_LENGTH = 60


def escape_markup(text: str) -> str:
    """Escape text from a file for figures, in which <b> and %{x} are markup.

    >>> escape_markup("<b>%{x}")
    '‹b›% {x}'
    """
    plain = text.replace("<", "‹").replace(">", "›").replace("%{", "% {")
    return "".join(char if char.isprintable() else " " for char in plain)


def shorten(name: str) -> str:
    """Escape a name and truncate it if it is too long.

    >>> shorten("a" * 70) == "a" * 59 + "…"
    True
    """
    plain = escape_markup(name)
    return plain if len(plain) <= _MAX_NAME_LENGTH else f"{plain[: _MAX_NAME_LENGTH - 1]}…"


def make_unique(names: Sequence[str]) -> list[str]:
    """Return the names with a number added to duplicates, which truncation can produce.

    >>> make_unique(["a", "b", "a", "a#2"])
    ['a', 'b', 'a#2', 'a#2#2']
    """
    used: dict[str, int] = {}  # name -> how often it occurred
    for name in names:
        times = used.get(name, 0) + 1
        candidates = (name if number == 1 else f"{name}#{number}" for number in count(times))
        unique = next(candidate for candidate in candidates if candidate not in used)
        used |= {unique: 1, name: times}
    return list(used)


def setting_labels(settings: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Return labels of settings, each given as its method's proper name and its fields: the name, with the fields that
    differ if a method has several settings. Long labels are truncated, and equal labels are numbered.

    >>> setting_labels([("FedProx", {"mu": 0.1, "lr": 1.0}), ("FedProx", {"mu": 1.0, "lr": 1.0}), ("FedAvg", {})])
    ['FedProx mu=0.1', 'FedProx mu=1', 'FedAvg']
    """
    by_method: dict[str, list[dict[str, str]]] = {}
    for title, fields in settings:
        by_method.setdefault(title, []).append({name: format_value(value) for name, value in fields.items()})
    differ = {
        title: [n for n in dict.fromkeys(n for own in some for n in own) if len({own.get(n) for own in some}) > 1]
        for title, some in by_method.items()
    }
    words = [
        [title, *(f"{name}={format_value(fields[name])}" for name in differ[title] if name in fields)]
        for title, fields in settings
    ]
    return make_unique([shorten(" ".join(parts)) for parts in words])


def count_of(count: int, what: str) -> str:
    """Return a count with its noun, in the singular or the plural.

    >>> count_of(1, "client"), count_of(1200, "round")
    ('1 client', '1,200 rounds')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def format_value(value: Any) -> str:
    """Return the value of a setting as a flag would write it.

    >>> [format_value(value) for value in (0.010, 1.0, 1e-5, [64, 32], True, "iid")]
    ['0.01', '1', '1e-05', '64,32', 'true', 'iid']
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return ",".join(map(format_value, value)) if isinstance(value, list | tuple) else str(value)


def percent(fraction: float, digits: int = 0) -> str:
    """Return a fraction as a percentage.

    >>> percent(0.534), percent(0.534, 1)
    ('53 %', '53.4 %')
    """
    return f"{100 * fraction:.{digits}f} %"


def split_prefix(metric: str) -> tuple[str, str]:
    """Return the prefix of a metric that is not about personal models on their clients' test samples, and the metric
    without it: on the common test set, of held-out clients, on training samples, or of the global model.

    >>> split_prefix("common_accuracy"), split_prefix("accuracy")
    (('common_', 'accuracy'), ('', 'accuracy'))
    """
    prefix = next((prefix for prefix in _PREFIXES if metric.startswith(prefix)), "")
    return prefix, metric.removeprefix(prefix)


@dataclass(frozen=True)
class ScoreFormat:
    """Formats the values of one metric.

    >>> ScoreFormat("accuracy").text(0.5), ScoreFormat("accuracy").gap(0.012), ScoreFormat("mse").text(0.5)
    ('50.0 %', '1.2 points', '0.5')
    >>> ScoreFormat("accuracy").lead(0.007), ScoreFormat("mse").lead(0.165)
    ('0.7-point lead', 'lead of 0.165')
    >>> ScoreFormat("c_index").text(0.7), ScoreFormat("c_index").gap(0.0123456)
    ('0.700', '0.012')
    >>> ScoreFormat("held_out_macro_f1").name, ScoreFormat("common_accuracy").text(0.5)
    ('held-out macro F1', '50.0 %')
    """

    score: str

    @property
    def is_percent(self) -> bool:
        """Whether values are shown in %."""
        return split_prefix(self.score)[1] in PERCENT_METRICS

    @property
    def is_fraction(self) -> bool:
        """Whether values are from 0 to 1."""
        return self.is_percent or split_prefix(self.score)[1] == "c_index"

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest possible value."""
        metric = split_prefix(self.score)[1]
        lowest = 0.0 if self.is_fraction or metric in _ERRORS else -inf
        return lowest, 1.0 if self.is_fraction or metric == "r2" else inf

    @property
    def factor(self) -> float:
        return 100.0 if self.is_percent else 1.0

    @property
    def name(self) -> str:
        prefix, metric = split_prefix(self.score)
        return _PREFIXES.get(prefix, "") + _METRIC_NAMES.get(metric, shorten(metric))

    @property
    def title(self) -> str:
        """The name with a capital first letter."""
        return self.name[:1].upper() + self.name[1:]

    @property
    def unit(self) -> str:
        """The unit that follows a value."""
        return " %" if self.is_percent else ""

    @property
    def in_words(self) -> str:
        """The name with its unit, for sentences."""
        return f"{self.name} in %" if self.is_percent else self.name

    @property
    def heading(self) -> str:
        """The name with its unit, for axes and tables."""
        return f"{self.name}, %" if self.is_percent else self.name

    @property
    def gap_heading(self) -> str:
        return f"{self.name}, points" if self.is_percent else self.name

    def plain(self, value: float | None) -> str:
        """Return a value without its unit."""
        if value is None or not isfinite(value):
            return "–"
        if not self.is_percent:
            return f"{value:.3f}" if self.is_fraction and abs(value) >= 0.0005 else f"{value:.4g}"
        return f"{100 * round(value, 6):.1f}"  # scores in 32 and in 64 bits are rounded to the same text

    def text(self, value: float | None) -> str:
        """Return a value with its unit."""
        return self.plain(value) + self.unit

    def gap(self, value: float) -> str:
        """Return a difference without its sign, with more digits where it would be rounded to zero."""
        small = self.is_percent and 0 < abs(100 * value) < 0.05
        return (f"{100 * abs(value):.2g}" if small else self.plain(abs(value))) + (" points" if self.is_percent else "")

    def lead(self, value: float) -> str:
        """Return a difference as a noun phrase."""
        gap = self.gap(value)
        return f"{gap.removesuffix(' points')}-point lead" if gap.endswith(" points") else f"lead of {gap}"

    def signed(self, value: float | None) -> str:
        """Return a difference with its sign and without its unit."""
        return "–" if value is None else ("+" if value > 0 else "−" if value < 0 else "") + self.plain(abs(value))


T = TypeVar("T")


def method_in_text(label: str) -> str:
    """Return a method's label as it is written inside a sentence.

    >>> method_in_text("Local training"), method_in_text("Self-FL")
    ('local training', 'Self-FL')
    """
    return f"{label[0].lower()}{label[1:]}" if label.startswith(("Local training", "Centralized training")) else label


def join_names(labels: Sequence[str], limit: int = 6) -> str:
    """Return at most `limit` names as an enumeration inside a sentence.

    >>> join_names(["a", "b", "c"]), join_names(list("abcdefgh"), limit=2)
    ('a, b and c', 'a, b and 6 others')
    """
    names = [method_in_text(label) for label in labels]
    if len(names) > limit + 1:
        names = [*names[:limit], f"{len(names) - limit} others"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def capitalize(sentence: str) -> str:
    """Capitalize a sentence that starts with a numbered client; the names of clients stay as they are.

    >>> capitalize("client 7 gains."), capitalize("alice gains.")
    ('Client 7 gains.', 'alice gains.')
    """
    return f"C{sentence[1:]}" if match(r"client \d", sentence) else sentence


def evenly_spaced(items: Sequence[T], limit: int) -> list[T]:
    """Return at most `limit` evenly spaced items, including the first and the last; if `limit` is 1, the last.

    >>> evenly_spaced(range(11), 3), evenly_spaced("abc", 9)
    ([0, 5, 10], ['a', 'b', 'c'])
    """
    if len(items) <= limit:
        return list(items)
    return [items[int(k)] for k in np.linspace(len(items) - 1, 0, limit).round()[::-1]]


def round_digits(value: float | None, digits: int = 5) -> float | None:
    """Return a value rounded to significant digits; None if it is not finite.

    >>> round_digits(0.123456789), round_digits(float("nan"))
    (0.12346, None)
    """
    return None if value is None or not isfinite(value) else float(f"{value:.{digits}g}")


def format_p(p: float) -> str:
    """Return a p value for text.

    >>> format_p(0.0371), format_p(0.0001)
    ('p = 0.037', 'p < 0.001')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def format_bytes(amount: float) -> str:
    """Return a number of bytes with a decimal unit.

    >>> format_bytes(0), format_bytes(1530), format_bytes(2.5e9)
    ('0 bytes', '1.53 kB', '2.5 GB')
    """
    if amount < 1000:
        return f"{amount:.0f} bytes"
    power = min(int(log10(amount)) // 3, 5)
    return f"{amount / 1000**power:.3g} {'kMGTP'[power - 1]}B"


def format_megabytes(amount: float) -> str:
    """Return bytes in MB with one decimal; small amounts have two significant digits, so that they are not 0.

    >>> format_megabytes(2e6), format_megabytes(8_400), format_megabytes(0)
    ('2.0', '0.0084', '0.0')
    """
    megabytes = amount / 1e6
    return f"{megabytes:.1f}" if megabytes >= 0.1 or not megabytes else f"{megabytes:.2g}"


def format_duration(seconds: float) -> str:
    """Return a duration in seconds, minutes, or hours.

    >>> format_duration(0.25), format_duration(75), format_duration(7300)
    ('0.25 s', '75 s', '2 h 2 min')
    """
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
