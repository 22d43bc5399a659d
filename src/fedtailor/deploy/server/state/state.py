"""The state of a federation, for the operator, the metrics, and the health check.

Whether a process runs is read from the lock that it holds, which ends with it, and never from a file that a dead
process left. This module must not import torch or Flower, so that `fedtailor deploy status` takes less than a second.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedtailor.deploy.expiry import days_left, expiry_sentence, expiry_times
from fedtailor.deploy.process_ends import describe_exit, exit_code, memory_kills
from fedtailor.deploy.server.intent import read_intent
from fedtailor.deploy.server.operator_folder import EnrolledClient, enrolled_clients, read_status
from fedtailor.deploy.server.state.disk import Disk, describe_full_disk, disk_of, format_bytes
from fedtailor.deploy.server.state.server_record import (
    ServerRecord,
    describe_end,
    is_server_running,
    read_server_record,
    silence,
)
from fedtailor.deploy.server.suspension import suspended_clients
from fedtailor.runs.files import is_locked

FORMAT = 1  # of `describe`; it grows if a field is removed or changes its meaning
ACTIVE = ("starting", "running", "waiting")
LATE = "late"
_CERTIFICATES = {"server": "server.crt", "authority": "authority.crt"}
_START_TIMEOUT = 300.0  # seconds until the run's process has imported what it needs and holds its lock


@dataclass(frozen=True)
class ProcessState:
    """A process of the server."""

    running: bool
    pid: int | None = None
    reason: str = ""  # why it is not running


@dataclass(frozen=True)
class ClientState:
    """A client as the server sees it."""

    connection: str  # online, offline, registered (it has never connected), left, or unknown
    member: bool  # whether it takes part in the run
    rejected: str = ""  # why it cannot join the run
    last_round: str = ""  # why its work in the last round did not count
    warning: str = ""  # why its work in the last round is suspicious
    this_round: str = ""  # why its work in the current round will not count
    suspended: str = ""  # why it is suspended
    new_key: bool = False  # it has a new key that it has not used yet


@dataclass(frozen=True)
class FederationState:
    """The state of a federation at one moment."""

    folder: Path
    at: float  # seconds since the epoch
    run: dict[str, Any]  # the run's own status, with the state as it really is
    processes: dict[str, ProcessState]
    clients: dict[str, ClientState]
    expires: dict[str, float]  # certificate -> when it expires, in seconds since the epoch
    disk: Disk
    wanted: bool  # whether the operator wants the run to continue

    @property
    def is_active(self) -> bool:
        """Whether the run is being worked on."""
        return self.run["state"] in ACTIVE

    @property
    def resumes(self) -> bool:
        """Whether the server will resume the run, which is stopped."""
        return self.run["state"] == "stopped" and self.wanted and self.processes["server"].running

    @cached_property
    def problems(self) -> list[str]:
        """Why the federation does not work."""
        server, found = self.processes["server"], list[str]()
        if not server.running:
            why = f": {server.reason.rstrip('.')}" if server.reason else ""
            found.append(f"The server is not running{why}.")
        found += [server.reason] if server.running and server.reason else []
        superlink = self.processes["superlink"]
        if server.running and superlink.pid is not None and not superlink.running:
            found.append(f"Flower's SuperLink is not running: {superlink.reason}.")
        if self.run["state"] == "stopped" and not self.run.get("by_operator"):
            why = f": {self.run['reason'].rstrip('.')}" if self.run.get("reason") else ""
            found.append(f"The run is stopped{why}.")
        found += [sentence for name in self.expires if (sentence := self._expiry(name)) and self._has_expired(name)]
        if self.disk.is_full:
            found.append(f"{describe_full_disk(self.folder)}.")
        return found

    @cached_property
    def warnings(self) -> list[str]:
        """What will be a problem if nobody acts."""
        found = [sentence for name in self.expires if (sentence := self._expiry(name)) and not self._has_expired(name)]
        if self.disk.is_low and not self.disk.is_full:
            free, needed = format_bytes(self.disk.free), format_bytes(self.disk.checkpoint)
            found.append(f"The disk of '{self.folder}' is almost full: {free} free, a checkpoint takes {needed}.")
        return found

    def _has_expired(self, name: str) -> bool:
        return self.expires[name] <= self.at

    def _expiry(self, name: str) -> str | None:
        fix = f"run: fedtailor deploy renew {self.folder}"
        if name == "authority":
            fix = f"delete keys/authority.crt, {fix}, and distribute the new bundles"
        return expiry_sentence(f"The {name}'s certificate", self.expires[name], fix, self.at)

    def count_clients(self) -> dict[str, int]:
        """Return the numbers of clients by what matters to the operator."""
        here = [client for client in self.clients.values() if client.connection != "left"]
        return {
            "enrolled": len(here),
            "online": sum(client.connection == "online" for client in here),
            "late": sum(client.last_round == LATE for client in here),
            "failed": sum(client.last_round not in ("", LATE) or bool(client.this_round) for client in here),
            "suspended": sum(bool(client.suspended) for client in here),
        }

    def describe(self) -> dict[str, Any]:
        """Return the state as `fedtailor deploy status --json` prints it; docs/deploy.md documents the fields."""
        expires = {
            name: {"expires": when, "days_left": round(days_left(when, self.at), 2)}
            for name, when in self.expires.items()
        }
        return {
            "format": FORMAT,
            "at": self.at,
            "healthy": not self.problems,
            "problems": self.problems,
            "warnings": self.warnings,
            "run": {name: self.run.get(name, default) for name, default in _RUN_FIELDS.items()},
            "processes": {name: asdict(process) for name, process in self.processes.items()},
            "clients": {name: asdict(client) for name, client in self.clients.items()},
            "certificates": expires,
            "disk": asdict(self.disk) | {"full": self.disk.is_full, "low": self.disk.is_low},
        }


_RUN_FIELDS: dict[str, Any] = {
    "state": "not started", "reason": "", "round": 0, "rounds": None, "attempt": None, "selected": [],
    "round_seconds": None, "bytes_sent": 0, "bytes_received": 0, "at": None,
}  # fmt: skip


def read_state(folder: Path) -> FederationState:
    """Return the state of the federation in an operator's folder."""
    record = read_server_record(folder)
    server_runs = is_server_running(folder) and (record is None or record.ended is None)
    status, run = _read_run(folder, record, server_runs)
    connections = record.connections if record and server_runs else {}
    suspended = suspended_clients(folder)
    clients = {
        name: _client_state(name, client, status, connections, suspended)
        for name, client in enrolled_clients(folder).items()
    }
    return FederationState(
        folder,
        time.time(),
        status,
        _processes(folder, record, server_runs) | {"run": run},
        clients,
        expiry_times({name: folder / "keys" / file for name, file in _CERTIFICATES.items()}),
        disk_of(folder),
        read_intent(folder).wanted,
    )


def _read_run(folder: Path, record: ServerRecord | None, server_runs: bool) -> tuple[dict[str, Any], ProcessState]:
    """Return the status of the run and its process: if it says that it is active, its lock must be held."""
    status = {"state": "not started"} | read_status(folder)
    if is_locked(folder / "run" / "lock"):
        if status["state"] in ACTIVE or not server_runs:
            return status, ProcessState(True, status.get("pid"))
        return status, ProcessState(True, status.get("pid"), "it is ending")
    status = {"state": "not started"} | read_status(folder)  # it may have ended just now
    if status["state"] not in ACTIVE:
        return status, ProcessState(False, reason=str(status.get("reason", "")))
    if not server_runs:
        why = describe_end(record)
        reason = f"its server is not running{': ' + why if why else ''}"
    elif status["state"] == "starting" and time.time() < status.get("at", 0.0) + _START_TIMEOUT:
        return status, ProcessState(False, reason="it is starting")
    else:
        reason = _run_end(folder, status, record)
    # temporary: the run may succeed if it is resumed
    return status | {"state": "stopped", "reason": reason, "temporary": True}, ProcessState(False, reason=reason)


def _run_end(folder: Path, status: Mapping[str, Any], record: ServerRecord | None) -> str:
    """Return why the run's process has ended without saying so itself."""
    pid = status.get("pid")
    code = exit_code(pid) if isinstance(pid, int) else None
    if (code is None or code >= 0) and disk_of(folder).is_full:
        return describe_full_disk(folder)
    if code is None:
        return "its process ended"
    ran_out_of_memory = record is not None and memory_kills() > record.memory_kills
    details = "" if code < 0 else ", see log/superlink.log"
    return f"its process {describe_exit(code, ran_out_of_memory)}{details}"


def _processes(folder: Path, record: ServerRecord | None, server_runs: bool) -> dict[str, ProcessState]:
    if record is None or not server_runs:
        why = describe_end(record)
        return dict.fromkeys(("server", "proxy", "superlink"), ProcessState(False, reason=why))
    problem = record.problem
    if silent := silence(folder):
        problem = f"The server has not responded for {silent:.0f} s; restart it."
    proxy = ProcessState(True, record.pid)  # a thread of the server, which ends with it
    return {"server": ProcessState(True, record.pid, problem), "proxy": proxy, "superlink": _superlink(record)}


def _superlink(record: ServerRecord) -> ProcessState:
    """Return the state of the SuperLink; in the second before the server has noticed its end, its PID tells it."""
    if record.superlink is None:
        return ProcessState(False, reason="it is starting")
    if (code := exit_code(record.superlink)) is not None:
        return ProcessState(False, record.superlink, f"it {describe_exit(code)}")
    try:
        os.kill(record.superlink, 0)
    except ProcessLookupError:
        return ProcessState(False, record.superlink, "it ended")
    except PermissionError:
        pass
    return ProcessState(True, record.superlink)


def _client_state(
    name: str,
    client: EnrolledClient,
    status: Mapping[str, Any],
    connections: Mapping[str, str],
    suspended: Mapping[str, str],
) -> ClientState:
    return ClientState(
        "left" if client.left else connections.get(name, "unknown"),
        name in status.get("members", []),
        str(status.get("rejected", {}).get(name, "")),
        str(status.get("last_round", {}).get(name, "")),
        str(status.get("warnings", {}).get(name, "")),
        str(status.get("this_round", {}).get(name, "")),
        suspended.get(name, ""),
        client.next_key is not None,
    )
