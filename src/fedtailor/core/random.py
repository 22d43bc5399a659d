"""Random numbers as pure functions of a key, without a generator or other state.

All operations are integer arithmetic, so they run under `torch.func.vmap` and give the same bits in every engine and on
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
    """Hash a 32-bit word bijectively, so that each input bit affects all output bits."""
    word = word ^ (word >> 16)
    word = (word * 0x7FEB352D) & _MASK
    word = word ^ (word >> 15)
    word = (word * 0x846CA68B) & _MASK
    return word ^ (word >> 16)


@overload
def make_key(*parts: int) -> int: ...
@overload
def make_key(*parts: int | Tensor) -> int | Tensor: ...
def make_key(*parts: int | Tensor) -> int | Tensor:
    """Return the key of a sequence of integers from 0 to 2³² − 1; their order matters.

    >>> make_key(0, 1) == make_key(1, 0)
    False
    """
    word: Word = 0
    for part in parts:
        word = _mix(((word + 0x9E3779B9) & _MASK) ^ part)
    return word


def words(key: int | Tensor, count: int, device: torch.device) -> Tensor:
    """Return `count` random 32-bit words for a key, as int64."""
    return _mix(_mix(torch.arange(count, device=device)) ^ key)


def permutation(key: int | Tensor, count: int, size: Tensor | None, device: torch.device) -> Tensor:
    """Return a random permutation of range(count) for a key; with `size`, the numbers from `size` on come last."""
    ranks = words(key, count, device)
    if size is not None:
        ranks = torch.where(torch.arange(count, device=device) < size, ranks, _MASK + 1)
    return torch.argsort(ranks, stable=True)


def uniform(key: int | Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random numbers in (0, 1) for a key, with the precision of the dtype, but at most that of float32.

    >>> uniform(make_key(0, 7), (2, 3), torch.float32, torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    count = int(torch.Size(shape).numel())
    bits = min(23, round(-log2(torch.finfo(dtype).eps)))  # more bits would round up to 1, or overflow in float16
    return ((words(key, count, device) >> (32 - bits)).to(dtype) + 0.5).mul(2.0**-bits).reshape(shape)
