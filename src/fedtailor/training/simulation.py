"""Build a simulation: check that method, model, and data fit together, and choose the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.memory_limits import check_method_memory
from fedtailor.core.method import Method, Setup
from fedtailor.core.model import Model
from fedtailor.core.system import deterministic, retain_freed_memory
from fedtailor.core.trees import Params, flatten, take
from fedtailor.data.federation import Federation
from fedtailor.data.input_spec import InputSpec
from fedtailor.data.partition import hold_out
from fedtailor.errors import DataError, RunError
from fedtailor.runs.client_states import ClientStates
from fedtailor.training.channel.channel import Channel
from fedtailor.training.client_update import (
    choose_batch_size,
    initial_model,
    make_shared_context,
    personal_state_dict,
)
from fedtailor.training.config import TrainingConfig
from fedtailor.training.engines import EngineChoice
from fedtailor.training.engines.auto import EngineBenchmark, named_engine
from fedtailor.training.held_out import HeldOutClients
from fedtailor.training.preflight import (
    check_model_fits,
    choose_num_threads,
    find_dropout_calls,
    max_concurrent_clients,
    measure_step_cost,
)
from fedtailor.training.sample_index import SampleIndex
from fedtailor.training.server import Server
from fedtailor.training.simulated_clients import SimulatedClients
from fedtailor.training.unreliable import Unreliable

Schedule = Sequence[Sequence[int]]  # the clients selected for each round


@torch.no_grad()
def build_simulation(
    config: TrainingConfig,
    method: Method,
    model: Model,
    fed: Federation,
    schedule: Schedule,
    initial_weights: Mapping[str, Tensor] | None = None,
    engine_choice: EngineChoice | None = None,
    held_out: Federation | None = None,
) -> tuple[Server, SimulatedClients, Params]:
    """Return the server and the clients before round 1, and the initial parameters.

    A resumed run passes the `engine_choice` it was started with; otherwise `config` decides. `held_out` contains the
    clients that never train.
    """
    device, seed = config.torch_device, config.seed
    retain_freed_memory()
    model, params = initial_model(model, config, initial_weights)
    samples = _split_samples(fed, config.validation, seed, device)
    if config.patience is not None and not samples["validation"].sizes.any():
        raise DataError("No client has validation data, which patience needs; use a larger validation fraction.")
    training_samples = samples["train"].pooled() if method.pools_data else samples["train"]
    sizes = torch.from_numpy(samples["train"].sizes)
    participation = sum(map(len, schedule)) / (len(schedule) * fed.num_clients)
    largest = int(training_samples.sizes.max())
    shared = make_shared_context(config, model, fed, sizes, len(schedule), participation, largest)
    output_shape = check_model_fits(model.eval_mode, params, shared, fed)
    model, shared = model.with_metrics_for(fed.classes, output_shape), find_dropout_calls(shared, params)
    shared = replace(shared, model=shared.model.with_metrics_for(fed.classes, output_shape))
    setup = Setup(model, params, fed.num_clients, sizes.to(device), len(schedule), seed)
    check_method_memory(method, setup)
    channel = Channel() if method.pools_data else config.channel
    server = Server.build(method, setup, channel, lambda: seed)
    step_cost = measure_step_cost(model.eval_mode, params, shared)
    max_clients, threads = max_concurrent_clients(step_cost, device), choose_num_threads(step_cost)
    if config.engine == "auto" and config.chunk_size is not None:
        raise RunError("chunk_size applies only to the engine 'vectorized'; set engine='vectorized' too.")
    name = "sequential" if config.engine == "auto" else config.engine
    choice = engine_choice or named_engine(name, config.chunk_size, threads, max_clients, device)
    clients = SimulatedClients(
        method=method,
        channel=channel,
        unreliable=Unreliable() if method.trains_every_round or method.pools_data else config.unreliable,
        schedule=schedule,
        names=fed.names,
        shared=shared,
        device=device,
        samples=samples,
        training_samples=training_samples,
        engine_choice=choice,
        engine_reason="The engine was requested.",
        engine=choice.build(shared, training_samples),
        states=ClientStates(method.init_client(setup)),
    )
    if config.engine == "auto" and engine_choice is None:
        _choose_engine(server, clients, max_clients)
    if held_out is not None:
        clients.held_out = _build_held_out(config, setup, server, clients, held_out)
    return server, clients, params


def _build_held_out(
    config: TrainingConfig,
    setup: Setup,
    server: Server,
    clients: SimulatedClients,
    held_out: Federation,
) -> HeldOutClients:
    """Return the held-out clients, numbered after the clients that train; they use all of their training samples."""
    train, test = (clients.samples[split].extended(getattr(held_out, split)) for split in ("train", "test"))
    sizes = torch.from_numpy(train.sizes)
    found = HeldOutClients(
        method=server.method,
        setup=replace(setup, num_clients=len(sizes), sizes=sizes.to(clients.device)),
        shared=replace(
            clients.shared,
            batch_size=choose_batch_size(config, setup.model, int(sizes.max())),
            num_clients=len(sizes),
            total_size=int(sizes.sum()),
        ),
        samples={"train": train, "test": test},
        engine_choice=clients.engine_choice,
        first=setup.num_clients,
    )
    found.check(server)
    return found


def _choose_engine(server: Server, clients: SimulatedClients, max_clients: int) -> None:
    """Benchmark the engines on the clients of the largest round and switch to the fastest."""
    largest_round = max(clients.schedule, key=len)
    benchmark = EngineBenchmark(
        build=lambda choice, samples: choice.build(clients.shared, samples),
        train=lambda engine, some: clients.apply_train(engine, 1, some, server.send(server.state, some, 1)),
        samples=clients.training_samples,
        clients=largest_round[:1] if server.method.sequential_clients else largest_round,
        batch_size=clients.shared.batch_size,
        rounds=len(clients.schedule),
        device=clients.device,
    )
    clients.engine_choice, clients.engine_reason = benchmark.choose(clients.engine_choice, max_clients)
    clients.engine = clients.engine_choice.build(clients.shared, clients.training_samples)


def simulation_info(
    server: Server, clients: SimulatedClients, fed: Federation, held_out: Federation | None = None
) -> dict[str, Any]:
    """Return the facts that `run.json` records once: engine, device, model, and clients."""
    device, choice = clients.device, clients.engine_choice
    return model_info(server) | {
        "engine": choice.engine,
        "engine_reason": clients.engine_reason,
        "chunk_size": choice.chunk_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": choice.threads,
        "inputs": InputSpec.from_federation(fed).to_json(),
        "clients": [
            {
                "name": fed.names[client],
                **{split: int(clients.sizes[split][client]) for split in ("train", "validation", "test")},
                "classes": fed.class_counts(clients.samples["train"][client].cpu()),
            }
            for client in range(fed.num_clients)
        ],
        **({} if fed.common_test is None else {"common_test": len(fed.common_test)}),
        **({} if held_out is None else {"held_out_clients": _describe_held_out(held_out)}),
    }


def _describe_held_out(fed: Federation) -> list[dict[str, Any]]:
    """Return the facts about held-out clients; they have no validation data."""
    return [
        {"name": name, "train": len(train), "validation": 0, "test": len(test), "classes": fed.class_counts(train)}
        for name, train, test in zip(fed.names, fed.train, fed.test, strict=True)
    ]


def model_info(server: Server) -> dict[str, Any]:
    """Return the facts about method and model that `run.json` records, for simulated and deployed runs."""
    model = server.model
    return {
        "method_title": server.method.display_name,
        "ranked_by": server.method.ranking_moment,
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.module.parameters() if p.requires_grad),
        "score": model.score,
        "higher_is_better": model.higher_is_better,
        "initial_weights": "fixed" if model.build is None else "seed",
        "layers": list(model.layers()),
    }


def personal_model(server: Server, clients: SimulatedClients, params: Params, client: int, moment: str) -> Params:
    """Return one client's personal model as a `state_dict`."""
    with deterministic(clients.threads):
        if clients.held_out is not None and client in clients.held_out.numbers:
            model = clients.held_out.model(server, client, moment)
        elif moment == "trained":
            model = take(clients.trained_models(server, [client]), 0)
        else:
            model = take(clients.received_models(server, [client], server.rounds_done + 1), 0)
    return personal_state_dict(server.model, params, flatten(model))


def _split_samples(fed: Federation, fraction: float, seed: int, device: torch.device) -> dict[str, SampleIndex]:
    """Return the clients' samples by split; validation samples are a fraction of the training samples."""
    targets = fed.y.numpy()
    halves = [hold_out(targets, samples.numpy(), fraction, (seed, client)) for client, samples in enumerate(fed.train)]
    train, validation = (SampleIndex([torch.from_numpy(half[side]) for half in halves], device) for side in (0, 1))
    samples = {"train": train, "validation": validation, "test": SampleIndex(fed.test, device)}
    if fed.common_test is not None:
        samples["common"] = SampleIndex.common(fed.common_test, fed.num_clients, device)
    return samples
