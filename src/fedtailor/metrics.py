"""What is reported of a model: numbers made from all outputs and targets of one client.

A metric is NaN where these targets leave it undefined, as the AUC of a client that has one class only. Such a client is
left out of that metric, neither counted as bad nor as good; see `Evaluator`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """A number to report: a function of all outputs and targets of a client; NaN where it is undefined."""

    function: Callable[[Tensor, Tensor], Tensor]
    higher_is_better: bool = True


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of samples whose largest output is that of their class."""
    return (outputs.argmax(1) == targets).double().mean()


def macro_f1(outputs: Tensor, targets: Tensor) -> Tensor:
    """The plain mean of F1 over the classes that occur among the targets or the predictions.

    >>> float(macro_f1(torch.eye(3)[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 2])))  # of 1, 2/3 and 0
    0.5555555555555555
    """
    predicted = outputs.argmax(1)
    classes = torch.cat([predicted, targets]).bincount().nonzero()
    guessed, true = predicted == classes, targets == classes
    return (2 * (guessed & true).sum(1).double() / (guessed.sum(1) + true.sum(1))).mean()


def auc(outputs: Tensor, targets: Tensor) -> Tensor:
    """The area under the ROC curve of one class against the rest, by its softmax probability; ties count half. It is
    the plain mean over the classes among the targets; NaN where there is but one, or where outputs are no numbers.

    >>> float(auc(torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 1, 0])))
    0.5
    """
    classes = targets.bincount().nonzero()
    scores = outputs.double().softmax(1).T[classes[:, 0]]
    if len(classes) < 2 or bool(scores.isnan().any()):
        return scores.new_tensor(torch.nan)
    ordered, order = scores.sort(1)
    own = targets[order] == classes
    # how many lie below, counting half of those level with it, doubled so that it stays whole
    below = torch.searchsorted(ordered, ordered) + torch.searchsorted(ordered, ordered, right=True)
    inside, outside = own.sum(1), (~own).sum(1)
    return (((below * own).sum(1) - inside.square()).double() / (2 * inside * outside)).mean()
