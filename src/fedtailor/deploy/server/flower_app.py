"""The files that `fedtailor deploy init` writes: the settings and a README."""

from pathlib import Path

from fedtailor.deploy.dummy_client import preview_payload
from fedtailor.errors import DeployError
from fedtailor.experiments.deployed_code import named_code, save_consent
from fedtailor.experiments.deployment import Deployment, write_deployment
from fedtailor.runs.files import write_atomic

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
{packages}
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
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # it will contain keys and all clients' uploads
    settings = deployment.describe()
    values = {
        "method": deployment.method.display_name, "network": settings["network"]["name"],
        "rounds": settings["rounds"], "address": deployment.address, "packages": _packages(deployment),
    }  # fmt: skip
    write_atomic(folder / "README.md", _README.format(folder=folder, **values).encode())
    if deployment.code:
        save_consent(folder, named_code(settings))  # the operator has named it in this command
    write_deployment(folder, deployment)


def _packages(deployment: Deployment) -> str:
    """Return what clients must install for own code."""
    named = " and ".join(f"`{name}` {version}" for name, version in deployment.code.items())
    return f"\nEvery client needs the same {named} as this server, and must allow this code.\n" if named else ""
