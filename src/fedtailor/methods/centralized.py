"""Centralized training: the reference without federation, on the pooled training data of all clients."""

from dataclasses import dataclass, replace
from typing import ClassVar

from fedtailor.core.client_context import ClientContext
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.trees import Tree, mean


@dataclass(frozen=True)
class Centralized(LocalTraining):
    """Centralized training: one model is trained on the pooled training data of all clients, a reference for the cost
    of not sharing data.

    Every round passes over the data of all clients, whatever the participation of the other methods; with `steps`, a
    round has as many steps as all clients together. It is not a federated method: clients would have to send their
    data, and no bytes of models are counted.
    """

    title: ClassVar[str] = "Centralized training"
    personal: ClassVar[bool] = False
    download: ClassVar[str] = "nothing"
    upload: ClassVar[str] = "its data, once"
    keeps_optimizer: ClassVar[bool] = True

    @property
    def pools_data(self) -> bool:
        return True

    def init_client(self, setup: Setup) -> Tree:
        return self.init_optimizer(setup.params)

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        pooled = self if self.steps is None else replace(self, steps=self.steps * ctx.num_clients)
        params, new = pooled.optimize(ctx, ctx.loss, message["params"], state)
        return state | new, {"params": params}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received)  # of the one participant, which has all data
