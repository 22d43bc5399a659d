"""The sample positions of all clients, in one tensor."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class SampleIndex:
    """The positions of every client's samples in the federation; `index[client]` returns those of one client.

    >>> index = SampleIndex([torch.tensor([4, 2]), torch.tensor([7])], torch.device("cpu"))
    >>> index[0], index.padded([0, 1])
    (tensor([4, 2]), tensor([[4, 2],
            [7, 7]]))
    """

    def __init__(self, by_client: Sequence[Tensor], device: torch.device) -> None:
        self.sizes = np.array([len(positions) for positions in by_client])
        self._ends = np.cumsum(self.sizes)
        self._flat = torch.cat(list(by_client)).to(device)

    @classmethod
    def common(cls, positions: Tensor, clients: int, device: torch.device) -> "SampleIndex":
        """Return an index in which all clients have the same samples, which are stored once.

        >>> SampleIndex.common(torch.tensor([4, 2]), 3, torch.device("cpu")).padded([0, 2]).tolist()
        [[4, 2], [4, 2]]
        """
        index = cls([positions], device)
        index.sizes, index._ends = np.repeat(index.sizes, clients), np.repeat(index._ends, clients)
        return index

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, client: int) -> Tensor:
        end = int(self._ends[client])
        return self._flat[end - int(self.sizes[client]) : end]

    def extended(self, by_client: Sequence[Tensor]) -> "SampleIndex":
        """Return an index with more clients, which are numbered after those of this one."""
        own, others = map(self.__getitem__, range(len(self))), (positions.to(self.device) for positions in by_client)
        return SampleIndex([*own, *others], self.device)

    def first(self, count: int) -> "SampleIndex":
        """Return an index of at most the first `count` samples of every client."""
        ranks = np.arange(len(self._flat)) - np.repeat(self._ends - self.sizes, self.sizes)
        kept = self._flat[torch.from_numpy(ranks < count).to(self.device)]
        return SampleIndex(torch.split(kept, np.minimum(self.sizes, count).tolist()), self.device)

    def pooled(self) -> "SampleIndex":
        """Return an index in which the first client has the samples of all clients; the others keep theirs.

        >>> SampleIndex([torch.tensor([4, 2]), torch.tensor([7])], torch.device("cpu")).pooled()[0]
        tensor([4, 2, 7])
        """
        return SampleIndex([self._flat, *(self[client] for client in range(1, len(self)))], self.device)

    def restricted(self, clients: Sequence[int], rows: Tensor) -> "SampleIndex":
        """Return an index in which only these clients have samples, as positions in `rows`, which are sorted.

        >>> index = SampleIndex([torch.tensor([4, 2]), torch.tensor([7])], torch.device("cpu"))
        >>> index.restricted([1], torch.tensor([6, 7])).padded([1])
        tensor([[1]])
        """
        found = SampleIndex.__new__(SampleIndex)
        if self._is_common:
            found.sizes, found._ends, own = self.sizes, self._ends, self._flat
        else:
            kept = np.zeros(len(self), dtype=bool)
            kept[list(clients)] = True
            found.sizes = np.where(kept, self.sizes, 0)
            found._ends, own = np.cumsum(found.sizes), self.positions(clients)
        found._flat = torch.searchsorted(rows, own)
        return found

    def positions(self, clients: Sequence[int]) -> Tensor:
        """Return the positions of all samples of these clients, in the order of clients' numbers."""
        if self._is_common:
            return self._flat
        kept = np.zeros(len(self), dtype=bool)
        kept[list(clients)] = True
        return self._flat[torch.from_numpy(np.repeat(kept, self.sizes)).to(self.device)]

    def to(self, device: torch.device) -> "SampleIndex":
        """Return the index on a device."""
        found = SampleIndex.__new__(SampleIndex)
        found.sizes, found._ends, found._flat = self.sizes, self._ends, self._flat.to(device)
        return found

    @property
    def _is_common(self) -> bool:
        """Whether all clients have the same samples (`common`)."""
        return len(self._flat) != int(self.sizes.sum())

    @property
    def device(self) -> torch.device:
        return self._flat.device

    def padded(self, clients: Sequence[int]) -> Tensor:
        """Return the positions of several clients as one matrix; shorter rows are padded by repeating their samples."""
        chosen = np.asarray(clients)
        sizes, ends = (torch.from_numpy(each[chosen]).to(self.device)[:, None] for each in (self.sizes, self._ends))
        slots = torch.arange(int(self.sizes[chosen].max()), device=self.device)
        return self._flat[ends - sizes + slots % sizes]
