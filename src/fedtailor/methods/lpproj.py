"""lp-proj: personal models that are coupled through a low-dimensional random projection."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import AveragingMethod, ClientWeights
from fedtailor.core.fields import NonNegative, Positive, PositiveInt
from fedtailor.core.local_training import ScheduledMethod
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.training_settings import plain_sgd
from fedtailor.core.trees import Tree, add, dots, map_leaves, mean, repeat, scale, squared_norms


@dataclass(frozen=True)
class LpProj(AveragingMethod, ScheduledMethod):
    """Lin et al., "Personalized Federated Learning towards Communication Efficiency, Robustness and Fairness", NeurIPS
    2022.

    Only w, a vector with few entries, is communicated. A client trains its personal model θ with a penalty that pulls
    the projection P θ toward its copy of w, which follows the projection. The penalty is λ‖Pθ − w‖_p, or λ/2 ‖Pθ − w‖²
    for p = 2 (lp-proj-2 in the paper). Its gradient ψ is normalized in both steps; the authors' code normalizes it only
    in the step of w. Their weight decay has no effect and is omitted, as is their gradient clipping. Only the clients
    of the round train (all clients in the code). P is drawn from the seed each time a client trains and then takes
    `dimension` times the memory of the model.
    """

    title: ClassVar[str] = "lp-proj"
    lr: Annotated[Positive, "η_p, learning rate of the personal model"] = 0.1
    anchor_lr: Annotated[NonNegative, "η_l, learning rate of the client's copy of w"] = 0.1
    lam: Annotated[NonNegative, "λ, weight of the penalty"] = 15.0
    p: Annotated[float, "p of the norm, at least 1"] = 1.0
    dimension: Annotated[PositiveInt, "d_s, entries of w"] = 10
    steps: Annotated[PositiveInt, "L, batches between two steps of w (20 in the paper)"] = 4
    repeats: Annotated[PositiveInt, "R, steps of w per round"] = 5
    beta: Annotated[Positive, "β, share of the new average in w"] = 1.0
    weights: Annotated[ClientWeights, "client weights: uniform (as in the paper) or by number of samples"] = "uniform"
    download: ClassVar[str] = "projected model"
    upload: ClassVar[str] = "projected model"
    fixed_settings: ClassVar[Mapping[str, str]] = plain_sgd(
        "both of its steps are plain gradient steps on one objective"
    )
    client_state: ClassVar[str] = "personal model"
    newcomer_start: ClassVar[str] = "the global projection; the initial model"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.p >= 1, "p", "at least 1")
        stable = self.p != 2 or self.lam * max(self.lr, self.anchor_lr) < 2
        self.require(stable, "lam", "below 2/lr and 2/anchor_lr with p = 2")

    def init_server(self, setup: Setup) -> Tree:
        return {"anchor": setup.like.new_zeros(self.dimension)}

    def init_client(self, setup: Setup) -> Tree:
        return {"own": setup.params}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        trainable = ctx.model.trainable
        projection = self._projection(ctx, trainable(state["own"]))
        lr, anchor_step = self.scheduled(ctx, self.lr), self.scheduled(ctx, self.anchor_lr * self.lam)

        def project(own: Tree) -> Tensor:  # P θ
            return dots(projection, repeat(trainable(own), 1))[:, 0]

        def move_anchor(anchor: Tensor, projected: Tensor) -> Tensor:
            return anchor - anchor_step * self._psi(anchor - projected)

        def step(carry: Tree, batch: Batch) -> Tree:
            own, number, projected = carry["own"], carry["step"], project(carry["own"])
            move_now = (number > 0) & (number % self.steps == 0)
            anchor = torch.where(move_now, move_anchor(carry["anchor"], projected), carry["anchor"])
            pull = self.lam * self._psi(projected - anchor)
            moved = map_leaves(
                lambda w, g, rows: w - lr * (g + torch.tensordot(pull, rows, dims=1)),  # ∇f + λ Pᵀ ψ
                *(trainable(tree) for tree in (own, ctx.grad(ctx.loss, own, batch))),
                projection,
            )
            return {"own": own | moved, "anchor": anchor, "step": number + 1}

        start = {"own": state["own"], "anchor": message["anchor"], "step": torch.zeros_like(ctx.size)}
        end = ctx.scan(step, start, steps=self.steps * self.repeats)
        return {"own": ctx.update_batch_stats(end["own"])}, {"anchor": move_anchor(end["anchor"], project(end["own"]))}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        average = mean(exchange.received, self.round_weights(exchange))
        return add(scale(server, 1 - self.beta), scale(average, self.beta))

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return {**state["own"]}

    def _projection(self, ctx: ClientContext, own: Tree) -> Tree:
        """Return P as stacked trees, one per row: standard normal, rows of length 1, the same for all clients."""
        salts = {name: salt for salt, name in enumerate(ctx.model.names)}
        rows = {
            name: torch.special.ndtri(ctx.shared_uniform((self.dimension, *leaf.shape), salts[name]))
            for name, leaf in own.items()
        }
        lengths = squared_norms(rows).sqrt()
        return map_leaves(lambda leaf: leaf / lengths.reshape(-1, *[1] * (leaf.ndim - 1)), rows)

    def _psi(self, x: Tensor) -> Tensor:
        """Return the gradient of the penalty divided by λ."""
        if self.p == 2:
            return x
        norm: Tensor = torch.linalg.vector_norm(x, self.p).clamp(min=torch.finfo(x.dtype).tiny)
        return x.sign() * (x.abs() / norm).pow(self.p - 1)
