"""Maximum mean discrepancy (MMD) between two sets of features."""

from collections.abc import Sequence

import torch
from torch import Tensor


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return ‖x_i − y_j‖² for all pairs of rows.

    >>> squared_distances(torch.tensor([[0.0], [3.0]]), torch.tensor([[1.0]]))
    tensor([[1.],
            [4.]])
    """
    return (x[:, None] - y[None]).square().sum(-1)


def squared_mmd(x: Tensor, y: Tensor, weight: Tensor, bandwidths: Sequence[float | Tensor]) -> Tensor:
    """Return the squared MMD of two sets of rows, summed over the kernels exp(−‖·‖² / b) of all bandwidths b.

    Row i of either set has the weight `weight[i]`.

    >>> same = torch.tensor([[1.0], [2.0]])
    >>> squared_mmd(same, same, torch.ones(2), [1.0])
    tensor(0.)
    """
    share = weight / weight.sum().clamp(min=1)

    def similarity(a: Tensor, b: Tensor) -> Tensor:
        distances = squared_distances(a, b)
        return sum(
            (share @ torch.exp(-distances / width) @ share for width in bandwidths), start=distances.new_zeros(())
        )

    return similarity(x, x) + similarity(y, y) - 2 * similarity(x, y)
