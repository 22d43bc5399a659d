"""Methods in which a client trains a model of its own, beside the common one or without it."""

from dataclasses import dataclass
from typing import ClassVar

from fedtailor.batch import Batch
from fedtailor.local import LocalView
from fedtailor.method import Exchange, Method, Setup, SGDMethod
from fedtailor.trees import Tree, add, mean, scale, squared_distance, sub


@dataclass(frozen=True)
class Local(SGDMethod):
    """Training alone: every client from the common start, nothing crosses. The measure of every federation."""

    down: ClassVar[str] = "nothing"
    up: ClassVar[str] = "nothing"
    keeps: ClassVar[str] = "own model"

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
class Ditto(SGDMethod):
    """Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021."""

    lam: float = 1.0  # λ, pull of the own model towards the received one
    keeps: ClassVar[str] = "own model"

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


@dataclass(frozen=True)
class PFedMe(Method):
    """Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020."""

    lr: float = 0.05  # η, step of the client's copy w_i of the common model (0.005 in the paper)
    personal_lr: float = 0.09  # η_p, step of its own model
    lam: float = 15.0  # λ, pull of the own model towards w_i
    inner_steps: int = 5  # K, steps of the own model a batch
    steps: int = 20  # R, batches a round
    beta: float = 1.0  # β, share of the new average in the common model
    keeps: ClassVar[str] = "own model"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.personal_lr > 0, "personal_lr", "above 0")
        self.require(self.lam > 0, "lam", "above 0")
        self.require(self.lr * self.lam < 1, "lr", "below 1/lam")
        self.require(self.inner_steps >= 1, "inner_steps", "at least 1")
        self.require(self.steps >= 1, "steps", "at least 1")
        self.require(self.beta > 0, "beta", "above 0")

    def init_client(self, setup: Setup) -> Tree:
        return {"own": setup.params}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        def step(carry: Tree, batch: Batch) -> Tree:
            params, own = carry["params"], carry["own"]
            for _ in range(self.inner_steps):
                pull = add(local.slope(local.loss, own, batch), scale(sub(own, params), self.lam))
                own = sub(own, scale(pull, self.personal_lr))
            return {"params": sub(params, scale(sub(params, own), self.lr * self.lam)), "own": own}

        start = {"params": message["params"], "own": message["params"]}
        end = local.fold(step, start, steps=self.steps)
        return {"own": local.refresh(end["own"])}, {"params": local.refresh(end["params"])}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        average = mean(exchange.received["params"], exchange.sizes)
        old, new = (exchange.model.trainable(tree) for tree in (server["params"], average))
        return {"params": average | add(scale(old, 1 - self.beta), scale(new, self.beta))}

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        own: Tree = state["own"]
        return own
