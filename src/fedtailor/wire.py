"""The wire between clients and server: what arrives, how many bytes it took, and that no training data is in it."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedtailor import hashing
from fedtailor.errors import Refused
from fedtailor.model import Inputs
from fedtailor.trees import Rows, Tree, leaves

_FEWEST_VALUES = 8  # fewer equal numbers may be chance: the mean of one example is that example


def deliver(tree: Tree) -> Tree:
    """A message as it arrives: absent rows are zeros, for they were not sent.

    >>> deliver({"t": Rows(torch.ones(2, 1), torch.tensor([True, False]))})["t"].values.tolist()
    [[1.0], [0.0]]
    """
    return {name: _deliver(node) for name, node in tree.items()}


def _deliver(node: Tree | Tensor | Rows) -> Tree | Tensor | Rows:
    if isinstance(node, Rows):
        present = node.present.reshape(node.present.shape + (1,) * (node.values.ndim - node.present.ndim))
        return Rows(torch.where(present, node.values, 0), node.present)
    return deliver(node) if isinstance(node, dict) else node


def count_bytes(stacked: Tree, clients: int) -> list[int]:
    """Payload in bytes for each of the stacked clients: tensors at their size, bools one bit, present rows only.

    >>> count_bytes({"w": torch.zeros(2, 3), "mask": torch.zeros(2, 9, dtype=torch.bool)}, 2)
    [14, 14]
    """
    bits = torch.zeros(clients, dtype=torch.int64)
    for _, leaf in leaves(stacked):
        if isinstance(leaf, Rows):
            width = leaf.values[0, 0].numel() * _bits_of(leaf.values)
            bits += leaf.present.sum(1).cpu() * width
        else:
            bits += leaf[0].numel() * _bits_of(leaf)
    return [-(-int(b) // 8) for b in bits]


def _bits_of(tensor: Tensor) -> int:
    return 1 if tensor.dtype == torch.bool else 8 * tensor.element_size()


class LeakGuard:
    """Refuses an upload that holds training inputs as they are: all of them, a batch, or one example.

    It is a net against mistakes, not against malice: an example is found where it lies whole, at a multiple of its own
    length from the start of a tensor. Examples are compared by one random projection first, then value by value.
    """

    def __init__(self, x: Inputs, prepare: Callable[[Inputs], Inputs]) -> None:
        self._parts: dict[str, Tensor] = x if isinstance(x, dict) else {"": x}
        self._prepare = prepare
        self._marks: dict[tuple[int, str], Tensor] = {}  # projections of every client's examples, sorted

    def check(self, method: str, client: int, samples: Tensor, upload: Tree) -> None:
        """Refuse the upload of a client whose training samples these are."""
        for path, leaf in leaves(upload):
            values = leaf.values if isinstance(leaf, Rows) else leaf
            for name, part in self._parts.items():
                length = part[0].numel()
                if values.numel() % length == 0 and self._holds(values, client, name, samples):
                    raise Refused(
                        f"{method} would send client {client}'s training inputs: '{path}' holds their exact values."
                    )

    def _holds(self, values: Tensor, client: int, name: str, samples: Tensor) -> bool:
        kept = self._parts[name]
        rows = values.reshape(-1, *kept.shape[1:])
        if not values.is_floating_point() and values.dtype == kept.dtype:
            rows = self._seen(name, rows)
        rows = rows.flatten(1)
        if (client, name) not in self._marks:
            self._marks[client, name] = _project(self._seen(name, kept[samples]).flatten(1)).sort().values
        known, marks = self._marks[client, name], _project(rows)
        nearest = known[torch.searchsorted(known, marks - 1e-9).clamp(max=len(known) - 1)]
        suspects = rows[(nearest - marks).abs() < 2e-9]
        if not len(suspects):
            return False
        examples = self._seen(name, kept[samples]).flatten(1)
        same = [row for row in suspects if (row != row[0]).any() | (len(row) == 1) and (examples == row).all(1).any()]
        return len(same) * rows.shape[1] >= _FEWEST_VALUES

    def _seen(self, name: str, part: Tensor) -> Tensor:
        """Examples as a method sees them."""
        return self._prepare({name: part})[name] if name else self._prepare(part)  # type: ignore[no-any-return]


def _project(rows: Tensor) -> Tensor:
    width = rows.shape[1]
    direction = hashing.uniform(hashing.key(width), (width,), torch.float64, rows.device) - 0.5
    rows = torch.nan_to_num(rows.double())
    return (rows * direction).sum(1) / (1 + rows.abs().sum(1))
