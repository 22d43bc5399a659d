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

RESERVED_PREFIXES = ("train_", "global_")  # of metrics on training samples, and of metrics of the global model
_HIGHER_IS_BETTER = {
    "accuracy", "balanced_accuracy", "top5_accuracy", "precision", "recall", "sensitivity", "specificity",
    "f1", "macro_f1", "micro_f1", "weighted_f1", "auc", "auc_absent_zero", "auroc", "roc_auc", "average_precision",
    "kappa", "mcc", "r2",
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


def balanced_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over the classes among the targets of the fraction of their samples that is predicted as them.

    A model that always predicts the majority class has 1/2 if there are two classes, however rare the other one is.

    >>> float(balanced_accuracy(torch.eye(2)[[1, 1, 1, 1]], torch.tensor([0, 1, 1, 1])))  # mean of 0 and 1
    0.5
    """
    classes = targets.bincount().nonzero()
    is_class = targets == classes
    correct = (is_class & (outputs.argmax(1) == targets)).sum(1)
    return (correct.double() / is_class.sum(1)).mean()


def macro_f1(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the unweighted mean of F1 over the classes that occur among the targets or the predictions.

    >>> float(macro_f1(torch.eye(3)[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 2])))  # mean of 1, 2/3, and 0
    0.5555555555555555
    """
    return _f1_by_class(outputs, targets)[0].mean()


def weighted_f1(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of F1 over the classes among the targets, weighted by their numbers of samples.

    >>> float(weighted_f1(torch.eye(3)[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 2])))  # (2 · 1 + 1 · 2/3 + 1 · 0) / 4
    0.6666666666666666
    """
    f1, samples = _f1_by_class(outputs, targets)
    return (f1 * samples).sum() / samples.sum()


def auc(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the area under the ROC curve, one class against the rest, averaged over the classes among the targets.

    Scores are softmax probabilities, and ties count half. The AUC is NaN for a single class or if outputs are NaN.

    >>> float(auc(torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 1, 0])))
    0.5
    """
    return _auc_by_class(outputs, targets).mean()


def auc_absent_zero(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the area under the ROC curve, one class against the rest, averaged over all classes of the network; a
    class that is absent from the targets counts 0, and so does a class without other samples.

    This is how torchmetrics averages, and therefore many published tables. It is NaN only if outputs are NaN.

    >>> float(auc_absent_zero(torch.eye(4)[[0, 1, 1]], torch.tensor([0, 1, 1])))  # 1 for two of four classes
    0.5
    """
    found = _auc_by_class(outputs, targets)
    is_single_class = len(found) == 1 and not bool(outputs.softmax(1).isnan().any())
    return found.new_zeros(()) if is_single_class else found.sum() / outputs.shape[1]


def _f1_by_class(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return F1 and the number of samples of each class that occurs among the targets or the predictions."""
    predicted = outputs.argmax(1)
    classes = torch.cat([predicted, targets]).bincount().nonzero()
    predicted_mask, target_mask = predicted == classes, targets == classes
    samples = target_mask.sum(1)
    return 2 * (predicted_mask & target_mask).sum(1).double() / (predicted_mask.sum(1) + samples), samples


def _auc_by_class(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the AUC of each class among the targets; NaN if there is a single class or if outputs are NaN."""
    classes = targets.bincount().nonzero()
    scores = outputs.double().softmax(1).T[classes[:, 0]]
    if len(classes) < 2 or bool(scores.isnan().any()):
        return scores.new_full((len(classes),), torch.nan)
    ordered, order = scores.sort(1)
    is_class = targets[order] == classes
    # twice (the number of lower scores + half the number of equal scores), which is an integer
    below = torch.searchsorted(ordered, ordered) + torch.searchsorted(ordered, ordered, right=True)
    positives, negatives = is_class.sum(1), (~is_class).sum(1)
    return ((below * is_class).sum(1) - positives.square()).double() / (2 * positives * negatives)


CLASSIFICATION_METRICS = {
    name: as_metric(name, function)
    for name, function in {
        "accuracy": accuracy,
        "balanced_accuracy": balanced_accuracy,
        "macro_f1": macro_f1,
        "weighted_f1": weighted_f1,
        "auc": auc,
        "auc_absent_zero": auc_absent_zero,
    }.items()
}  # by the names that the setting `metrics` of a run accepts
DEFAULT_METRICS = {name: CLASSIFICATION_METRICS[name] for name in ("accuracy", "macro_f1", "auc")}
