"""Means over clients: weighted by samples, unweighted, of the worst clients, and of the largest clients."""

from collections.abc import Mapping, Sequence
from math import inf, isnan
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


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
    ranked = sorted(values, key=lambda client: -inf if isnan(values[client]) else sign * values[client])
    return plain_mean({client: values[client] for client in _first_tenth(ranked)})


def largest_tenth(
    values: Mapping[int, float], sizes: Sequence[int], weights: Sequence[int] | None = None
) -> float | None:
    """Return the mean of the 10 % of clients with the most samples (at least one); ties are broken by client number.

    With `weights`, such as numbers of test samples, the mean is weighted.

    >>> largest_tenth({0: 0.5, 1: 0.9, 2: 0.7}, sizes=[10, 30, 30])
    0.9
    """
    largest = _first_tenth(sorted(values, key=lambda client: (-sizes[client], client)))
    found = {client: values[client] for client in largest}
    return plain_mean(found) if weights is None else weighted_mean(found, weights)


def _first_tenth(ranked: Sequence[T]) -> Sequence[T]:
    return ranked[: max(1, round(len(ranked) / 10))]
