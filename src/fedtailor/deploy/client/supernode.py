"""The client's side of Flower: a SuperNode that is restarted until it is connected, whatever fails."""

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fedtailor.deploy import executor
from fedtailor.deploy.client.client_folder import worker_file
from fedtailor.deploy.client.server_certificate import certificate_warnings
from fedtailor.deploy.keys import Bundle, read_bundle
from fedtailor.deploy.process_ends import describe_exit, memory_kills
from fedtailor.deploy.server.proxy.proxy import ERROR_CODE
from fedtailor.deploy.subprocesses import (
    Subprocess,
    exclusive,
    flower_command,
    flower_environment,
    free_address,
    is_healthy,
    keep_running,
    skip_repeats,
    stop_all,
)
from fedtailor.experiments.deployment import read_outline
from fedtailor.runs.files import make_private_folder, write_atomic, write_errors, write_private
from fedtailor.training.signals import deferred_signals

_STALL_TIMEOUT = 90.0  # seconds without progress; Flower itself replies for a dead executor after 60
_CHECK_INTERVAL = 2.0  # seconds between checks of Flower's processes
_LOG = "log/supernode.log"
_WORKER = Path(__file__).with_name("worker_process.py")
_CONNECTED = re.compile(r"SuperNode ID: (\d+)")
_REJECTED = re.compile(r"\[code: (\d+)\] (.+)")
_DONE = re.compile(r"Sent successfully|Failed to (send|receive) message|Ignoring|Failed to create task")


@contextmanager
def lock_client_folder(folder: Path) -> Iterator[None]:
    """Lock a client's folder for this process.

    >>> from tempfile import mkdtemp
    >>> with lock_client_folder(Path(mkdtemp())): print("locked")
    locked
    """
    with write_errors(f"The folder '{folder}' cannot be written"):
        (folder / "home").mkdir(parents=True, exist_ok=True)
    with exclusive(folder / "home", f"The client in '{folder}' is already running; stop it first."):
        yield


def keep_connected(folder: Path, say: Callable[[str], None]) -> None:
    """Take part in a federation until SIGTERM or Ctrl-C; the client's folder must be locked and have a bundle.

    >>> keep_connected(Path("nowhere"), print)
    Traceback (most recent call last):
    fedtailor.errors.DeployError: There is no bundle in 'nowhere/bundle'; unpack the file that the operator sent you.
    """
    bundle, home = read_bundle(folder / "bundle"), folder / "home"
    deadline = read_outline(bundle.folder).deadline
    connection = _Connection(bundle, home, skip_repeats(say))
    with deferred_signals(only_first=False) as stop:
        for left in (home, home / "worker", home / "executor"):  # by a client that was killed
            stop_all(left)

        def start() -> Subprocess:
            _deactivate_previous(bundle, home)
            connection.reset()
            make_private_folder(_secret_file(folder).parent)
            write_private(_secret_file(folder), secrets.token_bytes(32))
            command = _supernode_command(bundle, connection.local_address, _secret_file(folder))
            return Subprocess(home, command, flower_environment(home), folder / _LOG, connection.read_line)

        def watch(supernode: Subprocess) -> bool:
            with _running_worker(folder, connection.say), _running_executor(folder, connection):
                _monitor(supernode, connection, folder, deadline, stop)
            supernode.stop()
            if supernode.returncode == 0 and stop.is_set():  # it has deactivated itself
                (home / "node").unlink(missing_ok=True)
            return connection.connected

        keep_running(start, watch, stop)


def _secret_file(folder: Path) -> Path:
    """Return the file with the secret that lets the executor, and no other program, fetch messages."""
    return folder / "home" / "executor" / "secret"


@contextmanager
def _running_worker(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keep a worker running. It ends with the SuperNode, because the message it works on has then been lost."""
    home, command, kills = folder / "home" / "worker", [str(_WORKER), str(folder.absolute())], memory_kills()

    def report_end(code: int) -> None:
        end = describe_exit(code, memory_kills() > kills)
        with suppress(OSError):  # the executor reports it to the server
            write_atomic(worker_file(folder).with_name(executor.WORKER_END_FILE), f"the worker {end}".encode())
        say(f"Warning: The process that trains {end}; starting it again. See '{folder / 'log' / 'worker.log'}'.")

    with _running(lambda: Subprocess(home, command, os.environ, folder / "log" / "worker.log"), report_end):
        yield


@contextmanager
def _running_executor(folder: Path, connection: "_Connection") -> Iterator[None]:
    """Keep an executor running, which passes the messages of the SuperNode on to the worker."""
    home, paths = folder / "home" / "executor", (_secret_file(folder), worker_file(folder))
    command = [executor.__file__, connection.local_address, *(str(path.absolute()) for path in paths)]

    def start() -> Subprocess:
        connection.handling = False
        log = folder / "log" / "executor.log"
        return Subprocess(home, command, flower_environment(home), log, connection.read_executor_line)

    with _running(start):
        yield


@contextmanager
def _running(start: Callable[[], Subprocess], report_end: Callable[[int], None] = lambda code: None) -> Iterator[None]:
    """Keep a subprocess running beside the SuperNode; `report_end` gets the exit code if it ends by itself."""
    stop = Event()

    def watch(process: Subprocess) -> bool:
        started = time.monotonic()
        while process.returncode is None and not stop.wait(0.2):
            pass
        if (code := process.returncode) is not None and not stop.is_set():
            report_end(code)
        return time.monotonic() > started + _STALL_TIMEOUT

    thread = threading.Thread(target=keep_running, args=(start, watch, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class _Connection:
    """The state of the connection and of the current message, parsed from the SuperNode's output."""

    def __init__(self, bundle: Bundle, home: Path, say: Callable[[str], None]) -> None:
        self._bundle, self._home, self.say = bundle, home, say
        self.reset()

    def reset(self) -> None:
        self.local_address = free_address()  # of the SuperNode, for processes on this machine
        self.connected = False  # at least once since the SuperNode was started
        self.lost = False  # the last connection attempt failed
        self.rejected = False  # the reason was already reported
        self.busy_since: float | None = None  # when the current message arrived
        self.handling = False  # whether the executor has the current message
        self.sending = False  # the reply to the current message

    def read_executor_line(self, line: str) -> None:
        """Update the state from a line of the executor's output."""
        if line in (executor.HANDLING, executor.DONE):
            self.handling = line == executor.HANDLING

    def read_line(self, line: str) -> None:
        """Update the state from a line of output, and report changes to the user."""
        name, address = self._bundle.name, self._bundle.address
        if node := _CONNECTED.search(line):
            self.connected, self.lost = True, False
            write_atomic(self._home / "node", node[1].encode())
            self.say(f"Connected to {address} as '{name}'.")
            for warning in certificate_warnings(self._bundle):
                self.say(f"Warning: {warning}")
        elif "Connection successful after" in line and self.connected:
            self.lost = False
            self.say(f"Connected to {address} as '{name}'.")
        elif "Connection attempt failed" in line:
            self.lost = True
        elif "handshake operation timed out" in line:  # after which the SuperNode ends
            self.lost = self.rejected = True
            self.report_loss()
        elif "certificate has expired" in line:
            self.rejected = True
            self.say(f"The certificate of the server at {address}, or of its authority, has expired; ask the operator.")
        elif "certificate verify failed" in line:
            self.rejected = True
            self.say(f"The server at {address} is not this federation's server.")
        elif rejection := _REJECTED.search(line):
            self.rejected = True
            self.say(self._explain(int(rejection[1]), rejection[2]))
        elif "Receiving:" in line:
            self.busy_since, self.sending = time.monotonic(), False
        elif "Sending:" in line:
            self.sending = True
        elif _DONE.search(line):
            self.busy_since = None
            if "Failed to send" in line:
                reason = "it is too large" if "413" in line else f"see {_LOG}"
                self.say(f"The server did not accept a reply; {reason}.")

    def report_loss(self) -> None:
        """Report a lost connection. One line is no evidence, because Flower's local processes also lose each other."""
        if self.lost:
            problem = "Lost the connection to" if self.connected else "No server responds at"
            self.say(f"{problem} {self._bundle.address}; retrying.")

    def _explain(self, code: int, text: str) -> str:
        if code == ERROR_CODE:
            return text
        if "activate" not in text:
            return f"{self._bundle.address} reports an error: {text}"
        name = self._bundle.name
        return f"'{name}' seems to be connected already; it joins within a minute unless its bundle is used elsewhere."


@dataclass
class _LastSeen:
    """When the SuperNode was last seen alive, and the executor at work on a message."""

    supernode: float
    executor: float

    def update(self, connection: _Connection) -> None:
        now = time.monotonic()
        if is_healthy(connection.local_address):
            self.supernode = now
        if connection.handling:
            self.executor = now


def _monitor(supernode: Subprocess, connection: _Connection, folder: Path, deadline: float, stop: Event) -> None:
    """Return when the SuperNode has ended or stalled, or when `stop` is set."""
    checked = time.monotonic()
    last_seen = _LastSeen(checked, checked)
    while not stop.wait(0.2) and supernode.returncode is None:
        if time.monotonic() < checked + _CHECK_INTERVAL:
            continue
        connection.report_loss()
        last_seen.update(connection)
        checked = time.monotonic()
        if problem := _find_stall(connection, last_seen, checked, deadline):
            connection.say(f"Flower's client has stalled: {problem}; restarting it.")
            return
    if not stop.is_set() and not connection.rejected:
        ended = "ended unexpectedly" if connection.connected else "did not start"
        connection.say(f"Flower's client {ended} (exit code {supernode.returncode}); retrying. See '{folder / _LOG}'.")


def _find_stall(connection: _Connection, last_seen: _LastSeen, now: float, deadline: float) -> str | None:
    """Return why the SuperNode has stalled, or None.

    The SuperNode handles one message at a time and waits for the reply without a timeout. It waits forever if the
    executor ends before it has fetched the message or handed over the whole reply.
    """
    busy = now if connection.busy_since is None else connection.busy_since
    unhandled = not connection.sending and now > max(busy, last_seen.executor) + _STALL_TIMEOUT
    problems = {
        "it does not respond": now > last_seen.supernode + _STALL_TIMEOUT,
        "no process handles the server's message": unhandled,
        "a reply took more than twice the deadline": now > busy + 2 * deadline + _STALL_TIMEOUT,
    }
    return next((problem for problem, holds in problems.items() if holds), None)


def _supernode_command(bundle: Bundle, address: str, secret: Path) -> list[str]:
    """Return the command of a SuperNode that starts no processes: the executor fetches its messages."""
    host, _, port = address.rpartition(":")
    folder = bundle.folder.absolute()
    return [
        flower_command("flower-supernode"), "--superlink", bundle.address, "--host", host, "--port", port,
        "--root-certificates", str(folder / "authority.crt"), "--auth-supernode-private-key", str(folder / "key"),
        "--isolation", "process", "--superexec-auth-secret-file", str(secret.absolute()),
    ]  # fmt: skip


def _deactivate_previous(bundle: Bundle, home: Path) -> None:
    """Deactivate the node of a SuperNode that was killed; otherwise the server rejects the next one for a minute."""
    path = home / "node"
    if not path.is_file():
        return
    with suppress(Exception):  # optional: without it the client only connects later
        if _deactivate(bundle, int(path.read_text())):
            path.unlink()


def _deactivate(bundle: Bundle, node_id: int) -> bool:
    """Send a request to deactivate a node, and return whether the server has processed it."""
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key = load_ssh_private_key((bundle.folder / "key").read_bytes(), None)
    assert isinstance(key, EllipticCurvePrivateKey)
    interceptor = NodeAuthHttpInterceptor(key, key.public_key())
    authority = str(bundle.folder / "authority.crt")
    with FleetHttpClient.from_server_address(bundle.address, False, authority, [interceptor]) as fleet:
        try:
            fleet.DeactivateNode(DeactivateNodeRequest(node_id=node_id))
        except httpx.HTTPStatusError as error:
            return error.response.status_code < 500  # 4xx: it was not active; 5xx: only the proxy is running
    return True
