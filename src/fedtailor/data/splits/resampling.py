"""Splits of one client's samples into training and test samples, drawn anew: repeated splits and cross-validation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.data.splits.class_fractions import Indices
from fedtailor.data.splits.partition import are_classes, hold_out, make_generator
from fedtailor.errors import DataError

_MAX_QUANTILES = 10  # strata of targets that are not classes


def draw_split(
    targets: NDArray[Any], num_test: int, repeat: int, client: int, folds: int | None = None
) -> tuple[Indices, Indices]:
    """Return the positions of one client's training and test samples, given the targets of all its samples.

    Without `folds`, `num_test` samples are held out, a new draw for each `repeat`. With `folds`, the draws are those of
    cross-validation: `repeat` 0 to folds − 1 are the folds of one partition, in which each sample is tested once, the
    next `folds` numbers those of another one, and so on.

    Both parts have the same proportions of classes, as far as the counts allow. Other targets are stratified by their
    quantiles if each is one number. A client with `num_test` 0 keeps all samples for training.

    >>> train, test = draw_split(np.array([0, 0, 1, 1]), num_test=2, repeat=0, client=0)
    >>> sorted(np.array([0, 0, 1, 1])[test].tolist())
    [0, 1]
    """
    everything = np.arange(len(targets))
    if not num_test:
        return everything, everything[:0]
    if folds is None:
        strata = _strata(targets, num_test)
        return hold_out(strata, everything, num_test / len(targets), (repeat, client, 3))
    held = _assign_folds(_strata(targets, len(targets) // folds), folds, repeat // folds, client) == repeat % folds
    return everything[~held], everything[held]


def redraw_splits(
    names: Sequence[str],
    train: Sequence[Tensor],
    test: Sequence[Tensor],
    targets: NDArray[Any],
    repeat: int,
    folds: int | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return all clients' training and test samples, drawn anew; `Federation.resplit` explains the draws.

    >>> train, test = redraw_splits(["ann"], [torch.tensor([0, 1])], [torch.tensor([2, 3])], np.arange(4) % 2, 0, None)
    >>> len(train[0]), sorted((test[0] % 2).tolist())  # one of each class
    (2, [0, 1])
    """
    check_repeat(repeat, folds)
    new_train, new_test = list[Tensor](), list[Tensor]()
    for client, (name, *parts) in enumerate(zip(names, train, test, strict=True)):
        own, num_test = torch.cat(parts).sort().values, len(parts[1])
        if folds is not None and num_test > 0 and len(own) < folds:
            raise DataError(f"Client {name} has {len(own)} samples, too few for {folds} folds; use fewer folds.")
        kept, held = draw_split(targets[own.numpy()], num_test, repeat, client, folds)
        new_train.append(own[torch.from_numpy(kept)])
        new_test.append(own[torch.from_numpy(held)])
    return tuple(new_train), tuple(new_test)


def check_repeat(repeat: int, folds: int | None) -> None:
    """Raise an error unless the number of a redrawn split, and the number of folds, are valid.

    >>> check_repeat(0, folds=1)
    Traceback (most recent call last):
    fedtailor.errors.DataError: folds must be an integer of at least 2, got 1.
    """
    for name, value, least in (("repeat", repeat, 0), ("folds", 2 if folds is None else folds, 2)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise DataError(f"{name} must be an integer of at least {least}, got {value!r}.")


def _assign_folds(strata: Indices, folds: int, repetition: int, client: int) -> Indices:
    """Return the fold of each sample; sizes of folds, in total and within a stratum, differ by at most one."""
    random = make_generator([repetition, client], 6)
    shuffled = random.permutation(len(strata))
    by_stratum = shuffled[np.argsort(strata[shuffled], kind="stable")]
    fold = np.empty(len(strata), np.int64)
    fold[by_stratum] = (np.arange(len(strata)) + random.integers(folds)) % folds
    return fold


def _strata(targets: NDArray[Any], groups: int) -> Indices:
    """Return the class of each sample, or the quantile of its target, or 0 if a target is several numbers."""
    if targets.ndim != 1:
        return np.zeros(len(targets), np.int64)
    if are_classes(targets):
        return targets.astype(np.int64)
    ranks = np.argsort(np.argsort(targets, kind="stable"), kind="stable")
    return ranks * max(1, min(groups, _MAX_QUANTILES)) // len(targets)
