"""Metrics of a model: functions of all outputs and targets of one client. Those of classifiers are here.

A metric is NaN where it is undefined, such as the AUC of a client with a single class. Means over clients leave out
such a client, unless its model diverged.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.core.regression_metrics import mae, mse, r2, rmse
from fedtailor.core.survival import c_index
from fedtailor.errors import ConfigError, unknown_name

Task = Literal["classification", "regression", "survival"]  # targets are classes, numbers, or (event, time)
MetricFunction = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) of one client -> scalar

RESERVED_PREFIXES = ("train_", "global_")  # of metrics on training samples, and of metrics of the global model
_CALIBRATION_BINS = 15
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

    A deployed server rejects values outside of `minimum` and `maximum`, which no honest client reports.

    >>> Metric(lambda outputs, targets: (outputs - targets).abs().max(), higher_is_better=False).higher_is_better
    False
    """

    function: MetricFunction
    higher_is_better: bool
    minimum: float = -math.inf
    maximum: float = math.inf


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


def average_precision(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the average precision, the area under the precision-recall curve without interpolation: of class 1 if the
    network has two outputs, and otherwise averaged over the classes among the targets, each one against the rest.

    Chance is the fraction of class 1. It is NaN without a sample of class 1 or if outputs are NaN.

    >>> outputs = torch.tensor([[0.0, 3.0], [0.0, 2.0], [0.0, 1.0]])
    >>> float(average_precision(outputs, torch.tensor([1, 0, 1])))  # mean of 1/1 and 2/3
    0.8333333333333333
    """
    classes = targets.new_ones(1, 1) if outputs.shape[1] == 2 else targets.bincount().nonzero()
    scores = outputs.double().softmax(1).T[classes[:, 0]]
    ordered, order = scores.sort(1)
    is_class = targets[order] == classes
    lower, _ = _count_lower(ordered)
    positives = is_class.sum(1, keepdim=True)
    found = positives - F.pad(is_class.cumsum(1), (1, 0)).gather(1, lower)  # of the class, with this score or above
    precision = found.double() / (len(targets) - lower)
    average = (precision * is_class).sum(1) / positives[:, 0]  # 0/0 is NaN
    return torch.where(scores.isnan().any(), torch.nan, average.mean())


def ece(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the expected calibration error: how far the probability of the predicted class is from its accuracy, as a
    weighted mean over 15 bins of equal width.

    >>> float(ece(torch.zeros(4, 2), torch.tensor([0, 0, 0, 1])))  # it predicts class 0 with 50 %, and 75 % are
    0.25
    """
    confidence, predicted = outputs.double().softmax(1).max(1)
    bins = (confidence * _CALIBRATION_BINS).ceil().clamp(1, _CALIBRATION_BINS).nan_to_num(1).long() - 1
    gaps = (predicted == targets).double() - confidence
    return gaps.new_zeros(_CALIBRATION_BINS).index_add(0, bins, gaps).abs().sum() / len(targets)


def brier(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the Brier score: the squared error of the probabilities, summed over the classes, or of class 1 alone if
    the network has two outputs.

    >>> float(brier(torch.zeros(4, 2), torch.tensor([0, 0, 0, 1])))  # (1/2)²
    0.25
    """
    probabilities = outputs.double().softmax(1)
    errors = (probabilities - F.one_hot(targets, outputs.shape[1])).square().sum(1).mean()
    return errors / 2 if outputs.shape[1] == 2 else errors


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
    lower, not_above = _count_lower(ordered)
    below = lower + not_above  # twice (the number of lower scores + half the number of equal scores), an integer
    positives, negatives = is_class.sum(1), (~is_class).sum(1)
    return ((below * is_class).sum(1) - positives.square()).double() / (2 * positives * negatives)


def _count_lower(ordered: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of lower scores, and of lower and equal scores, for each score of sorted rows.

    >>> [counts.tolist() for counts in _count_lower(torch.tensor([[1.0, 2.0, 2.0, 5.0]]))]
    [[[0, 1, 1, 3]], [[1, 3, 3, 4]]]
    """
    differs, count = ordered[:, 1:] != ordered[:, :-1], ordered.shape[1]
    positions = torch.arange(count, device=ordered.device)
    firsts = torch.where(F.pad(differs, (1, 0), value=True), positions, 0)
    ends = torch.where(F.pad(differs, (0, 1), value=True), positions + 1, count)
    return firsts.cummax(1).values, ends.flip(1).cummin(1).values.flip(1)


def _by_name(*functions: MetricFunction, minimum: float = 0.0, maximum: float = 1.0) -> dict[str, Metric]:
    metrics = {function.__name__: as_metric(function.__name__, function) for function in functions}
    return {name: replace(metric, minimum=minimum, maximum=maximum) for name, metric in metrics.items()}


METRICS: dict[Task, dict[str, Metric]] = {
    "classification": {
        **_by_name(accuracy, balanced_accuracy, macro_f1, weighted_f1, auc, auc_absent_zero, average_precision, ece),
        **_by_name(brier, maximum=2.0),
    },
    "regression": {**_by_name(mse, rmse, mae, maximum=math.inf), **_by_name(r2, minimum=-math.inf)},
    "survival": _by_name(c_index),
}  # by the names that the setting `metrics` of a run accepts
_DEFAULT_NAMES: dict[Task, Sequence[str]] = {
    "classification": ("accuracy", "macro_f1", "auc"), "regression": ("mse", "mae"), "survival": ("c_index",)
}  # fmt: skip
DEFAULT_METRICS = {task: {name: METRICS[task][name] for name in names} for task, names in _DEFAULT_NAMES.items()}
TARGETS: dict[Task, str] = {"classification": "classes", "regression": "numbers", "survival": "survival times"}


def find_metrics(names: Sequence[str], known: Mapping[str, Metric], task: Task) -> dict[str, Metric]:
    """Return the metrics of these names; raise `ConfigError` if one is unknown or does not fit the targets.

    >>> list(find_metrics(["mae", "r2"], METRICS["regression"], "regression"))
    ['mae', 'r2']
    """
    for name in names:
        others = [TARGETS[other] for other in METRICS if name in METRICS[other] and other != task]
        if name not in known and others:
            fix = f"choose from {', '.join(known) or 'none'}"
            raise ConfigError(f"The metric '{name}' is for {others[0]}, but the targets are {TARGETS[task]}; {fix}.")
        if name not in known:
            raise unknown_name("metric", name, known)
    return {name: known[name] for name in names}
