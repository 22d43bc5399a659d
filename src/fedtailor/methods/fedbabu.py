"""FedBABU: only the body is trained; the head is fine-tuned afterward."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedtailor.core.client_context import ClientContext
from fedtailor.core.fields import NonNegativeInt
from fedtailor.core.trees import Tree
from fedtailor.methods._shared.split import PersonalHeadMethod, train_alternately


@dataclass(frozen=True)
class FedBABU(PersonalHeadMethod):
    """Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.

    Clients train only the body; the head keeps its initial values and is never communicated. For its personal model, a
    client fine-tunes a copy of body and head on its own data. At the moment `trained`, the model is not fine-tuned: it
    is the trained body with the initial head.
    """

    tuning_epochs: Annotated[
        NonNegativeInt, "τ_f, epochs of fine-tuning of body and head; 0: use the global model as is"
    ] = 5
    client_state: ClassVar[str] = "initial head"
    ranked_by: ClassVar[str | None] = "received"  # the global body, fine-tuned with the head

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        return train_alternately(ctx, state, message, self.optimizer_options, personal_epochs=0)

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        params = super().personalize(ctx, state, message)
        if not self.tuning_epochs:
            return params
        return ctx.sgd(ctx.loss, params, **(self.optimizer_options | {"epochs": self.tuning_epochs}))

    def trained(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        return {**upload["params"], **state["personal"]}
