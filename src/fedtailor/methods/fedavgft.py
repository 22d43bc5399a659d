"""FedAvgFT: FedAvg, followed by local fine-tuning of the global model."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedtailor.core.client_context import ClientContext
from fedtailor.core.fields import NonNegativeInt
from fedtailor.core.trees import Tree
from fedtailor.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    """Collins et al., "FedAvg with Fine Tuning: Local Updates Lead to Representation Learning", NeurIPS 2022.

    FedAvg with personalization by fine-tuning: a client trains a copy of the global model on its own data, with the
    learning rate of federated training, and discards the copy after use. At the moment `trained`, its model is the one
    it uploads, without further fine-tuning.
    """

    sends_global_model: ClassVar[bool] = True
    title: ClassVar[str] = "FedAvg-FT"
    tuning_epochs: Annotated[NonNegativeInt, "K_ft, epochs of fine-tuning (5 in FedBABU's code)"] = 5
    personal: ClassVar[bool] = True
    ranked_by: ClassVar[str | None] = "received"  # the global model, fine-tuned

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        params = super().personalize(ctx, state, message)
        if not self.tuning_epochs:
            return params
        options = self.optimizer_options | {"epochs": self.tuning_epochs, "steps": None}
        return ctx.optimize(ctx.loss, params, **options)

    def trained(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        return {**upload["params"]}
