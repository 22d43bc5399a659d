"""Random numbers as a function of what they are for: no generator, no state, the same in every engine.

Everything here is arithmetic on integers, so it is safe under `torch.func.vmap` and gives the same bits on
every device. A key is a 32-bit number made from (seed, round, client, ...), as an int or an int64 tensor.
"""

from math import log2
from typing import overload

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
Word = int | Tensor


@overload
def _mix(word: int) -> int: ...
@overload
def _mix(word: Tensor) -> Tensor: ...
@overload
def _mix(word: Word) -> Word: ...
def _mix(word: Word) -> Word:
    """A bijection of 32-bit words that scatters every bit (two multiplications, three shifts)."""
    word = word ^ (word >> 16)
    word = (word * 0x7FEB352D) & _MASK
    word = word ^ (word >> 15)
    word = (word * 0x846CA68B) & _MASK
    return word ^ (word >> 16)


@overload
def key(*parts: int) -> int: ...
@overload
def key(*parts: int | Tensor) -> int | Tensor: ...
def key(*parts: int | Tensor) -> int | Tensor:
    """One key for a list of parts; parts are whole numbers from 0 to 2³² − 1, and their order counts.

    >>> key(0, 1) == key(1, 0)
    False
    """
    word: Word = 0
    for part in parts:
        word = _mix(((word + 0x9E3779B9) & _MASK) ^ part)
    return word


def words(of: int | Tensor, count: int, device: torch.device) -> Tensor:
    """`count` 32-bit words that belong to a key, as int64."""
    return _mix(_mix(torch.arange(count, device=device)) ^ of)


def order(of: int | Tensor, count: int, size: Tensor | None, device: torch.device) -> Tensor:
    """A permutation of range(count) that belongs to a key; with `size`, positions from size on come last."""
    ranks = words(of, count, device)
    if size is not None:
        ranks = torch.where(torch.arange(count, device=device) < size, ranks, _MASK + 1)
    return torch.argsort(ranks, stable=True)


def uniform(of: int | Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers in (0, 1) that belong to a key; as many bits as the dtype holds, at most float32's.

    >>> uniform(key(0, 7), (2, 3), torch.float32, torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    count = int(torch.Size(shape).numel())
    bits = min(23, round(-log2(torch.finfo(dtype).eps)))  # more would round up to 1, or overflow in float16
    return ((words(of, count, device) >> (32 - bits)).to(dtype) + 0.5).mul(2.0**-bits).reshape(shape)
