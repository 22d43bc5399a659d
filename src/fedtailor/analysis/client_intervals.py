"""Each client's score and gain over local training, as means with intervals over redrawn splits of its samples."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, nan
from statistics import fmean

from fedtailor.analysis.client_gains import ClientGain, client_gains, gain_over_splits
from fedtailor.analysis.comparability import client_labels
from fedtailor.analysis.run_summary import Client, Comparison, RunSummary, split_ratio
from fedtailor.analysis.statistics import PairedTest, paired_t_test


@dataclass(frozen=True)
class ClientMean:
    """One client with one method."""

    client: Client
    name: str
    label: str  # the method
    train: int  # samples, in the first split
    test: int
    score: PairedTest  # mean over splits, with an interval
    gain: ClientGain | None  # over local training; None for local training, or without scores of both


@dataclass(frozen=True)
class MeanGain:
    """The mean over clients, with equal weight, of a method's score and of its gain over local training."""

    clients: int
    score: PairedTest
    gain: ClientGain


def client_names(group: Comparison) -> dict[Client, str]:
    """Return the display names of all clients with test samples; redrawn splits have the same clients."""
    found: dict[Client, str] = {}
    for summary in group.summaries:
        for client, name in enumerate(client_labels(summary.run)):
            if summary.test_sizes[client]:
                found.setdefault((summary.samples, client), name)
    return found


def num_splits(group: Comparison) -> int:
    """Return the number of splits of the data."""
    return len({summary.split for summary in group.summaries})


def client_means(group: Comparison) -> Iterator[ClientMean]:
    """Yield all clients, each with all methods in their order."""
    local, names = group.baseline, client_names(group)
    gains = {o: client_gains(group, o, local) for o in group.methods if o != local} if local is not None else {}
    for key, name in names.items():
        for label, summaries in group.methods.items():
            own = [summary for summary in summaries if summary.samples == key[0] and key[1] in summary.ranked_scores]
            if own:
                size = own[0].run.info["clients"][key[1]]
                score = _mean(group, own, [summary.ranked_scores[key[1]] for summary in own], [key[1]])
                yield ClientMean(key, name, label, size["train"], size["test"], score, gains.get(label, {}).get(key))


def mean_gain(group: Comparison, label: str) -> MeanGain | None:
    """Return the mean over the clients that have a score with every method in every redrawn split; None if there is
    none."""
    common = _always_scored(group)
    pairs = group.run_pairs(label, group.baseline) if group.baseline is not None else []
    if not common or not pairs or not group.is_repeated:
        return None
    ours, theirs = ([_client_mean(pair[side], common) for pair in pairs] for side in (0, 1))
    summaries = [summary for summary, _ in pairs]
    gain = gain_over_splits(group, ours, theirs, split_ratio(summaries, common))
    return MeanGain(len(common), _mean(group, summaries, ours, common), gain)


def _always_scored(group: Comparison) -> list[int]:
    scored = [{c for c, score in s.ranked_scores.items() if isfinite(score)} for s in group.summaries]
    return sorted(set.intersection(*scored))


def _client_mean(summary: RunSummary, clients: list[int]) -> float:
    return fmean(summary.ranked_scores[client] for client in clients)


def _mean(group: Comparison, summaries: list[RunSummary], scores: list[float], clients: list[int]) -> PairedTest:
    """Return the mean of one score per split, with its interval if these are redrawn splits."""
    if not all(map(isfinite, scores)):
        return PairedTest(len(scores), nan)
    if not group.is_repeated:
        return PairedTest(len(scores), fmean(scores))
    found = paired_t_test(scores, [0.0] * len(scores), split_ratio(summaries, clients))
    return PairedTest(found.seeds, found.mean, group.clip(found.interval))
