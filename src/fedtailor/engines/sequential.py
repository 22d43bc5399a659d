"""One client after another with plain autograd: the reference for every other engine, and the one to debug with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtailor.local import Common, LocalView
from fedtailor.trees import Tree, stack, take


@dataclass(frozen=True, eq=False)
class Sequential:
    """The sequential engine."""

    common: Common
    samples: Sequence[Tensor]  # positions of every client's training samples, on the device

    @property
    def name(self) -> str:
        return "sequential"

    @torch.no_grad()
    def apply(self, function: Callable[..., Tree], round: int, clients: Sequence[int], *trees: Tree) -> Tree:
        """function(local, *trees) for one client after another."""
        return stack(
            [
                function(self._view(client, round), *(take(tree, position) for tree in trees))
                for position, client in enumerate(clients)
            ]
        )

    def _view(self, client: int, round: int) -> LocalView:
        samples = self.samples[client]
        index, size = (torch.tensor(number, device=samples.device) for number in (client, len(samples)))
        return LocalView(self.common, round, index, size, samples)
