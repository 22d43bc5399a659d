"""A line of the record: what is said of one round."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedtailor.errors import Refused
from fedtailor.trees import Tree

Record = dict[str, Any]  # one round; "per_client" maps a name to client -> number
Values = dict[int, float]  # client -> number
LARGE = 10_000  # numbers: an array beyond is kept as a tensor, on disk in a file beside the record


def by_client(clients: Sequence[int], stacked: Tree) -> dict[str, Values]:
    """Name -> client -> number, of what is one number a client.

    >>> by_client([4, 7], {"drift": torch.tensor([0.5, 1.0]), "table": torch.ones(2, 3)})
    {'drift': {4: 0.5, 7: 1.0}}
    """
    numbers = {name: leaf for name, leaf in stacked.items() if isinstance(leaf, Tensor) and leaf.ndim == 1}
    return {name: dict(zip(clients, leaf.tolist(), strict=True)) for name, leaf in numbers.items()}


def join(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Both, if they do not speak of different things under one name."""
    if twice := sorted(values.keys() & more.keys()):
        raise Refused(f"The record already has '{twice[0]}' of every client; a method must call its number otherwise.")
    return values | more


def plain(value: Tensor | float) -> Any:
    """A number or nested lists; large arrays stay tensors, which take a tenth of the memory."""
    value = torch.as_tensor(value)
    return value.tolist() if value.numel() <= LARGE else value.cpu()


def extend(values: dict[str, Values], more: dict[str, Values]) -> None:
    """Add what is known of more clients."""
    for name, found in more.items():
        values.setdefault(name, {}).update(found)
