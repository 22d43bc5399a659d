"""Examples in batches, and what all clients of a run have in common."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedtailor import hashing
from fedtailor.model import Inputs, Model

_NOISE = 3  # salt: apart from what dropout draws from the same key


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples; a weight of 0 marks padding, which repeats examples of the same client."""

    x: Inputs
    y: Tensor
    weight: Tensor  # [examples], 0 or 1
    key: Callable[[], Tensor] = lambda: torch.tensor(0)  # of its random numbers; only worked out where some are drawn

    def mean(self, per_example: Tensor) -> Tensor:
        """The only average over examples: padding does not count.

        >>> Batch(None, torch.zeros(2), torch.tensor([1.0, 0.0])).mean(torch.tensor([3.0, 9.0]))
        tensor(3.)
        """
        return (per_example * self.weight).sum() / self.weight.sum().clamp(min=1)

    def uniform(self, shape: tuple[int, ...], salt: int = 0) -> Tensor:
        """Random numbers in (0, 1) of this batch, the same whenever asked with the same salt.

        >>> Batch(None, torch.zeros(2), torch.ones(2)).uniform((2, 3)).shape
        torch.Size([2, 3])
        """
        of = hashing.key(self.key(), _NOISE, salt)
        return hashing.uniform(of, shape, self.weight.dtype, self.weight.device)

    def deal(self, hands: int) -> list["Batch"]:
        """Several independent batches: examples are dealt in turn, by their weights, so shapes stay; one for which none
        is left is the whole batch.

        >>> [part.weight.tolist() for part in Batch(None, torch.zeros(3), torch.ones(3)).deal(2)]
        [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
        """
        turn = torch.arange(len(self.weight), device=self.weight.device) % hands
        dealt = [self.weight * (turn == hand) for hand in range(hands)]
        return [replace(self, weight=torch.where(own.sum() > 0, own, self.weight)) for own in dealt]


@dataclass(frozen=True, eq=False)
class Common:
    """What all clients of a run have in common; an engine makes one and views on it."""

    model: Model  # in training mode
    x: Inputs  # everybody's samples, on the device once
    y: Tensor
    prepare: Callable[[Inputs], Inputs]  # from how samples are kept to what the model takes
    batch_size: int
    rounds: int
    num_clients: int
    total_size: int
    seed: int
    dtype: torch.dtype
    participation: float = 1.0  # the mean share of clients in a round


def pick(x: Inputs, rows: Tensor | slice) -> Inputs:
    """Some samples of the inputs, whether these have one part or several."""
    return {name: _pick(part, rows) for name, part in x.items()} if isinstance(x, dict) else _pick(x, rows)


def _pick(part: Tensor, rows: Tensor | slice) -> Tensor:
    if isinstance(rows, slice) or part.ndim == 1:
        return part[rows]
    # copies whole rows, where indexing under vmap goes value by value
    return torch.embedding(part.flatten(1), rows).reshape(*rows.shape, *part.shape[1:])
