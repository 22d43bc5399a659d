"""Centralized training: the reference without federation, on the pooled training data of all clients."""

from dataclasses import dataclass
from typing import ClassVar

from fedtailor.core.client_context import ClientContext
from fedtailor.core.method import Exchange, LocalTraining
from fedtailor.core.trees import Tree, mean


@dataclass(frozen=True)
class Centralized(LocalTraining):
    """Centralized training: one model is trained on the pooled training data of all clients, a reference for the cost
    of not sharing data.

    Every round passes over the data of all clients, whatever the participation of the other methods. It is not a
    federated method: clients would have to send their data, and no bytes of models are counted.
    """

    title: ClassVar[str] = "Centralized training"
    personal: ClassVar[bool] = False
    download: ClassVar[str] = "nothing"
    upload: ClassVar[str] = "its data, once"

    @property
    def pools_data(self) -> bool:
        return True

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        return state, {"params": ctx.sgd(ctx.loss, message["params"], **self.optimizer_options)}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received)  # of the one participant, which has all data
