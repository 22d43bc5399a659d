"""Settings of local training: the optimizer, its duration, and the schedule of its learning rate."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from fedtailor.core.fields import (
    Constraint,
    FractionAbove0,
    FractionBelow1,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
)
from fedtailor.core.optimizers import Optimizer, OptimizerName, Schedule, ScheduleName

_UPDATE = ("momentum", "nesterov", "betas", "eps", "weight_decay", "clip_norm")  # fields of `Optimizer`, besides lr
_OPTIMIZER_SETTINGS = ("optimizer", *_UPDATE, "keep_optimizer_state")
# `fixed_settings` of a method that wraps another one
SETTINGS_OF_INNER = dict.fromkeys(_OPTIMIZER_SETTINGS, "its inner method trains, so this is a setting of `inner`")
_Betas = Annotated[
    tuple[float, float],
    Constraint(
        "a tuple of two numbers, at least 0 and below 1", lambda pair: _is_pair(pair) and all(0 <= b < 1 for b in pair)
    ),
]


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, int | float) for part in value)


@dataclass(frozen=True)
class RateSettings:
    """A learning rate and its schedule over rounds."""

    lr: Annotated[Positive, "η, local learning rate"] = 0.1
    lr_schedule: Annotated[ScheduleName, "learning rate over rounds: constant, step, or cosine"] = field(
        default="constant", kw_only=True
    )
    lr_step_rounds: Annotated[PositiveInt, "rounds between steps, if lr_schedule is step"] = field(
        default=10, kw_only=True
    )
    lr_step_factor: Annotated[FractionAbove0, "factor of the learning rate at each step"] = field(
        default=0.1, kw_only=True
    )
    warmup_rounds: Annotated[NonNegativeInt, "first rounds, in which the learning rate rises to lr"] = field(
        default=0, kw_only=True
    )

    @property
    def rate_schedule(self) -> Schedule:
        """The learning-rate schedule, for `ctx.optimize`."""
        return Schedule(self.lr_schedule, self.lr_step_rounds, self.lr_step_factor, self.warmup_rounds)


@dataclass(frozen=True)
class TrainingSettings(RateSettings):
    """The optimizer of local training, and how long it trains per round."""

    epochs: Annotated[PositiveInt, "E, local epochs"] = 2
    steps: Annotated[PositiveInt | None, "local steps per round instead of epochs; none: epochs"] = field(
        default=None, kw_only=True
    )
    drop_last: Annotated[bool, "drop the last batch of an epoch if it is incomplete"] = field(
        default=False, kw_only=True
    )
    optimizer: Annotated[OptimizerName, "optimizer of local training: sgd, adam, or adamw"] = field(
        default="sgd", kw_only=True
    )
    momentum: Annotated[FractionBelow1, "momentum of local SGD"] = 0.0
    nesterov: Annotated[bool, "Nesterov momentum of local SGD"] = field(default=False, kw_only=True)
    betas: Annotated[_Betas, "β₁ and β₂ of Adam and AdamW"] = field(default=(0.9, 0.999), kw_only=True)
    eps: Annotated[Positive, "ε of Adam and AdamW"] = field(default=1e-8, kw_only=True)
    weight_decay: Annotated[NonNegative, "weight decay of local training"] = 0.0
    clip_norm: Annotated[Positive | None, "maximum norm of the local gradient; none: unbounded"] = field(
        default=None, kw_only=True
    )
    keep_optimizer_state: Annotated[bool, "keep the optimizer state of a client across rounds; false: reset it"] = (
        field(default=False, kw_only=True)
    )

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """The settings of local training, as keyword arguments for `ctx.optimize`."""
        options = {name: getattr(self, name) for name in ("lr", "optimizer", *_UPDATE)}
        return options | self.duration | {"schedule": self.rate_schedule}

    @property
    def duration(self) -> dict[str, Any]:
        """How long a client trains per round: epochs or steps, as keyword arguments for `ctx.scan`."""
        epochs = self.epochs if self.steps is None else None
        return {"epochs": epochs, "steps": self.steps, "drop_last": self.drop_last}

    def make_optimizer(self, lr: float | None = None) -> Optimizer:
        """Return the optimizer, with another learning rate if one is given.

        >>> TrainingSettings(lr=0.2, momentum=0.9).make_optimizer(lr=0.1).momentum
        0.9
        """
        rate = self.lr if lr is None else lr
        return Optimizer(rate, self.optimizer, **{name: getattr(self, name) for name in _UPDATE})


def plain_sgd(reason: str, *own: str) -> dict[str, str]:
    """Return the `Method.fixed_settings` of a method whose clients train with plain SGD, besides settings of its own.

    >>> plain_sgd("its control variates assume plain SGD")["momentum"]
    'its control variates assume plain SGD'
    """
    reasons = dict.fromkeys(_OPTIMIZER_SETTINGS, reason)
    reasons["keep_optimizer_state"] = f"{reason}, so its clients have no optimizer state"
    return {name: text for name, text in reasons.items() if name not in own}
