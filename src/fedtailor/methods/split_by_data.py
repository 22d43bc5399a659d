"""Methods that share a part of the model, where the client's data say how much a body counts, or what is shared."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.batch import Batch
from fedtailor.classes import pick_rows, prototypes
from fedtailor.local import LocalView
from fedtailor.method import Exchange, Setup, SGDMethod
from fedtailor.trees import Params, Tree, combine, dot, map_leaves, mean, put, repeat, take

_STILL = 1e-10  # a sensitivity up to this is none: below, rounding would choose


@dataclass(frozen=True)
class FedAS(SGDMethod):
    """Yang, Huang, Ye, "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024.

    Before it trains, a client brings the features of the received body near the class means of its own last body's, so
    that they fit its head again. A body then counts by its Fisher information F_i, as in the authors' code: a sum over
    batches, so more data count more, and so does a loss that is not yet flat. The paper may intend that under-trained
    clients count less; the code's direction is kept, for its results come from it. The client's model is the one it has
    trained, also at the moment `received`. Alignment takes the run's batches (of 16 in the code).
    """

    align_epochs: int = 1  # epochs of alignment; 0: none
    align_lr: float = 0.01  # learning rate of alignment (the code's, mild beside our lr)
    weights: Literal["fisher", "size", "uniform"] = "fisher"  # of bodies in the average: F_i, by samples, or all alike
    down: ClassVar[str] = "body"
    up: ClassVar[str] = "body, Fisher weight"
    keeps: ClassVar[str] = "own model"
    newcomer: ClassVar[str] = "the common body; its head is the start's"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.align_epochs >= 0, "align_epochs", "at least 0")
        self.require(self.align_lr > 0, "align_lr", "above 0")
        self.require_choice("weights", "fisher", "size", "uniform")

    @property
    def plain_mean(self) -> bool:
        return self.weights == "uniform"

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.split("head")[0]}

    def init_client(self, setup: Setup) -> Tree:
        return {"params": setup.params}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        own, body = state["params"], message["params"]
        if self.align_epochs:
            body = self._align(local, own, body)
        params = local.sgd(local.loss, own | body, **self.descent)
        upload = {"params": local.model.split(params, "head")[0]}
        return {"params": params}, upload | ({"fisher": _fisher(local, params)} if self.weights == "fisher" else {})

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        weights = exchange.sizes if self.weights == "size" else None
        if self.weights == "fisher":
            # with the least there is, so that clients count alike where all have converged and every F_i is 0
            weights = exchange.received["fisher"].double() + torch.finfo(torch.float64).tiny
        return {"params": mean(exchange.received["params"], weights)}

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        params: Tree = state["params"]
        return params

    def _align(self, local: LocalView, own: Params, received: Params) -> Params:
        """The received body, trained towards the class means q_k of the own body's features."""
        means = prototypes(local, own)

        def apart(body: Params, batch: Batch) -> Tensor:
            """The mean squared error of every class in the batch, summed over classes."""
            target, _ = pick_rows(means, batch.y)
            errors = (local.model.features(own | body, batch.x) - target).square().mean(1)
            of_its_class = ((batch.y[:, None] == batch.y) * batch.weight).sum(1)
            return (errors * batch.weight / of_its_class.clamp(min=1)).sum()

        return local.sgd(apart, received, lr=self.align_lr, epochs=self.align_epochs)


def _fisher(local: LocalView, params: Params) -> Tensor:
    """F_i = Σ over batches of ‖∇ mean loss of the batch‖², by the model as it serves."""
    serving = local.model.serving

    def loss(params: Params, batch: Batch) -> Tensor:
        return batch.mean(serving.loss(serving.logits(params, batch.x), batch.y))

    def squared_norm(batch: Batch) -> Tree:
        slope = serving.trainable(local.slope(loss, params, batch))
        return {"fisher": dot(slope, slope)}

    total: Tensor = local.total(squared_norm)["fisher"]
    return total


@dataclass(frozen=True)
class FedCAC(SGDMethod):
    """Wu et al., "Bold but Cautious: Unlocking the Potential of Personalized Federated Learning through Cautiously
    Aggressive Collaboration", ICCV 2023.

    The share τ of every tensor whose change matters most is critical. Those numbers come from the mean of clients with
    much the same critical ones, all others from the common model θ; past round β, critical ones are a client's own.
    The server mixes, so that one model crosses down. The paper has everyone in every round: where some are away, the
    server keeps the last model and mask of all who ever took part, and mixes anew for whoever is next; a client that
    never did gets θ. What moved by 1e-10 or less is not critical, for rounding would choose. Running statistics are
    averaged like θ.
    """

    tau: float = 0.5  # τ, share of every tensor that is critical (0.4 for CIFAR-100 in the paper)
    beta: float = 100.0  # β, the round after which nobody collaborates (170 for CIFAR-100 in the paper)
    down: ClassVar[str] = "own mixture of models"
    up: ClassVar[str] = "model, a bit a parameter"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 <= self.tau <= 1, "tau", "from 0 to 1")
        self.require(self.beta > 0, "beta", "above 0")

    def init_server(self, setup: Setup) -> Tree:
        count, learnt = setup.num_clients, setup.model.trainable(setup.params)
        nothing = map_leaves(lambda leaf: torch.zeros_like(leaf, dtype=torch.bool), learnt)
        return {
            "params": setup.params,  # θ
            "models": repeat(learnt, count),  # θ_i as last uploaded
            "critical": repeat(nothing, count),  # M_i
            "collaborators": setup.sizes.new_zeros(count, count, dtype=torch.bool),  # [i, j]: j is one of i's
        }

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        chosen = torch.tensor(clients, device=server["collaborators"].device)
        rows = server["collaborators"][chosen].double()
        custom = combine(rows / rows.sum(1, keepdim=True).clamp(min=1), server["models"])  # ĉ_i
        common = {name: server["params"][name] for name in server["models"]}
        mixed = map_leaves(torch.where, take(server["critical"], chosen), custom, repeat(common, len(clients)))
        return {"params": repeat(server["params"], len(clients)) | mixed}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = local.sgd(local.loss, message["params"], **self.descent)
        before, after = (local.model.trainable(tree) for tree in (message["params"], params))
        return state, {"params": params, "critical": map_leaves(self._critical, before, after)}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        received = exchange.received
        clients = torch.tensor(exchange.clients, device=server["collaborators"].device)
        critical = put(server["critical"], clients, received["critical"])
        known = server["collaborators"].diagonal().index_fill(0, clients, True)  # who took part is its own
        return {
            "params": mean(received["params"], exchange.sizes),
            "models": put(server["models"], clients, exchange.model.trainable(received["params"])),
            "critical": critical,
            "collaborators": self._collaborators(critical, known, exchange.round),
        }

    def _critical(self, before: Tensor, after: Tensor) -> Tensor:
        """Where a tensor is most sensitive, |(after − before) · after|."""
        sensitivity = ((after - before) * after).abs()
        count = int(self.tau * sensitivity.numel())
        if count == 0:
            return torch.zeros_like(sensitivity, dtype=torch.bool)
        least = sensitivity.flatten().topk(count).values[-1]
        return (sensitivity >= least) & (sensitivity > _STILL)

    def _collaborators(self, critical: Params, known: Tensor, round: int) -> Tensor:
        """Who of those that took part overlaps with whom by more than a threshold, which rises from the mean to the
        largest overlap; everybody with itself, and who has nothing critical with nobody else."""
        own, overlap = torch.diag(known), overlaps(critical)
        some = known & torch.stack([mask.flatten(1).any(1) for mask in critical.values()]).any(0)
        pairs = (some & some[:, None]) & ~own
        if not pairs.any():
            return own
        usual, largest = overlap[pairs].mean(), overlap[pairs].max()
        threshold = usual + round / self.beta * (largest - usual)
        return own | (pairs & (overlap >= threshold - 1e-12))  # rounding must not part equals


def overlaps(masks: Params) -> Tensor:
    """O_ij = 1 − ‖M_i − M_j‖₁ / (2 ‖M_i‖₁) of stacked masks, [clients, clients].

    >>> overlaps({"w": torch.tensor([[True, True, False], [False, True, True]])})
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]], dtype=torch.float64)
    """
    rows = [mask.flatten(1).float() for mask in masks.values()]
    both = torch.stack([(row @ row.T).double() for row in rows]).sum(0)  # in float32 exact up to 2²⁴ a tensor
    sizes = both.diagonal()
    apart = sizes[:, None] + sizes - 2 * both
    return 1 - apart / (2 * sizes[:, None].clamp(min=1))
