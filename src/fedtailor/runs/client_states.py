"""Storage for client states between rounds: in CPU memory, and above a size limit in a temporary file."""

import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from fedtailor.core.trees import Params, Tree, flatten, map_leaves, take
from fedtailor.errors import RunError

_MAX_MEMORY_BYTES = 2**28  # above, a file is used; it is nearly as fast as long as the page cache can hold it


class StoredTrees(Protocol):
    """What a checkpoint reads: one tree per client, in `ClientStates` or in other processes."""

    @property
    def initial(self) -> Tree: ...

    @property
    def bytes_per_client(self) -> int: ...

    def clients(self) -> list[int]: ...

    def get(self, clients: Sequence[int], device: torch.device) -> Tree: ...


class ClientStates:
    """One tree per client that has participated; all other clients have the initial tree.

    The trees of the latest `put` stay on their device and are written to storage only when `put` is called for other
    clients, so clients that participate in every round are never copied. In storage, a tree is one row of bytes with
    its leaves concatenated. Each new client gets the next free slot, so storage grows with the number of participants,
    not with the population: in memory up to `max_memory_bytes`, then in an unnamed temporary file.

    >>> store = ClientStates({"a": torch.zeros(2)})
    >>> store.put([1], {"a": torch.ones(1, 2)})
    >>> store.get([0, 1], torch.device("cpu"))["a"].tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """

    def __init__(self, initial: Tree, max_memory_bytes: int = _MAX_MEMORY_BYTES) -> None:
        self._initial = map_leaves(lambda leaf: leaf.detach().cpu().clone(), initial)
        self._leaves = flatten(self._initial)  # in the order of a row's parts
        self._initial_row = self._to_bytes({name: leaf[None] for name, leaf in self._leaves.items()}, 1)
        self._last: dict[int, int] = {}  # client of the latest `put` -> its position in
        self._stacked: Tree = {}
        self._slots: dict[int, int] = {}
        self._file = tempfile.SpooledTemporaryFile(max_size=max_memory_bytes)  # noqa: SIM115 - open as long as the store is
        weakref.finalize(self, self._file.close)

    def put(self, clients: Sequence[int], stacked: Tree) -> None:
        """Store the trees of these clients; names and shapes must be those of the initial tree."""
        if (name := self.find_mismatch(stacked)) is not None:
            raise RunError(
                f"A client's state or model changed its names or shapes at '{name}'; they must stay the same."
            )
        new = {client: position for position, client in enumerate(clients)}
        self._write([client for client in self._last if client not in new])
        self._last, self._stacked = new, stacked

    def _write(self, clients: Sequence[int]) -> None:
        """Write these clients of the latest `put` to storage."""
        rows = self._bytes_of(clients).numpy()
        try:
            for client, row in zip(clients, rows, strict=True):
                self._seek(self._slots.setdefault(client, len(self._slots)))
                self._file.write(row.data)
            self._file.flush()  # raises here if the disk is full
        except OSError as error:
            with suppress(OSError):
                self._file.close()
            what = f"Client states cannot be written to a temporary file ({error.strerror})"
            raise RunError(f"{what}; set TMPDIR to a folder with more free space.") from error

    def get(self, clients: Sequence[int], device: torch.device) -> Tree:
        """Return the trees of these clients, stacked."""
        if list(clients) == list(self._last):
            return map_leaves(lambda leaf: leaf.to(device), self._stacked)
        rows = self._initial_row.expand(len(clients), -1)
        if any(self.has(client) for client in clients):
            rows = rows.clone()
            latest = [position for position, client in enumerate(clients) if client in self._last]
            rows[latest] = self._bytes_of([clients[position] for position in latest])
            for client, row in zip(clients, rows.numpy(), strict=True):
                if client in self._slots and client not in self._last:
                    self._seek(self._slots[client])
                    self._file.readinto(row.data)
        return self._from_bytes(rows.to(device))  # one transfer to the device

    def get_one(self, client: int) -> Tree:
        """Return a copy of one client's tree."""
        return map_leaves(lambda leaf: leaf[0].clone(), self.get([client], torch.device("cpu")))

    @property
    def initial(self) -> Tree:
        """The tree of clients that were never put."""
        return self._initial

    @property
    def bytes_per_client(self) -> int:
        """Size of one client's tree in bytes."""
        return self._initial_row.shape[1] * self._initial_row.element_size()

    def clients(self) -> list[int]:
        """Return the clients whose trees were ever put, in ascending order."""
        return sorted(self._last.keys() | self._slots.keys())

    def has(self, client: int) -> bool:
        """Return whether this client's tree was ever put."""
        return client in self._last or client in self._slots

    def _bytes_of(self, clients: Sequence[int]) -> Tensor:
        """Return the rows of these clients of the latest `put`, on the CPU."""
        if not clients:
            return self._initial_row[:0]
        positions = torch.tensor([self._last[client] for client in clients])
        return self._to_bytes(flatten(take(self._stacked, positions)), len(clients)).cpu()

    def _seek(self, slot: int) -> None:
        self._file.seek(slot * self._initial_row.shape[1])

    def find_mismatch(self, stacked: Tree) -> str | None:
        """Return the first leaf at which stacked trees differ from the initial tree in name, shape, or dtype."""
        known, flat = self._leaves, flatten(stacked)
        for name in sorted(known.keys() | flat.keys()):
            if name not in known or name not in flat or _spec(known[name]) != _spec(flat[name][0]):
                return name
        return None

    def _to_bytes(self, flat: Params, count: int) -> Tensor:
        """Return [count, bytes per row], built on the device of the leaves so that one transfer suffices."""
        leaves = [flat[name].detach() for name in self._leaves]
        rows = [leaf.reshape(count, leaf[0].numel()).contiguous().view(torch.uint8) for leaf in leaves]
        return torch.cat([row.to(rows[0].device) for row in rows], 1) if rows else torch.empty(count, 0)

    def _from_bytes(self, rows: Tensor) -> Tree:
        sizes = [leaf.numel() * leaf.element_size() for leaf in self._leaves.values()]
        parts = iter(torch.split(rows, sizes, 1))

        def restore(leaf: Tensor) -> Tensor:
            values = torch.empty(len(rows), leaf.numel(), dtype=leaf.dtype, device=rows.device)
            values.view(torch.uint8).copy_(next(parts))
            return values.reshape(len(rows), *leaf.shape)

        return map_leaves(restore, self._initial)


def group_name(kind: str, architecture: int) -> str:
    """Return the name of a store in a checkpoint, if clients are stored by architecture.

    >>> group_name("states", 0), group_name("states", 1)
    ('states', 'states.1')
    """
    return f"{kind}.{architecture}" if architecture else kind


def _spec(leaf: Tensor) -> tuple[torch.Size, torch.dtype]:
    return leaf.shape, leaf.dtype
