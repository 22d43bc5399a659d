"""Ways of computing the convolutions of many clients, each with weights of its own, stacked on the leading axis.

A form is three functions: the convolution, and its gradients in the input and in the weights. They take
x [clients, batch, channels, height, width], weights [clients, outputs, channels / groups, *kernel], a bias
[clients, outputs] and gradients g [clients, batch, outputs, *out]. The gradient in the weights is a matrix
[clients, outputs, taps], of which the last column is the gradient in the bias, where there is one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """All of a convolution but its tensors."""

    size: Pair  # of the input
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    biased: bool
    form: str | None = None  # fixed, or None for the one that suits device and sizes

    @property
    def out(self) -> Pair:
        """The size of the output.

        >>> Geometry((28, 28), (5, 5), (1, 1), (0, 0), (1, 1), 1, True).out
        (24, 24)
        """
        height, width = (
            (self.size[i] + 2 * self.padding[i] - self.dilation[i] * (self.kernel[i] - 1) - 1) // self.stride[i] + 1
            for i in range(2)
        )
        return height, width


@dataclass(frozen=True)
class Form:
    """The three functions of one way of computing."""

    convolve: Callable[[Tensor, Tensor, Tensor | None, Geometry], Tensor]
    input_gradient: Callable[[Tensor, Tensor, Geometry], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, Geometry], Tensor]


# One client: PyTorch's own. The other forms must agree with these.


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, of: Geometry) -> Tensor:
    """One client's convolution."""
    return F.conv2d(x, weight, bias, of.stride, of.padding, of.dilation, of.groups)


def input_gradient(g: Tensor, weight: Tensor, of: Geometry) -> Tensor:
    """One client's gradient in the input."""
    like = g.new_empty(1).expand(len(g), weight.shape[1] * of.groups, *of.size)  # only its shape is used
    return _backward(g, like, weight, of, (True, False))[0]


def weight_gradient(g: Tensor, x: Tensor, of: Geometry) -> Tensor:
    """One client's gradient in the weights and the bias, a matrix."""
    like = g.new_empty(1).expand(g.shape[1], x.shape[1] // of.groups, *of.kernel)
    slope = _backward(g, x, like, of, (False, True))[1].flatten(1)
    return torch.cat([slope, g.sum((0, 2, 3))[:, None]], dim=1) if of.biased else slope


def _backward(g: Tensor, x: Tensor, weight: Tensor, of: Geometry, mask: tuple[bool, bool]) -> tuple[Tensor, ...]:
    out: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        g, x, weight, None, of.stride, of.padding, of.dilation, False, (0, 0), of.groups, (*mask, False)
    )
    return out


# Grouped: the clients are groups of one convolution, as in PyTorch's own rule for vmap.


def _grouped_convolve(x: Tensor, weight: Tensor, bias: Tensor | None, of: Geometry) -> Tensor:
    flat = None if bias is None else bias.flatten()
    return _apart(convolve(_together(x), weight.flatten(0, 1), flat, _many(of, len(x))), len(x))


def _grouped_input_gradient(g: Tensor, weight: Tensor, of: Geometry) -> Tensor:
    return _apart(input_gradient(_together(g), weight.flatten(0, 1), _many(of, len(g))), len(g))


def _grouped_weight_gradient(g: Tensor, x: Tensor, of: Geometry) -> Tensor:
    slope = weight_gradient(_together(g), _together(x), _many(of, len(g)))
    return slope.reshape(len(g), -1, slope.shape[1])


def _many(of: Geometry, clients: int) -> Geometry:
    return replace(of, groups=of.groups * clients)


def _together(x: Tensor) -> Tensor:
    """[clients, batch, channels, ...] as [batch, clients * channels, ...]."""
    return x.transpose(0, 1).flatten(1, 2)


def _apart(x: Tensor, clients: int) -> Tensor:
    return x.reshape(len(x), clients, -1, *x.shape[2:]).transpose(0, 1)


# Each: one client after another.


def _each_convolve(x: Tensor, weight: Tensor, bias: Tensor | None, of: Geometry) -> Tensor:
    own = [None] * len(x) if bias is None else list(bias)
    return torch.stack([convolve(*one, of) for one in zip(x, weight, own, strict=True)])


def _each_input_gradient(g: Tensor, weight: Tensor, of: Geometry) -> Tensor:
    return torch.stack([input_gradient(*one, of) for one in zip(g, weight, strict=True)])


def _each_weight_gradient(g: Tensor, x: Tensor, of: Geometry) -> Tensor:
    return torch.stack([weight_gradient(*one, of) for one in zip(g, x, strict=True)])


# Product: one matrix product a client, of its weights and of the patches of the input under the kernel.


def _product_convolve(x: Tensor, weight: Tensor, bias: Tensor | None, of: Geometry) -> Tensor:
    clients, batch = x.shape[:2]
    rows = weight.reshape(clients * of.groups, -1, prod(weight.shape[2:]))
    patches = _patches(x, of).view(len(rows), rows.shape[2], -1)
    start = torch.zeros((), dtype=x.dtype, device=x.device) if bias is None else bias.reshape(len(rows), -1, 1)
    out = torch.baddbmm(start, rows, patches)
    return out.view(clients, -1, batch, *of.out).transpose(1, 2)


def _product_input_gradient(g: Tensor, weight: Tensor, of: Geometry) -> Tensor:
    clients, batch = g.shape[:2]
    rows = weight.reshape(clients * of.groups, -1, prod(weight.shape[2:]))
    patches = torch.bmm(rows.mT, _channels_first(g, len(rows)))
    return _unpatch(patches.view(clients, -1, *of.kernel, batch, *of.out), of)


def _product_weight_gradient(g: Tensor, x: Tensor, of: Geometry) -> Tensor:
    clients, outputs = g.shape[0], g.shape[2]
    rows = _channels_first(g, clients * of.groups)
    slope = torch.bmm(rows, _patches(x, of).view(len(rows), -1, rows.shape[2]).mT).view(clients, outputs, -1)
    return torch.cat([slope, rows.sum(2).view(clients, outputs, 1)], dim=2) if of.biased else slope


def _channels_first(g: Tensor, matrices: int) -> Tensor:
    return g.transpose(1, 2).reshape(matrices, -1, g.shape[1] * prod(g.shape[3:]))


def _patches(x: Tensor, of: Geometry) -> Tensor:
    """What each tap of the kernel sees: [clients, channels, *kernel, batch, *out], in one copy."""
    padded = F.pad(x, (of.padding[1], of.padding[1], of.padding[0], of.padding[0])) if any(of.padding) else x
    clients, batch, channels = x.shape[:3]
    by_client, by_sample, by_channel, down, right = padded.stride()
    steps = (down * of.dilation[0], right * of.dilation[1], by_sample, down * of.stride[0], right * of.stride[1])
    seen = padded.as_strided((clients, channels, *of.kernel, batch, *of.out), (by_client, by_channel, *steps))
    return seen.contiguous()


def _unpatch(patches: Tensor, of: Geometry) -> Tensor:
    """The transpose of _patches: every pixel the sum of what all taps saw of it."""
    clients, channels, batch = patches.shape[0], patches.shape[1], patches.shape[4]
    (height, width), (top, left) = of.size, of.padding
    image = patches.new_zeros(clients, channels, batch, height + 2 * top, width + 2 * left)
    for row in range(of.kernel[0]):
        for column in range(of.kernel[1]):
            down, right = _reach(of, 0, row), _reach(of, 1, column)
            image[..., down, right] += patches[:, :, row, column]
    return image[..., top : top + height, left : left + width].transpose(1, 2)


def _reach(of: Geometry, axis: int, tap: int) -> slice:
    """The pixels of the padded input that a tap of the kernel sees along an axis."""
    start = tap * of.dilation[axis]
    return slice(start, start + (of.out[axis] - 1) * of.stride[axis] + 1, of.stride[axis])


# Kernel: Triton's, read when first used, for it is only there with CUDA.


def _kernel_convolve(x: Tensor, weight: Tensor, bias: Tensor | None, of: Geometry) -> Tensor:
    from fedtailor.engines import convolution_kernels

    return convolution_kernels.convolve(x, weight, bias, of)


def _kernel_input_gradient(g: Tensor, weight: Tensor, of: Geometry) -> Tensor:
    from fedtailor.engines import convolution_kernels

    return convolution_kernels.input_gradient(g, weight, of)


def _kernel_weight_gradient(g: Tensor, x: Tensor, of: Geometry) -> Tensor:
    from fedtailor.engines import convolution_kernels

    return convolution_kernels.weight_gradient(g, x, of)


FORMS = {
    "grouped": Form(_grouped_convolve, _grouped_input_gradient, _grouped_weight_gradient),
    "each": Form(_each_convolve, _each_input_gradient, _each_weight_gradient),
    "product": Form(_product_convolve, _product_input_gradient, _product_weight_gradient),
    "kernel": Form(_kernel_convolve, _kernel_input_gradient, _kernel_weight_gradient),
}


def has_kernels(x: Tensor) -> bool:
    """Whether there are Triton kernels for a tensor: float32 on an NVIDIA GPU that has tensor cores."""
    return x.is_cuda and x.dtype == torch.float32 and _has_triton(x.device.index)


@cache
def _has_triton(device: int) -> bool:
    # AMD's devices call themselves CUDA too; on them the kernels were never tried
    if torch.version.cuda is None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def choose(operation: str, first: Tensor, second: Tensor, of: Geometry) -> str:
    """The form that suits the device and the sizes: a rule, not a timing, so that a run can be repeated to the bit."""
    if has_kernels(first) and of.groups == 1:
        # large convolutions fill the device one by one, and cuDNN's use tensor cores
        small = min(first.shape[2], second.shape[1 if operation == "convolve" else 2]) < 64
        return "kernel" if small or operation == "weight_gradient" else "each"
    if first.is_cuda:
        return "grouped"
    return "product" if operation == "convolve" and first.shape[2] <= 3 else "each"
