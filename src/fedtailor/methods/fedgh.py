"""FedGH: the server trains a shared head on class prototypes; bodies are personal."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedtailor.core.client_context import ClientContext
from fedtailor.core.fields import NonNegative, PositiveInt
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.trees import Params, Tree, scale, sub
from fedtailor.methods._shared.class_statistics import prototypes


@dataclass(frozen=True)
class FedGH(LocalTraining):
    """Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM MM 2023.

    Bodies are personal. The server trains one head on all received prototypes, client by client (in the authors'
    scripts, the optimizer updates another network, so that this head never changes). A client trains its body together
    with a copy of this head and sends its prototypes, not its head. Its `trained` model has the head that it trained;
    its `received` model has the server's head.
    """

    server_lr: Annotated[NonNegative, "η, learning rate of the server's head"] = 0.01
    server_epochs: Annotated[PositiveInt, "server epochs over the prototypes of a round"] = 1
    server_batch: Annotated[PositiveInt, "server batch size"] = 1
    mixed_architectures: ClassVar[bool] = True
    download: ClassVar[str] = "head"
    upload: ClassVar[str] = "client prototypes"
    client_state: ClassVar[str] = "body"
    keeps_optimizer: ClassVar[bool] = True
    newcomer_start: ClassVar[str] = "the global head; the initial body"

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.split("head")[1]}

    def init_client(self, setup: Setup) -> Tree:
        # the head is stored for evaluation only
        return {"params": setup.params, **self.init_optimizer(setup.params)}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params, new = self.optimize(ctx, ctx.loss, state["params"] | message["params"], state)
        return {"params": params, **new}, {"prototypes": prototypes(ctx, params)}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        received, model = exchange.received["prototypes"], exchange.model  # [clients, classes, features]
        features = received.values[received.present]  # [prototypes, features], without absent ones
        labels = received.present.nonzero()[:, 1]

        def head_grad(head: Params, indices: Tensor) -> Params:
            with torch.enable_grad():
                params = {name: leaf.detach().requires_grad_() for name, leaf in head.items()}
                loss = model.losses(model.head_output(params, features[indices]), labels[indices]).mean()
                return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))

        head = server["params"]
        for _ in range(self.server_epochs):
            for indices in torch.split(torch.arange(len(labels), device=labels.device), self.server_batch):
                head = sub(head, scale(head_grad(head, indices), self.server_lr))
        return {"params": head}

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return {**state["params"], **message["params"]}

    def trained(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        return {**state["params"]}
