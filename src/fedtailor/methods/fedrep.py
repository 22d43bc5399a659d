"""FedRep: a shared body and a personal head; each client trains its head first, then the body."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedtailor.core.client_context import ClientContext
from fedtailor.core.fields import NonNegativeInt, PositiveInt
from fedtailor.core.trees import Tree
from fedtailor.methods._shared.split import PersonalHeadMethod, train_alternately


@dataclass(frozen=True)
class FedRep(PersonalHeadMethod):
    """Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021.

    Clients first train the head with the received body fixed, then the body with this head fixed. Each phase has its
    own optimizer, so momentum and weight decay do not affect frozen parameters. The authors' code adds 10 epochs of
    head training to the last round; here all rounds are the same.
    """

    epochs: Annotated[PositiveInt, "local epochs of the body"] = 1
    head_epochs: Annotated[NonNegativeInt, "τ, local epochs of the head"] = 9
    keeps_optimizer: ClassVar[bool] = False  # each part has its own optimizer

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        head_options = self.optimizer_options | {"epochs": self.head_epochs, "steps": None}
        return train_alternately(ctx, state, message, head_options, self.optimizer_options)
