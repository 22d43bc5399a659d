"""Fused ReLU and 2×2 max pooling for many clients on a GPU: two passes over the activations instead of six.

The backward operation is linear, and its transpose is defined here too, so derivatives of any order work.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fedtailor.training.engines.kernels.convolution_algorithms import clients_first, has_triton_kernels, triton_kernels


def relu_pool(x: Tensor) -> Tensor:
    """Compute `F.max_pool2d(F.relu(x), 2)`, in one pass if Triton kernels are available.

    >>> import torch
    >>> relu_pool(torch.tensor([[[[-1.0, 2.0], [3.0, -4.0]]]]))
    tensor([[[[3.]]]])
    """
    if not has_triton_kernels(x):
        return F.max_pool2d(F.relu(x), 2)
    out: Tensor = _ReluPool.apply(x)[0]  # type: ignore[no-untyped-call]
    return out


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
