"""Tables and verdicts for the terminal, made from finished runs."""

from collections.abc import Sequence
from math import inf, isfinite
from statistics import mean, stdev
from typing import NoReturn

from rich import box
from rich.table import Table

from fedtailor.analysis.formatting import PERCENT_METRICS, ScoreFormat, join_names, method_in_text, shorten
from fedtailor.analysis.statistics import SIGNIFICANCE_LEVEL, paired_t_test
from fedtailor.errors import RunError
from fedtailor.runs.run import MOMENTS, Run

_CHOICE_HEADINGS = {"last": "last", "best_validation": "best on\nvalidation", "best_test": "best on\ntest"}
_STATISTICS = {
    "weighted": "all samples",
    "mean": "mean of clients",
    "worst_tenth": "worst 10 %",
    "largest_tenth": "largest 10 %",
}
Groups = dict[str, list[Run]]  # registry key of a method -> its runs, one per seed


def run_table(run: Run) -> Table:
    """Return the table of one run: both moments, all choices of a round, and all metrics."""
    chosen = {(m, c): summary for m, choices in run.summary().items() for c, summary in choices.items() if summary}
    headings = [f"{moment}\n{_CHOICE_HEADINGS[choice]}" for moment, choice in chosen]
    title = f"{_title(run)} on {_describe(run)}; {_score_format(run).in_words}"
    table = new_table(title, ["", *headings], left=1)
    table.add_row("round", *(str(summary["round"]) for summary in chosen.values()))
    for statistic, label in _STATISTICS.items():
        table.add_row(label, *(_value(run.info["score"], summary[statistic]) for summary in chosen.values()))
    for name in (others := _other_metric_names([run])):
        shown = (_value(name, summary["metrics"][name]["weighted"]) for summary in chosen.values())
        table.add_row(ScoreFormat(name).name, *shown)
    up, down = (run.total(name) / 1e6 for name in ("bytes_up", "bytes_down"))
    diverged = run.records[-1].get("diverged", [])
    table.caption = f"{len(diverged)} clients diverged: try a smaller lr. " if diverged else ""
    table.caption += _failures(run)
    table.caption += f"{run.total('seconds'):.1f} s of training, engine {run.info['engine']}; "
    table.caption += f"{up:.1f} MB up and {down:.1f} MB down in total. "
    if (epsilon := run.records[-1].get("epsilon")) is not None:
        table.caption += f"ε = {epsilon:.3g} at δ = {run.experiment['channel']['delta']:g}. "
    table.caption += f"Most papers report best on test, which is optimistic.{_metric_notes(others, [run])}"
    return table


def comparison(runs: Sequence[Run]) -> Table:
    """Return the table of several methods, ranked by the score as trained in the last round."""
    _check_comparable(runs)
    groups, first = _by_method(runs), runs[0]
    seeds = max(len(group) for group in groups.values())
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed: differences may be chance"
    columns = ["method", "trained", "received", "worst 10 %", "> local", "MB up", "MB down", "s"]
    table = new_table(f"{_describe(first)}; {_score_format(first).in_words}; {over}", columns, left=1)
    for method in _ranked(groups):
        group = groups[method]
        wanted = [("trained", "weighted"), ("received", "weighted"), ("trained", "worst_tenth")]
        shown = [spread(first.info["score"], _over_seeds(group, *what)) for what in wanted]
        up, down, seconds = (mean(run.total(key) for run in group) for key in ("bytes_up", "bytes_down", "seconds"))
        better = _client_fraction(group, groups.get("local", []), "better_than_local") if method != "local" else ""
        table.add_row(_title(group[0]), *shown, better, f"{up / 1e6:.1f}", f"{down / 1e6:.1f}", f"{seconds:.1f}")
    table.caption = (
        "Last round, all test samples. trained: after local training, before averaging; received: after averaging. "
        "worst 10 %: mean of those clients, trained. > local: clients that score better than with local training, "
        "trained. s: seconds of training; methods differ in their number of steps."
    )
    return table


def other_metrics(runs: Sequence[Run]) -> Table:
    """Return the table of what `comparison` omits: the 10 % of clients with the most samples, and other metrics."""
    groups, first, names = _by_method(runs), runs[0], _other_metric_names(runs)
    table = new_table("", ["method", "largest 10 %", *(ScoreFormat(name).name for name in names)], left=1)
    for method in _ranked(groups):
        shown = [spread(first.info["score"], _over_seeds(groups[method], "trained", "largest_tenth"))]
        shown += [spread(metric, _over_seeds(groups[method], "trained", "weighted", metric)) for metric in names]
        table.add_row(_title(groups[method][0]), *shown)
    table.caption = (
        f"Last round, trained. largest 10 %: clients with the most training samples.{_metric_notes(names, runs)}"
    )
    return table


def verdict(runs: Sequence[Run]) -> str:
    """Return in words which method scores best, and whether its lead over local training is significant over seeds."""
    groups, first = _by_method(runs), runs[0]
    ranked = _ranked(groups)
    titles = {method: _title(group[0]) for method, group in groups.items()}
    score, top = first.info["score"], "highest" if first.info["higher_is_better"] else "lowest"
    shown = {
        method: spread(score, _over_seeds(groups[method], "trained", "weighted")) + ScoreFormat(score).unit
        for method in ranked
    }
    best = ranked[0]
    headline = f"{titles[best]} scores {top} ({shown[best]})"
    if "local" not in groups or len(ranked) == 1:
        return f"{headline}."
    other = best if best != "local" else ranked[1]  # the best federated method
    second = (
        f"the best federated method is {titles[other]} ({shown[other]})"
        if best == "local"
        else f"{method_in_text(titles['local'])} scores {shown['local']}"
    )
    local = groups["local"]
    better, worse = (_client_fraction(groups[other], local, f"{side}_than_local") for side in ("better", "worse"))
    clients = f"{better} of the clients score better with {titles[other]} than with local training, {worse} worse"
    diverged = [titles[name] for name in ranked if any(run.records[-1].get("diverged") for run in groups[name])]
    warning = f" Clients diverged with {join_names(diverged)}: try a smaller lr." if diverged else ""
    failed = [titles[name] for name in ranked if any(r.get("failed") for run in groups[name] for r in run.records)]
    warning += f" Clients failed and were excluded with {join_names(failed)}: see these runs." if failed else ""
    significance = _significance(groups[other], local)
    return f"{headline}; {second}. {clients}. {significance}{warning}{_identical_methods(groups)}"


def _failures(run: Run) -> str:
    """Return how many clients failed, with the first failure as an example."""
    failed = [(client, r["round"], reason) for r in run.records for client, reason in r.get("failed", {}).items()]
    if not failed:
        return ""
    client, number, reason = failed[0]
    clients = len({client for client, *_ in failed})
    return f"{clients} of {run.num_clients} clients failed in some round, client {client} in round {number}: {reason}. "


def _identical_methods(groups: Groups) -> str:
    """Name methods with bit-identical results, such as FedBN and FedAvg for a model without batch normalization."""
    results: dict[tuple[tuple[float, ...], ...], list[str]] = {}
    for group in groups.values():
        losses = [run.records[-1]["per_client"].get(f"loss_{moment}", {}) for run in group for moment in MOMENTS]
        if all(losses):
            results.setdefault(tuple(tuple(values.values()) for values in losses), []).append(_title(group[0]))
    identical = [" and ".join(titles) for titles in results.values() if len(titles) > 1]
    return f" Methods with identical results: {'; '.join(identical)}." if identical else ""


def _significance(group: Sequence[Run], local: Sequence[Run]) -> str:
    """Return whether a method differs from local training over seeds: a paired t test at the 5 % level."""
    statistic = ("trained", "weighted")
    pairs = [(_over_seeds([run], *statistic), _over_seeds([base], *statistic)) for run, base in _pairs(group, local)]
    gaps = [ours[0] - theirs[0] for ours, theirs in pairs if ours and theirs]
    if len(gaps) < 2:
        return "There is only one seed, so the difference may be chance."
    if not all(map(isfinite, gaps)):
        return "A run diverged, so the difference is undefined."
    significant = "" if paired_t_test(gaps) < SIGNIFICANCE_LEVEL else "not "
    return f"The difference is {significant}statistically significant over {len(gaps)} seeds."


def _title(run: Run) -> str:
    return shorten(run.method_title)


def _describe(run: Run) -> str:
    data = run.experiment["data"].get("name", "own data")
    return f"{data}, {run.num_clients} clients, {len(run.records)} rounds"


def _score_format(run: Run) -> ScoreFormat:
    return ScoreFormat(run.info["score"])


def _other_metric_names(runs: Sequence[Run]) -> list[str]:
    """Return the metrics besides the score, the loss last."""
    found = [summary["metrics"] for run in runs for moment in MOMENTS if (summary := run.summarize(moment))]
    return sorted({name: None for metrics in found for name in metrics}, key=lambda name: name == "loss")


def _metric_notes(others: Sequence[str], runs: Sequence[Run]) -> str:
    """Return how the other metrics are averaged, and for how many clients a metric is undefined."""
    names = ", ".join(ScoreFormat(name).name for name in others)
    notes = f" {names}: mean over clients, weighted by test samples." if others else ""
    last = [summary for run in runs if (summary := run.summarize("trained") or run.summarize("received"))]
    score = runs[0].info["score"]
    counts = [{name: m["clients"] for name, m in ({score: summary} | summary["metrics"]).items()} for summary in last]
    for name in (score, *others):
        missing = {max(clients.values()) - clients[name] for clients in counts if name in clients}
        if any(missing):
            many = f"{min(missing)} to {max(missing)} clients" if len(missing) > 1 else f"{max(missing)} clients"
            notes += f" {ScoreFormat(name).name} is undefined for {'1 client' if missing == {1} else many}."
    return notes


def _by_method(runs: Sequence[Run]) -> Groups:
    groups: Groups = {}
    for run in runs:
        groups.setdefault(run.method, []).append(run)
    return groups


def _check_comparable(runs: Sequence[Run]) -> None:
    """Raise an error unless the runs differ only in method and seed, and no two of them are equal."""

    def fail(why: str) -> NoReturn:
        raise RunError(f"These runs cannot be compared because {why}; show them one by one.")

    for key in sorted(runs[0].experiment.keys() - {"method", "seed", "data"}):
        found = sorted({str(run.experiment.get(key)) for run in runs})
        if len(found) > 1:
            fail(f"{key} is {' and '.join(found)}")
    if len({str({**run.experiment["data"], "seed": None}) for run in runs}) > 1:
        fail("their data differ")
    seen = [(run.experiment["method"]["name"], run.experiment["seed"]) for run in runs]
    for name, seed in seen:
        if seen.count((name, seed)) > 1:
            fail(f"{name} has two runs with seed {seed}")


def _ranked(groups: Groups) -> list[str]:
    """Return the methods with the best first; those that diverged or were not evaluated are last."""
    sign = 1 if next(iter(groups.values()))[0].info["higher_is_better"] else -1

    def sort_key(name: str) -> float:
        values = _over_seeds(groups[name], "trained", "weighted")
        return sign * mean(values) if values and all(map(isfinite, values)) else -inf

    return sorted(groups, key=sort_key, reverse=True)


def _over_seeds(group: Sequence[Run], moment: str, statistic: str, metric: str | None = None) -> list[float]:
    """Return a statistic of the last round, of the score or another metric, with one value per seed."""
    last = [summary for run in group if (summary := run.summarize(moment))]
    found = [summary if metric is None else summary["metrics"].get(metric, {}) for summary in last]
    return [values[statistic] for values in found if values.get(statistic) is not None]


def _pairs(group: Sequence[Run], local: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Return each run with the run of local training that has the same seed."""
    partners = {run.experiment["seed"]: run for run in local}
    return [(run, partners[run.experiment["seed"]]) for run in group if run.experiment["seed"] in partners]


def _client_fraction(group: Sequence[Run], local: Sequence[Run], name: str) -> str:
    """Return the fraction of clients that score better, or worse, than with local training, averaged over seeds."""
    summaries = [run.summarize("trained", local=base) for run, base in _pairs(group, local)]
    known = [summary[name] for summary in summaries if summary is not None and summary[name] is not None]
    return f"{100 * mean(known):.0f} %" if known else ""


def spread(metric: str, values: Sequence[float]) -> str:
    """Return the mean and the standard deviation of a metric over seeds for tables.

    >>> spread("accuracy", [0.7, 0.8]), spread("loss", [0.5])
    ('75.0 ± 7.1', '0.5')
    """
    if not values:
        return ""
    several = len(values) > 1 and all(map(isfinite, values))  # no deviation if a run diverged
    return _value(metric, mean(values)) + (f" ± {_value(metric, stdev(values))}" if several else "")


def _value(metric: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f}" if metric in PERCENT_METRICS else f"{value:.4g}"


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
