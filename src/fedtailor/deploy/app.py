"""What `fedtailor deploy init` writes: the federation's settings, a Flower app of a few lines, and how to go on."""

from pathlib import Path

from fedtailor.deploy.example import preview
from fedtailor.deploy.settings import Deployment, write_deployment
from fedtailor.errors import Refused
from fedtailor.files import write
from fedtailor.version import VERSION

_PROJECT = f"""\
[project]
name = "federation"
version = "{VERSION}"
description = "A federation of FedTailor"
license = "Apache-2.0"
dependencies = []  # everyone has FedTailor installed: nothing is fetched when a run starts

[tool.flwr.app]
publisher = "fedtailor"

[tool.flwr.app.components]
serverapp = "federation.server_app:app"
clientapp = "federation.client_app:app"

[tool.flwr.app.config]
"""

_SERVER_APP = """\
from fedtailor.deploy.server_app import app

__all__ = ["app"]
"""
_CLIENT_APP = """\
import gc

gc.disable()  # it would search what is imported for garbage, again and again, and Flower imports anew for every message
from fedtailor.deploy.client_app import app  # noqa: E402

gc.freeze()
gc.enable()
__all__ = ["app"]
"""

_README = """\
# A federation

{method} on a network {network}, {rounds} rounds, at {address}. `deployment.toml` says it all; change it before keys are
made, for every client gets a copy of it.

On the server:

    fedtailor deploy keys {folder} --clients hospital-a,hospital-b,hospital-c
    fedtailor deploy server {folder}
    fedtailor deploy start {folder}

The first command writes `bundles/hospital-a.tar` and so on: hand each to its client over a safe way, for it holds the
client's key. The second one stays in the foreground; the third is for another terminal. On a client's machine:

    fedtailor deploy client --name hospital-a --bundle hospital-a.tar --data my_data.npz

`fedtailor deploy status {folder}` says how it goes, `fedtailor deploy resume {folder}` goes on after a failure. Back up
this folder: `keys/` and `clients.json` say who everyone is, `run/` is the run.
"""


def begin(folder: Path, deployment: Deployment) -> None:
    """Make an operator's folder; one that holds anything is refused."""
    if folder.exists() and any(folder.iterdir()):
        raise Refused(f"The folder '{folder}' is not empty; name a new one.")
    preview(deployment, clients=2, own_size=100)  # what does not fit together is said before anybody is invited
    package = folder / "app" / "federation"
    package.mkdir(parents=True)
    folder.chmod(0o700)  # keys and everyone's uploads will be in it
    (package / "__init__.py").touch()
    write(package / "server_app.py", _SERVER_APP.encode())
    write(package / "client_app.py", _CLIENT_APP.encode())
    write(folder / "app" / "pyproject.toml", _PROJECT.encode())
    about = deployment.describe()
    names = {"method": about["method"]["name"], "network": about["network"]["name"], "rounds": about["rounds"]}
    write(folder / "README.md", _README.format(folder=folder, address=deployment.address, **names).encode())
    write_deployment(folder, deployment)
