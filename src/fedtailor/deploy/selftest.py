"""Test an installation with a federation on one machine: real processes, TLS, and keys, compared with a simulation."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from fedtailor.data.datasets import load
from fedtailor.data.federation import Federation
from fedtailor.deploy.keys import make_keys
from fedtailor.deploy.server import flower_app, superlink
from fedtailor.deploy.server.operator_folder import read_status
from fedtailor.deploy.subprocesses import Subprocess, free_address
from fedtailor.errors import DeployError, FedTailorError
from fedtailor.experiments.deployed_code import InstalledCode, format_consent
from fedtailor.experiments.deployment import Deployment, make_deployment
from fedtailor.runs.reader import load_run
from fedtailor.runs.run import MOMENTS, Run
from fedtailor.runs.serialization import unpack_flat
from fedtailor.training.simulate import simulate

_TIMEOUT = 600.0  # seconds for each step
_POLL_INTERVAL = 0.5  # seconds
_Processes = dict[Path, Subprocess]  # by their logs
_COMMAND = str(Path(__file__).parents[1] / "cli" / "main.py")


@dataclass(frozen=True)
class ClientComparison:
    """One client in the federation and in the simulation."""

    name: str
    deployed_score: float
    simulated_score: float
    equal: bool  # whether all its models are bit-identical


@dataclass(frozen=True)
class SelftestResult:
    """The result of a self-test."""

    method_title: str
    clients: list[ClientComparison]
    seconds: float


def run_selftest(
    clients: int, rounds: int, method: str, folder: Path | None, say: Callable[[str], None]
) -> SelftestResult:
    """Run a federation on this machine and compare it with a simulation; without a folder, all files are removed."""
    started = time.monotonic()
    with ExitStack() as stack:
        root = folder or Path(stack.enter_context(TemporaryDirectory(prefix="fedtailor-trial-")))
        fed = load("digits", clients=clients, partition="dirichlet", alpha=1.0)
        deployment = _prepare(root, fed, rounds, method)
        say(f"Starting a server and {clients} clients on this machine.")
        _run_federation(root, fed, deployment.code, say)
        deployed = load_run(root / "operator" / "run")
        simulated = simulate(
            deployment.method, deployment.model(), fed, rounds=rounds, batch_size=deployment.batch_size,
            engine="sequential", device="cpu", evaluate_every=rounds, seed=deployment.seed,
        )  # fmt: skip
        compared = [_compare(root, client, name, deployed, simulated) for client, name in enumerate(_names(fed))]
    return SelftestResult(deployment.method.display_name, compared, time.monotonic() - started)


def _prepare(root: Path, fed: Federation, rounds: int, method: str) -> Deployment:
    settings = {
        "method": method, "network": "mlp", "rounds": rounds, "batch_size": 16, "evaluate_every": rounds,
        "address": free_address(), "deadline": 120.0,
        "inputs": {"shape": list(fed.shape or ()), "classes": fed.classes or 0},
    }  # fmt: skip
    deployment = make_deployment(settings, InstalledCode(frozenset({method}))).freeze_code()
    flower_app.create_operator_folder(root / "operator", deployment)
    make_keys(root / "operator", _names(fed))
    for client, name in enumerate(_names(fed)):
        save_client_data(root / f"{name}.npz", fed, client)
    return deployment


def save_client_data(path: Path, fed: Federation, client: int) -> None:
    """Write the data of one client of a federation to a .npz file, as `fedtailor deploy client` reads it."""
    assert isinstance(fed.x, Tensor)
    tensors, parts = {"x": fed.x, "y": fed.y}, {"train": fed.train[client], "test": fed.test[client]}
    arrays = {f"{name}_{part}": t[index].numpy() for name, t in tensors.items() for part, index in parts.items()}
    np.savez(path, allow_pickle=False, **arrays)


def _run_federation(root: Path, fed: Federation, code: Iterable[str], say: Callable[[str], None]) -> None:
    operator = root / "operator"
    processes: _Processes = {}
    allowed = [word for name in code for word in ("--allow-code", format_consent(name))]
    with ExitStack() as stack:

        def start(log: Path, *args: str) -> None:
            processes[log] = stack.enter_context(run_command(log, *args))

        start(root / "server.log", "server", str(operator))
        _wait(lambda: _is_server_running(operator), "The server did not start", processes)
        for name in _names(fed):
            bundle = ("--name", name, "--bundle", str(operator / "bundles" / f"{name}.tar"), "--device", "cpu")
            paths = ("--data", str(root / f"{name}.npz"), "--folder", str(root / name), "--yes")
            start(root / f"{name}.log", "client", *bundle, *paths, *allowed)
        superlink.submit(operator)
        say("Training.")
        ended = ("finished", "stopped")
        _wait(lambda: read_status(operator).get("state") in ended, "The run did not end", processes)
        status = read_status(operator)
        if status["state"] != "finished":
            raise DeployError(f"The run stopped: {status.get('reason', 'no reason given').rstrip('.')}.")


@contextmanager
def run_command(log: Path, *args: str) -> Iterator[Subprocess]:
    """Run `fedtailor deploy ...` in a subprocess, which is stopped at the end of the context."""
    process = Subprocess(log.with_suffix(""), [_COMMAND, "deploy", *args], os.environ, log)
    try:
        yield process
    finally:
        process.stop(timeout=30.0)


def _is_server_running(operator: Path) -> bool:
    try:
        superlink.client_states(operator)
        return True
    except FedTailorError:
        return False


def _compare(root: Path, client: int, name: str, deployed: Run, simulated: Run) -> ClientComparison:
    equal = all(
        _is_equal(read_personal_model(root / name, moment), simulated.personal(client, moment)) for moment in MOMENTS
    )
    scores = [run.scores("trained")[client] for run in (deployed, simulated)]
    return ClientComparison(name, scores[0], scores[1], equal)


def read_personal_model(folder: Path, moment: str) -> dict[str, Tensor]:
    """Return the personal model in a client's folder; empty if there is none."""
    paths = list((folder / "runs").glob(f"*/models/{moment}.safetensors"))
    return unpack_flat(paths[0].read_bytes()) if paths else {}


def _is_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _wait(condition: Callable[[], bool], problem: str, processes: _Processes) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while not condition():
        for log, process in processes.items():
            if process.returncode is not None:
                output = " ".join(log.read_text(errors="replace").split("\n")[-3:]).strip()
                raise DeployError(f"{problem}, because the process '{log.stem}' ended: {output or 'no reason given.'}")
        if time.monotonic() > deadline:
            raise DeployError(f"{problem} within {_TIMEOUT:.0f} s.")
        time.sleep(_POLL_INTERVAL)


def _names(fed: Federation) -> list[str]:
    return [f"client-{name}" for name in fed.names]
