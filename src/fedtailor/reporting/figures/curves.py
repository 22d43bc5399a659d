"""Learning curves: scores over rounds, bytes, or seconds, at both evaluation moments."""

from collections.abc import Sequence
from math import isfinite
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
from fedtailor.reporting.figures.drawing import axis_heading, end_labels, is_muted, method_styles
from fedtailor.reporting.figures.figure import Choice, Figure, Option, Table

_MAX_POINTS = 250  # per line
_MOMENTS = {"trained": "trained (before aggregation)", "received": "received (after aggregation)"}
_AXES = {"rounds": "round", "bytes": "megabytes transferred (up and down)", "seconds": "seconds of training"}


def mean_curve(group: Comparison, label: str, moment: str) -> tuple[list[int], list[float]]:
    """Return the positions of rounds and the scores in them, averaged over seeds.

    Only rounds that were evaluated with all seeds are included, since a mean over other seeds would not be comparable.
    If a seed diverged, the mean is not finite.
    """
    curves = [dict(zip(d.curves[moment].positions, d.curves[moment].scores, strict=True)) for d in group.methods[label]]
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    return common, [mean(curve[position] for curve in curves) for position in common]


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
    """Draw the scores of all methods; the reader chooses the horizontal axis and the moment."""
    styles, factor = method_styles(group), group.fmt.factor
    drawn = {
        moment: {label: _finite(*mean_curve(group, label, moment)) for label in group.methods} for moment in _MOMENTS
    }
    labels = [label for label in group.methods if any(drawn[moment][label] for moment in _MOMENTS)]
    labels.sort(key=lambda label: not is_muted(styles[label]))  # gray lines are drawn below the others
    if not labels or max(len(drawn[moment][label]) for moment in _MOMENTS for label in labels) < 2:
        return None
    # Both moments of a method share one list of rounds, so that each choice changes either x or y.
    positions = {
        label: sorted({p for moment in _MOMENTS for p in evenly_spaced([*drawn[moment][label]], _MAX_POINTS)})
        for label in labels
    }
    xs = {
        axis: [[round_digits(x) for x in mean_spent(group, label, axis, positions[label])] for label in labels]
        for axis in _AXES
    }
    ys = {
        moment: [
            [
                round_digits(factor * values[p]) if p in (values := drawn[moment][label]) else None
                for p in positions[label]
            ]
            for label in labels
        ]
        for moment in _MOMENTS
    }
    first = next(moment for moment in _MOMENTS if any(y is not None for row in ys[moment] for y in row))
    data = [
        {
            "type": "scatter", "mode": "lines", "name": label, "x": x, "y": y, "connectgaps": True,
            "line": styles[label] | {"width": 1 if is_muted(styles[label]) else 2.2}, "showlegend": False,
            "hovertemplate": f"{label}: %{{y:.4~g}}<extra></extra>",
        }
        for label, x, y in zip(labels, xs["rounds"], ys[first], strict=True)
    ]  # fmt: skip
    annotations = {moment: _annotations(group, labels, ys[moment], styles) for moment in ys}
    longest = max((len(label) for label in labels if not is_muted(styles[label])), default=0)
    layout: dict[str, Any] = {
        "height": 430, "xaxis": {"title": {"text": _AXES["rounds"]}, "zeroline": False},
        "yaxis": {"zeroline": False}, "annotations": annotations[first], "margin": {"r": 34 + 7 * longest, "t": 34},
    }  # fmt: skip
    few_rounds = max(p for values in positions.values() for p in values) < 10
    ticks = dict.fromkeys(_AXES) | {"rounds": 1 if few_rounds else None}  # no ticks between rounds
    layout["xaxis"] |= {"dtick": ticks["rounds"]} if few_rounds else {}
    axes = [
        Option(name, {"x": xs[name]}, {"xaxis.title.text": title, "xaxis.dtick": ticks[name]})
        for name, title in _AXES.items()
    ]
    ordered = [first, *(moment for moment in _MOMENTS if moment != first)]
    moments = [Option(_MOMENTS[m], {"y": ys[m]}, {"annotations": annotations[m]}) for m in ordered]
    choices = [Choice("horizontal axis", axes), Choice("model", moments)]
    title = f"{group.fmt.title} during training"
    return Figure("curves", title, curves_summary(group), data, layout, _curves_table(group), (), choices)


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
    moment = "trained" if mean_curve(group, label, "trained")[0] else "received"
    positions, scores = mean_curve(group, label, moment)
    if not positions:
        return f"{label} was not evaluated during training."
    total = max(len(run_summary.bytes) for run_summary in group.methods[label])
    if not isfinite(scores[-1]):
        return _divergence_sentence(group, label, _finite(positions, scores), total)
    final, tolerance = group.fmt.text(scores[-1]), 0.01 * abs(scores[-1])
    note = _partial_evaluation_clause(group, label) if moment == "trained" else ""
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
    return "; its last score covers the clients evaluated at the end, earlier scores the clients evaluated up to then"


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
