"""FedPAC: features are aligned to global prototypes, and the server combines heads for each client."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import ClientWeights, WeightedMethod
from fedtailor.core.fields import Fraction, FractionBelow1, NonNegative, NonNegativeInt, Positive, PositiveInt
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.trees import Params, Rows, Tree, combine, mean, put, repeat, take
from fedtailor.methods._shared.class_statistics import aligned_loss, membership, merge_rows, no_prototypes, prototypes
from fedtailor.methods._shared.newcomers import newcomer_shares, set_newcomer_rows
from fedtailor.methods._shared.quadratic_program import solve_simplex_qp

_MAX_ENTRIES = 2**22  # matrix entries per batch of problems; limits memory without changing results


@dataclass(frozen=True)
class FedPAC(WeightedMethod, LocalTraining):
    """Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR
    2023.

    The server averages the bodies. A client trains first its head and then its body, with features aligned to the
    global prototypes (from the second round on, as in the authors' code; before, there are none). For each client, the
    server combines the heads such that the expected error is minimal. A class that no client of the round has keeps its
    prototype. P is a Gram matrix plus diag(V), so that V ≥ 0 suffices to make it positive; the authors' code drops all
    eigenvalues below 0.01 if rounding makes one negative. A client whose best combination cannot be determined keeps
    its head.
    """

    lr: Annotated[Positive, "η, learning rate of the body (0.01 in the paper)"] = 0.1
    epochs: Annotated[PositiveInt, "E, epochs of the body, after those of the head (5 in the paper)"] = 2
    momentum: Annotated[FractionBelow1, "momentum of local SGD, for both parts"] = 0.5
    weight_decay: Annotated[NonNegative, "weight decay of local SGD, for both parts"] = 0.0005
    head_lr: Annotated[Positive, "η_g, learning rate of the head"] = 0.1
    head_epochs: Annotated[NonNegativeInt, "epochs of the head, before those of the body"] = 1
    lam: Annotated[NonNegative, "λ, weight of the alignment of features with prototypes"] = 1.0
    mix: Annotated[bool, "combine heads; false: each client keeps its own head"] = True
    smallest: Annotated[Fraction, "weights of heads below this value become 0"] = 0.001
    weights: Annotated[ClientWeights, "client weights of the bodies: by number of samples or uniform"] = "size"
    keeps_optimizer: ClassVar[bool] = True
    download: ClassVar[str] = "body, personalized combination of heads, prototypes"
    upload: ClassVar[str] = "body, head, client prototypes, class sizes, feature statistics"
    newcomer_start: ClassVar[str] = "the global body, the mean head, the global prototypes"

    def init_server(self, setup: Setup) -> Tree:
        body, head = setup.split("head")
        return {"params": body, "heads": repeat(head, setup.num_clients), "prototypes": no_prototypes(setup)}

    def grow_server(self, server: Tree, setup: Setup, before: int) -> Tree:
        new = super().grow_server(server, setup, before)
        return new | {"heads": set_newcomer_rows(new["heads"], newcomer_shares(new["heads"], before))}

    def init_client(self, setup: Setup) -> Tree:
        body, head = setup.split("head")
        return self.init_optimizer(body) | self.init_optimizer(head, "head_optimizer")

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        message = repeat({"params": server["params"], "prototypes": server["prototypes"]}, len(clients))
        own = take(server["heads"], torch.tensor(clients))
        return message | {"params": message["params"] | own}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        received, head = ctx.model.split(message["params"])
        totals = self._statistics(ctx, message["params"])
        moments = totals["sums"] / ctx.size  # H_i[k] = p_k μ_k
        variance = (totals["squares"] / ctx.size - moments.square().sum()) / ctx.size  # V_i

        phase: dict[str, Any] = {"key": "head_optimizer", "lr": self.head_lr, "epochs": self.head_epochs}
        head, head_kept = self.optimize(ctx, lambda h, batch: ctx.loss(received | h, batch), head, state, **phase)
        targets = self._targets(ctx, message["prototypes"], totals)
        body, kept = self.optimize(
            ctx, lambda b, batch: aligned_loss(ctx, b | head, batch, targets, self.lam), received, state
        )
        params = body | head
        statistics = {"counts": totals["counts"], "moments": moments, "variance": variance}
        return head_kept | kept, {"params": params, "prototypes": prototypes(ctx, params), **statistics}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        received = exchange.received
        bodies, heads = exchange.model.split(received["params"])
        if self.mix:
            heads = combine(self._weights(received["moments"], received["variance"]), heads)
        clients = torch.tensor(exchange.clients, device=received["variance"].device)
        return {
            "params": mean(bodies, self.round_weights(exchange)),
            "heads": put(server["heads"], clients, heads),
            "prototypes": merge_rows(server["prototypes"], received["prototypes"], received["counts"]),
        }

    def _statistics(self, ctx: ClientContext, params: Params) -> Tree:
        """Return the samples per class, the sums of their features, and the sum of all ‖z‖², by the received body."""
        classes, _ = ctx.model.head_size

        def sums(batch: Batch) -> Tree:
            features, member = ctx.model.eval_mode.features(params, batch.x), membership(batch, classes)
            squares = (features.square().sum(1) * batch.weight).sum()
            return {"counts": member.sum(0), "sums": member.T @ features, "squares": squares}

        return ctx.sum_over_data(sums)

    def _targets(self, ctx: ClientContext, known: Rows, totals: Tree) -> Rows:
        """Return the global prototypes, and the client's own before training for classes without one.

        In the first round, there are no targets.
        """
        own = totals["sums"] / totals["counts"].clamp(min=1)[:, None]
        aligned = torch.ones_like(known.present) if ctx.round > 1 else torch.zeros_like(known.present)
        return Rows(torch.where(known.present[:, None], known.values, own), aligned)

    def _weights(self, moments: Tensor, variances: Tensor) -> Tensor:
        """Return the weights of the heads for each client, [clients, clients].

        Row i minimizes αᵀP^iα subject to α ≥ 0 and Σα = 1, where P^i_jl = ⟨H_i − H_j, H_i − H_l⟩ + 1[j = l] V_j.
        """
        flat = moments.flatten(1).double()
        products, own = flat @ flat.T, torch.eye(len(flat), dtype=torch.float64, device=flat.device)
        squares = products.diagonal()  # ‖H_i‖²
        min_variance = 1e-14 * squares.mean() + 1e-30  # V is 0 up to rounding for a client with one sample
        diagonal = torch.diag(variances.double().clamp(min=min_variance))
        solutions = []
        for indices in torch.split(torch.arange(len(flat), device=flat.device), max(1, _MAX_ENTRIES // len(flat) ** 2)):
            rows = products[indices]
            costs = squares[indices, None, None] - rows[:, None, :] - rows[:, :, None] + products + diagonal
            solutions.append(solve_simplex_qp(costs))
        weights = torch.cat(solutions)
        weights = torch.where(weights.isfinite().all(1, keepdim=True), weights, own)
        threshold = weights.amax(1, keepdim=True).clamp(max=self.smallest)  # always keeps the largest weight
        weights = torch.where(weights < threshold, 0, weights)
        return weights / weights.sum(1, keepdim=True)
