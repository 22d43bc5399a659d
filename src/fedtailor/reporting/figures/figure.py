"""A figure: its plotly data, a summary sentence, and a table with the same values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# The color-blind-safe palette of Okabe and Ito. Yellow and black are left out: they lack contrast on a light and on a
# dark page, respectively.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
DASHES = ("solid", "dash", "dot", "dashdot")  # distinguish lines when colors repeat or cannot be seen
BASELINE_COLOR = "#7f7f7f"  # local training, in all figures
MAX_ROWS = 500  # per table


@dataclass(frozen=True)
class Table:
    """The values of a figure, for screen readers and for looking up values."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]  # strings and numbers


def limit_rows(rows: list[list[Any]], note: str = "") -> list[list[Any]]:
    """Return at most `MAX_ROWS` rows of a table, and one that says how many there are more."""
    omitted = len(rows) - MAX_ROWS
    return rows if omitted <= 0 else [*rows[:MAX_ROWS], [f"and {omitted} more{note}", *[""] * (len(rows[0]) - 1)]]


@dataclass(frozen=True)
class Option:
    """One variant of a figure: the changes to its traces (as in plotly's restyle) and to its layout (relayout)."""

    name: str
    traces: Mapping[str, Any]
    layout: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """A control with options; the figure is initially drawn with the first one.

    Choices of one figure must change different attributes, so that they can be combined freely.
    """

    label: str
    options: Sequence[Option]


@dataclass(frozen=True)
class Figure:
    """A plotly figure as plain lists and dicts; the page sets the colors of text, grid, and background."""

    key: str  # the figure's name in the page, e.g. in element ids
    title: str
    summary: str  # one sentence, computed from the values
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    table: Table
    frames: Sequence[Mapping[str, Any]] = field(default_factory=tuple)  # for a slider over rounds
    choices: Sequence[Choice] = ()
    legend: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # meaning -> marker, as the summary says

    def to_dict(self) -> dict[str, Any]:
        """Return the figure as plain data for JSON.

        >>> Figure("cost", "Cost", "It costs nothing.", [], {}, Table(["bytes"], [[0]])).to_dict()["summary"]
        'It costs nothing.'
        """
        return asdict(self)


def line_styles(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return one line style per method name.

    >>> line_styles(["Local training", "fedapa"])["Local training"]["color"] == BASELINE_COLOR
    True
    """
    styles, number = dict[str, dict[str, Any]](), 0
    for name in methods:
        if name == "Local training":
            styles[name] = {"color": BASELINE_COLOR, "dash": "dash"}
            continue
        styles[name] = {"color": COLORS[number % 7], "dash": DASHES[number // 7 % len(DASHES)]}
        number += 1
    return styles
