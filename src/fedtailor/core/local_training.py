"""`LocalTraining`: the base of methods whose clients train with an optimizer, and its settings."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.method import Method
from fedtailor.core.training_settings import RateSettings, TrainingSettings
from fedtailor.core.trees import Tree
from fedtailor.errors import ConfigError


@dataclass(frozen=True)
class ScheduledMethod(RateSettings, Method):
    """A method whose learning rates may change over rounds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        unused = set() if self.lr_schedule == "step" else {"lr_step_rounds", "lr_step_factor"}
        for name in sorted(self._changed() & unused):
            fix = f"set lr_schedule to step, or remove {name}"
            raise ConfigError(f"{type(self).__name__}: {name} applies to the schedule step; {fix}.")

    def _changed(self) -> set[str]:
        """Return the fields whose values are not the defaults of this class."""
        return {f.name for f in fields(self) if getattr(self, f.name) != f.default}

    def scheduled(self, ctx: ClientContext, lr: float) -> float:
        """Return a learning rate as it is in the round of `ctx`.

        >>> import fedtailor as ft
        >>> ft.LocalTraining(warmup_rounds=1).scheduled(ft.example_client()[0], 0.1)
        0.05
        """
        return lr * self.rate_schedule.factor(ctx.round, ctx.rounds)


@dataclass(frozen=True)
class LocalTraining(TrainingSettings, ScheduledMethod):
    """A method whose clients train with an optimizer: `ctx.optimize(objective, start, **self.optimizer_options)`.

    >>> import fedtailor as ft
    >>> ft.methods.FedAvg(optimizer="adam", lr=0.001, steps=100, lr_schedule="cosine").betas
    (0.9, 0.999)
    """

    keeps_optimizer: ClassVar[bool] = False  # whether `train` uses `self.optimize`, which can keep the optimizer state

    def __post_init__(self) -> None:
        super().__post_init__()
        default = {f.name: f.default for f in fields(LocalTraining)}
        changed = {name for name, value in default.items() if getattr(self, name) != value}
        title, is_sgd = self.class_title(), self.optimizer == "sgd"
        for name in sorted(changed & self.fixed_settings.keys()):
            raise ConfigError(f"{title}: {self.fixed_settings[name]}; remove {name}.")
        unused = {"betas", "eps"} if is_sgd else {"momentum", "nesterov"}
        for name in sorted(changed & self._changed() & unused):  # FedPAC's default has momentum, which Adam ignores
            other = "adam or adamw" if is_sgd else f"sgd; with {self.optimizer}, set betas"
            raise ConfigError(f"{type(self).__name__}: {name} applies to the optimizer {other}.")
        self.require(bool(self.momentum) or not self.nesterov, "nesterov", "false if momentum is 0")
        if self.keep_optimizer_state and not self.keeps_optimizer:
            fix = "train with `self.optimize` and set keeps_optimizer, or remove keep_optimizer_state"
            raise ConfigError(f"{title}: `train` starts a new optimizer in each round (`ctx.optimize`); {fix}.")

    def init_optimizer(self, params: Tree, key: str = "optimizer") -> Tree:
        """Return what `init_client` adds to the client state for `self.optimize`, given what a client trains.

        >>> LocalTraining().init_optimizer({})
        {}
        """
        state = self.make_optimizer().init(params) if self.keep_optimizer_state else {}
        return {key: state} if state else {}

    def optimize(
        self,
        ctx: ClientContext,
        objective: Callable[[Tree, Batch], Tensor],
        start: Tree,
        state: Tree,
        *,
        key: str = "optimizer",
        lr: float | None = None,
        epochs: int | None = None,
    ) -> tuple[Tree, Tree]:
        """Minimize the objective and return (parameters, what to add to the new client state).

        The second part is empty unless `keep_optimizer_state` is true. A method that uses this sets `keeps_optimizer`,
        and its `init_client` adds `self.init_optimizer(...)`. A client that trains several models or parts in a round
        has one optimizer for each, with a `key` of its own; `lr` and `epochs` then replace the settings for one part.

        >>> import fedtailor as ft
        >>> (ctx, params), method = ft.example_client(), ft.methods.Local(momentum=0.9, keep_optimizer_state=True)
        >>> _, kept = method.optimize(ctx, ctx.loss, params, method.init_optimizer(params))
        >>> sorted(kept["optimizer"])
        ['velocity']
        """
        optimizer = self.make_optimizer(self.scheduled(ctx, self.lr if lr is None else lr))
        duration = self.duration if epochs is None else self.duration | {"epochs": epochs, "steps": None}
        before = state[key] if key in state else optimizer.init(start)
        params, after = ctx.run_optimizer(optimizer, objective, start, before, **duration)
        return params, {key: after} if key in state else {}


def training_settings(method: Method) -> dict[str, Any]:
    """Return the settings of local training that a method has, for another method that is to train like it.

    >>> import fedtailor as ft
    >>> training_settings(ft.methods.SelfFL(lr=0.05))["lr"]
    0.05
    """
    names = {f.name for f in fields(LocalTraining)} & {f.name for f in fields(method)}
    if not isinstance(method, LocalTraining):
        names.discard("steps")  # has another meaning there
    elif method.optimizer != "sgd":
        names -= {"momentum", "nesterov"}  # defaults of a method, which its optimizer does not use
    return {name: value for name in sorted(names) if (value := getattr(method, name)) is not None}
