"""ReLU and 2×2 max-pooling in one, for many clients at once on a GPU: two passes over the activations, where PyTorch
takes six. The gradient is linear, and its transpose reads where it writes, so derivatives of any order work.
"""

from itertools import pairwise
from types import ModuleType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fedtailor.engines.convolution_forms import has_kernels


def relu_pool(x: Tensor) -> Tensor:
    """F.max_pool2d(F.relu(x), 2), where there are kernels in one pass.

    >>> import torch
    >>> relu_pool(torch.tensor([[[[-1.0, 2.0], [3.0, -4.0]]]]))
    tensor([[[[3.]]]])
    """
    if not has_kernels(x):
        return F.max_pool2d(F.relu(x), 2)
    out: Tensor = _ReluPool.apply(x)[0]  # type: ignore[no-untyped-call]
    return out


class Fused(nn.Sequential):
    """An nn.Sequential that does every nn.ReLU together with the nn.MaxPool2d(2) that follows it; its layers, by
    themselves, are what they were."""

    def forward(self, input: Tensor) -> Tensor:
        layers = [*self, None]
        skip = False
        for layer, after in pairwise(layers):
            if skip or layer is None:
                skip = False
            elif skip := after is not None and _fit(layer, after):
                input = relu_pool(input)
            else:
                input = layer(input)
        return input


def fuse(module: nn.Module) -> None:
    """Let every nn.Sequential do ReLU and pooling in one, in place; elsewhere, what follows what is written in code."""
    for part in module.modules():
        if type(part) is nn.Sequential and any(_fit(layer, after) for layer, after in pairwise(part)):
            part.__class__ = Fused


def _fit(layer: nn.Module, after: nn.Module) -> bool:
    return type(layer) is nn.ReLU and _halves(after) and not (_hooked(layer) or _hooked(after))


def _halves(layer: nn.Module) -> bool:
    """Whether it is the plain 2×2 max-pooling."""
    if type(layer) is not nn.MaxPool2d or layer.ceil_mode or layer.return_indices:
        return False
    pairs = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return [p if isinstance(p, tuple) else (p, p) for p in pairs] == [(2, 2), (2, 2), (0, 0), (1, 1)]


def _hooked(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


def _kernels() -> ModuleType:
    from fedtailor.engines import convolution_kernels

    return convolution_kernels


class _ReluPool(Function):
    @staticmethod
    def forward(x: Tensor) -> Any:
        return _kernels().relu_pool(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.size = inputs[0].shape[-2:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        return _Spread.apply(g, *ctx.saved_tensors, *ctx.size)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], x: Tensor) -> Any:
        assert dims[0] is not None
        return _ReluPool.apply(x.movedim(dims[0], 0)), (0, 0)  # type: ignore[no-untyped-call]


class _Spread(Function):
    @staticmethod
    def forward(g: Tensor, which: Tensor, height: int, width: int) -> Any:
        return _kernels().spread(g, which, height, width)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Any:
        return _Pick.apply(u, *ctx.saved_tensors), None, None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], g: Tensor, which: Tensor, height: int, width: int) -> Any:
        g, which = (_clients_first(t, dim, info.batch_size) for t, dim in zip((g, which), dims, strict=False))
        return _Spread.apply(g, which, height, width), 0  # type: ignore[no-untyped-call]


class _Pick(Function):
    @staticmethod
    def forward(x: Tensor, which: Tensor) -> Any:
        return _kernels().pick(x, which)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.size = inputs[0].shape[-2:]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Spread.apply(g, *ctx.saved_tensors, *ctx.size), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], x: Tensor, which: Tensor) -> Any:
        x, which = (_clients_first(t, dim, info.batch_size) for t, dim in zip((x, which), dims, strict=False))
        return _Pick.apply(x, which), 0  # type: ignore[no-untyped-call]


def _clients_first(tensor: Tensor, dim: int | None, clients: int) -> Tensor:
    return tensor.expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
