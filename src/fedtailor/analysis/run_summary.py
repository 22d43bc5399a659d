"""Summaries of runs, small enough to hold many runs of a thousand clients in memory, and groups of comparable runs."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from statistics import fmean, mean

from fedtailor.analysis.comparability import NEUTRAL_SETTINGS, experiment_key, is_repeated, samples_key, split_key
from fedtailor.analysis.comparison import Ranking, Unit, common_seeds, compare_with_best, rank
from fedtailor.analysis.formatting import ScoreFormat, setting_labels, shorten
from fedtailor.analysis.statistics import mean_interval
from fedtailor.errors import RunError
from fedtailor.runs.records import Record, Values
from fedtailor.runs.run import MOMENTS, Run
from fedtailor.runs.summaries import weighted_mean
from fedtailor.runs.toml import flatten_settings

Client = tuple[str, int]  # key of the clients' samples, and client number; seeds can split the data differently


@dataclass(frozen=True)
class Curve:
    """The score over all test samples after each evaluated round."""

    positions: Sequence[int]  # indices of the rounds, from 0
    scores: Sequence[float]


@dataclass(frozen=True, eq=False)
class RunSummary:
    """What tables and figures need from one run."""

    run: Run
    label: str  # the method's proper name, with the fields that differ if a method has several settings
    split: str  # key of the data split
    samples: str  # key of the clients' samples: equal in redrawn splits of the same clients, otherwise the split
    test_sizes: Sequence[int]  # test samples per client
    last: Mapping[str, Values]  # moment -> client -> score after the last round
    curves: Mapping[str, Curve]  # by moment
    bytes: Sequence[int]  # sent in both directions, cumulative over rounds
    bytes_up: int  # sent by clients, in total
    num_selected: int  # clients that received a message, summed over rounds, whether they answered or not
    seconds: Sequence[float]  # of training, cumulative over rounds
    failed: Sequence[tuple[int, int, str]]  # client, round, reason
    missed: Sequence[tuple[int, int, str]]
    diverged: bool
    epsilon: float | None

    @property
    def seed(self) -> int:
        return int(self.run.experiment["seed"])

    @property
    def pair_key(self) -> tuple[int, str]:
        """Seed and split; runs of two methods are paired if these are equal."""
        return self.seed, self.split

    @property
    def ranked_by(self) -> str:
        """The moment that ranks the method: "received" for methods with one common model, "trained" for most others."""
        return str(self.run.info["ranked_by"])

    @property
    def ranked_scores(self) -> Values:
        """The clients' scores after the last round, at the moment that ranks the method."""
        return self.last[self.ranked_by]

    @property
    def num_scored(self) -> tuple[int, int]:
        """The number of clients with a score, and the number of clients with test samples."""
        scored = sum(self.test_sizes[client] > 0 for client in self.ranked_scores)
        return scored, sum(size > 0 for size in self.test_sizes)

    def score(self, moment: str | None = None) -> float | None:
        """Return the score over all test samples of the clients that have a score after the last round, by default at
        the moment that ranks the method."""
        return weighted_mean(self.last[moment or self.ranked_by], self.test_sizes)

    def name(self, client: int) -> str:
        return shorten(str(self.run.info["clients"][client]["name"]))


def summarize_run(run: Run, label: str) -> RunSummary:
    """Return the summary of a run; its records are expanded one by one and not kept."""
    expanded = replace(run, records=[run.records[index] for index in range(len(run.records))])
    test_sizes = [client["test"] for client in run.info["clients"]]
    cumulative_bytes, cumulative_seconds, total, time = [], [], 0, 0.0
    for record in expanded.records:
        total, time = total + int(record["bytes_up"] + record["bytes_down"]), time + record["seconds"]
        cumulative_bytes.append(total)
        cumulative_seconds.append(time)
    return RunSummary(
        run=run,
        label=label,
        split=split_key(run),
        samples=samples_key(run),
        test_sizes=test_sizes,
        last={moment: expanded.scores(moment) for moment in MOMENTS},
        curves={moment: _curve(expanded, moment, test_sizes) for moment in MOMENTS},
        bytes=cumulative_bytes,
        bytes_up=int(sum(record["bytes_up"] for record in expanded.records)),
        num_selected=sum(len(r.get(kind, ())) for r in expanded.records for kind in ("clients", "failed", "missed")),
        seconds=cumulative_seconds,
        failed=tuple(_events(expanded.records, "failed")),
        missed=tuple(_events(expanded.records, "missed")),
        diverged=bool(expanded.records and expanded.records[-1].get("diverged")),
        epsilon=expanded.records[-1].get("epsilon") if expanded.records else None,
    )


def _curve(run: Run, moment: str, test_sizes: Sequence[int]) -> Curve:
    positions, scores = [], []
    known = run.trajectory(moment, run.info["score"])
    for position, (record, values) in enumerate(zip(run.records, known, strict=True)):
        value = weighted_mean(values, test_sizes) if run.is_evaluated(record, moment) else None
        if value is not None:
            positions.append(position)
            scores.append(value)
    return Curve(positions, scores)


def _events(records: Sequence[Record], kind: str) -> Iterator[tuple[int, int, str]]:
    for record in records:
        for client, reason in record.get(kind, {}).items():
            yield int(client), int(record["round"]), str(reason)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs that differ only in method and seed."""

    methods: Mapping[str, Sequence[RunSummary]]  # label -> runs, the best method first; only common seeds, if any
    excluded: Sequence[RunSummary]  # runs with seeds that not all methods have
    differs_in: str = ""  # settings that distinguish this group from other groups

    @property
    def first(self) -> Run:
        return next(iter(self.methods.values()))[0].run

    @property
    def fmt(self) -> ScoreFormat:
        return ScoreFormat(self.first.info["score"])

    @property
    def sign(self) -> int:
        return 1 if self.first.info["higher_is_better"] else -1

    @property
    def baseline(self) -> str | None:
        """The label of local training, or None; training in every round goes before training in sampled rounds."""
        settings = {label: runs[0].run.experiment["method"] for label, runs in self.methods.items()}
        local = [label for label, method in settings.items() if method["name"] == "local"]
        return min(local, key=lambda label: bool(settings[label].get("sampled")), default=None)

    @cached_property
    def references(self) -> list[str]:
        """Labels that are shown but not ranked: centralized training, which needs all data in one place, and local
        training in sampled rounds if local training in every round is the baseline."""
        return [label for label in self.methods if self.is_centralized(label) or self._is_sampled_local(label)]

    @property
    def ranked(self) -> list[str]:
        """Labels of the methods that are ranked, the best first: all except the references."""
        return [label for label in self.methods if label not in self.references]

    def is_centralized(self, label: str) -> bool:
        """Return whether a label is centralized training, whose bytes are not those of a federated method."""
        return str(self.methods[label][0].run.experiment["method"]["name"]) == "centralized"

    def _is_sampled_local(self, label: str) -> bool:
        method = self.methods[label][0].run.experiment["method"]
        return method["name"] == "local" and label != self.baseline and bool(method.get("sampled"))

    @property
    def summaries(self) -> list[RunSummary]:
        return [summary for summaries in self.methods.values() for summary in summaries]

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({summary.seed for summary in self.summaries})

    @cached_property
    def is_repeated(self) -> bool:
        """Whether all runs have the same clients with their samples split anew into training and test samples."""
        same = len({summary.samples for summary in self.summaries}) == 1
        return same and all(is_repeated(summary.run) for summary in self.summaries)

    @property
    def unit(self) -> Unit:
        """What is repeated: the seed, or the split of the clients' samples."""
        return "split" if self.is_repeated else "seed"

    @cached_property
    def test_to_train(self) -> float:
        """The ratio of test to training samples over all clients, if redrawn splits overlap; otherwise 0."""
        return split_ratio(self.summaries) if self.is_repeated else 0.0

    @cached_property
    def shares_seeds(self) -> bool:
        """Whether all methods have the same seeds and splits; False if no seed is common to all methods."""
        return len({frozenset(summary.pair_key for summary in runs) for runs in self.methods.values()}) == 1

    @cached_property
    def scored(self) -> list[str]:
        """Labels of the methods that have a score, the best first."""
        return [label for label in self.methods if self.score(label) is not None]

    def ranked_by(self, label: str) -> str:
        """Return the moment that ranks a method."""
        return self.methods[label][0].ranked_by

    def scores(self, label: str, moment: str | None = None) -> list[float]:
        """Return one score per seed, by default at the moment that ranks the method."""
        scores = (summary.score(moment) for summary in self.methods[label])
        return [score for score in scores if score is not None]

    def score(self, label: str, moment: str | None = None) -> float | None:
        """Return the mean over seeds; None if a run diverged or was not evaluated."""
        scores = self.scores(label, moment)
        return mean(scores) if scores and all(map(isfinite, scores)) else None

    def interval(self, label: str, moment: str | None = None) -> tuple[float, float] | None:
        """Return the 95 % interval of the mean over seeds or splits by Student's t, clipped to possible scores;
        None for fewer than three seeds."""
        if self.score(label, moment) is None:
            return None
        return self.clip(mean_interval(self.scores(label, moment), self.test_to_train))

    def clip(self, interval: tuple[float, float] | None, of_gain: bool = False) -> tuple[float, float] | None:
        """Return an interval of scores, or of differences between scores, clipped to possible values."""
        low, high = self.fmt.bounds
        low, high = (low - high, high - low) if of_gain else (low, high)
        return None if interval is None else (max(low, interval[0]), min(high, interval[1]))

    @cached_property
    def ranking(self) -> Ranking | None:
        """The best method and its differences to the others; None if no method has a score."""
        scores = {label: score for label in self.ranked if (score := self.score(label)) is not None}
        if not scores:
            return None
        best, *others = scores
        pairs = {other: [weighted for weighted, _ in self.paired_scores(best, other)] for other in others}
        differences = compare_with_best(scores, pairs, self.sign > 0, self.test_to_train)
        return Ranking(self.fmt, self.sign > 0, best, scores[best], differences, unit=self.unit)

    def run_pairs(self, label: str, other: str) -> list[tuple[RunSummary, RunSummary]]:
        """Return the runs of two methods that have the same seed and split."""
        partners = {summary.pair_key: summary for summary in self.methods[other]}
        return [(ours, partners[ours.pair_key]) for ours in self.methods[label] if ours.pair_key in partners]

    def paired_scores(self, label: str, other: str) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        """Return for each common seed the scores of two methods over the clients that both have: first weighted by
        test samples, then with equal weight for all clients."""
        found = []
        for ours, theirs in self.run_pairs(label, other):
            scores = [summary.ranked_scores for summary in (ours, theirs)]
            both = [client for client in scores[0] if client in scores[1] and ours.test_sizes[client]]
            if both:
                total = sum(ours.test_sizes[client] for client in both)
                a, b = (sum(own[c] * ours.test_sizes[c] for c in both) / total for own in scores)
                found.append(((a, b), (fmean(scores[0][c] for c in both), fmean(scores[1][c] for c in both))))
        return found


def split_ratio(summaries: Sequence[RunSummary], clients: Collection[int] | None = None) -> float:
    """Return the ratio of test to training samples, of these clients or all clients that are tested."""
    chosen = [
        own
        for summary in summaries
        for client, own in enumerate(summary.run.info["clients"])
        if own["test"] and (clients is None or client in clients)
    ]
    train, test = sum(own["train"] + own.get("validation", 0) for own in chosen), sum(own["test"] for own in chosen)
    return test / train if train else 0.0


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Return the comparison of runs that differ only in method and seed; raise `RunError` for other runs."""
    groups = make_comparisons(runs)
    if len(groups) > 1:
        differences = " and ".join(f"({group.differs_in})" for group in groups[:3])
        raise RunError(
            f"These runs cannot be compared because they differ in more than method and seed: {differences}."
        )
    return groups[0]


def make_comparisons(runs: Sequence[Run]) -> list[Comparison]:
    """Group runs that can be compared, in the order of the runs; each group has its best method first."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(experiment_key(run), []).append(run)
    descriptions = _differing_settings([group[0] for group in groups.values()])
    return [_compare(group, text) for group, text in zip(groups.values(), descriptions, strict=True)]


def _differing_settings(first_runs: Sequence[Run]) -> list[str]:
    """Return the settings that distinguish each group from the others, such as data.alpha = 0.1."""
    settings = [
        flatten_settings({k: v for k, v in run.experiment.items() if k not in ("method", "seed", *NEUTRAL_SETTINGS)})
        for run in first_runs
    ]
    settings = [{**own, "clients": run.num_clients} for own, run in zip(settings, first_runs, strict=True)]
    names = [
        n for n in dict.fromkeys(name for own in settings for name in own) if n not in ("data.seed", "data.repeat")
    ]
    differ = [name for name in names if len({str(own.get(name)) for own in settings}) > 1]
    differ = [name for name in differ if name != "clients" or "data.clients" not in differ]
    return [", ".join(f"{name} = {own.get(name, 'none')}" for name in differ) for own in settings]


def _compare(runs: Sequence[Run], differs_in: str) -> Comparison:
    labels = _labels(runs)
    seen: dict[tuple[str, int, str], Run] = {}
    for run, label in zip(runs, labels, strict=True):
        earlier = seen.setdefault((label, run.experiment["seed"], split_key(run)), run)
        if earlier is not run:
            where = f": '{earlier.folder}' and '{run.folder}'" if run.folder and earlier.folder else ""
            raise RunError(f"{label} has two runs with seed {run.experiment['seed']}{where}; leave one of them out.")
    methods: dict[str, list[RunSummary]] = {}
    for run, label in zip(runs, labels, strict=True):
        methods.setdefault(label, []).append(summarize_run(run, label))
    common = common_seeds([summary.pair_key for summary in summaries] for summaries in methods.values())
    kept = {label: [s for s in summaries if s.pair_key in common] for label, summaries in methods.items()}
    excluded = [s for summaries in methods.values() for s in summaries if s.pair_key not in common]
    kept = {label: sorted(summaries, key=lambda summary: summary.seed) for label, summaries in kept.items()}
    return rank_methods(Comparison(kept, excluded, differs_in))


def rank_methods(group: Comparison) -> Comparison:
    """Return the comparison with the best method first, then methods that diverged or were not evaluated, and the
    references last. On a tie, the baseline comes first, so that the order of the runs does not matter."""
    labels = sorted(group.methods, key=lambda label: (label != group.baseline, label))
    order = rank({label: group.scores(label) for label in labels}, group.sign > 0)
    order.sort(key=lambda label: label in group.references)
    return replace(group, methods={label: group.methods[label] for label in order})


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return the label of each run's method; runs with equal settings have equal labels."""
    keys = [json.dumps(run.experiment["method"], sort_keys=True, default=str) for run in runs]
    settings = {
        key: (run.method_title, flatten_settings(run.experiment["method"])) for key, run in zip(keys, runs, strict=True)
    }
    labels = dict(zip(settings, setting_labels(list(settings.values())), strict=True))
    return [labels[key] for key in keys]
