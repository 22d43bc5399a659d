"""Which samples are whose, for any number of clients in one tensor."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Samples:
    """The positions of every client's samples; `samples[client]` are those of one.

    >>> own = Samples([torch.tensor([4, 2]), torch.tensor([7])], torch.device("cpu"))
    >>> own[0], own.padded([0, 1])
    (tensor([4, 2]), tensor([[4, 2],
            [7, 7]]))
    """

    def __init__(self, owned: Sequence[Tensor], device: torch.device) -> None:
        self.sizes = np.array([len(own) for own in owned])
        self._ends = np.cumsum(self.sizes)
        self._flat = torch.cat(list(owned)).to(device)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, client: int) -> Tensor:
        end = int(self._ends[client])
        return self._flat[end - int(self.sizes[client]) : end]

    def first(self, count: int) -> "Samples":
        """Of every client, its first samples, at most so many."""
        places = np.arange(len(self._flat)) - np.repeat(self._ends - self.sizes, self.sizes)
        kept = self._flat[torch.from_numpy(places < count).to(self.device)]
        return Samples(torch.split(kept, np.minimum(self.sizes, count).tolist()), self.device)

    @property
    def device(self) -> torch.device:
        return self._flat.device

    def padded(self, clients: Sequence[int]) -> Tensor:
        """The positions of several clients, stacked; short ones repeat their own."""
        chosen = np.asarray(clients)
        sizes, ends = (torch.from_numpy(each[chosen]).to(self.device)[:, None] for each in (self.sizes, self._ends))
        slots = torch.arange(int(self.sizes[chosen].max()), device=self.device)
        return self._flat[ends - sizes + slots % sizes]
