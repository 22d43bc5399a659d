"""FedBABU: only the body is trained; the head is fine-tuned afterward."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedtailor.core.client_context import ClientContext
from fedtailor.core.fields import NonNegativeInt
from fedtailor.core.method import Setup
from fedtailor.core.trees import Tree
from fedtailor.methods._shared.split import PersonalHeadMethod


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

    def init_client(self, setup: Setup) -> Tree:
        body, head = setup.split("head")
        return {"personal": head, **self.init_optimizer(body)}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        head = state["personal"]
        body, new = self.optimize(ctx, lambda u, batch: ctx.loss(u | head, batch), message["params"], state)
        return {"personal": head, **new}, {"params": body}

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        params = super().personalize(ctx, state, message)
        if not self.tuning_epochs:
            return params
        options = self.optimizer_options | {"epochs": self.tuning_epochs, "steps": None}
        return ctx.optimize(ctx.loss, params, **options)

    def trained(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        return {**upload["params"], **state["personal"]}
