"""Tables of a comparison for the terminal, each narrow enough for 80 columns."""

from collections.abc import Callable, Sequence
from math import isfinite
from statistics import mean

from rich.table import Table

from fedtailor.analysis.client_gains import ClientGain, gains_over_local, has_known_uncertainty
from fedtailor.analysis.client_intervals import ClientMean, client_means, mean_gain, num_splits
from fedtailor.analysis.comparison import SAME_START
from fedtailor.analysis.formatting import ScoreFormat, count_of, format_megabytes, join_names, percent
from fedtailor.analysis.rows import VERDICTS, metric_group, moments_of, other_metric_names, over_seeds
from fedtailor.analysis.run_length import early_stopping_note
from fedtailor.analysis.run_summary import Comparison
from fedtailor.analysis.statistics import PairedTest
from fedtailor.analysis.tables import describe_runs, metric_notes, new_table, score_format, spread, untested_note
from fedtailor.analysis.target_costs import target_cost
from fedtailor.analysis.verdict import seeds_share_start
from fedtailor.runs.records import COMMON, GLOBAL, HELD_OUT, TRAIN
from fedtailor.runs.run import Run

_MOMENTS = ("trained", "received")  # as columns, after the method
_NONE = "–"
_MAX_CLIENT_ROWS = 100


def score_table(group: Comparison) -> Table:
    """Return the scores of several methods, ranked by their score after the last round."""
    first, gains, every = group.first, gains_over_local(group), _runs(group)
    seeds = max(len(summaries) for summaries in group.methods.values())
    over = f"mean ± standard deviation over {seeds} {group.unit}s" if seeds > 1 else "one seed"
    title = f"{describe_runs(every)}; {score_format(first).in_words}; {over}"

    def row(label: str, runs: Sequence[Run]) -> list[str]:
        ranked_by, score = group.ranked_by(label), first.info["score"]
        shown = [
            spread(score, over_seeds(runs, moment, "weighted")) + ("*" if moment == ranked_by else " ")
            for moment in _MOMENTS
        ]
        gain = [one.direction > 0 for one in gains.get(label, {}).values()]
        return [*shown, spread(score, over_seeds(runs, ranked_by, "worst_tenth")), percent(mean(gain)) if gain else ""]

    table = _table(group, title, [*_MOMENTS, "worst 10 %", "> local"], row)
    beyond = " by more than the uncertainty of their test samples" if has_known_uncertainty(group) else ""
    beyond = ", and whose 95 % interval over splits excludes 0" if group.is_repeated else beyond
    table.caption = (
        "Last round, all test samples. trained: after local training, before averaging; received: after averaging. "
        "*: the score that ranks the method, also in the next columns. worst 10 %: mean of these clients."
    )
    table.caption += f" > local: clients that score better than with local training{beyond}." if gains else ""
    table.caption += untested_note(first)
    if group.references:
        table.caption += f" Not ranked, as references: {join_names(group.references)}."
    table.caption += f" {SAME_START}" if seeds_share_start(group) else ""
    table.caption += f" {note}" if (note := early_stopping_note(every)) else ""
    return table


def client_table(group: Comparison) -> Table | None:
    """Return each client's score and its gain over local training, with intervals over redrawn splits of its samples;
    None without such splits."""
    if not group.is_repeated:
        return None
    clients, total = dict[str, list[ClientMean]](), num_splits(group)
    for found in client_means(group):
        clients.setdefault(found.name, []).append(found)
    has_counts = any(one.score.seeds < total for own in clients.values() for one in own)
    interval = "95 % interval"
    columns = ["", *_in_two_lines([group.fmt.name]), interval, "gain", interval, "verdict", *["n"] * has_counts]
    table = new_table(f"Clients; {group.fmt.in_words}, and gain over local training", columns, left=1)
    shown = list(clients)[: max(1, _MAX_CLIENT_ROWS // len(group.methods))]
    for name in shown:
        table.add_row(name)
        for one in clients[name]:
            table.add_row(*_client_cells(group, one.label, one.score, one.gain), *[str(one.score.seeds)] * has_counts)
        table.add_section()
    _add_mean_rows(table, group)
    table.columns[2].no_wrap = table.columns[4].no_wrap = False  # rather than truncating numbers with many digits
    table.caption = _client_caption(total, has_counts, len(clients) - len(shown))
    return table


def _add_mean_rows(table: Table, group: Comparison) -> None:
    """Add the mean over the clients that have a score with every method in every split."""
    means = {label: found for label in group.methods if (found := mean_gain(group, label)) is not None}
    if means:
        table.add_row(f"Mean of {count_of(next(iter(means.values())).clients, 'client')}")
    for label, found in means.items():
        table.add_row(*_client_cells(group, label, found.score, None if label == group.baseline else found.gain))


def _client_cells(group: Comparison, label: str, score: PairedTest, gain: ClientGain | None) -> list[str]:
    cells = [f"  {label}", group.fmt.plain(score.mean), _ends(score.interval, group.fmt.plain)]
    if gain is None:
        return [*cells, "", "", ""]
    amount = group.fmt.signed(gain.gain) if isfinite(gain.gain) else "diverged"
    interval = None if gain.test is None else gain.test.interval
    verdict = VERDICTS[gain.direction] if gain.direction else "unclear"
    return [*cells, amount, _ends(interval, group.fmt.signed), verdict]


def _client_caption(splits: int, has_counts: bool, omitted: int) -> str:
    counts = " n: splits in which the score is defined; only these count." if has_counts else ""
    more = f" {omitted} more clients: rows('client_mean')." if omitted else ""
    return (
        f"Means over {splits} redrawn splits of each client's samples into training and test samples. gain: over local "
        "training in the same splits; positive is better. unclear: no clear difference, the interval contains 0."
        f"{counts} Splits overlap, so all intervals are those of the corrected resampled t test (Nadeau and Bengio "
        f"2003). Each holds for one client and one method alone.{more}"
    )


def _ends(interval: tuple[float, float] | None, text: Callable[[float], str]) -> str:
    return _NONE if interval is None else " to ".join(map(text, interval))


def best_cells(group: Comparison) -> set[tuple[int, int]]:
    """Return (row, column) in `score_table` of the best score and of those not significantly worse than it."""
    ranking = group.ranking
    if ranking is None:
        return set()
    similar = {found.other for found in ranking.differences if found.p is not None and found.direction <= 0}
    labels = {ranking.best, *similar}
    columns = {label: 1 + _MOMENTS.index(group.ranked_by(label)) for label in labels}
    return {(row, columns[label]) for row, label in enumerate(group.methods) if label in labels}


def metric_table(group: Comparison) -> Table:
    """Return what `score_table` omits: the 10 % of clients with the most samples, and the other metrics."""
    every, score = _runs(group), group.first.info["score"]
    names = [name for name in other_metric_names(every) if not metric_group(name, every[0])]

    def row(label: str, runs: Sequence[Run]) -> list[str]:
        moment = group.ranked_by(label)
        largest = spread(score, over_seeds(runs, moment, "largest_tenth"))
        return [largest, *(spread(metric, over_seeds(runs, moment, "weighted", metric)) for metric in names)]

    table = _table(group, "", _in_two_lines(["largest 10 %", *(ScoreFormat(name).name for name in names)]), row)
    table.caption = (
        "Last round, at the moment that ranks the method. largest 10 %: clients with the most training samples."
        f"{metric_notes(names, every)}"
    )
    return table


def generalization_table(group: Comparison) -> Table | None:
    """Return the scores on the common test set and of held-out clients at both moments; None if there are none."""
    return _prefixed_table(group, (COMMON, HELD_OUT), "Beyond the clients' own test samples")


def train_and_global_table(group: Comparison) -> Table | None:
    """Return the scores on training samples and of the global model; None if there are none."""
    return _prefixed_table(group, (TRAIN, GLOBAL), "Training samples or global model")


def _prefixed_table(group: Comparison, prefixes: Sequence[str], title: str) -> Table | None:
    """Return the scores whose names have one of these prefixes, at the moments at which they are evaluated."""
    every, score = _runs(group), group.first.info["score"]
    known = other_metric_names(every)
    names = {f"{p}{score}": p for p in prefixes if f"{p}{score}" in known and metric_group(f"{p}{score}", every[0])}
    if not names:
        return None
    columns = {
        f"{ScoreFormat(name).name.partition(' ')[0]} {moment}": (name, moment)
        for name, prefix in names.items()
        for moment in moments_of(prefix)
    }

    def row(label: str, runs: Sequence[Run]) -> list[str]:
        return [spread(name, over_seeds(runs, moment, "weighted", name)) or _NONE for name, moment in columns.values()]

    table = _table(group, f"{title}; {score_format(group.first).in_words}", _in_two_lines([*columns]), row)
    table.caption = f"Last round.{metric_notes(list(names), every)}"
    return table


def cost_table(group: Comparison, target: float | None = None) -> Table:
    """Return bytes and seconds of a run and, with a target score, what a method needs to reach it."""
    fmt = score_format(group.first)

    def row(label: str, runs: Sequence[Run]) -> list[str]:
        up, down, seconds = (mean(run.total(key) for run in runs) for key in ("bytes_up", "bytes_down", "seconds"))
        megabytes = [_NONE] * 2 if group.is_centralized(label) else [format_megabytes(up), format_megabytes(down)]
        shown = [*megabytes, f"{seconds:.1f}"]
        if target is None:
            return shown
        cost = target_cost(group, label, target)
        sent = _NONE if cost.bytes is None else format_megabytes(cost.bytes)
        rounds, time = (_NONE if value is None else f"{value:.1f}" for value in (cost.rounds, cost.seconds))
        return [*shown, rounds, sent, time, f"{cost.seeds_reaching} of {cost.seeds}"]

    to_target = [] if target is None else ["rounds to target", "MB to target", "s to target", "seeds reaching"]
    table = _table(group, "Cost of a run", ["MB up", "MB down", "s", *_in_two_lines(to_target)], row)
    table.caption = "s: seconds of training; methods differ in their number of steps."
    if any(map(group.is_centralized, group.methods)):
        table.caption += " Centralized training sends data instead of models; these bytes are not counted."
    if target is not None:
        table.caption += (
            f" target: the first evaluated round with {fmt.name} {fmt.text(target)}, at the moment that ranks the "
            "method; MB up and down. Means over the seeds that reach it, so methods with fewer such seeds look better "
            "than they are."
        )
    return table


def _in_two_lines(headings: Sequence[str]) -> list[str]:
    return [heading.replace(" ", "\n", 1) for heading in headings]


def _runs(group: Comparison) -> list[Run]:
    return [summary.run for summary in group.summaries]


def _table(
    group: Comparison, title: str, columns: Sequence[str], row: Callable[[str, Sequence[Run]], list[str]]
) -> Table:
    """Return a table with one row per method; references are separated from the methods."""
    table = new_table(title, ["method", *columns], left=1)
    for label, summaries in group.methods.items():
        if label in group.references[:1]:
            table.add_section()
        table.add_row(label, *row(label, [summary.run for summary in summaries]))
    # The first column may break lines between words, but not inside a word.
    table.columns[0].min_width = max(len(word) for label in group.methods for word in label.split())
    return table
