"""Which clients gain with a method, and which lose, judged by the uncertainty of their own test samples, or by redrawn
splits of their samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from statistics import fmean

from fedtailor.analysis.run_summary import Client, Comparison, RunSummary, split_ratio
from fedtailor.analysis.statistics import PairedTest, accuracies_differ, paired_t_test


@dataclass(frozen=True)
class ClientGain:
    """One client's difference between two methods, averaged over the seeds in which the client has the same samples."""

    gain: float  # positive is better, also for scores that should be low; −∞ if the client diverged
    direction: int  # 1: the client gains; −1: it loses; 0: its test samples, or splits, cannot tell
    test: PairedTest | None = None  # over redrawn splits of the client's samples


def has_known_uncertainty(group: Comparison) -> bool:
    """Return whether the uncertainty of a client's score is known: from redrawn splits, or because an accuracy is a
    fraction of its test samples."""
    return group.is_repeated or group.fmt.score == "accuracy"


def undecided_label(group: Comparison) -> str:
    """Return what a client is that neither gains nor loses, for tables and legends."""
    if group.is_repeated:
        return "no clear difference"
    return "within uncertainty" if has_known_uncertainty(group) else "same"


def client_gains(group: Comparison, label: str, other: str) -> dict[Client, ClientGain]:
    """Return the gain of each client with a method over another one. A client that diverged with the method loses; one
    that diverged with the other method is omitted.

    If the client's samples were split anew for each run, its gain or loss must differ from 0 by the corrected t test
    over these splits (`paired_t_test`). Otherwise, a gain or loss of accuracy must exceed the uncertainty of the
    client's test samples; seeds do not reduce it, because a client is tested on the same samples in all of them. For
    other scores, gains and losses are only counted.
    """
    found: dict[Client, list[tuple[RunSummary, RunSummary]]] = {}
    for ours, theirs in group.run_pairs(label, other):
        for client in ours.ranked_scores.keys() & theirs.ranked_scores.keys():
            found.setdefault((ours.samples, client), []).append((ours, theirs))
    gains = {key: _gain(group, key[1], pairs) for key, pairs in sorted(found.items())}
    return {key: gain for key, gain in gains.items() if gain is not None}


def _gain(group: Comparison, client: int, pairs: Sequence[tuple[RunSummary, RunSummary]]) -> ClientGain | None:
    ours, theirs = ([pair[side].ranked_scores[client] for pair in pairs] for side in (0, 1))
    if not isfinite(fmean(theirs)):
        return None
    if not isfinite(fmean(ours)):
        return ClientGain(-inf, -1)
    if len({summary.split for summary, _ in pairs}) > 1 or group.is_repeated:
        return gain_over_splits(group, ours, theirs, split_ratio([summary for summary, _ in pairs], [client]))
    gain = group.sign * (fmean(ours) - fmean(theirs))
    samples = pairs[-1][0].test_sizes[client]
    unclear = has_known_uncertainty(group) and not accuracies_differ(fmean(ours), fmean(theirs), samples)
    return ClientGain(gain, 0 if unclear else _sign(gain))


def gain_over_splits(
    group: Comparison, ours: Sequence[float], theirs: Sequence[float], test_to_train: float
) -> ClientGain:
    """Return the gain between two methods, given one score of each per redrawn split."""
    a, b = ([group.sign * score for score in scores] for scores in (ours, theirs))
    test = paired_t_test(a, b, test_to_train)
    test = replace(test, interval=group.clip(test.interval, of_gain=True))
    clear = test.interval is not None and _sign(test.interval[0]) == _sign(test.interval[1])
    return ClientGain(test.mean, _sign(test.mean) if clear else 0, test)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def gains_over_local(group: Comparison) -> dict[str, dict[Client, ClientGain]]:
    """Return the clients' gains over local training for each ranked method that has any, in the order of methods."""
    local = group.baseline
    found = {o: client_gains(group, o, local) for o in group.ranked if o != local} if local is not None else {}
    return {label: gains for label, gains in found.items() if gains}


def count_direction(gains: Mapping[Client, ClientGain], direction: int) -> int:
    """Return how many clients gain (direction 1), lose (−1), or neither gain nor lose (0)."""
    return sum(one.direction == direction for one in gains.values())


def gain_text(group: Comparison, gain: float) -> str:
    """Return a gain with its sign and unit; a gain is positive, also where a lower score is better."""
    text = f"{group.fmt.signed(gain)} {'points' if group.fmt.unit else f'in {group.fmt.name}'}"
    return text if group.sign > 0 or not gain else f"{text}, a {'lower' if gain > 0 else 'higher'} value"
