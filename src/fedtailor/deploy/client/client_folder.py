"""A client's folder on its machine: its identity, its settings, and the state that it saves.

bundle/                 what the operator sent: the client's key, the server's address, the training settings
client.json             the path of the data, the device, and the client's own network if it has one
schema.json             the schema on which the sites agreed, if the data are a table
table.json              how the rows of the table become inputs, and the names of the classes, for predictions
allowed_code.json       the own code of the deployment that may be imported, with its hashes
secret                  the seed of the client's noise, if it adds any
runs/RUN/states/000007.safetensors ...   the client state and the trained model after round 7; the last few rounds
                        initial-*.safetensors: the state with which a client started that joined late
runs/RUN/models/        personal models as state_dicts: trained.safetensors, and at the end also received.safetensors
runs/RUN/rounds.jsonl   the client's own record: what it sent, and its metrics
home/, log/             Flower's files
"""

import json
import secrets
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.method import Method, Setup
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.core.untrusted_input import parse_json, read_text
from fedtailor.data.federation import Federation
from fedtailor.data.splits.partition import hold_out
from fedtailor.data.tables.loading import read_schema, to_json
from fedtailor.deploy.client.client_data import ClientData
from fedtailor.deploy.keys import read_bundle
from fedtailor.errors import DeployError
from fedtailor.experiments.deployed_code import InstalledCode, named_code, read_consent
from fedtailor.experiments.deployment import (
    TABLE_FILE,
    Deployment,
    deployment_digest,
    read_deployment,
    read_deployment_file,
    with_client_network,
)
from fedtailor.experiments.own_code import CodeConsent
from fedtailor.experiments.own_parts import OwnNetwork
from fedtailor.networks import fit_network
from fedtailor.runs.files import write_atomic, write_private
from fedtailor.training.architectures import check_same_exchange
from fedtailor.training.client_update import initial_model, make_shared_context
from fedtailor.training.preflight import check_model_fits
from fedtailor.version import VERSION

_SETTINGS, _SECRET, _SCHEMA = "client.json", "secret", "schema.json"


def worker_file(folder: Path) -> Path:
    """Return the file with the address and the key of a client's worker.

    >>> worker_file(Path("hospital-a")).name
    'address'
    """
    return folder / "home" / "worker" / "address"


def client_consent(folder: Path) -> InstalledCode:
    """Return the consent to import the deployment's own code that was given with `fedtailor deploy client`."""
    code = named_code(read_deployment_file(folder / "bundle"))
    fix = "confirm it by running fedtailor deploy client again in a terminal, or with --allow-code"
    return read_consent(folder, code, fix)


@dataclass(frozen=True)
class ClientFolder:
    """A client's folder, opened."""

    folder: Path
    name: str
    deployment: Deployment  # as in the bundle
    data: Path
    consent: CodeConsent  # to import the deployment's own code
    network: Any = None  # name or settings of the client's own network; None: that of the deployment

    @classmethod
    def open(cls, folder: Path) -> "ClientFolder":
        """Open a client's folder without reading the data."""
        bundle = read_bundle(folder / "bundle")
        try:
            settings = dict(parse_json(read_text(folder / _SETTINGS, "The client's settings", 2**16)))
            data, device, network = Path(str(settings["data"])), str(settings["device"]), settings.get("network")
        except (ValueError, KeyError, TypeError) as error:
            raise DeployError(f"'{folder / _SETTINGS}' does not contain the path of the client's data.") from error
        consent = client_consent(folder)
        deployment = replace(read_deployment(bundle.folder, consent), device=device)
        return cls(folder, bundle.name, deployment, data, consent, network)

    @classmethod
    def create(
        cls, folder: Path, data: Path, device: str = "auto", network: Any = None, schema: Path | None = None
    ) -> "ClientFolder":
        """Write the settings of a client whose bundle is already unpacked, and check its data and its network."""
        folder.chmod(0o700)  # models and states are private
        settings = {"data": str(data.resolve()), "device": device}
        settings |= {} if network is None else {"network": network}
        write_atomic(folder / _SETTINGS, (json.dumps(settings, indent=1) + "\n").encode())
        if schema is not None:
            write_atomic(folder / _SCHEMA, to_json(read_schema(schema)).encode())
        created = cls.open(folder)
        created.check_data()
        (folder / TABLE_FILE).unlink(missing_ok=True)
        if (table := created.fed.table) is not None:
            described = {"table": asdict(table), "class_names": created.fed.class_names}
            write_atomic(folder / TABLE_FILE, json.dumps(described).encode())
        return created

    @property
    def method(self) -> Method:
        return self.deployment.method

    @cached_property
    def fed(self) -> Federation:
        """A federation with this client's data only."""
        return self._data.read(self.deployment, self.consent)

    @property
    def _data(self) -> ClientData:
        return ClientData(self.data, self.name, self.folder / _SCHEMA)

    @cached_property
    def own_deployment(self) -> Deployment:
        """The deployment with this client's own network, if it has one."""
        return with_client_network(self.deployment, self.network)

    @cached_property
    def initial_model(self) -> tuple[Model, Params]:
        """The model on its device, and its initial parameters."""
        return initial_model(self.own_deployment.model(), self.deployment)

    @property
    def data_version(self) -> tuple[int, ...]:
        """What changes when the data are replaced; empty if there are none."""
        return self._data.version

    def check_data(self) -> None:
        """Raise an error if the network does not accept the data."""
        if not isinstance(self.own_deployment.network, OwnNetwork):
            fit_network(self.own_deployment.network, self.fed)  # raises an error for tokens outside of the vocabulary
        model, params = self.initial_model
        networks = [initial_model(self.deployment.model(), self.deployment), (model, params)]
        sizes = torch.tensor([len(self.fed.train[0])])
        check_same_exchange(self.method, [Setup(*one, 1, sizes, 1, self.deployment.seed) for one in networks])
        shared = make_shared_context(self.deployment, model, self.fed, torch.tensor([len(self.fed.train[0])]), 1, 1.0)
        check_model_fits(model.eval_mode, params, shared, self.fed)

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers of training and test samples."""
        return {"training": len(self.fed.train[0]), "test": len(self.fed.test[0])}

    def describe(self, index: int = 0) -> dict[str, Any]:
        """Return everything that the server learns about this client before the first round."""
        train, validation = self.split_training_data(index)
        sizes = {"train": len(train), "validation": len(validation), "test": len(self.fed.test[0])}
        return {"name": self.name, "version": VERSION, "digest": deployment_digest(self.deployment), **sizes}

    def split_training_data(self, index: int) -> tuple[Tensor, Tensor]:
        """Split the training samples into training and validation samples, as a simulation does."""
        samples, seed = self.fed.train[0], self.deployment.seed
        train, validation = hold_out(self.fed.strata, samples.numpy(), self.deployment.validation, (seed, index))
        return torch.from_numpy(train), torch.from_numpy(validation)

    @property
    def secret(self) -> bytes:
        """The seed of the client's noise; created once and never sent."""
        path = self.folder / _SECRET
        if not path.is_file():
            write_private(path, secrets.token_bytes(32))
        return path.read_bytes()
