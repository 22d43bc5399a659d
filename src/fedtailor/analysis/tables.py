"""Tables for the terminal, made from finished runs."""

from collections.abc import Sequence
from math import isfinite
from statistics import mean, stdev

from rich import box
from rich.table import Table

from fedtailor.analysis.client_gains import gains_over_local, has_known_uncertainty
from fedtailor.analysis.comparison import SAME_START
from fedtailor.analysis.formatting import ScoreFormat, count_of, join_names, percent, shorten
from fedtailor.analysis.rows import metric_group, other_metric_names, over_seeds
from fedtailor.analysis.run_length import early_stopping_note, rounds_in_words
from fedtailor.analysis.run_summary import Comparison
from fedtailor.analysis.target_costs import target_cost
from fedtailor.analysis.verdict import seeds_share_start
from fedtailor.runs.run import Run

_CHOICE_HEADINGS = {"last": "last", "best_validation": "best on\nvalidation", "best_test": "best on\ntest"}
_MOMENT_COLUMNS = ("trained", "received")  # after the method in a comparison
_STATISTICS = {
    "weighted": "all samples",
    "mean": "mean of clients",
    "worst_tenth": "worst 10 %",
    "largest_tenth": "largest 10 %",
}


def run_table(run: Run) -> Table:
    """Return the table of one run: both moments, all choices of a round, and all metrics."""
    chosen = {(m, c): summary for m, choices in run.summary().items() for c, summary in choices.items() if summary}
    headings = [f"{moment}\n{_CHOICE_HEADINGS[choice]}" for moment, choice in chosen]
    title = f"{shorten(run.method_title)} on {_describe([run])}; {_score_format(run).in_words}"
    table = new_table(title, ["", *headings], left=1)
    table.add_row("round", *(str(summary["round"]) for summary in chosen.values()))
    for statistic, label in _STATISTICS.items():
        table.add_row(label, *(_value(run.info["score"], summary[statistic]) for summary in chosen.values()))
    for name in (others := other_metric_names([run])):
        shown = (_value(name, summary["metrics"][name]["weighted"]) for summary in chosen.values())
        table.add_row(ScoreFormat(name).name, *shown)
    up, down = (run.total(name) / 1e6 for name in ("bytes_up", "bytes_down"))
    diverged = run.records[-1].get("diverged", [])
    table.caption = f"{len(diverged)} clients diverged: try a smaller lr. " if diverged else ""
    table.caption += _failures(run)
    table.caption += _as_sentence(early_stopping_note([run]))
    table.caption += f"{run.total('seconds'):.1f} s of training, engine {run.info['engine']}; "
    table.caption += f"{up:.1f} MB up and {down:.1f} MB down in total. "
    if (epsilon := run.records[-1].get("epsilon")) is not None:
        table.caption += f"ε = {epsilon:.3g} at δ = {run.experiment['channel']['delta']:g}. "
    table.caption += (
        f"Most papers report best on test, which is optimistic.{_untested(run)}{_metric_notes(others, [run])}"
    )
    return table


def comparison_table(group: Comparison) -> Table:
    """Return the table of several methods, ranked by their score after the last round."""
    first, gains = group.first, gains_over_local(group)
    seeds = max(len(summaries) for summaries in group.methods.values())
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    columns = ["method", *_MOMENT_COLUMNS, "worst 10 %", "> local", "MB up", "MB down", "s"]
    every = [summary.run for summary in group.summaries]
    table = new_table(f"{_describe(every)}; {_score_format(first).in_words}; {over}", columns, left=1)
    for label, summaries in group.methods.items():
        if label in group.references[:1]:
            table.add_section()
        runs = [summary.run for summary in summaries]
        ranked_by = group.ranked_by(label)
        shown = [
            spread(first.info["score"], over_seeds(runs, moment, "weighted")) + ("*" if moment == ranked_by else " ")
            for moment in _MOMENT_COLUMNS
        ]
        shown.append(spread(first.info["score"], over_seeds(runs, ranked_by, "worst_tenth")))
        up, down, seconds = (mean(run.total(key) for run in runs) for key in ("bytes_up", "bytes_down", "seconds"))
        gain = [one.direction > 0 for one in gains.get(label, {}).values()]
        better = percent(mean(gain)) if gain else ""
        table.add_row(label, *shown, better, f"{up / 1e6:.1f}", f"{down / 1e6:.1f}", f"{seconds:.1f}")
    beyond = " by more than the uncertainty of their test samples" if has_known_uncertainty(group) else ""
    table.caption = (
        "Last round, all test samples. trained: after local training, before averaging; received: after averaging. "
        "*: the score that ranks the method, also in the next two columns. worst 10 %: mean of these clients. "
        f"> local: clients that score better than with local training{beyond}. s: seconds of training; methods differ "
        f"in their number of steps.{_untested(first)}"
    )
    if group.references:
        table.caption += f" Not ranked, as references: {join_names(group.references)}."
    table.caption += f" {SAME_START}" if seeds_share_start(group) else ""
    table.caption += f" {note}" if (note := early_stopping_note(every)) else ""
    return _keep_words(table)


def best_cells(group: Comparison) -> set[tuple[int, int]]:
    """Return (row, column) in `comparison_table` of the best score and of those not significantly worse than it."""
    ranking = group.ranking
    if ranking is None:
        return set()
    similar = {found.other for found in ranking.differences if found.p is not None and found.direction <= 0}
    labels = {ranking.best, *similar}
    columns = {label: 1 + _MOMENT_COLUMNS.index(group.ranked_by(label)) for label in labels}
    return {(row, columns[label]) for row, label in enumerate(group.methods) if label in labels}


def target_table(group: Comparison, target: float) -> Table:
    """Return the table of what each method needs to reach a target score."""
    fmt = _score_format(group.first)
    columns = ["method", "rounds", "MB", "s", "seeds"]
    table = new_table(f"To reach {fmt.name} {fmt.text(target)}", columns, left=1)
    for label in group.methods:
        cost = target_cost(group, label, target)
        seeds = f"{cost.seeds_reaching} of {cost.seeds}"
        if cost.rounds is None or cost.bytes is None or cost.seconds is None:
            table.add_row(label, "never", "–", "–", seeds)
        else:
            table.add_row(label, f"{cost.rounds:.1f}", f"{cost.bytes / 1e6:.1f}", f"{cost.seconds:.1f}", seeds)
    table.caption = (
        "First evaluated round whose score, at the moment that ranks the method, reaches the target. MB: up and down. "
        "Means over the seeds that reach it, so methods with fewer such seeds look better than they are."
    )
    return table


def other_metrics(group: Comparison) -> Table:
    """Return the table of what `comparison_table` omits: the 10 % of clients with the most samples, and other
    metrics; on the common test set and of held-out clients, only the score."""
    every, score = [summary.run for summary in group.summaries], group.first.info["score"]
    names = [n for n in other_metric_names(every) if metric_group(n, every[0]) in ("", n.removesuffix(score))]
    headings = ["largest 10 %", *(ScoreFormat(name).name for name in names)]
    table = new_table("", ["method", *(heading.replace(" ", "\n", 1) for heading in headings)], left=1)
    for label, summaries in group.methods.items():
        runs = [summary.run for summary in summaries]
        moment = group.ranked_by(label)
        shown = [spread(score, over_seeds(runs, moment, "largest_tenth"))]
        shown += [spread(metric, over_seeds(runs, moment, "weighted", metric)) for metric in names]
        table.add_row(label, *shown)
    table.caption = (
        "Last round, at the moment that ranks the method. largest 10 %: clients with the most training samples."
        f"{_metric_notes(names, every)}"
    )
    return _keep_words(table)


def _untested(run: Run) -> str:
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


def _describe(runs: Sequence[Run]) -> str:
    data, held_out = runs[0].experiment["data"].get("name", "own data"), len(runs[0].held_out_clients)
    others = f" and {held_out} held out" if held_out else ""
    return f"{data}, {runs[0].num_clients} clients{others}, {rounds_in_words(runs)}"


def _as_sentence(note: str) -> str:
    return f"{note} " if note else ""


def _score_format(run: Run) -> ScoreFormat:
    return ScoreFormat(run.info["score"])


def _metric_notes(others: Sequence[str], runs: Sequence[Run]) -> str:
    """Return how the other metrics are averaged, and for how many clients a metric is undefined."""
    notes, info = "", runs[0].info
    own = [ScoreFormat(name).name for name in others if not metric_group(name, runs[0])]
    notes += f" {', '.join(own)}: mean over clients, weighted by test samples." if own else ""
    if "common_test" in info:
        samples = f"{count_of(info['common_test'], 'test sample')} that belong to no client"
        notes += f" common: mean over clients, all on the same {samples}."
    if held_out := len(runs[0].held_out_clients):
        which = f"{count_of(held_out, 'client')} that never trained with the others"
        notes += f" held-out: {which}; received: when they join, trained: after one round."
    last = [summary for run in runs if (summary := run.summarize("trained") or run.summarize("received"))]
    score = info["score"]
    counts = [{name: m["clients"] for name, m in ({score: summary} | summary["metrics"]).items()} for summary in last]
    for name in (score, *others):
        kind = metric_group(name, runs[0])  # which clients a metric covers depends on it
        covered = [{n: many for n, many in clients.items() if metric_group(n, runs[0]) == kind} for clients in counts]
        missing = {max(clients.values()) - clients[name] for clients in covered if name in clients}
        if any(missing):
            many = f"{min(missing)} to {max(missing)} clients" if len(missing) > 1 else f"{max(missing)} clients"
            notes += f" {ScoreFormat(name).name} is undefined for {'1 client' if missing == {1} else many}."
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
    deviation = _value(metric, stdev(values)) if ScoreFormat(metric).unit else f"{stdev(values):.2g}"
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


def _keep_words(table: Table) -> Table:
    """Let the first column break lines between words, but never inside a word, in narrow terminals."""
    table.columns[0].min_width = max(
        (len(word) for cell in table.columns[0].cells for word in str(cell).split()), default=0
    )
    return table
