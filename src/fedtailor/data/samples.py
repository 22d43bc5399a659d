"""Samples of several clients as arrays: join them, check them, and hold out a test set common to all clients."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.model import Inputs
from fedtailor.data.splits.class_fractions import Indices
from fedtailor.data.splits.partition import hold_out, hold_out_common
from fedtailor.errors import DataError

COMMON_TEST_SET = "The common test set"  # in error messages
CommonTest = float | Sequence[int] | Indices | None  # a fraction of all samples, or the indices of samples


def as_pair(sample: Any, client: str) -> tuple[Any, Any]:
    """Return a sample of a data set as (x, y)."""
    if not isinstance(sample, Sequence) or len(sample) != 2:
        raise DataError(f"{client}'s samples must be pairs (x, y); wrap the data set in one that returns pairs.")
    return sample[0], sample[1]


def with_sample_axis(x: Inputs) -> Inputs:
    """Return one sample as inputs with a leading axis."""
    return {name: part[None] for name, part in x.items()} if isinstance(x, dict) else x[None]


def check_lengths(x: Inputs, y: Tensor, whose: str) -> None:
    """Raise an error unless inputs and targets have one row per sample."""
    inputs = {f"inputs '{name}'": part for name, part in x.items()} if isinstance(x, dict) else {"inputs": x}
    if not inputs:
        raise DataError(f"{whose} inputs have no parts.")
    for kind, part in [("targets", y), *inputs.items()]:
        if not part.ndim:
            raise DataError(f"{whose} {kind} are a single number; give an array with one row per sample.")
        if len(part) != len(y):
            raise DataError(f"{whose} {kind} have {len(part)} rows, but there are {len(y)} targets.")


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


def join_samples(parts: Sequence[Inputs], owners: Sequence[str], kind: str) -> Any:
    """Concatenate arrays, which must agree in parts, shapes, and dtypes."""
    for owner, part in zip(owners, parts, strict=True):
        _check_same_parts(part, parts[0], owner)
    if isinstance(parts[0], dict):
        return {name: join_samples([part[name] for part in parts], owners, f"{kind} '{name}'") for name in parts[0]}
    nonempty = next((part for part in parts if len(part)), parts[0])
    for owner, part in zip(owners, parts, strict=True):
        if len(part):
            check_same_kind(part, nonempty, owner, kind)
    return torch.cat([part for part in parts if len(part)] or [nonempty])


def check_same_kind(part: Inputs, other: Inputs, owner: str, kind: str) -> None:
    """Raise an error unless an owner's samples have the parts, shapes, and dtypes of another client's."""
    _check_same_parts(part, other, owner)
    if isinstance(part, dict):
        for name in part:
            check_same_kind(part[name], other[name], owner, f"{kind} '{name}'")
    elif part.shape[1:] != other.shape[1:] or part.dtype != other.dtype:
        kinds = [f"{str(p.dtype).removeprefix('torch.')} {tuple(p.shape[1:])}" for p in (part, other)]
        raise DataError(f"{owner}'s {kind} are {kinds[0]}, but those of other clients are {kinds[1]}.")


def take_common(
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


def _check_same_parts(part: Inputs, other: Inputs, owner: str) -> None:
    names, others = (set(x) if isinstance(x, dict) else None for x in (part, other))
    if names != others:
        raise DataError(f"{owner}'s inputs do not have the same parts as those of other clients.")
