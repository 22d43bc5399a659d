"""Maps of a sweep over two fields or more."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from fedtailor.scale import harmless
from fedtailor.see.drawing import heading
from fedtailor.see.figure import Choice, Figure, Option
from fedtailor.see.swept import Order, Series, height, says, table
from fedtailor.sweeps.grid import text_of

_SCALE = "Cividis"  # which the colour-blind see as others do
_MARK = "#d55e00"


def draw_map(key: str, series: Series, order: Order) -> Figure:
    """Two fields: a cell for every two values, outlined the best, and dotted what cannot be told from it."""
    contest, pairs = series.contest, list(combinations(series.axes, 2))
    options = [_cells(series, pair, order) for pair in pairs]
    first = options[0]
    trace = {
        "type": "heatmap", "x": first.traces["x"][0], "y": first.traces["y"][0], "z": first.traces["z"][0],
        "text": first.traces["text"][0], "texttemplate": "%{text}", "colorscale": _SCALE, "xgap": 2, "ygap": 2,
        "showscale": False, "reversescale": not contest.higher_is_better,
        "hovertemplate": "%{y}, %{x}: %{z:.4~g}<extra></extra>",
    }  # fmt: skip
    layout = {
        "height": 120 + 46 * max(3, len(first.traces["y"][0])), "margin": {"t": 34},
        "annotations": [heading(contest.judge)], "shapes": first.layout["shapes"],
        "xaxis": {"type": "category", "showgrid": False, "title": {"text": first.layout["xaxis.title.text"]}},
        "yaxis": {"type": "category", "showgrid": False, "title": {"text": first.layout["yaxis.title.text"]},
                  "automargin": True},
    }  # fmt: skip
    over = " and ".join(contest.names[axis] for axis in (pairs[0] if len(pairs) == 1 else ()))
    title = f"The score over {over}" if over else "The best score for every two fields"
    title += (f" ({series.name})" if series.name else "") + ": outlined the best, dotted what is not told apart from it"
    choices = [Choice("fields", options)] if len(options) > 1 else []
    return Figure(key, title, says([contest]), [trace], layout, table([contest]), (), choices)


def _cells(series: Series, pair: tuple[str, str], order: Order) -> Option:
    """Of every two values the best setting there is with them."""
    contest, (across, up) = series.contest, pair
    xs, ys = ([value for value in order[axis] if _has(series, axis, value)] for axis in pair)
    alike = {id(setting) for setting in contest.not_told_apart()}
    heights, texts, shapes = [], [], []
    for row, y in enumerate(ys):
        cells = []
        for column, x in enumerate(xs):
            here = [one for one in series.settings if one.values.get(across) == x and one.values.get(up) == y]
            cells.append(here[0] if here else None)  # the best of them, for they are ranked
            if any(one is contest.best for one in here):
                shapes.append(_outline(column, row, {"color": _MARK, "width": 4}))
            elif any(id(one) in alike for one in here):
                shapes.append(_outline(column, row, {"color": _MARK, "width": 1.5, "dash": "dot"}))
        heights.append([None if one is None else height(contest, one) for one in cells])
        texts.append(["" if one is None else contest.number(list(one.judged.values())) for one in cells])
    names = [harmless(contest.names[axis]) for axis in pair]
    shown = [[harmless(text_of(value)) for value in values] for values in (xs, ys)]
    return Option(
        f"{contest.names[across]} and {contest.names[up]}",
        {"x": [shown[0]], "y": [shown[1]], "z": [heights], "text": [texts]},
        {"xaxis.title.text": names[0], "yaxis.title.text": names[1], "shapes": shapes},
    )


def _has(series: Series, axis: str, value: Any) -> bool:
    return any(one.values.get(axis) == value for one in series.settings)


def _outline(column: int, row: int, line: Mapping[str, Any]) -> dict[str, Any]:
    box = {"x0": column - 0.48, "x1": column + 0.48, "y0": row - 0.48, "y1": row + 0.48}
    return {"type": "rect", "xref": "x", "yref": "y", "line": dict(line), **box}


def side_by_side(key: str, series: Series, order: Order) -> Figure:
    """All fields beside each other: a line through the values of every setting, coloured by its score."""
    contest = series.contest
    known = [one for one in series.settings if one.is_finite]
    scores = [height(contest, one) for one in known]
    dimensions: list[dict[str, Any]] = []
    for axis in series.axes:
        values = [value for value in order[axis] if _has(series, axis, value)]
        places = [values.index(one.values[axis]) if axis in one.values else None for one in known]
        texts = [harmless(text_of(value)) for value in values]
        label = harmless(contest.names[axis])
        dimensions.append({"label": label, "values": places, "tickvals": list(range(len(values))), "ticktext": texts})
    dimensions.append({"label": "score", "values": scores})
    line = {"color": scores, "colorscale": _SCALE, "reversescale": not contest.higher_is_better}
    title = "All settings side by side" + (f" ({series.name})" if series.name else "")
    layout = {"height": 430, "margin": {"t": 60, "l": 60, "r": 60}}
    data = [{"type": "parcoords", "line": line, "dimensions": dimensions}]
    return Figure(key, title, says([contest]), data, layout, table([contest]))
