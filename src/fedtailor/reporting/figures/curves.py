"""Learning curves: scores over rounds, bytes, or seconds, at both evaluation moments."""

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from statistics import mean
from typing import Any

from fedtailor.analysis.formatting import (
    evenly_spaced,
    format_bytes,
    format_duration,
    method_in_text,
    round_digits,
)
from fedtailor.analysis.run_summary import Comparison
from fedtailor.reporting.figures.drawing import MAX_TICKED_ROUNDS, axis_heading, end_labels, is_muted, method_styles
from fedtailor.reporting.figures.figure import Choice, Figure, Option, Table, line_styles

_MAX_POINTS = 250  # per line
_MIN_LINE = 3  # points; shorter lines are drawn with markers
_MOMENTS = {"trained": "trained (before aggregation)", "received": "received (after aggregation)"}
_MOMENT_OF = {"ranked": None, "trained": "trained", "received": "received"}  # of the views; None: as ranked
_AXES = {"rounds": "round", "bytes": "megabytes transferred (up and down)", "seconds": "seconds of training"}


def mean_curve(group: Comparison, label: str, moment: str | None = None) -> tuple[list[int], list[float]]:
    """Return the positions of rounds and the scores in them, averaged over seeds, by default at the moment that ranks
    the method.

    Only rounds that were evaluated with all seeds are included, since a mean over other seeds would not be comparable.
    If a seed diverged, the mean is not finite.
    """
    curves = seed_curves(group, label, moment)
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    return common, [mean(curve[position] for curve in curves) for position in common]


def seed_curves(group: Comparison, label: str, moment: str | None = None) -> list[dict[int, float]]:
    """Return position of the round -> score, for each seed."""
    curves = [summary.curves[moment or summary.ranked_by] for summary in group.methods[label]]
    return [dict(zip(curve.positions, curve.scores, strict=True)) for curve in curves]


def mean_spent(group: Comparison, label: str, axis: str, positions: Sequence[int]) -> list[float]:
    """Return the rounds, megabytes, or seconds spent up to each of these rounds, averaged over seeds."""
    if axis == "rounds":
        return [position + 1.0 for position in positions]
    run_summaries, factor = group.methods[label], 1e-6 if axis == "bytes" else 1.0
    return [
        factor * mean((d.bytes if axis == "bytes" else d.seconds)[position] for d in run_summaries)
        for position in positions
    ]


def curves(group: Comparison) -> Figure | None:
    """Draw the scores of all methods, with bands from the lowest to the highest seed; the reader chooses the horizontal
    axis and the moment."""
    styles, factor, views = method_styles(group), group.fmt.factor, _views(group)
    drawn = {
        view: {label: _finite(*mean_curve(group, label, _MOMENT_OF[view])) for label in group.methods} for view in views
    }
    labels = [label for label in group.methods if any(drawn[view][label] for view in views)]
    labels.sort(key=lambda label: not is_muted(styles[label]))  # gray lines are drawn below the others
    if not labels or max(len(drawn[view][label]) for view in views for label in labels) < 2:
        return None
    # All views of a method share one list of rounds, so that each choice changes either x or y.
    positions = {
        label: sorted({p for view in views for p in evenly_spaced([*drawn[view][label]], _MAX_POINTS)})
        for label in labels
    }
    banded = [label for label in labels if len(group.methods[label]) > 1 and not is_muted(styles[label])]
    xs = {axis: _horizontal(group, labels, banded, positions, axis) for axis in _AXES}
    lines = {
        view: [[_scaled(drawn[view][label].get(p), factor) for p in positions[label]] for label in labels]
        for view in views
    }
    bands = {view: [_band(group, label, _MOMENT_OF[view], positions[label]) for label in banded] for view in views}
    ys = {view: [*bands[view], *lines[view]] for view in views}
    first = next(iter(views))
    traces = [_band_style(label, styles[label]["color"]) for label in banded]
    traces += [
        {
            "type": "scatter", "mode": "lines", "name": label, "connectgaps": True, "showlegend": False,
            "line": styles[label] | {"width": 1 if is_muted(styles[label]) else 2.2},
            "hovertemplate": f"{label}: %{{y:.4~g}}<extra></extra>",
        }
        for label in labels
    ]  # fmt: skip
    data = [trace | {"x": x, "y": y} for trace, x, y in zip(traces, xs["rounds"], ys[first], strict=True)]
    annotations = {view: _annotations(group, labels, lines[view], styles) for view in views}
    longest = max((len(label) for label in labels if not is_muted(styles[label])), default=0)
    layout: dict[str, Any] = {
        "height": 430, "xaxis": {"title": {"text": _AXES["rounds"]}, "zeroline": False},
        "yaxis": {"zeroline": False}, "annotations": annotations[first], "margin": {"r": 34 + 7 * longest, "t": 34},
    }  # fmt: skip
    ticks, axes = _axis_choice(max(p for values in positions.values() for p in values), xs)
    layout["xaxis"] |= ticks
    moments = [Option(views[view], {"y": ys[view]}, {"annotations": annotations[view]}) for view in views]
    choices = [axes, Choice("model", moments)]
    title = f"{group.fmt.title} during training"
    summary = curves_summary(group) + (f" Bands span the {group.unit}s." if banded else "")
    return Figure("curves", title, summary, data, layout, _curves_table(group), (), choices)


def moment_curves(group: Comparison) -> Figure | None:
    """Draw the scores of the best method at both moments; the reader chooses the horizontal axis."""
    label, factor = next(iter(group.methods)), group.fmt.factor
    drawn = {moment: _finite(*mean_curve(group, label, moment)) for moment in _MOMENTS}
    shown = {moment: evenly_spaced([*curve], _MAX_POINTS) for moment, curve in drawn.items() if curve}
    if not shown:
        return None
    styles = line_styles(shown)
    if "received" in styles:
        styles["received"]["dash"] = "dash"  # both lines are visible where they are equal
    lines = [[_scaled(drawn[moment][p], factor) for p in positions] for moment, positions in shown.items()]
    xs = {
        axis: [[round_digits(x) for x in mean_spent(group, label, axis, positions)] for positions in shown.values()]
        for axis in _AXES
    }
    data = [
        {
            "type": "scatter", "mode": "lines+markers" if len(y) < _MIN_LINE else "lines", "name": moment, "x": x,
            "y": y, "line": styles[moment] | {"width": 2.2}, "showlegend": False,
            "hovertemplate": f"{moment}: %{{y:.4~g}}<extra></extra>",
        }
        for moment, x, y in zip(shown, xs["rounds"], lines, strict=True)
    ]  # fmt: skip
    ticks, axes = _axis_choice(max(p for positions in shown.values() for p in positions), xs)
    layout = {
        "height": 430, "xaxis": {"title": {"text": _AXES["rounds"]}, "zeroline": False} | ticks,
        "yaxis": {"zeroline": False}, "annotations": _annotations(group, list(shown), lines, styles),
        "margin": {"r": 34 + 7 * len("received"), "t": 34},
    }  # fmt: skip
    title = f"{group.fmt.title} of {method_in_text(label)} during training"
    return Figure("curves", title, curves_summary(group), data, layout, _curves_table(group), (), [axes])


def _axis_choice(last: int, xs: Mapping[str, Sequence[Sequence[float | None]]]) -> tuple[dict[str, Any], Choice]:
    """Return the ticks of the horizontal axis, and its options; `last` is the position of the last round."""
    ticks = dict.fromkeys(_AXES) | {"rounds": 1 if last < MAX_TICKED_ROUNDS else None}  # no ticks between rounds
    options = [
        Option(name, {"x": xs[name]}, {"xaxis.title.text": title, "xaxis.dtick": ticks[name]})
        for name, title in _AXES.items()
    ]
    return {"dtick": 1} if ticks["rounds"] else {}, Choice("horizontal axis", options)


def _views(group: Comparison) -> dict[str, str]:
    """Return the views of the curves with their names; the first one shows the scores that rank the methods."""
    used = {group.ranked_by(label) for label in group.methods}
    if len(used) > 1:
        return {"ranked": "as ranked", **_MOMENTS}
    first = used.pop()
    return {first: _MOMENTS[first]} | _MOMENTS


def _horizontal(
    group: Comparison, labels: Sequence[str], banded: Sequence[str], positions: Mapping[str, Sequence[int]], axis: str
) -> list[list[float | None]]:
    """Return the horizontal coordinates of all traces: first the bands, which run forward and back, then the lines."""
    spent = {label: [round_digits(x) for x in mean_spent(group, label, axis, positions[label])] for label in labels}
    return [[*spent[label], *reversed(spent[label])] for label in banded] + [spent[label] for label in labels]


def _band(group: Comparison, label: str, moment: str | None, positions: Sequence[int]) -> list[float | None]:
    """Return the highest seed in each round, and back again the lowest one."""
    curves = seed_curves(group, label, moment)
    values = [[curve[p] for curve in curves] if all(p in curve for curve in curves) else [nan] for p in positions]
    high, low = ([_scaled(choose(seeds), group.fmt.factor) for seeds in values] for choose in (max, min))
    return [*high, *reversed(low)]


def _band_style(label: str, color: str) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines", "name": f"{label}, all seeds", "fill": "toself", "line": {"width": 0},
        "fillcolor": f"{color}26", "showlegend": False, "hoverinfo": "skip",
    }  # fmt: skip


def _scaled(score: float | None, factor: float) -> float | None:
    return None if score is None or not isfinite(score) else round_digits(factor * score)


def _finite(positions: list[int], scores: list[float]) -> dict[int, float]:
    return {position: score for position, score in zip(positions, scores, strict=True) if isfinite(score)}


def _annotations(
    group: Comparison, labels: Sequence[str], rows: Sequence[Sequence[float | None]], styles: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the heading of the vertical axis and the labels at the ends of lines."""
    ends = {}
    for label, row in zip(labels, rows, strict=True):
        known = [y for y in row if y is not None]
        if known and not is_muted(styles[label]):
            ends[label] = known[-1]
    values = [y for row in rows for y in row if y is not None] or [0.0]
    colors = {label: styles[label]["color"] for label in labels}
    return [axis_heading(group.fmt.heading), *end_labels(ends, colors, max(values) - min(values))]


def curves_summary(group: Comparison) -> str:
    """Return when the best method came within 1 % of its final score for good, and the cost up to then."""
    label = next(iter(group.methods))
    name = method_in_text(label)
    moment = group.ranked_by(label)
    positions, scores = mean_curve(group, label)
    if not positions:
        return f"{label} was not evaluated during training."
    total = max(len(run_summary.bytes) for run_summary in group.methods[label])
    if not isfinite(scores[-1]):
        return _divergence_sentence(group, label, _finite(positions, scores), total)
    final, tolerance = group.fmt.text(scores[-1]), 0.01 * abs(scores[-1])
    note = _partial_evaluation_clause(group, label)
    if len({len(run_summary.bytes) for run_summary in group.methods[label]}) > 1:
        note += "; the curve ends where the first seed stopped"
    settled = next(i for i in range(len(scores)) if all(abs(s - scores[-1]) <= tolerance for s in scores[i:]))
    if settled == len(scores) - 1 and settled:
        return (
            f"The score of {name} was still changing when training ended: from {group.fmt.text(scores[-2])} in round "
            f"{positions[-2] + 1} to {final} in round {positions[-1] + 1} of {total} ({moment}){note}."
        )
    sent = mean_spent(group, label, "bytes", [positions[settled]])[0] * 1e6
    time = mean_spent(group, label, "seconds", [positions[settled]])[0]
    return (
        f"From round {positions[settled] + 1} of {total} on, {name} stays within 1 % of its final score ({final}, "
        f"{moment}); up to then, it transferred {format_bytes(sent)} and trained for {format_duration(time)}{note}."
    )


def _partial_evaluation_clause(group: Comparison, label: str) -> str:
    """Return a clause if the last point may cover other clients than earlier points."""
    complete = all(
        known == tested for known, tested in (run_summary.num_scored for run_summary in group.methods[label])
    )
    if complete or group.first.experiment.get("evaluate", "all") == "all":
        return ""
    return "; each score covers the clients evaluated in that round"


def _divergence_sentence(group: Comparison, label: str, known: dict[int, float], total: int) -> str:
    several = len(group.methods[label]) > 1
    diverged = f"{label} diverged" + (" with at least one seed" if several else "")
    if not known:
        return f"{diverged}: its score is not finite in any round."
    last = max(known)
    score = group.fmt.text(known[last])
    return f"{diverged} after round {last + 1} of {total}, where it scored {score}; try a smaller lr."


def _curves_table(group: Comparison) -> Table:
    """Return the scores of all methods after up to ten rounds."""
    rows = []
    for label in group.methods:
        by_moment = {m: dict(zip(*mean_curve(group, label, m), strict=True)) for m in _MOMENTS}
        known = sorted({position for values in by_moment.values() for position in values})
        for position in evenly_spaced(known, 10):
            megabytes, seconds = (mean_spent(group, label, axis, [position])[0] for axis in ("bytes", "seconds"))
            scores = [group.fmt.plain(by_moment[moment].get(position)) for moment in _MOMENTS]
            rows.append([label, position + 1, f"{megabytes:.2f}", f"{seconds:.2f}", *scores])
    columns = ["method", "round", "MB", "seconds", *(f"{group.fmt.heading} ({moment})" for moment in _MOMENTS)]
    return Table(columns, rows)
