"""Replace layers of a module by those that are fast when `torch.func.vmap` gives every client different weights."""

import copy
from itertools import pairwise, zip_longest
from typing import TypeVar

from torch import Tensor, nn

from fedtailor.training.engines.kernels.convolution import VectorizedConv2d
from fedtailor.training.engines.kernels.normalization import VectorizedGroupNorm
from fedtailor.training.engines.kernels.pooling import relu_pool

Module = TypeVar("Module", bound=nn.Module)


def adapt(module: Module) -> Module:
    """Return a copy of a module with fast 2-d convolutions and group normalizations, and fused ReLU.

    Parameters keep their names.

    >>> type(adapt(nn.Sequential(nn.Conv2d(1, 6, 5)))[0]).__name__
    'VectorizedConv2d'
    """
    adapted = copy.deepcopy(module)
    for layer in adapted.modules():
        # Subclasses may compute something else, and other kinds of padding are not supported here.
        if type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
            layer.__class__ = VectorizedConv2d
        elif type(layer) is nn.GroupNorm and layer.affine and not _has_hooks(layer):
            layer.__class__ = VectorizedGroupNorm
    for part in adapted.modules():
        if type(part) is nn.Sequential and any(_can_fuse(layer, after) for layer, after in pairwise(part)):
            part.__class__ = FusedSequential
    return adapted


class FusedSequential(nn.Sequential):
    """An `nn.Sequential` that fuses `nn.GroupNorm` with a following `nn.ReLU`, and `nn.ReLU` with a following
    `nn.MaxPool2d(2)`; its layers are unchanged."""

    def forward(self, input: Tensor) -> Tensor:
        layers = [*self]
        skip = False
        for layer, after, later in zip_longest(layers, layers[1:], layers[2:]):
            if skip:
                skip = False
            elif skip := _can_fuse(layer, after) and not _can_fuse(after, later):  # pooling gains most from fusion
                input = layer.forward_relu(input) if isinstance(layer, VectorizedGroupNorm) else relu_pool(input)
            else:
                input = layer(input)
        return input


def _can_fuse(layer: nn.Module | None, after: nn.Module | None) -> bool:
    if layer is None or after is None:
        return False
    if type(layer) is VectorizedGroupNorm:
        return type(after) is nn.ReLU and not _has_hooks(after)
    return type(layer) is nn.ReLU and _is_2x2_max_pool(after) and not (_has_hooks(layer) or _has_hooks(after))


def _is_2x2_max_pool(layer: nn.Module) -> bool:
    """Whether a layer is a 2×2 max pooling with default options."""
    if type(layer) is not nn.MaxPool2d or layer.ceil_mode or layer.return_indices:
        return False
    pairs = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return [p if isinstance(p, tuple) else (p, p) for p in pairs] == [(2, 2), (2, 2), (0, 0), (1, 1)]


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)
