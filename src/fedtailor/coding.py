"""How the numbers of an upload are written: only those that changed most, and in fewer bits. Tensors are stacked over
clients, and no client's code depends on another's.

A tensor that is coded becomes a small tree of what really crosses, under names that begin with "coded.".
"""

from math import ceil, prod
from typing import Any, Literal

import torch
from torch import Tensor

from fedtailor.trees import Rows, Tree

Form = Literal["none", "float16", "int8"]
_VALUES, _SCALE = "coded.values", "coded.scale"
_AT, _MASK = "coded.at", "coded.mask"  # where the values belong: by their positions, or by a bit for every number
_LARGEST_HALF = 65504.0
_LEVELS = 127  # of int8 on each side of 0


def is_coded(node: Any) -> bool:
    """Whether this part of a tree is one coded tensor.

    >>> is_coded(code(torch.ones(1, 3), 1.0, "int8")), is_coded({"w": torch.ones(1, 3)})
    (True, False)
    """
    return isinstance(node, dict) and _VALUES in node


def code(leaf: Tensor | Rows, share: float, form: Form) -> Tensor | Rows | Tree:
    """The share of every client's numbers that lies farthest from 0, in this form; of `Rows`, all of them.

    >>> {name: part.tolist() for name, part in code(torch.tensor([[0.0, -4.0, 1.0, 2.0]]), 0.5, "float16").items()}
    {'coded.values': [[-4.0, 2.0]], 'coded.mask': [[False, True, False, True]]}
    """
    values, where = (leaf.values, {}) if isinstance(leaf, Rows) else _thin(leaf, share)
    written, scale = _write(values, form)
    if written is values and not where:
        return leaf
    return {_VALUES: Rows(written, leaf.present) if isinstance(leaf, Rows) else written, **scale, **where}


def read(coded: Tree, shape: torch.Size, dtype: torch.dtype) -> Tensor | Rows:
    """The tensor that `code` wrote down, in its shape, with zeros where nothing crossed.

    >>> read(code(torch.tensor([[0.0, -4.0, 1.0, 2.0]]), 0.25, "float16"), torch.Size([1, 4]), torch.float32)
    tensor([[ 0., -4.,  0.,  0.]])
    """
    written = coded[_VALUES]
    values = (written.values if isinstance(written, Rows) else written).to(dtype)
    if _SCALE in coded:
        values = values * beside(coded[_SCALE].to(dtype), values)
    if isinstance(written, Rows):
        return Rows(values, written.present)
    if _MASK in coded:
        return values.new_zeros(shape).masked_scatter(coded[_MASK], values)
    if _AT in coded:
        zeros = values.new_zeros(shape[0], prod(shape[1:]))
        return zeros.scatter(1, coded[_AT].to(torch.int64), values).reshape(shape)
    return values


def is_readable(coded: Tree, count: int) -> bool:
    """Whether the values of a coded tensor of so many numbers have a place each, for codes from somebody else's hands.

    >>> is_readable({"coded.values": torch.ones(1, 2), "coded.at": torch.tensor([[5, 5]])}, 9)
    False
    """
    values = coded[_VALUES]
    if _MASK in coded:
        return bool((coded[_MASK].flatten(1).sum(1) == values.shape[1]).all())
    if _AT in coded:
        at = coded[_AT].to(torch.int64)
        return bool((at[:, 1:] > at[:, :-1]).all() and (at >= 0).all() and (at < count).all())
    return True


def beside(numbers: Tensor, values: Tensor) -> Tensor:
    """One number a client, with axes to stand beside its values."""
    return numbers.reshape(-1, *[1] * (values.ndim - 1))


def _thin(values: Tensor, share: float) -> tuple[Tensor, Tree]:
    """The numbers of every client farthest from 0, in their order, and where they belong, in what takes fewer bits."""
    flat = values.reshape(len(values), values[0].numel())
    count = flat.shape[1]
    kept = max(1, ceil(share * count - 1e-9))  # the share may be a rounded one
    if kept >= count:
        return values, {}
    at = flat.abs().topk(kept, sorted=False).indices.sort(1).values
    chosen, narrow = flat.gather(1, at), count <= 2**16
    if count <= kept * (16 if narrow else 32):
        mask = torch.zeros_like(flat, dtype=torch.bool).scatter(1, at, True)
        return chosen, {_MASK: mask.reshape(values.shape)}
    return chosen, {_AT: at.to(torch.uint16 if narrow else torch.int32)}


def _write(values: Tensor, form: Form) -> tuple[Tensor, Tree]:
    """The values in a form, and what else it takes to read them: for int8 a number for each client's tensor."""
    if form == "float16":
        return values.clamp(-_LARGEST_HALF, _LARGEST_HALF).half(), {}  # beyond, a half would be infinite
    if form == "int8" and values[0].numel() > 1:  # one number alone is no longer than its scale
        scale = values.flatten(1).abs().amax(1) / _LEVELS
        steps = values / beside(torch.where(scale > 0, scale, 1), values)
        return steps.round().clamp(-_LEVELS, _LEVELS).to(torch.int8), {_SCALE: scale}
    return values, {}
