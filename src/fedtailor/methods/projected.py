"""Methods in which own models are tied together by a few numbers each: a random projection of all weights."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtailor.batch import Batch
from fedtailor.local import LocalView
from fedtailor.method import Exchange, Method, Setup
from fedtailor.trees import Tree, add, dots, map_leaves, mean, repeat, scale, squared_norms


@dataclass(frozen=True)
class LpProj(Method):
    """Lin et al., "Personalized Federated Learning towards Communication Efficiency, Robustness and Fairness",
    NeurIPS 2022.

    Only w, a few numbers, crosses. A client trains its own model θ while the projection P θ is pulled to its copy of w,
    which follows. The penalty is λ‖Pθ − w‖_p; with p = 2 it is λ/2 ‖Pθ − w‖² (the paper's lp-proj-2). Its slope ψ is
    normalised in both steps; the authors' code does so in that of w alone. Their weight decay does nothing and is left
    out, so is their clipping of gradients. Only clients of the round train (all of them in the code). P is drawn from
    the seed whenever a client trains: `dimension` times the model in memory, for that time.
    """

    lr: float = 0.1  # η_p, step of the own model
    anchor_lr: float = 0.1  # η_l, step of the client's copy of w
    lam: float = 15.0  # λ, pull of the projection towards w
    p: float = 1.0  # p of the norm, at least 1
    dimension: int = 10  # d_s, numbers in w
    steps: int = 4  # L, batches between two steps of w (20 in the paper)
    repeats: int = 5  # R, steps of w a round
    beta: float = 1.0  # β, share of the new average in w
    down: ClassVar[str] = "projection of a model"
    up: ClassVar[str] = "projection of a model"
    keeps: ClassVar[str] = "own model"
    newcomer: ClassVar[str] = "the common projection; its model is the start"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lam", "anchor_lr"):
            self.require(getattr(self, name) >= 0, name, "at least 0")
        for name in ("p", "dimension", "steps", "repeats"):
            self.require(getattr(self, name) >= 1, name, "at least 1")
        self.require(self.beta > 0, "beta", "above 0")
        stable = self.p != 2 or self.lam * max(self.lr, self.anchor_lr) < 2
        self.require(stable, "lam", "below 2/lr and 2/anchor_lr with p = 2")

    @property
    def plain_mean(self) -> bool:
        return True

    def init_server(self, setup: Setup) -> Tree:
        return {"anchor": setup.like.new_zeros(self.dimension)}

    def init_client(self, setup: Setup) -> Tree:
        return {"own": setup.params}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        trainable = local.model.trainable
        projection = self._projection(local, trainable(state["own"]))

        def project(own: Tree) -> Tensor:  # P θ
            return dots(projection, repeat(trainable(own), 1))[:, 0]

        def follow(anchor: Tensor, projected: Tensor) -> Tensor:
            return anchor - self.anchor_lr * self.lam * self._psi(anchor - projected)

        def step(carry: Tree, batch: Batch) -> Tree:
            own, taken, projected = carry["own"], carry["taken"], project(carry["own"])
            due = (taken > 0) & (taken % self.steps == 0)
            anchor = torch.where(due, follow(carry["anchor"], projected), carry["anchor"])
            pull = self.lam * self._psi(projected - anchor)
            moved = map_leaves(
                lambda w, g, rows: w - self.lr * (g + torch.tensordot(pull, rows, dims=1)),  # ∇f + λ Pᵀ ψ
                *(trainable(tree) for tree in (own, local.slope(local.loss, own, batch))),
                projection,
            )
            return {"own": own | moved, "anchor": anchor, "taken": taken + 1}

        start = {"own": state["own"], "anchor": message["anchor"], "taken": torch.zeros_like(local.size)}
        end = local.fold(step, start, steps=self.steps * self.repeats)
        return {"own": local.refresh(end["own"])}, {"anchor": follow(end["anchor"], project(end["own"]))}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return add(scale(server, 1 - self.beta), scale(mean(exchange.received), self.beta))

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        own: Tree = state["own"]
        return own

    def _projection(self, local: LocalView, own: Tree) -> Tree:
        """P as one tree a row, stacked: standard normal numbers, every row of length 1; the same for all."""
        salts = {name: salt for salt, name in enumerate(local.model.names)}
        rows = {
            name: torch.special.ndtri(local.shared_uniform((self.dimension, *leaf.shape), salts[name]))
            for name, leaf in own.items()
        }
        lengths = squared_norms(rows).sqrt()
        return map_leaves(lambda leaf: leaf / lengths.reshape(-1, *[1] * (leaf.ndim - 1)), rows)

    def _psi(self, x: Tensor) -> Tensor:
        """The slope of the penalty, by λ."""
        if self.p == 2:
            return x
        norm: Tensor = torch.linalg.vector_norm(x, self.p).clamp(min=torch.finfo(x.dtype).tiny)
        return x.sign() * (x.abs() / norm).pow(self.p - 1)
