"""`Batch`, a batch of examples, and `SharedContext`, what all clients of a run have in common."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedtailor.core import random
from fedtailor.core.augmentation import Augmentation
from fedtailor.core.model import Inputs, Model

_NOISE = 3  # salt that separates `uniform` from dropout, which uses the same key


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of examples; a weight of 0 marks padding, which repeats examples of the same client."""

    x: Inputs
    y: Tensor
    weight: Tensor  # [examples], 0 or 1
    key: Callable[[], Tensor] = lambda: torch.tensor(0)  # of the batch's random numbers, computed on demand
    ones: Tensor | None = None  # the same tensor as `weight` if it is known that there is no padding, on a CPU

    def mean(self, per_example: Tensor) -> Tensor:
        """Return the mean over the examples without padding. Methods must not average examples in any other way.

        >>> Batch(None, torch.zeros(2), torch.tensor([1.0, 0.0])).mean(torch.tensor([3.0, 9.0]))
        tensor(3.)
        """
        if self.weight is self.ones and per_example.ndim == 1 and per_example.dtype == self.weight.dtype:
            return per_example.mean()  # the same bits on a CPU
        return (per_example * self.weight).sum() / self.weight.sum().clamp(min=1)

    def uniform(self, shape: tuple[int, ...], salt: int = 0) -> Tensor:
        """Return random numbers in (0, 1) that depend on the batch and the salt.

        >>> Batch(None, torch.zeros(2), torch.ones(2)).uniform((2, 3)).shape
        torch.Size([2, 3])
        """
        key = random.make_key(self.key(), _NOISE, salt)
        return random.uniform(key, shape, self.weight.dtype, self.weight.device)

    def split_round_robin(self, parts: int) -> list["Batch"]:
        """Split the batch into disjoint batches: example i goes to part i modulo `parts`.

        Each part keeps all examples and sets the weights of the others to 0, so that shapes do not change. A part
        without any example is the whole batch.

        >>> [part.weight.tolist() for part in Batch(None, torch.zeros(3), torch.ones(3)).split_round_robin(2)]
        [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
        """
        part_of = torch.arange(len(self.weight), device=self.weight.device) % parts
        weights = [self.weight * (part_of == part) for part in range(parts)]
        return [replace(self, weight=torch.where(own.sum() > 0, own, self.weight)) for own in weights]


@dataclass(frozen=True, eq=False)
class SharedContext:
    """What all clients of a run have in common; an engine makes each `ClientContext` from it."""

    model: Model  # in training mode
    x: Inputs  # samples of all clients: on the device, or on the host if they do not fit there
    y: Tensor
    prepare: Callable[[Inputs], Inputs]  # converts stored samples to inputs of the model
    batch_size: int
    rounds: int
    num_clients: int
    total_size: int
    seed: int
    dtype: torch.dtype
    participation: float = 1.0  # mean fraction of clients per round
    augmentation: Augmentation = field(default_factory=Augmentation)  # of the batches on which clients train


def as_parts(x: Inputs) -> dict[str, Tensor]:
    """Return the parts of inputs by name; inputs with a single part have the name ''."""
    return x if isinstance(x, dict) else {"": x}


def take_samples(x: Inputs, rows: Tensor | slice) -> Inputs:
    """Return the samples in these rows, for inputs with one part or several, on the device of `rows`."""
    return {name: _take_rows(part, rows) for name, part in x.items()} if isinstance(x, dict) else _take_rows(x, rows)


def _take_rows(part: Tensor, rows: Tensor | slice) -> Tensor:
    if isinstance(rows, Tensor) and rows.device != part.device:
        return _take_rows(part, rows.to(part.device)).to(rows.device)
    if isinstance(rows, slice) or part.ndim == 1:
        return part[rows]
    # torch.embedding copies whole rows; indexing under vmap copies single values
    return torch.embedding(part.flatten(1), rows).reshape(*rows.shape, *part.shape[1:])
