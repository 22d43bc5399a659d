"""Models that benchmarks/averaged.py compares with the mean of a client's models (docs/methods/averaged.md).

A variant keeps another model beside the mean of `Averaged`. The mean is evaluated at the moment `trained`, and the
other model, after the client's last round, at the moment `received`: one run has the numbers of both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import fedtailor as ft
from fedtailor.core.trees import Tree, map_leaves, select
from fedtailor.methods import GPFL, Averaged, FedAvg, FedPAC


def blend(past: float | Tensor, old: Tree, new: Tree) -> Tree:
    """Return past · old + (1 − past) · new."""
    return map_leaves(lambda a, b: past * a + (1 - past) * b, old, new)


@dataclass(frozen=True)
class Variant(Averaged):
    """The last trained model is the other model. Subclasses replace it."""

    def init_client(self, setup: ft.Setup) -> Tree:
        return super().init_client(setup) | {"other": self.init_personal(setup)}

    def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        new, upload = super().train(ctx, state, message)
        last = self.inner.trained(ctx, new["inner"], message, upload)
        return new | {"other": self.other(ctx, state, message, new["mean"], last)}, upload

    def personalize(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> Tree:
        return select(state["count"] > 0, state["other"], super().personalize(ctx, state, message))

    def other(self, ctx: ft.ClientContext, state: Tree, message: Tree, mean: Tree, last: Tree) -> Tree:
        """Return the other model, given the client state before its round, the new mean, and the last model."""
        return last


@dataclass(frozen=True)
class LayerMemory(Variant):
    """A mean with one memory for the head and another for the other layers."""

    head: float = 0.9
    body: float = 0.9

    def other(self, ctx: ft.ClientContext, state: Tree, message: Tree, mean: Tree, last: Tree) -> Tree:
        past = state["count"] / (state["count"] + 1)
        parts = zip(ctx.model.split(state["other"]), ctx.model.split(last), (self.body, self.head), strict=True)
        body, head = (blend(past.clamp(max=memory), old, new) for old, new, memory in parts)
        return {**body, **head}


@dataclass(frozen=True)
class LossWeighted(Variant):
    """A mean in which a model also has the weight exp(−loss / 0.1). The loss is that on a tenth of the client's data,
    on which it does not train."""

    def init_client(self, setup: ft.Setup) -> Tree:
        return super().init_client(setup) | {"total": setup.like.new_zeros(())}

    def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        check, fit = ctx.split_data(0.1, salt=71)
        new, upload = super().train(fit, state, message)
        weight = (-check.full_loss(check.loss, new["other"]) / 0.1).exp()
        total = self.memory * state["total"] + weight
        return new | {"other": blend(1 - weight / total, state["other"], new["other"]), "total": total}, upload


@dataclass(frozen=True)
class FineTuned(Variant):
    """The mean after one more epoch of training with a tenth of the learning rate."""

    def other(self, ctx: ft.ClientContext, state: Tree, message: Tree, mean: Tree, last: Tree) -> Tree:
        assert isinstance(self.inner, ft.LocalTraining)
        options = self.inner.optimizer_options | {"lr": self.inner.lr / 10, "epochs": 1}
        return {**ctx.optimize(ctx.loss, mean, **options)}


@dataclass(frozen=True)
class ServerMean(FedAvg):
    """FedAvg whose server sends a running mean of the global models too; with `starts_from_mean`, clients train it."""

    server_memory: float = 0.9
    starts_from_mean: bool = False

    def init_server(self, setup: ft.Setup) -> Tree:
        return {"params": setup.params, "mean": setup.params}

    def receive(self, server: Tree, exchange: ft.Exchange) -> Tree:
        params = super().receive(server, exchange)["params"]
        mean = blend(self.server_memory, server["mean"], params)
        return {"params": mean if self.starts_from_mean else params, "mean": mean}


@dataclass(frozen=True)
class TunedServerMean(Variant):
    """The server's mean of global models, trained by the client as it trains the global model."""

    def other(self, ctx: ft.ClientContext, state: Tree, message: Tree, mean: Tree, last: Tree) -> Tree:
        assert isinstance(self.inner, ft.LocalTraining)
        return {**ctx.optimize(ctx.loss, message["mean"], **self.inner.optimizer_options)}


@dataclass(frozen=True)
class MixedWithServer(Variant):
    """The midpoint of the client's mean and the server's mean of global models."""

    def other(self, ctx: ft.ClientContext, state: Tree, message: Tree, mean: Tree, last: Tree) -> Tree:
        return blend(0.5, mean, message["mean"])


TRAINING: dict[str, Any] = {"lr": 0.05, "weight_decay": 1e-3, "epochs": 2}

# Listed before they were run. Two more configurations, means around FedALA and FedPAC, are in the stage "tune".
VARIANTS: dict[str, Callable[[], Variant]] = {
    "mean around GPFL": lambda: Variant(GPFL(**TRAINING)),
    "slow head: memory 0.98, body 0.8": lambda: LayerMemory(FedAvg(**TRAINING), head=0.98, body=0.8),
    "fast head: memory 0.5, body 0.95": lambda: LayerMemory(FedAvg(**TRAINING), head=0.5, body=0.95),
    "weights by validation loss": lambda: LossWeighted(FedAvg(**TRAINING)),
    "fine-tuned mean": lambda: FineTuned(FedAvg(**TRAINING)),
    "fine-tuned mean around FedPAC": lambda: FineTuned(FedPAC(**TRAINING)),
    "fine-tuned server-side mean": lambda: TunedServerMean(ServerMean(**TRAINING)),
    "client's and server's mean": lambda: MixedWithServer(ServerMean(**TRAINING)),
    "training starts from the server-side mean": lambda: Variant(
        ServerMean(**TRAINING, server_memory=0.5, starts_from_mean=True)
    ),
}
