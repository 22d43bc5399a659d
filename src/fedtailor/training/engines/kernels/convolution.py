"""Convolutions that stay fast when `torch.func.vmap` gives every client different weights.

Under vmap, PyTorch turns the clients into groups of one convolution, for which there are only slow kernels. Here the
convolution and its two gradients are separate operations with their own vmap rules, which choose an algorithm for the
device and the sizes. The derivative of each operation consists of the others, so derivatives of any order work.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fedtailor.core.precision import autocast_inputs
from fedtailor.errors import unknown_name
from fedtailor.training.engines.kernels.convolution_algorithms import (
    ALGORITHMS,
    Algorithm,
    choose_algorithm,
    clients_first,
    convolve,
    input_gradient,
    weight_gradient,
)
from fedtailor.training.engines.kernels.geometry import Geometry, Pair

_forced_algorithm: ContextVar[str | None] = ContextVar("algorithm", default=None)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> Tensor:
    """Compute `F.conv2d`, but fast also when vmap gives every client different weights.

    >>> x, weights = torch.ones(3, 8, 1, 5, 5), torch.ones(3, 2, 1, 3, 3)  # three clients with eight samples each
    >>> torch.func.vmap(conv2d)(x, weights).shape
    torch.Size([3, 8, 2, 3, 3])
    """
    if x.ndim != 4:  # one sample without a batch axis
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    x, weight, bias = cast(tuple[Tensor, Tensor, Tensor | None], autocast_inputs(x, weight, bias))
    size, kernel = (x.shape[2], x.shape[3]), (weight.shape[2], weight.shape[3])
    # Backward may run in an autograd thread without context variables, so the geometry carries the algorithm.
    geometry = Geometry(size, kernel, stride, padding, dilation, groups, bias is not None, _forced_algorithm.get())
    return _apply(_Convolve, x, weight, bias, geometry)


class VectorizedConv2d(nn.Conv2d):
    """An `nn.Conv2d` that calls this file's `conv2d`."""

    def forward(self, input: Tensor) -> Tensor:
        sizes: tuple[Any, Any, Any] = (self.stride, self.padding, self.dilation)
        return conv2d(input, self.weight, self.bias, *sizes, self.groups)


@contextmanager
def use_algorithm(name: str) -> Iterator[None]:
    """Force this algorithm for all sizes.

    >>> with use_algorithm("im2col"):
    ...     out = torch.func.vmap(conv2d)(torch.ones(3, 8, 1, 5, 5), torch.ones(3, 2, 1, 3, 3))
    """
    if name not in ALGORITHMS:
        raise unknown_name("convolution algorithm", name, ALGORITHMS)
    token = _forced_algorithm.set(name)
    try:
        yield
    finally:
        _forced_algorithm.reset(token)


class _Convolve(Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        return convolve(x, weight, bias, geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.geometry = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x, weight), geometry = ctx.saved_tensors, ctx.geometry
        x_gradient = _apply(_InputGradient, g, weight, geometry) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            return x_gradient, *_split_bias(_apply(_WeightGradient, g, x, geometry), geometry), None
        return x_gradient, None, g.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        x, weight, bias, geometry = args
        if dims[1] is None and dims[2] is None:  # clients with the same weights form one large batch
            merged = convolve(x.movedim(dims[0], 0).flatten(0, 1), weight, bias, geometry)
            return _split_batch(merged, info.batch_size), 0
        x, weight, bias = clients_first(args[:3], dims, info.batch_size)
        return _select_algorithm("convolve", x, weight, geometry).convolve(x, weight, bias, geometry), 0


class _InputGradient(Function):
    @staticmethod
    def forward(g: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
        return input_gradient(g, weight, geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, weight, ctx.geometry = inputs
        ctx.save_for_backward(g, weight)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (g, weight), geometry = ctx.saved_tensors, replace(ctx.geometry, biased=False)
        g_gradient = _apply(_Convolve, u, weight, None, geometry) if ctx.needs_input_grad[0] else None
        w_gradient = (
            _split_bias(_apply(_WeightGradient, g, u, geometry), geometry)[0] if ctx.needs_input_grad[1] else None
        )
        return g_gradient, w_gradient, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        g, weight, geometry = args
        if dims[1] is None:
            merged = input_gradient(g.movedim(dims[0], 0).flatten(0, 1), weight, geometry)
            return _split_batch(merged, info.batch_size), 0
        g, weight = clients_first(args[:2], dims, info.batch_size)
        return _select_algorithm("input_gradient", g, weight, geometry).input_gradient(g, weight, geometry), 0


class _WeightGradient(Function):
    @staticmethod
    def forward(g: Tensor, x: Tensor, geometry: Geometry) -> Tensor:
        return weight_gradient(g, x, geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, x, ctx.geometry = inputs
        ctx.save_for_backward(g, x)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (g, x), geometry = ctx.saved_tensors, ctx.geometry
        weight, bias = _split_bias(u, geometry)
        g_gradient = _apply(_Convolve, x, weight, bias, geometry) if ctx.needs_input_grad[0] else None
        x_gradient = _apply(_InputGradient, g, weight, geometry) if ctx.needs_input_grad[1] else None
        return g_gradient, x_gradient, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        g, x = clients_first(args[:2], dims, info.batch_size)
        geometry = args[2]
        return _select_algorithm("weight_gradient", g, x, geometry).weight_gradient(g, x, geometry), 0


def _apply(function: type[Function], *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return out


def _split_bias(matrix: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor | None]:
    """Split a matrix of weights and bias, such as a weight gradient, into both."""
    taps = matrix.shape[1] - geometry.biased
    weight = matrix[:, :taps].reshape(len(matrix), -1, *geometry.kernel)
    return weight, matrix[:, taps] if geometry.biased else None


def _split_batch(merged: Tensor, clients: int) -> Tensor:
    return merged.reshape(clients, -1, *merged.shape[1:])


def _select_algorithm(operation: str, first: Tensor, second: Tensor, geometry: Geometry) -> Algorithm:
    # Under a further functorch transformation, only PyTorch's own operations are differentiable.
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) or t.requires_grad for t in (first, second)):
        return ALGORITHMS["grouped"]
    return ALGORITHMS[geometry.algorithm or choose_algorithm(operation, first, second, geometry)]
