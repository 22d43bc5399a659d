"""The supervisor of a running server: it reports what it sees, and ends runs whose process has died."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtailor.deploy.process_ends import describe_exit, memory_kills
from fedtailor.deploy.server.operator_folder import read_status, write_status
from fedtailor.deploy.server.state.disk import describe_full_disk, is_disk_full
from fedtailor.deploy.server.state.server_record import (
    ServerRecord,
    describe_end,
    read_server_record,
    show_life,
    write_server_record,
)
from fedtailor.deploy.server.state.state import ACTIVE, read_state
from fedtailor.errors import DeployError, FedTailorError
from fedtailor.runs.files import is_locked

_REPEAT_INTERVAL = 86_400.0  # seconds between two reports of the same problem
_NUMBERS = re.compile(r"\d+(\.\d+)?")


class Supervisor:
    """Watches a server from within; everything it reports is in home/server.json, status.json, and the output."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._previous = read_server_record(folder)
        self._record = ServerRecord()
        self._written: ServerRecord | None = None
        self._reported: dict[str, float] = {}  # problem without its numbers -> when it was reported
        self._stopped: dict[str, Any] | None = None  # the status of a run that has ended, as it must be written
        self._update()

    def settle(self) -> None:
        """Write why a run ended that the previous server left, once all its processes are gone."""
        status = read_status(self._folder)
        if status.get("state") in ACTIVE and not is_locked(self._folder / "run" / "lock"):
            why = describe_end(self._previous)
            reason = f"its server ended{': ' + why.rstrip('.') if why else ''}"
            with suppress(OSError):
                write_status(self._folder, status | {"state": "stopped", "reason": reason, "temporary": True})

    def started(self, superlink: int) -> None:
        """Remember the PID of the SuperLink."""
        self._update(superlink=superlink)

    def describe_end(self, code: int | None) -> str:
        """Return how a subprocess of the server ended, as the end of a sentence."""
        if code is None:
            return "did not respond"
        return describe_exit(code, memory_kills() > self._record.memory_kills)

    def check(self, connections: Mapping[str, str], problem: str, end_runs: Callable[[], None]) -> None:
        """Report the state of the server, and end the run if its process has died; called about once per second."""
        self._update(connections=dict(connections), problem=problem)
        show_life(self._folder)
        try:
            state = read_state(self._folder)
        except FedTailorError as error:  # a damaged file
            self._report([str(error)])
            return
        if state.run["state"] == "stopped" and read_status(self._folder).get("state") in ACTIVE:
            end_runs()  # otherwise Flower would take a minute to notice
            self._stopped = self._stopped or state.run
            with suppress(OSError):  # on a full disk, the next check tries again
                write_status(self._folder, self._stopped)
                self._stopped = None
        self._report([*state.problems, *state.warnings])

    def close(self, reason: str) -> None:
        """Write why the server ends, unless a reason is known."""
        if self._record.ended is None:
            self._update(reason=reason, ended=time.time())

    def _update(self, **fields: object) -> None:
        self._record = replace(self._record, **fields)  # type: ignore[arg-type]
        if self._record == self._written:
            return
        with suppress(OSError, FedTailorError):  # on a full disk, the next check tries again
            write_server_record(self._folder, self._record)
            self._written = self._record

    def _report(self, sentences: Sequence[str]) -> None:
        """Report problems and warnings when they are new, and then daily."""
        now, current = time.monotonic(), {_NUMBERS.sub("", text): text for text in sentences}
        self._reported = {key: at for key, at in self._reported.items() if key in current}
        for key, sentence in current.items():
            if now >= self._reported.get(key, -_REPEAT_INTERVAL) + _REPEAT_INTERVAL:
                self._reported[key] = now
                self._say(f"Warning: {sentence}")


@contextmanager
def supervised(folder: Path, say: Callable[[str], None]) -> Iterator[Supervisor]:
    """Yield the supervisor of a server that holds its lock, and write why the server ended."""
    supervisor = Supervisor(folder, say)
    try:
        yield supervisor
    except FedTailorError as error:
        supervisor.close(str(error))
        raise
    except OSError as error:
        reason = f"{describe_full_disk(folder)}." if is_disk_full(error) else f"{type(error).__name__}: {error}"
        supervisor.close(reason)
        raise (DeployError(reason) if is_disk_full(error) else error) from error
    except BaseException as error:
        supervisor.close(f"it failed with {type(error).__name__}")
        raise
    supervisor.close("it was stopped")
