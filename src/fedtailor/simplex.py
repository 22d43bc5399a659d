"""Weights that are not negative and sum to 1: the mixture with the least quadratic cost."""

import torch
from torch import Tensor

_ROUNDING = 1e-13  # of the numbers that were added up: what is below 0 by less is 0
_AT_ONCE = 2**22  # numbers of matrices in work at once; bounds memory, changes nothing else


def least_mixtures(costs: Tensor) -> Tensor:
    """For each of the positive definite matrices P the weights α ≥ 0 with sum 1 that make αᵀPα least, but for rounding:
    [problems, size, size] in, [problems, size] out.

    >>> least_mixtures(torch.tensor([[[1.0, 0.0], [0.0, 3.0]], [[1.0, 2.0], [2.0, 5.0]]], dtype=torch.float64))
    tensor([[0.7500, 0.2500],
            [1.0000, 0.0000]], dtype=torch.float64)
    """
    some = max(1, _AT_ONCE // costs.shape[1] ** 2)
    return torch.cat([_least(part) for part in torch.split(costs, some)])


def _least(costs: Tensor) -> Tensor:
    """α is β made to sum to 1, where β ≥ 0, Pβ ≥ 1, and for every entry one of them holds with equality.

    Such a β is found by block principal pivoting (Júdice and Pires, 1994): guess which entries are positive, solve for
    them, and let those change sides that break a condition; all of them as long as they become fewer, else only the
    last, which ends for sure.
    """
    positions = torch.arange(costs.shape[1], device=costs.device)
    inside = torch.ones(costs.shape[:2], dtype=torch.bool, device=costs.device)
    fewest = torch.full_like(inside[:, 0], costs.shape[1] + 1, dtype=torch.long)
    patience = torch.full_like(fewest, 3)
    for _ in range(100 + 10 * costs.shape[1]):
        values = _solve(costs, inside)
        slack, size = _times(costs, values) - 1, _times(costs.abs(), values.abs())
        broken = torch.where(inside, values < 0, slack < -_ROUNDING * size)
        count = broken.sum(1)
        if not count.any():
            break
        fewer = count < fewest
        patience = torch.where(fewer, 3, patience - 1)
        fewest = torch.minimum(fewest, count)
        last = (broken * (positions + 1)).argmax(1, keepdim=True) == positions
        inside = inside ^ torch.where((patience > 0)[:, None], broken, broken & last)
    values = values.clamp(min=0)
    return values / values.sum(1, keepdim=True)


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors[..., None])[..., 0]


def _solve(costs: Tensor, inside: Tensor) -> Tensor:
    """Pβ = 1 for the entries inside, β = 0 outside; systems are no larger than the most that are inside."""
    most = int(inside.sum(1).max())
    order = inside.sort(dim=1, descending=True, stable=True).indices[:, :most]
    real = inside.gather(1, order)
    problems = torch.arange(len(costs), device=costs.device)[:, None, None]
    matrices = costs[problems, order[:, :, None], order[:, None, :]] * (real[:, :, None] & real[:, None, :])
    values = torch.linalg.solve(matrices + torch.diag_embed((~real).to(costs)), real.to(costs))
    return costs.new_zeros(inside.shape).scatter(1, order, values)
