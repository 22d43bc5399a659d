"""Losses: functions of (outputs, targets) that return one loss per example.

A loss whose terms depend on the other examples of a batch, such as `cox_loss`, has a third parameter `sample_weight`
with one number per example. It must leave out examples of weight 0, which are padding.
"""

import inspect
import reprlib
from collections.abc import Callable, Sequence
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtailor.core.metrics import Task
from fedtailor.core.regression_metrics import squared_error
from fedtailor.core.survival import cox_loss
from fedtailor.core.vmap_context import is_transformed
from fedtailor.errors import ConfigError

Loss = Callable[..., Tensor]  # (outputs, targets) or (outputs, targets, sample_weight) -> one loss per example


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return one cross-entropy per example."""
    if is_transformed() and outputs.ndim == 2 and targets.ndim == 1 and targets.dtype == torch.int64:
        # The same bits; under vmap, PyTorch runs `nll_loss` as a slow function in Python, which imports SymPy.
        return -F.log_softmax(outputs, 1).gather(1, targets[:, None]).squeeze(1)
    return F.cross_entropy(outputs, targets, reduction="none")


class WeightedCrossEntropy(nn.Module):
    """The cross-entropy of each example times the weight of its class; a batch is averaged over its examples.

    >>> WeightedCrossEntropy([1.0, 10.0]).float()(torch.zeros(2, 2), torch.tensor([0, 1]))
    tensor([0.6931, 6.9315])
    """

    weights: Tensor

    def __init__(self, weights: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights, dtype=torch.float64))  # `Model.to` converts them

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.weights[targets] * cross_entropy(outputs, targets)

    def extra_repr(self) -> str:
        return ", ".join(f"{weight:g}" for weight in self.weights.tolist())


LOSSES: dict[Task, Loss] = {"classification": cross_entropy, "regression": squared_error, "survival": cox_loss}


def is_classification_loss(loss: Loss) -> bool:
    """Return whether a loss is the cross-entropy, with class weights or without."""
    return loss is cross_entropy or isinstance(loss, WeightedCrossEntropy)


def takes_sample_weight(loss: Loss) -> bool:
    """Return whether a loss has the parameter `sample_weight`.

    >>> takes_sample_weight(cox_loss), takes_sample_weight(cross_entropy)
    (True, False)
    """
    try:
        return "sample_weight" in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # a function without a signature, such as one written in C
        return False


def balanced_weights(counts: Sequence[int]) -> list[float]:
    """Return class weights such that all classes have the same total weight, and the mean weight of a sample is 1.

    A class without samples does not count and has weight 1.

    >>> balanced_weights([97, 3, 0])[1]  # 100 samples / (2 classes · 3)
    16.666666666666668
    """
    present = sum(count > 0 for count in counts)
    return [sum(counts) / (present * count) if count else 1.0 for count in counts]


def check_class_weights(weights: Sequence[float], classes: int | None) -> None:
    """Raise `ConfigError` unless there is one positive weight per class."""
    if classes is None:
        raise ConfigError("class_weights needs classes as targets; remove it for regression or survival.")
    if len(weights) != classes:
        raise ConfigError(f"class_weights needs one number per class, {classes} in all, got {len(weights)}.")
    if not all(0 < weight < inf for weight in weights):
        raise ConfigError(f"class_weights must be finite numbers above 0, got {reprlib.repr(list(weights))}.")
