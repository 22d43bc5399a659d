"""The settings of a run, except those of method, network, and data."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch

from fedtailor.core.augmentation import Augmentation
from fedtailor.core.fields import Constraint, Fraction, FractionBelow1, PositiveInt, check_fields
from fedtailor.core.method import Method
from fedtailor.core.metrics import METRICS, TARGETS
from fedtailor.core.precision import Precision
from fedtailor.core.robust import Robust
from fedtailor.errors import ConfigError
from fedtailor.training.attacks import ATTACKS, Attack
from fedtailor.training.channel.channel import Channel
from fedtailor.training.participation import Participation
from fedtailor.training.unreliable import Unreliable

_METRIC_NAMES = "; ".join(f"for {TARGETS[task]}: {', '.join(metrics)}" for task, metrics in METRICS.items())
HeldOut = int | float | list[int] | None  # number of clients, fraction of clients, or the clients themselves
_MAX_ROUNDS = 10**6  # papers use a few thousand, and every round keeps a record in memory
_Rounds = Annotated[PositiveInt, Constraint(f"at most {_MAX_ROUNDS}", lambda value: value <= _MAX_ROUNDS)]
_Seed = Annotated[int, Constraint("from 0 to 2³² − 1", lambda value: 0 <= value < 2**32)]
_DifferentNames = Constraint("one or several different names", lambda n: n is None or 0 < len(n) == len(set(n)))


@dataclass(frozen=True)
class TrainingConfig:
    """The settings of a run. Command-line flags and TOML keys have the names of these fields."""

    rounds: Annotated[_Rounds | None, "number of rounds; none: the length of the schedule, or 20"] = None
    batch_size: Annotated[PositiveInt, "samples per batch; a client with fewer samples uses all of them"] = 64
    participation: Annotated[Participation, "fraction of clients per round, or a range such as 0.6,1.0"] = 1.0
    engine: Annotated[
        str, "how clients are trained: auto (the fastest of the next three), vectorized, pool, sequential, or ray"
    ] = "auto"
    chunk_size: Annotated[
        PositiveInt | None, "maximum clients at once in the vectorized engine; none: chosen for the device"
    ] = None
    actors: Annotated[
        PositiveInt | None, "processes of the engine ray that share the clients; none: one per GPU, or else per machine"
    ] = None
    actor_engine: Annotated[
        Literal["vectorized", "pool", "sequential"] | None,
        "how each actor of the engine ray trains its clients; none: the fastest",
    ] = None
    ray_address: Annotated[
        str | None, "address of a Ray cluster for the engine ray; none: RAY_ADDRESS, or a cluster on this machine"
    ] = None
    device: Annotated[str, "auto (an NVIDIA GPU if available), cpu, cuda, or mps"] = "auto"
    dtype: Annotated[Literal["float32", "float64"], "of weights, states, and uploads: float32 or float64"] = "float32"
    precision: Annotated[
        Precision, "of products in training: float32, tf32, or bf16 (bfloat16); weights, losses, and sums stay float32"
    ] = "float32"
    seed: Annotated[_Seed, "seed of all random numbers"] = 0
    schedule: Annotated[list[list[int]] | None, "the clients of every round, as a list of lists"] = None
    class_weights: Annotated[
        Literal["balanced"] | list[float] | None,
        Constraint("'balanced' or one number per class", lambda w: not isinstance(w, str) or w == "balanced"),
        "weights of the classes in the loss: balanced (all classes count the same), or one number per class",
    ] = None
    validation: Annotated[FractionBelow1, "fraction of training data held out for choosing a round or settings"] = 0.0
    patience: Annotated[
        PositiveInt | None, "evaluations without a better validation score after which the run stops; none: all rounds"
    ] = None
    held_out_clients: Annotated[
        HeldOut, "clients that never train and are evaluated as newcomers: a number, a fraction, or a list"
    ] = None
    evaluate_every: Annotated[PositiveInt, "rounds between evaluations; the last round is always evaluated"] = 1
    evaluate: Annotated[
        Literal["all", "participants"] | PositiveInt, "clients to evaluate: all, participants, or a number"
    ] = "all"
    metrics: Annotated[
        list[str] | None,
        _DifferentNames,
        f"metrics, the first one ranks: {_METRIC_NAMES}; none: the model's own",
    ] = None
    evaluate_train: Annotated[bool, "also evaluate personal models on their clients' training samples"] = False
    evaluate_global: Annotated[bool, "also evaluate the global model, of a method that has one"] = False
    measure_drift: Annotated[bool, "record how far the models of a round's clients are from each other"] = False
    checkpoint_every: Annotated[
        PositiveInt | None, "rounds between checkpoints; none: so that they take less than 5 % of the time"
    ] = None
    max_failures: Annotated[Fraction, "fraction of a round's clients that may fail before the run stops"] = 0.5
    augmentation: Annotated[Augmentation, "how training images are flipped, cropped, and cut out at random"] = field(
        default_factory=Augmentation
    )
    unreliable: Annotated[Unreliable, "clients that are unavailable, late, or drop out"] = field(
        default_factory=Unreliable
    )
    channel: Annotated[Channel, "how uploads are clipped, noised, sparsified, and quantized"] = field(
        default_factory=Channel
    )
    attack: Annotated[Attack | None, f"what malicious clients of a simulation do: {', '.join(ATTACKS)}"] = None
    robust: Annotated[Robust, "how the server protects itself from uploads that spoil the model"] = field(
        default_factory=Robust
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.precision != "float32" and self.dtype != "float32":
            raise ConfigError(f"precision '{self.precision}' needs dtype float32; remove one of the two.")
        if self.channel.trusted and self.robust.is_on:
            raise ConfigError("With channel.trusted, only the plain mean is private; set robust.kind to 'none'.")
        self._check_actors()
        if self.patience is not None and not self.validation:
            raise ConfigError("patience needs validation data; set validation to a fraction such as 0.2.")
        if self.patience is not None and self.evaluate == "participants":
            raise ConfigError("patience compares scores of the same clients; set evaluate to 'all' or to a number.")

    def check_method(self, method: Method) -> None:
        """Raise `ConfigError` if the channel or the robust aggregation cannot be used with a method."""
        self.channel.check(method)
        method.check_robust(self.robust)

    def _check_actors(self) -> None:
        """Raise `ConfigError` if settings of the engine 'ray' are given for another engine."""
        given = {"actors": self.actors, "actor_engine": self.actor_engine, "ray_address": self.ray_address}
        for name, value in given.items():
            if value is not None and self.engine != "ray":
                raise ConfigError(f"{name} applies only to the engine 'ray', not to '{self.engine}'; omit it.")
        if self.engine == "ray" and self.attack is not None:
            raise ConfigError("An attack needs all uploads in one process; use another engine than 'ray'.")
        if self.engine == "ray" and self.chunk_size is not None and self.actor_engine != "vectorized":
            raise ConfigError("chunk_size applies only to vectorized clients; set actor_engine to 'vectorized' too.")

    @property
    def num_rounds(self) -> int:
        """The number of rounds."""
        return len(self.schedule) if self.schedule is not None else 20 if self.rounds is None else self.rounds

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def torch_device(self) -> torch.device:
        """The device; raises `ConfigError` if tensors cannot be created on it."""
        name = self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
            float(torch.zeros(1, device=device))  # fails on "meta", whose tensors have no values
        except (RuntimeError, AssertionError, ImportError) as error:
            raise ConfigError(f"The device '{name}' is not available; use 'auto' or 'cpu'.") from error
        return device
