"""Per-FedAvg: the global model is meta-trained for fast local adaptation (MAML)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import AveragingMethod, ClientWeights
from fedtailor.core.fields import NonNegative, Positive, PositiveInt
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Setup
from fedtailor.core.trees import Tree, add, dot, map_leaves, scale, sub


@dataclass(frozen=True)
class PerFedAvg(AveragingMethod, LocalTraining):
    """Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
    Meta-Learning Approach", NeurIPS 2020.

    The global model is trained to perform well after one step of adaptation: w̃ = w − α ∇f(w; D), then w ← w − β ∇f(w̃;
    D′). For its personal model, a client adapts a copy to its training data and discards it after use. The exact
    gradient has the factor 1 − α ∇²f(w; D″) before ∇f(w̃; D′): hessian="none" (FO) omits it, and hessian="difference"
    (HF) approximates it with two more gradients. Each batch is divided into D, D′, and D″; a part without samples is
    replaced by the whole batch, so that a client with one sample can train (batch normalization uses the whole batch in
    each part). The paper's β is too small for tens of rounds; its α is suitable.
    """

    sends_global_model: ClassVar[bool] = True
    title: ClassVar[str] = "Per-FedAvg"
    ranked_by: ClassVar[str | None] = "received"  # the global model, adapted to the client
    keeps_optimizer: ClassVar[bool] = True
    lr: Annotated[Positive, "β, learning rate of the global model (0.001 in the paper)"] = 0.1
    inner_lr: Annotated[NonNegative, "α, learning rate of the adaptation, in training and in use"] = 0.01
    adapt_steps: Annotated[PositiveInt, "steps of the adaptation in use, one batch each"] = 1
    hessian: Annotated[Literal["none", "difference"], "first order (FO), or a central difference (HF)"] = "none"
    delta: Annotated[Positive, "δ, width of the difference"] = 0.001
    weights: Annotated[ClientWeights, "client weights: uniform (as in the paper) or by number of samples"] = "uniform"

    def init_client(self, setup: Setup) -> Tree:
        return self.init_optimizer(setup.params)

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        def objective(params: Tree, batch: Batch) -> Tensor:
            parts = batch.split_round_robin(2 if self.hessian == "none" else 3)  # D, D′, and D″ for the Hessian
            fixed = map_leaves(Tensor.detach, params)
            step = scale(ctx.grad(ctx.loss, fixed, parts[0]), self.inner_lr)
            loss = ctx.loss(sub(params, step), parts[1])  # w̃ = w − step; gradients in w and w̃ are equal
            if self.hessian == "none":
                return loss
            grad = scale(ctx.grad(ctx.loss, sub(fixed, step), parts[1]), self.delta)
            forward, backward = (ctx.grad(ctx.loss, move(fixed, grad), parts[2]) for move in (add, sub))
            correction = scale(sub(forward, backward), self.inner_lr / (2 * self.delta))
            return loss - dot(correction, params)

        params, new = self.optimize(ctx, objective, message["params"], state)
        return state | new, {"params": ctx.update_batch_stats(params)}  # running statistics of w, not of w̃

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return self._adapt(ctx, message["params"])

    def trained(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        return self._adapt(ctx, upload["params"])

    def _adapt(self, ctx: ClientContext, params: Tree) -> Tree:
        """Return the model after adaptation to the client's data."""
        return ctx.optimize(ctx.loss, params, lr=self.inner_lr, steps=self.adapt_steps)
