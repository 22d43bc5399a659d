"""A method that shares neither models nor data but samples learnt to stand for the data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.batch import Batch, Common
from fedtailor.classes import class_means, membership, merge_rows
from fedtailor.errors import Refused
from fedtailor.local import LocalView
from fedtailor.method import Exchange, Method, Setup
from fedtailor.model import Inputs
from fedtailor.trees import Params, Rows, Tree, repeat

_START, _DIRECTIONS, _FRESH = 0, 1, 2  # salts of random numbers; from the last on, every parameter has its own
_SMALLEST = 1e-12  # of a probability, so that its logarithm is finite


@dataclass(frozen=True)
class FedAF(Method):
    """Wang et al., "An Aggregation-Free Federated Learning for Tackling Data Heterogeneity", CVPR 2024.

    A client learns a few synthetic samples of each of its classes, anew in every round, so that a network sees them as
    it sees the real ones: the same mean features (L_DM), and logits near the mean logits V_c of all clients, by a
    sliced Wasserstein distance. The server trains the common model on everyone's, and matches its soft labels to those
    that clients took from real data.

    Privacy: synthetic samples are made to resemble private data and are seen by the server. Those that begin at real
    samples still look like them, and a class with few samples may be recognised one by one. `noise` keeps samples from
    crossing as they are; it is no protection in any strict sense. start="noise" begins at no sample, learns slowly
    (give it more steps), and tends to the mean of a class: where that is one sample, to that sample.

    No code of the authors is known. Decided here: means of real data are over all of them, for the network stands
    still; the distance is the squared one of order 2, to V_c as a single point; V_c is of the round before, and a class
    of which nobody has told yet has none; w̃ is as linear and convolutional layers usually begin, own to client and
    round; logits and soft labels are w_k's, so the latter follow from the former and cross all the same, as in the
    paper; T_c is the mean over a batch.
    """

    lr: float = 1.0  # step of the synthetic samples
    steps: int = 10  # steps of the synthetic samples in a round
    per_class: int = 10  # ipc, synthetic samples of every class a client has
    start: Literal["real", "noise"] = "real"  # they begin at samples of the client with noise, or at noise alone
    noise: float = 0.1  # deviation of that noise
    gamma: float = 0.9  # γ, share of the received model w in w_k = γ w + (1 − γ) w̃, by which samples are learnt
    tau: float = 2.0  # τ, temperature of soft labels
    local_weight: float = 0.8  # λ_loc, of the distance between logits
    server_weight: float = 0.8  # λ_glob, of the distance between soft labels
    projections: int = 100  # directions of the sliced distance
    server_lr: float = 0.1  # learning rate of the server (0.001 in a re-implementation)
    server_epochs: int = 20  # passes of the server over all synthetic samples
    server_batch: int = 256  # synthetic samples in a batch of the server
    personal: ClassVar[bool] = False
    down: ClassVar[str] = "model, mean logits of classes"
    up: ClassVar[str] = "synthetic samples, mean logits and soft labels of own classes"
    newcomer: ClassVar[str] = "the common model, the mean logits of classes"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "per_class", "projections", "server_epochs", "server_batch"):
            self.require(getattr(self, name) >= 1, name, "at least 1")
        self.require_choice("start", "real", "noise")
        self.require(0 <= self.gamma <= 1, "gamma", "between 0 and 1")
        self.require(self.noise > 0, "noise", "above 0, so that no sample crosses as it is")
        for name in ("tau", "server_lr"):
            self.require(getattr(self, name) > 0, name, "above 0")
        for name in ("local_weight", "server_weight"):
            self.require(getattr(self, name) >= 0, name, "at least 0")

    def init_server(self, setup: Setup) -> Tree:
        classes, _ = setup.model.head_size
        like = setup.like
        seed = torch.tensor(setup.seed, device=like.device)
        return {"params": setup.params, "class_logits": like.new_zeros(classes, classes), "seed": seed}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return repeat({name: server[name] for name in ("params", "class_logits")}, len(clients))

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params, target, model = self._resample(local, message["params"]), message["class_logits"], local.model.serving
        classes, width = model.head_size

        def see(x: Inputs) -> Tensor:
            features = model.features(params, x)
            return torch.cat([features, model.answer(params, features)], 1)

        real = class_means(local, lambda batch: see(_tensor(batch.x)))
        features, logits = real.values[:, :width], real.values[:, width:]
        known = (target != 0).any(1) & real.present  # a row of zeros: nobody has told of that class yet
        directions = F.normalize(_normal(local, (self.projections, classes), _DIRECTIONS), dim=1)

        def objective(learnt: Tree, _: Batch) -> Tensor:
            seen = see(learnt["samples"].flatten(0, 1)).reshape(classes, self.per_class, -1)
            matching = (seen[..., :width].mean(1) - features).square().sum(1)  # [classes]
            sliced = ((seen[..., width:] - target[:, None]) @ directions.T).square().mean((1, 2))
            total: Tensor = (matching * real.present).sum() + self.local_weight * (sliced * known).sum()
            return total

        learnt = local.sgd(objective, {"samples": self._begin(local, classes)}, lr=self.lr, steps=self.steps)
        return state, {
            "samples": Rows(learnt["samples"], real.present),
            "own_logits": Rows(logits, real.present),
            "soft_labels": Rows(F.softmax(logits / self.tau, 1), real.present),
        }

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        samples, present = exchange.received["samples"]  # [clients, classes, per_class, ...], [clients, classes]
        old = Rows(server["class_logits"], torch.ones_like(present[0]))
        logits, soft = (
            merge_rows(old, exchange.received[name], present).values for name in ("own_logits", "soft_labels")
        )
        labels = torch.arange(len(soft), device=present.device).expand_as(present)[present]
        x, y = samples[present].flatten(0, 1), labels.repeat_interleave(self.per_class)
        pool = _view(exchange, x, y, self.server_batch, int(server["seed"]))

        def objective(params: Tree, batch: Batch) -> Tensor:
            answers, member = pool.model.logits(params, batch.x), membership(batch, len(soft))
            counts = member.sum(0)
            own = member.T @ F.softmax(answers / self.tau, 1) / counts.clamp(min=1)[:, None]  # T_c
            ratio = own.clamp(min=_SMALLEST).log() - soft.clamp(min=_SMALLEST).log()
            matching = ((own - soft) * ratio).sum(1) / 2  # half of KL(R_c‖T_c) + KL(T_c‖R_c)
            losses = F.cross_entropy(answers, batch.y, reduction="none")
            return batch.mean(losses) + self.server_weight * (matching * (counts > 0)).sum()

        params = pool.sgd(objective, server["params"], lr=self.server_lr, epochs=self.server_epochs)
        return server | {"params": params, "class_logits": logits}

    def _resample(self, local: LocalView, params: Params) -> Params:
        """w_k = γ w + (1 − γ) w̃; normalisation stays."""
        fresh: Params = {}
        for names in local.model.layers().values():
            bound = max(math.prod(params[name].shape[1:]) for name in names) ** -0.5  # by the inputs of a unit
            for name in names:
                numbers = local.uniform(tuple(params[name].shape), _FRESH + len(fresh))
                fresh[name] = self.gamma * params[name] + (1 - self.gamma) * bound * (2 * numbers - 1)
        return params | fresh

    def _begin(self, local: LocalView, classes: int) -> Tensor:
        """Where synthetic samples begin, [classes, per_class, ...]; never a real sample as it is."""
        shape = (classes, self.per_class, *local.outputs(_tensor, 1).shape[1:])
        noise = self.noise * _normal(local, shape, _START)
        return noise if self.start == "noise" else self._pick(local, torch.zeros_like(noise)) + noise

    def _pick(self, local: LocalView, nothing: Tensor) -> Tensor:
        """The first samples of every class in this round's order; where a class has fewer, they are repeated."""
        classes, places = len(nothing), torch.arange(self.per_class, device=nothing.device)

        def place(carry: Tree, batch: Batch) -> Tree:
            member = membership(batch, classes)
            rank = carry["counts"] + member.cumsum(0) - 1  # [examples, classes]
            chosen = member[..., None] * (rank[..., None] == places)  # [examples, classes, places]
            found = torch.tensordot(chosen, batch.x, dims=([0], [0]))
            return {"samples": carry["samples"] + found, "counts": carry["counts"] + member.sum(0)}

        end = local.fold(place, {"samples": nothing, "counts": nothing.flatten(1)[:, 0]}, epochs=1)
        again = places.to(nothing.dtype) % end["counts"].clamp(min=1)[:, None]
        copies = (again[..., None] == places).to(nothing.dtype)  # [classes, places, places]
        picked: Tensor = copies @ end["samples"].flatten(2)
        return picked.reshape(nothing.shape)


def _tensor(x: Inputs) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise Refused("FedAF learns samples by their slope, so inputs must be one tensor of numbers, such as pictures.")
    return x


def _normal(local: LocalView, shape: tuple[int, ...], salt: int) -> Tensor:
    """Random numbers with mean 0 and deviation 1."""
    numbers: Tensor = torch.special.ndtri(local.uniform(shape, salt))
    return numbers


def _view(exchange: Exchange, x: Tensor, y: Tensor, batch_size: int, seed: int) -> LocalView:
    """The server's view of all synthetic samples: it trains on them as a client does on its data."""
    common = Common(
        model=exchange.model.mode(training=True),
        x=x,
        y=y,
        prepare=lambda x: x,
        batch_size=max(min(batch_size, len(y)), 2 if exchange.model.statistics else 1),  # one alone has no statistics
        rounds=exchange.round,
        num_clients=1,
        total_size=len(y),
        seed=seed,
        dtype=x.dtype,
    )
    every = torch.arange(len(y), device=y.device)
    return LocalView(common, exchange.round, every.new_zeros(()), every.new_tensor(len(y)), every)
