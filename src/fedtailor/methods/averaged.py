"""Averaged: a wrapper that gives each client the running mean of the personal models that it has trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import ClientWeights
from fedtailor.core.fields import FractionBelow1
from fedtailor.core.method import Exchange, Method, Setup
from fedtailor.core.model import Inputs, Model
from fedtailor.core.training_settings import SETTINGS_OF_INNER
from fedtailor.core.trees import Rows, Tree, select, zeros_like
from fedtailor.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Averaged(Method):
    """Averaged personal models: a running mean of the models that a client has trained, around any method.

    Wraps another method, as in Averaged(FedLAG()). Training and communication are those of the inner method, but each
    client uses the mean of the personal models that it had after each of its rounds. The past has the weight
    min(n / (n + 1), memory) after n rounds of the client: a plain mean at first, then an exponential moving average.
    The statistics of batch normalization are recomputed for the mean on the client's data. A client that has not
    trained uses the inner method's model. With memory 0, the method is the inner method.
    """

    fixed_settings: ClassVar[Mapping[str, str]] = SETTINGS_OF_INNER
    personal: ClassVar[bool] = True
    download: ClassVar[str] = "as the inner method"
    upload: ClassVar[str] = "as the inner method"
    client_state: ClassVar[str] = "state of the inner method, mean model, 1 scalar"
    newcomer_start: ClassVar[str] = "the personal model of the inner method"

    inner: Annotated[Method, "the method to wrap"] = field(default_factory=FedAvg)
    memory: Annotated[FractionBelow1, "maximum weight of the past in the mean; 0: the inner method"] = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(isinstance(self.inner, Method), "inner", "a method such as FedLAG()")

    @property
    def has_global_model(self) -> bool:
        return self.inner.has_global_model

    @property
    def trains_every_round(self) -> bool:
        return self.inner.trains_every_round

    @property
    def pools_data(self) -> bool:
        return self.inner.pools_data

    @property
    def sequential_clients(self) -> bool:
        return self.inner.sequential_clients

    @property
    def mean_weights(self) -> ClientWeights | None:
        return self.inner.mean_weights

    @property
    def robust_kinds(self) -> tuple[str, ...]:
        return self.inner.robust_kinds

    def init_server(self, setup: Setup) -> Tree:
        return self.inner.init_server(setup)

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return self.inner.send(server, clients, round)

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return self.inner.receive(server, exchange)

    def serve(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return self.inner.serve(server, clients, round)

    def init_client(self, setup: Setup) -> Tree:
        return self._with_mean(self.inner.init_client(setup), setup)

    def init_personal(self, setup: Setup) -> Tree:
        return self.inner.init_personal(setup)

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        inner, upload = self.inner.train(ctx, state["inner"], message)
        count = state["count"]
        past = (count / (count + 1)).clamp(max=self.memory)
        personal = self.inner.trained(ctx, inner, message, upload)
        mean = ctx.update_batch_stats(_blend(past, state["mean"], personal), partial(self._loss, ctx))
        return {"inner": inner, "mean": mean, "count": count + 1}, upload

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        personal = self.inner.personalize(ctx, state["inner"], message)
        return select(state["count"] > 0, state["mean"], personal) if self.memory else personal

    def trained(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        return {**state["mean"]} if self.memory else self.inner.trained(ctx, state["inner"], message, upload)

    def logits(self, model: Model, personal: Tree, x: Inputs) -> Tensor:
        return self.inner.logits(model, personal, x)

    def grow_server(self, server: Tree, setup: Setup, before: int) -> Tree:
        return self.inner.grow_server(server, setup, before)

    def grow_client(self, state: Tree, setup: Setup) -> Tree:
        return super().grow_client(state | {"inner": self.inner.grow_client(state["inner"], setup)}, setup)

    def init_newcomer(self, setup: Setup, message: Tree) -> Tree:
        return self._with_mean(self.inner.init_newcomer(setup, message), setup)

    def server_metrics(self, before: Tree, after: Tree, exchange: Exchange) -> Tree:
        return self.inner.server_metrics(before, after, exchange)

    def client_metrics(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        return self.inner.client_metrics(ctx, state["inner"], message, upload)

    @property
    def has_evaluation_metrics(self) -> bool:
        return self.inner.has_evaluation_metrics

    def evaluation_metrics(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return self.inner.evaluation_metrics(ctx, state["inner"], message)

    def reduce_metrics(self, totals: Tree) -> Tree:
        return self.inner.reduce_metrics(totals)

    def _with_mean(self, inner: Tree, setup: Setup) -> Tree:
        return {"inner": inner, "mean": zeros_like(self.init_personal(setup)), "count": setup.like.new_zeros(())}

    def _loss(self, ctx: ClientContext, personal: Tree, batch: Batch) -> Tensor:
        outputs = self.inner.logits(ctx.model, personal, batch.x)
        return batch.mean(ctx.model.losses(outputs, batch.y, batch.weight))


def _blend(past: Tensor, old: Any, new: Any) -> Any:
    """Return past · old + (1 − past) · new, tensor by tensor; a row that only one of both has is taken from there."""
    if isinstance(new, dict):
        return {name: _blend(past, old[name], node) for name, node in new.items()}
    if not isinstance(new, Rows):
        return past * old + (1 - past) * new
    both, shape = old.present & new.present, (-1, *[1] * (new.values.ndim - 1))
    mixed = torch.where(both.reshape(shape), _blend(past, old.values, new.values), new.values)
    return Rows(torch.where(new.present.reshape(shape), mixed, old.values), old.present | new.present)
