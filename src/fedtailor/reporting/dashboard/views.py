"""The dashboard's views of runs: one run in detail, or a comparison of several runs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
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
from fedtailor.reporting.dashboard.history import ProblemCount, RunHistory
from fedtailor.reporting.dashboard.run_view import RunView
from fedtailor.reporting.figures.curves import curves
from fedtailor.reporting.figures.figure import COLORS, Figure, Table
from fedtailor.reporting.figures.ranking import ranking
from fedtailor.runs.run import MOMENTS
from fedtailor.runs.toml import flatten_settings

MAX_COMPARED = 40  # runs
_MAX_POINTS = 400  # per line
Scores = Mapping[int, float]  # round -> score
LINE_STYLES = {  # by moment
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
    """Compare runs at the last round that all of them have completed; a run that stopped early has completed all."""
    histories: dict[str, RunHistory] = {}
    for run in runs:
        history = run.history  # read once: the monitor's thread may replace it
        if run.info is None or history is None or not any(history.scores.values()):
            raise RunError(f"The run '{run.name}' has no evaluated round yet; compare it later.")
        histories[str(run.folder)] = history
    group = compare_runs([run.run for run in runs])
    unstopped = [history.rounds for history in histories.values() if not history.stopped_early]
    rounds = min(unstopped, default=max(history.rounds for history in histories.values()))
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
    early = f" It stopped early, before round {run.settings['rounds']}." if history.stopped_early else ""
    return f"{subject}: {rounds} took {seconds} of training and sent {sent}.{early}"


def _progress(run: RunView, history: RunHistory) -> Figure | None:
    indexed = {m: zip(history.round_indices[m], history.scores[m], strict=False) for m in LINE_STYLES}
    series = {m: {index + 1: score for index, score in pairs} for m, pairs in indexed.items()}
    series = {m: scores for m, scores in series.items() if scores}
    if not series:
        return None
    start = f"After round {history.rounds} of {run.rounds}, {method_in_text(run.run.method_title)}"
    ranked = series.get(run.ranked_by, {})
    return score_figure("progress", "over rounds", run, series, start, _best(run, ranked) if ranked else "")


def score_figure(
    key: str, what: str, run: RunView, series: Mapping[str, Scores], start: str, end: str, traces: Sequence[Any] = ()
) -> Figure:
    """Draw scores over rounds at each moment; the summary states the latest ones, between `start` and `end`."""
    assert run.info is not None
    scale = ScoreFormat(run.info["score"])
    data = [line_trace(moment, scores, scale, LINE_STYLES[moment]) for moment, scores in series.items()]
    latest = " and ".join(f"{scale.text(scores[max(scores)])} ({moment})" for moment, scores in series.items())
    rounds = evenly_spaced(sorted({number for scores in series.values() for number in scores}), 60)
    rows = [[number, *(scale.plain(scores.get(number)) for scores in series.values())] for number in rounds]
    layout = {
        "height": 320, "hovermode": "x unified", "showlegend": True,
        "xaxis": {"title": {"text": "round"}, "range": [0.5, run.rounds + 0.5], "zeroline": False,
                  "dtick": 1 if run.rounds <= 10 else None},
        "yaxis": {"title": {"text": scale.heading}, "zeroline": False},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    }  # fmt: skip
    table = Table(["round", *(f"{moment}, {scale.heading}" for moment in series)], rows)
    summary = f"{start} has {scale.name} {latest}{end}."
    return Figure(key, f"{scale.title} {what}", summary, [*data, *traces], layout, table)


def line_trace(name: str, scores: Scores, scale: ScoreFormat, style: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plotly line with a limited number of points."""
    shown = evenly_spaced([*scores], _MAX_POINTS)
    return {
        "type": "scatter", "mode": "lines+markers" if len(scores) < 3 else "lines", "name": name, "line": dict(style),
        "x": shown, "y": [round_digits(scale.factor * scores[number]) for number in shown],
        "hovertemplate": f"{name}: %{{y:.4~g}}<extra></extra>",
    }  # fmt: skip


def _best(run: RunView, scores: Scores) -> str:
    """Return a clause that compares the current score with the best one so far."""
    assert run.info is not None
    sign, current = 1 if run.info["higher_is_better"] else -1, scores[max(scores)]
    finite = {number: score for number, score in scores.items() if isfinite(score)}
    if len(finite) < 3:
        return ""
    best = max(finite, key=lambda number: sign * finite[number])
    if current == finite[best]:
        return "; this is its best score so far"
    best_text, current_text = (ScoreFormat(run.info["score"]).text(score) for score in (finite[best], current))
    return f"; its best score was {best_text} in round {best}" if best_text != current_text else ""


def _problems(run: RunView, history: RunHistory) -> list[dict[str, Any]]:
    """Return the clients that diverged, failed or missed rounds, the latest first."""
    diverged = ProblemCount(1, history.rounds, "the loss is not finite; try a smaller lr")
    found: list[dict[str, Any]] = []
    for kind, problems in ({"diverged": dict.fromkeys(history.diverged, diverged)} | history.problems).items():
        latest = sorted(problems.copy().items(), key=lambda item: (-item[1].last_round, -item[1].count))
        found += [{"number": n, "name": run.names[n], "kind": kind, **asdict(problem)} for n, problem in latest]
    return found[:100]


def _fill_summaries(group: Comparison, histories: Mapping[str, RunHistory], rounds: int) -> Comparison:
    """Fill the summaries of runs without records from their histories, up to a round."""

    def fill(summary: RunSummary) -> RunSummary:
        history = histories[str(summary.run.folder)]
        failed = [(client, one.last_round, one.reason) for client, one in history.problems["failed"].copy().items()]
        ends = {m: int(np.searchsorted(history.round_indices[m], rounds)) for m in MOMENTS}
        filled = {m: Curve(history.round_indices[m][: ends[m]], history.scores[m][: ends[m]]) for m in MOMENTS}
        return replace(
            summary, curves=filled, last={m: history.latest_scores(m, rounds) for m in MOMENTS},
            bytes=history.bytes[:rounds], seconds=history.seconds[:rounds], diverged=bool(history.diverged),
            epsilon=history.epsilon, failed=failed,
        )  # fmt: skip

    methods = {label: [fill(summary) for summary in some] for label, some in group.methods.items()}
    return replace(group, methods=methods, excluded=[fill(summary) for summary in group.excluded])
