"""Figures of a sweep over two or more fields."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from fedtailor.analysis.formatting import escape_markup, format_value
from fedtailor.reporting.figures.drawing import axis_heading
from fedtailor.reporting.figures.figure import Choice, Figure, Option
from fedtailor.reporting.figures.sweep_result import AxisValues, Series, mean_score, settings_summary, settings_table

_COLOR_SCALE = "Cividis"  # color-blind safe
_BEST_COLOR = "#d55e00"


def heatmap(key: str, series: Series, order: AxisValues) -> Figure:
    """Draw the score for each pair of values of two fields; the reader chooses the fields."""
    comparison, pairs = series.comparison, list(combinations(series.axes, 2))
    options = [_cells(series, pair, order) for pair in pairs]
    first = options[0]
    trace = {
        "type": "heatmap", "x": first.traces["x"][0], "y": first.traces["y"][0], "z": first.traces["z"][0],
        "text": first.traces["text"][0], "texttemplate": "%{text}", "colorscale": _COLOR_SCALE, "xgap": 2, "ygap": 2,
        "showscale": False, "reversescale": not comparison.higher_is_better,
        "hovertemplate": "%{y}, %{x}: %{z:.4~g}<extra></extra>",
    }  # fmt: skip
    layout = {
        "height": 120 + 46 * max(3, len(first.traces["y"][0])), "margin": {"t": 34},
        "annotations": [axis_heading(comparison.criterion)], "shapes": first.layout["shapes"],
        "xaxis": {"type": "category", "showgrid": False, "title": {"text": first.layout["xaxis.title.text"]}},
        "yaxis": {"type": "category", "showgrid": False, "title": {"text": first.layout["yaxis.title.text"]},
                  "automargin": True},
    }  # fmt: skip
    title = f"Score over {' and '.join(comparison.names[axis] for axis in pairs[0])}"
    title = title if len(pairs) == 1 else "Best score for each pair of fields"
    title += f" ({series.name})" if series.name else ""
    title += " – solid outline: best; dotted outline: not significantly worse"
    choices = [Choice("fields", options)] if len(options) > 1 else []
    summary, table = settings_summary([comparison]), settings_table([comparison])
    return Figure(key, title, summary, [trace], layout, table, (), choices)


def _cells(series: Series, pair: tuple[str, str], order: AxisValues) -> Option:
    """Return the best score for each pair of values, over all values of the other fields."""
    comparison, (x_axis, y_axis) = series.comparison, pair
    xs, ys = ([value for value in order[axis] if _has_value(series, axis, value)] for axis in pair)
    equivalent = {id(setting) for setting in comparison.indistinguishable()}
    scores, texts, shapes = [], [], []
    for row, y in enumerate(ys):
        cells = []
        for column, x in enumerate(xs):
            here = [one for one in series.settings if one.values.get(x_axis) == x and one.values.get(y_axis) == y]
            cells.append(here[0] if here else None)  # the best one, since settings are ranked
            if any(one is comparison.best for one in here):
                shapes.append(_outline(column, row, {"color": _BEST_COLOR, "width": 4}))
            elif any(id(one) in equivalent for one in here):
                shapes.append(_outline(column, row, {"color": _BEST_COLOR, "width": 1.5, "dash": "dot"}))
        scores.append([None if one is None else mean_score(comparison, one) for one in cells])
        texts.append(["" if one is None else comparison.format_scores(list(one.scores.values())) for one in cells])
    names = [escape_markup(comparison.names[axis]) for axis in pair]
    labels = [[escape_markup(format_value(value)) for value in values] for values in (xs, ys)]
    return Option(
        f"{comparison.names[x_axis]} and {comparison.names[y_axis]}",
        {"x": [labels[0]], "y": [labels[1]], "z": [scores], "text": [texts]},
        {"xaxis.title.text": names[0], "yaxis.title.text": names[1], "shapes": shapes},
    )


def _has_value(series: Series, axis: str, value: Any) -> bool:
    return any(one.values.get(axis) == value for one in series.settings)


def _outline(column: int, row: int, line: Mapping[str, Any]) -> dict[str, Any]:
    box = {"x0": column - 0.48, "x1": column + 0.48, "y0": row - 0.48, "y1": row + 0.48}
    return {"type": "rect", "xref": "x", "yref": "y", "line": dict(line), **box}


def parallel_coordinates(key: str, series: Series, order: AxisValues) -> Figure:
    """Draw all fields side by side, with one line per setting, colored by its score."""
    comparison = series.comparison
    finite = [one for one in series.settings if one.is_finite]
    scores = [mean_score(comparison, one) for one in finite]
    dimensions: list[dict[str, Any]] = []
    for axis in series.axes:
        values = [value for value in order[axis] if _has_value(series, axis, value)]
        positions = [values.index(one.values[axis]) if axis in one.values else None for one in finite]
        texts = [escape_markup(format_value(value)) for value in values]
        label = escape_markup(comparison.names[axis])
        ticks = {"tickvals": list(range(len(values))), "ticktext": texts}
        dimensions.append({"label": label, "values": positions, **ticks})
    dimensions.append({"label": "score", "values": scores})
    line = {"color": scores, "colorscale": _COLOR_SCALE, "reversescale": not comparison.higher_is_better}
    title = "All settings, one line per setting" + (f" ({series.name})" if series.name else "")
    layout = {"height": 430, "margin": {"t": 60, "l": 60, "r": 60}}
    data = [{"type": "parcoords", "line": line, "dimensions": dimensions}]
    return Figure(key, title, settings_summary([comparison]), data, layout, settings_table([comparison]))
