"""FedAPM: partial model personalization with ADMM."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import ClientWeights
from fedtailor.core.fields import InnerFraction, NonNegative, NonNegativeInt, Positive
from fedtailor.core.local_training import ScheduledMethod
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.model import Model
from fedtailor.core.training_settings import plain_sgd
from fedtailor.core.trees import Tree, add, dot, map_leaves, scale, squared_distance, sub, zeros_like
from fedtailor.methods._shared.split import Split, require_split

_Rate = Annotated[Positive | None, "η, local learning rate (0.05 to 1 in the paper); none: 0.1 divided by the mean α_i"]


@dataclass(frozen=True)
class FedAPM(ScheduledMethod):
    """Zhu et al., "FedAPM: Federated Learning via ADMM with Partial Model Personalization", KDD 2025.

    Client i stores its personal part v_i, its copy u_i of the shared part, and a dual variable π_i that pulls u_i
    toward the global u. Losses are weighted by α_i, so learning rates are large: with α_i = 1/M, the effective learning
    rate is lr/M. Equation 9 prints the loss without α_i; Equation 15 and the authors' code include it. With
    duals=False, rho=0, sigma=0, alpha="one", accuracy_start=0, and start="received", the method equals FedAlt; with
    order="together" in addition, it equals FedSim.
    """

    lr: _Rate = None  # type: ignore[assignment]  # a number in all other methods
    epochs_personal: Annotated[
        NonNegativeInt, "local epochs of the personal part, if order is alternate; 0: it keeps its initial values"
    ] = 3
    epochs_shared: Annotated[
        NonNegativeInt, "maximum number of local epochs of the shared part; 0: it keeps its initial values"
    ] = 3
    weight_decay: Annotated[NonNegative, "weight decay of local SGD (0.01 in the authors' code)"] = 0.0
    split: Annotated[Split, "the personal part: output, input, split_input, or a list of layers"] = "output"
    rho: Annotated[NonNegative, "ρ, weight of the penalty that keeps u_i close to u (0.01 in the paper)"] = 0.003
    sigma: Annotated[NonNegative, "σ, weight of the proximal term of the personal part"] = 0.01
    alpha: Annotated[Literal["uniform", "size", "one"], "α_i: 1/M, n_i/n, or 1"] = "uniform"
    accuracy_start: Annotated[
        NonNegative | None, "initial ξ_i; none: from the first gradient; 0: no early stopping"
    ] = None
    accuracy_decay: Annotated[InnerFraction, "μ, factor by which ξ_i decreases per round (0.9 in the paper)"] = 0.5
    duals: Annotated[bool, "false: all π_i stay 0"] = True
    start: Annotated[
        Literal["own", "received"], "where u_i starts in each round: the client's copy, or the received u"
    ] = "own"
    order: Annotated[Literal["alternate", "together"], "train the two parts in turn, or together"] = "alternate"
    printed_loss: Annotated[bool, "Equation 9 as printed: the personal step without α_i"] = False
    convergence_metrics: Annotated[
        bool, "record the augmented Lagrangian and the residual, in two more passes over the training data"
    ] = True
    download: ClassVar[str] = "shared part"
    upload: ClassVar[str] = "change of the shared part and its dual variable"
    fixed_settings: ClassVar[Mapping[str, str]] = plain_sgd(
        "its local problems are solved with plain SGD", "weight_decay"
    )
    client_state: ClassVar[str] = "personal part, copy of the shared part, dual variable"
    newcomer_start: ClassVar[str] = (
        "the global shared part as its copy; a zero dual variable, the initial personal part"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_split(self, self.split)
        self.require(self.rho > 0 or not self.duals, "rho", "above 0, because the dual variables are divided by it")
        trains = self.epochs_shared > 0 or (self.epochs_personal > 0 and self.order == "alternate")
        self.require(trains, "epochs_shared", "above 0, because otherwise nothing is trained")

    @property
    def mean_weights(self) -> ClientWeights | None:
        return "uniform"

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.split(self.split)[0]}

    def init_client(self, setup: Setup) -> Tree:
        shared, personal = setup.split(self.split)
        dual = zeros_like(setup.model.trainable(shared))
        unknown = -1.0 if self.accuracy_start is None else self.accuracy_start
        accuracy = next(iter(dual.values())).new_tensor(unknown)
        return {"personal": personal, "shared": shared, "dual": dual, "accuracy": accuracy}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        received, personal = message["params"], state["personal"]
        own = state["shared"] if self.start == "own" else received
        accuracy = self.accuracy_decay * self._accuracy(ctx, state)  # Eq. 10

        def personal_objective(v: Tree, u: Tree, batch: Batch) -> Tensor:  # Eq. 15
            loss = ctx.loss(u | v, batch) if self.printed_loss else self._loss(ctx, u | v, batch)
            return loss + self.sigma / 2 * squared_distance(v, personal)

        def penalty(u: Tree) -> Tensor:
            gap = self._gap(ctx.model, u, received)
            return dot(state["dual"], gap) + self.rho / 2 * dot(gap, gap)

        def reached(v: Tree, u: Tree) -> Tensor:  # Eq. 16
            grad = ctx.full_grad(lambda u, batch: self._loss(ctx, u | v, batch) + penalty(u), u)
            grad = ctx.model.trainable(grad)
            return dot(grad, grad) <= accuracy

        default_lr = 0.1 if self.alpha == "one" else 0.1 * ctx.num_clients
        optimizer_options: dict[str, Any] = {
            "lr": self.scheduled(ctx, self.lr or default_lr), "weight_decay": self.weight_decay
        }  # fmt: skip
        early_stopping = self.accuracy_start != 0
        if self.order == "together":
            both = ctx.optimize(
                lambda p, batch: personal_objective(p["personal"], p["shared"], batch) + penalty(p["shared"]),
                {"personal": personal, "shared": own},
                epochs=self.epochs_shared,
                stop=(lambda p: reached(p["personal"], p["shared"])) if early_stopping else None,
                **optimizer_options,
            )
            personal, shared = both["personal"], both["shared"]
        else:
            personal = ctx.optimize(
                lambda v, batch: personal_objective(v, own, batch),
                personal,
                epochs=self.epochs_personal,
                **optimizer_options,
            )
            shared = ctx.optimize(
                lambda u, batch: self._loss(ctx, u | personal, batch) + penalty(u),
                own,
                epochs=self.epochs_shared,
                stop=(lambda u: reached(personal, u)) if early_stopping else None,
                **optimizer_options,
            )
        gap, change, dual = self._gap(ctx.model, shared, received), sub(shared, state["shared"]), state["dual"]
        if self.duals:
            dual = add(dual, scale(gap, self.rho))  # Eq. 12
            change = change | add(ctx.model.trainable(change), gap)  # of z_i = u_i + π_i / ρ, Eq. 13
        return {"personal": personal, "shared": shared, "dual": dual, "accuracy": accuracy}, {"change": change}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        """Set u to the mean of all z_i, including those of absent clients (Eq. 8)."""
        moved = map_leaves(
            lambda u, change: u + change.sum(0) / exchange.num_clients, server["params"], exchange.received["change"]
        )
        return {"params": moved}

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return {**message["params"], **state["personal"]}

    def trained(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        return {**state["shared"], **state["personal"]}

    def client_metrics(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        gap = self._gap(ctx.model, state["shared"], message["params"])
        return {"drift": dot(gap, gap).sqrt()}

    @property
    def has_evaluation_metrics(self) -> bool:
        return self.convergence_metrics

    def evaluation_metrics(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        """Return the client's term of the augmented Lagrangian (Eq. 4), its ξ_i, and its violation of Definition 1."""
        params, dual, alpha = state["shared"] | state["personal"], state["dual"], self._alpha(ctx)
        gap = self._gap(ctx.model, state["shared"], message["params"])
        grads = ctx.model.trainable(ctx.full_grad(ctx.loss, params))
        shared, personal = ctx.model.split(grads, self.split)
        residual = add(add(scale(shared, alpha), dual), scale(gap, self.rho))
        loss = alpha * ctx.full_loss(ctx.loss, params)
        return {
            "lagrangian": loss + dot(dual, gap) + self.rho / 2 * dot(gap, gap),
            "accuracy_level": self._accuracy(ctx, state),
            "stationarity": dot(residual, residual) + dot(personal, personal) + dot(gap, gap),
            "dual": dual,
        }

    def reduce_metrics(self, totals: Tree) -> Tree:
        metrics = {
            "lagrangian": totals["lagrangian"],
            "residual": (totals["stationarity"] + dot(totals["dual"], totals["dual"])).sqrt(),
        }
        if self.rho > 0:
            slack = 29 / (self.rho * (1 - self.accuracy_decay)) * totals["accuracy_level"]
            metrics["lyapunov"] = totals["lagrangian"] + slack  # Eq. 17
        return metrics

    def _alpha(self, ctx: ClientContext) -> Tensor:
        """Return α_i."""
        if self.alpha == "size":
            return ctx.size / ctx.total_size
        return torch.full_like(ctx.size, 1.0 if self.alpha == "one" else 1 / ctx.num_clients)

    def _loss(self, ctx: ClientContext, params: Tree, batch: Batch) -> Tensor:
        """Return the loss weighted by α_i."""
        return self._alpha(ctx) * ctx.loss(params, batch)

    def _gap(self, model: Model, shared: Tree, received: Tree) -> Tree:
        """Return u_i − u. Running statistics have no dual variable because no gradient updates them."""
        return model.trainable(sub(shared, received))

    def _accuracy(self, ctx: ClientContext, state: Tree) -> Tensor:
        """Return ξ_i; before it is known, ‖α_i ∇_u f_i + π_i‖²."""

        def initial() -> Tensor:
            grads = ctx.full_grad(lambda u, batch: self._loss(ctx, u | state["personal"], batch), state["shared"])
            grads = add(ctx.model.trainable(grads), state["dual"])
            return dot(grads, grads)

        known: Tensor = state["accuracy"]
        return ctx.cond(known < 0, initial, known)
