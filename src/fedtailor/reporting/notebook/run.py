"""A run as HTML: its table, as in the terminal, and its learning curve."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite

from rich.table import Table

from fedtailor.analysis.formatting import ScoreFormat, evenly_spaced
from fedtailor.analysis.run_summary import Curve, summarize_run
from fedtailor.analysis.tables import run_table
from fedtailor.reporting.notebook.markup import block, html_table, svg, svg_text
from fedtailor.runs.run import Run

_LINES = {  # color and dashes, so that colors are not needed to tell lines apart
    "trained": 'stroke="#0072b2"',
    "received": 'stroke="#d55e00" stroke-dasharray="5 3"',
}
_WIDTH, _HEIGHT = 460, 190  # pixels, with these margins:
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 70, 12, 30
_LINE_HEIGHT = 13
_MAX_POINTS = 300  # per curve

Points = Sequence[tuple[int, float]]  # round and score


def run_html(run: Run) -> str:
    """Return the table of a run and its score over rounds."""
    run = replace(run, records=[run.records[index] for index in range(len(run.records))])  # discarded after use
    table = run_table(run)
    return block(str(table.title), rich_table_html(table), _learning_curve(run), note=str(table.caption or ""))


def rich_table_html(table: Table) -> str:
    """Return the header and the cells of a table for the terminal as HTML."""
    headers = [str(column.header) for column in table.columns]
    left = sum(column.justify == "left" for column in table.columns)
    return html_table(headers, [*zip(*(column.cells for column in table.columns), strict=True)], left)


def _learning_curve(run: Run) -> str:
    """Draw the score over all test samples after each evaluated round, at both moments."""
    form = ScoreFormat(run.info["score"])
    found = {moment: _points(curve) for moment, curve in summarize_run(run, run.method_title).curves.items()}
    curves = {moment: points for moment, points in found.items() if points}
    if not curves:
        return ""
    scores = [score for points in curves.values() for _, score in points]
    low, high, last = min(scores), max(scores), max(len(run.records), 2)
    span = high - low or 1.0
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def place(point: tuple[int, float]) -> tuple[float, float]:
        across, up = (point[0] - 1) / (last - 1), (point[1] - low) / span
        return _LEFT + across * (right - _LEFT), bottom - 8 - up * (bottom - 8 - _TOP)

    heights = _spread_apart({moment: place(points[-1])[1] for moment, points in curves.items()})
    axes = f"M{_LEFT},{_TOP} V{bottom} H{right}"
    parts = [f'<path d="{axes}" fill="none" stroke="currentColor" stroke-opacity="0.4"/>']
    parts += [svg_text(_LEFT - 5, place((1, score))[1] + 4, form.plain(score), "end") for score in {low, high}]
    parts += [svg_text(_LEFT, bottom + 14, 1, "middle"), svg_text(right, bottom + 14, last, "middle")]
    parts += [svg_text((_LEFT + right) / 2, bottom + 24, f"round; {form.heading}", "middle")]
    for moment, points in curves.items():
        parts += [_line(moment, [place(point) for point in points]), svg_text(right + 6, heights[moment] + 4, moment)]
    return svg(_WIDTH, _HEIGHT, f"{form.title} over rounds", *parts)


def _line(moment: str, places: Sequence[tuple[float, float]]) -> str:
    """Draw a line with a dot at its end, which is all that a single round has."""
    path, (x, y) = " ".join(f"{x:.1f},{y:.1f}" for x, y in places), places[-1]
    dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" {_LINES[moment]}/>'
    return f'<polyline points="{path}" fill="none" stroke-width="1.8" {_LINES[moment]}/>{dot}'


def _spread_apart(heights: Mapping[str, float]) -> dict[str, float]:
    """Return the heights of labels, moved down where they would overlap the label above."""
    placed: dict[str, float] = {}
    for name, height in sorted(heights.items(), key=lambda item: item[1]):
        placed[name] = max([height, *(other + _LINE_HEIGHT for other in placed.values())])
    return placed


def _points(curve: Curve) -> Points:
    """Return rounds and scores, without those of models that diverged."""
    pairs = zip(curve.positions, curve.scores, strict=True)
    return evenly_spaced([(position + 1, score) for position, score in pairs if isfinite(score)], _MAX_POINTS)
