"""What figures of methods have in common: who is drawn in colour, labels beside lines, numbers fit for a page."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor, isfinite, log10
from re import match
from typing import Any, TypeVar

import numpy as np

from fedtailor.see.digest import Group
from fedtailor.see.figure import COLOURS, DASHES, styles

MUTED = "#8c8c8c"  # methods beyond those that a reader can tell apart
MOST_COLOURS = 8  # methods in colour, training alone among them
ROW = 27  # pixels of a row with a name
_WIDE = 20  # times the smallest: then equal steps would hide the small ones
_MOST_TICKS = 10
T = TypeVar("T")


def lines(group: Group) -> dict[str, dict[str, Any]]:
    """Label -> the line of a method, the same in every figure of a group; who is far behind is grey."""
    names = ["local" if label == group.alone else label for label in group.methods]
    found = styles(names)
    shown = [name for name in names if name != "local"][: MOST_COLOURS - 1]
    result = {}
    for label, name in zip(group.methods, names, strict=True):
        muted = name != "local" and name not in shown
        result[label] = {"color": MUTED, "dash": "dot"} if muted else found[name]
    return result


def is_muted(line: Mapping[str, Any]) -> bool:
    return bool(line["color"] == MUTED)


def said(label: str) -> str:
    """A method in a sentence."""
    return "training alone" if label == "local" else label


def listed(labels: Sequence[str], most: int = 6) -> str:
    """Names in a sentence.

    >>> listed(["a", "b", "c"]), listed(list("abcdefgh"), most=2)
    ('a, b and c', 'a, b and 6 others')
    """
    names = [said(label) for label in labels]
    if len(names) > most + 1:
        names = [*names[:most], f"{len(names) - most} others"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def capital(sentence: str) -> str:
    """A sentence begins large, but the name of a method or of a client that has one is as it is.

    >>> capital("training alone wins."), capital("client 7 gains."), capital("fedapa wins."), capital("client-a gains.")
    ('Training alone wins.', 'Client 7 gains.', 'fedapa wins.', 'client-a gains.')
    """
    return sentence[0].upper() + sentence[1:] if match(r"training alone\b|client \d", sentence) else sentence


def evenly(found: Sequence[T], most: int) -> list[T]:
    """At most so many of them, evenly, the first and the last among them; of one, the last.

    >>> evenly(range(11), 3), evenly("abc", 9)
    ([0, 5, 10], ['a', 'b', 'c'])
    """
    if len(found) <= most:
        return list(found)
    return [found[int(k)] for k in np.linspace(len(found) - 1, 0, most).round()[::-1]]


def short(value: float | None, digits: int = 5) -> float | None:
    """A number with so many digits as anyone can see; None where it is none.

    >>> short(0.123456789), short(float("nan"))
    (0.12346, None)
    """
    return None if value is None or not isfinite(value) else float(f"{value:.{digits}g}")


def rows_height(rows: int) -> int:
    """Of a figure with a row a method."""
    return 78 + ROW * max(rows, 2)


def rows_axis(labels: Sequence[str]) -> dict[str, Any]:
    """Methods below each other, the first on top."""
    return {
        "type": "category", "categoryorder": "array", "categoryarray": [*reversed(labels)], "automargin": True,
        "showgrid": False, "zeroline": False, "fixedrange": True, "range": [-0.6, len(labels) - 0.4],
    }  # fmt: skip


def over_rounds(name: str, series: Mapping[int, float], place: int) -> dict[str, Any]:
    """A line over the rounds."""
    style = {"color": COLOURS[place % 7], "dash": DASHES[place // 7 % len(DASHES)]}
    y = [short(value) for value in series.values()]
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(series), "y": y, "line": style}


def y_axis(title: str, form: str = "") -> dict[str, Any]:
    return {"title": {"text": title}} | ({"tickformat": form} if form else {})


def powers_axis(values: Iterable[float]) -> dict[str, Any]:
    """A logarithmic axis for positive numbers of very different sizes, with whole numbers at its ticks; else nothing.

    >>> powers_axis([3.0, 90.0])["tickvals"], powers_axis([1.0, 2.0]), powers_axis([0.0, 90.0])
    ([1, 2, 5, 10, 20, 50, 100], {}, {})
    """
    known = [value for value in values if isfinite(value)]
    if not known or min(known) <= 0 or max(known) <= _WIDE * min(known):
        return {}
    low, high = floor(log10(min(known))), ceil(log10(max(known)))
    digits = (1, 2, 5) if high - low <= 3 else (1,)
    ticks = [float(f"{digit}e{power}") for power in range(low, high + 1) for digit in digits]
    ticks = evenly([tick for tick in ticks if tick <= 10.0**high], _MOST_TICKS)
    return {"type": "log", "tickvals": [int(tick) if tick >= 1 else tick for tick in ticks]}


def rounds_axis(title: str) -> dict[str, Any]:
    above = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"}
    return {"xaxis": {"title": {"text": "round"}}, "yaxis": y_axis(title), "hovermode": "x unified", "legend": above}


def heading(text: str) -> dict[str, Any]:
    """What the upright axis shows, written above it."""
    return {
        "text": text, "xref": "paper", "yref": "paper", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom",
        "showarrow": False, "yshift": 6, "align": "left",
    }  # fmt: skip


def apart(values: Sequence[float], gap: float) -> list[float]:
    """Values moved so that no two are nearer than the gap, each as little as can be; their order stays.

    >>> apart([5.0, 0.0, 0.0], gap=2.0)
    [5.0, -1.0, 1.0]
    """
    order = sorted(range(len(values)), key=lambda k: values[k])
    blocks: list[tuple[float, list[int]]] = []  # middle, members: those that touch each other, around their mean
    for position in order:
        block = (values[position], [position])
        while blocks and block[0] - blocks[-1][0] < gap * (len(block[1]) + len(blocks[-1][1])) / 2:
            members = blocks.pop()[1] + block[1]
            block = (sum(values[k] for k in members) / len(members), members)
        blocks.append(block)
    found = {k: m + gap * (i - (len(some) - 1) / 2) for m, some in blocks for i, k in enumerate(some)}
    return [found[k] for k in range(len(values))]


def dotted(label: str, colour: str) -> str:
    """A name with a dot in its colour: letters in light colours would be hard to read."""
    return f"<span style='color:{colour}'>●</span> {label}"


def end_labels(
    ends: Mapping[str, float], colours: Mapping[str, str], span: float, height: float = 320
) -> list[dict[str, Any]]:
    """Names beside the right ends of lines, moved apart where they would cover each other; the axis spans so much."""
    places = apart(list(ends.values()), max(span, 1e-9) / height * 16)
    return [
        {
            "text": dotted(label, colours[label]), "xref": "paper", "x": 1, "xanchor": "left", "xshift": 4,
            "y": short(place), "yref": "y", "yanchor": "middle", "showarrow": False, "font": {"size": 12},
        }
        for label, place in zip(ends, places, strict=True)
    ]  # fmt: skip


def p_text(p: float) -> str:
    """How likely something is by chance.

    >>> p_text(0.0371), p_text(0.0001)
    ('p = 0.037', 'p < 0.001')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def size(amount: float) -> str:
    """Bytes for people.

    >>> size(0), size(1530), size(2.5e9)
    ('0 bytes', '1.53 kB', '2.5 GB')
    """
    if amount < 1000:
        return f"{amount:.0f} bytes"
    power = min(int(log10(amount)) // 3, 5)
    return f"{amount / 1000**power:.3g} {'kMGTP'[power - 1]}B"


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(0.25), duration(75), duration(7300)
    ('0.25 s', '75 s', '2 h 2 min')
    """
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
