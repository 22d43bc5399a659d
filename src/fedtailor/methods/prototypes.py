"""Methods in which mean features of classes (prototypes) cross: what one client knows of a class helps the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.batch import Batch
from fedtailor.classes import class_counts, membership, merge_rows, pick_rows, prototypes
from fedtailor.discrepancy import squared_distances
from fedtailor.local import LocalView
from fedtailor.method import Exchange, Setup, SGDMethod
from fedtailor.model import Inputs, Model
from fedtailor.newcomers import newcomer_shares, seat
from fedtailor.simplex import least_mixtures
from fedtailor.trees import Params, Rows, Tree, combine, mean, put, repeat, scale, sub, take

_AT_ONCE = 2**22  # numbers of FedPAC's matrices in work at once; bounds memory, changes nothing else


def _no_prototypes(setup: Setup) -> Rows:
    """Before round 1: of no class."""
    classes, features = setup.model.head_size
    like = setup.like
    return Rows(like.new_zeros(classes, features), torch.zeros(classes, dtype=torch.bool, device=like.device))


def _aligned_loss(local: LocalView, params: Params, batch: Batch, targets: Rows, lam: float) -> Tensor:
    """Cross-entropy + λ · the mean over batch and dimensions of (z − c_y)², where class y has a c_y."""
    features = local.model.features(params, batch.x)
    loss = batch.mean(local.model.loss(local.model.answer(params, features), batch.y))
    centres, there = pick_rows(targets, batch.y)
    return loss + lam * batch.mean(there * (features - centres).square().mean(1))


@dataclass(frozen=True)
class FedProto(SGDMethod):
    """Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022.

    Only prototypes cross, every client trains a model of its own; in round 1 there are none yet to be near to. How the
    paper normalises its mean over the owners of a class is not settled: here the weights n_ik / Σ_i n_ik sum to 1, for
    on any other scale prototypes would not lie among features. A client's prototypes are those of its trained model,
    by one more pass; the authors' code means over the last epoch, while the model still moves. A class that nobody of
    the round has keeps its prototype. The local head answers until each of the client's classes has a prototype. As
    trained, a model answers by the prototypes it was trained with.
    """

    lam: float = 1.0  # λ, pull of features towards the prototypes of their classes
    answer: Literal["prototypes", "head"] = "prototypes"  # nearest prototype of the client's classes, or the local head
    weights: Literal["size", "uniform"] = "size"  # of clients in a prototype: by samples, or alike (the code's)
    down: ClassVar[str] = "prototypes"
    up: ClassVar[str] = "own prototypes, class sizes"
    keeps: ClassVar[str] = "own model"
    newcomer: ClassVar[str] = "the common prototypes; its model is the start"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.lam >= 0, "lam", "at least 0")
        self.require_choice("answer", "prototypes", "head")
        self.require_choice("weights", "size", "uniform")

    def init_server(self, setup: Setup) -> Tree:
        return {"prototypes": _no_prototypes(setup)}

    def init_client(self, setup: Setup) -> Tree:
        return {"params": setup.params}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = local.sgd(
            lambda w, batch: _aligned_loss(local, w, batch, message["prototypes"], self.lam),
            state["params"],
            **self.descent,
        )
        own = prototypes(local, params)
        counts = {"counts": Rows(class_counts(local), own.present)} if self.weights == "size" else {}
        return {"params": params}, {"prototypes": own, **counts}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        own = exchange.received["prototypes"]
        counts = exchange.received["counts"].values if self.weights == "size" else own.present
        return {"prototypes": merge_rows(server["prototypes"], own, counts)}

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        return self._model(state, message, class_counts(local) > 0)

    def trained(self, local: LocalView, state: Tree, message: Tree, upload: Tree) -> Tree:
        return self._model(state, message, upload["prototypes"].present)

    def _model(self, state: Tree, message: Tree, classes: Tensor) -> Tree:
        """The own network, and the global prototypes of the client's classes: of none while one is missing."""
        if self.answer == "head":
            return {**state["params"]}
        known = message["prototypes"]
        complete = (known.present | ~classes).all()
        return {**state["params"], "prototypes": Rows(known.values, classes & complete)}

    def logits(self, model: Model, personal: Tree, x: Inputs) -> Tensor:
        """−‖z − c_k‖²; classes the client does not have come last, at a finite distance."""
        features = model.features(personal, x)
        by_head = model.answer(personal, features)
        if self.answer == "head":
            return by_head
        values, present = personal["prototypes"]
        distances = squared_distances(features, values)
        beyond = 1 + 2 * torch.where(present, distances, 0).amax(1, keepdim=True)
        return torch.where(present.any(), -torch.where(present, distances, beyond), by_head)


@dataclass(frozen=True)
class FedGH(SGDMethod):
    """Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM MM 2023.

    Bodies are private. The server trains one head on all prototypes it received, client by client (the authors'
    scripts step another network, so that theirs never moves); a client trains body and head together from there and
    sends its prototypes, not its head. As trained, its model has the head it trained; as received, the server's.
    """

    server_lr: float = 0.01  # η of the server's head
    server_epochs: int = 1  # passes of the server over the prototypes of a round
    server_batch: int = 1  # prototypes in a step of the server
    down: ClassVar[str] = "head"
    up: ClassVar[str] = "own prototypes"
    keeps: ClassVar[str] = "body"
    newcomer: ClassVar[str] = "the common head; its body is the start's"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.server_lr >= 0, "server_lr", "at least 0")
        self.require(self.server_epochs >= 1, "server_epochs", "at least 1")
        self.require(self.server_batch >= 1, "server_batch", "at least 1")

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.split("head")[1]}

    def init_client(self, setup: Setup) -> Tree:
        return {"params": setup.params}  # its head is only kept to be evaluated

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = local.sgd(local.loss, state["params"] | message["params"], **self.descent)
        return {"params": params}, {"prototypes": prototypes(local, params)}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        own, model = exchange.received["prototypes"], exchange.model
        features = own.values[own.present]  # [prototypes, features]: absent ones are not samples of zeros
        labels = own.present.nonzero()[:, 1]

        def slope(head: Params, some: Tensor) -> Params:
            with torch.enable_grad():
                live = {name: leaf.detach().requires_grad_() for name, leaf in head.items()}
                loss = model.loss(model.answer(live, features[some]), labels[some]).mean()
                return dict(zip(live, torch.autograd.grad(loss, list(live.values())), strict=True))

        head = server["params"]
        for _ in range(self.server_epochs):
            for some in torch.split(torch.arange(len(labels), device=labels.device), self.server_batch):
                head = sub(head, scale(slope(head, some), self.server_lr))
        return {"params": head}

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        return {**state["params"], **message["params"]}

    def trained(self, local: LocalView, state: Tree, message: Tree, upload: Tree) -> Tree:
        return {**state["params"]}


@dataclass(frozen=True)
class FedPAC(SGDMethod):
    """Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR
    2023.

    The body is averaged; a client first trains its head, then the body, with features drawn to the global prototypes
    (from the second round on, as in the authors' code: before there are none); the server mixes heads for every client
    so that the mixture's expected error is least. A class that nobody of the round has keeps its prototype. P is a
    Gram matrix plus diag(V), so it is made positive by V ≥ 0 alone; the authors' code drops all its eigenvalues below
    0.01 where rounding makes one negative. A client whose best mixture cannot be told keeps its head.
    """

    lr: float = 0.1  # η, of the body (0.01 in the paper)
    epochs: int = 2  # E, passes for the body, after those for the head (5 in the paper)
    momentum: float = 0.5  # of local SGD, of both parts
    weight_decay: float = 0.0005  # of local SGD, of both parts
    head_lr: float = 0.1  # η_g, of the head
    head_epochs: int = 1  # passes for the head, before those for the body
    lam: float = 1.0  # λ, pull of features towards the prototypes of their classes
    mix: bool = True  # False: everyone keeps its own head
    smallest: float = 0.001  # weights of heads below it become 0
    down: ClassVar[str] = "body, own mixture of heads, prototypes"
    up: ClassVar[str] = "body, head, own prototypes, class sizes, statistics of features"
    newcomer: ClassVar[str] = "the common body, the mean head, the common prototypes"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.head_lr > 0, "head_lr", "above 0")
        self.require(self.head_epochs >= 0, "head_epochs", "at least 0")
        self.require(self.lam >= 0, "lam", "at least 0")
        self.require(0 <= self.smallest <= 1, "smallest", "at least 0 and at most 1")

    def init_server(self, setup: Setup) -> Tree:
        body, head = setup.split("head")
        return {"params": body, "heads": repeat(head, setup.num_clients), "prototypes": _no_prototypes(setup)}

    def welcome(self, server: Tree, setup: Setup, before: int) -> Tree:
        wide = super().welcome(server, setup, before)
        return wide | {"heads": seat(wide["heads"], newcomer_shares(wide["heads"], before))}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        common = repeat({"params": server["params"], "prototypes": server["prototypes"]}, len(clients))
        own = take(server["heads"], torch.tensor(clients))
        return common | {"params": common["params"] | own}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        received, head = local.model.split(message["params"])
        found = self._statistics(local, message["params"])
        moments = found["sums"] / local.size  # H_i[k] = p_k μ_k
        variance = (found["squares"] / local.size - moments.square().sum()) / local.size  # V_i

        phase = self.descent | {"lr": self.head_lr, "epochs": self.head_epochs}
        head = local.sgd(lambda h, batch: local.loss(received | h, batch), head, **phase)
        targets = self._targets(local, message["prototypes"], found)
        body = local.sgd(
            lambda b, batch: _aligned_loss(local, b | head, batch, targets, self.lam), received, **self.descent
        )
        params = body | head
        statistics = {"counts": found["counts"], "moments": moments, "variance": variance}
        return state, {"params": params, "prototypes": prototypes(local, params), **statistics}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        received = exchange.received
        bodies, heads = exchange.model.split(received["params"])
        if self.mix:
            heads = combine(self._weights(received["moments"], received["variance"]), heads)
        clients = torch.tensor(exchange.clients, device=received["variance"].device)
        return {
            "params": mean(bodies, exchange.sizes),
            "heads": put(server["heads"], clients, heads),
            "prototypes": merge_rows(server["prototypes"], received["prototypes"], received["counts"]),
        }

    def _statistics(self, local: LocalView, params: Params) -> Tree:
        """By the received body: how many samples of every class, sums of their features, the sum of all ‖z‖²."""
        classes, _ = local.model.head_size

        def sums(batch: Batch) -> Tree:
            features, member = local.model.serving.features(params, batch.x), membership(batch, classes)
            squares = (features.square().sum(1) * batch.weight).sum()
            return {"counts": member.sum(0), "sums": member.T @ features, "squares": squares}

        return local.total(sums)

    def _targets(self, local: LocalView, known: Rows, found: Tree) -> Rows:
        """Global prototypes; of a class without one the client's own before training. None in the first round."""
        own = found["sums"] / found["counts"].clamp(min=1)[:, None]
        aligned = torch.ones_like(known.present) if local.round > 1 else torch.zeros_like(known.present)
        return Rows(torch.where(known.present[:, None], known.values, own), aligned)

    def _weights(self, moments: Tensor, variances: Tensor) -> Tensor:
        """Row i: α = argmin αᵀP^iα with α ≥ 0 and Σα = 1, where P^i_jl = ⟨H_i − H_j, H_i − H_l⟩ + 1[j = l] V_j."""
        flat = moments.flatten(1).double()
        products, own = flat @ flat.T, torch.eye(len(flat), dtype=torch.float64, device=flat.device)
        squares = products.diagonal()  # ‖H_i‖²
        least = 1e-14 * squares.mean() + 1e-30  # a client of one sample has V = 0, but for rounding
        spread = torch.diag(variances.double().clamp(min=least))
        found = []
        for some in torch.split(torch.arange(len(flat), device=flat.device), max(1, _AT_ONCE // len(flat) ** 2)):
            rows = products[some]
            costs = squares[some, None, None] - rows[:, None, :] - rows[:, :, None] + products + spread
            found.append(least_mixtures(costs))
        weights = torch.cat(found)
        weights = torch.where(weights.isfinite().all(1, keepdim=True), weights, own)
        cut = weights.amax(1, keepdim=True).clamp(max=self.smallest)  # the largest stays, however many there are
        weights = torch.where(weights < cut, 0, weights)
        return weights / weights.sum(1, keepdim=True)
