"""Convolutions that stay fast when `torch.func.vmap` gives every client weights of its own.

Under vmap PyTorch makes them groups of one convolution, for which there are only slow kernels. Here the convolution and
its two gradients are operations of their own, computed in the form that suits the device and the sizes. Each one's
derivative is made of the others, so derivatives of any order work.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fedtailor.engines.convolution_forms import (
    FORMS,
    Form,
    Geometry,
    Pair,
    choose,
    convolve,
    input_gradient,
    weight_gradient,
)
from fedtailor.engines.pooling import fuse
from fedtailor.errors import unknown

Module = TypeVar("Module", bound=nn.Module)
_fixed: ContextVar[str | None] = ContextVar("form", default=None)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> Tensor:
    """What F.conv2d computes, fast also where vmap gives every client weights of its own.

    >>> x, weights = torch.ones(3, 8, 1, 5, 5), torch.ones(3, 2, 1, 3, 3)  # three clients, eight samples each
    >>> torch.func.vmap(conv2d)(x, weights).shape
    torch.Size([3, 8, 2, 3, 3])
    """
    if x.ndim != 4:  # one sample without a batch
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    size, kernel = (x.shape[2], x.shape[3]), (weight.shape[2], weight.shape[3])
    # backward may run on a thread of autograd's, which sees no context variables: the fixed form travels along
    of = Geometry(size, kernel, stride, padding, dilation, groups, bias is not None, _fixed.get())
    return _call(_Convolve, x, weight, bias, of)


def adapt(module: Module) -> Module:
    """A copy of a module, with the same names of parameters, whose 2-d convolutions are this file's, and ReLU and
    max-pooling one layer where they follow each other in nn.Sequential.

    >>> type(adapt(nn.Sequential(nn.Conv2d(1, 6, 5)))[0]).__name__
    'ClientsConv2d'
    """
    twin = copy.deepcopy(module)
    for layer in twin.modules():
        # subclasses may compute something else; padding by name or by other values is left to PyTorch
        if type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
            layer.__class__ = ClientsConv2d
    fuse(twin)
    return twin


class ClientsConv2d(nn.Conv2d):
    """nn.Conv2d through this file's conv2d."""

    def forward(self, input: Tensor) -> Tensor:
        sizes: tuple[Any, Any, Any] = (self.stride, self.padding, self.dilation)
        return conv2d(input, self.weight, self.bias, *sizes, self.groups)


@contextmanager
def use_form(name: str) -> Iterator[None]:
    """Compute in this form, whatever the sizes.

    >>> with use_form("product"):
    ...     out = torch.func.vmap(conv2d)(torch.ones(3, 8, 1, 5, 5), torch.ones(3, 2, 1, 3, 3))
    """
    if name not in FORMS:
        raise unknown("form of convolution", name, FORMS)
    token = _fixed.set(name)
    try:
        yield
    finally:
        _fixed.reset(token)


class _Convolve(Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, of: Geometry) -> Tensor:
        return convolve(x, weight, bias, of)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.of = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x, weight), of = ctx.saved_tensors, ctx.of
        slope_x = _call(_InputGradient, g, weight, of) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            return slope_x, *_split(_call(_WeightGradient, g, x, of), of), None
        return slope_x, None, g.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        x, weight, bias, of = args
        if dims[1] is None and dims[2] is None:  # clients that share weights are one large batch
            return _rows(convolve(x.movedim(dims[0], 0).flatten(0, 1), weight, bias, of), info.batch_size), 0
        x, weight, bias = _stacked(args[:3], dims, info.batch_size)
        return _form("convolve", x, weight, of).convolve(x, weight, bias, of), 0


class _InputGradient(Function):
    @staticmethod
    def forward(g: Tensor, weight: Tensor, of: Geometry) -> Tensor:
        return input_gradient(g, weight, of)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, weight, ctx.of = inputs
        ctx.save_for_backward(g, weight)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (g, weight), of = ctx.saved_tensors, replace(ctx.of, biased=False)
        slope_g = _call(_Convolve, u, weight, None, of) if ctx.needs_input_grad[0] else None
        slope_weight = _split(_call(_WeightGradient, g, u, of), of)[0] if ctx.needs_input_grad[1] else None
        return slope_g, slope_weight, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        g, weight, of = args
        if dims[1] is None:
            return _rows(input_gradient(g.movedim(dims[0], 0).flatten(0, 1), weight, of), info.batch_size), 0
        g, weight = _stacked(args[:2], dims, info.batch_size)
        return _form("input_gradient", g, weight, of).input_gradient(g, weight, of), 0


class _WeightGradient(Function):
    @staticmethod
    def forward(g: Tensor, x: Tensor, of: Geometry) -> Tensor:
        return weight_gradient(g, x, of)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, x, ctx.of = inputs
        ctx.save_for_backward(g, x)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (g, x), of = ctx.saved_tensors, ctx.of
        weight, bias = _split(u, of)
        slope_g = _call(_Convolve, x, weight, bias, of) if ctx.needs_input_grad[0] else None
        slope_x = _call(_InputGradient, g, weight, of) if ctx.needs_input_grad[1] else None
        return slope_g, slope_x, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        g, x = _stacked(args[:2], dims, info.batch_size)
        of = args[2]
        return _form("weight_gradient", g, x, of).weight_gradient(g, x, of), 0


def _call(function: type[Function], *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return out


def _split(matrix: Tensor, of: Geometry) -> tuple[Tensor, Tensor | None]:
    """The weights and the bias that lie in a matrix of them."""
    taps = matrix.shape[1] - of.biased
    weight = matrix[:, :taps].reshape(len(matrix), -1, *of.kernel)
    return weight, matrix[:, taps] if of.biased else None


def _stacked(args: tuple[Any, ...], dims: tuple[int | None, ...], clients: int) -> list[Any]:
    """The tensors with the clients on the leading axis; what they share is repeated without being copied."""

    def stacked(tensor: Tensor | None, dim: int | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor.expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

    return [stacked(tensor, dim) for tensor, dim in zip(args, dims, strict=False)]


def _rows(merged: Tensor, clients: int) -> Tensor:
    return merged.reshape(clients, -1, *merged.shape[1:])


def _form(operation: str, first: Tensor, second: Tensor, of: Geometry) -> Form:
    # under a further transformation only PyTorch's own operations know what to do
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) or t.requires_grad for t in (first, second)):
        return FORMS["grouped"]
    return FORMS[of.form or choose(operation, first, second, of)]
