"""State in words which method scores best, by how much, and whether the difference is statistically significant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedtailor.analysis.formatting import count_of, format_p, join_names, method_in_text
from fedtailor.analysis.run_summary import Comparison
from fedtailor.analysis.statistics import SIGNIFICANCE_LEVEL, PairedDifference, holm, paired_difference, too_few


@dataclass(frozen=True)
class PairwiseDifference:
    """The difference between the best method and another one, on the clients that both have."""

    other: str
    weighted: PairedDifference | None  # by test samples; None if a run diverged or no client is in both
    unweighted: PairedDifference | None  # all clients have equal weight
    p: float  # of `weighted`, after Holm's correction for all other methods
    p_unweighted: float  # of `unweighted`, after the same correction
    seeds_won: int
    seeds: int  # that both methods have
    comparisons: int  # in total

    @property
    def is_significant(self) -> bool:
        """Whether the best method is significantly better."""
        return _direction(self.weighted, self.p) > 0

    @property
    def is_significantly_worse(self) -> bool:
        """Whether the best method is significantly worse, which is possible if its score covers other clients."""
        return _direction(self.weighted, self.p) < 0

    @property
    def too_few_clients(self) -> str:
        """A clause that says that there are too few clients for any significant result; empty if there are enough."""
        if self.weighted is None or self.p < SIGNIFICANCE_LEVEL or not too_few(self.weighted.clients, self.comparisons):
            return ""
        count = self.weighted.clients
        return f"{count_of(count, 'client')} {'is' if count == 1 else 'are'} too few for a significance test"


def _direction(pair: PairedDifference | None, p: float) -> int:
    """Return 1 for significantly better, −1 for significantly worse, and 0 otherwise."""
    return 0 if pair is None or p >= SIGNIFICANCE_LEVEL else 1 if pair.mean > 0 else -1


def pairwise_differences(group: Comparison) -> list[PairwiseDifference]:
    """Compare the best method with each other method that has a score, in their order."""
    best, *others = group.scored or [""]
    gaps = {other: list(group.gaps(best, other).values()) for other in others}
    weighted = {
        other: paired_difference([gap for gap, _ in pairs], [weight for _, weight in pairs])
        for other, pairs in gaps.items()
    }
    unweighted = {other: paired_difference([gap for gap, _ in pairs]) for other, pairs in gaps.items()}
    p, p_unweighted = _adjusted(weighted), _adjusted(unweighted)
    tested = sum(pair is not None for pair in weighted.values())
    return [
        PairwiseDifference(
            other,
            weighted[other],
            unweighted[other],
            p[other],
            p_unweighted[other],
            *_seeds_won(group, best, other),
            tested,
        )
        for other in others
    ]


def _adjusted(found: Mapping[str, PairedDifference | None]) -> dict[str, float]:
    """Return the p values with Holm's correction; 1 for comparisons that could not be tested."""
    tested = {other: pair.p for other, pair in found.items() if pair is not None}
    return dict.fromkeys(found, 1.0) | dict(zip(tested, holm(list(tested.values())), strict=True))


def _seeds_won(group: Comparison, best: str, other: str) -> tuple[int, int]:
    by_seed = [sum(gap * weight for gap, weight in gaps.values()) for gaps in group.gaps_by_seed(best, other) if gaps]
    return sum(gap > 0 for gap in by_seed), len(by_seed)


def verdict_sentences(group: Comparison, found: Sequence[PairwiseDifference]) -> list[str]:
    """Return the verdict as sentences, with its caveats."""
    if not group.scored:
        none = "No method has a final score: all runs diverged or were not evaluated as trained."
        return [none, *_caveats(group, found)]
    best, shown = group.scored[0], group.fmt.text(group.score(group.scored[0]))
    name = group.fmt.name if group.sign > 0 else f"{group.fmt.name} (lower is better)"
    what = f"{name} over {_coverage(group)}, as trained in the last round{_averaging(group)}"
    if not found:
        why = "there is no other method" if len(group.methods) == 1 else "no other method has a score as trained"
        answer = [f"{best} scores {shown}; methods cannot be ranked because {why}.", f"The score is {what}."]
        more = "To rank methods, add runs of other methods on the same data, for example with fedtailor compare."
        return [*answer, *_caveats(group, found), *[more] * (len(group.methods) == 1)]
    first, *rest = found
    answer = [_headline(group, best, first), f"Scores are {what}."]
    answer += [
        _pair_sentence(group, pair) for pair in (first, *(pair for pair in rest if pair.other == group.baseline))
    ]
    return answer + _other_methods(group, found) + _caveats(group, found)


def _coverage(group: Comparison) -> str:
    """Return which test samples the scores cover; clients without a score are not included."""
    counts = {summary.num_scored for label in group.scored for summary in group.methods[label]}
    if all(scored == tested for scored, tested in counts):
        return "all test samples"
    (scored, tested), each = min(counts), " in each seed" if len(group.seeds) > 1 else ""
    number = f"{scored} of {tested} " if len(counts) == 1 else ""
    return f"the test samples of the {number}clients that have a score{each}"


def _averaging(group: Comparison) -> str:
    if len(group.seeds) < 2:
        return ""
    return f", mean of {len(group.seeds)} seeds" if group.shares_seeds else ", mean over the seeds of each method"


def _headline(group: Comparison, best: str, next_best: PairwiseDifference) -> str:
    """Return which method scores best, and whether its lead is significant."""
    top = "highest" if group.sign > 0 else "lowest"
    headline, other = f"{best} scores {top} ({group.fmt.text(group.score(best))})", method_in_text(next_best.other)
    pair = next_best.weighted
    if pair is None:
        return f"{headline}, but its lead cannot be tested for significance."
    if pair.mean < 0:  # possible if its score covers other clients
        both = f"on the {count_of(pair.clients, 'client')} that both methods have"
        return f"{headline}, but {both}, {other} is {group.fmt.gap(pair.mean)} {_comparative(group, True)}."
    if best == group.baseline:
        headline += ": no federated method beats it"
    if not pair.better and not pair.worse:
        return f"{headline}, but {other} has the same score for every client."
    lead = f"{group.fmt.lead(pair.mean)} over {other}"
    if next_best.is_significant:
        return f"{headline}, and its {lead} is statistically significant."
    if next_best.too_few_clients:
        return f"{headline}; its {lead} cannot be tested because {next_best.too_few_clients}."
    return f"{headline}, but its {lead} is not statistically significant."


def _comparative(group: Comparison, better: bool) -> str:
    return "higher" if better == (group.sign > 0) else "lower"


def _pair_sentence(group: Comparison, difference: PairwiseDifference) -> str:
    """Return the difference to one method, with its interval and p value."""
    pair = difference.weighted
    sentence = f"{difference.other} scores {group.fmt.text(group.score(difference.other))}"
    if pair is None:
        return f"{sentence}; the two cannot be compared client by client: no client has both scores, or one diverged."
    if not pair.better and not pair.worse:
        return f"{sentence}, the same for every client."
    where = "" if pair.mean >= 0 else " on the clients that both methods have"
    sentence += f", {group.fmt.gap(pair.mean)} {_comparative(group, pair.mean < 0)}{where}"
    if difference.too_few_clients:  # an interval would suggest too much certainty
        return f"{sentence}; {difference.too_few_clients}."
    return (
        f"{sentence}{_interval(group, pair)}: {_significance(difference.p)} ({format_p(difference.p)} after correction "
        f"for multiple comparisons, paired over {pair.clients} clients).{_unweighted_sentence(group, difference)}"
    )


def _significance(p: float) -> str:
    return "statistically significant" if p < SIGNIFICANCE_LEVEL else "not statistically significant"


def _unweighted_sentence(group: Comparison, difference: PairwiseDifference) -> str:
    """Return a further sentence if the verdict changes when all clients have equal weight."""
    pair = difference.unweighted
    if pair is None or _direction(pair, difference.p_unweighted) == _direction(difference.weighted, difference.p):
        return ""
    return (
        " With equal weight for all clients, whatever their number of test samples, the best method is "
        f"{group.fmt.gap(pair.mean)} {_comparative(group, pair.mean >= 0)}: {_significance(difference.p_unweighted)} "
        f"({format_p(difference.p_unweighted)})."
    )


def _interval(group: Comparison, found: PairedDifference) -> str:
    if found.low is None or found.high is None:
        return ""
    return f" (95 % interval of this pair only: {group.fmt.signed(found.low)} to {group.fmt.signed(found.high)})"


def _other_methods(group: Comparison, found: Sequence[PairwiseDifference]) -> list[str]:
    """Return one sentence about all other methods, if there are several."""
    if len(found) < 2:
        return []
    worse = [pair.other for pair in found if pair.is_significant]
    better = [pair.other for pair in found if pair.is_significantly_worse]
    similar = [pair.other for pair in found if not pair.is_significant and not pair.is_significantly_worse]
    up, down = _comparative(group, True), _comparative(group, False)
    if len(similar) == len(found):
        return [f"On these clients, none of the {len(found)} other methods is distinguishable from it."]
    if len(worse) == len(found):
        return [f"All {len(found)} other methods score significantly {down}."]
    parts = [f"it scores significantly {up} than {join_names(worse, 8)}"] if worse else []
    parts += [f"on clients that both methods have, {join_names(better, 8)} scored significantly {up}"] if better else []
    parts += [f"on these clients, it is not distinguishable from {join_names(similar, 8)}"] if similar else []
    return [f"{parts[0][0].upper()}{'; '.join(parts)[1:]}."]


def _caveats(group: Comparison, found: Sequence[PairwiseDifference]) -> list[str]:
    """Return what limits the conclusions."""
    notes = []
    if len(group.seeds) < 2:
        notes.append("There is only one seed, so variation between seeds is not included.")
    elif not group.shares_seeds:
        notes.append(
            "No seed is common to all methods: their scores come from different splits or initial weights, and two "
            "methods are compared client by client only where they share a seed."
        )
    elif found and found[0].seeds:
        first = found[0]
        dependent = (
            "" if first.too_few_clients else "; p is too small because clients within a seed are not independent"
        )
        up, other = _comparative(group, True), method_in_text(first.other)
        notes.append(f"It scores {up} than {other} in {first.seeds_won} of {first.seeds} seeds{dependent}.")
    if len({summary.run.method for summary in group.summaries}) < len(group.methods):
        notes.append("Several settings of one method are ranked by test data, so the best score is optimistic.")
    if reversed_ := [pair.other for pair in found if _is_reversed(pair)]:
        notes.append(
            "With equal weight for all clients, whatever their number of test samples, "
            f"{join_names(reversed_)} would score {'highest' if group.sign > 0 else 'lowest'}."
        )
    notes += _different_clients(group)
    diverged = [label for label, runs in group.methods.items() if any(run.diverged for run in runs)]
    if diverged:
        notes.append(f"Clients diverged with {join_names(diverged)}: try a smaller lr.")
    if group.excluded:
        missing = sorted({f"{run.label} with seed {run.seed}" for run in group.excluded})
        notes.append(f"Excluded because not all methods have the seed: {join_names(missing)}.")
    return notes


def _different_clients(group: Comparison) -> list[str]:
    """Return a sentence if methods have scores over different clients."""
    covered = {
        label: {(summary.pair_key, client) for summary in group.methods[label] for client in summary.last["trained"]}
        for label in group.scored
    }
    if not group.shares_seeds or all(clients == covered[group.scored[0]] for clients in covered.values()):
        return []
    total = sum(summary.num_scored[1] for summary in group.methods[group.scored[0]])
    fewer = [
        f"{method_in_text(label)}'s score covers {len(clients)} of {total}"
        for label, clients in covered.items()
        if len(clients) < total
    ]
    if not fewer:
        return []
    return [f"Scores cover different clients: {join_names(fewer)}; differences use the clients that both methods have."]


def _is_reversed(pair: PairwiseDifference) -> bool:
    """Return whether the other method is better when all clients have equal weight, and only then."""
    if pair.unweighted is None or pair.weighted is None:
        return False
    return pair.unweighted.mean < 0 <= pair.weighted.mean
