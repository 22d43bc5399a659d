"""FedAPM: one part of the model is shared and the other kept, and duals hold the clients' copies of the shared part."""

from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.batch import Batch
from fedtailor.local import LocalView
from fedtailor.method import Exchange, Method, Setup
from fedtailor.methods.split_model import Split, require_split
from fedtailor.model import Model
from fedtailor.trees import Tree, add, dot, map_leaves, scale, squared_distance, sub, zeros_like


@dataclass(frozen=True)
class FedAPM(Method):
    """Zhu et al., "FedAPM: Federated Learning via ADMM with Partial Model Personalization", KDD 2025.

    Client i keeps its personal part v_i, its own copy u_i of the shared part and a dual π_i that pulls u_i to the
    common u. The losses are weighted by α_i, so learning rates are large: with α_i = 1/M a step is lr/M. Equation 9
    prints the loss without α_i; Equation 15 and the authors' code have it. With duals off, rho 0, sigma 0, alpha "one",
    accuracy_start 0 and start "received" it is FedAlt, and with order "together" FedSim.
    """

    lr: float | None = None  # η, local learning rate (0.05 to 1 in the paper); none: 0.1 over the mean α_i
    epochs_personal: int = 3  # local epochs of the personal part, where it is trained before the shared one
    epochs_shared: int = 3  # local epochs of the shared part, at most
    weight_decay: float = 0.0  # of local SGD (0.01 in the authors' code)
    split: Split = "output"  # the personal part: output, input, split_input or layers
    rho: float = 0.003  # ρ, penalty that holds u_i near u (0.01 in the paper)
    sigma: float = 0.01  # σ, pull of the personal part towards where it was
    alpha: Literal["uniform", "size", "one"] = "uniform"  # α_i: 1/M, n_i/n or 1
    accuracy_start: float | None = None  # ξ_i before the first round; none: by its first gradient; 0: never stop early
    accuracy_decay: float = 0.5  # μ, by which ξ_i falls every round (0.9 in the paper)
    duals: bool = True  # false: every π_i stays 0
    start: Literal["own", "received"] = "own"  # u_i when training begins: the client's own, or what it received
    order: Literal["alternate", "together"] = "alternate"  # of the two parts in training
    printed_loss: bool = False  # Equation 9 as printed: the personal step without α_i
    down: ClassVar[str] = "shared part"
    up: ClassVar[str] = "change of the shared part and its dual"
    keeps: ClassVar[str] = "personal part, copy of the shared one, dual"
    newcomer: ClassVar[str] = "the shared part, where its copy begins; its dual is 0, its personal part the start's"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_split(self, self.split)
        self.require(self.rho >= 0, "rho", "at least 0")
        self.require(self.rho > 0 or not self.duals, "rho", "above 0, for the duals are divided by it")
        self.require(self.sigma >= 0, "sigma", "at least 0")
        self.require(0 < self.accuracy_decay < 1, "accuracy_decay", "between 0 and 1")
        first = self.accuracy_start
        known = isinstance(first, Real) and not isinstance(first, bool) and 0 <= first < inf
        self.require(first is None or known, "accuracy_start", "a number from 0 on, or none")
        self.require(self.epochs_personal >= 1, "epochs_personal", "at least 1")
        self.require(self.epochs_shared >= 1, "epochs_shared", "at least 1")
        self.require_choice("alpha", "uniform", "size", "one")
        self.require_choice("start", "own", "received")
        self.require_choice("order", "alternate", "together")

    @property
    def plain_mean(self) -> bool:
        return True

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.split(self.split)[0]}

    def init_client(self, setup: Setup) -> Tree:
        shared, personal = setup.split(self.split)
        dual = zeros_like(setup.model.trainable(shared))
        unknown = -1.0 if self.accuracy_start is None else self.accuracy_start
        accuracy = next(iter(dual.values())).new_tensor(unknown)
        return {"personal": personal, "shared": shared, "dual": dual, "accuracy": accuracy}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        received, personal = message["params"], state["personal"]
        own = state["shared"] if self.start == "own" else received
        accuracy = self.accuracy_decay * self._accuracy(local, state)  # Eq. 10

        def personal_objective(v: Tree, u: Tree, batch: Batch) -> Tensor:  # Eq. 15
            loss = local.loss(u | v, batch) if self.printed_loss else self._loss(local, u | v, batch)
            return loss + self.sigma / 2 * squared_distance(v, personal)

        def penalty(u: Tree) -> Tensor:
            gap = self._gap(local.model, u, received)
            return dot(state["dual"], gap) + self.rho / 2 * dot(gap, gap)

        def reached(v: Tree, u: Tree) -> Tensor:  # Eq. 16
            slope = local.gradient(lambda u, batch: self._loss(local, u | v, batch) + penalty(u), u)
            slope = local.model.trainable(slope)
            return dot(slope, slope) <= accuracy

        usual = 0.1 if self.alpha == "one" else 0.1 * local.num_clients
        descent: dict[str, Any] = {"lr": self.lr or usual, "weight_decay": self.weight_decay}
        early = self.accuracy_start != 0
        if self.order == "together":
            both = local.sgd(
                lambda p, batch: personal_objective(p["personal"], p["shared"], batch) + penalty(p["shared"]),
                {"personal": personal, "shared": own},
                epochs=self.epochs_shared,
                stop=(lambda p: reached(p["personal"], p["shared"])) if early else None,
                **descent,
            )
            personal, shared = both["personal"], both["shared"]
        else:
            personal = local.sgd(
                lambda v, batch: personal_objective(v, own, batch), personal, epochs=self.epochs_personal, **descent
            )
            shared = local.sgd(
                lambda u, batch: self._loss(local, u | personal, batch) + penalty(u),
                own,
                epochs=self.epochs_shared,
                stop=(lambda u: reached(personal, u)) if early else None,
                **descent,
            )
        gap, change, dual = self._gap(local.model, shared, received), sub(shared, state["shared"]), state["dual"]
        if self.duals:
            dual = add(dual, scale(gap, self.rho))  # Eq. 12
            change = change | add(local.model.trainable(change), gap)  # of z_i = u_i + π_i / ρ, Eq. 13
        return {"personal": personal, "shared": shared, "dual": dual, "accuracy": accuracy}, {"change": change}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        """u is the mean of all z_i, absent ones included (Eq. 8)."""
        moved = map_leaves(
            lambda u, change: u + change.sum(0) / exchange.num_clients, server["params"], exchange.received["change"]
        )
        return {"params": moved}

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        params: Tree = message["params"] | state["personal"]
        return params

    def trained(self, local: LocalView, state: Tree, message: Tree, upload: Tree) -> Tree:
        params: Tree = state["shared"] | state["personal"]
        return params

    def note(self, local: LocalView, state: Tree, message: Tree, upload: Tree) -> Tree:
        gap = self._gap(local.model, state["shared"], message["params"])
        return {"drift": dot(gap, gap).sqrt()}

    def measure(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        """Client i's part of the augmented Lagrangian (Eq. 4), its ξ_i, and how far Definition 1 is from holding."""
        params, dual, alpha = state["shared"] | state["personal"], state["dual"], self._alpha(local)
        gap = self._gap(local.model, state["shared"], message["params"])
        slopes = local.model.trainable(local.gradient(local.loss, params))
        shared, personal = local.model.split(slopes, self.split)
        pull = add(add(scale(shared, alpha), dual), scale(gap, self.rho))
        loss = alpha * local.value(local.loss, params)
        return {
            "lagrangian": loss + dot(dual, gap) + self.rho / 2 * dot(gap, gap),
            "accuracy_level": self._accuracy(local, state),
            "stationarity": dot(pull, pull) + dot(personal, personal) + dot(gap, gap),
            "dual": dual,
        }

    def overall(self, totals: Tree) -> Tree:
        found = {
            "lagrangian": totals["lagrangian"],
            "residual": (totals["stationarity"] + dot(totals["dual"], totals["dual"])).sqrt(),
        }
        if self.rho > 0:
            slack = 29 / (self.rho * (1 - self.accuracy_decay)) * totals["accuracy_level"]
            found["lyapunov"] = totals["lagrangian"] + slack  # Eq. 17
        return found

    def _alpha(self, local: LocalView) -> Tensor:
        if self.alpha == "size":
            return local.size / local.total_size
        return torch.full_like(local.size, 1.0 if self.alpha == "one" else 1 / local.num_clients)

    def _loss(self, local: LocalView, params: Tree, batch: Batch) -> Tensor:
        return self._alpha(local) * local.loss(params, batch)

    def _gap(self, model: Model, shared: Tree, received: Tree) -> Tree:
        """u_i − u; running statistics have no dual, for no gradient moves them."""
        return model.trainable(sub(shared, received))

    def _accuracy(self, local: LocalView, state: Tree) -> Tensor:
        """ξ_i; where it is not known yet, ‖α_i ∇_u f_i + π_i‖²."""

        def first() -> Tensor:
            slopes = local.gradient(lambda u, batch: self._loss(local, u | state["personal"], batch), state["shared"])
            slopes = add(local.model.trainable(slopes), state["dual"])
            return dot(slopes, slopes)

        known: Tensor = state["accuracy"]
        return local.when(known < 0, first, known)
