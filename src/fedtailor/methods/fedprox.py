"""FedProx: FedAvg with a proximal term in the local objective."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import AveragingMethod, ClientWeights
from fedtailor.core.fields import NonNegative
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Setup
from fedtailor.core.trees import Tree, squared_distance


@dataclass(frozen=True)
class FedProx(AveragingMethod, LocalTraining):
    """Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

    FedAvg with the proximal term μ/2 ‖w − θ‖² in the local objective, which keeps local models close to the received θ.
    """

    mu: Annotated[NonNegative, "μ, weight of the proximal term toward the received model"] = 0.1
    weights: Annotated[
        ClientWeights, "client weights: by number of samples or uniform (as in the paper, which draws clients by size)"
    ] = "size"
    personal: ClassVar[bool] = False
    keeps_optimizer: ClassVar[bool] = True

    def init_client(self, setup: Setup) -> Tree:
        return self.init_optimizer(setup.params)

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params, new = self.optimize(
            ctx,
            lambda w, batch: ctx.loss(w, batch) + self.mu / 2 * squared_distance(w, message["params"]),
            message["params"],
            state,
        )
        return state | new, {"params": params}
