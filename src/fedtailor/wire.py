"""The wire between clients and server: what arrives, how many bytes it took, and that no training data is in it."""

from collections.abc import Callable, Iterator, Sequence
from math import nan

import torch
from torch import Tensor

from fedtailor import hashing
from fedtailor.errors import Refused
from fedtailor.model import Inputs
from fedtailor.samples import Samples
from fedtailor.trees import Rows, Tree, leaves

_FEWEST_VALUES = 8  # fewer equal numbers may be chance: the mean of one example is that example
_FEW, _SOME = 32, 1000  # values by which examples are told apart at first, and examples by which these are chosen
_AT_ONCE = 2**22  # values of examples projected at once; bounds memory, changes nothing else


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
    length from the start of a tensor. Examples are compared by one random projection of some of their values
    first, then value by value.
    """

    def __init__(self, x: Inputs, prepare: Callable[[Inputs], Inputs]) -> None:
        self._parts: dict[str, Tensor] = x if isinstance(x, dict) else {"": x}
        self._prepare = prepare
        self._columns: dict[str, Tensor] = {}
        self._marks: dict[str, Tensor] = {}  # projection of every example; NaN until its client takes part

    def check(self, method: str, clients: Sequence[int], samples: Samples, uploads: Tree) -> None:
        """Refuse the stacked uploads of these clients if one holds its training samples; `samples` are everyone's."""
        for path, leaf in leaves(uploads):
            values = leaf.values if isinstance(leaf, Rows) else leaf  # [clients, ...]
            for name, part in self._parts.items():
                if values[0].numel() % part[0].numel() == 0:
                    for client in self._leaking(values, clients, name, samples):
                        what = f"'{path}' holds their exact values"
                        raise Refused(f"{method} would send client {client}'s training inputs: {what}.")

    def _leaking(self, values: Tensor, clients: Sequence[int], name: str, samples: Samples) -> Iterator[int]:
        """The clients whose rows of `values` are among their own examples."""
        kept = self._parts[name]
        rows = values.reshape(-1, *kept.shape[1:])
        if not values.is_floating_point() and values.dtype == kept.dtype:
            rows = self._seen(name, rows)
        rows = _flat(rows)
        # marks lie in (-1, 1): every client has a shelf of its own, so that one sorted search serves all
        owned, each = [samples[client] for client in clients], len(rows) // len(clients)
        known = (self._marks_of(name, torch.cat(owned)) + _shelves([len(own) for own in owned], rows)).sort().values
        marks = _project(rows[:, self._columns_of(name)]) + _shelves([each] * len(clients), rows)
        nearest = known[torch.searchsorted(known, marks - 1e-9).clamp(max=len(known) - 1)]
        suspects = ((nearest - marks).abs() < 2e-9).nonzero()[:, 0]
        for position in sorted(set((suspects // max(each, 1)).tolist())):
            examples = _flat(self._seen(name, kept[owned[position]]))
            own = _telling(rows[suspects[suspects // each == position]])
            same = [row for row in own if bool((examples == row).all(1).any())]
            if len(same) * rows.shape[1] >= _FEWEST_VALUES:
                yield clients[position]

    def _marks_of(self, name: str, samples: Tensor) -> Tensor:
        """Projections of these examples, each computed once; for any number of clients it is one tensor."""
        part = self._parts[name]
        if name not in self._marks:
            self._marks[name] = part.new_full((len(part),), nan, dtype=torch.float64)
        marks = self._marks[name]
        for new in torch.split(samples[marks[samples].isnan()], max(1, _AT_ONCE // part[0].numel())):
            marks[new] = _project(_flat(self._seen(name, part[new]))[:, self._columns_of(name)])
        return marks[samples]

    def _columns_of(self, name: str) -> Tensor:
        """The few values by which examples differ most: what is equal there is compared as a whole."""
        if name not in self._columns:
            some = _flat(self._seen(name, self._parts[name][:_SOME])).double()
            width = some.shape[1]
            self._columns[name] = some.var(0, correction=0).topk(min(_FEW, width)).indices.sort().values
        return self._columns[name]

    def _seen(self, name: str, part: Tensor) -> Tensor:
        """Examples as a method sees them."""
        return self._prepare({name: part})[name] if name else self._prepare(part)  # type: ignore[no-any-return]


def _flat(rows: Tensor) -> Tensor:
    return rows.flatten(1) if rows.ndim > 1 else rows[:, None]


def _shelves(counts: Sequence[int], like: Tensor) -> Tensor:
    """The shelf of the first so many rows, of the next so many, and so on."""
    shelf = 4.0 * torch.arange(len(counts), dtype=torch.float64)
    return shelf.repeat_interleave(torch.tensor(counts)).to(like.device)


def _telling(rows: Tensor) -> Tensor:
    """Without constant rows, which are nobody's picture; a single number always is constant."""
    return rows if rows.shape[1] == 1 else rows[(rows != rows[:, :1]).any(1)]


def _project(rows: Tensor) -> Tensor:
    width = rows.shape[1]
    direction = hashing.uniform(hashing.key(width), (width,), torch.float64, rows.device) - 0.5
    rows = torch.nan_to_num(rows).double()
    size: Tensor = torch.linalg.vector_norm(rows, 1, dim=1)
    return rows @ direction / (1 + size)
