"""Methods in which a client trains a model of its own, beside the common one or without it."""

from dataclasses import dataclass

from fedtailor.local import LocalView
from fedtailor.method import Exchange, Method, Setup
from fedtailor.trees import Tree, mean, squared_distance


@dataclass(frozen=True)
class Local(Method):
    """Training alone: every client from the common start, nothing crosses. The measure of every federation."""

    epochs: int = 2  # E, local epochs
    momentum: float = 0.0  # of local SGD
    weight_decay: float = 0.0  # of local SGD

    def init_server(self, setup: Setup) -> Tree:
        return {}

    def init_client(self, setup: Setup) -> Tree:
        return {"params": setup.params}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = local.sgd(local.loss, state["params"], **self.descent)
        return {"params": params}, {}

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        params: Tree = state["params"]
        return params


@dataclass(frozen=True)
class Ditto(Method):
    """Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021."""

    epochs: int = 2  # E, local epochs of both models
    momentum: float = 0.0  # of local SGD
    weight_decay: float = 0.0  # of local SGD
    lam: float = 1.0  # λ, pull of the own model towards the received one

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.lam >= 0, "lam", "at least 0")

    def init_client(self, setup: Setup) -> Tree:
        return {"own": setup.params}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = local.sgd(local.loss, message["params"], **self.descent)
        own = local.sgd(
            lambda v, batch: local.loss(v, batch) + self.lam / 2 * squared_distance(v, message["params"]),
            state["own"],
            **self.descent,
        )
        return {"own": own}, {"params": params}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes)

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        own: Tree = state["own"]
        return own
