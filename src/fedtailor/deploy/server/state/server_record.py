"""What a running server writes about itself: home/server.json. The lock of home/ says whether it is still running."""

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedtailor.core.untrusted_input import parse_json, read_text
from fedtailor.deploy.process_ends import boot_id, memory_kills
from fedtailor.runs.files import is_locked, write_atomic

_FILE, _MAX_BYTES = "server.json", 2**24
_MAX_SILENCE = 30.0  # seconds between two signs of life of a server that responds


@dataclass(frozen=True)
class ServerRecord:
    """A server's processes, its view of the clients, and, at its end, the reason."""

    pid: int = field(default_factory=os.getpid)
    started: float = field(default_factory=time.time)  # seconds since the epoch, like all times
    boot: str = field(default_factory=boot_id)
    memory_kills: int = field(default_factory=memory_kills)
    superlink: int | None = None  # its PID
    connections: dict[str, str] = field(default_factory=dict)  # client -> Flower's state of its connection
    problem: str = ""  # why it does not serve although it is running
    reason: str = ""  # why it ended
    ended: float | None = None


def server_file(folder: Path) -> Path:
    """Return the file with the record of an operator's folder; its time is the server's last sign of life."""
    return folder / "home" / _FILE


def write_server_record(folder: Path, record: ServerRecord) -> None:
    """Write the record of the server that holds the lock."""
    write_atomic(server_file(folder), (json.dumps(asdict(record), indent=1) + "\n").encode())


def read_server_record(folder: Path) -> ServerRecord | None:
    """Return the record of the last server; None before the first one, or if the file is damaged.

    >>> read_server_record(Path("nowhere"))
    """
    with suppress(ValueError, TypeError):
        return ServerRecord(**parse_json(read_text(server_file(folder), "The server's record", _MAX_BYTES)))
    return None


def is_server_running(folder: Path) -> bool:
    """Return whether the server of a folder is running.

    >>> is_server_running(Path("nowhere"))
    False
    """
    return is_locked(folder / "home" / "lock")


def show_life(folder: Path) -> None:
    """Show that the server responds; this also works when the disk is full."""
    with suppress(OSError):
        os.utime(server_file(folder))


def silence(folder: Path) -> float:
    """Return for how many seconds a running server has not shown life; 0 if it responds.

    >>> silence(Path("nowhere"))
    0.0
    """
    with suppress(OSError):
        seconds = time.time() - server_file(folder).stat().st_mtime
        return seconds if seconds > _MAX_SILENCE else 0.0
    return 0.0


def describe_end(record: ServerRecord | None) -> str:
    """Return why the last server is not running any more; empty if there has been none.

    >>> describe_end(None)
    ''
    >>> describe_end(ServerRecord(boot="before"))
    'the machine was restarted'
    """
    if record is None:
        return ""
    if record.reason:
        return record.reason
    if record.boot != boot_id():
        return "the machine was restarted"
    if memory_kills() > record.memory_kills:
        return "it was killed, probably by the system because memory ran out"
    return "it was killed"
