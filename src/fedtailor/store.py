"""Where clients' states lie between rounds: not on the device, and beyond a modest size not in memory either."""

import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from fedtailor.errors import Refused
from fedtailor.trees import Params, Tree, flatten, map_leaves, take

_IN_MEMORY = 2**28  # bytes; beyond, a file, which is nearly as fast while the system has memory to spare for it


class ClientStore:
    """One tree for every client that took part; everyone else is at the common start.

    What was put last stays as it is, on its device, and is only written down when others come: who takes part in every
    round costs nothing here. Written down, a tree is one record of bytes, its leaves one after the other. A client gets
    the next free place at first, so the store grows with those who took part, not with the population: in memory up to
    `in_memory` bytes, then in a nameless temporary file that goes with the store.

    >>> store = ClientStore({"a": torch.zeros(2)})
    >>> store.put([1], {"a": torch.ones(1, 2)})
    >>> store.get([0, 1], torch.device("cpu"))["a"].tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """

    def __init__(self, start: Tree, in_memory: int = _IN_MEMORY) -> None:
        self._start = map_leaves(lambda leaf: leaf.detach().cpu().clone(), start)
        self._leaves = flatten(self._start)  # a record's parts, in this order
        self._record = self._to_bytes({name: leaf[None] for name, leaf in self._leaves.items()}, 1)
        self._last: dict[int, int] = {}  # clients put last -> position in
        self._stacked: Tree = {}
        self._places: dict[int, int] = {}
        self._file = tempfile.SpooledTemporaryFile(max_size=in_memory)  # noqa: SIM115 - open as long as the store is
        weakref.finalize(self, self._file.close)

    def put(self, clients: Sequence[int], stacked: Tree) -> None:
        """Keep the trees of these clients; names and shapes are those of the start."""
        if (name := self.misfit(stacked)) is not None:
            raise Refused(f"A client's state or model changed its names or shapes at '{name}'; these must stay.")
        new = {client: position for position, client in enumerate(clients)}
        self._write([client for client in self._last if client not in new])
        self._last, self._stacked = new, stacked

    def _write(self, clients: Sequence[int]) -> None:
        """Write down these clients of those put last."""
        rows = self._bytes_of(clients).numpy()
        try:
            for client, row in zip(clients, rows, strict=True):
                self._seek(self._places.setdefault(client, len(self._places)))
                self._file.write(row.data)
            self._file.flush()  # so that a full disk is noticed here
        except OSError as error:
            with suppress(OSError):
                self._file.close()
            what = f"The clients' states cannot be kept in a temporary file ({error.strerror})"
            raise Refused(f"{what}; set TMPDIR to a folder with more room.") from error

    def get(self, clients: Sequence[int], device: torch.device) -> Tree:
        """The trees of these clients, stacked."""
        if list(clients) == list(self._last):
            return map_leaves(lambda leaf: leaf.to(device), self._stacked)
        rows = self._record.expand(len(clients), -1)
        if any(self.has(client) for client in clients):
            rows = rows.clone()
            here = [position for position, client in enumerate(clients) if client in self._last]
            rows[here] = self._bytes_of([clients[position] for position in here])
            for client, row in zip(clients, rows.numpy(), strict=True):
                if client in self._places and client not in self._last:
                    self._seek(self._places[client])
                    self._file.readinto(row.data)
        return self._from_bytes(rows.to(device))  # to a device in one piece

    def one(self, client: int) -> Tree:
        """One client's tree, for others to do with as they like."""
        return map_leaves(lambda leaf: leaf[0].clone(), self.get([client], torch.device("cpu")))

    @property
    def start(self) -> Tree:
        """The tree of everyone who was never put."""
        return self._start

    @property
    def bytes_each(self) -> int:
        """How much one client's tree takes."""
        return self._record.shape[1] * self._record.element_size()

    def clients(self) -> list[int]:
        """Whose tree was ever put, in ascending order."""
        return sorted(self._last.keys() | self._places.keys())

    def has(self, client: int) -> bool:
        """Whether this client's tree was ever put."""
        return client in self._last or client in self._places

    def _bytes_of(self, clients: Sequence[int]) -> Tensor:
        """The records of these clients of those put last, on the CPU."""
        if not clients:
            return self._record[:0]
        where = torch.tensor([self._last[client] for client in clients])
        return self._to_bytes(flatten(take(self._stacked, where)), len(clients)).cpu()

    def _seek(self, place: int) -> None:
        self._file.seek(place * self._record.shape[1])

    def misfit(self, stacked: Tree) -> str | None:
        """Where stacked trees differ from the start in names, shapes or dtypes."""
        kept, flat = self._leaves, flatten(stacked)
        for name in sorted(kept.keys() | flat.keys()):
            if name not in kept or name not in flat or _kind(kept[name]) != _kind(flat[name][0]):
                return name
        return None

    def _to_bytes(self, flat: Params, count: int) -> Tensor:
        """[count, bytes of a record], made where the leaves are, so that they leave a device in one piece."""
        leaves = [flat[name].detach() for name in self._leaves]
        rows = [leaf.reshape(count, leaf[0].numel()).contiguous().view(torch.uint8) for leaf in leaves]
        return torch.cat([row.to(rows[0].device) for row in rows], 1) if rows else torch.empty(count, 0)

    def _from_bytes(self, rows: Tensor) -> Tree:
        sizes = [leaf.numel() * leaf.element_size() for leaf in self._leaves.values()]
        parts = iter(torch.split(rows, sizes, 1))

        def restore(leaf: Tensor) -> Tensor:
            own = torch.empty(len(rows), leaf.numel(), dtype=leaf.dtype, device=rows.device)
            own.view(torch.uint8).copy_(next(parts))
            return own.reshape(len(rows), *leaf.shape)

        return map_leaves(restore, self._start)


def _kind(leaf: Tensor) -> tuple[torch.Size, torch.dtype]:
    return leaf.shape, leaf.dtype
