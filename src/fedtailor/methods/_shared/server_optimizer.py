"""Adaptive server optimizers: the server treats the mean change of the clients' models as a gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedtailor.core.client_weights import ClientWeights
from fedtailor.core.fields import FractionBelow1, NonNegative, Positive
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.trees import Tree, map_leaves, mean, repeat, sub, zeros_like
from fedtailor.methods.fedavg import FedAvg


@dataclass(frozen=True)
class ServerOptimizer(FedAvg):
    """Base of FedAdam, FedYogi, and FedAdagrad: θ ← θ + η m / (√v + τ), with the mean m and second moment v of Δ."""

    weights: Annotated[
        ClientWeights, "client weights: by number of samples (as in FedAvg) or uniform (as in Algorithm 2)"
    ] = "size"
    server_lr: Annotated[Positive, "η, server learning rate"] = 0.03
    beta1: Annotated[FractionBelow1, "β₁, decay of m, the mean of the changes Δ"] = 0.9
    tau: Annotated[Positive, "τ, degree of adaptivity: smaller values adapt more"] = 0.001
    initial_v: Annotated[NonNegative | None, "v before round 1 (0 in FLamby's code); none: τ², as in the paper"] = None

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """Return the new v, given the old one and Δ²."""
        raise NotImplementedError

    def init_server(self, setup: Setup) -> Tree:
        trainable = setup.model.trainable(setup.params)
        v = self.tau**2 if self.initial_v is None else self.initial_v
        moments = {"m": zeros_like(trainable), "v": map_leaves(lambda leaf: torch.full_like(leaf, v), trainable)}
        return {"params": setup.params, **moments}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return repeat({"params": server["params"]}, len(clients))

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        average = mean(exchange.received["params"], self.round_weights(exchange))
        start = exchange.model.trainable(server["params"])
        change = sub(exchange.model.trainable(average), start)  # Δ
        m = map_leaves(lambda old, new: self.beta1 * old + (1 - self.beta1) * new, server["m"], change)
        v = map_leaves(lambda old, new: self.second_moment(old, new.square()), server["v"], change)
        moved = map_leaves(lambda w, m, v: w + self.server_lr * m / (v.sqrt() + self.tau), start, m, v)
        return {"params": average | moved, "m": m, "v": v}  # running statistics are averaged
