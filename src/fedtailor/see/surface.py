"""What a sweep found: the score over the fields that were swept, with the best marked."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedtailor.scale import harmless
from fedtailor.see.drawing import heading, short
from fedtailor.see.figure import Figure, styles
from fedtailor.see.maps import draw_map, side_by_side
from fedtailor.see.swept import (
    Order,
    Series,
    Swept,
    apart,
    are_numbers,
    height,
    names,
    order_of,
    says,
    split,
    spread,
    table,
)
from fedtailor.sweeps.grid import text_of
from fedtailor.sweeps.sweep import Plan
from fedtailor.sweeps.tuning import Contest, Setting

_WIDE = 8  # times the smallest value: beyond, an axis is drawn in powers
_Spot = tuple[Any, Contest, Setting]  # a value on the axis, None where a method has no such field; and what it gave


def surface(found: Sequence[Swept]) -> list[Figure]:
    """The figures of every sweep."""
    figures: list[Figure] = []
    for one, name in zip(found, names(found), strict=True):
        drawn = draw(one.plan, one.contests, f"-{len(figures) + 1}" if figures else "")
        figures += [replace(figure, title=f"{name}: {figure.title}") for figure in drawn] if name else drawn
    return figures


def draw(plan: Plan, found: Sequence[Contest], suffix: str = "") -> list[Figure]:
    """One swept field: a curve, with the spread over seeds. Two: a map. More: a map of every two, with the best of the
    others, and all of them side by side."""
    order = order_of(plan)
    series = [one for contest in found for one in split(contest, len(found) > 1)]
    swept = list(dict.fromkeys(axis for one in series for axis in one.axes))
    key = f"surface{suffix}"
    if len(swept) == 1:
        return [_curve(key, series, swept[0], order)]
    if not swept:
        given = [axis for axis, values in order.items() if axis in found[0].given and len(values) > 1]
        return [_curve(key, series, given[0] if len(given) == 1 else "", order)] if len(series) > 1 else []
    figures = [_curve(key, [replace(one, settings=one.settings[:1]) for one in series], "", order)]
    figures = figures if len({one.method for one in series}) > 1 else []  # each method with its best settings
    for one in (apart(one) for one in series if one.axes):
        own = f"{key}-{len(figures) + 1}" if figures else key
        if len(one.axes) == 1:
            figures.append(_curve(own, [one], one.axes[0], order))
            continue
        figures.append(draw_map(own, one, order))
        if len(one.axes) > 2:
            figures.append(side_by_side(f"{own}-all", one, order))
    return figures


def _curve(key: str, series: Sequence[Series], axis: str, order: Order) -> Figure:
    """The score over one field, a line for every method and condition; over no field, a dot for each of them."""
    contest, rows = series[0].contest, _rows(series, axis)
    values = list(order[axis]) if axis else [one.name for one in series]
    numbers = are_numbers(values)
    at = {text_of(value): value if numbers else harmless(text_of(value)) for value in values}
    data = list[dict[str, Any]]()
    for (name, spots), line in zip(rows.items(), styles(rows).values(), strict=True):
        placed = [spot for value in values for spot in spots if spot[0] == value]
        data += _line(name, [(at[text_of(x)], of, setting) for x, of, setting in placed], line, bool(axis))
        for y in [height(of, setting) for x, of, setting in spots if x is None]:  # has no such field: a level line
            ends = [at[text_of(value)] for value in (values[0], values[-1])]
            level = {"type": "scatter", "mode": "lines", "name": harmless(name), "line": dict(line)}
            data.append(level | {"x": ends, "y": [y, y]})
    layout = {
        "height": 430, "xaxis": _x_axis(contest.names.get(axis, ""), values, numbers),
        "yaxis": {"zeroline": False}, "annotations": [heading(contest.judge)], "margin": {"t": 34},
        "showlegend": len(rows) > 1,
    }  # fmt: skip
    bars = ": bars are ± a deviation over seeds" if contest.seeds > 1 else ""
    found = list({id(one.contest): one.contest for one in series}.values())
    over = f"The score over {contest.names[axis]}" if axis else "Every method with its best settings"
    over = over if axis or len({one.method for one in series}) > 1 else "The score"
    title = over + (f" ({series[0].name})" if len(series) == 1 and series[0].name else "") + bars
    return Figure(key, title, says(found), data, layout, table(found))


def _rows(series: Sequence[Series], axis: str) -> dict[str, list[_Spot]]:
    """A line's name -> what lies on it."""
    rows = dict[str, list[_Spot]]()
    for one in series:
        over_given = axis in one.contest.given  # then a line is a method, and goes through all conditions
        own = rows.setdefault("" if not axis else one.method if over_given else one.name, [])
        for setting in one.settings:
            own.append((setting.values.get(axis) if axis else one.name, one.contest, setting))
    return rows


def _line(name: str, spots: Sequence[_Spot], line: Mapping[str, Any], joined: bool) -> list[dict[str, Any]]:
    """The mean with its deviation, a star on the best, and every seed as a small dot."""
    best = [setting is contest.best and len(contest.settings) > 1 for _, contest, setting in spots]
    mark = {"size": [15 if star else 8 for star in best], "symbol": ["star" if star else "circle" for star in best]}
    scores = [(x, short(of.scale.factor * score)) for x, of, one in spots for score in one.judged.values()]
    shown = {"type": "scatter", "name": harmless(name), "legendgroup": harmless(name)}
    spreads = [spread(contest, setting) for _, contest, setting in spots]
    means = {
        "mode": "lines+markers" if joined else "markers", "x": [x for x, *_ in spots],
        "y": [height(contest, setting) for _, contest, setting in spots], "line": dict(line),
        "marker": mark | {"color": line["color"]}, "error_y": {"type": "data", "array": spreads, "thickness": 1.2},
        "hovertemplate": "%{x}: %{y:.4~g}<extra></extra>",
    }  # fmt: skip
    dots = {
        "mode": "markers", "x": [x for x, _ in scores], "y": [y for _, y in scores], "showlegend": False,
        "hoverinfo": "skip", "marker": {"color": line["color"], "size": 4, "opacity": 0.45},
    }  # fmt: skip
    return [shown | means, shown | dots]


def _x_axis(name: str, values: Sequence[Any], numbers: bool) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": harmless(name)}, "zeroline": False}
    if not numbers:
        texts = [harmless(text_of(value)) for value in values]
        return axis | {"type": "category", "categoryorder": "array", "categoryarray": texts}
    powers = min(values) > 0 and max(values) / min(values) >= _WIDE
    ticks = {"tickvals": list(values), "ticktext": [text_of(value) for value in values]} if len(values) <= 12 else {}
    return axis | ticks | {"type": "log" if powers else "linear"}
