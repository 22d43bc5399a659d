"""The operator's folder: the enrolled clients and the status of the run.

deployment.toml   the method, the network, and all other settings
keys/             the authority and the server's certificate
bundles/NAME.tar  the file for each client; confidential
clients.json      the enrolled clients, in the order of enrollment
home/, log/       Flower's files and the logs; superlink.db is Flower's database
run/              the run folder, without personal models, which stay with the clients
status.json       the status of the run
suspensions.json  the suspended clients, and those with problems
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedtailor.core.untrusted_input import parse_json, read_text
from fedtailor.errors import DeployError, unknown_name
from fedtailor.runs.files import wait_for_lock, write_atomic

_CLIENTS, _STATUS = "clients.json", "status.json"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
_MAX_BYTES = 2**26


@dataclass(frozen=True)
class EnrolledClient:
    """A client that may take part."""

    public_key: str
    node_id: int | None = None  # Flower's ID, once the client is registered there
    left: bool = False  # permanently
    next_key: str | None = None  # public key that replaces `public_key` as soon as the client uses it


def check_name(name: str) -> str:
    """Return a client's name if it can be used in file names.

    >>> check_name("hospital-a")
    'hospital-a'
    """
    if not _NAME.fullmatch(name):
        raise DeployError(
            f"A client's name must have 1 to 64 letters, digits, '-', '_', or '.' (not first), got {name[:80]!r}."
        )
    return name


def enrolled_clients(folder: Path) -> dict[str, EnrolledClient]:
    """Return the enrolled clients by name, in the order of enrollment."""
    path = folder / _CLIENTS
    if not path.is_file():
        return {}
    try:
        clients = parse_json(read_text(path, "The list of clients", _MAX_BYTES))
        return {check_name(name): EnrolledClient(**fields) for name, fields in clients.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DeployError(f"'{path}' is not a valid list of clients; restore it from a backup.") from error


def enroll(folder: Path, clients: Mapping[str, EnrolledClient]) -> None:
    """Add clients to the enrolled ones, or update them; existing clients keep their order."""
    with (folder / f".{_CLIENTS}").open("ab") as lock:  # the server and a command may write at the same time
        wait_for_lock(lock)
        updated = enrolled_clients(folder) | dict(clients)
        text = json.dumps({check_name(name): asdict(client) for name, client in updated.items()}, indent=1)
        write_atomic(folder / _CLIENTS, (text + "\n").encode())


def mark_as_left(folder: Path, name: str) -> None:
    """Mark a client as one that has left permanently."""
    clients = enrolled_clients(folder)
    if name not in clients:
        raise unknown_name("client", name, clients)
    enroll(folder, {name: replace(clients[name], left=True)})


def write_status(folder: Path, status: Mapping[str, Any]) -> None:
    """Write the status of the run, for `fedtailor deploy status`."""
    write_atomic(folder / _STATUS, (json.dumps(status, indent=1) + "\n").encode())


def read_status(folder: Path) -> dict[str, Any]:
    """Return the last status of the run; empty before the first one."""
    path = folder / _STATUS
    if not path.is_file():
        return {}
    try:
        return dict(parse_json(read_text(path, "The status", _MAX_BYTES)))
    except (ValueError, TypeError) as error:
        raise DeployError(f"'{path}' is not a valid status; delete it and resume the run.") from error
