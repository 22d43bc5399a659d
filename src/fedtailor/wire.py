"""The wire between clients and server: what arrives, how many bytes it took, and that no training data is in it."""

from collections.abc import Callable, Iterator, Sequence

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

    def check(self, method: str, clients: Sequence[int], samples: Sequence[Tensor], uploads: Tree) -> None:
        """Refuse the stacked uploads of these clients if one holds its training samples; `samples` are everyone's."""
        for path, leaf in leaves(uploads):
            values = leaf.values if isinstance(leaf, Rows) else leaf  # [clients, ...]
            for name, part in self._parts.items():
                if values[0].numel() % part[0].numel() == 0:
                    for client in self._leaking(values, clients, name, samples):
                        what = f"'{path}' holds their exact values"
                        raise Refused(f"{method} would send client {client}'s training inputs: {what}.")

    def _leaking(self, values: Tensor, clients: Sequence[int], name: str, samples: Sequence[Tensor]) -> Iterator[int]:
        """The clients whose rows of `values` are among their own examples."""
        kept = self._parts[name]
        rows = values.reshape(-1, *kept.shape[1:])
        if not values.is_floating_point() and values.dtype == kept.dtype:
            rows = self._seen(name, rows)
        rows = rows.flatten(1)
        # marks lie in (-1, 1): every client has a shelf of its own, so that one sorted search serves all
        shelves = [4.0 * position for position in range(len(clients))]
        known = torch.cat([self._marks_of(c, name, samples[c]) + s for c, s in zip(clients, shelves, strict=True)])
        each = len(rows) // len(clients)
        marks = _project(rows) + known.new_tensor(shelves).repeat_interleave(each)
        nearest = known[torch.searchsorted(known, marks - 1e-9).clamp(max=len(known) - 1)]
        suspects = ((nearest - marks).abs() < 2e-9).nonzero()[:, 0]
        for position in sorted(set((suspects // max(each, 1)).tolist())):
            examples = self._seen(name, kept[samples[clients[position]]]).flatten(1)
            own = rows[suspects[suspects // each == position]]
            same = [row for row in own if _tells(row) and bool((examples == row).all(1).any())]
            if len(same) * rows.shape[1] >= _FEWEST_VALUES:
                yield clients[position]

    def _marks_of(self, client: int, name: str, samples: Tensor) -> Tensor:
        if (client, name) not in self._marks:
            examples = self._seen(name, self._parts[name][samples]).flatten(1)
            self._marks[client, name] = _project(examples).sort().values
        return self._marks[client, name]

    def _seen(self, name: str, part: Tensor) -> Tensor:
        """Examples as a method sees them."""
        return self._prepare({name: part})[name] if name else self._prepare(part)  # type: ignore[no-any-return]


def _tells(row: Tensor) -> bool:
    """A constant row is nobody's picture; a single number always is constant."""
    return len(row) == 1 or bool((row != row[0]).any())


def _project(rows: Tensor) -> Tensor:
    width = rows.shape[1]
    direction = hashing.uniform(hashing.key(width), (width,), torch.float64, rows.device) - 0.5
    rows = torch.nan_to_num(rows.double())
    return (rows * direction).sum(1) / (1 + rows.abs().sum(1))
