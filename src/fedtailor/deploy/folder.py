"""The operator's folder: who is enrolled, and what the run is doing.

deployment.toml   what is trained and how
app/              the Flower app: a few lines that call this library
keys/             the authority, and the server's certificate
bundles/NAME.tar  what each client gets; secret
clients.json      who is enrolled, in the order of enrolment
home/, log/       what Flower keeps; superlink.db: its database
run/              the run: a folder as `record.py` describes it, without models, which are the clients' own
status.json       what the run is doing
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedtailor.errors import Refused, unknown
from fedtailor.files import wait_for, write
from fedtailor.untrusted import parse_json, read_text

_CLIENTS, _STATUS = "clients.json", "status.json"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
_LARGEST = 2**26  # bytes


@dataclass(frozen=True)
class Enrolled:
    """A client that may take part."""

    public_key: str
    node: int | None = None  # its number in Flower, once it is registered there
    left: bool = False  # for good


def check_name(name: str) -> str:
    """A client's name, if files and tables can be named after it.

    >>> check_name("hospital-a")
    'hospital-a'
    """
    if not _NAME.fullmatch(name):
        raise Refused(f"A client's name has letters, digits, '-', '_' and '.', at most 64 of them, not {name[:80]!r}.")
    return name


def enrolled(folder: Path) -> dict[str, Enrolled]:
    """Who is enrolled, in the order of enrolment."""
    if not (folder / _CLIENTS).is_file():
        return {}
    try:
        found = parse_json(read_text(folder / _CLIENTS, "The list of clients", _LARGEST))
        return {check_name(name): Enrolled(**about) for name, about in found.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise Refused(f"'{folder / _CLIENTS}' is no list of clients.") from error


def enrol(folder: Path, clients: Mapping[str, Enrolled]) -> None:
    """Write down who is enrolled: those there before, in their order, as `clients` says, then the new ones."""
    with (folder / f".{_CLIENTS}").open("ab") as lock:  # the server and a command may both have something to add
        wait_for(lock)
        everyone = enrolled(folder) | dict(clients)
        text = json.dumps({check_name(name): asdict(about) for name, about in everyone.items()}, indent=1)
        write(folder / _CLIENTS, (text + "\n").encode())


def leave_for_good(folder: Path, name: str) -> None:
    """Mark a client as one that has left."""
    everyone = enrolled(folder)
    if name not in everyone:
        raise unknown("client", name, everyone)
    enrol(folder, {name: replace(everyone[name], left=True)})


def write_status(folder: Path, status: Mapping[str, Any]) -> None:
    """What the run is doing, for `fedtailor deploy status`."""
    write(folder / _STATUS, (json.dumps(status, indent=1) + "\n").encode())


def read_status(folder: Path) -> dict[str, Any]:
    """What the run last said it was doing; empty before the first."""
    if not (folder / _STATUS).is_file():
        return {}
    try:
        return dict(parse_json(read_text(folder / _STATUS, "The status", _LARGEST)))
    except (ValueError, TypeError) as error:
        raise Refused(f"'{folder / _STATUS}' is no status.") from error
