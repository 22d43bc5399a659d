"""Class statistics of a client's data, for classifiers: sample counts, means, and prototypes (mean features)."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.method import Setup
from fedtailor.core.trees import Params, Rows


def membership(batch: Batch, classes: int) -> Tensor:
    """Return the class membership of each sample as 0 or 1, with 0 for padding: [samples, classes].

    >>> membership(Batch(None, torch.tensor([1, 0]), torch.tensor([1.0, 0.0])), 2)
    tensor([[0., 1.],
            [0., 0.]])
    """
    # not F.one_hot, which raises an error in vmap(grad(...))
    of_class = batch.y[:, None] == torch.arange(classes, device=batch.y.device)
    return of_class.to(batch.weight.dtype) * batch.weight[:, None]


def class_counts(ctx: ClientContext) -> Tensor:
    """Return the number of samples per class, [classes]."""
    classes, _ = ctx.model.head_size
    counts: Tensor = ctx.sum_over_data(lambda batch: {"counts": membership(batch, classes).sum(0)})["counts"]
    return counts


def class_means(ctx: ClientContext, compute: Callable[[Batch], Tensor]) -> Rows:
    """Return the mean of compute(batch) over the samples of each class; the row of a class without samples is absent.

    `compute` returns one row per sample.
    """
    classes, _ = ctx.model.head_size

    def sums(batch: Batch) -> dict[str, Tensor]:
        member = membership(batch, classes)
        return {"counts": member.sum(0), "sums": member.T @ compute(batch)}

    totals = ctx.sum_over_data(sums)
    return Rows(totals["sums"] / totals["counts"].clamp(min=1)[:, None], totals["counts"] > 0)


def pick_rows(rows: Rows, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of the given classes, and a mask that is 1 where a row is present and 0 elsewhere.

    >>> pick_rows(Rows(torch.tensor([[5.0], [0.0]]), torch.tensor([True, False])), torch.tensor([1, 0]))
    (tensor([[0.],
            [5.]]), tensor([0., 1.]))
    """
    return rows.values[y], rows.present[y].to(rows.values.dtype)


def merge_rows(old: Rows, stacked: Rows, weights: Tensor) -> Rows:
    """Average each row over the clients that have it; a row that no client has stays unchanged.

    `weights` has the shape [clients, rows].

    >>> old = Rows(torch.tensor([[9.0], [9.0]]), torch.tensor([False, True]))
    >>> new = Rows(torch.tensor([[[1.0], [0.0]], [[4.0], [0.0]]]), torch.tensor([[True, False], [True, False]]))
    >>> merge_rows(old, new, torch.tensor([[2, 1], [1, 1]])).values
    tensor([[2.],
            [9.]])
    """
    shares = weights.double() * stacked.present
    total = shares.sum(0)
    fresh = torch.einsum("cr,cr...->r...", (shares / total.clamp(min=1)).to(stacked.values), stacked.values)
    return fill_absent(Rows(fresh, total > 0), old)


def fill_absent(fresh: Rows, old: Rows) -> Rows:
    """Return new rows, and the old ones where they are absent.

    >>> old = Rows(torch.tensor([[5.0]]), torch.tensor([True]))
    >>> fill_absent(Rows(torch.tensor([[1.0]]), torch.tensor([False])), old).values
    tensor([[5.]])
    """
    mask = fresh.present.reshape(fresh.present.shape + (1,) * (fresh.values.ndim - 1))
    return Rows(torch.where(mask, fresh.values, old.values), old.present | fresh.present)


def prototypes(ctx: ClientContext, params: Params) -> Rows:
    """Return the mean feature of each class that the client has, in evaluation mode: [classes, features]."""
    return class_means(ctx, lambda batch: ctx.model.eval_mode.features(params, batch.x))


def no_prototypes(setup: Setup) -> Rows:
    """Return the prototypes before round 1: none of any class."""
    classes, features = setup.model.head_size
    like = setup.like
    return Rows(like.new_zeros(classes, features), torch.zeros(classes, dtype=torch.bool, device=like.device))


def aligned_loss(ctx: ClientContext, params: Params, batch: Batch, targets: Rows, lam: float) -> Tensor:
    """Return the cross-entropy plus λ times the alignment of features with prototypes.

    The alignment is the mean of (z − c_y)² over batch and dimensions, for classes y with a prototype c_y.
    """
    features = ctx.model.features(params, batch.x)
    outputs = ctx.model.head_output(params, features)
    loss = batch.mean(ctx.model.losses(outputs, batch.y, batch.weight))
    centers, present = pick_rows(targets, batch.y)
    return loss + lam * batch.mean(present * (features - centers).square().mean(1))
