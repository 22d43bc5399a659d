"""Samples of several clients as tensors: check that they agree, and join them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.model import Inputs
from fedtailor.errors import DataError

COMMON_TEST_SET = "The common test set"  # in error messages


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


def _check_same_parts(part: Inputs, other: Inputs, owner: str) -> None:
    names, others = (set(x) if isinstance(x, dict) else None for x in (part, other))
    if names != others:
        raise DataError(f"{owner}'s inputs do not have the same parts as those of other clients.")
