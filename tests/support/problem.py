"""A tiny problem for literal versions of the papers' algorithms: data, loss, gradients, and the order of batches.

The literal versions share only the order of batches with the library, so that both take the same steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import tiny_federation
from fedtailor.core import random

Weights = dict[str, Tensor]  # parameter name -> tensor, float64


class ThreeLayers(nn.Module):
    """A network with four inputs, hidden layers of five and four units, and three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 5)
        self.fc2 = nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))  # type: ignore[no-any-return]


def average(parts: Sequence[Weights], shares: Sequence[float]) -> Weights:
    """Return the weighted mean; the shares may have any sum."""
    return {
        name: sum((part[name] * share for part, share in zip(parts, shares, strict=True)), torch.zeros(()))
        / sum(shares)
        for name in parts[0]
    }


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
        live = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        grads = torch.autograd.grad(self.loss(live, samples), list(live.values()))
        return dict(zip(live, grads, strict=True))

    def all_samples(self, client: int) -> Tensor:
        """Return all training samples of a client, for `loss` and `gradient`."""
        return self.fed.train[client]

    def batches(self, round: int, client: int, number: int) -> list[Tensor]:
        """Return the batches of a client's epoch `number` (0, 1, ...) in a round (1, 2, ...), in order.

        Each call of SGD in a round starts at epoch 0.
        """
        key = random.make_key(self.seed, round, 1, number, torch.tensor(client))
        own = self.fed.train[client]
        order = random.permutation(key, len(own), None, own.device)
        return list(torch.split(own[order], self.batch_size))

    def stream(self, round: int, client: int) -> Iterator[Tensor]:
        """Yield batches without end, epoch after epoch."""
        number = 0
        while True:
            yield from self.batches(round, client, number)
            number += 1

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


FULL = [[0, 1, 2, 3, 4]] * 6
PARTIAL = [[0, 1, 2], [2, 3], [0, 3, 4], [1], [0, 1, 2, 3, 4], [0, 2, 4], [1, 2]]
