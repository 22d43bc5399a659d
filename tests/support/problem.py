"""A tiny problem for literal versions of the papers' algorithms: data, loss, gradients, and the order of batches.

The literal versions share only the order of batches with the library, so that both take the same steps.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import tiny_federation
from fedtailor.core import random
from fedtailor.core.trees import Tree, flatten
from fedtailor.training.config import TrainingConfig
from fedtailor.training.simulate import make_trainer
from fedtailor.training.simulated_clients import SimulatedClients
from fedtailor.training.trainer import Trainer

Weights = dict[str, Tensor]  # parameter name -> tensor, float64
HEAD = ("head.weight", "head.bias")
BODY = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


class ThreeLayers(nn.Module):
    """A network with four inputs, hidden layers of five and four units, and three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 5)
        self.fc2 = nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))  # type: ignore[no-any-return]


class NormalizedNet(nn.Module):
    """A network with four inputs, batch normalization of five hidden units, optional dropout, and three classes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(dropout)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.norm(self.fc(x)))))  # type: ignore[no-any-return]


def make_normalized_net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return NormalizedNet(dropout).double()


# weights, and `ThreeLayers` as plain functions of its weights


def select_names(weights: Weights, names: Iterable[str]) -> Weights:
    return {name: weights[name] for name in names}


def with_grad(weights: Weights) -> Weights:
    """Return copies of the weights that require gradients."""
    return {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}


def features(weights: Weights, x: Tensor) -> Tensor:
    """Return the features of `ThreeLayers`, the inputs of its head."""
    hidden = torch.tanh(F.linear(x, weights["fc1.weight"], weights["fc1.bias"]))
    return torch.tanh(F.linear(hidden, weights["fc2.weight"], weights["fc2.bias"]))


def head_outputs(weights: Weights, z: Tensor) -> Tensor:
    """Return the outputs of the head of `ThreeLayers` for features."""
    return F.linear(z, weights["head.weight"], weights["head.bias"])


def inner(a: Weights, b: Weights) -> float:
    """⟨a, b⟩ over the entries of all tensors."""
    return sum(float((a[name] * b[name]).sum()) for name in a)


def minus(a: Weights, b: Weights) -> Weights:
    return {name: a[name] - b[name] for name in a}


def zeros(weights: Weights) -> Weights:
    return {name: torch.zeros_like(weight) for name, weight in weights.items()}


def mixture(shares: Sequence[float], parts: Sequence[Weights]) -> Weights:
    """Σ_i shares_i · part_i"""
    total = zeros(parts[0])
    for share, part in zip(shares, parts, strict=True):
        total = {name: total[name] + share * part[name] for name in total}
    return total


def average(parts: Sequence[Weights], shares: Sequence[float]) -> Weights:
    """Return the weighted mean; the shares may have any sum."""
    return mixture([share / sum(shares) for share in shares], parts)


@dataclass(frozen=True, eq=False)
class Problem:
    """Clients of different sizes, one network, and small batches, all in float64."""

    fed: ft.Federation
    net: nn.Module
    batch_size: int = 3
    seed: int = 0

    @property
    def num_clients(self) -> int:
        return self.fed.num_clients

    @property
    def sizes(self) -> list[int]:
        return [len(own) for own in self.fed.train]

    @property
    def start(self) -> Weights:
        """A new copy of the initial model."""
        return {name: weight.detach().clone() for name, weight in self.net.named_parameters()}

    def loss(self, weights: Weights, samples: Tensor) -> Tensor:
        """Return the mean cross-entropy on samples; the result is differentiable."""
        outputs = torch.func.functional_call(self.net, weights, (self.fed.x[samples],))
        return F.cross_entropy(outputs, self.fed.y[samples])

    def gradient(self, weights: Weights, samples: Tensor) -> Weights:
        """Return the gradient of `loss` with respect to all weights."""
        live = with_grad(weights)
        grads = torch.autograd.grad(self.loss(live, samples), list(live.values()))
        return dict(zip(live, grads, strict=True))

    def all_samples(self, client: int) -> Tensor:
        """Return all training samples of a client, for `loss` and `gradient`."""
        return self.fed.train[client]

    def batches(self, round: int, client: int, number: int, own: Tensor | None = None) -> list[Tensor]:
        """Return the batches of a client's epoch `number` (0, 1, ...) in a round (1, 2, ...), in order.

        Each call of SGD in a round starts at epoch 0. `own` are the samples of the client, by default all.
        """
        key = random.make_key(self.seed, round, 1, number, torch.tensor(client))
        own = self.fed.train[client] if own is None else own
        order = random.permutation(key, len(own), None, own.device)
        return list(torch.split(own[order], self.batch_size))

    def sgd(
        self, weights: Weights, round: int, client: int, *, lr: float = 0.1, epochs: int = 2, momentum: float = 0.0,
        weight_decay: float = 0.0, names: Iterable[str] | None = None,
        loss: Callable[[Weights, Tensor], Tensor] | None = None, own: Tensor | None = None,
    ) -> Weights:  # fmt: skip
        """Run the steps of `torch.optim.SGD` on the weights with the given names, by default all of them.

        `loss` is a function of weights and samples, by default `self.loss`; `own` are the samples, by default all.
        """
        trained, objective = list(weights if names is None else names), loss or self.loss
        weights, velocity = dict(weights), {name: torch.zeros_like(weights[name]) for name in trained}
        for number in range(epochs):
            for batch in self.batches(round, client, number, own):
                live = with_grad(select_names(weights, trained))
                grads = torch.autograd.grad(objective(weights | live, batch), list(live.values()), allow_unused=True)
                for name, grad in zip(trained, grads, strict=True):
                    step = weight_decay * weights[name] + (0 if grad is None else grad)
                    velocity[name] = momentum * velocity[name] + step
                    weights[name] = weights[name] - lr * velocity[name]
        return weights

    def stream(self, round: int, client: int) -> Iterator[Tensor]:
        """Yield batches without end, epoch after epoch."""
        number = 0
        while True:
            yield from self.batches(round, client, number)
            number += 1

    def trainer(self, method: ft.Method, schedule: Sequence[Sequence[int]]) -> Trainer[SimulatedClients]:
        """Return the trainer of a method of the library before round 1."""
        config = TrainingConfig(
            batch_size=self.batch_size,
            engine="sequential",
            device="cpu",
            dtype="float64",
            seed=self.seed,
            schedule=[list(clients) for clients in schedule],
        )
        return make_trainer(config, method, ft.wrap(self.net), self.fed)[0]

    def initial_server(self, method: ft.Method, seed: int = 0) -> Tree:
        """Return the server state of a method of the library before round 1."""
        sizes = torch.tensor(self.sizes)
        return method.init_server(ft.Setup(ft.wrap(self.net), self.start, self.num_clients, sizes, 3, seed))

    def run(self, method: ft.Method, schedule: Sequence[Sequence[int]]) -> ft.Run:
        """Run a method of the library on this problem."""
        return ft.simulate(
            method, self.net, self.fed, schedule=schedule, batch_size=self.batch_size, dtype=torch.float64,
            seed=self.seed, engine="sequential", device="cpu",
        )  # fmt: skip


def make_problem(sizes: Sequence[int] = (9, 4, 7, 1, 6), batch_size: int = 3) -> Problem:
    """Create the default problem: five clients, one of them with a single sample."""
    torch.manual_seed(0)
    return Problem(tiny_federation(sizes), ThreeLayers().double(), batch_size)


def make_identical_clients(count: int, size: int = 6) -> Problem:
    """Create clients with the same samples in one batch, so that their changes are equal."""
    one = tiny_federation((size,))
    own = (one.x[one.train[0]], one.y[one.train[0]], one.x[one.test[0]], one.y[one.test[0]])
    fed = ft.Federation.from_arrays([own] * count, classes=3)
    return Problem(fed, make_problem().net, batch_size=size)


def assert_finite(run: ft.Run) -> None:
    """Check that all values in states, personal models, and method metrics are finite."""
    trees = [run.server]
    for client in range(run.num_clients):
        trees += [run.client(client), run.personal(client, "received"), run.personal(client, "trained")]
    assert all(bool(leaf.isfinite().all()) for tree in trees for leaf in flatten(tree).values())
    for record in run.records:
        values = [torch.as_tensor(value).double() for value in record["method_metrics"].values()]
        assert all(bool(value.isfinite().all()) for value in values)
        assert all(math.isfinite(value) for own in record["per_client"].values() for value in own.values())


FULL = [[0, 1, 2, 3, 4]] * 6
PARTIAL = [[0, 1, 2], [2, 3], [0, 3, 4], [1], [0, 1, 2, 3, 4], [0, 2, 4], [1, 2]]
