"""A client on its own machine: who it is, its data, and where it keeps what is its own.

bundle/                 what the operator gave: who it is, where the server is, what is trained
site.json               where its data are, and on which device it works
secret                  what its noise is drawn from, if it adds any
runs/RUN/states/000007.safetensors ...   what it keeps after round 7, and its model as it trained; the last few
runs/RUN/models/        its own model, ordinary state_dicts: trained.safetensors, at the end also received.safetensors
runs/RUN/rounds.jsonl   its own record: what it sent, its numbers
home/, log/             what Flower keeps
"""

import json
import secrets
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtailor.data.folder import read_client
from fedtailor.data.partition import hold_out
from fedtailor.deploy.keys import read_bundle
from fedtailor.deploy.settings import Deployment, digest, read_deployment
from fedtailor.errors import Refused
from fedtailor.federation import Federation
from fedtailor.files import write, write_private
from fedtailor.method import Method
from fedtailor.trial import check_fit
from fedtailor.untrusted import parse_json, read_text
from fedtailor.version import VERSION
from fedtailor.work import common_of, start_of

_SITE, _SECRET = "site.json", "secret"


@dataclass(frozen=True)
class Site:
    """A client's folder, opened."""

    folder: Path
    name: str
    deployment: Deployment
    data: Path

    @classmethod
    def open(cls, folder: Path) -> "Site":
        """What the folder holds, without reading the data."""
        bundle = read_bundle(folder / "bundle")
        try:
            about = dict(parse_json(read_text(folder / _SITE, "The client's settings", 2**16)))
            data, device = Path(str(about["data"])), str(about["device"])
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(f"'{folder / _SITE}' does not say where this client's data are.") from error
        return cls(folder, bundle.name, replace(read_deployment(bundle.folder), device=device), data)

    @classmethod
    def begin(cls, folder: Path, data: Path, device: str = "auto") -> "Site":
        """Say where the data are, and see that they can be used; the bundle is there already."""
        folder.chmod(0o700)  # its models and states are nobody else's
        about = {"data": str(data.resolve()), "device": device}
        write(folder / _SITE, (json.dumps(about, indent=1) + "\n").encode())
        site = cls.open(folder)
        site.check()
        return site

    @property
    def method(self) -> Method:
        return self.deployment.method

    @cached_property
    def fed(self) -> Federation:
        """This client's own data alone."""
        inputs = self.deployment.inputs
        fed = read_client(
            self.data, self.name, test=inputs.test, seed=self.deployment.seed, classes=inputs.classes or None,
            mean=inputs.mean, deviation=inputs.deviation,
        )  # fmt: skip
        if fed.shape != tuple(inputs.shape):
            raise Refused(f"The samples in '{self.data}' are {fed.shape}, and this federation's are {inputs.shape}.")
        if (fed.classes is None) != (inputs.classes == 0):
            raise Refused(f"The targets in '{self.data}' are not what this federation learns; look at inputs.classes.")
        return fed

    def check(self) -> None:
        """Refuse data that the network does not take."""
        model, params = start_of(self.deployment.model(), self.deployment)
        common = common_of(self.deployment, model, self.fed, torch.tensor([len(self.fed.train[0])]), 1, 1.0)
        check_fit(model.serving, params, common, self.fed)

    @property
    def sizes(self) -> dict[str, int]:
        """How many samples it has to train on and to test on."""
        return {"training": len(self.fed.train[0]), "test": len(self.fed.test[0])}

    def introduce(self, index: int = 0) -> dict[str, Any]:
        """All that the server learns of this client before the first round."""
        train, held = self.cut(index)
        sizes = {"train": len(train), "validation": len(held), "test": len(self.fed.test[0])}
        return {"name": self.name, "version": VERSION, "digest": digest(self.deployment), **sizes}

    def cut(self, index: int) -> tuple[Tensor, Tensor]:
        """Training samples in two parts: to train on, and to choose a round by; as a simulation cuts them."""
        own, seed = self.fed.train[0], self.deployment.seed
        cut = hold_out(self.fed.y.numpy(), own.numpy(), self.deployment.validation, (seed, index))
        return torch.from_numpy(cut[0]), torch.from_numpy(cut[1])

    @property
    def secret(self) -> bytes:
        """What noise is drawn from; made once, and never sent."""
        path = self.folder / _SECRET
        if not path.is_file():
            write_private(path, secrets.token_bytes(32))
        return path.read_bytes()
