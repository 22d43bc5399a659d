"""The server's side of Flower: the SuperLink behind the reverse proxy, and commands to control it."""

import logging
import socket
import sqlite3
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Event
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from fedtailor.core.untrusted_input import parse_json
from fedtailor.deploy.dummy_client import preview_payload
from fedtailor.deploy.server.operator_folder import EnrolledClient, enroll, enrolled_clients
from fedtailor.deploy.server.proxy import Limits, Proxy, bind, run_proxy
from fedtailor.deploy.subprocesses import (
    Subprocess,
    exclusive,
    flower_command,
    flower_environment,
    free_address,
    is_healthy,
    rotating_log,
    skip_repeats,
    stop_all,
)
from fedtailor.errors import DeployError, FedTailorError
from fedtailor.experiments.deployment import Deployment, read_deployment
from fedtailor.runs.files import write_atomic
from fedtailor.runs.toml import to_toml
from fedtailor.training.signals import deferred_signals

_CONNECTION = "fedtailor"  # name of the connection in Flower's configuration
_FLOWER_TIMEOUT = 120.0  # seconds for Flower to start, and for each of its commands
_HEALTH_INTERVAL = 10.0  # seconds between health checks
_HEALTH_TIMEOUT = 90.0  # seconds without a successful health check before the server ends
_KEY_IN_USE = "[code: 23]"  # Flower's error code for a registered key
_UNREGISTERED = "unregistered"
_OVERHEAD_BYTES = 2**26  # for everything in an upload except tensors


def serve(folder: Path, say: Callable[[str], None] = print, limits: Limits | None = None) -> None:
    """Serve a federation until SIGTERM or Ctrl-C; raise an error if a part of it ends earlier, so systemd restarts it.

    >>> serve(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.DeployError: There is no deployment in 'nowhere'; create one with: fedtailor deploy init nowhere.
    """
    say = skip_repeats(say)
    deployment, home, keys = read_deployment(folder), folder / "home", folder / "keys"
    home.mkdir(parents=True, exist_ok=True)
    if not (keys / "server.crt").is_file():
        raise DeployError(f"'{folder}' has no keys; create them with: fedtailor deploy keys {folder} --clients a,b,c.")
    in_use = f"A server for '{folder}' is already running; stop it first."
    with (
        exclusive(home, in_use),
        deferred_signals(only_first=False) as stop,
        bind(deployment.host, deployment.port) as listener,
    ):
        stop_all(home)  # left over from a server that was killed
        address = _configure(folder)
        tls = ssl.create_default_context(cafile=keys / "authority.crt")
        proxy = Proxy(address, tls, limits or _limits(folder, deployment))
        _set_up_proxy_log(folder)
        command = _superlink_command(folder, address)
        superlink = Subprocess(home, command, _environment(folder), folder / "log" / "superlink.log")
        try:
            _wait_until_healthy(address, tls, superlink, stop)
            registered = _register_clients(folder, proxy, {}, say)
            with run_proxy(proxy, listener, keys / "server.crt", keys / "server.key") as is_proxy_running:
                say(f"Serving at {deployment.address}.")
                healthy_at = time.monotonic()
                while not stop.wait(1.0):
                    if time.monotonic() > healthy_at + _HEALTH_INTERVAL and is_healthy(address, tls):
                        healthy_at = time.monotonic()
                    _check(folder, superlink.returncode is None, is_proxy_running(), time.monotonic() - healthy_at)
                    registered = _register_clients(folder, proxy, registered, say)
        finally:
            superlink.stop()


def submit(folder: Path) -> int:
    """Start a run of the folder's app and return Flower's ID of the run.

    >>> submit(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.DeployError: The server for 'nowhere' has not been started; run: fedtailor deploy server nowhere.
    """
    return int(_flwr(folder, "run", str((folder / "app").absolute()), _CONNECTION)["run-id"])


def run_state(folder: Path, run: int) -> str:
    """Return Flower's state of a run: pending, starting, running, or finished:completed, :failed, or :stopped.

    >>> run_state(Path("nowhere"), 1)
    Traceback (most recent call last):
    fedtailor.errors.DeployError: The server for 'nowhere' has not been started; run: fedtailor deploy server nowhere.
    """
    return str(_flwr(folder, "list", _CONNECTION, "--run-id", str(run))["runs"][0]["status"])


def stop(folder: Path, run: int) -> None:
    """Stop a run.

    >>> stop(Path("nowhere"), 1)
    Traceback (most recent call last):
    fedtailor.errors.DeployError: The server for 'nowhere' has not been started; run: fedtailor deploy server nowhere.
    """
    _flwr(folder, "stop", str(run), _CONNECTION)


def client_states(folder: Path) -> dict[str, str]:
    """Return the state of every client: online, offline, registered (it has never connected), or left.

    A client that disappears without notice remains online for another minute, which is Flower's timeout.

    >>> client_states(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.DeployError: The server for 'nowhere' has not been started; run: fedtailor deploy server nowhere.
    """
    states = _node_states(folder)
    return {
        name: "left" if client.left else states.get(client.node_id or 0, "not registered")
        for name, client in enrolled_clients(folder).items()
    }


# ---- Flower's server


def _limits(folder: Path, deployment: Deployment) -> Limits:
    """Return limits of twice the expected upload, because chunks may be sent again, plus overhead."""
    upload = preview_payload(deployment, max(len(enrolled_clients(folder)), 2), num_samples=100)["up"]
    return Limits(upload_bytes=2 * sum(tensor.bytes for tensor in upload) + _OVERHEAD_BYTES)


def _configure(folder: Path) -> str:
    """Choose Flower's local address, the previous one if it is free, and write the configuration for `flwr`."""
    path = folder / "home" / "address"
    address = path.read_text().strip() if path.is_file() else ""
    if not address or not _is_free(address):
        address = free_address()
    write_atomic(path, address.encode())
    authority = str((folder / "keys" / "authority.crt").absolute())
    connection = {"address": address, "root-certificates": authority}
    config = {"superlink": {"default": _CONNECTION, _CONNECTION: connection}}
    write_atomic(folder / "home" / "config.toml", to_toml(config).encode())
    return address


def _is_free(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_server((host, int(port))):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def _check(folder: Path, is_superlink_running: bool, is_proxy_running: bool, unhealthy: float) -> None:
    """Raise an error if a part of the server has ended or does not respond."""
    if not is_superlink_running:
        raise DeployError(f"Flower's SuperLink ended unexpectedly; see '{folder / 'log' / 'superlink.log'}'.")
    if not is_proxy_running:
        raise DeployError(f"The reverse proxy ended unexpectedly; see '{folder / 'log' / 'proxy.log'}'.")
    if unhealthy > _HEALTH_TIMEOUT:
        raise DeployError(f"Flower's SuperLink has not responded for {unhealthy:.0f} s; restart the server.")


def _superlink_command(folder: Path, address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    keys = folder.absolute() / "keys"
    return [
        flower_command("flower-superlink"), "--host", host, "--port", port,
        "--ssl-ca-certfile", str(keys / "authority.crt"), "--ssl-certfile", str(keys / "server.crt"),
        "--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth",
        "--database", str(folder.absolute() / "superlink.db"), "--disable-runtime-dependency-installation",
    ]  # fmt: skip


def _environment(folder: Path) -> dict[str, str]:
    return flower_environment(folder / "home", FEDTAILOR_DEPLOYMENT=str(folder.absolute()))


def _set_up_proxy_log(folder: Path) -> None:
    handler = rotating_log(folder / "log" / "proxy.log")
    for name in ("fedtailor.proxy", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request at INFO


def _wait_until_healthy(address: str, tls: ssl.SSLContext, superlink: Subprocess, stop: Event) -> None:
    deadline = time.monotonic() + _FLOWER_TIMEOUT
    while not is_healthy(address, tls) and not stop.wait(0.1):
        if superlink.returncode is not None or time.monotonic() > deadline:
            raise DeployError("Flower's SuperLink did not start; see log/superlink.log.")


# ---- clients


def _register_clients(
    folder: Path, proxy: Proxy, registered: Mapping[str, EnrolledClient], say: Callable[[str], None]
) -> dict[str, EnrolledClient]:
    """Make Flower and the proxy accept exactly the enrolled clients, and return these."""
    try:
        clients = enrolled_clients(folder)
        if clients == registered:
            return clients
        proxy.allow_only({name: client.public_key for name, client in clients.items() if not client.left})
        states = _node_states(folder)
        for name, client in clients.items():
            state = states.get(client.node_id or 0)
            if client.left and state not in (None, _UNREGISTERED):
                _flwr(folder, "supernode", "unregister", str(client.node_id), _CONNECTION)
                say(f"'{name}' has left.")
            elif not client.left and state is None:
                clients[name] = _register_client(folder, name, client)
                say(f"'{name}' can connect.")
            elif not client.left and state == _UNREGISTERED:
                say(f"'{name}' has left before and its key is revoked; enroll it under another name.")
        return clients
    except FedTailorError as error:
        say(str(error))
        return dict(registered)


def _register_client(folder: Path, name: str, client: EnrolledClient) -> EnrolledClient:
    """Register a client's key with Flower and save its node ID; repeating this after a crash is safe."""
    with NamedTemporaryFile("w", suffix=".pub") as file:
        file.write(client.public_key)
        file.flush()
        try:
            node_id = int(_flwr(folder, "supernode", "register", file.name, _CONNECTION, "--name", name)["node-id"])
        except FedTailorError as error:
            if _KEY_IN_USE not in str(error.__cause__):
                raise
            node_id = _find_node_id(folder, client.public_key)
    updated = replace(enrolled_clients(folder)[name], node_id=node_id)
    enroll(folder, {name: updated})
    return updated


def _find_node_id(folder: Path, public_key: str) -> int:
    """Return the node ID of a registered key from Flower's database; no command of Flower provides it."""
    encoded = load_ssh_public_key(public_key.encode()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    with closing(sqlite3.connect(f"{(folder / 'superlink.db').absolute().as_uri()}?mode=ro", uri=True)) as database:
        row = database.execute("select node_id from node where public_key = ?", [encoded]).fetchone()
    if row is None:
        raise DeployError(
            "Flower's database is inconsistent; stop the server, delete superlink.db, and start it again."
        )
    return int(row[0]) % 2**64  # the database stores a signed integer


def _node_states(folder: Path) -> dict[int, str]:
    nodes = _flwr(folder, "supernode", "list", _CONNECTION)["nodes"]
    return {int(node["node-id"]): str(node["status"]) for node in nodes}


# ---- Flower's commands


class UnknownRunError(DeployError):
    """Flower does not know a run, because its database was replaced."""


def _flwr(folder: Path, *args: str) -> dict[str, Any]:
    """Run one of Flower's commands and return its output."""
    if not (folder / "home" / "config.toml").is_file():
        raise DeployError(f"The server for '{folder}' has not been started; run: fedtailor deploy server {folder}.")
    command = [flower_command("flwr"), *args, "--format", "json"]
    try:
        done = subprocess.run(
            command, env=_environment(folder), capture_output=True, text=True, timeout=_FLOWER_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DeployError(f"'flwr {args[0]}' did not finish within {_FLOWER_TIMEOUT:.0f} s.") from error
    try:
        output = dict(parse_json(done.stdout))
    except (ValueError, TypeError) as error:
        raise DeployError(f"'flwr {args[0]}' failed: {_last_line(done.stderr or done.stdout)}.") from error
    if output.get("success"):
        return output
    problem = str(output.get("error-message", ""))
    message = f"'flwr {args[0]}' failed: {_last_line(problem)}."
    if "is unavailable" in problem:
        message = f"The server for '{folder}' is not running; start it with: fedtailor deploy server {folder}."
    kind = UnknownRunError if "Run ID not found" in problem else DeployError  # Flower has no error codes
    raise kind(message) from ValueError(problem)


def _last_line(text: str) -> str:
    """Return the last line of a command's output as part of a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".").replace(". ", "; ") if lines else "it gave no reason"
