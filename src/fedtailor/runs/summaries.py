"""Means over clients: weighted by samples, unweighted, of the worst clients, and of the largest clients."""

from collections.abc import Mapping, Sequence
from math import inf, isnan

import numpy as np
from numpy.typing import NDArray


def weighted_mean(values: Mapping[int, float], weights: Sequence[int] | NDArray[np.int64]) -> float | None:
    """Return the mean over all samples: each client is weighted by its number of samples.

    >>> weighted_mean({0: 1.0, 1: 0.0}, [3, 1])
    0.75
    """
    total = sum(int(weights[client]) for client in values)
    return sum(value * int(weights[client]) for client, value in values.items()) / total if total else None


def plain_mean(values: Mapping[int, float]) -> float | None:
    """Return the mean in which all clients have equal weight."""
    return sum(values.values()) / len(values) if values else None


def worst_tenth(values: Mapping[int, float], higher_is_better: bool = True) -> float | None:
    """Return the mean of the worst 10 % of clients (at least one); clients that diverged rank last.

    >>> worst_tenth({client: float(client) for client in range(20)})
    0.5
    """
    sign = 1 if higher_is_better else -1
    return _first_tenth(sorted(values.values(), key=lambda value: -inf if isnan(value) else sign * value))


def largest_tenth(values: Mapping[int, float], sizes: Sequence[int]) -> float | None:
    """Return the mean of the 10 % of clients with the most samples (at least one); ties are broken by client number.

    >>> largest_tenth({0: 0.5, 1: 0.9, 2: 0.7}, sizes=[10, 30, 30])
    0.9
    """
    return _first_tenth([values[client] for client in sorted(values, key=lambda client: (-sizes[client], client))])


def _first_tenth(ranked: Sequence[float]) -> float | None:
    first = ranked[: max(1, round(len(ranked) / 10))]
    return sum(first) / len(first) if first else None
