"""A federation on one machine, to see that it works here: real processes, TLS, keys; and the simulation beside it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from fedtailor.data.datasets import load
from fedtailor.deploy import app, link
from fedtailor.deploy.folder import read_status
from fedtailor.deploy.keys import make_keys
from fedtailor.deploy.settings import Deployment, make_deployment
from fedtailor.errors import Refused
from fedtailor.federation import Federation
from fedtailor.packing import unpack_flat
from fedtailor.record import open_run
from fedtailor.run import MOMENTS, Run
from fedtailor.simulate import simulate

_PATIENCE = 600.0  # seconds for all of it
_LOOK = 0.5
Parties = dict[Path, subprocess.Popen[bytes]]  # by their logs


@dataclass(frozen=True)
class Row:
    """One client, both ways."""

    name: str
    deployed: float  # score
    simulated: float
    equal: bool  # all of its models, bit for bit


@dataclass(frozen=True)
class Found:
    rows: list[Row]
    seconds: float


def trial(clients: int, rounds: int, method: str, folder: Path | None, say: Callable[[str], None]) -> Found:
    """Federate, simulate, compare. Without a folder, nothing is left behind."""
    began = time.monotonic()
    with ExitStack() as stack:
        here = folder or Path(stack.enter_context(TemporaryDirectory(prefix="fedtailor-trial-")))
        fed = load("digits", clients=clients, partition="dirichlet", alpha=1.0)
        deployment = _prepare(here, fed, rounds, method)
        say(f"Starting a server and {clients} clients on this machine.")
        _carry_out(here, fed, say)
        deployed = open_run(here / "operator" / "run")
        simulated = simulate(
            deployment.method, deployment.model(), fed, rounds=rounds, batch_size=deployment.batch_size,
            engine="sequential", device="cpu", evaluate_every=rounds, seed=deployment.seed,
        )  # fmt: skip
        rows = [_compare(here, client, name, deployed, simulated) for client, name in enumerate(_names(fed))]
    return Found(rows, time.monotonic() - began)


def _prepare(here: Path, fed: Federation, rounds: int, method: str) -> Deployment:
    settings = {
        "method": method, "network": "mlp", "rounds": rounds, "batch_size": 16, "evaluate_every": rounds,
        "address": f"127.0.0.1:{_free_port()}", "deadline": 120.0,
        "inputs": {"shape": list(fed.shape or ()), "classes": fed.classes or 0},
    }  # fmt: skip
    deployment = make_deployment(settings)
    app.begin(here / "operator", deployment)
    make_keys(here / "operator", _names(fed))
    for client, name in enumerate(_names(fed)):
        save_client(here / f"{name}.npz", fed, client)
    return deployment


def save_client(path: Path, fed: Federation, client: int) -> None:
    """One client of a federation as the file a real one has."""
    assert isinstance(fed.x, Tensor)
    wholes, parts = {"x": fed.x, "y": fed.y}, {"train": fed.train[client], "test": fed.test[client]}
    arrays = {f"{kind}_{part}": whole[own].numpy() for kind, whole in wholes.items() for part, own in parts.items()}
    np.savez(path, allow_pickle=False, **arrays)


def _carry_out(here: Path, fed: Federation, say: Callable[[str], None]) -> None:
    operator = here / "operator"
    parties: Parties = {}
    with ExitStack() as stack:

        def begin(log: Path, *words: str) -> None:
            parties[log] = stack.enter_context(running(log, *words))

        begin(here / "server.log", "server", str(operator))
        _wait(lambda: _answers(operator), "The server did not start", parties)
        for name in _names(fed):
            words = ("--name", name, "--bundle", str(operator / "bundles" / f"{name}.tar"), "--device", "cpu")
            own = ("--data", str(here / f"{name}.npz"), "--folder", str(here / name), "--yes")
            begin(here / f"{name}.log", "client", *words, *own)
        link.submit(operator)
        say("Training.")
        ended = ("finished", "stopped")
        _wait(lambda: read_status(operator).get("state") in ended, "The run did not end", parties)
        status = read_status(operator)
        if status["state"] != "finished":
            raise Refused(f"The run stopped: {status.get('why', 'it did not say why')}.")


@contextmanager
def running(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`fedtailor deploy ...` in a process of its own, ended when this is left."""
    command = [sys.executable, "-m", "fedtailor.cli", "deploy", *words]
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=dict(os.environ))
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _answers(operator: Path) -> bool:
    try:
        link.nodes(operator)
        return True
    except Refused:
        return False


def _compare(here: Path, client: int, name: str, deployed: Run, simulated: Run) -> Row:
    equal = all(_same(model(here / name, moment), simulated.personal(client, moment)) for moment in MOMENTS)
    scores = [run.scores("trained")[client] for run in (deployed, simulated)]
    return Row(name, scores[0], scores[1], equal)


def model(site: Path, moment: str) -> dict[str, Tensor]:
    """A client's own model, from its own disk."""
    found = list((site / "runs").glob(f"*/models/{moment}.safetensors"))
    return unpack_flat(found[0].read_bytes()) if found else {}


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _wait(condition: Callable[[], bool], otherwise: str, parties: Parties) -> None:
    until = time.monotonic() + _PATIENCE
    while not condition():
        for log, process in parties.items():
            if process.poll() is not None:
                last = " ".join(log.read_text(errors="replace").split("\n")[-3:]).strip()
                raise Refused(f"{otherwise}, for the {log.stem} ended: {last or 'it did not say why'}")
        if time.monotonic() > until:
            raise Refused(f"{otherwise} within {_PATIENCE:.0f} s.")
        time.sleep(_LOOK)


def _names(fed: Federation) -> list[str]:
    return [f"client-{name}" for name in fed.names]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
