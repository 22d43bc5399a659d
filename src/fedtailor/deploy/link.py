"""The server's side of Flower: its SuperLink behind the gate, and what the operator asks of it."""

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

from fedtailor.deploy.child import (
    Child,
    alone,
    answers,
    command,
    end_all,
    environment,
    free_address,
    hearing_stops,
    once,
    rotating,
)
from fedtailor.deploy.example import preview
from fedtailor.deploy.folder import Enrolled, enrol, enrolled
from fedtailor.deploy.gate import Gate, Limits, bind, standing
from fedtailor.deploy.settings import Deployment, read_deployment
from fedtailor.errors import Refused
from fedtailor.files import write
from fedtailor.toml import to_toml
from fedtailor.untrusted import parse_json

_NAME = "fedtailor"  # of the connection in Flower's settings
_PATIENCE = 120.0  # seconds for Flower to start, and for one of its commands
_LOOK = 10.0  # seconds between two looks at whether it is well
_SILENCE = 90.0  # seconds without a sign of life after which it is given up
_IN_USE = "[code: 23]"  # Flower's word for a key that is registered
_GONE = "unregistered"
_WORDS = 2**26  # bytes


def serve(folder: Path, say: Callable[[str], None] = print, limits: Limits | None = None) -> None:
    """Serve a federation until SIGTERM or Ctrl-C; what ends before that is a refusal, for systemd to start it again.

    >>> serve(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.Refused: There is no deployment in 'nowhere'; make one: fedtailor deploy init nowhere.
    """
    say = once(say)
    deployment, home, keys = read_deployment(folder), folder / "home", folder / "keys"
    home.mkdir(parents=True, exist_ok=True)
    if not (keys / "server.crt").is_file():
        raise Refused(f"There are no keys in '{folder}'; make them: fedtailor deploy keys {folder} --clients a,b,c.")
    running = f"A server for '{folder}' is running already; stop it first."
    with alone(home, running), hearing_stops() as asked, bind(deployment.host, deployment.port) as listener:
        end_all(home)  # of a server that was killed
        link = _settle(folder)
        trust = ssl.create_default_context(cafile=keys / "authority.crt")
        gate = Gate(link, trust, limits or _limits(folder, deployment))
        _keep_log(folder)
        flower = Child(home, _superlink(folder, link), _told(folder), folder / "log" / "superlink.log")
        try:
            _wait_for(link, trust, flower, asked)
            seen = _register(folder, gate, {}, say)
            with standing(gate, listener, keys / "server.crt", keys / "server.key") as stands:
                say(f"Serving at {deployment.address}.")
                well = time.monotonic()
                while not asked.wait(1.0):
                    if time.monotonic() > well + _LOOK and answers(link, trust):
                        well = time.monotonic()
                    _check(folder, flower.ended is None, stands(), time.monotonic() - well)
                    seen = _register(folder, gate, seen, say)
        finally:
            flower.stop()


def submit(folder: Path) -> int:
    """Start the app in the folder; gives the run's number.

    >>> submit(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.Refused: There was no server for 'nowhere' yet; start it: fedtailor deploy server nowhere.
    """
    return int(_flwr(folder, "run", str((folder / "app").absolute()), _NAME)["run-id"])


def run_state(folder: Path, run: int) -> str:
    """What Flower says of a run: pending, starting, running, finished:completed, finished:failed, finished:stopped.

    >>> run_state(Path("nowhere"), 1)
    Traceback (most recent call last):
    fedtailor.errors.Refused: There was no server for 'nowhere' yet; start it: fedtailor deploy server nowhere.
    """
    return str(_flwr(folder, "list", _NAME, "--run-id", str(run))["runs"][0]["status"])


def stop(folder: Path, run: int) -> None:
    """Stop a run.

    >>> stop(Path("nowhere"), 1)
    Traceback (most recent call last):
    fedtailor.errors.Refused: There was no server for 'nowhere' yet; start it: fedtailor deploy server nowhere.
    """
    _flwr(folder, "stop", str(run), _NAME)


def nodes(folder: Path) -> dict[str, str]:
    """How every client is: online, offline, registered (it was never there), left.

    A client that goes without a word is online for another minute: so long Flower waits for a sign of life.

    >>> nodes(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.Refused: There was no server for 'nowhere' yet; start it: fedtailor deploy server nowhere.
    """
    states = _states(folder)
    return {
        name: "left" if client.left else states.get(client.node or 0, "not registered")
        for name, client in enrolled(folder).items()
    }


# ---- Flower's server


def _limits(folder: Path, deployment: Deployment) -> Limits:
    """Room for twice what a client has to send, for pieces that are sent again, and for words."""
    upload = preview(deployment, max(len(enrolled(folder)), 2), own_size=100)["up"]
    return Limits(upload=2 * sum(sent.bytes for sent in upload) + _WORDS)


def _settle(folder: Path) -> str:
    """The address of Flower on this machine, the same as last time if it is free, and written down for its commands."""
    kept = folder / "home" / "address"
    address = kept.read_text().strip() if kept.is_file() else ""
    if not address or not _is_free(address):
        address = free_address()
    write(kept, address.encode())
    authority = str((folder / "keys" / "authority.crt").absolute())
    about = {"superlink": {"default": _NAME, _NAME: {"address": address, "root-certificates": authority}}}
    write(folder / "home" / "config.toml", to_toml(about).encode())
    return address


def _is_free(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_server((host, int(port))):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def _check(folder: Path, runs: bool, stands: bool, silent: float) -> None:
    """Refuse to go on without one of the parts."""
    if not runs:
        raise Refused(f"Flower ended by itself; '{folder / 'log' / 'superlink.log'}' says why.")
    if not stands:
        raise Refused(f"The gate ended by itself; '{folder / 'log' / 'gate.log'}' says why.")
    if silent > _SILENCE:
        raise Refused(f"Flower has not answered for {silent:.0f} s.")


def _superlink(folder: Path, link: str) -> list[str]:
    host, _, port = link.rpartition(":")
    keys = folder.absolute() / "keys"
    return [
        command("flower-superlink"), "--host", host, "--port", port,
        "--ssl-ca-certfile", str(keys / "authority.crt"), "--ssl-certfile", str(keys / "server.crt"),
        "--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth",
        "--database", str(folder.absolute() / "superlink.db"), "--disable-runtime-dependency-installation",
    ]  # fmt: skip


def _told(folder: Path) -> dict[str, str]:
    return environment(folder / "home", FEDTAILOR_DEPLOYMENT=str(folder.absolute()))


def _keep_log(folder: Path) -> None:
    handler = rotating(folder / "log" / "gate.log")
    for name in ("fedtailor.gate", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it has a line for every request


def _wait_for(link: str, trust: ssl.SSLContext, flower: Child, asked: Event) -> None:
    until = time.monotonic() + _PATIENCE
    while not answers(link, trust) and not asked.wait(0.1):
        if flower.ended is not None or time.monotonic() > until:
            raise Refused("Flower did not start; log/superlink.log says why.")


# ---- clients


def _register(
    folder: Path, gate: Gate, seen: Mapping[str, Enrolled], say: Callable[[str], None]
) -> dict[str, Enrolled]:
    """Make Flower and the gate know those who are enrolled and nobody else; gives who that is."""
    try:
        found = enrolled(folder)
        if found == seen:
            return found
        gate.admit({name: client.public_key for name, client in found.items() if not client.left})
        states = _states(folder)
        for name, client in found.items():
            state = states.get(client.node or 0)
            if client.left and state not in (None, _GONE):
                _flwr(folder, "supernode", "unregister", str(client.node), _NAME)
                say(f"'{name}' has left.")
            elif not client.left and state is None:
                found[name] = _enter(folder, name, client)
                say(f"'{name}' may connect.")
            elif not client.left and state == _GONE:
                say(f"'{name}' has left before, and its key is of no more use; enrol it under another name.")
        return found
    except Refused as error:
        say(str(error))
        return dict(seen)


def _enter(folder: Path, name: str, client: Enrolled) -> Enrolled:
    """Register a client's key and write its number down; once is enough, and a crash in between does no harm."""
    with NamedTemporaryFile("w", suffix=".pub") as file:
        file.write(client.public_key)
        file.flush()
        try:
            node = int(_flwr(folder, "supernode", "register", file.name, _NAME, "--name", name)["node-id"])
        except Refused as error:
            if _IN_USE not in str(error.__cause__):
                raise
            node = _number(folder, client.public_key)
    about = replace(enrolled(folder)[name], node=node)
    enrol(folder, {name: about})
    return about


def _number(folder: Path, public_key: str) -> int:
    """The number under which Flower knows a key; its commands do not tell."""
    spelled = load_ssh_public_key(public_key.encode()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    with closing(sqlite3.connect(f"{(folder / 'superlink.db').absolute().as_uri()}?mode=ro", uri=True)) as database:
        row = database.execute("select node_id from node where public_key = ?", [spelled]).fetchone()
    if row is None:
        raise Refused("Flower knows a client's key and does not know it; remove superlink.db to begin anew.")
    return int(row[0]) % 2**64  # it is kept with a sign


def _states(folder: Path) -> dict[int, str]:
    return {int(node["node-id"]): str(node["status"]) for node in _flwr(folder, "supernode", "list", _NAME)["nodes"]}


# ---- Flower's commands


def _flwr(folder: Path, *words: str) -> dict[str, Any]:
    """What one of Flower's commands answers."""
    if not (folder / "home" / "config.toml").is_file():
        raise Refused(f"There was no server for '{folder}' yet; start it: fedtailor deploy server {folder}.")
    call = [command("flwr"), *words, "--format", "json"]
    try:
        done = subprocess.run(call, env=_told(folder), capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired as error:
        raise Refused(f"Flower did not answer to 'flwr {words[0]}' within {_PATIENCE:.0f} s.") from error
    try:
        said = dict(parse_json(done.stdout))
    except (ValueError, TypeError) as error:
        raise Refused(f"Flower did not do 'flwr {words[0]}': {_last(done.stderr or done.stdout)}.") from error
    if said.get("success"):
        return said
    why = str(said.get("error-message", ""))
    sentence = f"Flower did not do 'flwr {words[0]}': {_last(why)}."
    if "is unavailable" in why:
        sentence = f"The server for '{folder}' is not running; start it: fedtailor deploy server {folder}."
    raise Refused(sentence) from ValueError(why)


def _last(text: str) -> str:
    """The last line of what a command said, as part of a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".").replace(". ", "; ") if lines else "it did not say why"
