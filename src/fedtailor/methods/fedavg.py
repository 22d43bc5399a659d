"""FedAvg: the server averages the models that clients trained locally."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import AveragingMethod, ClientWeights
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Setup
from fedtailor.core.trees import Tree


@dataclass(frozen=True)
class FedAvg(AveragingMethod, LocalTraining):
    """McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

    Clients train the global model on their own data, and the server averages the trained models.
    """

    weights: Annotated[ClientWeights, "client weights: by number of samples (as in the paper) or uniform"] = "size"
    personal: ClassVar[bool] = False
    keeps_optimizer: ClassVar[bool] = True

    def init_client(self, setup: Setup) -> Tree:
        return self.init_optimizer(setup.params)

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params, new = self.optimize(ctx, ctx.loss, message["params"], state)
        return state | new, {"params": params}
