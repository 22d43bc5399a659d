"""Convert users' samples to tensors, and decide whether targets are classes or numbers; nothing is guessed silently."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.core.model import Inputs
from fedtailor.errors import DataError

_MAX_LISTED = 5  # labels in an error message


def to_inputs(x: Any, whose: str) -> Inputs:
    """Return inputs as a tensor, or as a dict of tensors; a PIL image becomes bytes of shape (channels, height, width).

    >>> to_inputs(np.zeros((4, 3)), "The").shape
    torch.Size([4, 3])
    """
    if isinstance(x, Mapping):
        return {str(name): _to_tensor(part, whose, f"inputs '{name}'") for name, part in x.items()}
    return _to_tensor(_image_array(x) if hasattr(x, "getbands") else x, whose, "inputs")


def to_targets(y: Any, whose: str) -> Tensor:
    """Return targets as a tensor: integers as int64, and floats in their own dtype."""
    targets = _to_tensor(y, whose, "targets")
    if targets.dtype == torch.bfloat16:
        return targets.float()  # NumPy, which splits the data, has no bfloat16
    return targets if targets.is_floating_point() else targets.long()


def encode_labels(parts: Sequence[Any], owners: Sequence[str]) -> tuple[Sequence[Any], tuple[str, ...] | None]:
    """Replace text labels by their position in alphabetical order; also return the classes' names in that order.

    Other targets are returned unchanged, with None. `owners` names who has each part, for error messages.

    >>> encode_labels([["cat", "dog"], ["ant"]], ["Client ann", "Client bob"])
    ([array([1, 2]), array([0])], ('ant', 'cat', 'dog'))
    """
    text = [owner for part, owner in zip(parts, owners, strict=True) if _is_text(part)]
    if not text:
        return parts, None
    if len(text) < sum(np.size(part) > 0 for part in parts):
        raise DataError(f"{text[0]} has text labels, but other labels are numbers; use the same kind for all.")
    arrays = [np.asarray(part) for part in parts]
    names = sorted({str(label) for array in arrays for label in array.ravel().tolist()})
    number = {name: position for position, name in enumerate(names)}
    encoded = [
        np.array([number[str(label)] for label in array.ravel().tolist()], dtype=np.int64).reshape(array.shape)
        for array in arrays
    ]
    return encoded, tuple(names)


def targets_of(parts: Sequence[Any], owners: Sequence[str]) -> tuple[list[Tensor], tuple[str, ...] | None]:
    """Return the targets of several owners as tensors, and the names of classes if the targets are text.

    >>> targets_of([["cat", "dog"], ["ant"]], ["Client ann", "Client bob"])
    ([tensor([1, 2]), tensor([0])], ('ant', 'cat', 'dog'))
    """
    encoded, class_names = encode_labels(parts, owners)
    return [to_targets(y, f"{owner}'s") for owner, y in zip(owners, encoded, strict=True)], class_names


def resolve_targets(
    y: Tensor, owned: Tensor, classes: int | None, regression: bool | None
) -> tuple[Tensor, int | None]:
    """Return the targets and the number of classes, which is None for regression.

    `owned` is a mask of the samples that belong to a client. Raises `DataError` if the targets allow two readings:
    integers with gaps, and floats that look like class numbers.

    >>> resolve_targets(torch.tensor([0, 2, 1]), torch.ones(3, dtype=torch.bool), None, None)[1]
    3
    """
    if regression and classes is not None:
        raise DataError("Pass either classes or regression=True, not both.")
    if regression:
        return (y if y.is_floating_point() else y.float()), None
    if y.ndim != 1:
        return y, None
    if classes is not None and not y.is_floating_point():
        return y, classes
    present = torch.unique(y[owned])
    if y.is_floating_point():
        if classes is None and regression is None:
            _check_regression(present)
            return y, None
        if bool((present != present.round()).any()):
            raise DataError("The targets are not class numbers, because some are fractions; pass regression=True.")
        y, present = y.long(), present.long()
    if classes is not None:
        return y, classes
    expected = torch.arange(len(present))
    if len(present) and present[0] >= 0 and not torch.equal(present, expected):
        raise DataError(
            f"The labels are {_listed(present)}, which are not the numbers from 0 to {len(present) - 1}; pass "
            f"classes={int(present[-1]) + 1} to keep them, or number the labels that occur with "
            "np.unique(y, return_inverse=True)[1]."
        )
    return y, len(present)


def _to_tensor(values: Any, whose: str, kind: str) -> Tensor:
    """Convert values to a tensor of the same dtype; copy arrays with strides or byte orders that torch rejects."""
    try:
        if isinstance(values, Tensor):
            return values.detach().cpu()
        array = np.asarray(values)
        return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{whose} {kind} cannot be converted to an array of numbers.") from error


def _image_array(image: Any) -> Any:
    """Return a PIL image as an array of bytes with the channels first: one channel for gray images, otherwise RGB."""
    mode = image.mode if image.mode in ("L", "RGB") else "L" if image.mode in ("1", "LA") else "RGB"
    array = np.array(image.convert(mode))
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _is_text(labels: Any) -> bool:
    if isinstance(labels, Tensor):
        return False
    array = np.asarray(labels)
    return array.dtype.kind in "US" or (array.dtype.kind == "O" and array.size > 0 and isinstance(array.flat[0], str))


def _check_regression(present: Tensor) -> None:
    """Raise `DataError` if float targets are exactly 0, 1, ..., as class numbers are."""
    if len(present) > 1 and torch.equal(present.double(), torch.arange(len(present), dtype=torch.float64)):
        raise DataError(
            f"The targets are floats, but they look like class numbers ({_listed(present)}); pass regression=False for "
            "classes, or regression=True for numbers."
        )


def _listed(labels: Tensor) -> str:
    shown = ", ".join(str(label) for label in labels[:_MAX_LISTED].tolist())
    return shown if len(labels) <= _MAX_LISTED else f"{shown}, ..., {labels[-1].item()}"
