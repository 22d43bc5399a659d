"""How scores grow over rounds, bytes and seconds, at both moments."""

from collections.abc import Sequence
from math import isfinite
from statistics import mean
from typing import Any

from fedtailor.see.digest import Group
from fedtailor.see.drawing import capital, duration, end_labels, evenly, heading, is_muted, lines, said, short, size
from fedtailor.see.figure import Choice, Figure, Option, Table

_MOST_POINTS = 250  # of a line
_MOMENTS = {"trained": "trained, before averaging", "received": "received, after averaging"}
_AXES = {"rounds": "round", "bytes": "megabytes up and down", "seconds": "seconds of training"}


def mean_curve(group: Group, label: str, moment: str) -> tuple[list[int], list[float]]:
    """Rounds' positions and the score in them, the mean of all seeds that were evaluated there.

    Rounds that some seed did not evaluate are left out: a mean over other seeds would be another quantity. Where a
    seed diverged, the mean is no number.
    """
    found = [dict(zip(d.curves[moment].positions, d.curves[moment].scores, strict=True)) for d in group.methods[label]]
    common = sorted(set.intersection(*(set(curve) for curve in found)))
    return common, [mean(curve[position] for curve in found) for position in common]


def spent(group: Group, label: str, axis: str, positions: Sequence[int]) -> list[float]:
    """What was spent after these rounds, the mean over seeds: rounds, megabytes or seconds."""
    if axis == "rounds":
        return [position + 1.0 for position in positions]
    some, factor = group.methods[label], 1e-6 if axis == "bytes" else 1.0
    return [
        factor * mean((d.bytes if axis == "bytes" else d.seconds)[position] for d in some) for position in positions
    ]


def curves(group: Group) -> Figure | None:
    """All methods' scores; the reader chooses what they are drawn over, and at which moment."""
    style, factor = lines(group), group.scale.factor
    drawn = {
        moment: {label: _finite(*mean_curve(group, label, moment)) for label in group.methods} for moment in _MOMENTS
    }
    labels = [label for label in group.methods if any(drawn[moment][label] for moment in _MOMENTS)]
    labels.sort(key=lambda label: not is_muted(style[label]))  # what is grey lies below
    if not labels or max(len(drawn[moment][label]) for moment in _MOMENTS for label in labels) < 2:
        return None
    # both moments of a method share one list of rounds, so that each choice changes one thing
    places = {
        label: sorted({place for moment in _MOMENTS for place in evenly([*drawn[moment][label]], _MOST_POINTS)})
        for label in labels
    }
    xs = {a: [[short(x) for x in spent(group, label, a, places[label])] for label in labels] for a in _AXES}
    ys = {}
    for moment in _MOMENTS:
        known = [drawn[moment][label] for label in labels]
        ys[moment] = [
            [short(factor * values[p]) if p in values else None for p in places[label]]
            for label, values in zip(labels, known, strict=True)
        ]
    first = next(moment for moment in _MOMENTS if any(y is not None for row in ys[moment] for y in row))
    data = [
        {
            "type": "scatter", "mode": "lines", "name": label, "x": x, "y": y, "connectgaps": True,
            "line": style[label] | {"width": 1 if is_muted(style[label]) else 2.2}, "showlegend": False,
            "hovertemplate": f"{label}: %{{y:.4~g}}<extra></extra>",
        }
        for label, x, y in zip(labels, xs["rounds"], ys[first], strict=True)
    ]  # fmt: skip
    notes = {moment: _notes(group, labels, ys[moment], style) for moment in ys}
    layout: dict[str, Any] = {
        "height": 430, "xaxis": {"title": {"text": _AXES["rounds"]}, "zeroline": False},
        "yaxis": {"zeroline": False}, "annotations": notes[first],
        "margin": {"r": 34 + 7 * max((len(name) for name in labels if not is_muted(style[name])), default=0), "t": 34},
    }  # fmt: skip
    few = max(place for some in places.values() for place in some) < 10
    ticks = dict.fromkeys(_AXES) | {"rounds": 1 if few else None}  # there is no round 1.5
    layout["xaxis"] |= {"dtick": ticks["rounds"]} if few else {}
    over = [
        Option(name, {"x": xs[name]}, {"xaxis.title.text": title, "xaxis.dtick": ticks[name]})
        for name, title in _AXES.items()
    ]
    ordered = [first, *(moment for moment in _MOMENTS if moment != first)]
    moments = [Option(_MOMENTS[m], {"y": ys[m]}, {"annotations": notes[m]}) for m in ordered]
    choices = [Choice("over", over), Choice("the model as", moments)]
    return Figure("curves", f"How {group.scale.name} develops", _says(group), data, layout, _table(group), (), choices)


def _finite(positions: list[int], scores: list[float]) -> dict[int, float]:
    return {position: score for position, score in zip(positions, scores, strict=True) if isfinite(score)}


def _notes(
    group: Group, labels: Sequence[str], rows: Sequence[Sequence[float | None]], style: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """What the axis shows, and names beside the ends of lines."""
    ends = {}
    for label, row in zip(labels, rows, strict=True):
        known = [y for y in row if y is not None]
        if known and not is_muted(style[label]):
            ends[label] = known[-1]
    values = [y for row in rows for y in row if y is not None] or [0.0]
    colours = {label: style[label]["color"] for label in labels}
    return [heading(group.scale.heading), *end_labels(ends, colours, max(values) - min(values))]


def _says(group: Group) -> str:
    """When the best came within a hundredth of where it ended, and what that had cost."""
    label = next(iter(group.methods))
    moment = "trained" if mean_curve(group, label, "trained")[0] else "received"
    positions, scores = mean_curve(group, label, moment)
    if not positions:
        return f"{capital(said(label))} was not evaluated on the way."
    total = max(len(digest.bytes) for digest in group.methods[label])
    if not isfinite(scores[-1]):
        return _diverged(group, label, _finite(positions, scores), total)
    last_of = _of_some(group, label) if moment == "trained" else ""
    close = next(i for i, score in enumerate(scores) if abs(score - scores[-1]) <= 0.01 * abs(scores[-1]))
    steady = next(
        i for i in range(close, len(scores)) if all(abs(s - scores[-1]) <= 0.01 * abs(scores[-1]) for s in scores[i:])
    )
    if steady == len(scores) - 1 and steady:
        before = group.scale.text(scores[-2])
        return (
            f"{capital(said(label))} has not settled: it ends with {group.scale.text(scores[-1])} ({moment}), and had "
            f"{before} when it was evaluated before, in round {positions[-2] + 1} of {total}{last_of}."
        )
    crossed = spent(group, label, "bytes", [positions[steady]])[0] * 1e6
    took = spent(group, label, "seconds", [positions[steady]])[0]
    return (
        f"From round {positions[steady] + 1} of {total} on {said(label)} stays within a hundredth of where it ends "
        f"({group.scale.text(scores[-1])}, {moment}); by then {size(crossed)} had crossed and {duration(took)} of "
        f"training had passed{last_of}."
    )


def _of_some(group: Group, label: str) -> str:
    """A clause where the last point may be over other clients than those before it, and so may jump."""
    whole = all(known == tested for known, tested in (digest.judged for digest in group.methods[label]))
    if whole or group.first.experiment.get("evaluate", "all") == "all":
        return ""
    return "; its last score is over the clients that were evaluated then, those before over whoever was until then"


def _diverged(group: Group, label: str, known: dict[int, float], total: int) -> str:
    """A run that was lost: until when it was one."""
    who = f"{capital(said(label))} diverged" + (" with a seed" if len(group.methods[label]) > 1 else "")
    if not known:
        return f"{who}: in no round is its score a number."
    last = max(known)
    return f"{who} after round {last + 1} of {total}, where it had {group.scale.text(known[last])}; try a smaller lr."


def _table(group: Group) -> Table:
    """Every method after some of its rounds."""
    rows = []
    for label in group.methods:
        by_moment = {m: dict(zip(*mean_curve(group, label, m), strict=True)) for m in _MOMENTS}
        known = sorted({position for values in by_moment.values() for position in values})
        for position in evenly(known, 10):
            mega, seconds = (spent(group, label, axis, [position])[0] for axis in ("bytes", "seconds"))
            shown = [group.scale.plain(by_moment[moment].get(position)) for moment in _MOMENTS]
            rows.append([label, position + 1, f"{mega:.2f}", f"{seconds:.2f}", *shown])
    heads = ["method", "round", "MB", "s", *(f"{moment}, {group.scale.heading}" for moment in _MOMENTS)]
    return Table(heads, rows)
