"""Ways of applying a client's function to many clients; which one runs never changes what is computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fedtailor.batch import Common
from fedtailor.engines.convolution import adapt
from fedtailor.engines.pool import Pool, cannot_fork
from fedtailor.engines.sequential import Sequential
from fedtailor.engines.vectorized import Vectorized
from fedtailor.samples import Samples
from fedtailor.trees import Tree


class Engine(Protocol):
    """`apply` calls function(local, *trees) for every client, with its own part of the stacked trees, and stacks the
    results in the order of the clients."""

    def apply(self, function: Callable[..., Tree], round: int, clients: Sequence[int], *trees: Tree) -> Tree: ...


@dataclass(frozen=True)
class Way:
    """An engine by name and how it is set: with the seed and the device, all that bits depend on."""

    engine: str
    threads: int = 1  # of torch
    chunk: int | None = None  # clients at once; vectorized only, and on a CPU that many on each core

    def __str__(self) -> str:
        return self.engine if self.chunk is None else f"{self.engine} ({self.chunk} at once)"

    def build(self, common: Common, samples: Samples) -> Engine:
        """The engine over clients whose training samples these are."""
        if self.engine == "vectorized":
            model, chunk = common.model, self.chunk or USUAL_CHUNK
            common = replace(common, model=replace(model, module=adapt(model.module), body=adapt(model.body)))
            return Vectorized(common, samples, chunk) if cannot_fork() else Pool(common, samples, chunk=chunk)
        return Pool(common, samples) if self.engine == "pool" else Sequential(common, samples)


ENGINES = ("sequential", "pool", "vectorized")
USUAL_CHUNK = 32  # clients at once on one core of a CPU
