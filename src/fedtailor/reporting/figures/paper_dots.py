"""Dot plots of a paper's table: its values and ours, one panel per column."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedtailor.analysis.formatting import round_digits
from fedtailor.papers.overview import OURS_MARK, cell_rows, row_label
from fedtailor.papers.running import CellResult
from fedtailor.reporting.figures.drawing import MUTED_COLOR, rows_axis
from fedtailor.reporting.figures.figure import COLORS, Figure, Table, limit_rows

_ROW, _TITLE, _TICKS = 19, 26, 30  # pixels: a row, and the space above and below a panel
_ACROSS, _GAP = 2, 0.04  # panels in a line, and the space between them
_MARKERS: Mapping[str, Mapping[str, Any]] = {
    "paper": {"symbol": "circle-open", "color": COLORS[1]},
    "ours": {"symbol": "circle", "color": COLORS[0]},
    "not run": {"symbol": "x-thin-open", "color": MUTED_COLOR},
}
_LEGEND = (
    "rings: the paper; filled dots: our mean; bars: standard deviations; crosses at the left edge: not run;"
    f"{OURS_MARK}: not in the paper"
)


def paper_dots(comparisons: Sequence[CellResult]) -> Figure | None:
    """Draw the cells of one table; columns that cannot be run are left out. None if there is nothing to draw."""
    able = {one.cell.column.key for one in comparisons if not one.cell.missing}
    panels = {key: [one for one in comparisons if one.cell.column.key == key] for key in dict.fromkeys(
        one.cell.column.key for one in comparisons if one.cell.column.key in able)}  # fmt: skip
    if all(one.mean is None and one.cell.printed is None for cells in panels.values() for one in cells):
        return None
    labels = list(dict.fromkeys(row_label(one.cell) for cells in panels.values() for one in cells))
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"showlegend": False, "annotations": [], "margin": {"t": _TITLE, "b": _TICKS}}
    for number, (key, cells) in enumerate(panels.items()):
        low, high = _axis_range(cells)
        name = _axis_number(number)
        layout[f"xaxis{name}"] = {"anchor": f"y{name}", "zeroline": False, "range": [low, high], "nticks": 6}
        layout[f"yaxis{name}"] = rows_axis(labels) | {"anchor": f"x{name}"}
        layout["annotations"].append(_panel_title(number, key))
        data += [trace | {"xaxis": f"x{name}", "yaxis": f"y{name}"} for trace in _traces(cells, low)]
    for path, value in _arrangement(len(panels), min(_ACROSS, len(panels)), labels).items():
        axis, _, entry = path.partition(".")
        layout |= {axis: layout[axis] | {entry: value}} if entry else {axis: value}
    layout["meta"] = {"narrow": _arrangement(len(panels), 1, labels)}  # for phones
    table, paper = comparisons[0].cell.table, comparisons[0].cell.paper
    layout["legend"] = {"y": 1 + _TITLE / (layout["height"] - _TITLE - _TICKS)}  # of images: above the panels' titles
    title = f"{paper.name}, {table.id}: {table.metric.partition(';')[0]}"
    return Figure(table.id, title, _summary(comparisons), data, layout, _value_table(comparisons), legend=_MARKERS)


def _traces(cells: Sequence[CellResult], edge: float) -> list[dict[str, Any]]:
    """Return the marks of one panel: a line between the two values, the paper's, ours, and missing cells."""
    printed = {row_label(one.cell): (one.cell.printed, one.cell.printed_std) for one in cells}
    ours = {row_label(one.cell): (one.mean, one.std) for one in cells}
    pairs = [
        (label, printed[label][0], ours[label][0]) for label in ours if None not in (printed[label][0], ours[label][0])
    ]
    lines = {
        "type": "scatter", "mode": "lines", "hoverinfo": "skip", "line": {"color": MUTED_COLOR, "width": 1},
        "x": [x for _, paper, own in pairs for x in (round_digits(paper), round_digits(own), None)],
        "y": [y for label, *_ in pairs for y in (label, label, None)],
    }  # fmt: skip
    missing = [label for label, (value, _) in ours.items() if value is None]
    gaps = {
        "type": "scatter", "mode": "markers", "name": "not run", "x": [edge] * len(missing), "y": missing,
        "marker": {**_MARKERS["not run"], "size": 6, "line": {"width": 1.4}}, "cliponaxis": False,
        "hovertemplate": "%{y}: not run<extra></extra>",
    }  # fmt: skip
    return [lines, _dots("paper", printed, 11, 1.8), _dots("ours", ours, 7, 0), gaps]


def _dots(
    name: str, values: Mapping[str, tuple[float | None, float | None]], size: int, width: float
) -> dict[str, Any]:
    known = {label: (value, std) for label, (value, std) in values.items() if value is not None}
    marker = {**_MARKERS[name], "size": size, "line": {"width": width}}
    bars = {
        "type": "data",
        "array": [round_digits(std) for _, std in known.values()],
        "thickness": 1.4,
        "width": 0,
    }
    return {
        "type": "scatter", "mode": "markers", "name": name, "y": list(known), "marker": marker,
        "x": [round_digits(value) for value, _ in known.values()], "error_x": bars | {"color": marker["color"]},
        "hovertemplate": f"%{{y}}, {name}: %{{x:.5~g}}<extra></extra>",
    }  # fmt: skip


def _axes(number: int, count: int, across: int, labels: Sequence[str]) -> dict[str, Any]:
    """Return where a panel stands, as changes to the layout by dotted names; panels in one line share their labels."""
    line, position = divmod(number, across)
    own, step = _ROW * len(labels), _panel_height(labels)
    total = step * _lines(count, across) - _TICKS - _TITLE
    bottom, width = total - line * step - own, (1 - _GAP * (across - 1)) / across
    left, name = position * (width + _GAP), _axis_number(number)
    return {
        f"xaxis{name}.domain": [round(left, 4), round(min(left + width, 1), 4)],
        f"yaxis{name}.domain": [round(max(bottom, 0) / total, 4), round(min((bottom + own) / total, 1), 4)],
        f"yaxis{name}.showticklabels": position == 0,
    }


def _arrangement(count: int, across: int, labels: Sequence[str]) -> dict[str, Any]:
    """Return the changes to the layout that arrange all panels in lines."""
    panels = [_axes(number, count, across, labels) for number in range(count)]
    return {"height": _lines(count, across) * _panel_height(labels)} | {k: v for one in panels for k, v in one.items()}


def _lines(count: int, across: int) -> int:
    return -(-count // across)


def _panel_height(labels: Sequence[str]) -> int:
    return _ROW * len(labels) + _TICKS + _TITLE


def _panel_title(number: int, key: str) -> dict[str, Any]:
    name = _axis_number(number)
    return {
        "text": f"<b>{key}</b>", "xref": f"x{name} domain", "yref": f"y{name} domain", "x": 0, "y": 1,
        "xanchor": "left", "yanchor": "bottom", "showarrow": False, "yshift": 2,
    }  # fmt: skip


def _axis_number(number: int) -> str:
    return str(number + 1) if number else ""


def _axis_range(cells: Sequence[CellResult]) -> tuple[float, float]:
    """Return the range of all values and bars of a panel, with a margin."""
    pairs = [(one.cell.printed, one.cell.printed_std) for one in cells] + [(one.mean, one.std) for one in cells]
    ends = [x for value, std in pairs if value is not None for x in (value - (std or 0), value + (std or 0))] or [
        0.0,
        1.0,
    ]
    margin = 0.06 * (max(ends) - min(ends)) or 0.05 * abs(max(ends)) or 1.0
    return round(min(ends) - margin, 5), round(max(ends) + margin, 5)


def _summary(comparisons: Sequence[CellResult]) -> str:
    digits = comparisons[0].cell.report.digits
    known = [one for one in comparisons if one.difference is not None]
    if not known:
        count = sum(bool(one.scores) for one in comparisons)
        return f"{count} of {len(comparisons)} cells have been run, and none that has a printed value ({_LEGEND})."
    largest = max(known, key=lambda one: abs(one.difference or 0))
    where = f"{largest.cell.row.label}, {largest.cell.column.key}"
    return (
        f"Our mean differs from the paper's value by {largest.difference:+.{digits}f} at most ({where}), over "
        f"{len(known)} values that both have ({_LEGEND})."
    )


def _value_table(comparisons: Sequence[CellResult]) -> Table:
    """Return all values of the table, one cell per row."""
    digits = comparisons[0].cell.report.digits
    shown = {None: "–", True: "yes", False: "no"}
    rows = [
        [
            one["row"], one["column"], _text(one["paper"], digits), _text(one["paper_std"], digits),
            _text(one["ours"], digits), _text(one["ours_std"], digits), one["seeds"],
            "–" if one["difference"] is None else f"{one['difference']:+.{digits}f}", shown[one["within_spread"]],
            one["why_not_run"],
        ]
        for one in cell_rows(comparisons)
    ]  # fmt: skip
    columns = ["row", "column", "paper", "paper's deviation", "ours", "our deviation", "seeds", "difference",
               "within the spread", "why not run"]  # fmt: skip
    return Table(columns, limit_rows(rows))


def _text(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
