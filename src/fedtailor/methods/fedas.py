"""FedAS: a shared body, aligned by each client and averaged by Fisher information."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import AveragingMethod, ClientWeights
from fedtailor.core.fields import NonNegativeInt, Positive
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.robust import KINDS
from fedtailor.core.trees import Params, Tree, dot
from fedtailor.methods._shared.class_statistics import pick_rows, prototypes

_Weights = Annotated[Literal["fisher", "size", "uniform"], "client weights: F_i, number of samples, or uniform"]


@dataclass(frozen=True)
class FedAS(AveragingMethod, LocalTraining):
    """Yang, Huang, Ye, "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024.

    Before local training, a client aligns the features of the received body with the class means of the features of its
    previous body, so that they fit its head again. Bodies are averaged by their Fisher information F_i, as in the
    authors' code: F_i is a sum over batches, so clients with more data, or with a loss that is not yet flat, have
    larger weights. The paper may intend smaller weights for undertrained clients; this implementation follows the code,
    which produced the published results. A client's model is the one it has trained, also at the moment `received`.
    Alignment uses the batch size of the run (16 in the code).
    """

    align_epochs: Annotated[NonNegativeInt, "epochs of alignment; 0: no alignment"] = 1
    align_lr: Annotated[Positive, "learning rate of alignment (as in the code; small compared with lr)"] = 0.01
    weights: _Weights = "fisher"  # type: ignore[assignment]  # one more choice than in all other methods
    download: ClassVar[str] = "body"
    upload: ClassVar[str] = "body, Fisher weight"
    client_state: ClassVar[str] = "personal model"
    keeps_optimizer: ClassVar[bool] = True
    newcomer_start: ClassVar[str] = "the global body; the initial head"

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.split("head")[0]}

    def init_client(self, setup: Setup) -> Tree:
        return {"params": setup.params, **self.init_optimizer(setup.params)}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        own, body = state["params"], message["params"]
        if self.align_epochs:
            body = self._align(ctx, own, body)
        params, new = self.optimize(ctx, ctx.loss, own | body, state)
        upload = {"params": ctx.model.split(params, "head")[0]}
        return {"params": params, **new}, upload | (
            {"fisher": _fisher(ctx, params)} if self.weights == "fisher" else {}
        )

    @property
    def mean_weights(self) -> ClientWeights | None:
        return None if self.weights == "fisher" else self.weights

    @property
    def robust_kinds(self) -> tuple[str, ...]:
        return KINDS

    def round_weights(self, exchange: Exchange) -> Tensor | None:
        if self.weights != "fisher":
            return super().round_weights(exchange)
        # the smallest positive number makes the weights uniform if every F_i is 0
        weights: Tensor = exchange.received["fisher"].double() + torch.finfo(torch.float64).tiny
        return weights

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return {"params": exchange.mean(exchange.received["params"], self.round_weights(exchange))}

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return {**state["params"]}

    def _align(self, ctx: ClientContext, own: Params, received: Params) -> Params:
        """Train the received body toward the class means q_k of the features of the client's previous body."""
        means = prototypes(ctx, own)

        def alignment_loss(body: Params, batch: Batch) -> Tensor:
            """Return the mean squared error of each class in the batch, summed over classes."""
            target, _ = pick_rows(means, batch.y)
            errors = (ctx.model.features(own | body, batch.x) - target).square().mean(1)
            class_sizes = ((batch.y[:, None] == batch.y) * batch.weight).sum(1)
            return (errors * batch.weight / class_sizes.clamp(min=1)).sum()

        return ctx.optimize(alignment_loss, received, lr=self.align_lr, epochs=self.align_epochs)


def _fisher(ctx: ClientContext, params: Params) -> Tensor:
    """Return F_i = Σ over batches of ‖∇ mean loss of the batch‖², in evaluation mode."""
    serving = ctx.model.eval_mode

    def loss(params: Params, batch: Batch) -> Tensor:
        return batch.mean(serving.losses(serving.logits(params, batch.x), batch.y, batch.weight))

    def squared_norm(batch: Batch) -> Tree:
        grad = serving.trainable(ctx.grad(loss, params, batch))
        return {"fisher": dot(grad, grad)}

    total: Tensor = ctx.sum_over_data(squared_norm)["fisher"]
    return total
