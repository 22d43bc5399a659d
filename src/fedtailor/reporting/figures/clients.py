"""Figures of individual clients: their scores, and which of them failed."""

from collections.abc import Sequence
from math import isfinite
from statistics import fmean, median
from typing import Any, Literal

import numpy as np

from fedtailor.analysis.comparability import client_labels
from fedtailor.analysis.formatting import count_of, method_in_text, round_digits
from fedtailor.analysis.run_summary import Client, Comparison, RunSummary
from fedtailor.reporting.figures.drawing import method_styles, rows_axis, rows_height
from fedtailor.reporting.figures.figure import MAX_ROWS, Figure, Table, limit_rows

GAIN_COLOR, LOSS_COLOR = "#0072b2", "#d55e00"  # color-blind safe; marker shapes differ too
MAX_POINTS = 4_000  # per figure; with more clients, only boxes are drawn
MAX_METHODS = 12  # per choice and per table, the best ones
NamedClients = dict[Client, tuple[RunSummary, str]]  # client -> a run with this client, and the client's display name


def mean_scores(group: Comparison, label: str) -> dict[Client, float]:
    """Return each client's score at the moment that ranks the method, averaged over the seeds in which it has one."""
    scores: dict[Client, list[float]] = {}
    for run_summary in group.methods[label]:
        for client, score in run_summary.ranked_scores.items():
            scores.setdefault((run_summary.samples, client), []).append(score)
    return {client: fmean(values) for client, values in scores.items()}


def named_clients(group: Comparison) -> NamedClients:
    """Return all clients with their display names, which include the seed if seeds have different clients."""
    first = _first_of_each(group, "samples")
    return {
        (run_summary.samples, client): (run_summary, name + (f" (seed {run_summary.seed})" if len(first) > 1 else ""))
        for run_summary in first
        for client, name in enumerate(client_labels(run_summary.run))
    }


def first_of_each_split(group: Comparison) -> list[RunSummary]:
    """Return one run of each split of the data."""
    return _first_of_each(group, "split")


def _first_of_each(group: Comparison, key: Literal["split", "samples"]) -> list[RunSummary]:
    found: dict[str, RunSummary] = {}
    for run_summary in group.summaries:
        found.setdefault(getattr(run_summary, key), run_summary)
    return list(found.values())


def score_distribution(group: Comparison) -> Figure | None:
    """Draw the clients' scores per method: a box plot, plus one point per client if there are not too many."""
    scores = {label: mean_scores(group, label) for label in group.methods}
    scores = {label: {c: s for c, s in values.items() if isfinite(s)} for label, values in scores.items()}
    labels = [label for label in scores if scores[label]]
    if not labels:
        return None
    styles, named, factor = method_styles(group), named_clients(group), group.fmt.factor
    show_points = sum(len(scores[label]) for label in labels) <= MAX_POINTS
    data: list[dict[str, Any]] = []
    for position, label in enumerate(labels):
        clients, values = list(scores[label]), factor * np.array(list(scores[label].values()))
        quantiles = np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95]).tolist()
        p5, p25, p50, p75, p95 = ([round_digits(value)] for value in quantiles)
        color, row = styles[label]["color"], len(labels) - 1 - position
        data.append({
            "type": "box", "orientation": "h", "y": [row], "q1": p25, "median": p50, "q3": p75, "lowerfence": p5,
            "upperfence": p95, "name": label, "width": 0.5, "line": {"color": color, "width": 1.6},
            "fillcolor": "rgba(127,127,127,0.10)", "showlegend": False, "hoverinfo": "skip" if show_points else "x",
            "whiskerwidth": 0,
        })  # fmt: skip
        if show_points:
            jitter = [row + 0.36 * ((i * 0.618034) % 1 - 0.5) for i in range(len(clients))]  # deterministic
            data.append({
                "type": "scatter", "mode": "markers", "x": [round_digits(v) for v in values.tolist()],
                "y": [round_digits(v, 4) for v in jitter], "text": [named[client][1] for client in clients],
                "showlegend": False, "marker": {"color": color, "size": 5, "opacity": 0.55},
                "hovertemplate": "%{text}: %{x:.4~g}<extra></extra>",
            })  # fmt: skip
    rows = rows_axis(labels) | {"type": "linear", "tickvals": list(range(len(labels))), "ticktext": [*reversed(labels)]}
    layout = {
        "height": rows_height(len(labels)) + 6 * len(labels), "showlegend": False,
        "yaxis": {k: v for k, v in rows.items() if not k.startswith("category")},
        "xaxis": {"title": {"text": f"{group.fmt.heading} (per client)"}, "zeroline": False},
    }  # fmt: skip
    summary = _distribution_summary(group, scores, labels, named, show_points)
    table = _client_table(group, scores, labels, named)
    return Figure("clients", "Scores of all clients", summary, data, layout, table)


def _distribution_summary(
    group: Comparison,
    scores: dict[str, dict[Client, float]],
    labels: Sequence[str],
    named: NamedClients,
    show_points: bool,
) -> str:
    best = labels[0]
    values = scores[best]
    worst = min(values, key=lambda client: group.sign * values[client])
    known = {run_summary.samples for run_summary in group.methods[best]}
    tested = sum(key in known and named[key, client][0].test_sizes[client] > 0 for key, client in named)
    missing = tested - len(values)
    which, of = (f"median of {count_of(len(values), 'client')}", "these") if missing else ("median client", "all")
    note = f"; {count_of(missing, 'client')} {'has' if missing == 1 else 'have'} no score" if missing else ""
    return (
        f"With {method_in_text(best)}, the {which} scores {group.fmt.text(median(values.values()))} and the worst "
        f"client, {named[worst][1]}, scores {group.fmt.text(values[worst])} "
        f"({'dots: clients; ' if show_points else ''}boxes: middle 50 %; whiskers: middle 90 % of {of} clients{note})."
    )


def _client_table(
    group: Comparison, scores: dict[str, dict[Client, float]], labels: Sequence[str], named: NamedClients
) -> Table:
    shown = labels[:MAX_METHODS]
    rows: list[list[Any]] = []
    for client in [client for client in named if any(client in scores[label] for label in shown)]:
        run_summary, name = named[client]
        size = run_summary.run.info["clients"][client[1]]
        values = (group.fmt.plain(scores[label].get(client)) for label in shown)
        rows.append([name, size["train"], size["test"], *values])
    rows = limit_rows(rows, " (see rounds.jsonl of the runs)")
    return Table(["client", "training samples", "test samples", *shown], rows)


def failures(group: Comparison) -> Figure | None:
    """Draw how often clients failed or missed a round; return None if that never happened."""
    kinds = {"failed": LOSS_COLOR, "missed": "#e69f00"}
    counts = {
        label: {kind: sum(len(getattr(run_summary, kind)) for run_summary in run_summaries) for kind in kinds}
        for label, run_summaries in group.methods.items()
    }
    labels = [label for label in counts if any(counts[label].values())]
    if not labels:
        return None
    data = [
        {
            "type": "bar", "orientation": "h", "name": kind, "y": labels, "marker": {"color": color},
            "x": [counts[label][kind] for label in labels],
            "hovertemplate": f"%{{y}}: %{{x}} {kind}<extra></extra>",
        }
        for kind, color in kinds.items()
    ]  # fmt: skip
    layout = {
        "height": rows_height(len(labels)), "yaxis": rows_axis(labels), "barmode": "stack", "bargap": 0.35,
        "xaxis": {"title": {"text": "failed or missed client rounds"}}, "showlegend": True,
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
    }  # fmt: skip
    totals = {kind: sum(counts[label][kind] for label in labels) for kind in kinds}
    verbs = {"failed": "failed", "missed": "were late or dropped out"}
    events = " and ".join(f"{verbs[kind]} {format_times(total)}" for kind, total in totals.items() if total)
    most = max(labels, key=lambda label: sum(counts[label].values()))
    where = f", most often with {method_in_text(most)}" if len(labels) > 1 else f" with {method_in_text(most)}"
    summary = f"Clients {events}{where}; their last known scores count."
    rows = [
        [label, run_summary.seed, run_summary.name(client), number, kind, reason]
        for label in labels for run_summary in group.methods[label] for kind in kinds
        for client, number, reason in getattr(run_summary, kind)
    ]  # fmt: skip
    columns = ["method", "seed", "client", "round", "event", "reason"]
    return Figure("failures", "Failed and missing clients", summary, data, layout, Table(columns, rows[:MAX_ROWS]))


def format_times(count: int) -> str:
    """Return a count of occurrences in words.

    >>> format_times(0), format_times(1), format_times(2)
    ('never', 'once', '2 times')
    """
    return {0: "never", 1: "once"}.get(count, f"{count:,} times")
