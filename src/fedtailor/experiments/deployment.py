"""Deployments: the settings of a federation of deployed clients, in the file deployment.toml."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from fedtailor.core.client_models import BY_CLIENT
from fedtailor.core.code_reference import PARTS, find_references
from fedtailor.core.fields import (
    AtLeastTwo,
    Constraint,
    NonNegativeInt,
    Positive,
    PositiveInt,
)
from fedtailor.core.method import Method
from fedtailor.core.model import Model
from fedtailor.core.untrusted_input import check_settings, is_printable, read_toml
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError, DeployError
from fedtailor.experiments.deployed_code import (
    InstalledCode,
    OwnLoader,
    build_loader,
    format_consent,
    freeze_packages,
    named_code,
    read_consent,
    without_own_code,
)
from fedtailor.experiments.deployment_inputs import Inputs
from fedtailor.experiments.installed_packages import PackageVersion
from fedtailor.experiments.own_code import CodeConsent
from fedtailor.experiments.own_parts import OwnNetwork, build_network, make_model
from fedtailor.experiments.parsing import build_dataclass, build_named, named_settings
from fedtailor.methods import METHODS, FedAvg
from fedtailor.networks import NETWORKS
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
SIMULATION_SETTINGS = (
    "engine", "actors", "actor_engine", "ray_address", "chunk_size", "schedule", "checkpoint_every", "unreliable",
    "attack", "evaluate", "patience", "held_out_clients",
)  # fmt: skip
_SERVER_SETTINGS = (  # in addition to those of a simulation
    "address", "monitoring", "min_clients", "deadline", "retry", "keep_checkpoints", "suspend_after", "outlier_factor",
)  # fmt: skip
_CHANGEABLE = (*_SERVER_SETTINGS, "participation", "evaluate_every", "max_failures", "robust")


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


_Address = Annotated[str, Constraint("host:port, such as fl.example.org:9092", _is_address)]

_BUILT_IN = CodeConsent(how="a client's own network must be a built-in one")
_NO_CONSENT = InstalledCode(how="only a command in which you name it imports it")


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
    keep_checkpoints: Annotated[
        AtLeastTwo, "last rounds to which the run can be rolled back; clients keep the states of as many"
    ] = 10
    suspend_after: Annotated[
        NonNegativeInt,
        "rounds in a row in which a client failed, was late, or was an outlier, after which it is suspended; 0: never",
    ] = 3
    outlier_factor: Annotated[
        Positive, "an upload is an outlier if it changes more than this times the clients' median"
    ] = 30.0
    method: Method = field(default_factory=FedAvg)
    network: Network | OwnNetwork = field(default_factory=MLP)
    data: Annotated[
        OwnLoader | None,
        "function of your own that reads a client's data, such as my_pkg:load; --data.ARGUMENT sets more",
    ] = None
    inputs: Inputs = field(default_factory=Inputs)
    code: Annotated[dict[str, PackageVersion], "packages of own code, which init writes"] = field(default_factory=dict)

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
        self.check_method(self.method)
        if self.min_clients is not None and (reason := self.robust.too_few(self.min_clients)) is not None:
            raise ConfigError(f"A round may have min_clients={self.min_clients} clients, but {reason}.")
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
        if isinstance(self.network, OwnNetwork):
            return self.network.name
        return next(name for name, kind in NETWORKS.items() if isinstance(self.network, kind))

    @property
    def takes_tokens(self) -> bool:
        """Whether the inputs are tokens (int64) instead of bytes or real numbers."""
        return self.inputs.tokens or (isinstance(self.network, TokenNetwork) and len(self.inputs.shape) == 1)

    def dummy_federation(self, seed: int = 0) -> Federation:
        """Return one client with a few random samples; see `Inputs.dummy_federation`."""
        return self.inputs.dummy_federation(seed, self.takes_tokens)

    def model(self) -> Model:
        """Return the network for these inputs; all participants build it from the same seed."""
        model, classes = make_model(self.network, self.dummy_federation()), self.inputs.classes
        model = model.with_class_weights(self.class_weights, classes or None)  # type: ignore[arg-type]
        return model.with_metrics_for(self.inputs.task, classes or None, [classes], self.metrics)

    def describe(self) -> dict[str, Any]:
        """Return the settings as nested dicts, as in deployment.toml."""
        deployed = {name: getattr(self, name) for name in _SERVER_SETTINGS}
        inputs = {f.name: getattr(self.inputs, f.name) for f in fields(Inputs)}
        common = {k: v for k, v in describe_config(self).items() if k not in (*SIMULATION_SETTINGS, "device")}
        network = self.network.arguments if isinstance(self.network, OwnNetwork) else vars(self.network)
        parts = {"method": describe_method(self.method), "network": {"name": self._network_name, **network}}
        parts |= {} if self.data is None else {"data": self.data.describe()}
        code = {"code": {name: vars(version) for name, version in self.code.items()}} if self.code else {}
        return common | deployed | parts | {"inputs": inputs} | code

    def freeze_code(self) -> "Deployment":
        """Return the deployment with the versions and hashes of the packages of its own code, as installed here."""
        return replace(self, code=freeze_packages(find_references(self.describe()).values()))


def with_client_network(deployment: Deployment, given: Any) -> Deployment:
    """Return the deployment as a client sees it that has another network than the others, by its name and fields.

    >>> with_client_network(make_deployment({"method": "fedproto"}), "logistic").network
    Logistic(bias=True, intercept_head=False)
    """
    if given is None:
        return deployment
    check_supports_architectures(deployment.method)
    return replace(deployment, network=client_network(given))


def client_network(given: Any) -> Network:
    """Return a client's own network from its name and fields.

    >>> client_network("logistic")
    Logistic(bias=True, intercept_head=False)
    """
    network: Network = build_named("network", given, NETWORKS, None, _BUILT_IN)
    return network


def make_deployment(settings: Mapping[str, Any], consent: CodeConsent = _NO_CONSENT) -> Deployment:
    """Return a deployment from nested settings, as in a TOML file; own code is imported if the user consents.

    >>> make_deployment({"method": "fedper", "deadline": 60}).method.lr
    0.1
    """
    check_settings(settings, "The deployment")
    rest = dict(settings)
    parts = {"method": build_named("method", rest.pop("method", {}), METHODS, "fedavg", consent)}
    given = rest.pop("network", {})
    if isinstance(given, list) or (isinstance(given, Mapping) and given.get("name") == BY_CLIENT):
        fix = "name one, and let clients choose their own with fedtailor deploy client --network"
        raise ConfigError(f"The settings of a deployment have one network; {fix}.")
    parts["network"] = build_network(named_settings("network", given, "mlp"), consent)
    parts["data"] = build_loader(rest.pop("data", None))
    inputs = rest.get("inputs")
    if isinstance(inputs, Mapping) and isinstance(names := inputs.get("class_names"), list | tuple):
        rest["inputs"] = {"classes": len(names), **inputs}
    deployment: Deployment = build_dataclass(Deployment, rest | parts, "the deployment")
    return deployment


def outline_deployment(settings: Mapping[str, Any]) -> Deployment:
    """Return the deployment with a built-in method and network in place of own code, which is not imported.

    It serves to check the other settings, and to use those that do not depend on own code, such as the address.

    >>> outline_deployment({"deadline": 60}).deadline
    60.0
    """
    check_settings(settings, "The deployment")
    named_code(settings)  # raises an error if it is incomplete
    return make_deployment(without_own_code(settings))


def deployment_digest(deployment: Deployment) -> str:
    """Return a checksum of the settings that server and clients must share, without those that may change in a run."""
    shared = {name: part for name, part in deployment.describe().items() if name not in _CHANGEABLE}
    return checksum(json.dumps(shared, sort_keys=True).encode())[:16]


def read_deployment(folder: Path, consent: CodeConsent = _NO_CONSENT) -> Deployment:
    """Return the deployment in an operator's or a client's folder; own code is imported if the user consents."""
    return make_deployment(read_deployment_file(folder), consent)


def read_outline(folder: Path) -> Deployment:
    """Return the deployment in a folder without own code; see `outline_deployment`."""
    return outline_deployment(read_deployment_file(folder))


def read_operator_deployment(folder: Path) -> Deployment:
    """Return the deployment in an operator's folder, with the own code that the operator has named in a command."""
    code = named_code(read_deployment_file(folder))
    options = " ".join(f"--allow-code {format_consent(name)}" for name in code.packages)
    return read_deployment(
        folder, read_consent(folder, code, f"if you trust it, run: fedtailor deploy keys {folder} {options}")
    )


def read_own_parts(folder: Path) -> dict[str, Any]:
    """Return the settings of the method, network, and loader in a folder that are own code, which is not imported."""
    settings = read_deployment_file(folder)
    own = {part.partition(".")[0] for part in find_references(settings)}
    return {part: named_settings(part, settings[part], None) for part in PARTS if part in own}


def read_deployment_file(folder: Path) -> dict[str, Any]:
    """Return the settings of the deployment in a folder, which are not checked."""
    if not (folder / DEPLOYMENT_FILE).is_file():
        raise DeployError(f"There is no deployment in '{folder}'; create one with: fedtailor deploy init {folder}.")
    return read_toml(folder / DEPLOYMENT_FILE, "The deployment")


def write_deployment(folder: Path, deployment: Deployment) -> None:
    """Write deployment.toml, and read it once to check that it is valid."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / DEPLOYMENT_FILE, to_toml(deployment.describe()).encode())
    read_outline(folder)
