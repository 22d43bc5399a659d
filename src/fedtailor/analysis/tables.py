"""Tables for the terminal: one run, and what tables of comparisons share."""

from collections.abc import Sequence
from math import isfinite
from statistics import mean, stdev

from rich import box
from rich.table import Table

from fedtailor.analysis.formatting import ScoreFormat, count_of, format_megabytes, shorten
from fedtailor.analysis.rows import metric_group, other_metric_names
from fedtailor.analysis.run_length import early_stopping_note, rounds_in_words
from fedtailor.runs.records import COMMON, GLOBAL, HELD_OUT, TRAIN
from fedtailor.runs.run import Run

_CHOICE_HEADINGS = {"last": "last", "best_validation": "best on\nvalidation", "best_test": "best on\ntest"}
_STATISTICS = {
    "weighted": "all samples",
    "mean": "mean of clients",
    "worst_tenth": "worst 10 %",
    "largest_tenth": "largest 10 %",
    "largest_tenth_weighted": "largest 10 %, all samples",
}


def run_table(run: Run) -> Table:
    """Return the table of one run: both moments, all choices of a round, and all metrics."""
    chosen = {(m, c): summary for m, choices in run.summary().items() for c, summary in choices.items() if summary}
    headings = [f"{moment}\n{_CHOICE_HEADINGS[choice]}" for moment, choice in chosen]
    title = f"{shorten(run.method_title)} on {describe_runs([run])}; {score_format(run).in_words}"
    table = new_table(title, ["", *headings], left=1)
    table.add_row("round", *(str(summary["round"]) for summary in chosen.values()))
    for statistic, label in _STATISTICS.items():
        table.add_row(label, *(_value(run.info["score"], summary[statistic]) for summary in chosen.values()))
    if run.malicious_clients:
        for statistic, label in (("weighted", "honest clients"), ("mean", "mean of honest clients")):
            table.add_row(label, *(_value(run.info["score"], s["honest"][statistic]) for s in chosen.values()))
    for name in (others := other_metric_names([run])):
        shown = (_value(name, summary["metrics"][name]["weighted"]) for summary in chosen.values())
        table.add_row(ScoreFormat(name).name, *shown)
    up, down = (format_megabytes(run.total(name)) for name in ("bytes_up", "bytes_down"))
    diverged = run.records[-1].get("diverged", [])
    table.caption = f"{len(diverged)} clients diverged: try a smaller lr. " if diverged else ""
    if malicious := run.malicious_clients:
        table.caption += f"{len(malicious)} of {run.num_clients} clients were malicious. "
    table.caption += _failures(run)
    table.caption += _as_sentence(early_stopping_note([run]))
    precision = run.experiment.get("precision", "float32")
    engine = run.info["engine"] if precision == "float32" else f"{run.info['engine']} in {precision}"
    table.caption += f"{run.total('seconds'):.1f} s of training, engine {engine}; "
    if peak := max(record.get("peak_memory", 0) for record in run.records):
        table.caption += f"at most {format_megabytes(peak)} MB of {run.info['device']}; "
    table.caption += f"{up} MB up and {down} MB down in total. "
    if (epsilon := run.records[-1].get("epsilon")) is not None:
        table.caption += f"ε = {epsilon:.3g} at δ = {run.experiment['channel']['delta']:g}. "
    table.caption += (
        f"Most papers report best on test, which is optimistic.{untested_note(run)}{metric_notes(others, [run])}"
    )
    return table


def untested_note(run: Run) -> str:
    """Return how many clients train but are not scored, because they have no test samples."""
    untested = sum(not client["test"] for client in run.info["clients"])
    return f" {count_of(untested, 'client')} without test samples: trained, not scored." if untested else ""


def _failures(run: Run) -> str:
    """Return how many clients failed, with the first failure as an example."""
    failed = [(client, r["round"], reason) for r in run.records for client, reason in r.get("failed", {}).items()]
    if not failed:
        return ""
    client, number, reason = failed[0]
    clients = len({client for client, *_ in failed})
    return f"{clients} of {run.num_clients} clients failed in some round, client {client} in round {number}: {reason}. "


def describe_runs(runs: Sequence[Run]) -> str:
    """Return data, clients, and rounds of runs that differ in method and seed, for titles."""
    data, held_out = runs[0].experiment["data"].get("name", "own data"), len(runs[0].held_out_clients)
    others = f" and {held_out} held out" if held_out else ""
    return f"{data}, {runs[0].num_clients} clients{others}, {rounds_in_words(runs)}"


def _as_sentence(note: str) -> str:
    return f"{note} " if note else ""


def score_format(run: Run) -> ScoreFormat:
    """Return the format of a run's score."""
    return ScoreFormat(run.info["score"])


def metric_notes(others: Sequence[str], runs: Sequence[Run]) -> str:
    """Return how the other metrics are averaged, and for how many clients a metric is undefined."""
    notes, info = "", runs[0].info
    own = [ScoreFormat(name).name for name in others if not metric_group(name, runs[0])]
    notes += f" {', '.join(own)}: mean over clients, weighted by test samples." if own else ""
    groups = {metric_group(name, runs[0]) for name in others}
    if COMMON in groups:
        samples = f"{count_of(info['common_test'], 'test sample')} that belong to no client"
        notes += f" common: mean over clients, all on the same {samples}."
    if HELD_OUT in groups:
        held_out = len(runs[0].held_out_clients)
        which = f"{count_of(held_out, 'client')} that never trained with the others"
        notes += f" held-out: {which}; received: when they join, trained: after one round."
    if TRAIN in groups:
        notes += " train: on the clients' training samples, by which the mean over clients is weighted."
    if GLOBAL in groups:
        notes += " global: the global model on the test samples of all clients, without personalization."
    last = [summary for run in runs if (summary := run.summarize("trained") or run.summarize("received"))]
    score = info["score"]
    counts = [{name: m["clients"] for name, m in ({score: summary} | summary["metrics"]).items()} for summary in last]
    for name in (score, *others):
        kind = metric_group(name, runs[0])  # which clients a metric covers depends on it
        covered = [{n: many for n, many in clients.items() if metric_group(n, runs[0]) == kind} for clients in counts]
        missing = {max(clients.values()) - clients[name] for clients in covered if name in clients}
        if any(missing):
            many = f"{min(missing)} to {max(missing)} clients" if len(missing) > 1 else f"{max(missing)} clients"
            notes += f" {ScoreFormat(name).title} is undefined for {'1 client' if missing == {1} else many}."
    return notes


def spread(metric: str, values: Sequence[float]) -> str:
    """Return the mean and the standard deviation of a metric over seeds for tables.

    >>> spread("accuracy", [0.7, 0.8]), spread("loss", [0.5])
    ('75.0 ± 7.1', '0.5')
    """
    if not values:
        return ""
    several = len(values) > 1 and all(map(isfinite, values))  # no deviation if a run diverged
    if not several:
        return _value(metric, mean(values))
    deviation = _value(metric, stdev(values)) if ScoreFormat(metric).unit else f"{stdev(values):#.2g}".rstrip(".")
    return f"{_value(metric, mean(values))} ± {deviation}"


def _value(metric: str, value: float | None) -> str:
    return "" if value is None else ScoreFormat(metric).plain(value)


def new_table(title: str, columns: Sequence[str], left: int) -> Table:
    """Return an empty table in the style of all tables; the first `left` columns contain text, the others numbers.

    >>> [column.justify for column in new_table("Scores", ["method", "accuracy"], left=1).columns]
    ['left', 'right']
    """
    table = Table(title=title or None, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    table.pad_edge, table.collapse_padding = False, True
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position < left else "right", no_wrap=position >= left)
    return table
