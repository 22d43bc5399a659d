"""Quadratic programs on the probability simplex."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
_TOLERANCE = 1e-13  # relative rounding error of sums


def solve_simplex_qp(costs: Tensor) -> Tensor:
    """Minimize αᵀPα subject to α ≥ 0 and Σα = 1, for each positive definite matrix P of a batch.

    `costs` has the shape [problems, size, size], the result [problems, size]. The result is exact up to rounding, and
    NaN where P is too close to singular.

    >>> solve_simplex_qp(torch.tensor([[[1.0, 0.0], [0.0, 3.0]], [[1.0, 2.0], [2.0, 5.0]]], dtype=torch.float64))
    tensor([[0.7500, 0.2500],
            [1.0000, 0.0000]], dtype=torch.float64)
    """
    problems = costs.detach().cpu().double().numpy()
    return torch.from_numpy(np.stack([_solve(cost) for cost in problems])).to(costs)


def _solve(cost: Array) -> Array:
    """Solve one problem with an active-set method (Lawson and Hanson, 1974).

    α is β divided by its sum, where β ≥ 0 minimizes βᵀPβ/2 − Σβ. Each iteration activates the variable with the largest
    negative gradient, solves for the active variables, and deactivates variables that reach 0 on the way.
    """
    failed = np.full(len(cost), np.nan)
    scale = np.trace(cost) / len(cost)
    if not (np.isfinite(cost).all() and scale > 0):
        return failed
    cost = cost / scale
    solution, active = np.zeros(len(cost)), np.zeros(len(cost), dtype=bool)
    for _ in range(3 * len(cost)):
        residuals = np.where(active, -np.inf, 1 - cost @ solution)
        entering = int(residuals.argmax())
        if residuals[entering] <= _TOLERANCE * (1 + np.abs(cost[entering]) @ solution):
            return _normalize(solution)
        active[entering] = True
        try:
            solution = _solve_active(cost, solution, active)
        except np.linalg.LinAlgError:
            return failed
        if not solution[entering] > 0:  # no progress beyond rounding errors
            return _normalize(solution)
    return failed


def _normalize(values: Array) -> Array:
    """Divide by the sum."""
    shares: Array = values / values.sum()
    return shares


def _solve_active(cost: Array, solution: Array, active: NDArray[np.bool_]) -> Array:
    """Solve for the active variables and deactivate those that would become negative; update `active` in place."""
    while True:  # each iteration deactivates a variable
        indices = np.flatnonzero(active)
        candidate = np.zeros_like(solution)
        candidate[indices] = np.linalg.solve(cost[np.ix_(indices, indices)], np.ones(len(indices)))
        nonpositive = indices[candidate[indices] <= 0]
        if not len(nonpositive):
            return candidate
        fractions = solution[nonpositive] / (solution[nonpositive] - candidate[nonpositive])
        solution = solution + fractions.min() * (candidate - solution)
        solution[nonpositive[fractions.argmin()]] = 0
        active &= solution > 0
