"""Whether a difference between two methods is more than chance, paired over clients.

Both methods train the same clients, so what is looked at is every client's own difference. Were the methods equally
good, each difference could as well have the other sign: the sign-flip test asks how often random signs give a mean as
far from zero as the one that was found. Nothing is assumed of how differences are spread but that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from math import factorial, sqrt
from statistics import mean, stdev

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
LIMIT = 0.05  # what chance alone makes less often than this is called more than chance
EXACT = 13  # differences: up to so many, all 2ⁿ signs are tried
DRAWS = 10_000  # of signs
_RESAMPLES = 2_000_000  # clients drawn for an interval in all, as far as that makes a thousand to ten thousand means
_AT_ONCE = 2**21  # numbers in memory at a time
_SHUFFLED = 20_000_000  # numbers that are shuffled for a rank correlation in all, as far as that makes 199 draws


@dataclass(frozen=True)
class Paired:
    """What the differences of two methods say."""

    clients: int  # pairs
    mean: float  # weighted by what the clients count
    low: float | None  # 95 % interval of the mean over clients; None for fewer than two
    high: float | None
    p: float  # two-sided; how likely so large a mean is if nothing but chance decided the signs
    better: int  # clients above zero
    worse: int


def paired(differences: Sequence[float], weights: Sequence[float] | None = None, seed: int = 0) -> Paired | None:
    """The mean difference with its interval and p; None without differences, or where one is no finite number, for a
    client that diverged leaves nothing to compare. Clients count by their weights, alike if there are none.

    >>> found = paired([1.0, 2.0, 3.0])
    >>> found.mean, found.p  # of the eight patterns of signs two are as far from zero: + + + and − − −
    (2.0, 0.25)
    """
    found = np.asarray(differences, dtype=np.float64)
    shares = np.ones(len(found)) if weights is None else np.asarray(weights, dtype=np.float64)
    if len(found) == 0 or not np.isfinite(found).all() or not shares.sum() > 0:
        return None
    shares = shares / shares.sum()
    low, high = _interval(found, shares, seed) if len(found) > 1 else (None, None)
    better, worse = int((found > 0).sum()), int((found < 0).sum())
    return Paired(len(found), float(found @ shares), low, high, sign_flip(found * shares, seed), better, worse)


def too_few(clients: int, comparisons: int = 1) -> bool:
    """Whether nothing that so few clients say could ever be more than chance: even where all agree, the two patterns
    of signs in which they do come that often by chance, and once more for every further comparison.

    >>> too_few(5), too_few(6), too_few(6, comparisons=2)
    (True, False, True)
    """
    return bool(2 * 0.5**clients * comparisons >= LIMIT)


def sign_flip(parts: Sequence[float] | Numbers, seed: int = 0) -> float:
    """Two-sided p of a sum under random signs of its parts: exact for few parts, else by draws (of which the signs as
    they were found are one, so that p is never zero).

    >>> sign_flip([1.0, 1.0, 1.0, 1.0])  # 2 of 16
    0.125
    """
    found = np.asarray(parts, dtype=np.float64)
    found = found[found != 0]  # whatever their sign, they add nothing
    aim = abs(float(found.sum())) * (1 - 1e-9)  # sums in another order end in other last digits
    if len(found) <= EXACT:
        patterns = np.arange(2 ** len(found))[:, None] >> np.arange(len(found)) & 1
        return float((abs((1.0 - 2.0 * patterns) @ found) >= aim).mean())
    random, reached, rows = np.random.default_rng(seed), 0, max(1, _AT_ONCE // len(found))
    for start in range(0, DRAWS, rows):
        count = min(rows, DRAWS - start)
        bits = np.unpackbits(np.frombuffer(random.bytes(-(-count * len(found) // 8)), np.uint8))[: count * len(found)]
        turned = bits.reshape(count, -1).astype(np.float64) @ found  # the sum of what changes its sign
        reached += int((abs(found.sum() - 2 * turned) >= aim).sum())
    return (1 + reached) / (1 + DRAWS)


def _interval(found: Numbers, shares: Numbers, seed: int) -> tuple[float, float]:
    """The middle 95 % of the means of clients drawn anew, as many as there are, with their weights."""
    random, means, rows = np.random.default_rng([seed, 1]), [], max(1, _AT_ONCE // len(found))
    times = min(DRAWS, max(1_000, _RESAMPLES // len(found)))
    for start in range(0, times, rows):
        drawn = random.integers(0, len(found), (min(rows, times - start), len(found)), dtype=np.int32)
        weights = shares[drawn]
        totals = weights.sum(1)
        some = totals > 0
        means.append(((weights * found[drawn]).sum(1)[some]) / totals[some])
    low, high = np.quantile(np.concatenate(means), [LIMIT / 2, 1 - LIMIT / 2])
    return float(low), float(high)


def holm(ps: Sequence[float]) -> list[float]:
    """Several p made comparable with one limit: the smallest counts as often as there are, the next once less.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, reached = [0.0] * len(ps), 0.0
    for place, position in enumerate(sorted(range(len(ps)), key=lambda position: ps[position])):
        reached = max(reached, min(1.0, ps[position] * (len(ps) - place)))
        adjusted[position] = reached
    return adjusted


def student(gaps: Sequence[float]) -> float:
    """Two-sided p of a mean of differences by Student's t. Differences that are all the same would give it no spread
    to measure by and no doubt at all: then their signs alone count.

    >>> round(student([1.0, 2.0, 3.0]), 3), student([0.25, 0.25]), student([1.0])
    (0.074, 0.5, 1.0)
    """
    if len(gaps) < 2 or stdev(gaps) <= 1e-9 * abs(mean(gaps)):
        return sign_flip(gaps)
    from scipy.stats import t  # takes half a second to import

    return float(2 * t.sf(abs(mean(gaps)) / (stdev(gaps) / sqrt(len(gaps))), len(gaps) - 1))


def half_width(values: Sequence[float]) -> float | None:
    """How far the 95 % interval of a mean reaches to both sides, by Student's t; None for fewer than two values.

    >>> round(half_width([1.0, 2.0, 3.0]), 2)  # 4.30 times the deviation, 1, by the root of 3
    2.48
    """
    if len(values) < 2:
        return None
    from scipy.stats import t

    return float(t.ppf(1 - LIMIT / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))


def rank_correlation(x: Numbers, y: Numbers, seed: int = 0) -> tuple[float, float] | None:
    """Spearman's rank correlation of two numbers of every client, or of every two clients (square; what they are to
    themselves does not count), with its two-sided p: how often clients in another order are as far from zero. Pairs of
    clients are not independent of each other, so it is clients who change places (Mantel's test). None where one of
    them does not vary.

    >>> rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0]))  # 2 of the 6 orders
    (1.0, 0.3333333333333333)
    """
    ours, theirs = _ranks(x), _ranks(y)
    size = sqrt(float((ours**2).sum()) * float((theirs**2).sum()))
    if not size > 0:
        return None
    found, clients = float((ours * theirs).sum()) / size, len(x)
    draws = min(DRAWS - 1, max(199, _SHUFFLED // x.size))
    exact = clients < 10 and factorial(clients) <= draws
    random, reached, rows = np.random.default_rng(seed), 0, max(1, _AT_ONCE // x.size)
    everyone = np.array(list(permutations(range(clients)))) if exact else np.tile(np.arange(clients), (rows, 1))
    for start in range(0, len(everyone) if exact else draws, rows):
        orders = everyone[start : start + rows] if exact else random.permuted(everyone[: draws - start], axis=1)
        turned = theirs[orders] if x.ndim == 1 else theirs[orders[:, :, None], orders[:, None, :]]
        sums = turned.reshape(len(orders), -1) @ ours.ravel() / size
        reached += int((abs(sums) >= abs(found) * (1 - 1e-9)).sum())
    return round(found, 12), reached / len(everyone) if exact else (1 + reached) / (1 + draws)


def _ranks(values: Numbers) -> Numbers:
    """Ranks less their mean, equals sharing theirs; the diagonal of a square is nought."""
    counts = ~np.eye(len(values), dtype=bool) if values.ndim == 2 else np.ones(len(values), dtype=bool)
    _, places, times = np.unique(values[counts], return_inverse=True, return_counts=True)
    ranks = (np.cumsum(times) - (times - 1) / 2)[places]
    found = np.zeros(values.shape)
    found[counts] = ranks - (ranks.mean() if ranks.size else 0.0)
    return found
