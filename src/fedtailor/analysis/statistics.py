"""Student's t over seeds or splits, Holm's correction, the uncertainty of test samples, and rank correlations."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from math import factorial, sqrt
from statistics import NormalDist, fmean, stdev

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
SIGNIFICANCE_LEVEL = 0.05
_NORMAL_QUANTILE = NormalDist().inv_cdf(1 - SIGNIFICANCE_LEVEL / 2)
MIN_SEEDS = 3  # for an interval or a test
_ROUNDING = 1e-6  # relative to the scores: variation below it is rounding, because the dashboard keeps 32 bits
_DRAWS = 10_000  # permutations, at most
_CHUNK_VALUES = 2**21  # values in memory at a time
_SHUFFLED_VALUES = 20_000_000  # total number of values shuffled for a rank correlation; at least 199 permutations


@dataclass(frozen=True)
class PairedTest:
    """The mean over seeds, or over redrawn splits, of a difference, with its 95 % interval and its two-sided p value.
    Interval and p value are None for fewer than three seeds, or if all differences are equal: then t is not defined."""

    seeds: int
    mean: float
    interval: tuple[float, float] | None = None
    p: float | None = None


def paired_t_test(ours: Sequence[float], theirs: Sequence[float], test_to_train: float = 0.0) -> PairedTest:
    """Return Student's t test of the difference between two methods; each position is one seed.

    If each position is a redrawn split of the same samples, `test_to_train` is the ratio of test to training samples.
    Such splits overlap, so the scores are correlated, and the variance of their mean is not s² / n. The corrected
    resampled t test (Nadeau and Bengio, "Inference for the Generalization Error", Machine Learning 2003) takes
    s² (1/n + test_to_train) instead; it applies to repeated cross-validation as well.

    >>> found = paired_t_test([0.8, 0.75, 0.9], [0.7, 0.55, 0.6])
    >>> round(found.mean, 3), [round(end, 3) for end in found.interval], round(found.p, 3)
    (0.2, [-0.048, 0.448], 0.074)
    >>> [round(end, 3) for end in paired_t_test([0.8, 0.75, 0.9], [0.7, 0.55, 0.6], test_to_train=1 / 3).interval]
    [-0.151, 0.551]
    """
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = fmean(differences) if differences else 0.0
    scale = max(map(abs, (*ours, *theirs)), default=0.0)
    mean = 0.0 if abs(mean) <= _ROUNDING * scale else mean
    if len(differences) < MIN_SEEDS or stdev(differences) <= _ROUNDING * scale:
        return PairedTest(len(differences), mean)
    from scipy.stats import t, ttest_1samp  # takes half a second to import

    test = ttest_1samp(differences, 0.0)
    low, high = map(float, test.confidence_interval(1 - SIGNIFICANCE_LEVEL))
    if not test_to_train:
        return PairedTest(len(differences), mean, (low, high), float(test.pvalue))
    wider = sqrt(1 + len(differences) * test_to_train)  # ratio of the two standard errors
    middle, half = (low + high) / 2, wider * (high - low) / 2
    p = 2 * float(t.sf(abs(test.statistic) / wider, len(differences) - 1))
    return PairedTest(len(differences), mean, (middle - half, middle + half), p)


def mean_interval(values: Sequence[float], test_to_train: float = 0.0) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean over seeds or redrawn splits by `paired_t_test`; None where it has none.

    >>> [round(end, 2) for end in mean_interval([1.0, 2.0, 3.0])]  # 2 ± 4.30 · std / √3, with std = 1
    [-0.48, 4.48]
    """
    return paired_t_test(values, [0.0] * len(values), test_to_train).interval


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values adjusted for multiple comparisons by Holm's method.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, reached = [0.0] * len(ps), 0.0
    for place, position in enumerate(sorted(range(len(ps)), key=lambda position: ps[position])):
        reached = max(reached, min(1.0, ps[position] * (len(ps) - place)))
        adjusted[position] = reached
    return adjusted


def accuracies_differ(ours: float, theirs: float, samples: int) -> bool:
    """Return whether two accuracies of one client differ by more than the 95 % uncertainty of its test samples.

    The interval for two proportions is that of Agresti and Caffo (2000), which is valid for few samples, too. It treats
    the errors of the two models as independent. Both are tested on the same samples, where they tend to make the same
    errors, so the interval is rather too wide than too narrow.

    >>> accuracies_differ(0.9, 0.5, samples=10), accuracies_differ(0.9, 0.5, samples=100)
    (False, True)
    """
    a, b = ((accuracy * samples + 1) / (samples + 2) for accuracy in (ours, theirs))
    return abs(a - b) > _NORMAL_QUANTILE * sqrt((a * (1 - a) + b * (1 - b)) / (samples + 2))


def rank_correlation(x: Numbers, y: Numbers, seed: int = 0) -> tuple[float, float] | None:
    """Return Spearman's rank correlation and its two-sided p value, by permuting clients.

    Each argument has one value per client, or one per pair of clients (a square matrix, whose diagonal is ignored).
    Pairs of clients are not independent, so rows and columns are permuted together (Mantel test). Returns None if one
    argument is constant.

    >>> rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0]))  # 2 of the 6 orders
    (1.0, 0.3333333333333333)
    """
    ours, theirs = _ranks(x), _ranks(y)
    scale = sqrt(float((ours**2).sum()) * float((theirs**2).sum()))
    if not scale > 0:
        return None
    found, clients = float((ours * theirs).sum()) / scale, len(x)
    draws = min(_DRAWS - 1, max(199, _SHUFFLED_VALUES // x.size))
    exact = clients < 10 and factorial(clients) <= draws
    random, reached, rows = np.random.default_rng(seed), 0, max(1, _CHUNK_VALUES // x.size)
    all_orders = np.array(list(permutations(range(clients)))) if exact else np.tile(np.arange(clients), (rows, 1))
    for start in range(0, len(all_orders) if exact else draws, rows):
        orders = all_orders[start : start + rows] if exact else random.permuted(all_orders[: draws - start], axis=1)
        permuted = theirs[orders] if x.ndim == 1 else theirs[orders[:, :, None], orders[:, None, :]]
        sums = permuted.reshape(len(orders), -1) @ ours.ravel() / scale
        reached += int((abs(sums) >= abs(found) * (1 - 1e-9)).sum())
    return round(found, 12), reached / len(all_orders) if exact else (1 + reached) / (1 + draws)


def _ranks(values: Numbers) -> Numbers:
    """Return centered ranks with ties averaged; the diagonal of a square matrix is zero."""
    included = ~np.eye(len(values), dtype=bool) if values.ndim == 2 else np.ones(len(values), dtype=bool)
    _, places, times = np.unique(values[included], return_inverse=True, return_counts=True)
    ranks = (np.cumsum(times) - (times - 1) / 2)[places]
    found = np.zeros(values.shape)
    found[included] = ranks - (ranks.mean() if ranks.size else 0.0)
    return found
