"""FedAPA: the server learns the aggregation weights of each client by gradient descent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.core.client_context import ClientContext
from fedtailor.core.fields import Fraction, FractionBelow1, NonNegative
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.trees import Tree, combine, dots, put, repeat, squared_norms, sub
from fedtailor.methods._shared.newcomers import newcomer_shares, set_newcomer_rows


@dataclass(frozen=True)
class FedAPA(LocalTraining):
    """Sun et al., "FedAPA: Server-side Gradient-Based Adaptive Personalized Aggregation for Federated Learning on
    Heterogeneous Data", IJCAI 2025.

    The server stores the last body θ_j of each client and learns the weights A with which it mixes them for each
    client. Equation 7 prints the opposite sign, which ascends (see `printed_sign`). variant="code" follows the authors'
    code: A starts at 0, a row is prepared before use (A_ii = 1, then normalization), momentum 0.9 applies to all of A,
    and clients take turns.
    """

    weight_lr: Annotated[NonNegative, "η_A, learning rate of the aggregation weights"] = 0.01
    self_weight: Annotated[Fraction, "μ, weight of the own body before the row is normalized (1 in the code)"] = 0.5
    clip: Annotated[bool, "clip weights to [0, 1]"] = True
    self_adjust: Annotated[bool, "set the own weight to μ"] = True
    normalize: Annotated[bool, "normalize rows to sum 1"] = True
    share: Annotated[Literal["body", "all"], "what is shared: the body (as in the paper) or the whole model"] = "body"
    weight_momentum: Annotated[
        FractionBelow1, "momentum of the aggregation weights (0.9 in the code, for all of A)"
    ] = 0.0
    printed_sign: Annotated[bool, "Equation 7 as printed, which ascends instead of descending"] = False
    variant: Annotated[Literal["paper", "code"], "the paper, or the authors' code"] = "paper"
    download: ClassVar[str] = "personalized mixture of bodies"
    upload: ClassVar[str] = "body"
    client_state: ClassVar[str] = "head"
    keeps_optimizer: ClassVar[bool] = True
    newcomer_start: ClassVar[str] = "the mean body; the initial head"

    def __post_init__(self) -> None:
        super().__post_init__()
        usable = self.variant == "paper" or self.self_adjust
        self.require(usable, "self_adjust", "true with variant 'code', in which all other weights start at 0")

    @property
    def sequential_clients(self) -> bool:
        return self.variant == "code"

    def init_server(self, setup: Setup) -> Tree:
        count, like = setup.num_clients, setup.like
        zeros = like.new_zeros(count, count)
        weights = torch.eye(count).to(zeros) if self.variant == "paper" else zeros
        body = setup.params if self.share == "all" else setup.split("head")[0]
        trainable = setup.model.trainable(body)
        statistics = {name: leaf for name, leaf in body.items() if name not in trainable}
        bodies = {"params": repeat(trainable, count), "statistics": repeat(statistics, count)}
        return {**bodies, "weights": weights, "velocity": zeros}

    def grow_server(self, server: Tree, setup: Setup, before: int) -> Tree:
        """Set the body of each newcomer to the mean, and its row of A to equal shares, so that it receives the mean
        body.

        The other clients do not use its body until they learn a weight for it.
        """
        grown = super().grow_server(server, setup, before)
        shares = newcomer_shares(grown["params"], before)
        bodies = {part: set_newcomer_rows(grown[part], shares) for part in ("params", "statistics")}
        return {**grown, **bodies, "weights": torch.cat([grown["weights"][:before], shares])}

    def init_client(self, setup: Setup) -> Tree:
        kept = self.init_optimizer(setup.params)
        return kept if self.share == "all" else {"head": setup.split("head")[1], **kept}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        rows = self._rows(server, clients)
        mixed = combine(rows, server["params"])  # θ̄_i = Σ_j A_ij θ_j
        return {"params": mixed | combine(_nonnegative_shares(rows), server["statistics"])}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params, new = self.optimize(ctx, ctx.loss, message["params"] | state.get("head", {}), state)
        if self.share == "all":
            return new, {"params": params}
        body, head = ctx.model.split(params)
        return {"head": head, **new}, {"params": body}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        received = exchange.received["params"]
        pseudo_gradient = exchange.model.trainable(sub(exchange.sent["params"], received))  # θ̄_i − θ_i
        grads = dots(pseudo_gradient, server["params"])  # ∂J_i / ∂A_ij
        clients = torch.tensor(exchange.clients, device=grads.device)
        learn = self._learn_as_paper if self.variant == "paper" else self._learn_as_code
        weights, velocity = learn(server, clients, -grads if self.printed_sign else grads)
        return {
            **{
                part: put(server[part], clients, {name: received[name] for name in server[part]})
                for part in ("params", "statistics")
            },
            "weights": weights,
            "velocity": velocity,
        }

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return {**message["params"], **state.get("head", {})}

    def server_metrics(self, before: Tree, after: Tree, exchange: Exchange) -> Tree:
        """Return A, the entropy of its rows, and J_i = ½‖Σ_j A_ij θ_j − θ_i‖² with the old and the new row."""
        sent, received = (
            exchange.model.trainable(tree) for tree in (exchange.sent["params"], exchange.received["params"])
        )
        mixed = combine(after["weights"][list(exchange.clients)], before["params"])
        return {
            "weights": after["weights"],
            "entropy": torch.special.entr(_nonnegative_shares(after["weights"])).sum(1),
            "per_client": {
                "proxy_before": squared_norms(sub(sent, received)) / 2,
                "proxy_after": squared_norms(sub(mixed, received)) / 2,
            },
        }

    def _rows(self, server: Tree, clients: Sequence[int]) -> Tensor:
        """Return the rows of A in the form in which they are used."""
        rows: Tensor = server["weights"][list(clients)]
        return rows if self.variant == "paper" else self._adjust(rows, torch.tensor(clients), 1.0)

    def _learn_as_paper(self, server: Tree, clients: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Update A as in the paper; return A and its velocity."""
        old = server["weights"][clients]
        velocity = self.weight_momentum * server["velocity"][clients] + grads
        rows = old - self.weight_lr * velocity
        rows = self._adjust(rows.clamp(0, 1) if self.clip else rows, clients, self.self_weight, otherwise=old)
        return server["weights"].index_copy(0, clients, rows), server["velocity"].index_copy(0, clients, velocity)

    def _learn_as_code(self, server: Tree, clients: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Update A as in the authors' code; return A and its velocity."""
        prepared = server["weights"].index_copy(0, clients, self._rows(server, clients.tolist()))
        velocity = (0.9 * server["velocity"]).index_add(0, clients, grads)
        weights = prepared - self.weight_lr * velocity
        return weights.clamp(0, 1) if self.clip else weights, velocity

    def _adjust(self, rows: Tensor, clients: Tensor, own: float, otherwise: Tensor | None = None) -> Tensor:
        """Set the own weight, then normalize; rows without a positive sum become `otherwise` or stay as they are."""
        if self.self_adjust:
            rows = rows.scatter(1, clients.to(rows.device)[:, None], own)
        if not self.normalize:
            return rows
        sums = rows.sum(1, keepdim=True)
        return torch.where(sums > 0, rows / torch.where(sums > 0, sums, 1), rows if otherwise is None else otherwise)


def _nonnegative_shares(rows: Tensor) -> Tensor:
    """Clip rows at 0 and normalize them, for means of values that must not become negative (variances)."""
    rows = rows.clamp(min=0)
    return rows / rows.sum(1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
