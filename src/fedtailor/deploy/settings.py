"""What a federation trains and how, in its file deployment.toml: the experiment, and what only real clients need."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.errors import Refused
from fedtailor.experiment import build, choose
from fedtailor.federation import Federation
from fedtailor.files import checksum, write
from fedtailor.method import Method
from fedtailor.methods import METHODS, FedAvg
from fedtailor.model import Model
from fedtailor.networks import MLP, NETWORKS, Network, network
from fedtailor.settings import Settings
from fedtailor.simulate import describe, describe_settings
from fedtailor.toml import to_toml
from fedtailor.untrusted import check_plain, is_printable, read_toml

FILE = "deployment.toml"
_EXAMPLES = 4  # samples made up to try out what a client will send
SIMULATED = ("engine", "chunk", "schedule", "checkpoint_every", "unreliable", "evaluate")
_FREE = ("address", "min_clients", "deadline", "retry", "participation", "evaluate_every", "max_failures")
_MOST_CLASSES = 10**6


@dataclass(frozen=True)
class Inputs:
    """What every client's samples are like; a client whose own are not is refused before it joins."""

    shape: tuple[int, ...] = (1, 28, 28)  # of one sample
    classes: int = 10  # 0: targets are numbers
    targets: int = 1  # numbers a sample, where there are no classes
    mean: tuple[float, ...] | None = None  # per channel, taken off
    deviation: tuple[float, ...] | None = None  # per channel, divided by
    test: float = 0.25  # share a client tests on, unless its file says which samples

    def __post_init__(self) -> None:
        refusals = [
            (len(self.shape) > 0 and min(self.shape, default=0) > 0, "shape", "sizes above 0, such as 1,28,28"),
            (self.classes == 0 or 2 <= self.classes <= _MOST_CLASSES, "classes", "a number from 2 on, or 0"),
            (self.targets >= 1, "targets", "at least 1"),
            (0 < self.test < 1, "test", "a share between 0 and 1"),
        ]
        for holds, name, words in refusals:
            if not holds:
                raise Refused(f"inputs.{name} must be {words}, not {getattr(self, name)!r}.")

    def examples(self, seed: int = 0) -> Federation:
        """One client with a few samples that are made up: to build a network, and to see what would be sent."""
        random, count = np.random.default_rng(seed), 2 * _EXAMPLES
        x = random.uniform(size=(count, *self.shape)).astype(np.float32)
        numbers = random.uniform(size=(count, self.targets)).astype(np.float32)
        y = np.arange(count) % self.classes if self.classes else numbers
        half = (x[:_EXAMPLES], y[:_EXAMPLES], x[_EXAMPLES:], y[_EXAMPLES:])
        classes = self.classes or None
        return Federation.from_arrays([half], classes=classes, mean=self.mean, deviation=self.deviation)


@dataclass(frozen=True)
class Deployment(Settings):
    """All that determines a federation's run."""

    evaluate_every: int = 10  # rounds; the last is always evaluated
    address: str = "localhost:9092"  # where clients find the server, host:port
    min_clients: int | None = None  # fewest that must be there and deliver for a round to count; none: all enrolled
    deadline: float = 600.0  # seconds a round waits for its clients
    retry: int = 3  # times a round in which too few delivered is tried again before the run stops
    method: Method = field(default_factory=FedAvg)
    network: Network = field(default_factory=MLP)
    inputs: Inputs = field(default_factory=Inputs)

    def __post_init__(self) -> None:
        super().__post_init__()
        host, _, port = self.address.rpartition(":")
        plain = self.address.isascii() and is_printable(host) and not set(host) & set(" /@")
        usable = (
            plain
            and host[:1] not in ("", "-")
            and port.isdecimal()
            and 0 < int(port) < 2**16
            and host not in ("0.0.0.0", "[::]")
        )
        refusals = [
            (bool(usable), f"address must be host:port, such as fl.example.org:9092, not {self.address!r}."),
            (self.min_clients is None or self.min_clients >= 1, "min_clients must be at least 1, or none: everyone."),
            (isfinite(self.deadline) and self.deadline > 0, f"deadline must be above 0 s, not {self.deadline}."),
            (self.retry >= 0, f"retry must be at least 0, not {self.retry}."),
        ]
        for holds, words in refusals:
            if not holds:
                raise Refused(words)
        for name in SIMULATED:
            if getattr(self, name) != getattr(Settings(), name):
                raise Refused(f"{name} is for simulations; a federation has no use for it.")
        self.channel.check(self.method)

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def _network(self) -> str:
        return next(name for name, kind in NETWORKS.items() if isinstance(self.network, kind))

    def model(self) -> Model:
        """The network for these inputs; everyone builds it from the same seed."""
        return network(self._network, self.inputs.examples(), **vars(self.network))

    def describe(self) -> dict[str, Any]:
        """As its file says it."""
        own = {name: getattr(self, name) for name in ("address", "min_clients", "deadline", "retry")}
        inputs = {f.name: getattr(self.inputs, f.name) for f in fields(Inputs)}
        common = {k: v for k, v in describe_settings(self).items() if k not in (*SIMULATED, "device")}
        parts = {"method": describe(self.method), "network": {"name": self._network, **vars(self.network)}}
        return common | own | parts | {"inputs": inputs}


def make_deployment(settings: Mapping[str, Any]) -> Deployment:
    """A deployment from nested settings, as TOML holds them.

    >>> make_deployment({"method": "fedper", "deadline": 60}).method.lr
    0.1
    """
    check_plain(settings, "The deployment")
    plain = dict(settings)
    made = {"method": choose("method", plain.pop("method", {}), METHODS, "fedavg")}
    made["network"] = choose("network", plain.pop("network", {}), NETWORKS, "mlp")
    deployment: Deployment = build(Deployment, plain | made, "the deployment")
    return deployment


def digest(deployment: Deployment) -> str:
    """By which both sides know that they train the same: all of it but what the operator may change as it goes on."""
    said = {name: part for name, part in deployment.describe().items() if name not in _FREE}
    return checksum(json.dumps(said, sort_keys=True).encode())[:16]


def read_deployment(folder: Path) -> Deployment:
    """The deployment in an operator's or a client's folder."""
    if not (folder / FILE).is_file():
        raise Refused(f"There is no deployment in '{folder}'; make one: fedtailor deploy init {folder}.")
    return make_deployment(read_toml(folder / FILE, "The deployment"))


def write_deployment(folder: Path, deployment: Deployment) -> None:
    """Write it down, and read it once to see that it can be."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / FILE, to_toml(deployment.describe()).encode())
    read_deployment(folder)
