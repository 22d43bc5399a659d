"""FedExP: FedAvg with an adaptive server step size."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import ClientWeights, WeightedMethod
from fedtailor.core.fields import Positive
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.robust import KINDS
from fedtailor.core.trees import Tree, add, dot, repeat, scale, squared_norms, sub


@dataclass(frozen=True)
class FedExP(WeightedMethod, LocalTraining):
    """Jhunjhunwala, Wang, Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023.

    The server extrapolates along the mean update Δ with the step size η_g = max(1, mean ‖Δ_i‖² / (2 (‖Δ‖² + ε))).
    """

    weights: Annotated[ClientWeights, "client weights: uniform (as in the paper) or by number of samples"] = "uniform"
    epsilon: Annotated[Positive, "ε, bounds the step size (0.1 for EMNIST in the paper)"] = 0.001
    average_last: Annotated[
        bool, "evaluate the mean of the last two global models; training continues from the last one"
    ] = True
    personal: ClassVar[bool] = False
    keeps_optimizer: ClassVar[bool] = True

    @property
    def robust_kinds(self) -> tuple[str, ...]:
        return KINDS

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.params, "previous": setup.params}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return repeat({"params": server["params"]}, len(clients))

    def serve(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        last, previous = server["params"], server["previous"]
        used = scale(add(last, previous), 0.5) if self.average_last else last
        return repeat({"params": used}, len(clients))

    def init_client(self, setup: Setup) -> Tree:
        return self.init_optimizer(setup.params)

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params, new = self.optimize(ctx, ctx.loss, message["params"], state)
        return state | new, {"params": params}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        given = self.round_weights(exchange)
        weights = torch.ones_like(exchange.sizes) if given is None else given
        average, trainable = exchange.mean(exchange.received["params"], weights), exchange.model.trainable
        updates = trainable(sub(exchange.received["params"], exchange.sent["params"]))  # Δ_i
        update = trainable(sub(average, server["params"]))  # Δ
        squared_norm = exchange.mean({"mean": squared_norms(updates)}, weights)["mean"]
        step = (squared_norm / (2 * (dot(update, update) + self.epsilon))).clamp(min=1)  # η_g
        moved = add(trainable(server["params"]), scale(update, step))
        # running statistics are averaged, not extrapolated
        return {"params": average | moved, "previous": server["params"]}
