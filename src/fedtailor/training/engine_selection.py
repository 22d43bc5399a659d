"""Settle the engine of a simulation before round 1: the fastest for "auto", and chunks that fit on a GPU."""

from collections.abc import Sequence
from dataclasses import replace

from fedtailor.core.trees import Tree
from fedtailor.training.config import TrainingConfig
from fedtailor.training.engines import EngineChoice
from fedtailor.training.engines.auto import EngineBenchmark
from fedtailor.training.engines.learned_choices import describe_workload
from fedtailor.training.engines.memory_estimate import limit_clients
from fedtailor.training.grouped_clients import AnyClients, GroupedClients
from fedtailor.training.server import Server
from fedtailor.training.simulated_clients import SimulatedClients


def settle_engine(
    config: TrainingConfig, server: Server, clients: AnyClients, max_clients: int, rough_bytes: int
) -> None:
    """Choose the engine of "auto", and reduce the chunk size if fewer clients fit on a GPU at once.

    `max_clients` and `rough_bytes`, the memory per client, are estimates from the network alone.
    """
    if config.engine not in ("auto", "vectorized"):
        return
    limit, first = _limit_clients(server, clients, rough_bytes), clients.group(0)
    fitting = max_clients if limit is None else min(max_clients, limit)
    if config.engine == "auto":
        clients.use_engine(*_make_benchmark(server, clients).choose(first.engine_choice, fitting))
    elif first.engine_choice.chunk_size is not None and fitting < first.engine_choice.chunk_size:
        reason = f"The engine was requested; {fitting} clients fit into the memory of the GPU at once."
        clients.use_engine(replace(first.engine_choice, chunk_size=fitting), reason)


def _make_benchmark(server: Server, clients: AnyClients) -> EngineBenchmark:
    """Return the benchmark of engines on the clients of the largest round, with what earlier runs have measured."""
    first = clients.group(0)
    groups = [first] if isinstance(clients, SimulatedClients) else clients.groups
    samples, size = first.training_samples, first.shared.batch_size
    largest_round = max(first.schedule, key=len)
    batches = (-(-samples.sizes[list(largest_round)] // size)).tolist()
    contexts, rounds, threads = [group.shared for group in groups], len(first.schedule), first.engine_choice.threads
    return EngineBenchmark(
        build=clients.build_engine,
        train=lambda engine, some: clients.apply_train(engine, 1, some, server.send(server.state, some, 1)),
        samples=samples,
        clients=_concurrent_clients(server, clients),
        batch_size=size,
        rounds=rounds,
        device=first.device,
        learned=describe_workload(server.method, contexts, batches, rounds, threads, first.device),
    )


def _limit_clients(server: Server, clients: AnyClients, rough_bytes: int) -> int | None:
    """Return how many clients of the largest round fit on a GPU at once; None: all, or it is unknown."""
    if isinstance(clients, GroupedClients):
        return None
    samples = clients.training_samples.first(clients.shared.batch_size)

    def train(some: Sequence[int]) -> Tree:
        engine = clients.build_engine(EngineChoice("vectorized", 1, len(some)), samples)
        return clients.apply_train(engine, 1, some, server.send(server.state, some, 1))

    return limit_clients(train, _concurrent_clients(server, clients), rough_bytes, clients.device)


def _concurrent_clients(server: Server, clients: AnyClients) -> Sequence[int]:
    """Return the clients of the largest round, or one of them if the method trains one after another."""
    largest_round = max(clients.group(0).schedule, key=len)
    return largest_round[:1] if server.method.sequential_clients else largest_round
