"""The files that `fedtailor deploy init` writes: the settings, a Flower app of a few lines, and a README."""

from pathlib import Path

from fedtailor.deploy.dummy_client import preview_payload
from fedtailor.errors import DeployError
from fedtailor.experiments.deployment import Deployment, write_deployment
from fedtailor.runs.files import write_atomic
from fedtailor.version import VERSION

_PROJECT = f"""\
[project]
name = "federation"
version = "{VERSION}"
description = "A FedTailor federation"
license = "Apache-2.0"
dependencies = []  # all machines have FedTailor installed, so nothing is downloaded when a run starts

[tool.flwr.app]
publisher = "fedtailor"

[tool.flwr.app.components]
serverapp = "federation.server_app:app"
clientapp = "federation.client_app:app"

[tool.flwr.app.config]
"""

_SERVER_APP = """\
from fedtailor.deploy.server.server_app import app

__all__ = ["app"]
"""
_CLIENT_APP = """\
import os
from importlib.util import module_from_spec, spec_from_file_location

# `from fedtailor.deploy.client_app import app` would import torch, which takes seconds, for every message
spec = spec_from_file_location("client_app", os.environ["FEDTAILOR_CLIENT_APP"])
module = module_from_spec(spec)
spec.loader.exec_module(module)
app = module.app
"""

_README = """\
# A federation

{method} with the network {network}, {rounds} rounds, at {address}. `deployment.toml` contains all settings. Change it
before you create keys, because every client receives a copy.

On the server:

    fedtailor deploy keys {folder} --clients hospital-a,hospital-b,hospital-c
    fedtailor deploy server {folder}
    fedtailor deploy start {folder}

The first command writes `bundles/hospital-a.tar` and so on. Send each bundle to its client over a secure channel,
because it contains the client's key. The second command stays in the foreground; run the third one in another terminal.
On a client's machine:

    fedtailor deploy client --name hospital-a --bundle hospital-a.tar --data my_data.npz

`fedtailor deploy status {folder}` shows the progress. After a crash, the server resumes the run by itself; after an
error, fix the problem and run `fedtailor deploy resume {folder}`. Back up this folder: `keys/` and `clients.json`
identify the server and all clients, and `run/` is the run.
"""


def create_operator_folder(folder: Path, deployment: Deployment) -> None:
    """Create an operator's folder, which must be new or empty."""
    if folder.exists() and any(folder.iterdir()):
        raise DeployError(f"The folder '{folder}' is not empty; choose another one.")
    preview_payload(
        deployment, clients=2, num_samples=100
    )  # raises an error if method, network, and inputs do not match
    package = folder / "app" / "federation"
    package.mkdir(parents=True)
    folder.chmod(0o700)  # it will contain keys and all clients' uploads
    (package / "__init__.py").touch()
    write_atomic(package / "server_app.py", _SERVER_APP.encode())
    write_atomic(package / "client_app.py", _CLIENT_APP.encode())
    write_atomic(folder / "app" / "pyproject.toml", _PROJECT.encode())
    settings = deployment.describe()
    values = {
        "method": deployment.method.display_name, "network": settings["network"]["name"],
        "rounds": settings["rounds"], "address": deployment.address,
    }  # fmt: skip
    write_atomic(folder / "README.md", _README.format(folder=folder, **values).encode())
    write_deployment(folder, deployment)
