"""The workloads of the engine benchmark, with their targets."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import fedtailor as ft


@dataclass(frozen=True)
class Target:
    """A bound and an optional next target: a minimum speedup over the loop (×), or a maximum (µs, %)."""

    bound: float
    unit: str  # "×", "µs" or "%"
    next: float | None = None

    def reached(self, value: float, limit: float) -> bool:
        return value >= limit if self.unit == "×" else value <= limit

    def verdict(self, value: float) -> dict[str, Any]:
        next_reached = self.next is not None and self.reached(value, self.next)
        following = "" if self.next is None else f", next target {self.next:g}{' (reached)' if next_reached else ''}"
        target = f"at {'least' if self.unit == '×' else 'most'} {self.bound:g} {self.unit}{following}"
        return {"target": target, "value": value, "met": self.reached(value, self.bound)}


@dataclass(frozen=True)
class Workload:
    """A round of FedAvg: a network, and clients with equal numbers of random images or with Fashion-MNIST."""

    name: str
    network: str
    clients: int
    samples: int | None  # training samples per client; None: Fashion-MNIST, Dir(0.1)
    batch_size: int
    epochs: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of the network
    shape: tuple[int, ...] = (1, 28, 28)
    targets: Mapping[str, Target] = field(default_factory=dict)  # device -> target; rows with one run by default

    def federation(self) -> ft.Federation:
        if self.samples is None:
            return ft.load("fashion-mnist", clients=self.clients, alpha=0.1, seed=0)
        generator = torch.Generator().manual_seed(0)
        per_client = self.samples + 1  # every client needs a test sample
        x = torch.randint(256, (self.clients * per_client, *self.shape), dtype=torch.uint8, generator=generator)
        y = torch.randint(10, (len(x),), generator=generator)
        indices = torch.arange(len(x)).reshape(self.clients, per_client)
        names = tuple(str(client) for client in range(self.clients))
        return ft.Federation(x, y, tuple(indices[:, 1:]), tuple(indices[:, :1]), names, classes=10)

    def model(self, fed: ft.Federation) -> ft.Model:
        return ft.network(self.network, fed, **self.settings)

    def steps(self, fed: ft.Federation) -> int:
        """Return the number of client steps per round."""
        return sum(self.epochs * -(-len(samples) // self.batch_size) for samples in fed.train)


LENET = Workload("LeNet-5, 28×28, batch 64, 20 clients", "lenet5", 20, 640, 64)
WORKLOADS: dict[str, Workload] = {
    "a": replace(
        LENET, name="LeNet-5, 28×28, batch 64, 100 clients", clients=100, targets={"cuda": Target(18, "µs", 10)},
    ),
    "b": replace(
        LENET, name="LeNet-5, Fashion-MNIST, Dir(0.1), batch 64, 20 clients", samples=None,
        targets={"cuda": Target(20, "×")},
    ),
    "c": Workload(
        "ResNet-20 (GroupNorm; 16, 32, 64 channels), 32×32, batch 64, 20 clients", "resnet20", 20, 1280, 64,
        shape=(3, 32, 32), settings={"channels": (16, 32, 64)}, targets={"cuda": Target(6, "×")},
    ),
    "w": Workload(
        "ResNet-20 (GroupNorm; FedLAG's 64, 128, 256 channels), 32×32, batch 64, 20 clients", "resnet20", 20, 640, 64,
        shape=(3, 32, 32), targets={"cuda": Target(6, "×")},
    ),
    "d": replace(LENET, targets={"cpu": Target(1.5, "×")}),
    "e": Workload(
        "logistic regression 784×10, batch 10, 100 clients", "logistic", 100, 200, 10,
        targets={"cpu": Target(7, "×", 12)},
    ),
    "f": Workload(
        "MLP 784-200-10, batch 10, 100 clients", "mlp", 100, 200, 10, settings={"hidden": (200,)},
        targets={"cpu": Target(1.3, "×", 2)},
    ),
}  # fmt: skip
OVERHEAD = {"cuda": replace(LENET, samples=2560), "cpu": LENET}  # 2560: the size of a Fashion-MNIST client
LARGE = replace(LENET, name="LeNet-5", clients=200)
SWEEPS: dict[str, list[Workload]] = {
    "cpu": [replace(LARGE, samples=320, epochs=1), Workload("logistic", "logistic", 200, 100, 10)],
    "cuda": [LARGE, Workload("logistic", "logistic", 200, 100, 10)],
}
