"""Significance tests for the difference between two methods, paired over clients or over seeds.

Both methods train the same clients, so each client contributes one difference. If the methods were equally good, each
difference would be as likely to have the opposite sign: the p value of the sign-flip test is the fraction of random
sign patterns whose mean is at least as far from zero as the observed one. No other assumption is made about the
distribution of differences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from math import factorial, sqrt
from statistics import mean, stdev

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
SIGNIFICANCE_LEVEL = 0.05
EXACT = 13  # up to this number of differences, all 2ⁿ sign patterns are enumerated
DRAWS = 10_000  # random sign patterns otherwise
_RESAMPLES = 2_000_000  # total number of clients drawn for an interval; at least 1,000 and at most DRAWS resamples
_CHUNK_VALUES = 2**21  # values in memory at a time
_SHUFFLED_VALUES = 20_000_000  # total number of values shuffled for a rank correlation; at least 199 permutations


@dataclass(frozen=True)
class PairedDifference:
    """The mean of paired differences, with its interval and p value."""

    clients: int  # pairs
    mean: float  # weighted by the clients' weights
    low: float | None  # 95 % interval of the mean over clients; None for fewer than two
    high: float | None
    p: float  # two-sided
    better: int  # clients with a positive difference
    worse: int  # clients with a negative difference


def paired_difference(
    differences: Sequence[float], weights: Sequence[float] | None = None, seed: int = 0
) -> PairedDifference | None:
    """Return the weighted mean difference with its interval and p value; None if there are no differences, or if one is
    not finite because a client diverged. Without weights, all clients have equal weight.

    >>> found = paired_difference([1.0, 2.0, 3.0])
    >>> found.mean, found.p  # two of the eight sign patterns are as far from zero: + + + and − − −
    (2.0, 0.25)
    """
    found = np.asarray(differences, dtype=np.float64)
    fractions = np.ones(len(found)) if weights is None else np.asarray(weights, dtype=np.float64)
    if len(found) == 0 or not np.isfinite(found).all() or not fractions.sum() > 0:
        return None
    fractions = fractions / fractions.sum()
    low, high = _interval(found, fractions, seed) if len(found) > 1 else (None, None)
    better, worse = int((found > 0).sum()), int((found < 0).sum())
    return PairedDifference(
        len(found), float(found @ fractions), low, high, sign_flip(found * fractions, seed), better, worse
    )


def too_few(clients: int, comparisons: int = 1) -> bool:
    """Return whether no difference over this number of clients could be significant: even if all clients agree, p is
    2 · 0.5ⁿ times the number of comparisons.

    >>> too_few(5), too_few(6), too_few(6, comparisons=2)
    (True, False, True)
    """
    return bool(2 * 0.5**clients * comparisons >= SIGNIFICANCE_LEVEL)


def sign_flip(parts: Sequence[float] | Numbers, seed: int = 0) -> float:
    """Return the two-sided p value of a sum under random signs of its parts: exact for few parts, otherwise by random
    sign patterns (the observed pattern is included, so p is never zero).

    >>> sign_flip([1.0, 1.0, 1.0, 1.0])  # 2 of 16
    0.125
    """
    found = np.asarray(parts, dtype=np.float64)
    found = found[found != 0]  # zeros contribute nothing
    threshold = abs(float(found.sum())) * (1 - 1e-9)  # tolerance for another order of summation
    if len(found) <= EXACT:
        patterns = np.arange(2 ** len(found))[:, None] >> np.arange(len(found)) & 1
        return float((abs((1.0 - 2.0 * patterns) @ found) >= threshold).mean())
    random, reached, rows = np.random.default_rng(seed), 0, max(1, _CHUNK_VALUES // len(found))
    for start in range(0, DRAWS, rows):
        count = min(rows, DRAWS - start)
        bits = np.unpackbits(np.frombuffer(random.bytes(-(-count * len(found) // 8)), np.uint8))[: count * len(found)]
        flipped = bits.reshape(count, -1).astype(np.float64) @ found  # the sum of parts whose sign changes
        reached += int((abs(found.sum() - 2 * flipped) >= threshold).sum())
    return (1 + reached) / (1 + DRAWS)


def _interval(found: Numbers, fractions: Numbers, seed: int) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the weighted mean, resampling clients."""
    random, means, rows = np.random.default_rng([seed, 1]), [], max(1, _CHUNK_VALUES // len(found))
    times = min(DRAWS, max(1_000, _RESAMPLES // len(found)))
    for start in range(0, times, rows):
        drawn = random.integers(0, len(found), (min(rows, times - start), len(found)), dtype=np.int32)
        weights = fractions[drawn]
        totals = weights.sum(1)
        valid = totals > 0
        means.append(((weights * found[drawn]).sum(1)[valid]) / totals[valid])
    low, high = np.quantile(np.concatenate(means), [SIGNIFICANCE_LEVEL / 2, 1 - SIGNIFICANCE_LEVEL / 2])
    return float(low), float(high)


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


def paired_t_test(gaps: Sequence[float]) -> float:
    """Return the two-sided p value of a mean difference by Student's t test. If all differences are equal, their
    standard deviation is zero, and the sign-flip test is used instead.

    >>> round(paired_t_test([1.0, 2.0, 3.0]), 3), paired_t_test([0.25, 0.25]), paired_t_test([1.0])
    (0.074, 0.5, 1.0)
    """
    if len(gaps) < 2 or stdev(gaps) <= 1e-9 * abs(mean(gaps)):
        return sign_flip(gaps)
    from scipy.stats import t  # takes half a second to import

    return float(2 * t.sf(abs(mean(gaps)) / (stdev(gaps) / sqrt(len(gaps))), len(gaps) - 1))


def interval_half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % interval of a mean by Student's t; None for fewer than two values.

    >>> round(interval_half_width([1.0, 2.0, 3.0]), 2)  # 4.30 · std / √3, with std = 1
    2.48
    """
    if len(values) < 2:
        return None
    from scipy.stats import t

    return float(t.ppf(1 - SIGNIFICANCE_LEVEL / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))


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
    draws = min(DRAWS - 1, max(199, _SHUFFLED_VALUES // x.size))
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
