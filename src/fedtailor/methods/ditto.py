"""Ditto: each client trains a personal model with a proximal term toward the global model."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedtailor.core.client_context import ClientContext
from fedtailor.core.fields import NonNegative
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.trees import Tree, mean, squared_distance


@dataclass(frozen=True)
class Ditto(LocalTraining):
    """Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.

    Each client trains the received global model θ, which it uploads, and a separate personal model v with the proximal
    term λ/2 ‖v − θ‖².
    """

    lam: Annotated[NonNegative, "λ, weight of the proximal term of the personal model"] = 1.0
    sends_global_model: ClassVar[bool] = True
    client_state: ClassVar[str] = "personal model"
    newcomer_start: ClassVar[str] = "the global model as its personal model"

    def init_client(self, setup: Setup) -> Tree:
        return {"own": setup.params}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = ctx.optimize(ctx.loss, message["params"], **self.optimizer_options)
        own = ctx.optimize(
            lambda v, batch: ctx.loss(v, batch) + self.lam / 2 * squared_distance(v, message["params"]),
            state["own"],
            **self.optimizer_options,
        )
        return {"own": own}, {"params": params}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes)

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return {**state["own"]}
