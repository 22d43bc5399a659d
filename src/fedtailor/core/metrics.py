"""Metrics of a model: functions of all outputs and targets of one client.

A metric is NaN where it is undefined, such as the AUC of a client with a single class. Means over clients leave out
such a client, unless its model diverged.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtailor.errors import ConfigError

MetricFunction = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) of one client -> scalar

_HIGHER_IS_BETTER = {
    "accuracy", "balanced_accuracy", "top5_accuracy", "precision", "recall", "sensitivity", "specificity",
    "f1", "macro_f1", "micro_f1", "auc", "auroc", "roc_auc", "average_precision", "kappa", "mcc", "r2",
    "c_index", "concordance_index", "dice", "iou", "bleu", "rouge",
}  # fmt: skip
_LOWER_IS_BETTER = {
    "mse", "rmse", "mae", "mape", "error", "error_rate", "cross_entropy", "nll", "brier", "brier_score",
    "perplexity", "ece", "wer", "cer",
}  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """A metric: a function of all outputs and targets of a client that returns a scalar, NaN where it is undefined.

    >>> Metric(lambda outputs, targets: (outputs - targets).abs().max(), higher_is_better=False).higher_is_better
    False
    """

    function: MetricFunction
    higher_is_better: bool


def as_metric(name: str, metric: Metric | MetricFunction) -> Metric:
    """Return a `Metric`; the direction of a plain function follows from a well-known name, such as "accuracy".

    >>> as_metric("RMSE", lambda outputs, targets: outputs.mean()).higher_is_better
    False
    """
    if isinstance(metric, Metric):
        return metric
    known = name.lower().replace(" ", "_").replace("-", "_")
    if known not in _HIGHER_IS_BETTER | _LOWER_IS_BETTER:
        raise ConfigError(
            f"It is unknown whether a higher '{name}' is better or worse; pass "
            f"ft.Metric(function, higher_is_better=True) or higher_is_better=False as the metric '{name}'."
        )
    return Metric(metric, known in _HIGHER_IS_BETTER)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the fraction of samples whose largest output is that of their class."""
    return (outputs.argmax(1) == targets).double().mean()


def macro_f1(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the unweighted mean of F1 over the classes that occur among the targets or the predictions.

    >>> float(macro_f1(torch.eye(3)[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 2])))  # mean of 1, 2/3, and 0
    0.5555555555555555
    """
    predicted = outputs.argmax(1)
    classes = torch.cat([predicted, targets]).bincount().nonzero()
    predicted_mask, target_mask = predicted == classes, targets == classes
    return (2 * (predicted_mask & target_mask).sum(1).double() / (predicted_mask.sum(1) + target_mask.sum(1))).mean()


def auc(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the area under the ROC curve, one class against the rest, averaged over the classes among the targets.

    Scores are softmax probabilities, and ties count half. The AUC is NaN for a single class or if outputs are NaN.

    >>> float(auc(torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 1, 0])))
    0.5
    """
    classes = targets.bincount().nonzero()
    scores = outputs.double().softmax(1).T[classes[:, 0]]
    if len(classes) < 2 or bool(scores.isnan().any()):
        return scores.new_tensor(torch.nan)
    ordered, order = scores.sort(1)
    is_class = targets[order] == classes
    # twice (the number of lower scores + half the number of equal scores), which is an integer
    below = torch.searchsorted(ordered, ordered) + torch.searchsorted(ordered, ordered, right=True)
    positives, negatives = is_class.sum(1), (~is_class).sum(1)
    return (((below * is_class).sum(1) - positives.square()).double() / (2 * positives * negatives)).mean()
