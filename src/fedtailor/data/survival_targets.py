"""Survival times as targets: one pair (event, time) per sample."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.errors import DataError


def strata_of(y: Tensor, survival: bool) -> NDArray[Any]:
    """Return the targets by which splits are stratified: the events of survival times, and otherwise the targets.

    >>> strata_of(torch.tensor([[1.0, 5.0], [0.0, 9.0]]), survival=True)
    array([1, 0])
    """
    if not survival:
        return y.numpy()
    if y.ndim != 2 or y.shape[1] != 2:
        raise DataError(f"Survival targets must be pairs (event, time), got the shape {tuple(y.shape[1:])} per sample.")
    return y[:, 0].long().numpy()


def invalid_targets(y: Tensor) -> Tensor:
    """Return which samples have no valid pair of an event, 0 or 1, and a time of at least 0.

    >>> invalid_targets(torch.tensor([[1.0, 5.0], [2.0, 9.0], [0.0, -1.0]]))
    tensor([False,  True,  True])
    """
    strata_of(y, survival=True)  # raises an error for another shape
    return ((y[:, 0] != 0) & (y[:, 0] != 1)) | ~torch.isfinite(y[:, 1]) | (y[:, 1] < 0)
