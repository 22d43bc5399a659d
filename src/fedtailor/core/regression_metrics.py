"""Metrics of predicted numbers: functions of all outputs and targets of one client, averaged over the numbers of a
sample."""

import torch
from torch import Tensor


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return one squared error per example, averaged over its outputs."""
    return (outputs - targets.reshape(outputs.shape)).square().reshape(len(outputs), -1).mean(1)


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error.

    >>> float(mse(torch.tensor([[1.0], [4.0]]), torch.tensor([1.0, 2.0])))
    2.0
    """
    return squared_error(outputs, targets).mean()


def rmse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the square root of the mean squared error, in the unit of the targets.

    >>> float(rmse(torch.tensor([[2.0], [4.0]]), torch.tensor([0.0, 2.0])))
    2.0
    """
    return mse(outputs, targets).sqrt()


def mae(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean absolute error, in the unit of the targets.

    >>> float(mae(torch.tensor([[1.0], [4.0]]), torch.tensor([1.0, 2.0])))
    1.0
    """
    return (outputs - targets.reshape(outputs.shape)).abs().mean()


def r2(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return R², 1 − (sum of squared errors) / (sum of squared deviations from the targets' mean).

    R² is 0 for a model that always predicts the mean, and negative for a worse one. It is NaN if the targets are
    constant, as for a client with a single sample. Targets with several numbers have the mean of their R².

    >>> float(r2(torch.tensor([[1.0], [2.0], [2.0]]), torch.tensor([1.0, 2.0, 3.0])))  # 1 − 1 / 2
    0.5
    """
    actual = targets.double().reshape(len(targets), -1)
    errors = (outputs.double().reshape(actual.shape) - actual).square().sum(0)
    deviations = (actual - actual.mean(0)).square().sum(0)
    is_constant = (actual == actual[0]).all(0)  # the deviations of a constant may be rounding errors
    return torch.where(is_constant, torch.nan, 1 - errors / deviations).mean()
