"""What a client knows of its classes, for models that classify: how many samples of each, and their mean features."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedtailor.batch import Batch
from fedtailor.local import LocalView
from fedtailor.trees import Params, Rows


def membership(batch: Batch, classes: int) -> Tensor:
    """1 where an example is of a class, 0 for padding: [examples, classes].

    >>> membership(Batch(None, torch.tensor([1, 0]), torch.tensor([1.0, 0.0])), 2)
    tensor([[0., 1.],
            [0., 0.]])
    """
    of_class = batch.y[:, None] == torch.arange(classes, device=batch.y.device)  # F.one_hot has no slope under vmap
    return of_class.to(batch.weight.dtype) * batch.weight[:, None]


def class_counts(local: LocalView) -> Tensor:
    """How many samples of every class the client has, [classes]."""
    classes, _ = local.model.head_size
    counts: Tensor = local.total(lambda batch: {"counts": membership(batch, classes).sum(0)})["counts"]
    return counts


def class_means(local: LocalView, compute: Callable[[Batch], Tensor]) -> Rows:
    """The mean of compute(batch), one row an example, over the samples of every class; absent where there are none."""
    classes, _ = local.model.head_size

    def sums(batch: Batch) -> dict[str, Tensor]:
        member = membership(batch, classes)
        return {"counts": member.sum(0), "sums": member.T @ compute(batch)}

    found = local.total(sums)
    return Rows(found["sums"] / found["counts"].clamp(min=1)[:, None], found["counts"] > 0)


def prototypes(local: LocalView, params: Params) -> Rows:
    """The mean feature of every class the client has, by the model as it serves: [classes, features]."""
    return class_means(local, lambda batch: local.model.serving.features(params, batch.x))


def pick_rows(rows: Rows, y: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of these classes, and 1 where there is one, 0 where not.

    >>> pick_rows(Rows(torch.tensor([[5.0], [0.0]]), torch.tensor([True, False])), torch.tensor([1, 0]))
    (tensor([[0.],
            [5.]]), tensor([0., 1.]))
    """
    return rows.values[y], rows.present[y].to(rows.values.dtype)


def merge_rows(old: Rows, stacked: Rows, weights: Tensor) -> Rows:
    """Every row as the weighted mean over those clients that have it, [clients, rows] of weights; a row that nobody has
    stays as it was.

    >>> old = Rows(torch.tensor([[9.0], [9.0]]), torch.tensor([False, True]))
    >>> new = Rows(torch.tensor([[[1.0], [0.0]], [[4.0], [0.0]]]), torch.tensor([[True, False], [True, False]]))
    >>> merge_rows(old, new, torch.tensor([[2, 1], [1, 1]])).values
    tensor([[2.],
            [9.]])
    """
    shares = weights.double() * stacked.present
    total = shares.sum(0)
    fresh = torch.einsum("cr,cr...->r...", (shares / total.clamp(min=1)).to(stacked.values), stacked.values)
    found = total > 0
    chosen = found.reshape(found.shape + (1,) * (fresh.ndim - 1))
    return Rows(torch.where(chosen, fresh, old.values), old.present | found)
