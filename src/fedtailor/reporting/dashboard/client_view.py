"""The dashboard's view of clients: the list of a run's clients, and one client's data, scores and neighbors."""

from dataclasses import replace
from math import isnan
from typing import Any

import numpy as np

from fedtailor.analysis.comparability import client_labels
from fedtailor.analysis.formatting import ScoreFormat, capitalize, round_digits
from fedtailor.errors import RunError
from fedtailor.reporting.dashboard.history import Float64Array, RunHistory
from fedtailor.reporting.dashboard.run_view import RunView
from fedtailor.reporting.dashboard.views import LINE_STYLES, line_trace, score_figure
from fedtailor.reporting.figures.clients import format_times
from fedtailor.reporting.figures.figure import BASELINE_COLOR, COLORS, Figure, Table
from fedtailor.reporting.figures.similarity import class_overlap, mixing_weights
from fedtailor.runs.run import MOMENTS, client_counts
from fedtailor.runs.tail import read_record_at

_PAGE_SIZE = 50
_MAX_NEIGHBORS = 12
_SORT_KEYS = ("number", "name", "train", "test", "received", "trained", "failed", "missed")


def client_list(run: RunView, sort: str, descending: bool, query: str, page: int) -> dict[str, Any]:
    """Return one page of a run's clients whose name contains `query`."""
    history = run.history  # read once: the monitor's thread may replace it
    if run.info is None or history is None:
        raise RunError(f"The run '{run.name}' has not started yet, so its clients are unknown.")
    if sort not in _SORT_KEYS:
        raise RunError(f"Clients can be sorted by {', '.join(_SORT_KEYS)}, not by '{sort}'.")
    latest = {moment: history.latest_scores(moment) for moment in MOMENTS}
    rows = [
        {
            "number": number, "name": name, "train": client["train"], "test": client["test"],
            **{moment: round_digits(latest[moment].get(number)) for moment in MOMENTS},
            **{kind: one[number].count if number in one else 0 for kind, one in history.problems.items()},
        }
        for number, (name, client) in enumerate(zip(run.names, run.info["clients"], strict=True))
        if query.lower() in name.lower()
    ]  # fmt: skip
    rows.sort(key=lambda row: _sort_value(row[sort], descending), reverse=descending)
    page = max(0, min(page, (len(rows) - 1) // _PAGE_SIZE))
    return {
        "total": len(rows), "page": page, "pages": max(1, -(-len(rows) // _PAGE_SIZE)), "score": run.info["score"],
        "rows": rows[page * _PAGE_SIZE : (page + 1) * _PAGE_SIZE],
    }  # fmt: skip


def client_details(run: RunView, number: int) -> dict[str, Any]:
    """Return a client's sample counts, scores over the rounds, problems and neighbors."""
    history = run.history
    if run.info is None or history is None or not 0 <= number < len(run.names):
        raise RunError(f"The run '{run.name}' has no client {number}.")
    client = run.info["clients"][number]
    figures = [_score_figure(run, history, number), _class_figure(run, number)]
    problems = [
        f"{verb} {format_times(problem.count)}, last in round {problem.last_round}: {problem.reason}"
        for kind, verb in (("failed", "failed"), ("missed", "missed its round"))
        if (problem := history.problems[kind].get(number))
    ]
    return {
        "name": client_labels(run.run)[number],
        **{name: client[name] for name in ("train", "test", "validation")},
        "figures": [figure.to_dict() for figure in figures if figure is not None],
        "problems": problems, "neighbors": _neighbors(run, history, number),
    }  # fmt: skip


def _score_figure(run: RunView, history: RunHistory, number: int) -> Figure | None:
    assert run.info is not None
    scale, name = ScoreFormat(run.info["score"]), client_labels(run.run)[number]
    series = {moment: scores for moment in LINE_STYLES if (scores := history.client_history(number, moment))}
    if not series:
        return None
    latest = history.latest_scores("trained")
    rank = ""
    if number in latest and not isnan(latest[number]) and len(latest) > 1:
        sign = 1 if run.info["higher_is_better"] else -1
        better = sum(sign * value > sign * latest[number] for value in latest.values())
        rank = f"; {better} of {len(latest) - 1} other clients score better"
    medians = {i + 1: m for i, m in zip(history.round_indices["trained"], history.median_scores, strict=False)}
    median = line_trace(
        "median client, trained", medians, scale, {"color": BASELINE_COLOR, "width": 1.4, "dash": "dot"}
    )
    return score_figure("history", f"of {name}", run, series, capitalize(name), rank, [median])


def _class_figure(run: RunView, number: int) -> Figure | None:
    assert run.info is not None
    counts, name = run.info["clients"][number].get("classes") or [], client_labels(run.run)[number]
    if not sum(counts):
        return None
    largest, present = max(range(len(counts)), key=lambda label: counts[label]), sum(count > 0 for count in counts)
    summary = (
        f"{capitalize(name)} has training samples of {present} of {len(counts)} classes; the largest is "
        f"class {largest} ({counts[largest] / sum(counts):.0%})."
    )
    trace = {
        "type": "bar", "x": [str(label) for label in range(len(counts))], "y": counts, "marker": {"color": COLORS[0]},
        "hovertemplate": "class %{x}: %{y} samples<extra></extra>", "showlegend": False,
    }  # fmt: skip
    layout = {"height": 260, "xaxis": {"type": "category", "title": {"text": "class"}},
              "yaxis": {"title": {"text": "training samples"}}}  # fmt: skip
    rows = [[label, count] for label, count in enumerate(counts)]
    return Figure("classes", f"Data of {name}", summary, [trace], layout, Table(["class", "training samples"], rows))


def _neighbors(run: RunView, history: RunHistory, number: int) -> dict[str, Any]:
    """Return the clients that a client learns from, if the method weights clients; else those with similar data."""
    overlap = class_overlap(run.run, [number])
    similarity = None if overlap is None else overlap[0]
    weights = _mixing_weights(run, history, number)
    order_by = weights if weights is not None else similarity
    if order_by is None:
        summary = "Neighbors are unknown: the method does not weight clients, and the data have no classes."
        return {"summary": summary, "rows": []}
    order = [int(c) for c in np.argsort(-order_by, kind="stable") if c != number and order_by[c] > 0][:_MAX_NEIGHBORS]
    rows = [
        {
            "number": c, "name": run.names[c], "weight": None if weights is None else float(weights[c]),
            "similarity": None if similarity is None else float(similarity[c]),
        }
        for c in order
    ]  # fmt: skip
    if weights is None:
        summary = f"{run.run.method_title} does not weight clients. These clients have the most similar data."
    else:
        others = float(weights.sum() - weights[number])
        summary = f"Other clients have {others:.0%} of the weight in this client's model. The largest weights are:"
    return {"summary": summary if rows else "This client has no neighbors.", "rows": rows}


def _mixing_weights(run: RunView, history: RunHistory, number: int) -> Float64Array | None:
    """Return the weight of every client in a client's model, in the last round that recorded weights."""
    if history.weights_offset is None:
        return None
    try:
        record = read_record_at(run.folder / "rounds.jsonl", history.weights_offset, client_counts(run.run.info))
        found = mixing_weights(replace(run.run, records=[record]))
    except (OSError, ValueError, KeyError, TypeError):  # the records are being rewritten
        return None
    return None if not found else next(iter(found.values()))[number]


def _sort_value(value: Any, descending: bool) -> tuple[bool, Any]:
    """Return a sort key that puts unknown values last in both directions."""
    return (value is None) != descending, value if value is not None else 0
