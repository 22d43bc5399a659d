"""Normalization followed by ReLU, which an engine may compute in one pass."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def normalize_relu(norm: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return relu(norm(x) + residual); a layer with the method `forward_relu` computes it in one pass.

    >>> normalize_relu(nn.Identity(), torch.tensor([-1.0, 2.0]), residual=torch.tensor([3.0, -4.0]))
    tensor([2., 0.])
    """
    fused: Callable[[Tensor, Tensor | None], Tensor] | None = getattr(norm, "forward_relu", None)
    if fused is not None:
        return fused(x, residual)
    normed: Tensor = norm(x)
    return torch.relu(normed if residual is None else normed + residual)
