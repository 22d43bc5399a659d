"""Methods in which the server mixes clients' models, for each client another mixture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.local import LocalView
from fedtailor.method import Exchange, Setup, SGDMethod
from fedtailor.trees import Tree, combine, dots, put, repeat, squared_norms, sub


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
        count, like = setup.num_clients, next(iter(setup.params.values()))
        nothing = like.new_zeros(count, count)
        weights = torch.eye(count).to(nothing) if self.variant == "paper" else nothing
        body = setup.params if self.share == "all" else setup.split("head")[0]
        learnt = setup.model.trainable(body)
        statistics = {name: leaf for name, leaf in body.items() if name not in learnt}
        bodies = {"params": repeat(learnt, count), "statistics": repeat(statistics, count)}
        return {**bodies, "weights": weights, "velocity": nothing}

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
