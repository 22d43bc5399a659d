"""Methods that train one model for everyone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedtailor.local import LocalView
from fedtailor.method import Exchange, Method, Setup, SGDMethod
from fedtailor.trees import Tree, add, dot, mean, repeat, scale, squared_distance, squared_norms, sub, zeros_like


@dataclass(frozen=True)
class FedAvg(SGDMethod):
    """McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017."""

    weights: Literal["size", "uniform"] = "size"  # of clients in the average: by samples (the paper's), or all alike
    personal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_choice("weights", "size", "uniform")

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = local.sgd(local.loss, message["params"], **self.descent)
        return state, {"params": params}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes if self.weights == "size" else None)


@dataclass(frozen=True)
class FedProx(SGDMethod):
    """Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020."""

    mu: float = 0.1  # μ, pull towards the received model
    personal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.mu >= 0, "mu", "at least 0")

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = local.sgd(
            lambda w, batch: local.loss(w, batch) + self.mu / 2 * squared_distance(w, message["params"]),
            message["params"],
            **self.descent,
        )
        return state, {"params": params}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes)


@dataclass(frozen=True)
class Scaffold(Method):
    """Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, option II.

    Plain SGD only: momentum or weight decay would break the estimate of the gradient from (θ − y) / (K η).
    """

    lr: float = 0.1  # η, local learning rate
    epochs: int = 2  # local epochs, K batches in all
    server_lr: float = 1.0  # η_g, step of the server
    personal: ClassVar[bool] = False
    down: ClassVar[str] = "model, control"
    up: ClassVar[str] = "model, change of control"
    keeps: ClassVar[str] = "control"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.server_lr > 0, "server_lr", "above 0")

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.params, "control": zeros_like(setup.model.trainable(setup.params))}

    def init_client(self, setup: Setup) -> Tree:
        return {"control": zeros_like(setup.model.trainable(setup.params))}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        drift = sub(message["control"], state["control"])  # c − c_i
        params = local.sgd(
            lambda w, batch: local.loss(w, batch) + dot(drift, local.model.trainable(w)),
            message["params"],
            **self.descent,
        )
        delta = local.model.trainable(sub(params, message["params"]))
        control = sub(scale(delta, -1 / (local.steps(self.epochs) * self.lr)), drift)
        return {"control": control}, {"params": params, "control_delta": sub(control, state["control"])}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        average, share = mean(exchange.received), len(exchange.clients) / exchange.num_clients
        step = sub(average["params"], server["params"])
        return {
            "params": add(server["params"], scale(step, self.server_lr)),
            "control": add(server["control"], scale(average["control_delta"], share)),
        }


@dataclass(frozen=True)
class FedExP(SGDMethod):
    """Jhunjhunwala, Wang, Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023."""

    weights: Literal["size", "uniform"] = "uniform"  # of clients in the average: all alike (the paper's), or by samples
    epsilon: float = 0.001  # ε, keeps the step finite (0.1 for EMNIST in the paper)
    average_last: bool = True  # the model to use is the mean of the last two; training goes on from the last
    personal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_choice("weights", "size", "uniform")
        self.require(self.epsilon > 0, "epsilon", "above 0")

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.params, "previous": setup.params}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return repeat({"params": server["params"]}, len(clients))

    def serve(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        last, previous = server["params"], server["previous"]
        used = scale(add(last, previous), 0.5) if self.average_last else last
        return repeat({"params": used}, len(clients))

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = local.sgd(local.loss, message["params"], **self.descent)
        return state, {"params": params}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        weights = exchange.sizes if self.weights == "size" else torch.ones_like(exchange.sizes)
        average, trainable = mean(exchange.received["params"], weights), exchange.model.trainable
        changes = trainable(sub(exchange.received["params"], exchange.sent["params"]))  # Δ_i
        change = trainable(sub(average, server["params"]))  # their mean
        squares = mean({"mean": squared_norms(changes)}, weights)["mean"]
        step = (squares / (2 * (dot(change, change) + self.epsilon))).clamp(min=1)  # η_g
        moved = add(trainable(server["params"]), scale(change, step))
        return {"params": average | moved, "previous": server["params"]}  # running statistics are only averaged
