"""Samples that a file contains, and what is recorded about them when the file is written."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedtailor.core.batch import as_parts
from fedtailor.core.model import Inputs
from fedtailor.core.tensor_hash import hash_tensors

_BLOCK_VALUES = 2**22  # values that are checked in one step


@dataclass(frozen=True, eq=False)
class StoredSamples:
    """Samples in a file: `x` is mapped into memory and read-only, and `y` is in memory."""

    x: Inputs
    y: Tensor
    sha256: str  # of x and y, recorded when the file was written
    is_finite: bool  # no input of any sample is NaN or infinity


def hash_samples(x: Inputs, y: Tensor) -> str:
    """Return the SHA-256 of all inputs and targets.

    >>> hash_samples(torch.zeros(2, 3), torch.zeros(2)) == hash_samples(torch.zeros(2, 3), torch.ones(2))
    False
    """
    return hash_tensors([*(part for _, part in sorted(as_parts(x).items())), y])


def non_finite_samples(part: Tensor) -> Tensor:
    """Return which samples contain NaN or infinity; needs little memory.

    >>> non_finite_samples(torch.tensor([[1.0, 2.0], [float("nan"), 0.0]]))
    tensor([False,  True])
    """
    if not part.is_floating_point() or not part.numel():
        return torch.zeros(len(part), dtype=torch.bool)
    blocks = torch.split(part, max(1, _BLOCK_VALUES // part[0].numel()))
    return torch.cat([~torch.isfinite(block.reshape(len(block), -1)).all(1) for block in blocks])
