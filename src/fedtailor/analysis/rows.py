"""Results as plain rows, for CSV, JSON, and pandas: scores are fractions, sizes bytes, and times seconds."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from fedtailor.analysis.client_gains import gains_over_local
from fedtailor.analysis.client_intervals import client_means
from fedtailor.analysis.formatting import split_prefix
from fedtailor.analysis.run_summary import Comparison
from fedtailor.analysis.target_costs import target_cost
from fedtailor.runs.records import COMMON, GLOBAL, HELD_OUT
from fedtailor.runs.run import CHOICES, MOMENTS, Run

Row = dict[str, Any]
VERDICTS = {1: "gains", 0: "no clear difference", -1: "loses"}  # by the direction of a client's gain
_STATISTICS = {  # column -> statistic of a summary
    "client_mean": "mean", "worst_tenth": "worst_tenth", "largest_tenth": "largest_tenth",
    "largest_tenth_weighted": "largest_tenth_weighted",
}  # fmt: skip


def method_rows(group: Comparison, target: float | None = None) -> list[Row]:
    """Return one row per method, the best first: means over seeds after the last round.

    `score` is the one that ranks the method; `p_value` and `lead_of_best` compare it with the best method. Scores and
    metrics are over all test samples; with `client_mean` in their names, they are means over clients.
    """
    gains, ranking = gains_over_local(group), group.ranking
    tests = {found.other: found for found in ranking.differences} if ranking is not None else {}
    rows = []
    for label, summaries in group.methods.items():
        runs, moment = [summary.run for summary in summaries], group.ranked_by(label)
        row: Row = {"method": label, "is_reference": label in group.references, "ranked_by": moment}
        row["seeds"] = len(runs)
        row |= mean_and_std("score", group.scores(label))
        for name in ("trained", "received"):
            row |= mean_and_std(name, over_seeds(runs, name, "weighted"))
        for column, statistic in _STATISTICS.items():
            row |= mean_and_std(column, over_seeds(runs, moment, statistic))
        for metric in other_metric_names(runs):
            if not (prefix := metric_group(metric, runs[0])):
                row |= mean_and_std(metric, over_seeds(runs, moment, "weighted", metric))
                row |= mean_and_std(f"{metric}_client_mean", over_seeds(runs, moment, "mean", metric))
            elif metric == f"{prefix}{runs[0].info['score']}":
                for name in moments_of(prefix):
                    row |= mean_and_std(f"{metric}_{name}", over_seeds(runs, name, "weighted", metric))
        gain = [one.direction for one in gains.get(label, {}).values()]
        row["better_than_local"] = sum(sign > 0 for sign in gain) / len(gain) if gain else None
        row["worse_than_local"] = sum(sign < 0 for sign in gain) / len(gain) if gain else None
        row["lead_of_best"] = tests[label].test.mean if label in tests and tests[label].test.seeds else None
        row["p_value"] = tests[label].p if label in tests else None
        costs = {key: mean(run.total(key) for run in runs) for key in ("bytes_up", "bytes_down", "seconds")}
        row |= costs | (dict.fromkeys(["bytes_up", "bytes_down"]) if group.is_centralized(label) else {})
        if target is not None:
            cost = target_cost(group, label, target)
            row |= {"target": target, "seeds_reaching_target": cost.seeds_reaching, "rounds_to_target": cost.rounds}
            row |= {"bytes_to_target": cost.bytes, "seconds_to_target": cost.seconds}
        rows.append(row)
    return rows


def seed_rows(group: Comparison) -> list[Row]:
    """Return one row per method and seed."""
    rows = []
    for label, summaries in group.methods.items():
        for summary in summaries:
            row: Row = {"method": label, "seed": summary.seed, "ranked_by": summary.ranked_by}
            row |= {"score": summary.score(), **{moment: summary.score(moment) for moment in ("trained", "received")}}
            last = summary.run.summarize(summary.ranked_by) or {}
            row |= {column: last.get(statistic) for column, statistic in _STATISTICS.items()}
            row |= _honest(last.get("honest"))
            for name, values in last.get("metrics", {}).items():
                row |= {name: values["weighted"], f"{name}_client_mean": values["mean"]}
            row |= {key: summary.run.total(key) for key in ("bytes_up", "bytes_down", "seconds")}
            rows.append(row | {"rounds": len(summary.run.records)})
    return rows


def client_rows(group: Comparison) -> list[Row]:
    """Return one row per method, seed, and client with test samples."""
    rows = []
    for label, summaries in group.methods.items():
        for summary in summaries:
            clients = summary.run.info["clients"]
            for client in sorted({client for values in summary.last.values() for client in values}):
                row: Row = {"method": label, "seed": summary.seed, "client": client, "name": clients[client]["name"]}
                row |= {f"{kind}_samples": clients[client][kind] for kind in ("train", "test")}
                row |= {"score": summary.ranked_scores.get(client)}
                rows.append(row | {moment: summary.last[moment].get(client) for moment in ("trained", "received")})
    return rows


def client_mean_rows(group: Comparison) -> list[Row]:
    """Return one row per client and method: means over seeds, or over redrawn splits, with 95 % intervals for the
    latter. `gain` is over local training in the same splits, positive if it is better."""
    rows = []
    for found in client_means(group):
        gain, test = found.gain, None if found.gain is None else found.gain.test
        row: Row = {"method": found.label, "client": found.client[1], "name": found.name}
        row |= {"train_samples": found.train, "test_samples": found.test, f"{group.unit}s": found.score.seeds}
        row |= {"score": found.score.mean} | _ends("score", found.score.interval)
        row |= {"gain": None if gain is None else gain.gain} | _ends("gain", None if test is None else test.interval)
        rows.append(row | {"verdict": None if gain is None else VERDICTS[gain.direction]})
    return rows


def _ends(name: str, interval: tuple[float, float] | None) -> Row:
    return dict(zip((f"{name}_low", f"{name}_high"), interval or (None, None), strict=True))


def run_rows(run: Run) -> list[Row]:
    """Return one row per moment and choice of a round, for one run."""
    rows = []
    for moment in MOMENTS:
        for choice in CHOICES:
            if (summary := run.summarize(moment, choice)) is not None:
                metrics = {name: values["weighted"] for name, values in summary.pop("metrics").items()}
                honest = _honest(summary.pop("honest", None))
                rows.append({"moment": moment, "choice": choice, **summary, **honest, **metrics})
    return rows


def _honest(found: Mapping[str, Any] | None) -> Row:
    """Return the scores of honest clients, if some clients were malicious."""
    return {} if found is None else {"honest": found["weighted"], "honest_client_mean": found["mean"]}


def over_seeds(runs: Sequence[Run], moment: str, statistic: str, metric: str | None = None) -> list[float]:
    """Return a statistic of the last round, of the score or another metric, with one value per seed."""
    last = [summary for run in runs if (summary := run.summarize(moment))]
    found = [summary if metric is None else summary["metrics"].get(metric, {}) for summary in last]
    return [values[statistic] for values in found if values.get(statistic) is not None]


def other_metric_names(runs: Sequence[Run]) -> list[str]:
    """Return the metrics besides the score: those of the clients, then those of each `metric_group`, each with the loss
    last."""
    found = [summary["metrics"] for run in runs for moment in MOMENTS if (summary := run.summarize(moment))]
    names = {name: metric_group(name, runs[0]) for metrics in found for name in metrics}
    return sorted(names, key=lambda name: (names[name], name == f"{names[name]}loss"))


def metric_group(metric: str, run: Run) -> str:
    """Return the prefix of a metric on the common test set, of held-out clients, on training samples, or of the global
    model; empty for personal models on their clients' test samples."""
    prefix, is_there = split_prefix(metric)[0], {COMMON: "common_test" in run.info, HELD_OUT: run.held_out_clients}
    return prefix if is_there.get(prefix, True) else ""


def moments_of(prefix: str) -> tuple[str, ...]:
    """Return the moments at which the metrics of a group are evaluated; the global model exists after aggregation only.

    >>> moments_of("train_"), moments_of("global_")
    (('trained', 'received'), ('received',))
    """
    return ("received",) if prefix == GLOBAL else ("trained", "received")


def mean_and_std(name: str, values: Sequence[float]) -> Row:
    """Return the mean of values under a name, and their standard deviation if there are several.

    >>> mean_and_std("score", [1.0, 3.0])
    {'score': 2.0, 'score_std': 1.4142135623730951}
    """
    return {name: mean(values) if values else None, f"{name}_std": stdev(values) if len(values) > 1 else None}
