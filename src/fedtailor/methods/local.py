"""Local training: the baseline without communication."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import ClientWeights
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Setup
from fedtailor.core.trees import Tree


@dataclass(frozen=True)
class Local(LocalTraining):
    """Local training: each client trains from the initial model without communication, the baseline of all methods.

    Clients need no server, so all of them train in every round, whatever the participation of the other methods. With
    `sampled`, a client trains only in the rounds in which a server would have selected it: the same amount of training.
    """

    sampled: Annotated[bool, "train only in the rounds in which the server selects the client"] = False
    title: ClassVar[str] = "Local training"
    mixed_architectures: ClassVar[bool] = True
    download: ClassVar[str] = "nothing"
    upload: ClassVar[str] = "nothing"
    client_state: ClassVar[str] = "personal model"
    newcomer_start: ClassVar[str] = "nothing; the initial model is its own"
    keeps_optimizer: ClassVar[bool] = True

    @property
    def display_name(self) -> str:
        return f"{self.title} (sampled)" if self.sampled else self.title

    @property
    def trains_every_round(self) -> bool:
        return not self.sampled

    @property
    def mean_weights(self) -> ClientWeights | None:
        return "uniform"

    def init_server(self, setup: Setup) -> Tree:
        return {}

    def init_client(self, setup: Setup) -> Tree:
        return {"params": setup.params, **self.init_optimizer(setup.params)}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params, new = self.optimize(ctx, ctx.loss, state["params"], state)
        return {"params": params, **new}, {}

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return {**state["params"]}
