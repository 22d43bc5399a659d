"""Which method or setting scores best, by how much, and whether that is more than chance.

The terminal, sweeps, the report, and the dashboard print this answer. The unit of replication is the seed: two methods
are compared by Student's t over the differences of their scores, with Holm's correction for the number of methods. If
the clients' samples were split anew for each run, the unit is the split, and t is corrected for their overlap.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import fmean
from typing import Literal, TypeVar

from fedtailor.analysis.formatting import ScoreFormat, format_p, join_names, method_in_text
from fedtailor.analysis.statistics import MIN_SEEDS, SIGNIFICANCE_LEVEL, PairedTest, holm, paired_t_test

T = TypeVar("T", bound=Hashable)
DEPENDENT_SEEDS = (
    "Seeds that re-split the same data are not fully independent, so intervals may be too narrow and p values too "
    "small."
)
OVERLAPPING_SPLITS = (
    "Redrawn splits of the same samples overlap, so intervals and p values are those of the corrected resampled t test "
    "(Nadeau and Bengio 2003), in which the variance of a mean is s² (1/n + test samples / training samples)."
)
NO_COMMON_SEED = "No seed is common to all; two of them are compared only on the seeds that both have."
_IN_COMMON = "on the clients and seeds that both have"
SAME_START = (
    "All seeds start from the same initial weights, so differences between initial weights are not included; pass a "
    "class or function that builds the module to draw them from the seed."
)
MORE_SEEDS = f"An interval and a significance test need at least {MIN_SEEDS} seeds."
Unit = Literal["seed", "split"]


@dataclass(frozen=True)
class PairwiseDifference:
    """The difference between the best method and another one; positive if the best one is better."""

    other: str
    score: float  # of the other method
    test: PairedTest
    p: float | None  # after Holm's correction for all methods that could be tested
    seeds_won: int  # by the best method

    @property
    def direction(self) -> int:
        """1 if the best method is significantly better, −1 if it is significantly worse, and 0 otherwise."""
        return 0 if self.p is None or self.p >= SIGNIFICANCE_LEVEL else 1 if self.test.mean > 0 else -1


@dataclass(frozen=True)
class Ranking:
    """The best method, and its difference to the others, in their order."""

    fmt: ScoreFormat
    higher_is_better: bool
    best: str
    score: float
    differences: Sequence[PairwiseDifference]
    data: str = ""  # follows the score in sentences, such as "on validation data"
    unit: Unit = "seed"  # of replication

    def comparative(self, better: bool) -> str:
        """Return "higher" or "lower"."""
        return "higher" if better == self.higher_is_better else "lower"


def rank(scores: Mapping[T, Sequence[float]], higher_is_better: bool) -> list[T]:
    """Return methods by their mean over seeds, the best first; methods that diverged or have no score are last.

    >>> rank({"a": [0.5, 0.7], "b": [0.9, 0.1], "c": [0.9, float("nan")]}, higher_is_better=True)
    ['a', 'b', 'c']
    """
    sign = 1 if higher_is_better else -1

    def sort_key(method: T) -> float:
        values = scores[method]
        return sign * fmean(values) if values and all(map(isfinite, values)) else -inf

    return sorted(scores, key=sort_key, reverse=True)


def common_seeds(seeds: Iterable[Iterable[T]]) -> set[T]:
    """Return the seeds that all methods have; all seeds if none is common.

    >>> common_seeds([[0, 1, 2], [1, 2]]), common_seeds([[0], [1]])
    ({1, 2}, {0, 1})
    """
    sets = [set(own) for own in seeds]
    return set.intersection(*sets) or set.union(*sets)


def compare_with_best(
    scores: Mapping[str, float],
    pairs: Mapping[str, Sequence[tuple[float, float]]],
    higher_is_better: bool,
    test_to_train: float = 0.0,
) -> list[PairwiseDifference]:
    """Test the best method against each other method, given its mean score, and one pair of scores (of the best and of
    the other method) per common seed; `test_to_train` is that of `paired_t_test`.

    >>> [found] = compare_with_best({"b": 0.62}, {"b": [(0.8, 0.7), (0.75, 0.55), (0.9, 0.6)]}, higher_is_better=True)
    >>> round(found.test.mean, 3), round(found.p, 3), found.seeds_won, found.direction
    (0.2, 0.074, 3, 0)
    """
    sign = 1 if higher_is_better else -1
    signed = {other: [(sign * ours, sign * theirs) for ours, theirs in own] for other, own in pairs.items()}
    tests = {o: paired_t_test([a for a, _ in own], [b for _, b in own], test_to_train) for o, own in signed.items()}
    known = {other: test.p for other, test in tests.items() if test.p is not None}
    corrected = dict(zip(known, holm(list(known.values())), strict=True))
    return [
        PairwiseDifference(other, scores[other], test, corrected.get(other), sum(a > b for a, b in signed[other]))
        for other, test in tests.items()
    ]


def headline(ranking: Ranking) -> str:
    """Return the verdict in one sentence: who scores best, by how much, and whether that is more than chance."""
    shown = f"{ranking.fmt.text(ranking.score)}{f' {ranking.data}' if ranking.data else ''}"
    if not ranking.differences:
        return f"{ranking.best} scores {shown}; no other method or setting has a score to compare it with."
    start = f"{ranking.best} scores {'highest' if ranking.higher_is_better else 'lowest'} ({shown})"
    found = ranking.differences[0]
    test, other = found.test, method_in_text(found.other)
    few = f"there are not enough {ranking.unit}s to tell whether"
    if test.mean < 0:  # possible if the score of the best method covers other clients or seeds
        gap = f"{ranking.fmt.gap(test.mean)} {ranking.comparative(True)}"
        start += f", but {_IN_COMMON}, {other} is {gap}"
        if test.seeds < MIN_SEEDS:
            return f"{start}; {few} this is more than chance."
        return f"{start}: {_outcome(ranking, found)}."
    lead = f"its {ranking.fmt.lead(test.mean) if test.mean else 'lead'} over {other}"
    if test.seeds < MIN_SEEDS:
        return f"{start}, but {few} {lead} is more than chance."
    if test.p is None:
        same = f"{other} has the same score" if not test.mean else f"{lead} is the same"
        return f"{start}, but {same} in all {test.seeds} {ranking.unit}s, for which no significance test is defined."
    return f"{start}, {'and' if found.direction > 0 else 'but'} {lead} is {_outcome(ranking, found)}."


def _outcome(ranking: Ranking, found: PairwiseDifference) -> str:
    number = f"{found.test.seeds} {ranking.unit}s"
    if found.p is None:
        return f"the same difference in all {number}, for which no significance test is defined"
    return f"{'' if found.direction else 'not '}statistically significant over {number}"


def pair_sentence(ranking: Ranking, found: PairwiseDifference) -> str:
    """Return the difference to one method, with its interval and p value."""
    test, fmt = found.test, ranking.fmt
    sentence = f"{found.other} scores {fmt.text(found.score)}"
    if not test.seeds:
        return f"{sentence}; the two methods have no seed, or no client, in common."
    if not test.mean:
        sentence += ", on average the same"
    else:
        where = "" if test.mean > 0 else f" {_IN_COMMON}"
        sentence += f", {fmt.gap(test.mean)} {ranking.comparative(test.mean < 0)}{where}"
    if test.interval is None or found.p is None:
        return f"{sentence}."
    interval = f"95 % interval of the lead, for this pair only: {' to '.join(map(fmt.signed, test.interval))}"
    many = sum(pair.p is not None for pair in ranking.differences)
    correction = f" after correction for {many} comparisons" if many > 1 else ""
    return f"{sentence} ({interval}): {_outcome(ranking, found)} ({format_p(found.p)}{correction})."


def other_methods(ranking: Ranking) -> list[str]:
    """Return one sentence about all other methods that could be tested, if there are several."""
    tested = [found for found in ranking.differences if found.p is not None]
    if len(tested) < 2:
        return []
    worse, better, similar = ([f.other for f in tested if f.direction == direction] for direction in (1, -1, 0))
    up = ranking.comparative(True)
    best, it = ranking.best, "it" if worse else ranking.best
    parts = [f"{best} scores significantly {up} than {join_names(worse, 8)}"] if worse else []
    parts += [f"{it} is not distinguishable from {join_names(similar, 8)}"] if similar else []
    parts += [f"{_IN_COMMON}, {join_names(better, 8)} scored significantly {up}"] if better else []
    return [f"{parts[0][0].upper()}{'; '.join(parts)[1:]}."]
