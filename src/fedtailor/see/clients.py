"""Clients one by one: how good their models are, who failed."""

from collections.abc import Sequence
from math import isfinite
from statistics import fmean, median
from typing import Any

import numpy as np

from fedtailor.reading import called
from fedtailor.scale import counted
from fedtailor.see.digest import Client, Digest, Group
from fedtailor.see.drawing import lines, rows_axis, rows_height, said, short
from fedtailor.see.figure import Figure, Table

GAIN, LOSS = "#0072b2", "#d55e00"  # apart for everyone's eyes, and by the shape of their marks
MOST_DOTS = 4_000  # of one figure; beyond, boxes alone are drawn
MOST_ROWS = 500  # of a table
MOST_METHODS = 12  # to choose from, the best


def means(group: Group, label: str, moment: str = "trained") -> dict[Client, float]:
    """Every client's score, the mean of the seeds that have it."""
    found: dict[Client, list[float]] = {}
    for digest in group.methods[label]:
        for client, score in digest.last[moment].items():
            found.setdefault((digest.split, client), []).append(score)
    return {client: fmean(scores) for client, scores in found.items()}


def owners(group: Group) -> dict[Client, tuple[Digest, str]]:
    """Client -> a run that has it, and how it is called: with its seed where another seed's clients are others."""
    splits: dict[str, Digest] = {}
    for digest in group.digests:
        splits.setdefault(digest.split, digest)
    several = len(splits) > 1
    return {
        (split, client): (digest, name + (f", seed {digest.seed}" if several else ""))
        for split, digest in splits.items()
        for client, name in enumerate(called(digest.run))
    }


def distribution(group: Group) -> Figure | None:
    """Every client's score with every method: boxes, and a dot a client where they are not too many."""
    found = {label: means(group, label) for label in group.methods}
    found = {label: {c: s for c, s in some.items() if isfinite(s)} for label, some in found.items()}
    labels = [label for label in found if found[label]]
    if not labels:
        return None
    style, named, factor = lines(group), owners(group), group.scale.factor
    dots = sum(len(found[label]) for label in labels) <= MOST_DOTS
    data: list[dict[str, Any]] = []
    for place, label in enumerate(labels):
        clients, values = list(found[label]), factor * np.array(list(found[label].values()))
        low, quarter, middle, three, high = np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95]).tolist()
        colour, height = style[label]["color"], len(labels) - 1 - place
        data.append({
            "type": "box", "orientation": "h", "y": [height], "q1": [short(quarter)], "median": [short(middle)],
            "q3": [short(three)], "lowerfence": [short(low)], "upperfence": [short(high)], "name": label, "width": 0.5,
            "line": {"color": colour, "width": 1.6}, "fillcolor": "rgba(127,127,127,0.10)", "showlegend": False,
            "hoverinfo": "skip" if dots else "x", "whiskerwidth": 0,
        })  # fmt: skip
        if dots:
            lift = [
                height + 0.36 * ((i * 0.618034) % 1 - 0.5) for i in range(len(clients))
            ]  # apart, the same each time
            data.append({
                "type": "scatter", "mode": "markers", "x": [short(v) for v in values.tolist()],
                "y": [short(v, 4) for v in lift], "text": [named[client][1] for client in clients], "showlegend": False,
                "marker": {"color": colour, "size": 5, "opacity": 0.55},
                "hovertemplate": "%{text}: %{x:.4~g}<extra></extra>",
            })  # fmt: skip
    rows = rows_axis(labels) | {"type": "linear", "tickvals": list(range(len(labels))), "ticktext": [*reversed(labels)]}
    layout = {
        "height": rows_height(len(labels)) + 6 * len(labels), "showlegend": False,
        "yaxis": {k: v for k, v in rows.items() if not k.startswith("category")},
        "xaxis": {"title": {"text": f"{group.scale.heading} of a client, trained"}, "zeroline": False},
    }  # fmt: skip
    return Figure("clients", "Every client", _says_distribution(group, found, labels, named, dots), data, layout,
                  _client_table(group, found, labels, named))  # fmt: skip


def _says_distribution(
    group: Group,
    found: dict[str, dict[Client, float]],
    labels: Sequence[str],
    named: dict[Client, tuple[Digest, str]],
    dots: bool,
) -> str:
    best = labels[0]
    values = found[best]
    worst = min(values, key=lambda client: group.sign * values[client])
    splits = {digest.split for digest in group.methods[best]}
    everyone = sum(split in splits and named[split, client][0].tests[client] > 0 for split, client in named)
    left = everyone - len(values)
    lack = f"; {left} {'has' if left == 1 else 'have'} no score" if left else ""
    whom, of = (f"of {counted(len(values), 'client')}", "these") if left else ("client", "all clients")
    return (
        f"With {said(best)} the median {whom} has {group.scale.text(median(values.values()))} and the worst, "
        f"{named[worst][1]}, {group.scale.text(values[worst])} ({'dots: clients; ' if dots else ''}boxes: the middle "
        f"half; whiskers: 90 % of {of}{lack})."
    )


def _client_table(
    group: Group,
    found: dict[str, dict[Client, float]],
    labels: Sequence[str],
    named: dict[Client, tuple[Digest, str]],
) -> Table:
    shown = labels[:MOST_METHODS]
    rows: list[list[Any]] = []
    for client in [client for client in named if any(client in found[label] for label in shown)]:
        digest, name = named[client]
        size = digest.run.info["clients"][client[1]]
        scores = (group.scale.plain(found[label].get(client)) for label in shown)
        rows.append([name, size["train"], size["test"], *scores])
    if len(rows) > MOST_ROWS:
        left = len(rows) - MOST_ROWS
        rows = [*rows[:MOST_ROWS], [f"and {left} more, in the runs' rounds.jsonl", *[""] * (2 + len(shown))]]
    return Table(["client", "training samples", "test samples", *shown], rows)


def absent(group: Group) -> Figure | None:
    """Clients that failed or delivered nothing, if there were any."""
    kinds = {"failed": LOSS, "missed": "#e69f00"}
    found: dict[str, dict[str, list[Any]]] = {}
    for label, some in group.methods.items():
        found[label] = {kind: [event for digest in some for event in getattr(digest, kind)] for kind in kinds}
    labels = [label for label in found if any(found[label].values())]
    if not labels:
        return None
    data = [
        {
            "type": "bar", "orientation": "h", "name": kind, "y": labels, "marker": {"color": colour},
            "x": [len(found[label][kind]) for label in labels],
            "hovertemplate": f"%{{y}}: %{{x}} times {kind}<extra></extra>",
        }
        for kind, colour in kinds.items()
    ]  # fmt: skip
    layout = {
        "height": rows_height(len(labels)), "yaxis": rows_axis(labels), "barmode": "stack", "bargap": 0.35,
        "xaxis": {"title": {"text": "times a client failed or missed a round"}}, "showlegend": True,
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
    }  # fmt: skip
    counts = {kind: sum(len(found[label][kind]) for label in labels) for kind in kinds}
    most = max(labels, key=lambda label: sum(map(len, found[label].values())))
    says = (
        f"Clients failed {times(counts['failed'])} and were late or dropped out {times(counts['missed'])}, most "
        f"often with {said(most)}; they count as they last trained."
    )
    events = [
        [label, digest.seed, digest.name(client), number, kind, why]
        for label in labels for digest in group.methods[label] for kind in kinds
        for client, number, why in getattr(digest, kind)
    ]  # fmt: skip
    heads = ["method", "seed", "client", "round", "", "why"]
    return Figure("absent", "Clients that failed or were missing", says, data, layout, Table(heads, events[:MOST_ROWS]))


def times(count: int) -> str:
    """How often.

    >>> times(0), times(1), times(2)
    ('never', 'once', '2 times')
    """
    return {0: "never", 1: "once"}.get(count, f"{count:,} times")
