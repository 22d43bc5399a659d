"""The clients of a run in several actors, as the trainer sees them."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.data.federation import Federation
from fedtailor.errors import RunError
from fedtailor.runs.client_states import StoredTrees
from fedtailor.runs.records import update_values
from fedtailor.training.client_failures import describe_difference
from fedtailor.training.clients import Evaluation
from fedtailor.training.engines import RAY, EngineChoice
from fedtailor.training.engines.vectorized import restore_order, select_rows
from fedtailor.training.grouped_clients import AnyClients
from fedtailor.training.ray_clients.cluster import ActorGroup
from fedtailor.training.ray_clients.evaluation import evaluate_in_actors
from fedtailor.training.ray_clients.packets import Packet, pack_messages
from fedtailor.training.ray_clients.remote_states import in_pieces, put_trees, remote_stores
from fedtailor.training.ray_clients.shard import assign_clients, make_shard, positions_by_actor, sample_pieces
from fedtailor.training.ray_clients.worker import ShardReport
from fedtailor.training.round_state import ClientResults, RoundState
from fedtailor.training.server import MessageSource, Server
from fedtailor.training.simulated_clients import SimulatedClients

if TYPE_CHECKING:
    from fedtailor.runs.checkpoint import Checkpoint


@dataclass(eq=False, kw_only=True)
class RayClients:
    """The clients of a run in several actors, which keep their samples and states.

    `local` are the same clients in this process, which knows the schedule and the sizes and evaluates held-out clients.
    Their states are here only after `gather`.
    """

    local: AnyClients
    fed: Federation
    actors: ActorGroup
    server: Server
    choice: EngineChoice = field(default_factory=lambda: EngineChoice("sequential"))
    reason: str = ""
    device_name: str = "cpu"

    def __post_init__(self) -> None:
        sizes = self._first.training_samples.sizes.tolist()
        self._owner = assign_clients(sizes, self.actors.count)
        self._is_remote = False
        self._chunk_sizes: dict[str, Any] = {}

    @property
    def _first(self) -> SimulatedClients:
        return self.local.group(0)

    @property
    def names(self) -> Sequence[str]:
        return self.local.names

    @property
    def sizes(self) -> dict[str, list[int]]:
        return self.local.sizes

    @property
    def min_clients(self) -> int:
        return self.local.min_clients

    @property
    def threads(self) -> int:
        return 1  # of the server; actors have their own

    @property
    def models(self) -> list[Model]:
        """One network per architecture."""
        return self.local.models

    def group(self, client: int) -> SimulatedClients:
        """Return the group of a client in this process, which has its state after `gather`."""
        return self.local.group(client)

    def initial_weights(self) -> Params:
        """Return the initial weights, as the run folder stores them."""
        return self.local.initial_weights()

    # Actors: they start before round 1, and again after one was lost.

    def start(self) -> None:
        """Start the actors and send each the samples of its clients."""
        self.actors.start()
        for actor in range(self.actors.count):  # one after another, so that few samples are in memory twice
            own = np.flatnonzero(np.asarray(self._owner) == actor).tolist()
            shard, rows = make_shard(self.local, self.fed, own)
            self.device_name = self.actors.call({actor: ("load", shard)})[actor]
            for start, pieces in sample_pieces(self.local, rows):
                self.actors.call({actor: ("add_samples", start, pieces)})
        self._is_remote = True

    def choose_engine(self, name: str, chunk_size: int | None) -> None:
        """Choose the engine inside each actor; the first actor measures what is fastest."""
        first, method = self._first, self.server.method
        largest = max(first.schedule, key=len)
        own = [client for client in largest if self._owner[client] == 0] or [self._owner.index(0)]
        own = own[:1] if method.sequential_clients else own
        common, messages = pack_messages(
            self.actors.put, self.server.send(self.server.state, own, 1), {0: list(range(len(own)))}
        )
        request = ("choose_engine", name, chunk_size, len(first.schedule), own, messages[0], common)
        self.use_engine(*self.actors.call({0: request})[0])

    def use_engine(self, choice: EngineChoice, reason: str) -> None:
        """Train with this engine inside each actor from now on."""
        self.choice, self.reason = choice, reason
        self.actors.call_all("use_engine", choice, reason, self._chunk_sizes)

    def restart(self) -> None:
        """Start all actors again, before round 1, after one of them was lost."""
        self.start()
        self.use_engine(self.choice, self.reason)

    def gather(self) -> None:
        """Move all states and trained models to this process, and stop the actors."""
        if not self._is_remote:
            return
        try:
            for name, store in self.snapshot()[0].items():
                for clients, stacked in in_pieces(store):
                    self.local.put(name, clients, stacked)
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop the actors; their states are lost."""
        self._is_remote = False
        self.actors.stop()

    def info(self) -> dict[str, Any]:
        """Return the facts about actors and engine that `run.json` records."""
        return {
            "engine": RAY,
            "actors": self.actors.count,
            "actor_engine": self.choice.engine,
            "engine_reason": self.reason,
            "chunk_size": self.choice.chunk_size,
            "threads": self.choice.threads,
            "device": self.device_name,
        }

    # The protocol `Clients`.

    def select(self, server: Server, number: int, attempt: int) -> tuple[list[int], dict[int, str]]:
        """Return the scheduled clients of a round, and those that miss it."""
        return self.local.select(server, number, attempt)

    def train(self, round_state: RoundState, number: int, clients: list[int], sent: Tree) -> ClientResults | None:
        """Train each client in its actor. The driver receives the uploads, or only their mean if that suffices."""
        positions = positions_by_actor(self._owner, clients)
        # the noise of a trusted server is drawn for all uploads of a round, and robust aggregation compares them
        needs_all = self.server.channel.trusted or self.server.robust.is_on
        weights = None if needs_all else self.server.method.mean_weights
        common, messages = pack_messages(self.actors.put, sent, positions)
        reports: dict[int, ShardReport] = self.actors.call(
            {
                actor: ("train", number, [clients[p] for p in own], messages[actor], common, weights)
                for actor, own in positions.items()
            }
        )
        failures = {c: failure for report in reports.values() for c, failure in report.failures.items()}
        round_state.failures |= {client: failures[client] for client in clients if client in failures}
        reports = {actor: report for actor, report in reports.items() if report.clients}
        if not reports:
            return None
        self._check_signatures(round_state, reports)
        for report in reports.values():
            update_values(round_state.client_metrics, report.drift)
        round_state.metrics_seconds += max(report.metrics_seconds for report in reports.values())
        return self._merge(clients, sent, reports, None if weights is None else self._mean("mean_upload", [*reports]))

    def _merge(
        self, clients: list[int], sent: Tree, reports: dict[int, ShardReport], mean: Tree | None
    ) -> ClientResults:
        """Return the results of all actors in the order of `clients`."""
        place = {client: position for position, client in enumerate(clients)}
        order = [[place[client] for client in report.clients] for report in reports.values()]
        delivered = sorted(position for own in order for position in own)
        sizes = {c: size for r in reports.values() for c, size in zip(r.clients, r.bytes_up, strict=True)}

        def merge(packets: list[Packet | None]) -> Tree:
            found = [packet.unpack() for packet in packets if packet is not None]
            return restore_order(found, order) if found else {}

        done = [clients[position] for position in delivered]
        return ClientResults(
            clients=done,
            sent=sent if len(done) == len(clients) else select_rows(sent, delivered),
            encoded=merge([report.encoded for report in reports.values()]),
            client_metrics=merge([report.client_metrics for report in reports.values()]),
            mean=mean,
            bytes_up=[sizes[client] for client in done],
        )

    def _check_signatures(self, round_state: RoundState, reports: dict[int, ShardReport]) -> None:
        """Raise `RunError` if the uploads of the clients of different actors have different structures."""
        for report in reports.values():
            round_state.signature = round_state.signature or report.signature
            if report.signature != round_state.signature:
                difference = describe_difference(report.signature, round_state.signature)
                raise RunError(f"Client {report.clients[0]} failed because {difference}.")

    def commit(self, round_state: RoundState, number: int) -> None:
        """Keep the new states and the trained models in the actors."""
        actors = list(positions_by_actor(self._owner, round_state.clients))
        center = None
        if self._first.measure_drift and actors:
            center = (0.0, Packet.pack(self._mean("mean_trained", actors)))
        found = self.actors.call(dict.fromkeys(actors, ("commit", number, center)))
        for drift, _ in found.values():
            update_values(round_state.client_metrics, drift)
        round_state.metrics_seconds += max((seconds for _, seconds in found.values()), default=0.0)

    def _mean(self, name: str, actors: list[int]) -> Tree:
        """Return the weighted mean of what these actors return as (weight, mean), added in pairs inside the actors."""
        means = [(actor, self.actors.submit(actor, name)) for actor in actors]
        while len(means) > 1:
            pairs = [means[start : start + 2] for start in range(0, len(means), 2)]
            means = [
                (pair[0][0], self.actors.submit(pair[0][0], "combine", pair[0][1], pair[1][1]))
                if len(pair) == 2
                else pair[0]
                for pair in pairs
            ]
        packet: Packet = self.actors.result(means[0][1])[1]
        return packet.unpack()

    def evaluate(self, server: Server, clients: Sequence[int], outdated: Set[int], is_last: bool) -> Evaluation:
        """Evaluate each client in its actor, and held-out clients in this process."""
        held_out = self.local.evaluate(server, [], set(), is_last)
        return evaluate_in_actors(held_out, self.actors, self._owner, server, clients, outdated)

    def close(self) -> None:
        """End nothing: the actors have the states, and `gather` stops them."""

    def snapshot(self) -> tuple[Mapping[str, StoredTrees], dict[str, Any]]:
        """Return the states and trained models in the actors, and the smallest chunk size of their engines."""
        stores, metadata = self.local.snapshot()
        if not self._is_remote:
            return stores, metadata
        return remote_stores(self.actors, self._owner, {name: store.initial for name, store in stores.items()})

    def restore(self, server: MessageSource, checkpoint: "Checkpoint") -> None:
        """Restore the states of all clients in their actors from a checkpoint."""
        self.actors.call_all("reset")
        for group in [self.local] if isinstance(self.local, SimulatedClients) else self.local.groups:
            *names, chunk_size = group.saved_names
            self._chunk_sizes[chunk_size] = checkpoint.metadata.get(chunk_size)
            for name in names:
                for clients, stacked in checkpoint.shards(name):
                    if clients and max(clients) >= len(self._owner):
                        folder = checkpoint.folder
                        raise RunError(f"The checkpoint '{folder}' has states of clients that do not exist.")
                    put_trees(self.actors, self._owner, name, clients, stacked)
        self.use_engine(self.choice, self.reason)
