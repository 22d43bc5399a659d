"""Build a simulation: check that method, model, and data fit together, and choose the engine."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.batch import SharedContext
from fedtailor.core.client_models import AnyModel
from fedtailor.core.code_reference import short_name
from fedtailor.core.losses import WeightedCrossEntropy, balanced_weights
from fedtailor.core.memory_limits import check_method_memory
from fedtailor.core.method import Method, Setup
from fedtailor.core.model import Model
from fedtailor.core.system import deterministic, missing_fork, retain_freed_memory
from fedtailor.core.trees import Params, flatten, take
from fedtailor.data.federation import Federation
from fedtailor.data.input_spec import InputSpec
from fedtailor.data.splits.partition import hold_out
from fedtailor.errors import DataError, RunError
from fedtailor.runs.client_states import ClientStates
from fedtailor.training.architectures import check_same_exchange, check_supports_architectures, weights_of
from fedtailor.training.channel.channel import Channel
from fedtailor.training.client_update import (
    choose_batch_size,
    initial_model,
    make_shared_context,
    personal_state_dict,
)
from fedtailor.training.config import TrainingConfig
from fedtailor.training.engine_selection import settle_engine
from fedtailor.training.engines import RAY, EngineChoice
from fedtailor.training.engines.auto import explain_request, named_engine
from fedtailor.training.grouped_clients import AnyClients, GroupedClients
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

log = logging.getLogger("fedtailor")
Schedule = Sequence[Sequence[int]]  # the clients selected for each round


@torch.no_grad()
def build_simulation(
    config: TrainingConfig,
    method: Method,
    model: AnyModel,
    fed: Federation,
    schedule: Schedule,
    initial_weights: Mapping[str, Tensor] | None = None,
    engine_choice: EngineChoice | None = None,
    held_out: Federation | None = None,
) -> tuple[Server, AnyClients]:
    """Return the server and the clients before round 1.

    A resumed run passes the `engine_choice` it was started with; otherwise `config` decides. `held_out` contains the
    clients that never train; `ClientModels` name the networks of the clients that train, then of those held out.
    """
    retain_freed_memory()
    if config.evaluate_global:
        method.check_global_model()
    samples = _split_samples(fed, config.validation, config.seed, config.torch_device)
    if config.patience is not None and not samples["validation"].sizes.any():
        raise DataError("No client has validation data, which patience needs; use a larger validation fraction.")
    training_samples = samples["train"].pooled() if method.pools_data else samples["train"]
    networks = _prepare_networks(config, method, model, fed, schedule, initial_weights, samples, training_samples)
    device, channel = config.torch_device, Channel() if method.pools_data else config.channel
    server = Server.build(method, networks[0][0], channel, lambda: config.seed)
    costs = [measure_step_cost(setup.model.eval_mode, setup.params, shared) for setup, shared in networks]
    max_clients = min(max_concurrent_clients(cost, device) for cost in costs)
    is_chosen_later = config.engine in ("auto", RAY)  # by a benchmark, or in other processes
    if config.engine == "auto" and config.chunk_size is not None:
        raise RunError("chunk_size applies only to the engine 'vectorized'; set engine='vectorized' too.")
    name, chunk_size = ("sequential", None) if is_chosen_later else (config.engine, config.chunk_size)
    threads = max(map(choose_num_threads, costs))
    choice = engine_choice or named_engine(name, chunk_size, threads, max_clients, device)
    engine_reason = explain_request(choice, device)
    if choice.engine == "pool" and (problem := missing_fork()):
        log.warning("The engine 'pool' trains all clients in one process, because %s.", problem)
    num_all = fed.num_clients + (0 if held_out is None else held_out.num_clients)
    of_client = (0,) * num_all if isinstance(model, Model) else model.of_client
    groups = [
        SimulatedClients(
            method=method,
            setup=setup,
            channel=channel,
            unreliable=Unreliable() if method.trains_every_round or method.pools_data else config.unreliable,
            schedule=schedule,
            names=fed.names,
            shared=shared,
            device=device,
            samples=samples,
            training_samples=training_samples,
            engine_choice=choice,
            engine_reason=engine_reason,
            engine=choice.build(shared, training_samples),
            states=ClientStates(method.init_client(setup)),
            architecture=number,
            first=next((client for client in range(fed.num_clients) if of_client[client] == number), None),
            evaluate_train=config.evaluate_train,
            evaluate_global=config.evaluate_global,
            measure_drift=config.measure_drift,
        )
        for number, (setup, shared) in enumerate(networks)
    ]
    clients = groups[0] if isinstance(model, Model) else GroupedClients(groups, of_client)
    if engine_choice is None:
        settle_engine(config, server, clients, max_clients, rough_bytes=max(cost.memory for cost in costs))
    if held_out is not None:
        for group in groups:
            group.held_out = _build_held_out(config, server, group, held_out, of_client)
    return server, clients


def _prepare_networks(
    config: TrainingConfig,
    method: Method,
    model: AnyModel,
    fed: Federation,
    schedule: Schedule,
    initial_weights: Mapping[str, Tensor] | None,
    samples: Mapping[str, SampleIndex],
    training_samples: SampleIndex,
) -> list[tuple[Setup, SharedContext]]:
    """Return what the server and the clients know before round 1, for each architecture, after checking that it fits
    the data and the method."""
    models = [model] if isinstance(model, Model) else list(model.models)
    if len(models) > 1:
        check_supports_architectures(method)
    sizes, largest = torch.from_numpy(samples["train"].sizes), int(training_samples.sizes.max())
    weights = _class_weights(config, fed, samples["train"])
    participation = sum(map(len, schedule)) / (len(schedule) * fed.num_clients)
    found: list[tuple[Setup, SharedContext]] = []
    for number, one in enumerate(models):
        own = weights_of(initial_weights, None if isinstance(model, Model) else number)
        network, params = initial_model(one.with_class_weights(weights, fed.classes), config, own)
        if found:  # the data are stored once
            batch_size = choose_batch_size(config, network, largest)
            shared = replace(found[0][1], model=network.mode(training=True), batch_size=batch_size)
        else:
            shared = make_shared_context(config, network, fed, sizes, len(schedule), participation, largest)
        output_shape = check_model_fits(network.eval_mode, params, shared, fed)
        targets = fed.task, fed.classes, output_shape, config.metrics
        network, shared = network.with_metrics_for(*targets), find_dropout_calls(shared, params)
        shared = replace(shared, model=shared.model.with_metrics_for(*targets))
        device = config.torch_device
        setup = Setup(network, params, fed.num_clients, sizes.to(device), len(schedule), config.seed)
        check_method_memory(method, setup)
        found.append((setup, shared))
    check_same_exchange(method, [setup for setup, _ in found])
    return found


def _class_weights(config: TrainingConfig, fed: Federation, train: SampleIndex) -> list[float] | None:
    """Return the weights of the classes in the loss; balanced ones depend on the training samples of all clients."""
    if config.class_weights != "balanced":
        return config.class_weights
    return balanced_weights(fed.class_counts(train.pooled()[0].cpu()) or [])


def _build_held_out(
    config: TrainingConfig,
    server: Server,
    clients: SimulatedClients,
    held_out: Federation,
    of_client: Sequence[int],
) -> HeldOutClients:
    """Return the held-out clients of a group, numbered after the clients that train; they use all of their training
    samples."""
    train, test = (clients.samples[split].extended(getattr(held_out, split)) for split in ("train", "test"))
    setup, sizes = clients.setup, torch.from_numpy(train.sizes)
    numbers = range(setup.num_clients, len(sizes))
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
        numbers=[client for client in numbers if of_client[client] == clients.architecture],
    )
    found.check(server)
    return found


def simulation_info(
    server: Server, clients: AnyClients, fed: Federation, held_out: Federation | None = None
) -> dict[str, Any]:
    """Return the facts that `run.json` records once: engine, device, model, and clients."""
    first = clients.group(0)
    device, choice, sizes = first.device, first.engine_choice, clients.sizes
    return model_info(server, clients.models) | {
        "engine": choice.engine,
        "engine_reason": first.engine_reason,
        "chunk_size": choice.chunk_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": choice.threads,
        "inputs": InputSpec.from_federation(fed).to_json(),
        "clients": [
            {
                "name": fed.names[client],
                **{split: int(sizes[split][client]) for split in ("train", "validation", "test")},
                "classes": fed.class_counts(first.samples["train"][client].cpu()),
                **_describe_network(clients, client),
            }
            for client in range(fed.num_clients)
        ],
        **({} if fed.common_test is None else {"common_test": len(fed.common_test)}),
        **({} if held_out is None else {"held_out_clients": _describe_held_out(held_out, clients)}),
    }


def _describe_held_out(fed: Federation, clients: AnyClients) -> list[dict[str, Any]]:
    """Return the facts about held-out clients; they have no validation data."""
    facts = [
        {"name": name, "train": len(train), "validation": 0, "test": len(test), "classes": fed.class_counts(train)}
        for name, train, test in zip(fed.names, fed.train, fed.test, strict=True)
    ]
    before = len(clients.names)
    return [own | _describe_network(clients, before + number) for number, own in enumerate(facts)]


def _describe_network(clients: AnyClients, client: int) -> dict[str, Any]:
    """Return the facts about a client's network if clients have different ones."""
    if isinstance(clients, SimulatedClients):
        return {}
    group = clients.group(client)
    name = short_name(str(group.setup.model.description.get("name", "")))
    return {"architecture": group.architecture, "network": name, "parameters": count_parameters(group.setup.model)}


def model_info(server: Server, models: Sequence[Model]) -> dict[str, Any]:
    """Return the facts about method and model that `run.json` records, for simulated and deployed runs.

    `models` has one network per architecture; the number of parameters is that of the largest.
    """
    model = server.model
    weights = model.loss.weights.tolist() if isinstance(model.loss, WeightedCrossEntropy) else None
    return {
        **({} if weights is None else {"class_weights": weights}),
        "method_title": server.method.display_name,
        "ranked_by": server.method.ranking_moment,
        "torch": torch.__version__,
        "parameters": max(map(count_parameters, models)),
        "score": model.score,
        "higher_is_better": model.higher_is_better,
        "initial_weights": "fixed" if all(one.build is None for one in models) else "seed",
        "layers": list(model.layers()),
    }


def count_parameters(model: Model) -> int:
    """Return the number of trainable parameters."""
    return sum(p.numel() for p in model.module.parameters() if p.requires_grad)


def personal_model(server: Server, all_clients: AnyClients, client: int, moment: str) -> Params:
    """Return one client's personal model as a `state_dict`."""
    clients = all_clients.group(client)
    with deterministic(clients.threads):
        if clients.held_out is not None and client in clients.held_out.numbers:
            model = clients.held_out.model(server, client, moment)
        elif moment == "trained":
            model = take(clients.trained_models(server, [client]), 0)
        else:
            model = take(clients.received_models(server, [client], server.rounds_done + 1), 0)
    return personal_state_dict(clients.setup.model, clients.setup.params, flatten(model))


def _split_samples(fed: Federation, fraction: float, seed: int, device: torch.device) -> dict[str, SampleIndex]:
    """Return the clients' samples by split; validation samples are a fraction of the training samples."""
    strata = fed.strata
    halves = [hold_out(strata, samples.numpy(), fraction, (seed, client)) for client, samples in enumerate(fed.train)]
    train, validation = (SampleIndex([torch.from_numpy(half[side]) for half in halves], device) for side in (0, 1))
    samples = {"train": train, "validation": validation, "test": SampleIndex(fed.test, device)}
    if fed.common_test is not None:
        samples["common"] = SampleIndex.common(fed.common_test, fed.num_clients, device)
    return samples
