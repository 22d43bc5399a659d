"""FedAvg: the server averages the models that clients trained locally."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from fedtailor.core.client_context import ClientContext
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.trees import Tree, mean


@dataclass(frozen=True)
class FedAvg(LocalTraining):
    """McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

    Clients train the global model on their own data, and the server averages the trained models.
    """

    weights: Annotated[
        Literal["size", "uniform"], "client weights: by number of samples (as in the paper) or uniform"
    ] = "size"
    personal: ClassVar[bool] = False
    keeps_optimizer: ClassVar[bool] = True

    @property
    def uses_plain_mean(self) -> bool:
        return self.weights == "uniform"

    def init_client(self, setup: Setup) -> Tree:
        return self.init_optimizer(setup.params)

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params, new = self.optimize(ctx, ctx.loss, message["params"], state)
        return state | new, {"params": params}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes if self.weights == "size" else None)
