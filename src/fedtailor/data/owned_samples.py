"""Samples with owners: each owner is a client, and a part of its samples is held out for testing."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.data.client_samples import ClientSamples, SampleOwners
from fedtailor.data.conversion import encode_labels, to_inputs, to_targets
from fedtailor.data.samples import check_lengths
from fedtailor.data.splits.class_fractions import Indices
from fedtailor.data.splits.owners import check_owned, client_names, samples_by_client
from fedtailor.data.splits.partition import hold_out, hold_out_common
from fedtailor.data.survival_targets import strata_of
from fedtailor.errors import DataError

CommonTest = float | Sequence[int] | Indices | None  # a fraction of all samples, or the indices of samples


def split_by_owner(
    x: Any,
    y: Any,
    owners: Sequence[Any],
    names: Sequence[str] | None,
    test: float | Sequence[bool],
    seed: int,
    survival: bool,
    common_test: CommonTest,
) -> ClientSamples:
    """Return the samples of each owner, split for training and testing; `Federation.from_owners` explains arguments.

    >>> found = split_by_owner(torch.zeros(3, 2), [0, 1, 0], ["ann"] * 3, None, [True, False, False], 0, False, None)
    >>> found.owners.train, found.owners.test
    ((tensor([1, 2]),), (tensor([0]),))
    """
    (encoded,), class_names = encode_labels([y], ["?"])
    x, y = to_inputs(x, "The"), to_targets(encoded, "The")
    check_lengths(x, y, "The")
    known, owned = samples_by_client(owners, len(y))
    labels = client_names(known if names is None else names, len(owned))
    check_owned(owned, labels, len(y))
    strata = strata_of(y, survival)
    owned, common = _take_common(strata, owned, common_test, seed)
    parts = hold_out_tests(strata, owned, test, seed)
    train, held = (tuple(torch.from_numpy(part[side]) for part in parts) for side in (0, 1))
    return ClientSamples(x, y, SampleOwners(labels, train, held, common), class_names)


def hold_out_tests(
    labels: NDArray[Any], owned: Sequence[Indices], test: float | Sequence[bool], seed: int
) -> list[tuple[Indices, Indices]]:
    """Return each client's training and test samples; `test` is a fraction, or one boolean per sample.

    >>> hold_out_tests(np.zeros(3, int), [np.array([0, 2])], [True, False, False], seed=0)
    [(array([2]), array([0]))]
    """
    if isinstance(test, float | int):
        if not 0 < test < 1:
            raise DataError(f"test must be a fraction between 0 and 1, got {test}.")
        return [hold_out(labels, own, test, (seed, client)) for client, own in enumerate(owned)]
    is_test = np.asarray(test)
    if is_test.dtype != bool or is_test.shape != (len(labels),):
        raise DataError("test must be a fraction, or one boolean per sample.")
    return [(own[~is_test[own]], own[is_test[own]]) for own in owned]


def _take_common(
    labels: NDArray[Any], owned: list[Indices], common_test: CommonTest, seed: int
) -> tuple[list[Indices], Tensor | None]:
    """Return the clients' samples without those of the common test set, and the samples of that set."""
    if common_test is None:
        return owned, None
    if isinstance(common_test, Real):
        _, common = hold_out_common(labels, np.sort(np.concatenate(owned)), float(common_test), seed)
    else:
        common = np.asarray(common_test, dtype=np.int64)
        if common.ndim != 1 or not len(common) or common.min() < 0 or common.max() >= len(labels):
            raise DataError(f"common_test must list the indices of samples, from 0 to {len(labels) - 1}.")
    return [own[~np.isin(own, common)] for own in owned], torch.from_numpy(np.unique(common))
