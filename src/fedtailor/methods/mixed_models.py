"""Methods in which the server mixes clients' models, for each client another mixture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.local import LocalView
from fedtailor.method import Exchange, Setup, SGDMethod
from fedtailor.newcomers import newcomer_shares, seat
from fedtailor.trees import Params, Tree, combine, dots, mean, put, repeat, squared_distance, squared_norms, sub


@dataclass(frozen=True)
class FedAMP(SGDMethod):
    """Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021.

    The server keeps every client's last model w_j and sends u_i, in which models near w_i weigh most; the client pulls
    its own towards u_i. The paper leaves open where the client starts: here at u_i, near which the minimum lies. Its
    exp(−‖w_i − w_j‖²/σ) is 0 in any network unless σ fits the distances, so they are measured by their mean over all
    pairs of clients, and the step α_t is taken as large as leaves the own model at least 1 − α (see `relative`).
    The pull is by λ/α with the field's α, not the step that this choice implies. On data where training alone is best,
    attention costs accuracy: a smaller σ turns it down. attention="cosine" is HeurFedAMP: the own weight is fixed, and
    others share the rest by exp(σ cos(w_i, w_j)).
    """

    alpha: float = 0.5  # α, most that all others weigh in u_i; of plain distances: α_t, the step of the attention
    sigma: float = 0.5  # σ, at which squared distance a weight has fallen by e; in mean squared distances if relative
    lam: float = 0.5  # λ, pull towards u_i, by λ/α (1 in the paper)
    relative: bool = True  # squared distances are divided by their mean; false: plain, as in the paper
    attention: Literal["distance", "cosine"] = "distance"  # what decides the weights: FedAMP's, or HeurFedAMP's
    self_weight: float = 0.8  # ξ_ii, weight of the own model with attention "cosine"
    sharpness: float = 50.0  # σ of HeurFedAMP, how much a higher cosine counts
    down: ClassVar[str] = "own mixture of models"
    keeps: ClassVar[str] = "own model"
    newcomer: ClassVar[str] = "the mean model, where its own begins"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.alpha > 0, "alpha", "above 0")
        self.require(self.alpha <= 1 or not self.relative, "alpha", "at most 1 where distances are relative")
        self.require(self.sigma > 0, "sigma", "above 0")
        self.require(0 <= self.lr * self.lam / self.alpha <= 1, "lam", "from 0 to alpha/lr")
        self.require_choice("attention", "distance", "cosine")
        self.require(0 <= self.self_weight <= 1, "self_weight", "from 0 to 1")

    def init_server(self, setup: Setup) -> Tree:
        like = setup.like
        own = torch.eye(setup.num_clients, dtype=like.dtype, device=like.device)
        return {"models": repeat(setup.params, setup.num_clients), "weights": own}

    def welcome(self, server: Tree, setup: Setup, before: int) -> Tree:
        wide = super().welcome(server, setup, before)
        shares = newcomer_shares(wide["models"], before)
        weights = torch.cat([wide["weights"][:before], shares])  # until the next round measures distances
        return {"models": seat(wide["models"], shares), "weights": weights}

    def init_client(self, setup: Setup) -> Tree:
        return {"params": setup.params}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return {"params": combine(server["weights"][list(clients)], server["models"])}  # u_i

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        trainable, received = local.model.trainable, message["params"]
        params = local.sgd(
            lambda w, batch: (
                local.loss(w, batch) + self.lam / self.alpha / 2 * squared_distance(trainable(w), trainable(received))
            ),
            received,
            **self.descent,
        )
        return {"params": params}, {"params": params}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        clients = torch.tensor(exchange.clients, device=server["weights"].device)
        models = put(server["models"], clients, exchange.received["params"])
        others = self._attention(exchange.model.trainable(models)).fill_diagonal_(0)
        others = others / others.sum(1, keepdim=True).clamp(min=1)  # the own weight is never below 0
        return {"models": models, "weights": others + torch.diag(1 - others.sum(1))}

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        params: Tree = state["params"]
        return params

    def monitor(self, before: Tree, after: Tree, exchange: Exchange) -> Tree:
        """The weights of everyone's mixture in the next round."""
        return {"weights": after["weights"]}

    def _attention(self, models: Params) -> Tensor:
        """a_ij for j ≠ i; what stands on the diagonal means nothing."""
        others = max(next(iter(models.values())).shape[0] - 1, 1)
        if self.attention == "cosine":
            products = dots(models, models)
            norms = products.diagonal().sqrt().clamp(min=torch.finfo(products.dtype).tiny)
            cosines = products / norms / norms[:, None]
            return (1 - self.self_weight) * (self.sharpness * cosines).fill_diagonal_(-torch.inf).softmax(1)
        centred = sub(models, mean(models))  # distances stay, and lose fewer digits
        products = dots(centred, centred)
        squares = products.diagonal()
        distances = (squares + squares[:, None] - 2 * products).clamp(min=0).fill_diagonal_(0)
        if not self.relative:
            return self.alpha * torch.exp(-distances / self.sigma) / self.sigma
        unit = (distances.sum() / len(distances) / others).clamp(min=torch.finfo(distances.dtype).tiny)
        return self.alpha / others * torch.exp(-distances / unit / self.sigma)


@dataclass(frozen=True)
class FedAPA(SGDMethod):
    """Sun et al., "FedAPA: Server-side Gradient-Based Adaptive Personalized Aggregation for Federated Learning on
    Heterogeneous Data", IJCAI 2025.

    The server keeps every client's last body θ_j and learns the weights A with which it mixes them. Equation 7 prints
    the other sign, which climbs (see `printed_sign`). variant="code" follows the authors' code: A starts at 0, a row is
    prepared before it is used (A_ii = 1, then normalised), momentum 0.9 moves all of A, clients take turns.
    """

    weight_lr: float = 0.01  # η_A, step of the aggregation weights
    self_weight: float = 0.5  # μ, a client's weight of its own body before the row is normalised (1 in the code)
    clip: bool = True  # weights to [0, 1]
    self_adjust: bool = True  # set the own weight to μ
    normalize: bool = True  # rows sum to 1
    share: Literal["body", "all"] = "body"  # what crosses: the head stays (the paper's), or all is shared
    weight_momentum: float = 0.0  # of the aggregation weights (0.9 in the code, for all of them)
    printed_sign: bool = False  # Equation 7 as printed: climbs instead of descending
    variant: Literal["paper", "code"] = "paper"  # code: the authors' code
    down: ClassVar[str] = "own mixture of bodies"
    up: ClassVar[str] = "body"
    keeps: ClassVar[str] = "head"
    newcomer: ClassVar[str] = "the mean body; its head is the start's"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.weight_lr >= 0, "weight_lr", "at least 0")
        self.require(0 < self.self_weight <= 1, "self_weight", "above 0 and at most 1")
        self.require(0 <= self.weight_momentum < 1, "weight_momentum", "at least 0 and below 1")
        self.require_choice("share", "body", "all")
        self.require_choice("variant", "paper", "code")
        usable = self.variant == "paper" or self.self_adjust
        self.require(usable, "self_adjust", "true with variant 'code', where all other weights start at 0")

    @property
    def one_by_one(self) -> bool:
        return self.variant == "code"

    def init_server(self, setup: Setup) -> Tree:
        count, like = setup.num_clients, setup.like
        nothing = like.new_zeros(count, count)
        weights = torch.eye(count).to(nothing) if self.variant == "paper" else nothing
        body = setup.params if self.share == "all" else setup.split("head")[0]
        learnt = setup.model.trainable(body)
        statistics = {name: leaf for name, leaf in body.items() if name not in learnt}
        bodies = {"params": repeat(learnt, count), "statistics": repeat(statistics, count)}
        return {**bodies, "weights": weights, "velocity": nothing}

    def welcome(self, server: Tree, setup: Setup, before: int) -> Tree:
        """A newcomer's body is the mean, and so is what it gets, also if it comes later: its row of A mixes all others
        alike. They do not mix its body in before they learn to."""
        wide = super().welcome(server, setup, before)
        shares = newcomer_shares(wide["params"], before)
        bodies = {part: seat(wide[part], shares) for part in ("params", "statistics")}
        return {**wide, **bodies, "weights": torch.cat([wide["weights"][:before], shares])}

    def init_client(self, setup: Setup) -> Tree:
        return {} if self.share == "all" else {"head": setup.split("head")[1]}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        rows = self._rows(server, clients)
        mixed = combine(rows, server["params"])  # θ̄_i = Σ_j A_ij θ_j
        return {"params": mixed | combine(_shares(rows), server["statistics"])}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = local.sgd(local.loss, message["params"] | state.get("head", {}), **self.descent)
        if self.share == "all":
            return {}, {"params": params}
        body, head = local.model.split(params)
        return {"head": head}, {"params": body}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        received = exchange.received["params"]
        excess = exchange.model.trainable(sub(exchange.sent["params"], received))  # θ̄_i − θ_i
        slopes = dots(excess, server["params"])  # ∂J_i / ∂A_ij
        clients = torch.tensor(exchange.clients, device=slopes.device)
        learn = self._learn_as_paper if self.variant == "paper" else self._learn_as_code
        weights, velocity = learn(server, clients, -slopes if self.printed_sign else slopes)
        return {
            **{
                part: put(server[part], clients, {name: received[name] for name in server[part]})
                for part in ("params", "statistics")
            },
            "weights": weights,
            "velocity": velocity,
        }

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        params: Tree = message["params"] | state.get("head", {})
        return params

    def monitor(self, before: Tree, after: Tree, exchange: Exchange) -> Tree:
        """A, the entropy of its rows, and J_i = ½‖Σ_j A_ij θ_j − θ_i‖² with the row as it was and as it became."""
        sent, received = (
            exchange.model.trainable(tree) for tree in (exchange.sent["params"], exchange.received["params"])
        )
        learnt = combine(after["weights"][list(exchange.clients)], before["params"])
        return {
            "weights": after["weights"],
            "entropy": torch.special.entr(_shares(after["weights"])).sum(1),
            "per_client": {
                "proxy_before": squared_norms(sub(sent, received)) / 2,
                "proxy_after": squared_norms(sub(learnt, received)) / 2,
            },
        }

    def _rows(self, server: Tree, clients: Sequence[int]) -> Tensor:
        """The clients' rows of A as they are used."""
        rows: Tensor = server["weights"][list(clients)]
        return rows if self.variant == "paper" else self._adjust(rows, torch.tensor(clients), 1.0)

    def _learn_as_paper(self, server: Tree, clients: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        old = server["weights"][clients]
        velocity = self.weight_momentum * server["velocity"][clients] + slopes
        rows = old - self.weight_lr * velocity
        rows = self._adjust(rows.clamp(0, 1) if self.clip else rows, clients, self.self_weight, otherwise=old)
        return server["weights"].index_copy(0, clients, rows), server["velocity"].index_copy(0, clients, velocity)

    def _learn_as_code(self, server: Tree, clients: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        prepared = server["weights"].index_copy(0, clients, self._rows(server, clients.tolist()))
        velocity = (0.9 * server["velocity"]).index_add(0, clients, slopes)
        weights = prepared - self.weight_lr * velocity
        return weights.clamp(0, 1) if self.clip else weights, velocity

    def _adjust(self, rows: Tensor, clients: Tensor, own: float, otherwise: Tensor | None = None) -> Tensor:
        """Set the own weight, then make the row sum to 1; a row whose sum is not positive is not used."""
        if self.self_adjust:
            rows = rows.scatter(1, clients.to(rows.device)[:, None], own)
        if not self.normalize:
            return rows
        sums = rows.sum(1, keepdim=True)
        return torch.where(sums > 0, rows / torch.where(sums > 0, sums, 1), rows if otherwise is None else otherwise)


def _shares(rows: Tensor) -> Tensor:
    """Rows without what is below 0, summing to 1: a mean, also of what must not become negative (variances)."""
    rows = rows.clamp(min=0)
    return rows / rows.sum(1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
