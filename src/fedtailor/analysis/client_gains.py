"""Which clients gain with a method, and which lose, judged by the uncertainty of their own test samples."""

from dataclasses import dataclass
from math import inf, isfinite
from statistics import fmean, median

from fedtailor.analysis.formatting import count_of
from fedtailor.analysis.run_summary import Client, Comparison
from fedtailor.analysis.statistics import accuracies_differ


@dataclass(frozen=True)
class ClientGain:
    """One client's difference between two methods, averaged over the seeds in which the client has the same data."""

    gain: float  # positive is better, also for scores that should be low; −∞ if the client diverged
    direction: int  # 1: the client gains; −1: it loses; 0: its test samples cannot tell


def has_known_uncertainty(group: Comparison) -> bool:
    """Return whether the variance of a client's score is known: an accuracy is a fraction of its test samples."""
    return group.fmt.score == "accuracy"


def client_gains(group: Comparison, label: str, other: str) -> dict[Client, ClientGain]:
    """Return the gain of each client with a method over another one. A client that diverged with the method loses; one
    that diverged with the other method is omitted.

    A gain or loss of accuracy must exceed the uncertainty of the client's test samples. Seeds do not reduce it, because
    a client is tested on the same samples in all of them. For other scores, gains and losses are only counted.
    """
    scores: dict[Client, tuple[list[float], list[float]]] = {}  # of both methods, one per seed
    sizes: dict[Client, int] = {}
    for ours, theirs in group.run_pairs(label, other):
        for client in ours.ranked_scores.keys() & theirs.ranked_scores.keys():
            key = ours.split, client
            for values, summary in zip(scores.setdefault(key, ([], [])), (ours, theirs), strict=True):
                values.append(summary.ranked_scores[client])
            sizes[key] = ours.test_sizes[client]
    means = {key: (fmean(scores[key][0]), fmean(scores[key][1])) for key in sorted(scores)}
    return {key: _gain(group, *own, sizes[key]) for key, own in means.items() if isfinite(own[1])}


def _gain(group: Comparison, ours: float, theirs: float, samples: int) -> ClientGain:
    if not isfinite(ours):
        return ClientGain(-inf, -1)
    gain = group.sign * (ours - theirs)
    known = has_known_uncertainty(group) and not accuracies_differ(ours, theirs, samples)
    return ClientGain(gain, 0 if known else (gain > 0) - (gain < 0))


def gains_over_local(group: Comparison) -> dict[str, dict[Client, ClientGain]]:
    """Return the clients' gains over local training for each ranked method that has any, in the order of methods."""
    local = group.baseline
    found = {o: client_gains(group, o, local) for o in group.ranked if o != local} if local is not None else {}
    return {label: gains for label, gains in found.items() if gains}


def gain_sentences(group: Comparison) -> list[str]:
    """Return how many clients gain over local training, and how many lose, with the best federated method; nothing if
    no client has scores with both."""
    others = gains_over_local(group)
    if not others:
        return []
    best, found = next(iter(others.items()))
    better, worse, rest = (sum(one.direction == sign for one in found.values()) for sign in (1, -1, 0))
    diverged = sum(not isfinite(one.gain) for one in found.values())
    splits, middle = len({split for split, _ in found}), median(one.gain for one in found.values())
    which = "the best federated method here" if len(others) > 1 else "the only federated method here"
    known = has_known_uncertainty(group)
    within = f"within the uncertainty of {'its' if rest == 1 else 'their'} test samples" if known else "the same"
    return [
        f"With {best}, {which}, {better} of {count_of(len(found), 'client')}"
        f"{f' (from {splits} splits)' if splits > 1 else ''} {'gains' if better == 1 else 'gain'} over local training, "
        f"{worse} {'loses' if worse == 1 else 'lose'}{f' ({diverged} diverged)' if diverged else ''}, and {rest} "
        f"{'is' if rest == 1 else 'are'} {within}; "
        + (f"the median gain is {gain_text(group, middle)}." if isfinite(middle) else "the median client diverged."),
        "A gain or loss exceeds the 95 % uncertainty of the client's own test samples; by chance, up to one client in "
        "twenty does."
        if known
        else f"The uncertainty of one client's {group.fmt.name} is unknown, so all differences are counted.",
    ]


def gain_text(group: Comparison, gain: float) -> str:
    """Return a gain with its sign and unit; a gain is positive, also where a lower score is better."""
    text = f"{group.fmt.signed(gain)} {'points' if group.fmt.unit else f'in {group.fmt.name}'}"
    return text if group.sign > 0 or not gain else f"{text}, a {'lower' if gain > 0 else 'higher'} value"
