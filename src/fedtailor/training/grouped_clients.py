"""Simulated clients with different architectures: one group of `SimulatedClients` per architecture.

A group trains, evaluates, and stores its own clients, whose states and models have the same shapes. Messages and
uploads have the same shapes in all groups, so the server sees the clients of a round together, in their order.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, add
from fedtailor.runs.client_states import ClientStates
from fedtailor.runs.records import update_values
from fedtailor.training.clients import Evaluation
from fedtailor.training.engines import Engine, EngineChoice
from fedtailor.training.engines.vectorized import restore_order, select_rows
from fedtailor.training.round_state import ClientResults, RoundState
from fedtailor.training.sample_index import SampleIndex
from fedtailor.training.server import MessageSource, Server
from fedtailor.training.simulated_clients import SimulatedClients

if TYPE_CHECKING:
    from fedtailor.runs.checkpoint import Checkpoint


@dataclass(eq=False)
class GroupedClients:
    """The clients of a run on this machine, grouped by architecture."""

    groups: Sequence[SimulatedClients]
    group_of: Sequence[int]  # group of every client, held-out clients last

    @property
    def names(self) -> Sequence[str]:
        return self.groups[0].names

    @property
    def sizes(self) -> dict[str, list[int]]:
        return self.groups[0].sizes

    @property
    def min_clients(self) -> int:
        return self.groups[0].min_clients

    @property
    def threads(self) -> int:
        return self.groups[0].threads

    @property
    def models(self) -> list[Model]:
        """One network per architecture."""
        return [group.setup.model for group in self.groups]

    def group(self, client: int) -> SimulatedClients:
        """Return the group of a client."""
        return self.groups[self.group_of[client]]

    def select(self, server: Server, number: int, attempt: int) -> tuple[list[int], dict[int, str]]:
        """Return the clients of a round, which do not depend on architectures."""
        return self.groups[0].select(server, number, attempt)

    def train(self, round_state: RoundState, number: int, clients: list[int], sent: Tree) -> ClientResults | None:
        """Train the clients of one group after another, and put their results into the order of `clients`."""
        found: dict[str, ClientResults] = {}
        for name, positions in self._split(clients):
            own = [clients[position] for position in positions]
            results = self.groups[int(name)].train(round_state, number, own, select_rows(sent, positions))
            found |= {} if results is None else {name: results}
        if not found:
            return None
        place = {client: position for position, client in enumerate(clients)}
        order = [[place[client] for client in results.clients] for results in found.values()]
        delivered = sorted(position for positions in order for position in positions)

        def merge(part: str) -> Tree:
            return restore_order([getattr(results, part) for results in found.values()], order)

        return ClientResults(
            clients=[clients[position] for position in delivered],
            sent=select_rows(sent, delivered),
            encoded=merge("encoded"),
            client_metrics=merge("client_metrics"),
            results={name: results.results for name, results in found.items()},
        )

    def commit(self, round_state: RoundState, number: int, center: Tree | None = None) -> None:
        """Keep the new states and the trained models in each group."""
        for name, positions in self._split(round_state.clients):
            own = [round_state.clients[position] for position in positions]
            results = [cohort[name] for cohort in round_state.results if name in cohort]
            of_group = replace(round_state, clients=own, results=results)
            self.groups[int(name)].commit(of_group, number)
            round_state.metrics_seconds = of_group.metrics_seconds

    def evaluate(self, server: MessageSource, clients: Sequence[int], outdated: Set[int], is_last: bool) -> Evaluation:
        """Evaluate the clients of each group; a group without any may have held-out clients."""
        found = Evaluation({})
        for index, group in enumerate(self.groups):
            own = [client for client in clients if self.group_of[client] == index]
            part = group.evaluate(server, own, outdated, is_last)
            update_values(found.values, part.values)
            update_values(found.method_values, part.method_values)
            if part.totals:
                found = replace(found, totals=add(found.totals, part.totals) if found.totals else part.totals)
        return found

    def build_engine(self, choice: EngineChoice, samples: SampleIndex) -> list[Engine]:
        """Return the engine of every group."""
        return [group.build_engine(choice, samples) for group in self.groups]

    def apply_train(self, engines: Sequence[Engine], number: int, clients: Sequence[int], sent: Tree) -> None:
        """Train these clients without a result, to measure engines."""
        for name, positions in self._split(clients):
            own = [clients[position] for position in positions]
            self.groups[int(name)].apply_train(engines[int(name)], number, own, select_rows(sent, positions))

    def use_engine(self, choice: EngineChoice, reason: str) -> None:
        """Train with this engine from now on."""
        for group in self.groups:
            group.use_engine(choice, reason)

    def close(self) -> None:
        """End the worker processes of all groups."""
        for group in self.groups:
            group.close()

    def initial_weights(self) -> Params:
        """Return the initial weights of all architectures, in one dict: "1/head.weight" is of the second one."""
        return {
            f"{index}/{name}": value
            for index, group in enumerate(self.groups)
            for name, value in group.initial_weights().items()
        }

    def snapshot(self) -> tuple[dict[str, ClientStates], dict[str, Any]]:
        """Return the stores and the metadata of all groups."""
        stores, metadata = dict[str, ClientStates](), dict[str, Any]()
        for group in self.groups:
            own_stores, own_metadata = group.snapshot()
            stores |= own_stores
            metadata |= own_metadata
        return stores, metadata

    def restore(self, server: MessageSource, checkpoint: "Checkpoint") -> None:
        """Restore all groups from a checkpoint."""
        for group in self.groups:
            group.restore(server, checkpoint)

    def put(self, name: str, clients: Sequence[int], stacked: Tree) -> None:
        """Store trees of clients of one group, by the name of the store in a checkpoint."""
        for group in self.groups:
            group.put(name, clients, stacked)

    def reset(self) -> None:
        """Forget all states and trained models, as before round 1."""
        for group in self.groups:
            group.reset()

    def _split(self, clients: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
        """Yield the name of each group that has some of these clients, and their positions."""
        for index in range(len(self.groups)):
            positions = [position for position, client in enumerate(clients) if self.group_of[client] == index]
            if positions:
                yield str(index), positions


AnyClients = SimulatedClients | GroupedClients
