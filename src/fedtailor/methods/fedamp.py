"""FedAMP: the server mixes client models with attention weights that favor similar models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.core.client_context import ClientContext
from fedtailor.core.fields import Fraction, Positive
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.trees import Params, Tree, combine, dots, mean, put, repeat, squared_distance, sub
from fedtailor.methods._shared.newcomers import newcomer_shares, set_newcomer_rows


@dataclass(frozen=True)
class FedAMP(LocalTraining):
    """Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021.

    The server stores the last model w_j of each client and sends u_i, a mixture in which models close to w_i have the
    largest weights; the client trains with a proximal term toward u_i. The paper does not specify where local training
    starts: here it starts at u_i, which is close to the minimum. In any network, the paper's exp(−‖w_i − w_j‖²/σ) is 0
    unless σ fits the distances. Squared distances are therefore divided by their mean over all pairs of clients, and
    the step size α_t is the largest one that leaves the own model a weight of at least 1 − α (see `relative`). The
    weight of the proximal term is λ/α with the field α, not with the implied step size. On data where local training is
    best, attention reduces accuracy; a smaller σ weakens it. attention="cosine" selects HeurFedAMP: the own weight is
    fixed, and the other models share the rest in proportion to exp(σ cos(w_i, w_j)).
    """

    alpha: Annotated[
        Positive, "α, maximum total weight of the others in u_i; for plain distances: the step size α_t"
    ] = 0.5
    sigma: Annotated[
        Positive, "σ, squared distance at which a weight falls by the factor e; in units of the mean if relative"
    ] = 0.5
    lam: Annotated[float, "λ, weight λ/α of the proximal term toward u_i (1 in the paper)"] = 0.5
    relative: Annotated[bool, "divide squared distances by their mean; false: plain distances, as in the paper"] = True
    attention: Annotated[Literal["distance", "cosine"], "what determines the weights: FedAMP or HeurFedAMP"] = (
        "distance"
    )
    self_weight: Annotated[Fraction, "ξ_ii, weight of the own model if attention is cosine"] = 0.8
    sharpness: Annotated[float, "σ of HeurFedAMP, influence of the cosine"] = 50.0
    download: ClassVar[str] = "personalized mixture of models"
    client_state: ClassVar[str] = "personal model"
    keeps_optimizer: ClassVar[bool] = True
    newcomer_start: ClassVar[str] = "the mean model as its personal model"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.alpha <= 1 or not self.relative, "alpha", "at most 1 if distances are relative")
        self.require(0 <= self.lr * self.lam / self.alpha <= 1, "lam", "from 0 to alpha/lr")

    def init_server(self, setup: Setup) -> Tree:
        like = setup.like
        own = torch.eye(setup.num_clients, dtype=like.dtype, device=like.device)
        return {"models": repeat(setup.params, setup.num_clients), "weights": own}

    def grow_server(self, server: Tree, setup: Setup, before: int) -> Tree:
        grown = super().grow_server(server, setup, before)
        shares = newcomer_shares(grown["models"], before)
        weights = torch.cat([grown["weights"][:before], shares])  # until distances are computed in the next round
        return {"models": set_newcomer_rows(grown["models"], shares), "weights": weights}

    def init_client(self, setup: Setup) -> Tree:
        return {"params": setup.params, **self.init_optimizer(setup.params)}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return {"params": combine(server["weights"][list(clients)], server["models"])}  # u_i

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        trainable, received = ctx.model.trainable, message["params"]
        params, new = self.optimize(
            ctx,
            lambda w, batch: (
                ctx.loss(w, batch) + self.lam / self.alpha / 2 * squared_distance(trainable(w), trainable(received))
            ),
            received,
            state,
        )
        return {"params": params, **new}, {"params": params}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        clients = torch.tensor(exchange.clients, device=server["weights"].device)
        models = put(server["models"], clients, exchange.received["params"])
        others = self._attention(exchange.model.trainable(models)).fill_diagonal_(0)
        others = others / others.sum(1, keepdim=True).clamp(min=1)  # the own weight is nonnegative
        return {"models": models, "weights": others + torch.diag(1 - others.sum(1))}

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return {**state["params"]}

    def server_metrics(self, before: Tree, after: Tree, exchange: Exchange) -> Tree:
        """Return the mixture weights of all clients for the next round."""
        return {"weights": after["weights"]}

    def _attention(self, models: Params) -> Tensor:
        """Return a_ij for j ≠ i; the values on the diagonal are arbitrary."""
        others = max(next(iter(models.values())).shape[0] - 1, 1)
        if self.attention == "cosine":
            products = dots(models, models)
            norms = products.diagonal().sqrt().clamp(min=torch.finfo(products.dtype).tiny)
            cosines = products / norms / norms[:, None]
            return (1 - self.self_weight) * (self.sharpness * cosines).fill_diagonal_(-torch.inf).softmax(1)
        centered = sub(models, mean(models))  # same distances, smaller rounding errors
        products = dots(centered, centered)
        squared_norms = products.diagonal()
        distances = (squared_norms + squared_norms[:, None] - 2 * products).clamp(min=0).fill_diagonal_(0)
        if not self.relative:
            return self.alpha * torch.exp(-distances / self.sigma) / self.sigma
        average = (distances.sum() / len(distances) / others).clamp(min=torch.finfo(distances.dtype).tiny)
        return self.alpha / others * torch.exp(-distances / average / self.sigma)
