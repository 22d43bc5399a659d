"""What an actor does: it keeps the samples and states of its clients, trains them, and evaluates them."""

import pickle
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from fedtailor.core.batch import as_parts
from fedtailor.core.system import deterministic, limit_cores, retain_freed_memory
from fedtailor.core.trees import Tree, map_leaves, mean, stack
from fedtailor.errors import RunError, reason
from fedtailor.runs.records import Values
from fedtailor.training.channel.payload import count_bytes
from fedtailor.training.client_failures import ClientFailure, Signature, tree_signature
from fedtailor.training.clients import Evaluation
from fedtailor.training.engines import EngineChoice
from fedtailor.training.engines.auto import EngineBenchmark, explain_request, named_engine
from fedtailor.training.engines.vectorized import select_rows
from fedtailor.training.grouped_clients import AnyClients
from fedtailor.training.preflight import choose_num_threads, max_concurrent_clients, measure_step_cost
from fedtailor.training.ray_clients.packets import Messages, Packet
from fedtailor.training.ray_clients.shard import Shard
from fedtailor.training.round_state import ClientResults, RoundState
from fedtailor.training.simulated_clients import SimulatedClients

Mean = tuple[float, Packet]  # the weight of some clients, and the mean of their trees


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a call, or its error, which keeps its type and message on the way to the caller."""

    value: Any = None
    error: Exception | None = None

    def get(self) -> Any:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(frozen=True, eq=False)
class ShardReport:
    """What an actor reports about its clients of a cohort."""

    clients: list[int]  # the clients that succeeded
    failures: dict[int, ClientFailure]
    signature: Signature = ()  # structure of the uploads
    encoded: Packet | None = None  # the uploads, unless only their mean is needed
    bytes_up: list[int] = field(default_factory=list)
    client_metrics: Packet | None = None  # stacked
    drift: dict[str, Values] = field(default_factory=dict)
    metrics_seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class DeliveredMessages:
    """A `MessageSource` with messages that the server has sent already."""

    rounds_done: int
    clients: Sequence[int]
    served: Tree
    sent: Tree
    state: Tree = field(default_factory=dict)

    def send(self, state: Tree, clients: Sequence[int], number: int) -> Tree:
        return self._rows(self.sent, clients)

    def serve(self, state: Tree, clients: Sequence[int], number: int) -> Tree:
        return self._rows(self.served, clients)

    def _rows(self, messages: Tree, clients: Sequence[int]) -> Tree:
        if list(clients) == list(self.clients):
            return messages
        place = {client: position for position, client in enumerate(self.clients)}
        return select_rows(messages, [place[client] for client in clients])


class ShardWorker:
    """The clients of one actor. Ray calls `run`; all other methods are called through it."""

    clients: AnyClients

    def __init__(self, cores: int, on_gpu: bool) -> None:
        retain_freed_memory()
        limit_cores(cores)
        self._device = torch.device("cuda" if on_gpu else "cpu")
        self._round = 0  # of the results that are not committed yet
        self._cohorts: list[ClientResults] = []
        self._mean: Mean | None = None  # of the uploads of the latest cohort

    def run(self, name: str, *args: Any) -> Outcome:
        """Call a method and return its outcome; arguments may be outcomes of other calls."""
        try:
            values = [arg.get() if isinstance(arg, Outcome) else arg for arg in args]
            with torch.no_grad():
                return Outcome(getattr(self, name)(*values))
        except Exception as error:  # methods and models may raise anything
            return Outcome(error=_portable(error))

    def ping(self, *packets: Packet) -> None:
        """Show that the actor has started, and has received these packets."""
        for packet in packets:
            packet.unpack()

    def load(self, shard: Shard) -> str:
        """Build the clients of a shard, before round 1 and without samples; returns the name of the device."""
        self.clients = shard.build(self._device)
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"

    def add_samples(self, start: int, pieces: list[Packet]) -> None:
        """Fill in samples of the shard, by part of the inputs, and their targets."""
        shared = self._groups[0].shared
        for target, piece in zip([*as_parts(shared.x).values(), shared.y], pieces, strict=True):
            values = piece.unpack()["samples"]
            target[start : start + len(values)] = values.to(target.device)

    def reset(self) -> None:
        """Forget all states, as before round 1."""
        self._round, self._cohorts, self._mean = 0, [], None
        self.clients.reset()

    def choose_engine(
        self, name: str, chunk_size: int | None, rounds: int, clients: list[int], messages: Messages, common: Packet
    ) -> tuple[EngineChoice, str]:
        """Return the engine with this name, or for "auto" the fastest for these clients of a round, and why."""
        costs = [measure_step_cost(g.setup.model.eval_mode, g.setup.params, g.shared) for g in self._groups]
        threads = max(map(choose_num_threads, costs))
        max_clients = min(max_concurrent_clients(cost, self._device) for cost in costs)
        if name != "auto":
            choice = named_engine(name, chunk_size, threads, max_clients, self._device)
            return choice, explain_request(choice, self._device)
        sent, first = self._unpack(messages, common), self._groups[0]
        place = {client: position for position, client in enumerate(clients)}
        benchmark = EngineBenchmark(
            build=self.clients.build_engine,
            train=lambda engine, some: self.clients.apply_train(
                engine, 1, some, select_rows(sent, [place[client] for client in some])
            ),
            samples=first.training_samples,
            clients=clients,
            batch_size=first.shared.batch_size,
            rounds=rounds,
            device=self._device,
        )
        return benchmark.choose(named_engine("sequential", None, threads, max_clients, self._device), max_clients)

    def use_engine(self, choice: EngineChoice, reason: str, chunk_sizes: Mapping[str, int | None]) -> None:
        """Train with this engine from now on; a checkpoint may contain smaller chunks, by the name of their group."""
        self.clients.use_engine(choice, reason)
        for group in self._groups:
            group.use_chunk_size(chunk_sizes.get(group.saved_names[2]))

    def train(
        self,
        number: int,
        clients: list[int],
        messages: Messages,
        common: Packet,
        weights: Literal["size", "uniform"] | None,
    ) -> ShardReport:
        """Train these clients. Their results are kept until `commit`; with `weights`, so is the mean of the uploads."""
        if number != self._round:
            self._round, self._cohorts = number, []
        round_state = RoundState({})
        with deterministic(self._groups[0].threads):
            results = self.clients.train(round_state, number, clients, self._unpack(messages, common))
        failures = {client: _portable_failure(failure) for client, failure in round_state.failures.items()}
        if results is None:
            return ShardReport([], failures)
        self._cohorts.append(replace(results, sent={}, encoded={}))
        if weights is not None:
            self._mean = self._mean_upload(number, results, weights)
        return ShardReport(
            clients=results.clients,
            failures=failures,
            signature=tree_signature({"upload": results.encoded}),
            encoded=Packet.pack(results.encoded) if weights is None else None,
            bytes_up=count_bytes(results.encoded, len(results.clients)),
            client_metrics=Packet.pack(results.client_metrics),
            drift=round_state.client_metrics,
            metrics_seconds=round_state.metrics_seconds,
        )

    def _mean_upload(self, number: int, results: ClientResults, weights: str) -> Mean:
        first, own = self._groups[0], results.clients
        received = first.channel.decode(results.encoded, results.sent, own, number, first.shared.seed)
        sizes = first.setup.sizes[own] if weights == "size" else None
        return float(len(own) if sizes is None else sizes.sum()), Packet.pack(mean(received, sizes))

    def mean_upload(self) -> Mean | None:
        """Return the mean of the uploads of the latest cohort."""
        found, self._mean = self._mean, None
        return found

    def mean_trained(self) -> Mean:
        """Return the mean of the trained models of this round, whose clients have the same network."""
        trained = map_leaves(lambda *parts: torch.cat(parts), *(cohort.results["trained"] for cohort in self._cohorts))
        return float(sum(len(cohort.clients) for cohort in self._cohorts)), Packet.pack(mean(trained))

    def combine(self, left: Mean, right: Mean) -> Mean:
        """Return the mean of two means."""
        weights = torch.tensor([left[0], right[0]], dtype=torch.float64)
        return left[0] + right[0], Packet.pack(mean(stack([left[1].unpack(), right[1].unpack()]), weights))

    def commit(self, number: int, center: Mean | None) -> tuple[dict[str, Values], float]:
        """Keep the results of a round; returns the drift of the clients and the time to measure it."""
        clients = [client for cohort in self._cohorts for client in cohort.clients]
        results = [cohort.results for cohort in self._cohorts]
        round_state = RoundState({}, clients=clients, results=results)
        with deterministic(self._groups[0].threads):
            self.clients.commit(round_state, number, None if center is None else self._place(center[1].unpack()))
        self._cohorts = []
        return round_state.client_metrics, round_state.metrics_seconds

    def evaluate(
        self,
        rounds_done: int,
        clients: list[int],
        outdated: Set[int],
        served: Messages,
        common: Packet,
        sent: Messages | None,
        common_sent: Packet | None,
    ) -> Evaluation:
        """Evaluate these clients; `sent` is needed for the method's own metrics."""
        received = self._unpack(served, common)
        messages = received if sent is None or common_sent is None else self._unpack(sent, common_sent)
        source = DeliveredMessages(rounds_done, clients, received, messages)
        with deterministic(self._groups[0].threads):
            found = self.clients.evaluate(source, clients, outdated, is_last=False)
        return replace(found, totals=map_leaves(torch.Tensor.cpu, found.totals))

    def inventory(self) -> tuple[dict[str, tuple[list[int], int]], dict[str, Any]]:
        """Return the clients and the bytes per client of every store, and the metadata of a checkpoint."""
        stores, metadata = self.clients.snapshot()
        return {name: (store.clients(), store.bytes_per_client) for name, store in stores.items()}, metadata

    def fetch(self, name: str, clients: list[int]) -> Packet:
        """Return the trees of these clients in a store."""
        return Packet.pack(self.clients.snapshot()[0][name].get(clients, torch.device("cpu")))

    def put(self, name: str, clients: list[int], stacked: Packet) -> None:
        """Store trees of these clients, by the name of their store in a checkpoint."""
        self.clients.put(name, clients, stacked.unpack())

    @property
    def _groups(self) -> list[SimulatedClients]:
        return [self.clients] if isinstance(self.clients, SimulatedClients) else list(self.clients.groups)

    def _unpack(self, messages: Messages, common: Packet) -> Tree:
        return self._place(messages.unpack(common))

    def _place(self, tree: Tree) -> Tree:
        return map_leaves(lambda leaf: leaf.to(self._device), tree)


def _portable_failure(failure: ClientFailure) -> ClientFailure:
    return failure if failure.error is None else replace(failure, error=_portable(failure.error))


def _portable(error: Exception) -> Exception:
    """Return an error that another process can read: the same one, or its type and message."""
    try:
        found = pickle.loads(pickle.dumps(error))  # noqa: S301 - it was written in the line itself
    except Exception:  # users' exceptions may raise anything here
        found = None
    return error if type(found) is type(error) else RunError(f"{reason(error, with_type=True)}.")
