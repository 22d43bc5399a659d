"""Figures of a sweep: the score over the swept fields, with the best setting marked."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedtailor.analysis.formatting import escape_markup, format_value, round_digits
from fedtailor.experiments.sweep import Plan
from fedtailor.experiments.tuning import Setting, SweepComparison
from fedtailor.reporting.figures.drawing import axis_heading
from fedtailor.reporting.figures.figure import Figure, line_styles
from fedtailor.reporting.figures.heatmaps import heatmap, parallel_coordinates
from fedtailor.reporting.figures.sweep_result import (
    AxisValues,
    Series,
    SweepResult,
    all_numeric,
    as_own_comparison,
    axis_values,
    mean_score,
    seed_std,
    settings_summary,
    settings_table,
    split_by_method,
    sweep_names,
)

_LOG_AXIS_RATIO = 8  # largest to smallest value, from which an axis is logarithmic
_Point = tuple[Any, SweepComparison, Setting]  # its value on the axis; None if the method does not have the field


def sweep_figures(sweeps: Sequence[SweepResult]) -> list[Figure]:
    """Return the figures of all sweeps."""
    figures: list[Figure] = []
    for sweep, name in zip(sweeps, sweep_names(sweeps), strict=True):
        drawn = draw_sweep(sweep.plan, sweep.comparisons, f"-{len(figures) + 1}" if figures else "")
        figures += [replace(figure, title=f"{name}: {figure.title}") for figure in drawn] if name else drawn
    return figures


def draw_sweep(plan: Plan, comparisons: Sequence[SweepComparison], suffix: str = "") -> list[Figure]:
    """Return the figures of one sweep.

    One swept field is drawn as a curve and two as a heat map. More fields are drawn as a heat map for each pair, with
    the best values of the others, and as parallel coordinates.
    """
    order = axis_values(plan)
    series = [one for comparison in comparisons for one in split_by_method(comparison, len(comparisons) > 1)]
    swept = list(dict.fromkeys(axis for one in series for axis in one.axes))
    key = f"sweep{suffix}"
    if len(swept) == 1:
        return [_curve(key, series, swept[0], order)]
    if not swept:
        given = [axis for axis, values in order.items() if axis in comparisons[0].conditions and len(values) > 1]
        return [_curve(key, series, given[0] if len(given) == 1 else "", order)] if len(series) > 1 else []
    figures = [_curve(key, [replace(one, settings=one.settings[:1]) for one in series], "", order)]
    figures = figures if len({one.method for one in series}) > 1 else []  # compares methods with their best settings
    for one in (as_own_comparison(one) for one in series if one.axes):
        own_key = f"{key}-{len(figures) + 1}" if figures else key
        if len(one.axes) == 1:
            figures.append(_curve(own_key, [one], one.axes[0], order))
            continue
        figures.append(heatmap(own_key, one, order))
        if len(one.axes) > 2:
            figures.append(parallel_coordinates(f"{own_key}-all", one, order))
    return figures


def _curve(key: str, series: Sequence[Series], axis: str, order: AxisValues) -> Figure:
    """Draw the score over one field, one line per method and condition; without a field, draw one point for each."""
    comparison, lines = series[0].comparison, _lines(series, axis)
    values = list(order[axis]) if axis else [one.name for one in series]
    numeric = all_numeric(values)
    position = {format_value(value): value if numeric else escape_markup(format_value(value)) for value in values}
    data = list[dict[str, Any]]()
    for (name, points), style in zip(lines.items(), line_styles(lines).values(), strict=True):
        ordered = [point for value in values for point in points if point[0] == value]
        placed = [(position[format_value(x)], of, setting) for x, of, setting in ordered]
        data += _line_traces(name, placed, style, bool(axis))
        for y in [mean_score(of, setting) for x, of, setting in points if x is None]:  # horizontal: no such field
            ends = [position[format_value(value)] for value in (values[0], values[-1])]
            level = {"type": "scatter", "mode": "lines", "name": escape_markup(name), "line": dict(style)}
            data.append(level | {"x": ends, "y": [y, y]})
    layout = {
        "height": 430, "xaxis": _x_axis(comparison.names.get(axis, ""), values, numeric),
        "yaxis": {"zeroline": False}, "annotations": [axis_heading(comparison.criterion)], "margin": {"t": 34},
        "showlegend": len(lines) > 1,
    }  # fmt: skip
    comparisons = list({id(one.comparison): one.comparison for one in series}.values())
    title = f"Score over {comparison.names[axis]}" if axis else "Best settings of each method"
    title = title if axis or len({one.method for one in series}) > 1 else "Score"
    title += f" ({series[0].name})" if len(series) == 1 and series[0].name else ""
    title += " – error bars: ± one standard deviation over seeds" if comparison.seeds > 1 else ""
    return Figure(key, title, settings_summary(comparisons), data, layout, settings_table(comparisons))


def _lines(series: Sequence[Series], axis: str) -> dict[str, list[_Point]]:
    """Return the name of each line -> its points."""
    lines = dict[str, list[_Point]]()
    for one in series:
        over_condition = axis in one.comparison.conditions  # then there is one line per method through all conditions
        points = lines.setdefault("" if not axis else one.method if over_condition else one.name, [])
        for setting in one.settings:
            points.append((setting.values.get(axis) if axis else one.name, one.comparison, setting))
    return lines


def _line_traces(name: str, points: Sequence[_Point], line: Mapping[str, Any], joined: bool) -> list[dict[str, Any]]:
    best = [setting is comparison.best and len(comparison.settings) > 1 for _, comparison, setting in points]
    marker = {"size": [15 if star else 8 for star in best], "symbol": ["star" if star else "circle" for star in best]}
    scores = [(x, round_digits(of.fmt.factor * score)) for x, of, one in points for score in one.scores.values()]
    common = {"type": "scatter", "name": escape_markup(name), "legendgroup": escape_markup(name)}
    deviations = [seed_std(comparison, setting) for _, comparison, setting in points]
    means = {
        "mode": "lines+markers" if joined else "markers", "x": [x for x, *_ in points],
        "y": [mean_score(comparison, setting) for _, comparison, setting in points], "line": dict(line),
        "marker": marker | {"color": line["color"]}, "error_y": {"type": "data", "array": deviations, "thickness": 1.2},
        "hovertemplate": "%{x}: %{y:.4~g}<extra></extra>",
    }  # fmt: skip
    dots = {
        "mode": "markers", "x": [x for x, _ in scores], "y": [y for _, y in scores], "showlegend": False,
        "hoverinfo": "skip", "marker": {"color": line["color"], "size": 4, "opacity": 0.45},
    }  # fmt: skip
    return [common | means, common | dots]


def _x_axis(name: str, values: Sequence[Any], numeric: bool) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": escape_markup(name)}, "zeroline": False}
    if not numeric:
        texts = [escape_markup(format_value(value)) for value in values]
        return axis | {"type": "category", "categoryorder": "array", "categoryarray": texts}
    log = min(values) > 0 and max(values) / min(values) >= _LOG_AXIS_RATIO
    ticks = {"tickvals": list(values), "ticktext": [*map(format_value, values)]} if len(values) <= 12 else {}
    return axis | ticks | {"type": "log" if log else "linear"}
