"""Algorithms for the convolutions of many clients with different weights, stacked on the leading axis.

An algorithm consists of three functions: the convolution, and its gradients with respect to the input and the weights.
They take x [clients, batch, channels, height, width], weights [clients, outputs, channels / groups, *kernel], a bias
[clients, outputs], and output gradients g [clients, batch, outputs, *out]. The weight gradient is a matrix
[clients, outputs, channels / groups · kernel area (+ 1)], whose last column is the gradient of the bias, if any.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from math import prod
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.training.engines.kernels.geometry import Geometry


@dataclass(frozen=True)
class Algorithm:
    """The three functions of an algorithm."""

    convolve: Callable[[Tensor, Tensor, Tensor | None, Geometry], Tensor]
    input_gradient: Callable[[Tensor, Tensor, Geometry], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, Geometry], Tensor]


def clients_first(args: tuple[Any, ...], dims: tuple[int | None, ...], clients: int) -> list[Any]:
    """Move the clients to the leading axis of each tensor; tensors that they share are expanded without a copy."""

    def move(tensor: Tensor | None, dim: int | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor.expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

    return [move(tensor, dim) for tensor, dim in zip(args, dims, strict=False)]


# One client: PyTorch's implementation, the reference for all algorithms.


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Return the convolution of one client."""
    return F.conv2d(x, weight, bias, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)


def input_gradient(g: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradient of one client's input."""
    shape = (len(g), weight.shape[1] * geometry.groups, *geometry.size)
    template = g.new_empty(1).expand(shape)  # only its shape is used
    return _convolution_backward(g, template, weight, geometry, (True, False))[0]


def weight_gradient(g: Tensor, x: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradient of one client's weights and bias as a matrix."""
    template = g.new_empty(1).expand(g.shape[1], x.shape[1] // geometry.groups, *geometry.kernel)
    gradient = _convolution_backward(g, x, template, geometry, (False, True))[1].flatten(1)
    return torch.cat([gradient, g.sum((0, 2, 3))[:, None]], dim=1) if geometry.biased else gradient


def _convolution_backward(
    g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, mask: tuple[bool, bool]
) -> tuple[Tensor, ...]:
    walk = (geometry.stride, geometry.padding, geometry.dilation, False, (0, 0))  # no transposed convolution
    out: tuple[Tensor, ...]
    out = torch.ops.aten.convolution_backward(g, x, weight, None, *walk, geometry.groups, (*mask, False))
    return out


# Grouped: the clients are groups of one convolution, as in PyTorch's vmap rule.


def _grouped_convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    flat = None if bias is None else bias.flatten()
    return _split_clients(
        convolve(_merge_clients(x), weight.flatten(0, 1), flat, _grouped_geometry(geometry, len(x))), len(x)
    )


def _grouped_input_gradient(g: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    return _split_clients(
        input_gradient(_merge_clients(g), weight.flatten(0, 1), _grouped_geometry(geometry, len(g))), len(g)
    )


def _grouped_weight_gradient(g: Tensor, x: Tensor, geometry: Geometry) -> Tensor:
    gradient = weight_gradient(_merge_clients(g), _merge_clients(x), _grouped_geometry(geometry, len(g)))
    return gradient.reshape(len(g), -1, gradient.shape[1])


def _grouped_geometry(geometry: Geometry, clients: int) -> Geometry:
    return replace(geometry, groups=geometry.groups * clients)


def _merge_clients(x: Tensor) -> Tensor:
    """Reshape [clients, batch, channels, ...] to [batch, clients * channels, ...]."""
    return x.transpose(0, 1).flatten(1, 2)


def _split_clients(x: Tensor, clients: int) -> Tensor:
    """Undo `_merge_clients`."""
    return x.reshape(len(x), clients, -1, *x.shape[2:]).transpose(0, 1)


# Loop: one client after another.


def _loop_convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    biases = [None] * len(x) if bias is None else list(bias)
    return torch.stack([convolve(*client_args, geometry) for client_args in zip(x, weight, biases, strict=True)])


def _loop_input_gradient(g: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    return torch.stack([input_gradient(*client_args, geometry) for client_args in zip(g, weight, strict=True)])


def _loop_weight_gradient(g: Tensor, x: Tensor, geometry: Geometry) -> Tensor:
    return torch.stack([weight_gradient(*client_args, geometry) for client_args in zip(g, x, strict=True)])


# im2col: one matrix product per client, of its weights and the input patches under the kernel.


def _im2col_convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    clients, batch = x.shape[:2]
    rows = weight.reshape(clients * geometry.groups, -1, prod(weight.shape[2:]))
    patches = _im2col(x, geometry).view(len(rows), rows.shape[2], -1)
    bias_rows = torch.zeros((), dtype=x.dtype, device=x.device) if bias is None else bias.reshape(len(rows), -1, 1)
    out = torch.baddbmm(bias_rows, rows, patches)
    return out.view(clients, -1, batch, *geometry.out).transpose(1, 2)


def _im2col_input_gradient(g: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    clients, batch = g.shape[:2]
    rows = weight.reshape(clients * geometry.groups, -1, prod(weight.shape[2:]))
    patches = torch.bmm(rows.mT, _channels_first(g, len(rows)))
    return _col2im(patches.view(clients, -1, *geometry.kernel, batch, *geometry.out), geometry)


def _im2col_weight_gradient(g: Tensor, x: Tensor, geometry: Geometry) -> Tensor:
    clients, outputs = g.shape[0], g.shape[2]
    rows = _channels_first(g, clients * geometry.groups)
    gradient = torch.bmm(rows, _im2col(x, geometry).view(len(rows), -1, rows.shape[2]).mT).view(clients, outputs, -1)
    return torch.cat([gradient, rows.sum(2).view(clients, outputs, 1)], dim=2) if geometry.biased else gradient


def _channels_first(g: Tensor, matrices: int) -> Tensor:
    return g.transpose(1, 2).reshape(matrices, -1, g.shape[1] * prod(g.shape[3:]))


def _im2col(x: Tensor, geometry: Geometry) -> Tensor:
    """Copy the input value under each kernel element: [clients, channels, *kernel, batch, *out]."""
    (top, left), stride, dilation = geometry.padding, geometry.stride, geometry.dilation
    padded = F.pad(x, (left, left, top, top)) if top or left else x
    clients, batch, channels = x.shape[:3]
    by_client, by_sample, by_channel, down, right = padded.stride()
    steps = (down * dilation[0], right * dilation[1], by_sample, down * stride[0], right * stride[1])
    windows = padded.as_strided(
        (clients, channels, *geometry.kernel, batch, *geometry.out), (by_client, by_channel, *steps)
    )
    return windows.contiguous()


def _col2im(patches: Tensor, geometry: Geometry) -> Tensor:
    """Apply the transpose of `_im2col`: sum the patch values of every pixel."""
    clients, channels, batch = patches.shape[0], patches.shape[1], patches.shape[4]
    (height, width), (top, left) = geometry.size, geometry.padding
    image = patches.new_zeros(clients, channels, batch, height + 2 * top, width + 2 * left)
    for row in range(geometry.kernel[0]):
        for column in range(geometry.kernel[1]):
            down, right = _tap_slice(geometry, 0, row), _tap_slice(geometry, 1, column)
            image[..., down, right] += patches[:, :, row, column]
    return image[..., top : top + height, left : left + width].transpose(1, 2)


def _tap_slice(geometry: Geometry, axis: int, tap: int) -> slice:
    """Return the pixels of the padded input under one kernel element (tap) along an axis."""
    start = tap * geometry.dilation[axis]
    return slice(start, start + (geometry.out[axis] - 1) * geometry.stride[axis] + 1, geometry.stride[axis])


def triton_kernels() -> ModuleType:
    """Import the Triton kernels on first use, because Triton is not installed everywhere."""
    from fedtailor.training.engines.kernels import triton_kernels

    return triton_kernels


def _triton_kernel(name: str) -> Callable[..., Tensor]:
    def compute(*args: Any) -> Tensor:
        result: Tensor = getattr(triton_kernels(), name)(*args)
        return result

    return compute


ALGORITHMS = {
    "grouped": Algorithm(_grouped_convolve, _grouped_input_gradient, _grouped_weight_gradient),
    "loop": Algorithm(_loop_convolve, _loop_input_gradient, _loop_weight_gradient),
    "im2col": Algorithm(_im2col_convolve, _im2col_input_gradient, _im2col_weight_gradient),
    "triton": Algorithm(*map(_triton_kernel, ("convolve", "input_gradient", "weight_gradient"))),
}


def has_triton_kernels(x: Tensor) -> bool:
    """Whether the Triton kernels support a tensor: on an NVIDIA GPU of compute capability 8.0 or higher, in float32 or
    bfloat16."""
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16) and _has_triton(x.device.index)


@cache
def _has_triton(device: int) -> bool:
    # PyTorch reports AMD GPUs as CUDA too; the kernels have not been tested on them.
    if torch.version.cuda is None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def choose_algorithm(operation: str, first: Tensor, second: Tensor, geometry: Geometry) -> str:
    """Return the name of the algorithm for a device and these sizes.

    The choice is a fixed rule, not a measurement, so that runs are reproducible to the bit.
    """
    if has_triton_kernels(first) and geometry.groups == 1:
        # A large convolution of one client fills the device, and cuDNN uses tensor cores for it.
        small = min(first.shape[2], second.shape[1 if operation == "convolve" else 2]) < 64
        return "triton" if small or operation == "weight_gradient" else "loop"
    if first.is_cuda:
        return "grouped"
    return "im2col" if operation == "convolve" and first.shape[2] <= 3 else "loop"
