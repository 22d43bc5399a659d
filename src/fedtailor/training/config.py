"""The settings of a run, except those of method, network, and data."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from fedtailor.errors import ConfigError
from fedtailor.training.channel.channel import Channel
from fedtailor.training.participation import Participation
from fedtailor.training.unreliable import Unreliable

_MAX_ROUNDS = 10**6  # papers use a few thousand, and every round keeps a record in memory


@dataclass(frozen=True)
class TrainingConfig:
    """The settings of a run. Command-line flags and TOML keys have the names of these fields.

    The comment beside a field is its help text on the command line.
    """

    rounds: int | None = None  # number of rounds; none: the length of the schedule, or 20
    batch_size: int = 64  # samples per batch; a client with fewer samples uses all of them
    participation: Participation = 1.0  # fraction of clients per round, or a range such as 0.6,1.0
    engine: str = "auto"  # how clients are trained: auto (the fastest), vectorized, pool, or sequential
    chunk_size: int | None = None  # maximum clients at once in the vectorized engine; none: chosen for the device
    device: str = "auto"  # auto (a GPU if available), cpu, or cuda
    dtype: Literal["float32", "float64"] = "float32"  # precision of training: float32 or float64
    seed: int = 0  # seed of all random numbers
    schedule: list[list[int]] | None = None  # the clients of every round, as a list of lists
    validation: float = 0.0  # fraction of training data held out for choosing a round or settings
    evaluate_every: int = 1  # rounds between evaluations; the last round is always evaluated
    evaluate: int | Literal["all", "participants"] = "all"  # clients to evaluate: all, participants, or a number
    checkpoint_every: int | None = None  # rounds between checkpoints; none: so that they take less than 5 % of the time
    max_failures: float = 0.5  # fraction of a round's clients that may fail before the run stops
    unreliable: Unreliable = field(default_factory=Unreliable)  # clients that are unavailable, late, or drop out
    channel: Channel = field(default_factory=Channel)  # how uploads are clipped, noised, sparsified, and quantized

    def __post_init__(self) -> None:
        for name in ("rounds", "batch_size", "chunk_size", "seed", "evaluate_every", "checkpoint_every"):
            value = getattr(self, name)
            if not isinstance(value, int) and not (
                name in ("rounds", "chunk_size", "checkpoint_every") and value is None
            ):
                raise ConfigError(f"{name} must be an integer, got {value!r}.")
        checks = [
            ("rounds", self.rounds is None or self.rounds <= _MAX_ROUNDS, f"at most {_MAX_ROUNDS}"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("chunk_size", self.chunk_size is None or self.chunk_size >= 1, "at least 1"),
            ("seed", 0 <= self.seed < 2**32, "an integer from 0 to 2³² − 1"),
            ("validation", 0 <= self.validation < 1, "a fraction from 0 to below 1"),
            ("evaluate_every", self.evaluate_every >= 1, "at least 1"),
            ("checkpoint_every", self.checkpoint_every is None or self.checkpoint_every >= 1, "at least 1"),
            ("max_failures", 0 <= self.max_failures <= 1, "a fraction from 0 to 1"),
            (
                "evaluate",
                self.evaluate in ("all", "participants") or (isinstance(self.evaluate, int) and self.evaluate >= 1),
                "'all', 'participants', or a number of clients",
            ),
        ]
        for name, is_valid, requirement in checks:
            if not is_valid:
                raise ConfigError(f"{name} must be {requirement}, got {getattr(self, name)!r}.")

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
