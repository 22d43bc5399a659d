"""Methods in which a client trains a model of its own, beside the common one or without it."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.batch import Batch
from fedtailor.classes import class_counts
from fedtailor.discrepancy import mean_discrepancy
from fedtailor.local import LocalView
from fedtailor.method import Exchange, Method, Setup, SGDMethod
from fedtailor.model import Inputs, Model
from fedtailor.trees import Tree, add, mean, scale, squared_distance, sub, zeros_like

_TEMPERATURE = 4.0  # of FedPHP's teacher


@dataclass(frozen=True)
class Local(SGDMethod):
    """Training alone: every client from the common start, nothing crosses. The measure of every federation."""

    down: ClassVar[str] = "nothing"
    up: ClassVar[str] = "nothing"
    keeps: ClassVar[str] = "own model"
    newcomer: ClassVar[str] = "nothing: its model is the start"

    @property
    def plain_mean(self) -> bool:
        return True

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
    newcomer: ClassVar[str] = "the common model, where its own begins"

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
    newcomer: ClassVar[str] = "the common model, where its own begins"

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


@dataclass(frozen=True)
class FedPHP(SGDMethod):
    """Li et al., "FedPHP: Federated Personalization with Inherited Private Models", ECML-PKDD 2021.

    A client's own model is a running mean of its past local models, in which a new one counts less the more rounds the
    client took part in. It is what the client uses, and it teaches the next local training, as in the authors' code. In
    a batch without spread (a lone example) their kernels pull without bound, which they meet by clipping gradients;
    here the bandwidth is at least a hundredth of the mean squared feature. For models that classify.
    """

    lam: float = 0.1  # λ, share of the teaching in the loss
    mu: float = 0.9  # μ, largest share of the past in the own model
    teaching: Literal["mmd", "kd"] = "mmd"  # R, to be like the own model in its features, or in its answers
    keeps: ClassVar[str] = "own model, 1 number"
    newcomer: ClassVar[str] = "the common model, where its own begins"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 <= self.lam < 1, "lam", "at least 0 and below 1")
        self.require(0 <= self.mu < 1, "mu", "at least 0 and below 1")
        self.require_choice("teaching", "mmd", "kd")

    def init_client(self, setup: Setup) -> Tree:
        return {"own": setup.params, "taken": setup.like.new_zeros(())}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        model, own, taken = local.model, state["own"], state["taken"]

        def objective(params: Tree, batch: Batch) -> Tensor:
            features, taught = model.features(params, batch.x), model.serving.features(own, batch.x)
            answers = model.answer(params, features)
            if self.teaching == "mmd":
                regularizer = mean_discrepancy(features, taught, batch.weight, _bandwidths(features, taught, batch))
            else:
                target = torch.softmax(model.answer(own, taught) / _TEMPERATURE, 1)  # only the teacher's is tempered
                regularizer = batch.mean(F.cross_entropy(answers, target, reduction="none"))
            return (1 - self.lam) * batch.mean(model.loss(answers, batch.y)) + self.lam * regularizer

        params = local.sgd(objective, message["params"], **self.descent)
        expected = max(int(local.participation * local.rounds + 1e-9), 1)  # rounds a client takes part in
        past = (self.mu * taken / expected).clamp(max=self.mu)
        own = add(scale(own, past), scale(params, 1 - past))
        return {"own": own, "taken": taken + 1}, {"params": params}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes)

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        own: Tree = state["own"]
        return own


def _bandwidths(x: Tensor, y: Tensor, batch: Batch) -> list[Tensor]:
    """Of five kernels, around the mean squared distance of all pairs in both sets together."""
    both, weight = torch.cat([x, y]).detach(), torch.cat([batch.weight, batch.weight])
    count = weight.sum().clamp(min=2)
    apart = (both - weight @ both / count).square().sum(1)  # Σ_ij ‖a_i − a_j‖² = 2 n Σ_i ‖a_i − ā‖²
    least = 0.01 * (weight @ both.square().sum(1)) / count
    base = torch.maximum(2 * (weight @ apart) / (count - 1), least) + 1e-8
    return [base * 2.0**power for power in (-2, -1, 0, 1, 2)]


@dataclass(frozen=True)
class FedRoD(SGDMethod):
    """Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022.

    Two heads on one body. The generic one and the body learn by balanced softmax, as if the client had as much of every
    class; the own one learns what its real classes add, and no gradient of its loss reaches the rest. Both step from
    the same features of a batch. The official code is not public: the own head begins at zero, for a copy of the
    generic one, as in other code, would double all answers; the paper's hypernetwork for it is left out.
    """

    gamma: float = 1.0  # γ, a class counts by its samples to this power in the balanced softmax
    keeps: ClassVar[str] = "own head"
    newcomer: ClassVar[str] = "the common model; its own head begins at 0"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.gamma >= 0, "gamma", "at least 0")

    def init_client(self, setup: Setup) -> Tree:
        return {"head": zeros_like(setup.split("head")[1])}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        model, counts = local.model, class_counts(local)
        prior = self.gamma * counts.clamp(min=torch.finfo(counts.dtype).tiny).log()  # log π, finite for absent classes

        def objective(parts: Tree, batch: Batch) -> Tensor:
            features = model.features(parts["params"], batch.x)
            generic = model.answer(parts["params"], features)
            both = generic.detach() + model.answer(parts["head"], features.detach())
            return batch.mean(model.loss(generic + prior, batch.y) + model.loss(both, batch.y))  # L_G + L_P

        end = local.sgd(objective, {"params": message["params"], "head": state["head"]}, **self.descent)
        return {"head": end["head"]}, {"params": end["params"]}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes)

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        return {**message["params"], "own_head": state["head"]}

    def logits(self, model: Model, personal: Tree, x: Inputs) -> Tensor:
        features = model.features(personal, x)
        return model.answer(personal, features) + model.answer(personal["own_head"], features)
