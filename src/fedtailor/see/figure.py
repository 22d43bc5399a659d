"""A figure: what is drawn, the sentence that says what to see, and the same as a table."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# Okabe and Ito's colours, which people tell apart whatever they see, without the yellow and the black, of which one
# page or the other has too much
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
DASHES = ("solid", "dash", "dot", "dashdot")  # where colours run out, and for who sees none
ALONE = "#7f7f7f"  # training alone, in every figure


@dataclass(frozen=True)
class Table:
    """Numbers for who cannot see a figure, or wants to look them up."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]  # texts and numbers


@dataclass(frozen=True)
class Option:
    """One way to look at a figure: what changes in its traces (plotly's restyle) and in its layout (relayout)."""

    name: str
    traces: Mapping[str, Any]
    layout: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """What a reader may choose; the figure is drawn as the first option has it. Choices change different things, so
    that every combination has a meaning."""

    label: str
    options: Sequence[Option]


@dataclass(frozen=True)
class Figure:
    """Traces and layout are plotly's, as plain lists and dicts; colours of the page itself are left to the page."""

    key: str  # its name in the page's address
    title: str
    says: str  # one sentence, made from the numbers
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    table: Table
    frames: Sequence[Mapping[str, Any]] = field(default_factory=tuple)  # of a slider
    choices: Sequence[Choice] = ()

    def plain(self) -> dict[str, Any]:
        """All of it, for JSON.

        >>> Figure("cost", "Cost", "It costs nothing.", [], {}, Table(["bytes"], [[0]])).plain()["says"]
        'It costs nothing.'
        """
        return asdict(self)


def styles(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A line for every method, by which it is known in all figures.

    >>> styles(["local", "fedapa"])["local"]["color"] == ALONE
    True
    """
    found, number = dict[str, dict[str, Any]](), 0
    for name in methods:
        if name == "local":
            found[name] = {"color": ALONE, "dash": "dash"}
            continue
        found[name] = {"color": COLOURS[number % 7], "dash": DASHES[number // 7 % len(DASHES)]}
        number += 1
    return found
