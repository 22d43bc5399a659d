"""Engines apply a client's function to many clients. All engines compute the same result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fedtailor.core.batch import SharedContext
from fedtailor.core.trees import Tree
from fedtailor.errors import unknown_name
from fedtailor.training.engines.kernels.adapt import adapt
from fedtailor.training.engines.pool import Pool, cannot_fork
from fedtailor.training.engines.sequential import Sequential
from fedtailor.training.engines.vectorized import Vectorized
from fedtailor.training.sample_index import SampleIndex


class Engine(Protocol):
    """Runs a function for many clients.

    `apply` calls function(ctx, *trees) for every client, with the client's rows of the stacked trees, and returns the
    results stacked in the order of `clients`.
    """

    def apply(self, function: Callable[..., Tree], round: int, clients: Sequence[int], *trees: Tree) -> Tree: ...


@dataclass(frozen=True)
class EngineChoice:
    """An engine and its settings. Together with the seed and the device, they determine the bits of a run."""

    engine: str
    threads: int = 1  # torch threads
    chunk_size: int | None = None  # clients per batch (on a CPU, per batch and core); only for vectorized

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise unknown_name("engine", self.engine, ENGINES)

    def __str__(self) -> str:
        return self.engine if self.chunk_size is None else f"{self.engine} (chunks of {self.chunk_size})"

    def build(self, shared: SharedContext, samples: SampleIndex) -> Engine:
        """Return the engine for clients with these training samples."""
        if self.engine == "vectorized":
            model, chunk = shared.model, self.chunk_size or DEFAULT_CHUNK_SIZE
            shared = replace(shared, model=replace(model, module=adapt(model.module), body=adapt(model.body)))
            return Vectorized(shared, samples, chunk) if cannot_fork() else Pool(shared, samples, chunk_size=chunk)
        return Pool(shared, samples) if self.engine == "pool" else Sequential(shared, samples)


def close_engine(engine: Engine) -> None:
    """End the worker processes that an engine keeps alive; the engine can still be used."""
    if isinstance(engine, Pool):
        engine.close()


ENGINES = ("sequential", "pool", "vectorized")
RAY = "ray"  # clients in several actors, each with one of these engines (`training/ray_clients`)
DEFAULT_CHUNK_SIZE = 32  # clients per batch on one core of a CPU
