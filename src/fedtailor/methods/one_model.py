"""Methods that train one model for everyone."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedtailor.local import LocalView
from fedtailor.method import Exchange, Method, Setup
from fedtailor.trees import Tree, add, dot, mean, scale, squared_distance, sub, zeros_like


@dataclass(frozen=True)
class FedAvg(Method):
    """McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017."""

    epochs: int = 2  # E, local epochs
    momentum: float = 0.0  # of local SGD
    weight_decay: float = 0.0  # of local SGD
    weights: Literal["size", "uniform"] = "size"  # of clients in the average: by samples (the paper's), or all alike
    personal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.weights in ("size", "uniform"), "weights", "'size' or 'uniform'")

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = local.sgd(local.loss, message["params"], **self.descent)
        return state, {"params": params}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes if self.weights == "size" else None)


@dataclass(frozen=True)
class FedProx(Method):
    """Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020."""

    epochs: int = 2  # E, local epochs
    momentum: float = 0.0  # of local SGD
    weight_decay: float = 0.0  # of local SGD
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

    epochs: int = 2  # local epochs, K batches in all
    server_lr: float = 1.0  # η_g, step of the server
    personal: ClassVar[bool] = False

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
