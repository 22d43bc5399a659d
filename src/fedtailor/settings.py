"""The settings of a run that belong to no method, no network and no data set."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from fedtailor.channel import Channel
from fedtailor.errors import Refused
from fedtailor.schedule import Participation
from fedtailor.unreliable import Unreliable

_MOST_ROUNDS = 10**6  # papers have some thousands, and every round leaves a record in memory


@dataclass(frozen=True)
class Settings:
    """How a run is done. The command's flags and TOML's keys are these fields."""

    rounds: int | None = None  # 20, or the length of the schedule
    batch_size: int = 64  # larger than a client's data: all of it at once
    participation: Participation = 1.0  # share of clients a round, or a range such as 0.6,1.0
    engine: str = "auto"  # how clients are run: auto (the fastest here), vectorized, pool or sequential
    chunk: int | None = None  # most clients at once in the engine vectorized; none: what suits the device
    device: str = "auto"  # auto (a GPU where there is one), cpu, cuda
    dtype: Literal["float32", "float64"] = "float32"  # of training: float32 or float64
    seed: int = 0  # of everything random
    schedule: list[list[int]] | None = None  # the clients of every round
    validation: float = 0.0  # share of training data held out to choose a round or settings by
    evaluate_every: int = 1  # rounds; the last is always evaluated
    evaluate: int | Literal["all", "participants"] = "all"  # all, participants or a number of clients
    checkpoint_every: int | None = None  # rounds; none: so often that it costs less than a twentieth of the time
    max_failures: float = 0.5  # share of a round's clients that may fail; beyond, the run stops
    unreliable: Unreliable = field(default_factory=Unreliable)  # clients that are away, late or break off
    channel: Channel = field(default_factory=Channel)  # what happens to uploads on their way

    def __post_init__(self) -> None:
        for name in ("rounds", "batch_size", "chunk", "seed", "evaluate_every", "checkpoint_every"):
            value = getattr(self, name)
            if not isinstance(value, int) and not (name in ("rounds", "chunk", "checkpoint_every") and value is None):
                raise Refused(f"{name} must be a whole number, not {value!r}.")
        refusals = [
            (
                self.rounds is None or self.rounds <= _MOST_ROUNDS,
                f"rounds must be at most {_MOST_ROUNDS}, not {self.rounds}.",
            ),
            (self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}."),
            (self.chunk is None or self.chunk >= 1, f"chunk must be at least 1, not {self.chunk}."),
            (0 <= self.seed < 2**32, f"seed must be a whole number from 0 to 2³² − 1, not {self.seed}."),
            (0 <= self.validation < 1, f"validation must be a share from 0 to below 1, not {self.validation}."),
            (self.evaluate_every >= 1, f"evaluate_every must be at least 1, not {self.evaluate_every}."),
            (
                self.checkpoint_every is None or self.checkpoint_every >= 1,
                f"checkpoint_every must be at least 1, not {self.checkpoint_every}.",
            ),
            (0 <= self.max_failures <= 1, f"max_failures must be a share from 0 to 1, not {self.max_failures}."),
            (
                self.evaluate in ("all", "participants") or (isinstance(self.evaluate, int) and self.evaluate >= 1),
                f"evaluate must be 'all', 'participants' or a number of clients, not {self.evaluate!r}.",
            ),
        ]
        for holds, words in refusals:
            if not holds:
                raise Refused(words)

    @property
    def length(self) -> int:
        """How many rounds there are."""
        return len(self.schedule) if self.schedule is not None else 20 if self.rounds is None else self.rounds

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def torch_device(self) -> torch.device:
        """The device, tried out."""
        name = self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
            float(torch.zeros(1, device=device))  # "meta" makes tensors without numbers
        except (RuntimeError, AssertionError, ImportError) as error:
            raise Refused(f"The device '{name}' is not to be had here; take 'auto' or 'cpu'.") from error
        return device
