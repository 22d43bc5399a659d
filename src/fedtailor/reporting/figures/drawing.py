"""Helpers that the figures share: line styles of methods, axes, and labels that do not overlap."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor, isfinite, log10
from typing import Any

from fedtailor.analysis.formatting import evenly_spaced, round_digits
from fedtailor.analysis.run_summary import Comparison
from fedtailor.reporting.figures.figure import COLORS, DASHES, line_styles

MUTED_COLOR = "#8c8c8c"  # methods beyond MAX_COLORS
MAX_COLORS = 8  # methods drawn in color, including local training
ROW_HEIGHT = 27  # pixels
MAX_TICKED_ROUNDS = 10  # with more, not every round has a tick
_LOG_AXIS_RATIO = 20  # largest to smallest value, above which an axis is logarithmic
_MAX_TICKS = 10


def method_styles(group: Comparison) -> dict[str, dict[str, Any]]:
    """Return the line style of each label, the same in all figures; methods beyond the colors are gray."""
    styles = line_styles("Local training" if label == group.baseline else label for label in group.methods)
    others = [label for label in group.methods if label != group.baseline]
    muted = {label: {"color": MUTED_COLOR, "dash": "dot"} for label in others[MAX_COLORS - 1 :]}
    return dict(zip(group.methods, styles.values(), strict=True)) | muted


def is_muted(line: Mapping[str, Any]) -> bool:
    return bool(line["color"] == MUTED_COLOR)


def rows_height(rows: int) -> int:
    """Return the height of a figure with one row per method."""
    return 78 + ROW_HEIGHT * max(rows, 2)


def rows_axis(labels: Sequence[str]) -> dict[str, Any]:
    """Return a categorical axis with one row per label, the first at the top."""
    return {
        "type": "category", "categoryorder": "array", "categoryarray": [*reversed(labels)], "automargin": True,
        "showgrid": False, "zeroline": False, "fixedrange": True, "range": [-0.6, len(labels) - 0.4],
    }  # fmt: skip


def round_trace(name: str, series: Mapping[int, float], position: int) -> dict[str, Any]:
    """Return a line over rounds; `position` selects its color."""
    style = {"color": COLORS[position % 7], "dash": DASHES[position // 7 % len(DASHES)]}
    y = [round_digits(value) for value in series.values()]
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(series), "y": y, "line": style}


def log_axis(values: Iterable[float]) -> dict[str, Any]:
    """Return a logarithmic axis with round tick values if the values are positive and span a wide range, else {}.

    >>> log_axis([3.0, 90.0])["tickvals"], log_axis([1.0, 2.0]), log_axis([0.0, 90.0])
    ([1, 2, 5, 10, 20, 50, 100], {}, {})
    """
    finite = [value for value in values if isfinite(value)]
    if not finite or min(finite) <= 0 or max(finite) <= _LOG_AXIS_RATIO * min(finite):
        return {}
    low, high = floor(log10(min(finite))), ceil(log10(max(finite)))
    digits = (1, 2, 5) if high - low <= 3 else (1,)
    ticks = [float(f"{digit}e{power}") for power in range(low, high + 1) for digit in digits]
    ticks = evenly_spaced([tick for tick in ticks if tick <= 10.0**high], _MAX_TICKS)
    return {"type": "log", "tickvals": [int(tick) if tick >= 1 else tick for tick in ticks]}


def rounds_layout(y_title: str, rounds: Iterable[int]) -> dict[str, Any]:
    ticks = {"dtick": 1} if max(rounds, default=0) <= MAX_TICKED_ROUNDS else {}  # no ticks between rounds
    return {
        "xaxis": {"title": {"text": "round"}} | ticks, "yaxis": {"title": {"text": y_title}}, "hovermode": "x unified",
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
    }  # fmt: skip


def axis_heading(text: str) -> dict[str, Any]:
    """Return an annotation above the vertical axis that names its quantity."""
    return {
        "text": text, "xref": "paper", "yref": "paper", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom",
        "showarrow": False, "yshift": 6, "align": "left",
    }  # fmt: skip


def space_out(values: Sequence[float], gap: float) -> list[float]:
    """Move values apart, as little as possible, so that any two differ by at least `gap`; keep their order.

    >>> space_out([5.0, 0.0, 0.0], gap=2.0)
    [5.0, -1.0, 1.0]
    """
    order = sorted(range(len(values)), key=lambda k: values[k])
    blocks: list[tuple[float, list[int]]] = []  # (center, members): values that touch, centered on their mean
    for position in order:
        block = (values[position], [position])
        while blocks and block[0] - blocks[-1][0] < gap * (len(block[1]) + len(blocks[-1][1])) / 2:
            members = blocks.pop()[1] + block[1]
            block = (sum(values[k] for k in members) / len(members), members)
        blocks.append(block)
    moved = {k: c + gap * (i - (len(members) - 1) / 2) for c, members in blocks for i, k in enumerate(members)}
    return [moved[k] for k in range(len(values))]


def colored_label(label: str, color: str) -> str:
    """Return the label with a colored dot in front; text in a light color would be hard to read."""
    return f"<span style='color:{color}'>●</span> {label}"


def end_labels(
    ends: Mapping[str, float], colors: Mapping[str, str], span: float, height: float = 320
) -> list[dict[str, Any]]:
    """Return labels next to the right ends of lines, without overlap; `span` is the range of the vertical axis."""
    positions = space_out(list(ends.values()), max(span, 1e-9) / height * 16)
    return [
        {
            "text": colored_label(label, colors[label]), "xref": "paper", "x": 1, "xanchor": "left", "xshift": 4,
            "y": round_digits(position), "yref": "y", "yanchor": "middle", "showarrow": False, "font": {"size": 12},
        }
        for label, position in zip(ends, positions, strict=True)
    ]  # fmt: skip
