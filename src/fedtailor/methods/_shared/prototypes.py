"""Class prototypes: the mean features of each class, and a loss that aligns features with them."""

import torch
from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.method import Setup
from fedtailor.core.trees import Params, Rows
from fedtailor.methods._shared.class_statistics import class_means, pick_rows


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
    loss = batch.mean(ctx.model.loss(ctx.model.head_output(params, features), batch.y))
    centers, present = pick_rows(targets, batch.y)
    return loss + lam * batch.mean(present * (features - centers).square().mean(1))
