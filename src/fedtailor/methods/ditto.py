"""Ditto: each client trains a personal model with a proximal term toward the global model."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import AveragingMethod, ClientWeights
from fedtailor.core.fields import NonNegative
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Setup
from fedtailor.core.trees import Tree, squared_distance


@dataclass(frozen=True)
class Ditto(AveragingMethod, LocalTraining):
    """Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.

    Each client trains the received global model θ, which it uploads, and a separate personal model v with the proximal
    term λ/2 ‖v − θ‖².
    """

    lam: Annotated[NonNegative, "λ, weight of the proximal term of the personal model"] = 1.0
    weights: Annotated[ClientWeights, "client weights: by number of samples or uniform (as in the paper)"] = "size"
    sends_global_model: ClassVar[bool] = True
    client_state: ClassVar[str] = "personal model"
    keeps_optimizer: ClassVar[bool] = True
    newcomer_start: ClassVar[str] = "the global model as its personal model"

    def init_client(self, setup: Setup) -> Tree:
        kept = self.init_optimizer(setup.params) | self.init_optimizer(setup.params, "own_optimizer")
        return {"own": setup.params, **kept}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params, kept = self.optimize(ctx, ctx.loss, message["params"], state)
        own, own_kept = self.optimize(
            ctx,
            lambda v, batch: ctx.loss(v, batch) + self.lam / 2 * squared_distance(v, message["params"]),
            state["own"],
            state,
            key="own_optimizer",
        )
        return {"own": own, **kept, **own_kept}, {"params": params}

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return {**state["own"]}
