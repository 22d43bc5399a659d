"""FedAlt: partial model personalization with alternating updates of the two parts."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedtailor.core.client_context import ClientContext
from fedtailor.core.fields import PositiveInt
from fedtailor.core.trees import Tree
from fedtailor.methods._shared.split import Split, SplitMethod, train_alternately


@dataclass(frozen=True)
class FedAlt(SplitMethod):
    """Pillutla et al., "Federated Learning with Partial Model Personalization", ICML 2022.

    Clients first train the personal part with the shared part fixed, then the shared part with the personal part fixed.
    The server averages the shared parts.
    """

    epochs: Annotated[PositiveInt, "E, local epochs of each part"] = 1
    split: Annotated[Split, "the personal part: output, input, split_input, or a list of layers"] = "output"
    keeps_optimizer: ClassVar[bool] = False  # each part has its own optimizer

    @property
    def part(self) -> Split:
        return self.split

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        return train_alternately(ctx, state, message, self.optimizer_options, self.optimizer_options)
