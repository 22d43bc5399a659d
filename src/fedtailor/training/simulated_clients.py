"""The clients of a simulation: their data and states, and the engine that trains them on this machine."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from fedtailor.core.batch import SharedContext
from fedtailor.core.method import Method, Setup
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, add, cache_by_identity, map_leaves, take
from fedtailor.core.updates import choose_rows
from fedtailor.errors import RunError
from fedtailor.runs.client_states import ClientStates, group_name
from fedtailor.runs.records import Values, update_values, values_by_client
from fedtailor.runs.run import MOMENTS
from fedtailor.training.attacks import Attack
from fedtailor.training.channel.channel import Channel
from fedtailor.training.channel.leak_check import LeakCheck
from fedtailor.training.channel.payload import mask_absent_rows
from fedtailor.training.client_failures import ClientFailure, find_failures, find_non_finite, upload_mismatch
from fedtailor.training.client_update import client_update
from fedtailor.training.clients import Evaluation
from fedtailor.training.drift import record_model_drift, record_shared_drift
from fedtailor.training.engines import Engine, EngineChoice, close_engine
from fedtailor.training.engines.pool import WorkerLostError
from fedtailor.training.engines.sequential import InPlaceMutationError, Sequential
from fedtailor.training.engines.vectorized import Vectorized, select_rows
from fedtailor.training.evaluator import Evaluator, global_scores, scores
from fedtailor.training.held_out import HeldOutClients
from fedtailor.training.round_state import ClientResults, RoundState, drop_rows, remaining_clients
from fedtailor.training.sample_index import SampleIndex
from fedtailor.training.server import MessageSource, Server
from fedtailor.training.unreliable import Unreliable

if TYPE_CHECKING:
    from fedtailor.runs.checkpoint import Checkpoint

_EVALUATION_CHUNK = 64  # clients that are evaluated at once, so that memory does not grow with their number


@dataclass(eq=False, kw_only=True)
class SimulatedClients:
    """The clients of a run on this machine: samples, states, trained models, and the engine that trains them."""

    method: Method
    setup: Setup  # with the clients' network and its initial parameters
    channel: Channel
    unreliable: Unreliable
    schedule: Sequence[Sequence[int]]  # the clients selected for each round
    names: Sequence[str]
    shared: SharedContext
    device: torch.device
    samples: Mapping[str, SampleIndex]  # by split: train, validation, test, and common if there is a common test set
    training_samples: SampleIndex  # the split train; for centralized training, the first client has all samples
    engine_choice: EngineChoice  # the engine and its settings
    engine_reason: str  # why this engine was chosen
    engine: Engine
    states: ClientStates
    trained: ClientStates | None = None  # each client's model after it last trained; None before round 1
    architecture: int = 0  # number of this group, if clients have different architectures (`grouped_clients.py`)
    first: int | None = 0  # a client of this group; None: only held-out clients have this architecture
    min_clients: int = 0
    attack: Attack | None = None
    malicious: frozenset[int] = frozenset()  # the clients that attack
    held_out: HeldOutClients | None = None  # clients that never train
    evaluate_train: bool = False  # evaluate personal models on training samples, too
    evaluate_global: bool = False  # evaluate the global model, too
    measure_drift: bool = False

    @property
    def sizes(self) -> dict[str, list[int]]:
        held_out = {} if self.held_out is None else self.held_out.samples  # their numbers follow those of the clients
        return {split: index.sizes.tolist() for split, index in {**self.samples, **held_out}.items()}

    @property
    def threads(self) -> int:
        return self.engine_choice.threads

    @property
    def models(self) -> list[Model]:
        """The network of all clients."""
        return [self.setup.model]

    def group(self, client: int) -> "SimulatedClients":
        """Return the group of a client: all clients have the same architecture."""
        return self

    def select(self, server: Server, number: int, attempt: int) -> tuple[list[int], dict[int, str]]:
        """Return the scheduled clients of a round, and those that are unavailable, late, or drop out."""
        clients = list(self.schedule[number - 1])
        return clients, self.unreliable.missed(clients, self.samples["train"].sizes, number, self.shared.seed)

    def train(self, round_state: RoundState, number: int, clients: list[int], sent: Tree) -> ClientResults | None:
        """Train these clients in the engine, check their uploads, and encode them for the channel."""
        clients, sent, result = self._train_valid_clients(round_state, number, clients, sent)
        if not clients:
            return None
        uploads = mask_absent_rows(result["upload"])
        self._leak_check.check(type(self.method).__name__, clients, self.training_samples, uploads)
        encoded = self._encode(uploads, sent, clients, number)
        metrics = result["client_metrics"] | self.channel.metrics(uploads, sent)
        if self.measure_drift:
            record_shared_drift(round_state, clients, self.setup.model, result["trained"], sent)
        return ClientResults(clients, sent, encoded, metrics, {"state": result["state"], "trained": result["trained"]})

    def _encode(self, uploads: Tree, sent: Tree, clients: list[int], number: int) -> Tree:
        """Return what clients send; malicious clients replace their uploads, and neither clip them nor add noise."""
        encoded = self.channel.encode(uploads, sent, clients, number, self.shared.seed)
        if self.attack is None:
            return encoded
        malicious = torch.tensor([client in self.malicious for client in clients], device=self.device)
        forged = self.attack.poison_uploads(uploads, sent, malicious, clients, number)
        channel = replace(self.channel, clip=None, noise=0.0, trusted=False)
        return choose_rows(malicious, channel.encode(forged, sent, clients, number, self.shared.seed), encoded)

    def commit(self, round_state: RoundState, number: int, center: Tree | None = None) -> None:
        """Keep the new states and the trained models of the clients that took part in a round.

        `center` is the mean of all trained models, from which drift is measured, if these are not all clients.
        """
        if not round_state.clients:
            return
        results = (
            round_state.results[0]
            if len(round_state.results) == 1
            else map_leaves(lambda *parts: torch.cat(parts), *round_state.results)
        )
        results = map_leaves(cache_by_identity(torch.Tensor.contiguous), results)
        if self.measure_drift:
            record_model_drift(round_state, self.setup.model, results["trained"], center)
        self.states.put(round_state.clients, results["state"])
        if self.trained is None:
            self.trained = ClientStates(take(results["trained"], 0))
        self.trained.put(round_state.clients, results["trained"])

    @torch.no_grad()
    def evaluate(self, server: MessageSource, clients: Sequence[int], outdated: Set[int], is_last: bool) -> Evaluation:
        """Evaluate personal models in chunks; see `Clients.evaluate`."""
        names = ("loss", *self.shared.model.metrics)
        found = Evaluation({f"{name}_{moment}": {} for moment in MOMENTS for name in names})
        following = server.rounds_done + 1
        for chunk in _chunks(clients):
            update_values(found.values, self._scores(chunk, self.received_models(server, chunk, following), "received"))
            if self.evaluate_global:
                sent = server.serve(server.state, chunk, following)
                update_values(found.values, global_scores(self._evaluator, chunk, sent, self.samples["test"]))
            if self.method.has_evaluation_metrics:
                found = self._add_method_metrics(found, chunk, server.send(server.state, chunk, following), following)
        for chunk in _chunks([client for client in clients if client in outdated]):
            personal = self.trained_models(server, chunk)
            update_values(found.values, self._scores(chunk, personal, "trained"))
            losses = self._evaluator(chunk, personal, self.training_samples, only="loss")["loss"]
            update_values(found.values, {"loss": losses})
        if self.held_out is not None:
            update_values(found.values, self.held_out.evaluate(server))
        return found

    def _add_method_metrics(self, found: Evaluation, clients: Sequence[int], sent: Tree, number: int) -> Evaluation:
        """Return an evaluation with the method's evaluation metrics of more clients."""
        stacked = self.apply(self.method.evaluation_metrics, number, clients, sent)
        update_values(found.method_values, values_by_client(clients, stacked))
        sums = map_leaves(lambda leaf: leaf.sum(0), stacked)
        return replace(found, totals=add(found.totals, sums) if found.totals else sums)

    def _scores(self, clients: Sequence[int], personal: Tree, moment: str) -> dict[str, Values]:
        samples = {split: own for split, own in self.samples.items() if split != "train" or self.evaluate_train}
        return scores(self._evaluator, clients, personal, moment, samples)

    @cached_property
    def _evaluator(self) -> Evaluator:
        return Evaluator(self.method, self.shared, self.engine_choice)

    @cached_property
    def _leak_check(self) -> LeakCheck:
        return LeakCheck(self.shared.x, self.shared.prepare)

    @torch.no_grad()
    def received_models(self, server: MessageSource, clients: Sequence[int], number: int) -> Tree:
        """Return these clients' personal models at the start of round `number`, stacked (moment `received`)."""
        return self.apply(self.method.personalize, number, clients, server.serve(server.state, clients, number))

    @torch.no_grad()
    def trained_models(self, server: MessageSource, clients: Sequence[int]) -> Tree:
        """Return these clients' personal models after they last trained, stacked (moment `trained`).

        A client that has not trained yet has the model that it would receive.
        """

        def received_model(client: int) -> Tree:
            return self.received_models(server, [client], server.rounds_done + 1)

        store = self.trained
        if store is not None and all(store.has(client) for client in clients):
            return store.get(clients, self.device)
        models = [
            store.get([client], self.device) if store is not None and store.has(client) else received_model(client)
            for client in clients
        ]
        return map_leaves(lambda *parts: torch.cat(parts), *models)

    def apply(self, function: Callable[..., Tree], number: int, clients: Sequence[int], sent: Tree) -> Tree:
        """Return `function(ctx, state, message)` for these clients and messages, stacked."""
        return self.engine.apply(function, number, clients, self.states.get(clients, self.device), sent)

    def apply_train(self, engine: Engine, number: int, clients: Sequence[int], sent: Tree) -> Tree:
        """Return the results of `client_update` for these clients and messages, stacked."""
        return engine.apply(self.update, number, clients, self.states.get(clients, self.device), sent)

    def build_engine(self, choice: EngineChoice, samples: SampleIndex) -> Engine:
        """Return an engine for clients with these training samples."""
        return choice.build(self.shared, samples)

    def use_engine(self, choice: EngineChoice, reason: str) -> None:
        """Train with this engine from now on."""
        self.engine_choice, self.engine_reason = choice, reason
        self.engine = self.build_engine(choice, self.training_samples)

    def initial_weights(self) -> Params:
        """Return the initial weights of the network, as an ordinary state_dict."""
        return self.setup.model.state_dict(self.setup.params)

    @cached_property
    def update(self) -> Callable[..., Tree]:
        """The function that trains one client for one round; an engine recognizes it in every round."""
        return partial(client_update, self.method)

    def close(self) -> None:
        """End the worker processes; the clients can still be used."""
        close_engine(self.engine)
        if self.held_out is not None:
            self.held_out.close()

    def snapshot(self) -> tuple[dict[str, ClientStates], dict[str, Any]]:
        """Return the clients' states and trained models, and the current chunk size of the vectorized engine.

        The engine reduces its chunk size when it runs out of memory, and results may depend on it.
        """
        states, trained, chunk_size = self.saved_names
        stores = {states: self.states} | ({} if self.trained is None else {trained: self.trained})
        size = self.engine.chunk_size if isinstance(self.engine, Vectorized) else self.engine_choice.chunk_size
        return stores, {chunk_size: size}

    def restore(self, server: MessageSource, checkpoint: "Checkpoint") -> None:
        """Restore all clients from a checkpoint."""
        if self.first is None:
            return
        states, trained, chunk_size = self.saved_names
        self.use_chunk_size(checkpoint.metadata[chunk_size])
        for clients, stacked in checkpoint.shards(states):
            self.put(states, clients, stacked)
        template = take(self.trained_models(server, [self.first]), 0)
        for clients, stacked in checkpoint.shards(trained):
            self.trained = self.trained or ClientStates(template)
            self.put(trained, clients, stacked)
        last_clients = [client for store in self.snapshot()[0].values() for client in store.clients()[-1:]]
        if any(client >= self.shared.num_clients for client in last_clients):
            raise RunError(f"The checkpoint '{checkpoint.folder}' has states of clients that do not exist.")

    def use_chunk_size(self, size: int | None) -> None:
        """Use the chunk size of a checkpoint, in which it is None if another engine wrote it."""
        if isinstance(self.engine, Vectorized) and size is not None:
            self.engine.chunk_size = size

    def put(self, name: str, clients: Sequence[int], stacked: Tree) -> None:
        """Store trees of these clients: states or trained models, by their name in a checkpoint."""
        if name == self.saved_names[0]:
            self.states.put(clients, stacked)
        elif name == self.saved_names[1]:
            self.trained = self.trained or ClientStates(take(stacked, 0))
            self.trained.put(clients, stacked)

    def reset(self) -> None:
        """Forget all states and trained models, as before round 1."""
        self.states, self.trained = ClientStates(self.states.initial), None

    @property
    def saved_names(self) -> list[str]:
        """The names of states, trained models, and the chunk size in a checkpoint."""
        return [group_name(kind, self.architecture) for kind in ("states", "trained", "chunk_size")]

    def _train_valid_clients(
        self, round_state: RoundState, number: int, clients: list[int], sent: Tree
    ) -> tuple[list[int], Tree, Tree]:
        """Train these clients; return those that succeed, the messages to them, and their results, stacked.

        The others are added to `round_state.failures`: clients that raise an exception, return the wrong structure,
        or return NaN or infinity.
        """
        try:
            result = self.apply_train(self.engine, number, clients, sent)
        except (InPlaceMutationError, WorkerLostError):  # these cannot be attributed to one client
            raise
        except Exception:
            failures = self._find_failures(number, clients, sent)
            if not failures:
                raise  # the engine failed, not a client
            round_state.failures |= failures
            clients, sent = remaining_clients(failures, clients), drop_rows(failures, clients, sent)
            if not clients:
                return [], sent, {}
            result = self.apply_train(self.engine, number, clients, sent)
        reason = self._find_mismatch(result, sent) or round_state.find_mismatch(result["upload"])
        if reason is not None:  # results are stacked, so all clients have the same structure
            round_state.failures |= dict.fromkeys(clients, ClientFailure(reason))
            return [], sent, {}
        failures = find_non_finite(
            clients, {part: mask_absent_rows(result[part]) for part in ("upload", "state", "trained")}
        )
        round_state.failures |= failures
        return (
            remaining_clients(failures, clients),
            drop_rows(failures, clients, sent),
            drop_rows(failures, clients, result),
        )

    def _find_failures(self, number: int, clients: list[int], sent: Tree) -> dict[int, ClientFailure]:
        """Train each client separately to find those that fail."""
        sequential = Sequential(self.shared, self.training_samples)

        def message(client: int) -> Tree:
            return select_rows(sent, [clients.index(client)])

        return find_failures(
            lambda client: self.apply_train(sequential, number, [client], message(client)),
            lambda client, result: self._find_mismatch(result, message(client)),
            clients,
        )

    def _find_mismatch(self, result: Tree, sent: Tree) -> str | None:
        """Return why the structure of clients' results is wrong, or None if it is right."""
        if (reason := upload_mismatch(result["upload"], sent)) is not None:
            return reason
        for name, store, part in (("state", self.states, "state"), ("model", self.trained, "trained")):
            if store is not None and (path := store.find_mismatch(result[part])) is not None:
                return f"its {name} must keep its names and shapes, but '{path}' changed"
        return None


def _chunks(clients: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(clients), _EVALUATION_CHUNK):
        yield clients[start : start + _EVALUATION_CHUNK]
