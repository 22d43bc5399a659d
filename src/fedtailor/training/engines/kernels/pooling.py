"""Fused ReLU and 2×2 max pooling for many clients on a GPU: two passes over the activations instead of six.

The backward operation is linear, and its transpose is defined here too, so derivatives of any order work.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fedtailor.training.engines.kernels.convolution_algorithms import clients_first, has_triton_kernels, triton_kernels


def relu_pool(x: Tensor) -> Tensor:
    """Compute `F.max_pool2d(F.relu(x), 2)`, in one pass if Triton kernels are available.

    >>> relu_pool(torch.tensor([[[[-1.0, 2.0], [3.0, -4.0]]]]))
    tensor([[[[3.]]]])
    """
    if x.dtype != torch.float32 or not has_triton_kernels(x):
        return F.max_pool2d(F.relu(x), 2)
    out: Tensor = _ReluPool.apply(x)[0]  # type: ignore[no-untyped-call]
    return out


class FusedSequential(nn.Sequential):
    """An `nn.Sequential` that fuses each `nn.ReLU` with a following `nn.MaxPool2d(2)`; its layers are unchanged."""

    def forward(self, input: Tensor) -> Tensor:
        layers = [*self, None]
        skip = False
        for layer, after in pairwise(layers):
            if skip or layer is None:
                skip = False
            elif skip := after is not None and _can_fuse(layer, after):
                input = relu_pool(input)
            else:
                input = layer(input)
        return input


def fuse_relu_pool(module: nn.Module) -> None:
    """Fuse ReLU and pooling in every `nn.Sequential` of a module, in place; other modules are unchanged."""
    for part in module.modules():
        if type(part) is nn.Sequential and any(_can_fuse(layer, after) for layer, after in pairwise(part)):
            part.__class__ = FusedSequential


def _can_fuse(layer: nn.Module, after: nn.Module) -> bool:
    return type(layer) is nn.ReLU and _is_2x2_max_pool(after) and not (_has_hooks(layer) or _has_hooks(after))


def _is_2x2_max_pool(layer: nn.Module) -> bool:
    """Whether a layer is a 2×2 max pooling with default options."""
    if type(layer) is not nn.MaxPool2d or layer.ceil_mode or layer.return_indices:
        return False
    pairs = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return [p if isinstance(p, tuple) else (p, p) for p in pairs] == [(2, 2), (2, 2), (0, 0), (1, 1)]


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


class _ReluPool(Function):
    @staticmethod
    def forward(x: Tensor) -> Any:
        return triton_kernels().relu_pool(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.size = inputs[0].shape[-2:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        return _Unpool.apply(g, *ctx.saved_tensors, *ctx.size)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], x: Tensor) -> Any:
        assert dims[0] is not None
        return _ReluPool.apply(x.movedim(dims[0], 0)), (0, 0)  # type: ignore[no-untyped-call]


class _Unpool(Function):
    @staticmethod
    def forward(g: Tensor, argmax: Tensor, height: int, width: int) -> Any:
        return triton_kernels().unpool(g, argmax, height, width)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Any:
        return _Gather.apply(u, *ctx.saved_tensors), None, None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], g: Tensor, argmax: Tensor, height: int, width: int) -> Any:
        g, argmax = clients_first((g, argmax), dims, info.batch_size)
        return _Unpool.apply(g, argmax, height, width), 0  # type: ignore[no-untyped-call]


class _Gather(Function):
    @staticmethod
    def forward(x: Tensor, argmax: Tensor) -> Any:
        return triton_kernels().gather(x, argmax)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.size = inputs[0].shape[-2:]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Unpool.apply(g, *ctx.saved_tensors, *ctx.size), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], x: Tensor, argmax: Tensor) -> Any:
        x, argmax = clients_first((x, argmax), dims, info.batch_size)
        return _Gather.apply(x, argmax), 0  # type: ignore[no-untyped-call]
