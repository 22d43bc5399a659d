"""Trees as arrays, which Ray moves between processes without a copy in its own format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.trees import Outline, Tree, flatten, outline, unflatten


@dataclass(frozen=True, eq=False)
class Packet:
    """A tree whose tensors are arrays of bytes.

    >>> Packet.pack({"w": torch.ones(2)}).unpack()
    {'w': tensor([1., 1.])}
    """

    outline: Outline
    arrays: dict[str, tuple[NDArray[np.uint8], torch.dtype, tuple[int, ...]]]

    @classmethod
    def pack(cls, tree: Tree) -> "Packet":
        """Return a tree as a packet."""
        return cls(outline(tree), {path: _to_array(leaf) for path, leaf in flatten(tree).items()})

    def unpack(self) -> Tree:
        """Return the tree, in memory that may be written to."""
        return unflatten({path: _from_array(*array) for path, array in self.arrays.items()}, self.outline)


@dataclass(frozen=True, eq=False)
class Messages:
    """Stacked messages to the clients of one actor, without what all clients receive, which is sent once."""

    outline: Outline
    own: Packet  # what differs between clients, stacked, by path
    count: int

    def unpack(self, common: Packet) -> Tree:
        """Return the stacked messages; `common` contains what all clients receive, by path."""
        shared = {path: leaf.expand(self.count, *leaf.shape) for path, leaf in common.unpack().items()}
        return unflatten(shared | self.own.unpack(), self.outline)


@dataclass(eq=False)
class LastPut:
    """Stores a packet, unless its arrays are those of the last one, such as one model for many clients."""

    put: Callable[[Packet], Any]
    _packet: Packet | None = None  # held, so that its memory is not used for other arrays
    _reference: Any = None

    def __call__(self, packet: Packet) -> Any:
        if self._packet is None or _places(packet) != _places(self._packet):
            self._packet, self._reference = packet, self.put(packet)
        return self._reference


def _places(packet: Packet) -> list[tuple[Any, ...]]:
    return [(path, array.ctypes.data, *rest) for path, (array, *rest) in packet.arrays.items()]


def pack_messages(
    put: Callable[[Packet], Any], sent: Tree, positions: Mapping[int, Sequence[int]]
) -> tuple[Any, dict[int, Messages]]:
    """Return a reference to what all clients receive, which `put` stores once, and the messages of every actor.

    `positions` are the rows of the stacked messages for the clients of each actor.
    """
    common, own = split_common(sent)
    shape = outline(sent)
    messages = {actor: Messages(shape, _pack_rows(own, rows), len(rows)) for actor, rows in positions.items()}
    return put(pack_flat(common)), messages


def split_common(sent: Tree) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of stacked messages that all clients share, once, and the others; both by path.

    >>> common, own = split_common({"w": torch.ones(1).expand(3, 1), "step": torch.arange(3)})
    >>> common, own
    ({'w': tensor([1.])}, {'step': tensor([0, 1, 2])})
    """
    flat = flatten(sent)
    common = {path: leaf[0] for path, leaf in flat.items() if leaf.ndim and len(leaf) and leaf.stride(0) == 0}
    return common, {path: leaf for path, leaf in flat.items() if path not in common}


def _pack_rows(own: dict[str, Tensor], positions: Sequence[int]) -> Packet:
    index = torch.tensor(positions, dtype=torch.int64)
    return pack_flat({path: leaf[index.to(leaf.device)] for path, leaf in own.items()})


def pack_flat(flat: dict[str, Tensor]) -> Packet:
    """Return tensors by path as a packet whose paths are its names."""
    return Packet(dict.fromkeys(flat), {path: _to_array(leaf) for path, leaf in flat.items()})


def _to_array(leaf: Tensor) -> tuple[NDArray[np.uint8], torch.dtype, tuple[int, ...]]:
    values = leaf.detach().cpu().contiguous()
    return values.reshape(-1).view(torch.uint8).numpy(), values.dtype, tuple(values.shape)


def _from_array(array: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(array.copy()).view(dtype).reshape(shape)  # Ray's own memory is read-only
