"""FLamby's order of batches for runs of the library, so that results can be compared without the noise of the order.

FLamby draws batches with PyTorch's DataLoader: a permutation for every pass of a client, continued in the next round.
Worker processes draw the first permutations when the loaders are created, which is before the seed is set again and
after the previous method has run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_batches import ClientBatches
from fedtailor.core.trees import Tree


def draw() -> int:
    """Return a random number as a DataLoader draws its seeds."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


class Loader:
    """Batches of one client, with a new permutation for every pass. With a seed, the first pass begins when the client
    trains, after the seed is set; otherwise now, as with worker processes."""

    def __init__(self, samples: Tensor, batch_size: int, seed: int | None = None) -> None:
        self._samples, self._batch_size, self._seed = samples, batch_size, seed
        self._batches = self._new_pass() if seed is None else None

    def _new_pass(self) -> Iterator[Tensor]:
        draw()  # the seed of the worker processes
        generator = torch.Generator()
        generator.manual_seed(draw())
        return iter(torch.split(torch.randperm(len(self._samples), generator=generator), self._batch_size))

    def next(self) -> Tensor:
        """Return the positions of the next batch among the client's samples."""
        if self._batches is None and self._seed is not None:
            torch.manual_seed(self._seed)
        batch = None if self._batches is None else next(self._batches, None)
        if batch is None:
            self._batches = self._new_pass()
            batch = next(self._batches)
        return self._samples[batch]


def federated_loaders(sizes: Sequence[int], batch_size: int, rounds: int, steps: int, seed: int) -> list[Loader]:
    """Return the loaders of a federated method, after another one has run and has been tested, and set the seed."""
    torch.manual_seed(seed)
    done = [0] * len(sizes)
    for _ in range(rounds):
        for client, size in enumerate(sizes):
            batches = -(-size // batch_size)
            begun = max(-(-done[client] // batches), 1)  # passes
            done[client] += steps
            for _ in range(2 * (-(-done[client] // batches) - begun)):
                draw()
    for _ in range(len(sizes) + 1):  # the tests
        draw()
    loaders = [Loader(torch.arange(size), batch_size) for size in sizes]
    torch.manual_seed(seed)
    return loaders


@contextmanager
def flamby_order(loaders: Sequence[Loader]) -> Iterator[None]:
    """Let the clients of the sequential engine train on these batches."""

    def run_steps(
        self: ClientBatches, step: Callable[[Tree, Batch], Tree], state: Tree, steps: int, *other: Any
    ) -> Tree:
        for _ in range(steps):
            chosen = loaders[int(self.index)].next()
            weight = torch.ones(len(chosen), dtype=self._shared.dtype)
            state = step(state, self._gather(self._samples[chosen], weight, lambda: torch.tensor(0), None))
        return state

    with mock.patch.object(ClientBatches, "_run_steps_unmapped", run_steps):
        yield
