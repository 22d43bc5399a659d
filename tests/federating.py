"""Federations of real processes: an operator and clients. All of it ends with the test."""

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

import fedtailor as ft
from fedtailor.deploy import app
from fedtailor.deploy.folder import enrolled, read_status
from fedtailor.deploy.keys import make_keys
from fedtailor.deploy.settings import Deployment, make_deployment, read_deployment
from fedtailor.deploy.trial import model, save_client
from fedtailor.record import open_run
from fedtailor.run import MOMENTS, Run

LONGEST = 600.0  # seconds to wait for anything, on a machine that has much else to do
_MARK = "FEDTAILOR_TEST_PARTY"  # the variable by which all processes of a party are known
_AWHILE = threading.Event()  # never set


def hold_back() -> None:
    """Runs in every process of a client before anything else: it does not train while it is held back."""
    import os
    import sys
    from contextlib import suppress
    from pathlib import Path
    from threading import Event

    if "flwr-clientapp" not in " ".join(sys.orig_argv):
        return
    from fedtailor.deploy.worker import Worker

    bar, train = Path(os.environ["BAR"]), Worker.train

    def is_held(number: int) -> bool:
        with suppress(OSError):  # nobody holds it
            return int(bar.read_text()) < number
        return False

    def wait(self: Worker, message: Any) -> Any:
        while is_held(self._asked.round):
            put(bar.with_suffix(".held"), self._asked.round)
            Event().wait(0.05)
        return train(self, message)

    Worker.train = wait  # type: ignore[method-assign]


def put(path: Path, number: int) -> None:
    """Write a number, all of it at once."""
    path.with_suffix(".new").write_text(str(number))
    path.with_suffix(".new").replace(path)


def running_first(function: Callable[[], None], folder: Path) -> str:
    """A path for PYTHONPATH: processes that have it call the function before they do anything else."""
    folder.mkdir(exist_ok=True)
    needed = "from pathlib import Path\nfrom typing import Any"
    lines = [needed, inspect.getsource(put), inspect.getsource(function), f"{function.__name__}()\n"]
    (folder / "sitecustomize.py").write_text("\n\n".join(lines))
    return str(folder)


def until(holds: Callable[[], object], what: str) -> None:
    """Wait for what other processes do."""
    end = time.monotonic() + LONGEST
    while not holds():
        assert time.monotonic() < end, f"waited {LONGEST:.0f} s in vain: {what}"
        _AWHILE.wait(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Party:
    """`fedtailor deploy ...` as its user runs it, with all processes that it starts."""

    def __init__(self, words: Sequence[str], log: Path, told: Mapping[str, str]) -> None:
        self._mark = f"{_MARK}={log.absolute()}".encode()
        self.log = log
        given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **told, _MARK: str(log.absolute())}
        with log.open("ab") as file:
            call = [sys.executable, "-m", "fedtailor.cli", "deploy", *words]
            self.process = subprocess.Popen(call, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=given)

    def processes(self, words: str = "") -> list[int]:
        """The numbers of its processes with such a command line, whoever their parents are by now."""
        return [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if self._owns(folder, words)]

    def _owns(self, folder: Path, words: str) -> bool:
        with suppress(OSError):  # it may be gone by now
            own = self._mark in (folder / "environ").read_bytes().split(b"\0")
            return own and words.encode() in (folder / "cmdline").read_bytes().replace(b"\0", b" ")
        return False

    def send(self, which: signal.Signals, words: str = "") -> None:
        """A signal to its processes with such a command line."""
        for number in self.processes(words):
            with suppress(ProcessLookupError):
                os.kill(number, which)

    def kill(self) -> None:
        """As if the machine lost power: all of it, at once."""
        with suppress(ProcessLookupError):
            self.process.kill()  # first, for it would start the others again
        while self.processes():
            self.send(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """In good order, as systemd does; nothing may be left."""
        try:
            self.send(signal.SIGCONT)
            self.process.terminate()
            self.process.wait(LONGEST)
            until(lambda: not self.processes(), f"what '{self.log.stem}' started ends with it")
        finally:
            self.kill()

    def said(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Federation:
    """A federation on this machine; whoever takes part is a party of its own."""

    folder: Path
    fed: ft.Federation
    stack: ExitStack
    parties: dict[str, Party] = field(default_factory=dict)

    @property
    def operator(self) -> Path:
        return self.folder / "operator"

    @property
    def deployment(self) -> Deployment:
        return read_deployment(self.operator)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.fed.names)

    def site(self, name: str) -> Path:
        return self.folder / name

    def bundle(self, name: str) -> Path:
        return self.operator / "bundles" / f"{name}.tar"

    def serve(self) -> Party:
        """Start the operator's server, and wait until it can be asked."""
        server = self._start("server", ["server", str(self.operator)])
        before = server.said().count("Serving at")
        until(lambda: server.said().count("Serving at") > before or server.process.poll() is not None, "it serves")
        assert server.process.poll() is None, server.said()
        return server

    def join(self, name: str, bundle: Path | None = None, first: Callable[[], None] = hold_back, **told: str) -> Party:
        """Start a client."""
        told = {"BAR": str(self._bar(name)), "PYTHONPATH": running_first(first, self.folder / first.__name__), **told}
        own = ["--data", str(self.folder / f"{name}.npz"), "--folder", str(self.site(name)), "--device", "cpu", "--yes"]
        return self._start(name, ["client", "--name", name, "--bundle", str(bundle or self.bundle(name)), *own], told)

    def _start(self, name: str, words: Sequence[str], told: Mapping[str, str] | None = None) -> Party:
        party = self.parties[name] = Party(words, self.folder / f"{name}.log", told or {})
        self.stack.callback(party.kill)
        return party

    def command(self, *words: str) -> tuple[int, str]:
        """`fedtailor deploy ...` to its end: its code, and what it said."""
        call = [sys.executable, "-m", "fedtailor.cli", "deploy", words[0], str(self.operator), *words[1:]]
        done = subprocess.run(call, capture_output=True, text=True, timeout=LONGEST, check=False)
        return done.returncode, done.stdout + done.stderr

    def do(self, *words: str) -> None:
        """The same, which must be done."""
        code, said = self.command(*words)
        assert code == 0, said

    def resume(self) -> None:
        """Go on with the run; Flower takes a while to see that a process of its own is gone."""
        until(lambda: self.command("resume")[0] == 0, "the run can be resumed")

    def done(self) -> int:
        """How many rounds are."""
        return int(self._status().get("round", 0))

    def _status(self) -> dict[str, Any]:
        status = read_status(self.operator)
        assert status.get("state") != "stopped", status
        return status

    def _bar(self, name: str) -> Path:
        """The file that holds a client back: it trains in no round after the one that is in there."""
        return self.folder / f"{name}.bar"

    def hold(self, name: str, after: int, asked: int | None = None) -> int:
        """Hold a client back, in mid-work, in a round after that one in which everyone was asked, or so many; gives its
        number."""
        held, number = self._bar(name).with_suffix(".held"), after
        held.unlink(missing_ok=True)

        def is_held() -> bool:
            put(self._bar(name), number)
            return held.is_file() and int(held.read_text()) > number

        while True:
            until(is_held, f"{name} is at work on a round after {number}")
            number = int(held.read_text())
            if self._status().get("asked") == list(self.names[:asked]):
                return number

    def let_go(self, name: str) -> None:
        self._bar(name).unlink()

    def wait_for_round(self, number: int) -> None:
        """Until so many rounds are done."""
        until(lambda: self.done() >= number, f"round {number} is done")

    def wait_for_end(self) -> Run:
        until(lambda: self._status().get("state") == "finished", "the run ends")
        return open_run(self.operator / "run")

    def end(self) -> None:
        """Everyone stops, clients first."""
        for name in sorted(self.parties, key="server".__eq__):
            self.parties[name].end()

    def simulate(self, plan: Sequence[Sequence[int]]) -> Run:
        """The same rounds in one process."""
        deployment = self.deployment
        return ft.simulate(
            deployment.method, deployment.model(), self.fed, schedule=plan, batch_size=deployment.batch_size,
            engine="sequential", device="cpu", evaluate_every=len(plan), seed=deployment.seed,
        )  # fmt: skip

    def check_same(self, run: Run, clients: Sequence[int] | None = None) -> None:
        """Clients' own models, on their own disks, are those of the simulation to the last bit."""
        wanted = self.simulate(plan_of(run))
        for client in range(len(self.names)) if clients is None else clients:
            for moment in MOMENTS:
                own, simulated = model(self.site(self.names[client]), moment), wanted.personal(client, moment)
                assert own and own.keys() == simulated.keys()
                assert all(torch.equal(own[name], simulated[name]) for name in own), (self.names[client], moment)


def plan_of(run: Run) -> list[list[int]]:
    """Who delivered, round by round."""
    return [list(line["clients"]) for line in run.records]


@contextmanager
def federation(folder: Path, names: Sequence[str], spare: int = 0, **settings: Any) -> Iterator[Federation]:
    """The folder of an operator who enrolled these clients, their data, and data of `spare` more."""
    fed = ft.load("digits", clients=len(names) + spare, partition="dirichlet", alpha=1.0)
    fed = replace(fed, names=(*names, *(f"newcomer-{number}" for number in range(spare))))
    inputs = {"shape": list(fed.shape or ()), "classes": fed.classes or 0}
    common = {"method": "fedapa", "network": "mlp", "batch_size": 16, "address": f"127.0.0.1:{free_port()}"}
    deployment = make_deployment({**common, "inputs": inputs, "evaluate_every": 1000, **settings})
    app.begin(folder / "operator", deployment)
    make_keys(folder / "operator", list(names))
    for client, name in enumerate(fed.names):
        save_client(folder / f"{name}.npz", fed, client)
    with ExitStack() as stack:
        yield Federation(folder, fed, stack)


def redirected(bundle: Path, port: int) -> Path:
    """The same bundle, but for the address, at which somebody in between listens."""
    there = bundle.with_name(f"{bundle.stem}-{port}.tar")
    with tarfile.open(bundle) as old, tarfile.open(there, "w", format=tarfile.USTAR_FORMAT) as new:
        for entry in old.getmembers():
            file = old.extractfile(entry)
            assert file is not None
            data = file.read()
            if entry.name == "client.json":
                data = json.dumps(json.loads(data) | {"address": f"127.0.0.1:{port}"}).encode()
                entry.size = len(data)
            new.addfile(entry, BytesIO(data))
    return there


def peak_memory(number: int) -> int:
    """The most bytes of memory that a process ever took; nought for one that has just ended."""
    with suppress(OSError, IndexError):
        return 1024 * int(Path(f"/proc/{number}/status").read_text().partition("VmHWM:")[2].split()[0])
    return 0


def node_of(federation: Federation, name: str) -> int:
    """A client's number in Flower."""
    node = enrolled(federation.operator)[name].node
    assert node is not None
    return node
