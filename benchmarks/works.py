"""The rounds that engines are measured by, and what is aimed at."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import fedtailor as ft


@dataclass(frozen=True)
class Aim:
    """A bound, and what is hoped for beyond it: at least so many times the loop, at most so many µs or %."""

    bound: float
    unit: str  # "×", "µs" or "%"
    hoped: float | None = None

    def reached(self, value: float, limit: float) -> bool:
        return value >= limit if self.unit == "×" else value <= limit

    def verdict(self, value: float) -> dict[str, Any]:
        more = self.hoped is not None and self.reached(value, self.hoped)
        further = "" if self.hoped is None else f", hoped for {self.hoped:g}{' (reached)' if more else ''}"
        aim = f"at {'least' if self.unit == '×' else 'most'} {self.bound:g} {self.unit}{further}"
        return {"aim": aim, "value": value, "met": self.reached(value, self.bound)}


@dataclass(frozen=True)
class Work:
    """A round of FedAvg: a network, and clients with random pictures in equal numbers or with Fashion-MNIST."""

    name: str
    network: str
    clients: int
    samples: int | None  # a client's, to train on; None: its share of Fashion-MNIST, Dir(0.1)
    batch_size: int
    epochs: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the network
    shape: tuple[int, ...] = (1, 28, 28)
    aims: Mapping[str, Aim] = field(default_factory=dict)  # by device; a row is measured by default where it has one

    def federation(self) -> ft.Federation:
        if self.samples is None:
            return ft.load("fashion-mnist", clients=self.clients, alpha=0.1, seed=0)
        draw = torch.Generator().manual_seed(0)
        each = self.samples + 1  # one to test on, for a client needs one
        x = torch.randint(256, (self.clients * each, *self.shape), dtype=torch.uint8, generator=draw)
        y = torch.randint(10, (len(x),), generator=draw)
        own = torch.arange(len(x)).reshape(self.clients, each)
        names = tuple(str(client) for client in range(self.clients))
        return ft.Federation(x, y, tuple(own[:, 1:]), tuple(own[:, :1]), names, classes=10)

    def model(self, fed: ft.Federation) -> ft.Model:
        return ft.network(self.network, fed, **self.settings)

    def steps(self, fed: ft.Federation) -> int:
        """Client-steps a round."""
        return sum(self.epochs * -(-len(own) // self.batch_size) for own in fed.train)


LENET = Work("LeNet-5, 28×28, batch 64, 20 clients", "lenet5", 20, 640, 64)
WORKS: dict[str, Work] = {
    "a": replace(LENET, name="LeNet-5, 28×28, batch 64, 100 clients", clients=100, aims={"cuda": Aim(18, "µs", 10)}),
    "b": replace(
        LENET, name="LeNet-5, Fashion-MNIST, Dir(0.1), batch 64, 20 clients", samples=None, aims={"cuda": Aim(20, "×")}
    ),
    "c": Work(
        "ResNet-20 (GroupNorm; 16, 32, 64 channels), 32×32, batch 64, 20 clients", "resnet20", 20, 1280, 64,
        shape=(3, 32, 32), settings={"channels": (16, 32, 64)}, aims={"cuda": Aim(6, "×")},
    ),
    "w": Work(
        "ResNet-20 (GroupNorm; FedLAG's 64, 128, 256 channels), 32×32, batch 64, 20 clients", "resnet20", 20, 640, 64,
        shape=(3, 32, 32), aims={"cuda": Aim(6, "×")},
    ),
    "d": replace(LENET, aims={"cpu": Aim(1.5, "×")}),
    "e": Work(
        "logistic regression 784×10, batch 10, 100 clients", "logistic", 100, 200, 10, aims={"cpu": Aim(7, "×", 12)}
    ),
    "f": Work(
        "MLP 784-200-10, batch 10, 100 clients", "mlp", 100, 200, 10, settings={"hidden": (200,)},
        aims={"cpu": Aim(1.3, "×", 2)},
    ),
}  # fmt: skip
OVERHEAD = {"cuda": replace(LENET, samples=2560), "cpu": LENET}  # the former as many as a client of Fashion-MNIST has
MOST = replace(LENET, name="LeNet-5", clients=200)
SWEEPS: dict[str, list[Work]] = {
    "cpu": [replace(MOST, samples=320, epochs=1), Work("logistic", "logistic", 200, 100, 10)],
    "cuda": [MOST, Work("logistic", "logistic", 200, 100, 10)],
}
