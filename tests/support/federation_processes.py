"""Federations of real processes, an operator and clients, which all end with the test."""

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
from typer.main import get_command

import fedtailor as ft
from fedtailor.cli import deploy
from fedtailor.deploy.keys import make_keys
from fedtailor.deploy.selftest import read_personal_model, save_client_data
from fedtailor.deploy.server import flower_app, superlink
from fedtailor.deploy.server.operator_folder import enrolled_clients, read_status
from fedtailor.experiments.deployment import Deployment, make_deployment, read_operator_deployment
from fedtailor.experiments.own_code import NO_CONSENT, CodeConsent
from fedtailor.runs.reader import load_run
from fedtailor.runs.run import MOMENTS, Run

TIMEOUT = 600.0  # seconds; generous, because the machine may be busy
_PROGRAM = (sys.executable, "-m", "fedtailor.cli.main", "deploy")
_MARKER = "FEDTAILOR_TEST_COMMAND"  # environment variable that identifies the processes of a command
_NEVER = threading.Event()  # never set
deploy_command = get_command(deploy.deploy)


def block_training() -> None:
    """Make a client wait before training while it is blocked; every process of a client calls this first."""
    import os
    import sys
    from contextlib import suppress
    from pathlib import Path
    from threading import Event

    if "worker_process.py" not in " ".join(sys.orig_argv):
        return
    from fedtailor.deploy.client.worker import Worker

    block_file, train = Path(os.environ["BLOCK_FILE"]), Worker.train

    def is_blocked(number: int) -> bool:
        with suppress(OSError):  # without a file, it is not blocked
            return int(block_file.read_text()) < number
        return False

    def wait_and_train(self: Worker, message: Any) -> Any:
        while is_blocked(self._request.round):
            write_text(block_file.with_suffix(".blocked"), str(self._request.round))
            Event().wait(0.05)
        block_file.with_suffix(".blocked").unlink(missing_ok=True)
        return train(self, message)

    Worker.train = wait_and_train  # type: ignore[method-assign]


def let_deadline_pass() -> None:
    """Let the deadline of a round pass when the server waits only for the clients in a file, which is then removed."""
    import os
    import sys
    import time
    from contextlib import suppress
    from pathlib import Path

    if "flwr-serverapp" not in " ".join(sys.orig_argv):
        return
    from fedtailor.deploy.server.mailbox import Mailbox

    create, collect, late_file = Mailbox.__init__, Mailbox._collect, Path(os.environ["LATE_FILE"])
    pending: dict[str, str] = {}
    passed = [0.0]  # seconds

    def read_clock() -> float:
        with suppress(OSError):  # without a file, the clock is right
            if pending and set(pending.values()) <= set(late_file.read_text().split()):
                late_file.unlink()
                passed[0] += 1e6
        return time.monotonic() + passed[0]

    def create_with_clock(self: Mailbox, grid: Any, folder: Path) -> None:
        create(self, grid, folder, clock=read_clock)

    def remember_pending(self: Mailbox, pool: Any, messages: dict[str, str], *args: Any) -> Any:
        nonlocal pending
        pending = messages
        yield from collect(self, pool, messages, *args)

    Mailbox.__init__ = create_with_clock  # type: ignore[assignment, method-assign]
    Mailbox._collect = remember_pending  # type: ignore[assignment, method-assign]


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def write_sitecustomize(function: Callable[[], None], folder: Path) -> str:
    """Return a value of PYTHONPATH, before the present one, with which processes call the function when they start."""
    folder.mkdir(exist_ok=True)
    imports = "from pathlib import Path\nfrom typing import Any"
    lines = [imports, inspect.getsource(write_text), inspect.getsource(function), f"{function.__name__}()\n"]
    (folder / "sitecustomize.py").write_text("\n\n".join(lines))
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def wait_until(condition: Callable[[], object], description: str) -> None:
    """Wait for other processes; fail after the timeout."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"not within {TIMEOUT:.0f} s: {description}"
        _NEVER.wait(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class DeployCommand:
    """A running `fedtailor deploy ...` command with all processes that it starts."""

    def __init__(
        self, args: Sequence[str], log: Path, env: Mapping[str, str], program: Sequence[str] = _PROGRAM
    ) -> None:
        self._marker = f"{_MARKER}={log.absolute()}".encode()
        self.log = log
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env, _MARKER: str(log.absolute())}
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*program, *args], stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env
            )

    def processes(self, text: str = "") -> list[int]:
        """Return the PIDs of its processes, including orphans, whose command line contains the text."""
        return [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if self._owns(folder, text)]

    def _owns(self, folder: Path, text: str) -> bool:
        with suppress(OSError):  # the process may have ended
            marked = self._marker in (folder / "environ").read_bytes().split(b"\0")
            return marked and text.encode() in (folder / "cmdline").read_bytes().replace(b"\0", b" ")
        return False

    def send(self, signal_number: signal.Signals, text: str = "") -> None:
        """Send a signal to its processes whose command line contains the text."""
        for pid in self.processes(text):
            with suppress(ProcessLookupError):
                os.kill(pid, signal_number)

    def kill(self) -> None:
        """Kill all processes, as if the machine lost power."""
        with suppress(ProcessLookupError):
            self.process.kill()  # first, because it would restart the others
        while self.processes():
            self.send(signal.SIGKILL)
        self.process.wait()

    def wait_for_end(self) -> None:
        """Wait until the command has ended after SIGTERM, as systemd does; no process may remain."""
        try:
            assert self.process.wait(TIMEOUT) == 0
            wait_until(lambda: not self.processes(), f"all processes of '{self.log.stem}' end")
        finally:
            self.kill()

    def output(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Federation:
    """A federation on this machine; the server and each client are separate commands."""

    folder: Path
    fed: ft.Federation
    stack: ExitStack
    commands: dict[str, DeployCommand] = field(default_factory=dict)

    @property
    def operator(self) -> Path:
        return self.folder / "operator"

    @property
    def deployment(self) -> Deployment:
        return read_operator_deployment(self.operator)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.fed.names)

    def client_folder(self, name: str) -> Path:
        return self.folder / name

    def bundle(self, name: str) -> Path:
        return self.operator / "bundles" / f"{name}.tar"

    def launch_server(self) -> DeployCommand:
        """Start the operator's server."""
        path = write_sitecustomize(let_deadline_pass, self.folder / let_deadline_pass.__name__)
        env = {"LATE_FILE": str(self.folder / "late"), "PYTHONPATH": path}
        return self._start("server", ["server", str(self.operator)], env)

    def start_server(self) -> DeployCommand:
        """Start the operator's server and wait until it serves."""
        server = self.launch_server()
        self.wait_for_server()
        return server

    def wait_for_server(self) -> None:
        """Wait until the server, which has just been started, serves."""
        server = self.commands["server"]
        before = server.output().count("Serving at")
        wait_until(
            lambda: server.output().count("Serving at") > before or server.process.poll() is not None,
            "the server serves",
        )
        assert server.process.poll() is None, server.output()

    def start_client(
        self,
        name: str,
        bundle: Path | None = None,
        setup: Callable[[], None] = block_training,
        more: Sequence[str] = (),
        **env: str,
    ) -> DeployCommand:
        """Start a client, whose processes call `setup` first."""
        path = write_sitecustomize(setup, self.folder / setup.__name__)
        env = {"BLOCK_FILE": str(self._block_file(name)), "PYTHONPATH": path, **env}
        args = ["client", "--name", name, "--bundle", str(bundle or self.bundle(name))]
        args += ["--data", str(self.folder / f"{name}.npz"), "--folder", str(self.client_folder(name))]
        return self._start(name, [*args, "--device", "cpu", "--yes", *more], env)

    def _start(self, name: str, args: Sequence[str], env: Mapping[str, str]) -> DeployCommand:
        command = self.commands[name] = DeployCommand(args, self.folder / f"{name}.log", env)
        self.stack.callback(command.kill)
        return command

    def start_program(self, name: str, program: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the server or a client with a command line of its own."""
        command = self.commands[name] = DeployCommand((), self.folder / f"{name}.log", env, program)
        self.stack.callback(command.kill)

    def run_command(self, *args: str) -> None:
        """Run `fedtailor deploy ...` in this process."""
        deploy_command([args[0], str(self.operator), *args[1:]], standalone_mode=False)

    def start_run(self) -> None:
        """Start the run when all clients that were started are online."""
        clients = self.commands.keys() - {"server"}

        def all_online() -> bool:
            states = superlink.client_states(self.operator)
            return all(states[name] == "online" for name in clients)

        wait_until(all_online, "the clients are online")
        self.run_command("start")

    def resume(self) -> None:
        """Resume the run; Flower takes a while to notice that a process has ended."""

        def is_resumed() -> bool:
            try:
                self.run_command("resume")
            except ft.FedTailorError as error:
                assert "is active" in str(error)
                return False
            return True

        wait_until(is_resumed, "the run can be resumed")

    def give_up_on(self, *names: str) -> None:
        """Let the deadline of the current round pass as soon as only replies of these clients are missing."""
        write_text(self.folder / "late", " ".join(names))

    def rounds_done(self) -> int:
        return int(self._status().get("round", 0))

    def _status(self) -> dict[str, Any]:
        status = read_status(self.operator)
        assert status.get("state") != "stopped", status
        return status

    def _block_file(self, name: str) -> Path:
        """Return the file that blocks a client: it does not train in rounds after the one in the file."""
        return self.folder / f"{name}.block"

    def hold(self, name: str, after: int) -> None:
        """Make a client wait as soon as it works on a round after `after`."""
        write_text(self._block_file(name), str(after))

    def block(self, name: str, after: int, selected: int | None = None) -> int:
        """Block a client while it works on a round after `after` for which all clients, or the first `selected`, were
        selected, and return the round."""
        blocked, number = self._block_file(name).with_suffix(".blocked"), after
        blocked.unlink(missing_ok=True)

        def is_blocked() -> bool:
            write_text(self._block_file(name), str(number))
            with suppress(OSError):  # the client removes the file when it continues
                return int(blocked.read_text()) > number
            return False

        while True:
            wait_until(is_blocked, f"{name} works on a round after {number}")
            number = int(blocked.read_text())
            if self._status().get("selected") == list(self.names[:selected]):
                return number

    def unblock(self, name: str) -> None:
        self._block_file(name).unlink()

    def wait_until_unblocked(self, name: str) -> None:
        """Wait until a client has noticed that it is not blocked any more, so that it can be blocked again."""
        blocked = self._block_file(name).with_suffix(".blocked")
        wait_until(lambda: not blocked.exists(), f"{name} continues")

    def wait_for_round(self, number: int) -> None:
        wait_until(lambda: self.rounds_done() >= number, f"round {number} is done")

    def wait_for_end(self) -> Run:
        wait_until(lambda: self._status().get("state") == "finished", "the run ends")
        return load_run(self.operator / "run")

    def stop(self) -> None:
        """Stop the clients, all at once, and then the server."""
        clients = [command for name, command in self.commands.items() if name != "server"]
        for commands in (clients, [self.commands["server"]]):
            for command in commands:
                command.process.terminate()  # once, because a second signal would not be handled at the very end
            for command in commands:
                command.wait_for_end()

    def simulate(self, schedule: Sequence[Sequence[int]]) -> Run:
        """Simulate the same rounds."""
        deployment = self.deployment
        return ft.simulate(
            deployment.method, deployment.model(), self.fed, schedule=schedule, batch_size=deployment.batch_size,
            engine="sequential", device="cpu", evaluate_every=len(schedule), seed=deployment.seed,
        )  # fmt: skip

    def check_same_models(self, run: Run, clients: Sequence[int] | None = None) -> None:
        """Check that the models in the clients' folders are bit-identical to a simulation's."""
        expected = self.simulate(schedule_of(run))
        for client in range(len(self.names)) if clients is None else clients:
            for moment in MOMENTS:
                deployed = read_personal_model(self.client_folder(self.names[client]), moment)
                simulated = expected.personal(client, moment)
                assert deployed and deployed.keys() == simulated.keys()
                assert all(torch.equal(deployed[n], simulated[n]) for n in deployed), (self.names[client], moment)


def schedule_of(run: Run) -> list[list[int]]:
    """Return the clients that delivered in each round."""
    return [list(record["clients"]) for record in run.records]


@contextmanager
def federation(
    folder: Path, names: Sequence[str], spare: int = 0, consent: CodeConsent = NO_CONSENT, **settings: Any
) -> Iterator[Federation]:
    """Create an operator's folder with these clients enrolled, their data, and data of `spare` more clients."""
    fed = ft.load("digits", clients=len(names) + spare, partition="dirichlet", alpha=1.0)
    fed = replace(fed, names=(*names, *(f"newcomer-{number}" for number in range(spare))))
    inputs = {"shape": list(fed.shape or ()), "classes": fed.classes or 0}
    defaults = {"method": "fedapa", "network": "mlp", "batch_size": 16, "address": f"127.0.0.1:{free_port()}"}
    deployment = make_deployment({**defaults, "inputs": inputs, "evaluate_every": 1000, **settings}, consent)
    deployment = deployment.freeze_code()
    flower_app.create_operator_folder(folder / "operator", deployment)
    make_keys(folder / "operator", list(names))
    for client, name in enumerate(fed.names):
        save_client_data(folder / f"{name}.npz", fed, client)
    with ExitStack() as stack:
        yield Federation(folder, fed, stack)


def redirect_bundle(bundle: Path, port: int) -> Path:
    """Return a copy of a bundle with the address of a proxy."""
    copy = bundle.with_name(f"{bundle.stem}-{port}.tar")
    with tarfile.open(bundle) as old, tarfile.open(copy, "w", format=tarfile.USTAR_FORMAT) as new:
        for entry in old.getmembers():
            file = old.extractfile(entry)
            assert file is not None
            data = file.read()
            if entry.name == "client.json":
                data = json.dumps(json.loads(data) | {"address": f"127.0.0.1:{port}"}).encode()
                entry.size = len(data)
            new.addfile(entry, BytesIO(data))
    return copy


def peak_memory(pid: int) -> int:
    """Return the peak memory of a process in bytes; zero if it has just ended."""
    with suppress(OSError, IndexError):
        return 1024 * int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0])
    return 0


def node_id_of(federation: Federation, name: str) -> int:
    """Return Flower's ID of a client."""
    node_id = enrolled_clients(federation.operator)[name].node_id
    assert node_id is not None
    return node_id
