"""How scores and names are written."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import isfinite

SHARES = ("accuracy", "macro_f1", "auc")  # shown in %
_NAMES = {"macro_f1": "macro F1", "auc": "AUC"}
_LONGEST = 60  # letters of a name


def harmless(text: str) -> str:
    """Text from a file, as figures take it: in them <b> and %{x} would mean something.

    >>> harmless("<b>%{x}")
    '‹b›% {x}'
    """
    plain = text.replace("<", "‹").replace(">", "›").replace("%{", "% {")
    return "".join(sign if sign.isprintable() else " " for sign in plain)


def tidy(name: str) -> str:
    """The same of a name, which is cut where it is too long.

    >>> tidy("a" * 70) == "a" * 59 + "…"
    True
    """
    plain = harmless(name)
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 1]}…"


def distinct(names: Sequence[str]) -> list[str]:
    """The same names, numbered where one comes again, as cut ones may.

    >>> distinct(["a", "b", "a", "a#2"])
    ['a', 'b', 'a#2', 'a#2#2']
    """
    wanted: dict[str, int] = {}  # a name that is taken -> how often it came
    for name in names:
        times = wanted.get(name, 0) + 1
        ways = (name if number == 1 else f"{name}#{number}" for number in count(times))
        found = next(way for way in ways if way not in wanted)
        wanted |= {found: 1, name: times}
    return list(wanted)


def counted(count: int, what: str) -> str:
    """So many of something.

    >>> counted(1, "client"), counted(1200, "round")
    ('1 client', '1,200 rounds')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def percent(share: float, digits: int = 0) -> str:
    """A share in words.

    >>> percent(0.534), percent(0.534, 1)
    ('53 %', '53.4 %')
    """
    return f"{100 * share:.{digits}f} %"


@dataclass(frozen=True)
class Scale:
    """How a score is written.

    >>> Scale("accuracy").text(0.5), Scale("accuracy").gap(0.012), Scale("mse").text(0.5)
    ('50.0 %', '1.2 points', '0.5')
    """

    score: str

    @property
    def factor(self) -> float:
        return 100.0 if self.score in SHARES else 1.0

    @property
    def name(self) -> str:
        return _NAMES.get(self.score, tidy(self.score))

    @property
    def title(self) -> str:
        """The name where a title begins."""
        return self.name[:1].upper() + self.name[1:]

    @property
    def unit(self) -> str:
        """Behind a number."""
        return " %" if self.score in SHARES else ""

    @property
    def in_words(self) -> str:
        """With its unit, within a sentence."""
        return f"{self.name} in %" if self.score in SHARES else self.name

    @property
    def heading(self) -> str:
        """With its unit, for axes and tables."""
        return f"{self.name}, %" if self.score in SHARES else self.name

    @property
    def gap_heading(self) -> str:
        return f"{self.name}, points" if self.score in SHARES else self.name

    def plain(self, value: float | None) -> str:
        """The number alone."""
        if value is None or not isfinite(value):
            return "–"
        return f"{100 * value:.1f}" if self.score in SHARES else f"{value:.4g}"

    def text(self, value: float | None) -> str:
        return self.plain(value) + self.unit

    def gap(self, value: float) -> str:
        """A difference, without its sign; in more digits where it would read as nothing."""
        small = self.score in SHARES and 0 < abs(100 * value) < 0.05
        return (f"{100 * abs(value):.2g}" if small else self.plain(abs(value))) + (
            " points" if self.score in SHARES else ""
        )

    def signed(self, value: float | None) -> str:
        """A difference with its sign."""
        return "–" if value is None else ("+" if value > 0 else "−" if value < 0 else "") + self.plain(abs(value))
