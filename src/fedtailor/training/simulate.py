"""Train a method on a federation whose clients are simulated on this machine.

`simulate` is the public function. It calls `train`, which builds a `Trainer` with simulated clients and runs it.
"""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.code_reference import describe_code, is_built_in, reference_to
from fedtailor.core.method import Method
from fedtailor.core.model import Model, ModelLike, as_model
from fedtailor.core.trees import Params
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError, DataError
from fedtailor.runs.records import Record, Records
from fedtailor.runs.run import FORMAT, Run
from fedtailor.runs.toml import to_toml
from fedtailor.training.channel.channel import Channel
from fedtailor.training.config import TrainingConfig
from fedtailor.training.engines import EngineChoice
from fedtailor.training.fingerprint import fingerprint
from fedtailor.training.participation import Participation, make_schedule
from fedtailor.training.simulated_clients import SimulatedClients
from fedtailor.training.simulation import build_simulation, personal_model, simulation_info
from fedtailor.training.trainer import Trainer
from fedtailor.training.unreliable import Unreliable
from fedtailor.version import VERSION


def simulate(
    method: Method,
    model: ModelLike,
    fed: Federation,
    *,
    rounds: int | None = None,
    batch_size: int = 64,
    participation: Participation = 1.0,
    engine: str = "auto",
    chunk_size: int | None = None,
    device: str = "auto",
    dtype: torch.dtype | str = torch.float32,
    seed: int = 0,
    schedule: Sequence[Sequence[int]] | None = None,
    validation: float = 0.0,
    evaluate_every: int = 1,
    evaluate: Any = "all",
    unreliable: Unreliable | None = None,
    channel: Channel | None = None,
    max_failures: float = 0.5,
    on_round_end: Callable[[Record], None] | None = None,
    folder: str | Path | None = None,
    checkpoint_every: int | None = None,
    initial_weights: Mapping[str, Tensor] | None = None,
) -> Run:
    """Train a method on a federation whose clients are simulated on this machine.

    Args:
        method: The method, such as `ft.methods.FedAvg(lr=0.1)`.
        model: A network from `ft.network` or `ft.wrap`, an `nn.Module` with a layer `head`, or a class or function that
            builds one. A module starts with its own weights; the weights of all others are drawn from the seed.
        fed: The clients and their data.
        rounds: Number of rounds. The default is the length of `schedule`, or 20.
        batch_size: Samples per batch. A client with fewer samples uses all of them.
        participation: Fraction of clients per round, or a range `(low, high)` from which each round draws a fraction.
        engine: How clients are trained: "vectorized" (many clients at once), "pool" (several processes),
            "sequential", or "auto" (the fastest of these for this run).
        chunk_size: Maximum number of clients that the vectorized engine trains at once (per core on a CPU).
        device: "cpu", "cuda", or "auto" (a GPU if available).
        dtype: `torch.float32` or `torch.float64`, or their names "float32" and "float64".
        seed: Seed of all random numbers.
        schedule: The clients of every round, instead of `rounds` and `participation`.
        validation: Fraction of each client's training samples to hold out for selecting a round or settings.
        evaluate_every: Rounds between evaluations. The last round is always evaluated.
        evaluate: Clients to evaluate: "all", "participants", or a number of clients.
        unreliable: How often clients are unavailable, late, or drop out.
        channel: How uploads are clipped, noised, sparsified, and quantized.
        max_failures: Fraction of a round's clients that may fail before the run stops.
        on_round_end: Function that is called with the record of every round.
        folder: New folder in which the run is saved. `ft.resume(folder)` continues the run after an interruption.
        checkpoint_every: Rounds between checkpoints. By default, chosen so that they take less than 5 % of the time.
        initial_weights: A `state_dict` to start from.

    >>> import fedtailor as ft
    >>> fed = ft.load("digits", clients=4)
    >>> len(ft.simulate(ft.methods.FedAvg(), ft.network("logistic", fed), fed, rounds=2).records)
    2
    """
    config = TrainingConfig(
        rounds=_as_int(rounds),
        batch_size=_as_int(batch_size),
        participation=participation,
        engine=engine,
        chunk_size=_as_int(chunk_size),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]  # TrainingConfig checks it
        seed=_as_int(seed),
        schedule=None if schedule is None else [_client_list(clients) for clients in schedule],
        validation=validation,
        evaluate_every=_as_int(evaluate_every),
        evaluate=_as_int(evaluate),
        checkpoint_every=_as_int(checkpoint_every),
        max_failures=max_failures,
        unreliable=unreliable or Unreliable(),
        channel=channel or Channel(),
    )
    return train(
        config, method, as_model(model), fed, on_round_end, None if folder is None else Path(folder), initial_weights
    )


def train(
    config: TrainingConfig,
    method: Method,
    model: Model,
    fed: Federation,
    on_round_end: Callable[[Record], None] | None = None,
    folder: Path | None = None,
    initial_weights: Mapping[str, Tensor] | None = None,
) -> Run:
    """Train a method like `simulate`, with all settings in one `TrainingConfig`."""
    trainer, params = make_trainer(config, method, model, fed, initial_weights, folder=folder)
    if folder is None:
        return trainer.train(on_round_end=on_round_end)
    from fedtailor.runs.writer import create_run  # requires safetensors, which a run in memory does not need

    with create_run(folder, config.checkpoint_every, trainer.run, trainer.server.model.state_dict(params)) as writer:
        run = trainer.train(writer, on_round_end)
        writer.finish(run)
    return run


def make_trainer(
    config: TrainingConfig,
    method: Method,
    model: Model,
    fed: Federation,
    initial_weights: Mapping[str, Tensor] | None = None,
    engine_choice: EngineChoice | None = None,
    folder: Path | None = None,
) -> tuple[Trainer[SimulatedClients], Params]:
    """Return the trainer of a simulation before round 1, and the initial parameters."""
    _check_types(method, fed)
    config.channel.check(method)
    schedule = make_schedule(
        fed.num_clients, config.rounds, config.participation, config.seed, config.schedule, config.unreliable
    )
    if method.trains_every_round:
        schedule = [list(range(fed.num_clients))] * len(schedule)
    server, clients, params = build_simulation(config, method, model, fed, schedule, initial_weights, engine_choice)
    info = {"format": FORMAT, "fedtailor": VERSION, **simulation_info(server, clients, fed)}
    experiment = describe_run(config, method, model, fed)
    if code := describe_code(experiment):
        info["code"] = code
    if folder is not None:
        info["fingerprint"] = fingerprint(describe_method(method), type(method), model, fed)
    run = Run(
        experiment=experiment,
        info=info,
        records=Records(),
        server=server.state,
        get_client=clients.states.get_one,
        get_personal=partial(personal_model, server, clients, params),
        folder=folder,
    )
    return Trainer(config=config, server=server, clients=clients, run=run), params


def describe_run(config: TrainingConfig, method: Method, model: Model, fed: Federation) -> dict[str, Any]:
    """Return all settings of a run by name, as `experiment.toml` stores them."""
    data = dict(fed.settings) or {"name": "own data"}
    parts = {"method": describe_method(method), "network": dict(model.description), "data": data}
    return tomllib.loads(to_toml(describe_config(config) | parts))


def describe_config(config: TrainingConfig) -> dict[str, Any]:
    """Return the settings of a run by name, except those of the method, the network, and the data."""
    settings = {name: getattr(config, name) for name in TrainingConfig.__dataclass_fields__}
    tables = {name: dict(vars(part)) for name, part in settings.items() if isinstance(part, (Unreliable, Channel))}
    return settings | tables | {"rounds": config.num_rounds}


def _client_list(clients: Any) -> list[Any]:
    if not isinstance(clients, Iterable) or isinstance(clients, str):
        raise ConfigError(f"schedule must list the clients of every round, such as [[0, 1], [2]], got {clients!r}.")
    return list(clients)


def _as_int(value: Any) -> Any:
    """Convert NumPy integers to int; return other values unchanged."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _check_types(method: Method, fed: Federation) -> None:
    if not isinstance(method, Method):
        raise ConfigError(f"method must be an instance such as ft.methods.FedAvg(lr=0.1), got {method!r}.")
    check_method_class(type(method))
    if not isinstance(fed, Federation):
        raise ConfigError("fed must be an ft.Federation, from ft.load(...) or ft.Federation.from_arrays(...).")
    if not any(map(len, fed.test)):
        raise DataError("No client has test data; hold out some samples of at least one client for testing.")


def check_method_class(kind: type[Method]) -> None:
    """Raise an error if a method's class is not a frozen dataclass itself; its base class always is one."""
    parameters = kind.__dict__.get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        fix = "write @dataclass(frozen=True) above the class"
        raise ConfigError(f"The method {kind.__name__} is not a frozen dataclass; {fix}.")


def describe_method(method: Method) -> dict[str, Any]:
    """Return a method's name and fields; a field that is itself a method becomes a nested dict of the same form.

    The name is the registry key of a built-in method, and otherwise a reference, such as my_module:MyMethod.
    """
    values = {f.name: getattr(method, f.name) for f in fields(method)}
    plain = {name: describe_method(value) if isinstance(value, Method) else value for name, value in values.items()}
    kind = type(method)
    return {"name": kind.__name__.lower() if is_built_in(kind) else reference_to(kind)} | plain
