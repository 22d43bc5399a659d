"""Weights that are not negative and sum to 1: the mixture with the least quadratic cost."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
_ROUNDING = 1e-13  # of the numbers that were added up: what is missing by less is not missing


def least_mixtures(costs: Tensor) -> Tensor:
    """For each of the positive definite matrices P the weights α ≥ 0 with sum 1 that make αᵀPα least, but for rounding:
    [problems, size, size] in, [problems, size] out; NaN where P is too near to singular to tell.

    >>> least_mixtures(torch.tensor([[[1.0, 0.0], [0.0, 3.0]], [[1.0, 2.0], [2.0, 5.0]]], dtype=torch.float64))
    tensor([[0.7500, 0.2500],
            [1.0000, 0.0000]], dtype=torch.float64)
    """
    problems = costs.detach().cpu().double().numpy()
    return torch.from_numpy(np.stack([_least(cost) for cost in problems])).to(costs)


def _least(cost: Array) -> Array:
    """α is β made to sum to 1, where β ≥ 0 makes βᵀPβ/2 − Σβ least. By active sets (Lawson and Hanson, 1974): let in
    whose slope falls most, solve for those that are in, and leave out whose value reaches 0 on the way."""
    unknown = np.full(len(cost), np.nan)
    unit = np.trace(cost) / len(cost)
    if not (np.isfinite(cost).all() and unit > 0):
        return unknown
    cost = cost / unit
    values, inside = np.zeros(len(cost)), np.zeros(len(cost), dtype=bool)
    for _ in range(3 * len(cost)):
        missing = np.where(inside, -np.inf, 1 - cost @ values)
        entering = int(missing.argmax())
        if missing[entering] <= _ROUNDING * (1 + np.abs(cost[entering]) @ values):
            return _shares(values)
        inside[entering] = True
        try:
            values = _settle(cost, values, inside)
        except np.linalg.LinAlgError:
            return unknown
        if not values[entering] > 0:  # by rounding: there is nothing left to gain
            return _shares(values)
    return unknown


def _shares(values: Array) -> Array:
    shares: Array = values / values.sum()
    return shares


def _settle(cost: Array, values: Array, inside: NDArray[np.bool_]) -> Array:
    """The best values of those inside, without those that would fall below 0; `inside` follows."""
    while True:  # each turn leaves one out
        some = np.flatnonzero(inside)
        best = np.zeros_like(values)
        best[some] = np.linalg.solve(cost[np.ix_(some, some)], np.ones(len(some)))
        falling = some[best[some] <= 0]
        if not len(falling):
            return best
        room = values[falling] / (values[falling] - best[falling])
        values = values + room.min() * (best - values)
        values[falling[room.argmin()]] = 0
        inside &= values > 0
