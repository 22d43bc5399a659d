"""Train a method on a federation whose clients are simulated on this machine.

`simulate` is the public function. It calls `train`, which builds a `Trainer` with simulated clients and runs it.
"""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.augmentation import Augmentation
from fedtailor.core.client_models import AnyModel, AnyModelLike, ClientModels, as_any_model
from fedtailor.core.code_reference import describe_code, is_built_in, reference_to
from fedtailor.core.method import Method
from fedtailor.core.precision import Precision
from fedtailor.core.robust import Robust
from fedtailor.core.trees import Params
from fedtailor.data.federation import Federation
from fedtailor.data.federation_data import OWN_DATA
from fedtailor.errors import ConfigError, DataError, unknown_name
from fedtailor.runs.environment import describe_environment
from fedtailor.runs.records import Record, Records
from fedtailor.runs.run import FORMAT, Run
from fedtailor.runs.toml import to_toml
from fedtailor.training.architectures import renumber
from fedtailor.training.attacks import Attack
from fedtailor.training.channel.channel import Channel
from fedtailor.training.config import TrainingConfig
from fedtailor.training.engines import RAY, EngineChoice
from fedtailor.training.fingerprint import fingerprint
from fedtailor.training.grouped_clients import AnyClients
from fedtailor.training.held_out import split_clients
from fedtailor.training.interactive import OnRoundEnd, run_interactively
from fedtailor.training.participation import Participation, make_schedule
from fedtailor.training.recovery import released_clients, train_with_recovery
from fedtailor.training.server import Server
from fedtailor.training.simulation import build_simulation, personal_model, simulation_info
from fedtailor.training.trainer import Trainer
from fedtailor.training.unreliable import Unreliable
from fedtailor.version import VERSION

_PARTS = (Augmentation, Unreliable, Channel, Robust)  # settings with fields of their own


def simulate(
    method: Method,
    model: AnyModelLike,
    fed: Federation,
    *,
    rounds: int | None = None,
    batch_size: int = 64,
    participation: Participation = 1.0,
    engine: str = "auto",
    chunk_size: int | None = None,
    actors: int | None = None,
    actor_engine: str | None = None,
    ray_address: str | None = None,
    device: str = "auto",
    dtype: torch.dtype | str = torch.float32,
    precision: Precision = "float32",
    seed: int = 0,
    schedule: Sequence[Sequence[int]] | None = None,
    class_weights: str | Sequence[float] | None = None,
    validation: float = 0.0,
    patience: int | None = None,
    held_out_clients: int | float | Sequence[int] | None = None,
    evaluate_every: int = 1,
    evaluate: Any = "all",
    metrics: Sequence[str] | None = None,
    evaluate_train: bool = False,
    evaluate_global: bool = False,
    measure_drift: bool = False,
    augmentation: Augmentation | None = None,
    unreliable: Unreliable | None = None,
    channel: Channel | None = None,
    robust: Robust | None = None,
    attack: Attack | None = None,
    max_failures: float = 0.5,
    on_round_end: Callable[[Record], None] | None = None,
    folder: str | Path | None = None,
    checkpoint_every: int | None = None,
    initial_weights: Mapping[str, Tensor] | None = None,
    progress: bool = False,
) -> Run:
    """Train a method on a federation whose clients are simulated on this machine.

    Ctrl-C finishes the round and raises `ft.Interrupted`, whose attribute `run` contains all finished rounds. In a
    notebook or at a Python prompt, this partial run is returned instead. A second Ctrl-C stops immediately.

    Args:
        method: The method, such as `ft.methods.FedAvg(lr=0.1)`.
        model: A network from `ft.network` or `ft.wrap`, an `nn.Module` with a layer `head`, or a class or function that
            builds one. A module starts with its own weights; the weights of all others are drawn from the seed.
            `ft.client_models` gives clients different networks.
        fed: The clients and their data.
        rounds: Number of rounds. The default is the length of `schedule`, or 20.
        batch_size: Samples per batch. A client with fewer samples uses all of them.
        participation: Fraction of clients per round, or a range `(low, high)` from which each round draws a fraction.
        engine: How clients are trained: "vectorized" (many clients at once), "pool" (several processes),
            "sequential", "auto" (the fastest of these for this run), or "ray" (clients are distributed over actors,
            which are processes on this machine or on others; see docs/cluster.md).
        chunk_size: Maximum number of clients that the vectorized engine trains at once (per core on a CPU).
        actors: Number of actors of the engine "ray". The default is one per GPU, or one per machine without GPUs.
        actor_engine: How each actor trains its clients: "vectorized", "pool", or "sequential". The default is the
            fastest of these.
        ray_address: Address of a Ray cluster. The default is RAY_ADDRESS, or a cluster on this machine.
        device: "cpu", "cuda", "mps" (Apple's GPUs, untested), or "auto" (an NVIDIA GPU if available).
        dtype: `torch.float32` or `torch.float64`, or their names "float32" and "float64".
        precision: Precision of forward and backward passes: "float32", "tf32", or "bf16" (bfloat16). Weights, states,
            uploads, losses, and sums stay float32, and models are evaluated in float32.
        seed: Seed of all random numbers.
        schedule: The clients of every round, instead of `rounds` and `participation`.
        class_weights: Weights of the classes in the loss: one number per class, or "balanced", so that all classes
            have the same total weight in the training data of all clients.
        validation: Fraction of each client's training samples to hold out for selecting a round or settings.
        patience: Stop when the validation score, at the moment that ranks the method, has not improved for this many
            evaluations. It needs `validation`.
        held_out_clients: Clients that never train with the others: a number of clients, a fraction, or a list of
            clients. At every evaluation, they are evaluated as clients that join then.
        evaluate_every: Rounds between evaluations. The last round is always evaluated.
        evaluate: Clients to evaluate: "all", "participants", or a number of clients.
        metrics: Names of metrics that fit the targets, such as ["accuracy", "average_precision"] for classes, or of
            metrics passed to `ft.wrap`; the first one ranks. The default for classes is accuracy, macro F1, and AUC.
        evaluate_train: Also evaluate personal models on their clients' training samples.
        evaluate_global: Also evaluate the global model of a method that has one, such as Ditto, on all clients' test
            samples.
        measure_drift: Record how far the clients' trained models are from their mean and from what they received.
        augmentation: How training images are flipped, cropped, and cut out at random.
        unreliable: How often clients are unavailable, late, or drop out.
        channel: How uploads are clipped, noised, sparsified, and quantized.
        robust: How the server protects itself from uploads that spoil the model.
        attack: Which clients are malicious, and what they upload: one of `ft.attacks`.
        max_failures: Fraction of a round's clients that may fail before the run stops.
        on_round_end: Function that is called with the record of every round.
        folder: New folder in which the run is saved. `ft.resume(folder)` continues the run after an interruption.
        checkpoint_every: Rounds between checkpoints. By default, chosen so that they take less than 5 % of the time.
        initial_weights: A `state_dict` to start from.
        progress: Show a bar in a terminal or a notebook, or a line every few seconds if stderr is redirected.

    >>> import fedtailor as ft
    >>> fed = ft.load("digits", clients=4)
    >>> len(ft.simulate(ft.methods.FedAvg(), ft.network("logistic", fed), fed, rounds=2).records)
    2
    """
    config = make_config(
        rounds=rounds,
        batch_size=batch_size,
        participation=participation,
        engine=engine,
        chunk_size=chunk_size,
        actors=actors,
        actor_engine=actor_engine,
        ray_address=ray_address,
        device=device,
        dtype=dtype,
        precision=precision,
        seed=seed,
        schedule=schedule,
        class_weights=class_weights,
        validation=validation,
        patience=patience,
        held_out_clients=held_out_clients,
        evaluate_every=evaluate_every,
        evaluate=evaluate,
        metrics=metrics,
        evaluate_train=evaluate_train,
        evaluate_global=evaluate_global,
        measure_drift=measure_drift,
        checkpoint_every=checkpoint_every,
        max_failures=max_failures,
        augmentation=augmentation,
        unreliable=unreliable,
        channel=channel,
        robust=robust,
        attack=attack,
    )
    folder = None if folder is None else Path(folder)

    def start(on_round_end: OnRoundEnd | None) -> Run:
        return train(config, method, as_any_model(model), fed, on_round_end, folder, initial_weights)

    label = f"{getattr(method, 'display_name', method)}, seed {config.seed}"
    return run_interactively(start, on_round_end, progress, label, config.num_rounds)


def make_config(**settings: Any) -> TrainingConfig:
    """Return the settings of a run from arguments of `simulate`, such as NumPy integers and torch's dtypes.

    >>> make_config(rounds=3, dtype=torch.float64).dtype
    'float64'
    """
    known = {f.name for f in fields(TrainingConfig)}
    for name in settings:
        if name not in known:
            raise unknown_name("setting of a run", name, known)
    plain = {name: _as_int(value) for name, value in settings.items()}
    if "dtype" in plain:
        plain["dtype"] = str(plain["dtype"]).removeprefix("torch.")
    if "device" in plain:
        plain["device"] = str(plain["device"])
    if "held_out_clients" in plain:
        plain["held_out_clients"] = _as_clients(plain["held_out_clients"])
    if plain.get("metrics") is not None:
        plain["metrics"] = [plain["metrics"]] if isinstance(plain["metrics"], str) else list(plain["metrics"])
    if not isinstance(plain.get("class_weights"), str | None):
        plain["class_weights"] = _as_weights(plain["class_weights"])
    if plain.get("schedule") is not None:
        plain["schedule"] = [_client_list(clients) for clients in plain["schedule"]]
    parts = {"augmentation": Augmentation(), "unreliable": Unreliable(), "channel": Channel(), "robust": Robust()}
    for name, part in parts.items():
        if plain.get(name) is not None and not isinstance(plain[name], type(part)):
            raise ConfigError(f"{name} must be an ft.{type(part).__name__}(...), got {plain[name]!r}.")
    if not isinstance(plain.get("attack"), Attack | None):
        raise ConfigError(f"attack must be one of ft.attacks, such as ft.attacks.Scaled(), got {plain['attack']!r}.")
    return TrainingConfig(**plain | {name: plain.get(name) or part for name, part in parts.items()})


def train(
    config: TrainingConfig,
    method: Method,
    model: AnyModel,
    fed: Federation,
    on_round_end: Callable[[Record], None] | None = None,
    folder: Path | None = None,
    initial_weights: Mapping[str, Tensor] | None = None,
    save_models: bool = True,
) -> Run:
    """Train a method like `simulate`, with all settings in one `TrainingConfig`; without `save_models`, the personal
    models are not written to `folder`."""
    if isinstance(model, ClientModels) and initial_weights is not None:
        raise ConfigError("initial_weights are those of one network; load them into the modules of ft.client_models.")
    trainer, weights = make_trainer(config, method, model, fed, initial_weights, folder=folder)
    with released_clients(trainer):
        if folder is None:
            return train_with_recovery(trainer, on_round_end=on_round_end)
        from fedtailor.runs.writer import create_run  # requires safetensors, which a run in memory does not need

        with create_run(folder, config.checkpoint_every, trainer.run, weights) as writer:
            run = train_with_recovery(trainer, writer, on_round_end)
            writer.finish(run, None if save_models else [])
        return run


def make_trainer(
    config: TrainingConfig,
    method: Method,
    model: AnyModel,
    fed: Federation,
    initial_weights: Mapping[str, Tensor] | None = None,
    engine_choice: EngineChoice | None = None,
    folder: Path | None = None,
) -> tuple[Trainer[Any], Params]:
    """Return the trainer of a simulation before round 1, and the initial weights as the run folder stores them.

    Its clients are `SimulatedClients`, or `GroupedClients` if they have different architectures.
    """
    _check_types(method, fed)
    config.check_method(method)
    networks = renumber(model, fed.num_clients, config)
    fed, held_out = split_clients(fed, config.held_out_clients, config.seed)
    _check_test_data(fed)
    schedule = make_schedule(
        fed.num_clients, config.rounds, config.participation, config.seed, config.schedule, config.unreliable
    )
    if method.trains_every_round:
        schedule = [list(range(fed.num_clients))] * len(schedule)
    if method.pools_data:
        schedule = [[0]] * len(schedule)  # the first client trains on the data of all clients
    if not method.pools_data and (reason := config.robust.too_few(min(map(len, schedule)))) is not None:
        raise ConfigError(f"Some round has {min(map(len, schedule))} clients, but {reason}.")
    in_actors = config.engine == RAY
    here = replace(config, device="cpu") if in_actors else config  # of this process
    server, local = build_simulation(
        here, method, networks, fed, schedule, initial_weights, None if in_actors else engine_choice, held_out
    )
    info = {"format": FORMAT, "fedtailor": VERSION, **simulation_info(server, local, fed, held_out)}
    info["environment"] = describe_environment(here.torch_device)
    experiment = describe_run(config, method, model, fed)
    if code := describe_code(experiment):
        info["code"] = code
    info["fingerprint"] = fingerprint(describe_method(method), type(method), model, fed, held_out)
    clients: Any = _start_actors(config, server, local, fed, engine_choice) if in_actors else local
    info |= clients.info() if in_actors else {}
    run = Run(
        experiment=experiment,
        info=info,
        records=Records(),
        server=server.state,
        get_client=lambda client: clients.group(client).states.get_one(client),
        get_personal=partial(personal_model, server, clients),
        folder=folder,
    )
    return Trainer(config=config, server=server, clients=clients, run=run), clients.initial_weights()


def _start_actors(
    config: TrainingConfig, server: Server, local: AnyClients, fed: Federation, choice: EngineChoice | None
) -> Any:
    """Return the clients in the actors of the engine 'ray'."""
    from fedtailor.training.ray_clients.start import start_ray_clients  # requires ray

    return start_ray_clients(config, server, local, fed, choice)


def check_fit(config: TrainingConfig, method: Method, model: AnyModel, fed: Federation) -> None:
    """Raise an error if the settings do not fit together, without training."""
    config.check_method(method)
    model = renumber(model, fed.num_clients, config)
    training, held_out = split_clients(fed, config.held_out_clients, config.seed)
    build_simulation(config, method, model, training, [[0]], held_out=held_out)


def describe_run(config: TrainingConfig, method: Method, model: AnyModel, fed: Federation) -> dict[str, Any]:
    """Return all settings of a run by name, as `experiment.toml` stores them."""
    data = dict(fed.settings) or {"name": OWN_DATA}
    parts = {"method": describe_method(method), "network": dict(model.description), "data": data}
    return tomllib.loads(to_toml(describe_config(config) | parts))


def describe_config(config: TrainingConfig) -> dict[str, Any]:
    """Return the settings of a run by name, except those of the method, the network, and the data."""
    settings = {name: getattr(config, name) for name in TrainingConfig.__dataclass_fields__}
    tables = {name: dict(vars(part)) for name, part in settings.items() if isinstance(part, _PARTS)}
    if config.attack is not None:
        tables["attack"] = {"name": config.attack.name, **vars(config.attack)}
    return settings | tables | {"rounds": config.num_rounds}


def _as_weights(weights: Any) -> list[float]:
    try:
        return [float(weight) for weight in weights]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"class_weights must be 'balanced' or one number per class, got {weights!r}.") from error


def _client_list(clients: Any) -> list[Any]:
    if not isinstance(clients, Iterable) or isinstance(clients, str):
        raise ConfigError(f"schedule must list the clients of every round, such as [[0, 1], [2]], got {clients!r}.")
    return list(clients)


def _as_int(value: Any) -> Any:
    """Convert NumPy integers to int; return other values unchanged."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _as_clients(value: Any) -> Any:
    """Convert a sequence of clients to a list of integers, and a number as `_as_int` does."""
    is_sequence = isinstance(value, Iterable) and not isinstance(value, str)
    return [_as_int(client) for client in value] if is_sequence else _as_int(value)


def _check_types(method: Method, fed: Federation) -> None:
    if not isinstance(method, Method):
        raise ConfigError(f"method must be an instance such as ft.methods.FedAvg(lr=0.1), got {method!r}.")
    check_method_class(type(method))
    if not isinstance(fed, Federation):
        raise ConfigError("fed must be an ft.Federation, from ft.load(...) or ft.Federation.from_arrays(...).")


def _check_test_data(fed: Federation) -> None:
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
