"""Deployments: the settings of a federation of deployed clients, in the file deployment.toml."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fedtailor.core.client_models import BY_CLIENT
from fedtailor.core.fields import Constraint, InnerFraction, NonNegativeInt, Positive, PositiveInt, check_fields
from fedtailor.core.method import Method
from fedtailor.core.metrics import Task
from fedtailor.core.model import Model
from fedtailor.core.untrusted_input import check_settings, is_printable, read_toml
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError, DeployError
from fedtailor.experiments.own_code import CodeConsent
from fedtailor.experiments.parsing import build_dataclass, build_named
from fedtailor.methods import METHODS, FedAvg
from fedtailor.networks import NETWORKS, network
from fedtailor.networks.layers import Network
from fedtailor.networks.linear import MLP
from fedtailor.networks.multimodal import MultimodalNetwork
from fedtailor.networks.sequence import TokenNetwork
from fedtailor.runs.files import checksum, write_atomic
from fedtailor.runs.toml import to_toml
from fedtailor.training.architectures import check_supports_architectures
from fedtailor.training.config import TrainingConfig
from fedtailor.training.simulate import describe_config, describe_method

DEPLOYMENT_FILE = "deployment.toml"
TABLE_FILE = "table.json"  # in a client's folder
_DUMMY_SAMPLES = 4  # generated samples to determine what a client will send
SIMULATION_SETTINGS = (
    "engine", "actors", "actor_engine", "ray_address", "chunk_size", "schedule", "checkpoint_every", "unreliable",
    "evaluate", "patience", "held_out_clients",
)  # fmt: skip
_CHANGEABLE = (
    "address",
    "monitoring",
    "min_clients",
    "deadline",
    "retry",
    "participation",
    "evaluate_every",
    "max_failures",
)
_MAX_CLASSES = 10**6


def split_monitoring_address(address: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT or PORT; without a host, only this machine can connect.

    >>> split_monitoring_address("9100"), split_monitoring_address("0.0.0.0:9100")
    (('127.0.0.1', 9100), ('0.0.0.0', 9100))
    """
    host, _, port = address.rpartition(":")
    if not (port.isdecimal() and int(port) < 2**16 and is_printable(host) and " " not in host):
        raise ConfigError(f"monitoring must be host:port or a port, such as 127.0.0.1:9100, got {address[:80]!r}.")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    printable = address.isascii() and is_printable(host) and not set(host) & set(" /@")
    reachable = host[:1] not in ("", "-") and host not in ("0.0.0.0", "[::]")
    return printable and reachable and port.isdecimal() and 0 < int(port) < 2**16


_Shape = Annotated[
    tuple[int, ...], Constraint("sizes above 0, such as 1,28,28", lambda shape: min(shape, default=0) > 0)
]
_Classes = Annotated[
    int, Constraint(f"between 2 and {_MAX_CLASSES}, or 0", lambda value: value == 0 or 2 <= value <= _MAX_CLASSES)
]
_Address = Annotated[str, Constraint("host:port, such as fl.example.org:9092", _is_address)]

_BUILT_IN = CodeConsent(how="a deployment takes only built-in methods and networks")


@dataclass(frozen=True)
class Inputs:
    """The format of all clients' samples; a client with another format is rejected before it joins."""

    shape: Annotated[_Shape, "of one sample"] = (1, 28, 28)
    classes: Annotated[_Classes, "number of classes; 0: targets are real numbers"] = 10
    targets: Annotated[PositiveInt, "real numbers per sample if there are no classes"] = 1
    survival: Annotated[bool, "targets are pairs (event, time); set classes to 0 and targets to 2"] = False
    mean: Annotated[tuple[float, ...] | None, "per channel or pixel, subtracted from inputs"] = None
    std: Annotated[tuple[float, ...] | None, "per channel or pixel, inputs are divided by it"] = None
    test: Annotated[InnerFraction, "fraction of samples for testing, unless a client's file selects them"] = 0.25
    schema: Annotated[str | None, "checksum of the clients' schema of tables, which fedtailor tables agree prints"] = (
        None
    )

    def __post_init__(self) -> None:
        check_fields(self, "inputs.")
        if self.survival and (self.classes, self.targets) != (0, 2):
            raise ConfigError("Survival targets are (event, time); set inputs.classes to 0 and inputs.targets to 2.")

    @property
    def task(self) -> Task:
        """What the targets are for."""
        return "survival" if self.survival else "classification" if self.classes else "regression"

    def dummy_federation(self, seed: int, tokens: bool) -> Federation:
        """Return one client with a few random samples, to build a network and to determine what would be sent."""
        random, count = np.random.default_rng(seed), 2 * _DUMMY_SAMPLES
        x = random.uniform(size=(count, *self.shape)).astype(np.float32)
        x = x.round().astype(np.int64) if tokens else x  # 0 and 1 are valid tokens in every vocabulary
        targets = random.uniform(size=(count, self.targets)).astype(np.float32)
        targets[:, 0] = np.arange(count) % 2 if self.survival else targets[:, 0]
        y = np.arange(count) % self.classes if self.classes else targets
        half = (x[:_DUMMY_SAMPLES], y[:_DUMMY_SAMPLES], x[_DUMMY_SAMPLES:], y[_DUMMY_SAMPLES:])
        classes = self.classes or None
        return Federation.from_arrays([half], classes=classes, survival=self.survival, mean=self.mean, std=self.std)


@dataclass(frozen=True)
class Deployment(TrainingConfig):
    """All settings of a deployed run."""

    evaluate_every: Annotated[PositiveInt, "rounds between evaluations; the last round is always evaluated"] = 10
    address: Annotated[_Address, "of the server, host:port"] = "localhost:9092"
    monitoring: Annotated[str | None, "address for metrics and the health check, such as 127.0.0.1:9100"] = None
    min_clients: Annotated[
        PositiveInt | None, "minimum number of clients that must complete a round; none: all enrolled clients"
    ] = None
    deadline: Annotated[Positive, "seconds that a round waits for its clients"] = 600.0
    retry: Annotated[NonNegativeInt, "times that a round with too few clients is repeated before the run stops"] = 3
    method: Method = field(default_factory=FedAvg)
    network: Network = field(default_factory=MLP)
    inputs: Inputs = field(default_factory=Inputs)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in SIMULATION_SETTINGS:
            if getattr(self, name) != getattr(TrainingConfig(), name):
                raise ConfigError(f"{name} applies only to simulations; remove it from the deployment.")
        if self.monitoring is not None:
            split_monitoring_address(self.monitoring)
        if self.measure_drift:
            why = "compares the models of all clients, which stay with the clients in a deployment"
            raise ConfigError(f"measure_drift {why}; remove it, or simulate the federation.")
        if self.evaluate_global:
            self.method.check_global_model()
        self.channel.check(self.method)
        self.augmentation.check(self.inputs.shape)
        if self.class_weights == "balanced":
            fix = "add up the clients' numbers, and set class_weights to one number per class"
            raise ConfigError(f"The server does not see the labels that balanced class weights need; {fix}.")
        if self.method.pools_data:
            raise ConfigError(f"{self.method.display_name} needs all data in one place; choose a federated method.")
        self._check_network()

    def _check_network(self) -> None:
        if isinstance(self.network, MultimodalNetwork):
            raise ConfigError(f"The samples of a deployment have one part; {self._network_name} needs several.")
        if not isinstance(self.network, TokenNetwork):
            return
        if self.network.pretrained is not None:
            fix = "put the vectors into the clients' data, and leave it out"
            raise ConfigError(f"A deployment does not send the file network.pretrained; {fix}.")
        if self.takes_tokens and self.network.vocabulary is None:
            raise ConfigError("The server does not see the clients' tokens; set network.vocabulary to their number.")

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def _network_name(self) -> str:
        return next(name for name, kind in NETWORKS.items() if isinstance(self.network, kind))

    @property
    def takes_tokens(self) -> bool:
        """Whether the inputs are tokens (int64) instead of bytes or real numbers."""
        return isinstance(self.network, TokenNetwork) and len(self.inputs.shape) == 1

    def dummy_federation(self, seed: int = 0) -> Federation:
        """Return one client with a few random samples; see `Inputs.dummy_federation`."""
        return self.inputs.dummy_federation(seed, self.takes_tokens)

    def model(self) -> Model:
        """Return the network for these inputs; all participants build it from the same seed."""
        model, classes = network(self._network_name, self.dummy_federation(), **vars(self.network)), self.inputs.classes
        model = model.with_class_weights(self.class_weights, classes or None)  # type: ignore[arg-type]
        return model.with_metrics_for(self.inputs.task, classes or None, [classes], self.metrics)

    def describe(self) -> dict[str, Any]:
        """Return the settings as nested dicts, as in deployment.toml."""
        deployed = {name: getattr(self, name) for name in ("address", "monitoring", "min_clients", "deadline", "retry")}
        inputs = {f.name: getattr(self.inputs, f.name) for f in fields(Inputs)}
        common = {k: v for k, v in describe_config(self).items() if k not in (*SIMULATION_SETTINGS, "device")}
        parts = {"method": describe_method(self.method), "network": {"name": self._network_name, **vars(self.network)}}
        return common | deployed | parts | {"inputs": inputs}


def with_client_network(deployment: Deployment, given: Any) -> Deployment:
    """Return the deployment as a client sees it that has another network than the others, by its name and fields.

    >>> with_client_network(make_deployment({"method": "fedproto"}), "logistic").network
    Logistic(bias=True, intercept_head=False)
    """
    if given is None:
        return deployment
    check_supports_architectures(deployment.method)
    own = build_named("network", given, NETWORKS, None, _BUILT_IN)
    return replace(deployment, network=own)


def make_deployment(settings: Mapping[str, Any]) -> Deployment:
    """Return a deployment from nested settings, as in a TOML file.

    >>> make_deployment({"method": "fedper", "deadline": 60}).method.lr
    0.1
    """
    check_settings(settings, "The deployment")
    rest = dict(settings)
    parts = {"method": build_named("method", rest.pop("method", {}), METHODS, "fedavg", _BUILT_IN)}
    given = rest.pop("network", {})
    if isinstance(given, list) or (isinstance(given, Mapping) and given.get("name") == BY_CLIENT):
        fix = "name one, and let clients choose their own with fedtailor deploy client --network"
        raise ConfigError(f"The settings of a deployment have one network; {fix}.")
    parts["network"] = build_named("network", given, NETWORKS, "mlp", _BUILT_IN)
    deployment: Deployment = build_dataclass(Deployment, rest | parts, "the deployment")
    return deployment


def deployment_digest(deployment: Deployment) -> str:
    """Return a checksum of the settings that server and clients must share, without those that may change in a run."""
    shared = {name: part for name, part in deployment.describe().items() if name not in _CHANGEABLE}
    return checksum(json.dumps(shared, sort_keys=True).encode())[:16]


def read_deployment(folder: Path) -> Deployment:
    """Return the deployment in an operator's or a client's folder."""
    if not (folder / DEPLOYMENT_FILE).is_file():
        raise DeployError(f"There is no deployment in '{folder}'; create one with: fedtailor deploy init {folder}.")
    return make_deployment(read_toml(folder / DEPLOYMENT_FILE, "The deployment"))


def write_deployment(folder: Path, deployment: Deployment) -> None:
    """Write deployment.toml, and read it once to check that it is valid."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / DEPLOYMENT_FILE, to_toml(deployment.describe()).encode())
    read_deployment(folder)
