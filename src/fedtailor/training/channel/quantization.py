"""Sparsification and quantization of uploads. Tensors are stacked over clients, and each client is encoded separately.

An encoded tensor is a small tree of the tensors that are sent, with names that start with "coded.".
"""

from math import ceil, prod
from typing import Any, Literal

import torch
from torch import Tensor

from fedtailor.core.trees import Rows, Tree

Format = Literal["none", "float16", "int8"]
_VALUES, _SCALE = "coded.values", "coded.scale"
_POSITIONS, _MASK = "coded.at", "coded.mask"  # of the values in a sparse tensor; the smaller of the two is sent
_MAX_FLOAT16 = 65504.0
_LEVELS = 127  # of int8 on each side of 0


def is_encoded(node: Any) -> bool:
    """Whether a node of a tree is an encoded tensor.

    >>> is_encoded(encode_tensor(torch.ones(1, 3), 1.0, "int8")), is_encoded({"w": torch.ones(1, 3)})
    (True, False)
    """
    return isinstance(node, dict) and _VALUES in node


def encode_tensor(leaf: Tensor | Rows, fraction: float, format: Format) -> Tensor | Rows | Tree:
    """Keep the fraction of every client's values with the largest magnitude (all values of `Rows`), in a format.

    >>> encoded = encode_tensor(torch.tensor([[0.0, -4.0, 1.0, 2.0]]), 0.5, "float16")
    >>> {name: part.tolist() for name, part in encoded.items()}
    {'coded.values': [[-4.0, 2.0]], 'coded.mask': [[False, True, False, True]]}
    """
    values, positions = (leaf.values, {}) if isinstance(leaf, Rows) else _sparsify(leaf, fraction)
    quantized, scale = _quantize(values, format)
    if quantized is values and not positions:
        return leaf
    return {_VALUES: Rows(quantized, leaf.present) if isinstance(leaf, Rows) else quantized, **scale, **positions}


def decode_tensor(coded: Tree, shape: torch.Size, dtype: torch.dtype) -> Tensor | Rows:
    """Return the tensor that `encode_tensor` encoded, with zeros for the values that were not sent.

    >>> encoded = encode_tensor(torch.tensor([[0.0, -4.0, 1.0, 2.0]]), 0.25, "float16")
    >>> decode_tensor(encoded, torch.Size([1, 4]), torch.float32)
    tensor([[ 0., -4.,  0.,  0.]])
    """
    quantized = coded[_VALUES]
    values = (quantized.values if isinstance(quantized, Rows) else quantized).to(dtype)
    if _SCALE in coded:
        values = values * expand_like(coded[_SCALE].to(dtype), values)
    if isinstance(quantized, Rows):
        return Rows(values, quantized.present)
    if _MASK in coded:
        return values.new_zeros(shape).masked_scatter(coded[_MASK], values)
    if _POSITIONS in coded:
        zeros = values.new_zeros(shape[0], prod(shape[1:]))
        return zeros.scatter(1, coded[_POSITIONS].to(torch.int64), values).reshape(shape)
    return values


def is_valid_encoding(coded: Tree, count: int) -> bool:
    """Whether every value of an untrusted encoded tensor has a distinct position among `count` values per client.

    >>> is_valid_encoding({"coded.values": torch.ones(1, 2), "coded.at": torch.tensor([[5, 5]])}, 9)
    False
    """
    values = coded[_VALUES]
    if _MASK in coded:
        return bool((coded[_MASK].flatten(1).sum(1) == values.shape[1]).all())
    if _POSITIONS in coded:
        positions = coded[_POSITIONS].to(torch.int64)
        ascending = (positions[:, 1:] > positions[:, :-1]).all()
        return bool(ascending and (positions >= 0).all() and (positions < count).all())
    return True


def expand_like(per_client: Tensor, values: Tensor) -> Tensor:
    """Reshape one value per client so that it broadcasts against stacked values."""
    return per_client.reshape(-1, *[1] * (values.ndim - 1))


def _sparsify(values: Tensor, fraction: float) -> tuple[Tensor, Tree]:
    """Return every client's values with the largest magnitude, in their order, and their positions or mask."""
    flat = values.reshape(len(values), values[0].numel())
    count = flat.shape[1]
    kept = max(1, ceil(fraction * count - 1e-9))  # tolerates rounding errors of the fraction
    if kept >= count:
        return values, {}
    positions = flat.abs().topk(kept, sorted=False).indices.sort(1).values
    largest, fits_16_bits = flat.gather(1, positions), count <= 2**16
    if count <= kept * (16 if fits_16_bits else 32):  # a mask takes one bit per value
        mask = torch.zeros_like(flat, dtype=torch.bool).scatter(1, positions, True)
        return largest, {_MASK: mask.reshape(values.shape)}
    return largest, {_POSITIONS: positions.to(torch.uint16 if fits_16_bits else torch.int32)}


def _quantize(values: Tensor, format: Format) -> tuple[Tensor, Tree]:
    """Return the values in a format, and for int8 the scale of each client's tensor."""
    if format == "float16":
        return values.clamp(-_MAX_FLOAT16, _MAX_FLOAT16).half(), {}  # larger values would become infinite
    if format == "int8" and values[0].numel() > 1:  # for a single value, the scale would be as large as the value
        scale = values.flatten(1).abs().amax(1) / _LEVELS
        steps = values / expand_like(torch.where(scale > 0, scale, 1), values)
        return steps.round().clamp(-_LEVELS, _LEVELS).to(torch.int8), {_SCALE: scale}
    return values, {}
