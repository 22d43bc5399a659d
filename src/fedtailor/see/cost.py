"""What methods cost: bytes that cross, seconds of training."""

from collections.abc import Mapping
from math import log10
from statistics import mean
from typing import Any

from fedtailor.see.curves import mean_curve, spent
from fedtailor.see.digest import Group
from fedtailor.see.drawing import (
    apart,
    capital,
    dotted,
    duration,
    heading,
    is_muted,
    lines,
    powers_axis,
    rows_axis,
    rows_height,
    said,
    short,
    size,
)
from fedtailor.see.figure import Figure, Table

_UP, _DOWN = "#0072b2", "#56b4e9"


def totals(group: Group, label: str) -> dict[str, float]:
    """Of a whole run, the mean over seeds: bytes up and down, seconds."""
    some = group.methods[label]
    last, up = mean(digest.bytes[-1] if digest.bytes else 0 for digest in some), mean(digest.up for digest in some)
    seconds = mean(digest.seconds[-1] if digest.seconds else 0.0 for digest in some)
    return {"up": up, "down": last - up, "bytes": last, "seconds": seconds}


def as_good_as_alone(group: Group, label: str) -> float | None:
    """How many bytes had crossed when a method first was as good as training alone ended; None if it never was."""
    aim = None if group.alone is None else group.score(group.alone)
    positions, scores = mean_curve(group, label, "trained")
    if aim is None or label == group.alone:
        return None
    reached = next((p for p, s in zip(positions, scores, strict=True) if group.sign * (s - aim) >= 0), None)
    return None if reached is None else 1e6 * spent(group, label, "bytes", [reached])[0]


def what_it_cost(group: Group) -> list[str]:
    """The answer in words."""
    found = {label: totals(group, label) for label in group.methods}
    best = next(iter(found))
    answer = [_of_best(best, found[best], max(1, mean(digest.asked for digest in group.methods[best])))]
    senders = [label for label in found if found[label]["bytes"] > 0]
    if len(senders) > 1:
        low, high = (choose(senders, key=lambda label: found[label]["bytes"]) for choose in (min, max))
        least, most = (size(found[label]["bytes"]) for label in (low, high))
        answer.append(
            f"All methods that send anything send {least} in all."
            if least == most
            else f"Of the methods that send anything, {low} sends least ({least} in all) and {high} most ({most})."
        )
    if len(found) > 1:
        low, high = (choose(found, key=lambda label: found[label]["seconds"]) for choose in (min, max))
        least, most = (duration(found[label]["seconds"]) for label in (low, high))
        if least != most:
            answer.append(f"{capital(said(low))} trains fastest ({least}), {said(high)} takes longest ({most}).")
    ways = {(digest.run.info["engine"], digest.run.info["device"]) for digest in group.digests}
    if len(ways) > 1:
        names = " and ".join(sorted(f"{engine} on {device}" for engine, device in ways))
        answer.append(f"Not all runs ran in the same way ({names}), so their seconds compare only roughly.")
    return answer


def _of_best(best: str, cost: dict[str, float], participations: float) -> str:
    took = f"{duration(cost['seconds'])} of training"
    if not cost["bytes"]:
        return f"{capital(said(best))} sends nothing and takes {took}."
    return (
        f"{capital(said(best))} takes {size(cost['bytes'])} in all ({size(cost['up'])} up, {size(cost['down'])} down), "
        f"{size(cost['bytes'] / participations)} for every client and round in which it is asked, and {took}."
    )


def score_by_bytes(group: Group) -> Figure | None:
    """What the bytes buy."""
    found = {label: totals(group, label)["bytes"] for label in group.methods if group.score(label) is not None}
    senders = {label: crossed for label, crossed in found.items() if crossed > 0}
    if not senders or len(group.methods) < 2:
        return None
    style, factor = lines(group), group.scale.factor
    height = {label: factor * (group.score(label) or 0) for label in found}
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "markers", "x": [short(crossed / 1e6)], "y": [short(height[label])],
            "name": label, "text": [label], "marker": {"size": 11, "color": style[label]["color"]}, "showlegend": False,
            "hovertemplate": "%{text}: %{y:.4~g}, %{x:.3~g} MB<extra></extra>", "cliponaxis": False,
        }
        for label, crossed in senders.items()
    ]  # fmt: skip
    powers = powers_axis(crossed / 1e6 for crossed in senders.values())
    notes = [heading(f"{group.scale.heading}, trained, last round"), *_names(senders, height, style, bool(powers))]
    shapes = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": height[label], "y1": height[label],
         "line": {"color": style[label]["color"], "width": 1.4, "dash": "dash"}}
        for label in found if label not in senders
    ]  # fmt: skip
    layout = {
        "height": 420, "annotations": notes, "shapes": shapes, "margin": {"t": 34},
        "xaxis": {"title": {"text": "megabytes up and down in all"}, "zeroline": False}
        | (powers or {"rangemode": "tozero"}), "yaxis": {"zeroline": False},
    }  # fmt: skip
    title = f"{group.scale.title} against bytes"
    return Figure("bytes", title, _says_bytes(group, senders), data, layout, _table(group))


def _names(
    senders: Mapping[str, float], height: Mapping[str, float], style: Mapping[str, dict[str, Any]], wide: bool
) -> list[dict[str, Any]]:
    """Methods' names beside their dots, or above their lines where they send nothing; none covers another."""
    named = [label for label in height if not is_muted(style[label])]
    line = (max(height.values()) - min(height.values())) / 330 * 16  # the height of letters
    lifted = [height[label] + (0 if label in senders else 0.6 * line) for label in named]
    middle = (max(senders.values()) + (min(senders.values()) if wide else 0)) / 2
    found = []
    for label, place in zip(named, apart(lifted, line), strict=True):
        note: dict[str, Any] = {"showarrow": False, "y": short(place), "font": {"size": 12}}
        if label in senders:
            left, x = senders[label] > middle, senders[label] / 1e6
            note |= {"text": dotted(label, style[label]["color"]), "x": short(log10(x) if wide else x)}
            note |= {"xanchor": "right" if left else "left", "xshift": -9 if left else 9}
        else:
            near = [senders[other] > middle for other in senders if abs(height[other] - height[label]) < 2 * line]
            left = 2 * sum(near) >= len(near)  # where fewer dots are
            note |= {"text": f"{said(label)}: sends nothing", "xref": "paper"}
            note |= {"x": 0 if left else 1, "xanchor": "left" if left else "right"}
        found.append(note)
    return found


def _says_bytes(group: Group, senders: dict[str, float]) -> str:
    best, cheapest = next(iter(senders)), min(senders, key=lambda label: senders[label])  # of equals the best
    if best == cheapest:
        alike = sum(crossed == senders[best] for crossed in senders.values())
        least = "sends least" if alike == 1 else "none sends less"
        return f"Of the methods that send anything, {best} is the best and {least} ({size(senders[best])})."
    gap = group.sign * ((group.score(best) or 0) - (group.score(cheapest) or 0))
    return (
        f"{best} is the best of those that send anything, with {size(senders[best])}; the cheapest, {cheapest}, takes "
        f"{100 * senders[cheapest] / senders[best]:.0f} % of that and ends {group.scale.gap(gap)} "
        f"{'behind' if gap >= 0 else 'ahead on test data'}."
    )


def seconds(group: Group) -> Figure | None:
    """How long training took, where there is something to compare."""
    if len(group.methods) < 2:
        return None
    labels = sorted(group.methods, key=lambda label: totals(group, label)["seconds"])
    values = [totals(group, label)["seconds"] for label in labels]
    style = lines(group)
    data = [{
        "type": "bar", "orientation": "h", "y": labels, "x": [short(value) for value in values], "showlegend": False,
        "marker": {"color": [style[label]["color"] for label in labels]}, "text": [duration(value) for value in values],
        "textposition": "outside", "cliponaxis": False, "hovertemplate": "%{y}: %{text}<extra></extra>",
    }]  # fmt: skip
    layout = {
        "height": rows_height(len(labels)), "yaxis": rows_axis(labels), "bargap": 0.4,
        "xaxis": {"title": {"text": "seconds of training in a run"}, "range": [0, 1.15 * (max(values) or 1)]},
    }  # fmt: skip
    low, high = labels[0], labels[-1]
    times = values[-1] / values[0] if values[0] > 0 else 0
    says = f"{capital(said(high))} takes {duration(values[-1])} of training in a run"
    if times >= 1.05:
        says += f", {times:.1f} times as long as {said(low)}; methods differ in the steps they take."
    else:
        says += ", hardly longer than any other." if times else "."
    return Figure("seconds", "Time", says, data, layout, _table(group))


def _table(group: Group) -> Table:
    rows = []
    for label in group.methods:
        cost, reached = totals(group, label), as_good_as_alone(group, label)
        until = (
            ""
            if label == group.alone or group.alone is None
            else "never"
            if reached is None
            else f"{reached / 1e6:.2f}"
        )
        spent_on = next((d.epsilon for d in group.methods[label] if d.epsilon is not None), None)
        rows.append([
            label, group.scale.plain(group.score(label)), f"{cost['up'] / 1e6:.2f}", f"{cost['down'] / 1e6:.2f}",
            f"{cost['seconds']:.2f}", until, "" if spent_on is None else f"{spent_on:.3g}",
        ])  # fmt: skip
    heads = ["method", group.scale.heading, "MB up", "MB down", "s", "MB until as good as alone", "ε"]
    keep = [k for k in range(len(heads)) if k < 5 or any(row[k] for row in rows)]
    return Table([heads[k] for k in keep], [[row[k] for k in keep] for row in rows])
