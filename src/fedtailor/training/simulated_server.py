"""The server of a simulation: it also holds all clients' data and states, and trains them in an engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedtailor.core.batch import SharedContext
from fedtailor.core.client_context import ClientContext
from fedtailor.core.memory_limits import check_method_memory
from fedtailor.core.method import Method, Setup
from fedtailor.core.model import Model
from fedtailor.core.system import deterministic, retain_freed_memory
from fedtailor.core.trees import Params, Tree, cache_by_identity, flatten, map_leaves, take
from fedtailor.data.federation import Federation
from fedtailor.data.input_spec import InputSpec
from fedtailor.data.partition import hold_out
from fedtailor.errors import RunError
from fedtailor.runs.client_states import ClientStates
from fedtailor.runs.records import Record
from fedtailor.training.channel.leak_check import LeakCheck
from fedtailor.training.channel.payload import mask_absent_rows
from fedtailor.training.client_failures import ClientFailure, find_failures, find_non_finite, upload_mismatch
from fedtailor.training.client_update import client_update, initial_model, make_shared_context, personal_state_dict
from fedtailor.training.config import TrainingConfig
from fedtailor.training.engines import Engine, EngineChoice
from fedtailor.training.engines.auto import EngineBenchmark, named_engine
from fedtailor.training.engines.pool import WorkerLostError
from fedtailor.training.engines.sequential import InPlaceMutationError, Sequential
from fedtailor.training.engines.vectorized import Vectorized, select_rows
from fedtailor.training.evaluator import Evaluator
from fedtailor.training.preflight import check_model_fits, choose_num_threads, max_concurrent_clients, measure_step_cost
from fedtailor.training.round_state import RoundState, drop_rows, remaining_clients
from fedtailor.training.sample_index import SampleIndex
from fedtailor.training.server import ClientResults, Server

if TYPE_CHECKING:
    from fedtailor.runs.checkpoint import Checkpoint


@dataclass(eq=False, kw_only=True)
class SimulatedServer(Server):
    """The server of a run whose clients are simulated on this machine.

    Besides the server state it holds the clients' samples, their states, their trained models, and the engine that
    trains them.
    """

    params: Params  # initial parameters of the model
    engine_choice: EngineChoice  # the engine and its settings
    engine_reason: str  # why this engine was chosen
    engine: Engine
    leak_check: LeakCheck
    shared: SharedContext
    evaluation_context: SharedContext  # `shared` with the model in evaluation mode
    device: torch.device
    train: SampleIndex
    validation: SampleIndex
    test: SampleIndex
    states: ClientStates
    trained: ClientStates | None = None  # each client's model after it last trained; None before round 1

    @classmethod
    @torch.no_grad()
    def build(
        cls,
        config: TrainingConfig,
        method: Method,
        model: Model,
        fed: Federation,
        schedule: Sequence[Sequence[int]],
        initial_weights: Mapping[str, Tensor] | None = None,
        engine_choice: EngineChoice | None = None,
    ) -> "SimulatedServer":
        """Return the server before round 1, after checking that method, model, and data fit together.

        A resumed run passes the `engine_choice` it was started with; otherwise `config` decides.
        """
        device, seed = config.torch_device, config.seed
        retain_freed_memory()
        model, params = initial_model(model, config, initial_weights)
        train, validation = _hold_out_validation(fed, config.validation, seed, device)
        sizes = torch.from_numpy(train.sizes)
        participation = sum(map(len, schedule)) / (len(schedule) * fed.num_clients)
        shared = make_shared_context(config, model, fed, sizes, len(schedule), participation)
        eval_model = model.eval_mode
        check_model_fits(eval_model, params, shared, fed)
        setup = Setup(model, params, fed.num_clients, sizes.to(device), len(schedule), seed)
        check_method_memory(method, setup)
        state = method.init_server(setup)
        step_cost = measure_step_cost(eval_model, params, shared)
        max_clients, threads = max_concurrent_clients(step_cost, device), choose_num_threads(step_cost)
        if config.engine == "auto" and config.chunk_size is not None:
            raise RunError("chunk_size applies only to the engine 'vectorized'; set engine='vectorized' too.")
        name = "sequential" if config.engine == "auto" else config.engine
        choice = engine_choice or named_engine(name, config.chunk_size, threads, max_clients, device)
        server = cls(
            method=method,
            model=model,
            params=params,
            engine_choice=choice,
            engine_reason="The engine was requested.",
            engine=choice.build(shared, train),
            evaluation_context=replace(shared, model=eval_model),
            leak_check=LeakCheck(shared.x, shared.prepare),
            shared=shared,
            device=device,
            train=train,
            validation=validation,
            test=SampleIndex(fed.test, device),
            sizes=sizes.to(device),
            initial_state=state,
            state=state,
            noise_seed=seed,
            states=ClientStates(method.init_client(setup)),
            channel=config.channel,
            max_failures=config.max_failures,
        )
        if config.engine == "auto" and engine_choice is None:
            server._choose_engine(schedule, max_clients)
        return server

    def _choose_engine(self, schedule: Sequence[Sequence[int]], max_clients: int) -> None:
        """Benchmark the engines on the clients of the largest round and switch to the fastest."""
        largest_round = max(schedule, key=len)
        clients = largest_round[:1] if self.method.sequential_clients else largest_round
        benchmark = EngineBenchmark(
            build=lambda engine_choice, samples: engine_choice.build(self.shared, samples),
            train=lambda engine, clients: self._apply_train(
                engine, 1, clients, mask_absent_rows(self.method.send(self.state, clients, 1))
            ),
            samples=self.train,
            clients=clients,
            batch_size=self.shared.batch_size,
            rounds=len(schedule),
            device=self.device,
        )
        self.engine_choice, self.engine_reason = benchmark.choose(self.engine_choice, max_clients)
        self.engine = self.engine_choice.build(self.shared, self.train)

    def info(self, fed: Federation) -> dict[str, Any]:
        """Return the facts that `run.json` records once: engine, device, model, and clients."""
        return {
            "method_title": self.method.display_name,
            "engine": self.engine_choice.engine,
            "engine_reason": self.engine_reason,
            "chunk_size": self.engine_choice.chunk_size,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            "threads": self.engine_choice.threads,
            "torch": torch.__version__,
            "parameters": sum(p.numel() for p in self.model.module.parameters() if p.requires_grad),
            "score": self.model.score,
            "higher_is_better": self.model.higher_is_better,
            "layers": list(self.model.layers()),
            "inputs": InputSpec.from_federation(fed).to_json(),
            "clients": [self._client_info(client, fed) for client in range(fed.num_clients)],
        }

    def _client_info(self, client: int, fed: Federation) -> dict[str, Any]:
        splits = {"train": self.train, "validation": self.validation, "test": self.test}
        sizes = {split: int(samples.sizes[client]) for split, samples in splits.items()}
        counts = fed.class_counts(self.train[client].cpu())
        return {"name": fed.names[client], **sizes, "classes": counts}

    def train_clients(
        self, round_state: RoundState, number: int, clients: list[int], sent: Tree
    ) -> ClientResults | None:
        """Train these clients in the engine, check their uploads, and encode them for the channel."""
        clients, sent, result = self._train_valid_clients(round_state, number, clients, sent)
        if not clients:
            return None
        uploads = mask_absent_rows(result["upload"])
        self.leak_check.check(type(self.method).__name__, clients, self.train, uploads)
        encoded = self.channel.encode(uploads, sent, clients, number, self.shared.seed)
        metrics = result["client_metrics"] | self.channel.metrics(uploads, sent)
        return ClientResults(clients, sent, encoded, metrics, {"state": result["state"], "trained": result["trained"]})

    def _train_valid_clients(
        self, round_state: RoundState, number: int, clients: list[int], sent: Tree
    ) -> tuple[list[int], Tree, Tree]:
        """Train these clients; return those that succeed, the messages to them, and their results, stacked.

        The others are added to `round_state.failures`: clients that raise an exception, return the wrong structure,
        or return NaN or infinity.
        """
        try:
            result = self._apply_train(self.engine, number, clients, sent)
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
            result = self._apply_train(self.engine, number, clients, sent)
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
        sequential = Sequential(self.shared, self.train)

        def message(client: int) -> Tree:
            return select_rows(sent, [clients.index(client)])

        return find_failures(
            lambda client: self._apply_train(sequential, number, [client], message(client)),
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

    @property
    def stores(self) -> dict[str, ClientStates]:
        """What is saved of every client in a checkpoint, by kind."""
        return {"states": self.states} | ({} if self.trained is None else {"trained": self.trained})

    @property
    def chunk_size(self) -> int | None:
        """The current chunk size, which the vectorized engine reduces when it runs out of memory."""
        return self.engine.chunk_size if isinstance(self.engine, Vectorized) else self.engine_choice.chunk_size

    def restore(self, checkpoint: "Checkpoint", records: Sequence[Record]) -> None:
        """Restore the server and all clients from a checkpoint; `records` are those of the rounds before it."""
        self.restore_state(checkpoint.server()[0], checkpoint.round, records)
        if isinstance(self.engine, Vectorized):
            self.engine.chunk_size = checkpoint.metadata["chunk_size"]
        for clients, stacked in checkpoint.shards("states"):
            self.states.put(clients, stacked)
        template = take(self.trained_models([0]), 0)
        for clients, stacked in checkpoint.shards("trained"):
            self.trained = self.trained or ClientStates(template)
            self.trained.put(clients, stacked)
        last_clients = [client for store in self.stores.values() for client in store.clients()[-1:]]
        if any(client >= self.shared.num_clients for client in last_clients):
            raise RunError(f"The checkpoint '{checkpoint.folder}' has states of clients that do not exist.")

    def commit(self, round_state: RoundState) -> None:
        super().commit(round_state)
        if not round_state.clients:
            return
        results = (
            round_state.results[0]
            if len(round_state.results) == 1
            else map_leaves(lambda *parts: torch.cat(parts), *round_state.results)
        )
        results = map_leaves(cache_by_identity(torch.Tensor.contiguous), results)
        self.states.put(round_state.clients, results["state"])
        if self.trained is None:
            self.trained = ClientStates(take(results["trained"], 0))
        self.trained.put(round_state.clients, results["trained"])

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(self.method, self.evaluation_context, self.engine_choice)

    @torch.no_grad()
    def received_models(self, clients: Sequence[int], number: int) -> Tree:
        """Return these clients' personal models at the start of round `number`, stacked (moment `received`)."""
        return self.apply_method(self.method.personalize, self.method.serve, self.state, clients, number)

    def trained_models(self, clients: Sequence[int]) -> Tree:
        """Return these clients' personal models after they last trained, stacked (moment `trained`).

        A client that never trained has its personal model of the initial server state.
        """
        store = self.trained
        if store is None:
            return self._initial_models(clients)
        if all(store.has(client) for client in clients):
            return store.get(clients, self.device)
        models = [
            store.get([client], self.device) if store.has(client) else self._initial_models([client])
            for client in clients
        ]
        return map_leaves(lambda *parts: torch.cat(parts), *models)

    def _initial_models(self, clients: Sequence[int]) -> Tree:
        return self.apply_method(self.method.personalize, self.method.serve, self.initial_state, clients, 1)

    def personal_state_dict(self, client: int, moment: str) -> Params:
        """Return one client's personal model as a `state_dict`."""
        with deterministic(self.engine_choice.threads):
            trained = moment == "trained"
            model = self.trained_models([client]) if trained else self.received_models([client], self.shared.rounds + 1)
        return personal_state_dict(self.model, self.params, flatten(take(model, 0)))

    def _apply_train(self, engine: Engine, number: int, clients: Sequence[int], sent: Tree) -> Tree:
        """Return the results of `client_update` for these clients and messages, stacked."""
        return engine.apply(self._train, number, clients, self.states.get(clients, self.device), sent)

    def _train(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return client_update(self.method, ctx, state, message)

    def apply_method(
        self,
        function: Callable[..., Tree],
        send: Callable[..., Tree],
        server: Tree,
        clients: Sequence[int],
        number: int,
    ) -> Tree:
        """Return `function(ctx, state, message)` for these clients, stacked.

        The messages are those that `send` (`method.send` or `method.serve`) returns for this server state in round
        `number`.
        """
        sent = mask_absent_rows(send(server, clients, number))
        return self.engine.apply(function, number, clients, self.states.get(clients, self.device), sent)


def _hold_out_validation(
    fed: Federation, fraction: float, seed: int, device: torch.device
) -> tuple[SampleIndex, SampleIndex]:
    """Split every client's training samples into training and validation samples."""
    targets = fed.y.numpy()
    splits = [hold_out(targets, samples.numpy(), fraction, (seed, client)) for client, samples in enumerate(fed.train)]
    train, validation = (SampleIndex([torch.from_numpy(split[side]) for split in splits], device) for side in (0, 1))
    return train, validation
