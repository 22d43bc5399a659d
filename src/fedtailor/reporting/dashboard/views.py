"""The dashboard's views of runs: one run in detail, or a comparison of several runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np

from fedtailor.analysis.formatting import (
    ScoreFormat,
    count_of,
    evenly_spaced,
    format_bytes,
    format_duration,
    method_in_text,
    round_digits,
)
from fedtailor.analysis.run_summary import Comparison, Curve, RunSummary, compare_runs, rank_methods
from fedtailor.analysis.verdict import verdict_sentences
from fedtailor.errors import RunError
from fedtailor.reporting.dashboard.history import RunHistory
from fedtailor.reporting.dashboard.run_view import RunView
from fedtailor.reporting.figures.curves import curves
from fedtailor.reporting.figures.figure import COLORS, Figure, Table
from fedtailor.reporting.figures.ranking import ranking
from fedtailor.runs.run import MOMENTS
from fedtailor.runs.toml import flatten_settings

MAX_COMPARED = 40  # runs
_MAX_POINTS = 400  # per line
LINE_STYLES = {
    "trained": {"color": COLORS[0], "width": 2.2},
    "received": {"color": COLORS[1], "width": 2.2, "dash": "dash"},
}


def run_details(run: RunView) -> dict[str, Any]:
    """Return a run's curve, its clients with problems, and its settings."""
    history = run.history  # read once: the monitor's thread may replace it
    if run.info is None or history is None:
        summary = "The run is loading its data." if run.state == "starting" else "The run ended before its first round."
        return {"row": run.row(), "figures": [], "problems": [], "settings": _settings(run), "summary": summary}
    figure = _progress(run, history)
    system = {f"run.{k}": run.info[k] for k in ("engine", "device", "torch", "parameters") if k in run.info}
    return {
        "row": run.row(), "figures": [figure.to_dict()] if figure else [], "problems": _problems(run, history),
        "settings": _settings(run) | system, "summary": _run_summary(run, history),
    }  # fmt: skip


def check_selection(names: Sequence[str]) -> None:
    """Raise `RunError` for too few or too many runs."""
    if len(names) < 2:
        raise RunError("Select at least two runs to compare.")
    if len(names) > MAX_COMPARED:
        raise RunError(
            f"The dashboard compares at most {MAX_COMPARED} runs, got {len(names)}; fedtailor report has no limit."
        )


def comparison(runs: Sequence[RunView]) -> dict[str, Any]:
    """Compare runs at the last round that all of them have completed."""
    histories: dict[str, RunHistory] = {}
    for run in runs:
        history = run.history  # read once: the monitor's thread may replace it
        if run.info is None or history is None or not any(history.scores.values()):
            raise RunError(f"The run '{run.name}' has no evaluated round yet; compare it later.")
        histories[str(run.folder)] = history
    group = compare_runs([run.run for run in runs])
    rounds = min(history.rounds for history in histories.values())
    group = rank_methods(_fill_summaries(group, histories, rounds))
    figures = [ranking(group), curves(group)]
    sentences = verdict_sentences(group)
    if any(run.state != "finished" for run in runs) or any(h.rounds > rounds for h in histories.values()):
        sentences.insert(
            1, f"All runs are compared after round {rounds}, the last round that all of them have completed."
        )
    return {"summary": sentences, "figures": [figure.to_dict() for figure in figures if figure is not None]}


def _settings(run: RunView) -> dict[str, str]:
    """Return the experiment's settings; long values, such as schedules, are truncated."""
    return {name: str(value)[:200] for name, value in flatten_settings(run.settings).items()}


def _run_summary(run: RunView, history: RunHistory) -> str:
    row = run.row()
    subject = f"{row['method']} on {row['data']} with {count_of(row['clients'], 'client')}, seed {row['seed']}"
    if not history.rounds:
        return f"{subject}: the first round is not finished yet."
    rounds = f"{history.rounds} of {run.rounds} rounds" if history.rounds < run.rounds else f"all {run.rounds} rounds"
    seconds, sent = format_duration(history.seconds[-1]), format_bytes(history.bytes[-1])
    return f"{subject}: {rounds} took {seconds} of training and sent {sent}."


def _progress(run: RunView, history: RunHistory) -> Figure | None:
    assert run.info is not None
    scale = ScoreFormat(run.info["score"])
    series = {m: (list(history.round_indices[m]), list(history.scores[m])) for m in ("trained", "received")}
    series = {m: (indices[: len(scores)], scores) for m, (indices, scores) in series.items() if scores}
    if not series:
        return None
    traces = [
        line_trace(m, [i + 1 for i in indices], [scale.factor * s for s in scores], LINE_STYLES[m])
        for m, (indices, scores) in series.items()
    ]
    current = " and ".join(f"{scale.text(scores[-1])} ({m})" for m, (_, scores) in series.items())
    best = _best(run, *series[next(iter(series))])
    method = method_in_text(run.run.method_title)
    summary = f"After round {history.rounds} of {run.rounds}, {method} has {scale.name} {current}{best}."
    by_index = {m: dict(zip(*pair, strict=True)) for m, pair in series.items()}
    indices = evenly_spaced(sorted({i for values in by_index.values() for i in values}), 60)
    rows = [[i + 1, *(scale.plain(values.get(i)) for values in by_index.values())] for i in indices]
    columns = ["round", *(f"{m}, {scale.heading}" for m in by_index)]
    layout = figure_layout(scale.heading, run.rounds)
    return Figure("progress", f"{scale.title} over rounds", summary, traces, layout, Table(columns, rows))


def _best(run: RunView, indices: Sequence[int], scores: Sequence[float]) -> str:
    """Return a clause that compares the current score with the best one so far."""
    assert run.info is not None
    sign = 1 if run.info["higher_is_better"] else -1
    finite = [(sign * score, index) for index, score in zip(indices, scores, strict=True) if isfinite(score)]
    if len(finite) < 3:
        return ""
    best, index = max(finite, key=lambda pair: pair[0])
    if sign * scores[-1] == best:
        return "; this is its best score so far"
    best_text, current = (ScoreFormat(run.info["score"]).text(score) for score in (sign * best, scores[-1]))
    return f"; its best score was {best_text} in round {index + 1}" if best_text != current else ""


def _problems(run: RunView, history: RunHistory) -> list[dict[str, Any]]:
    """Return the clients that diverged, failed or missed rounds, the latest first."""
    found: list[dict[str, Any]] = [
        {
            "number": number, "name": run.names[number], "kind": kind, "count": problem.count,
            "last_round": problem.last_round, "reason": problem.reason,
        }
        for kind, problems in (("failed", dict(history.failed)), ("missed", dict(history.missed)))
        for number, problem in problems.items()
    ]  # fmt: skip
    found += [
        {
            "number": number, "name": run.names[number], "kind": "diverged", "count": 1, "last_round": history.rounds,
            "reason": "the loss is not finite; try a smaller lr",
        }
        for number in history.diverged
    ]  # fmt: skip
    rank = {"diverged": 0, "failed": 1, "missed": 2}
    return sorted(found, key=lambda row: (rank[row["kind"]], -row["last_round"], -row["count"]))[:100]


def _fill_summaries(group: Comparison, histories: Mapping[str, RunHistory], rounds: int) -> Comparison:
    """Fill the summaries of runs without records from their histories, up to a round."""

    def fill(summary: RunSummary) -> RunSummary:
        history = histories[str(summary.run.folder)]
        failed = [(client, one.last_round, one.reason) for client, one in dict(history.failed).items()]
        ends = {m: int(np.searchsorted(history.round_indices[m], rounds)) for m in MOMENTS}
        filled = {m: Curve(history.round_indices[m][: ends[m]], history.scores[m][: ends[m]]) for m in MOMENTS}
        return replace(
            summary, curves=filled, last={m: history.latest_scores(m, rounds) for m in MOMENTS},
            bytes=history.bytes[:rounds], seconds=history.seconds[:rounds], diverged=bool(history.diverged),
            epsilon=history.epsilon, failed=failed,
        )  # fmt: skip

    methods = {label: [fill(summary) for summary in some] for label, some in group.methods.items()}
    return replace(group, methods=methods, excluded=[fill(summary) for summary in group.excluded])


def line_trace(name: str, x: Sequence[int], y: Sequence[float], style: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plotly line with a limited number of points."""
    kept = evenly_spaced(range(len(x)), _MAX_POINTS)
    mode = "lines+markers" if len(x) < 3 else "lines"
    return {
        "type": "scatter", "mode": mode, "name": name, "line": dict(style),
        "x": [x[k] for k in kept], "y": [round_digits(y[k]) for k in kept],
        "hovertemplate": f"{name}: %{{y:.4~g}}<extra></extra>",
    }  # fmt: skip


def figure_layout(heading: str, rounds: int) -> dict[str, Any]:
    """Return plotly's layout of a figure over rounds."""
    return {
        "height": 320, "hovermode": "x unified", "showlegend": True,
        "xaxis": {"title": {"text": "round"}, "range": [0.5, rounds + 0.5], "zeroline": False,
                  "dtick": 1 if rounds <= 10 else None},
        "yaxis": {"title": {"text": heading}, "zeroline": False},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    }  # fmt: skip
