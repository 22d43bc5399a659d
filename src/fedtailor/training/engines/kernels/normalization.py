"""Group normalization of many clients on a GPU, fused with the addition of a residual and ReLU.

PyTorch's vmap rule for the gradient of group normalization consists of many operations, each of which passes over all
activations. Here, forward and backward read each activation once. The gradient is also defined in PyTorch
operations, so reverse-mode derivatives of any order work.
"""

from functools import partial
from math import prod
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fedtailor.core.precision import to_float32
from fedtailor.training.engines.kernels.convolution_algorithms import clients_first, has_triton_kernels
from fedtailor.training.engines.kernels.geometry import Normalization


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, kind: Normalization) -> Tensor:
    """Compute `F.group_norm`, the addition of a residual, and ReLU, in one pass if Triton kernels are available.

    >>> x, one = torch.tensor([[[[1.0, 3.0]]]]), torch.ones(1)
    >>> group_norm(x, one, 0 * one, None, Normalization(groups=1, eps=0.0, relu=True))
    tensor([[[[0., 1.]]]])
    """
    if x.ndim == 4 and has_triton_kernels(x) and _fits(x, residual, kind):
        given = None if residual is None else residual.to(x.dtype)
        fused: Tensor = _GroupNorm.apply(x, weight, bias, given, kind)[0]  # type: ignore[no-untyped-call]
        return fused
    normed = F.group_norm(x, kind.groups, weight, bias, kind.eps)
    total = normed if residual is None else normed + residual
    return torch.relu(total) if kind.relu else total


class VectorizedGroupNorm(nn.GroupNorm):
    """An `nn.GroupNorm` that calls this file's `group_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.weight, self.bias, None, Normalization(self.num_groups, self.eps))

    def forward_relu(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return relu(norm(x) + residual)."""
        kind = Normalization(self.num_groups, self.eps, relu=True, residual=residual is not None)
        return group_norm(x, self.weight, self.bias, residual, kind)


class _GroupNorm(Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, kind: Normalization) -> Any:
        return _triton().normalize(x, weight, bias, residual, kind)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, weight, _, _, ctx.kind = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, weight, *output)

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> Any:
        gradients = _Gradient.apply(g, *ctx.saved_tensors, ctx.kind)  # type: ignore[no-untyped-call]
        return *gradients, *[None] * (5 - len(gradients))

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *args: Any) -> Any:
        moved = clients_first(args[:4], dims, info.batch_size)
        return _GroupNorm.apply(*moved, args[4]), (0, 0, 0)  # type: ignore[no-untyped-call]


class _Gradient(Function):
    """The gradients of x, weight, bias, and of the residual if there is one."""

    @staticmethod
    def forward(
        g: Tensor, x: Tensor, weight: Tensor, out: Tensor, mean: Tensor, scale: Tensor, kind: Normalization
    ) -> Any:
        return _triton().gradient(g, x, weight, out, mean, scale, kind)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        g, x, weight, out, _, _, ctx.kind = inputs
        ctx.save_for_backward(g, x, weight, out)

    @staticmethod
    def backward(ctx: Any, *u: Tensor) -> Any:
        g, x, weight, out = ctx.saved_tensors
        pull_back = torch.func.vjp(partial(gradient, out=out, kind=ctx.kind), g, x, weight)[1]
        return *pull_back(u), None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *args: Any) -> Any:
        moved = clients_first(args[:6], dims, info.batch_size)
        found = _Gradient.apply(*moved, args[6])  # type: ignore[no-untyped-call]
        return found, (0,) * len(found)


def gradient(g: Tensor, x: Tensor, weight: Tensor, *, out: Tensor, kind: Normalization) -> tuple[Tensor, ...]:
    """Return the gradients of x, weight, bias, and of the residual if there is one, in PyTorch operations.

    With n = (x − mean) / deviation and its gradient h, that of x is (h − mean(h) − n · mean(h · n)) / deviation.
    """
    masked = to_float32(g * (out > 0) if kind.relu else g)
    values = to_float32(x).unflatten(-3, (kind.groups, -1))
    centered = values - _mean(values)
    scale = (_mean(centered.square()) + kind.eps).rsqrt()
    normed = centered * scale
    h = (masked * weight[..., None, :, None, None]).unflatten(-3, (kind.groups, -1))
    x_gradient = (scale * (h - _mean(h) - normed * _mean(h * normed))).flatten(-4, -3).to(x.dtype)
    weight_gradient = (masked * normed.flatten(-4, -3)).sum((-4, -2, -1))
    found = x_gradient, weight_gradient, masked.sum((-4, -2, -1))
    return (*found, masked.to(g.dtype)) if kind.residual else found


def _fits(x: Tensor, residual: Tensor | None, kind: Normalization) -> bool:
    """Whether the kernels can compute this: they broadcast no residual, and hold a group in registers."""
    values = prod(x.shape[1:]) // kind.groups
    has_same_shape = residual is None or residual.shape == x.shape
    return has_same_shape and values > 1 and _triton().fits(x.shape[1] // kind.groups, prod(x.shape[2:]))


def _mean(groups: Tensor) -> Tensor:
    return groups.mean((-3, -2, -1), keepdim=True)


def _triton() -> ModuleType:
    """Import the Triton kernels on first use, because Triton is not installed everywhere."""
    from fedtailor.training.engines.kernels import triton_group_norm

    return triton_group_norm
