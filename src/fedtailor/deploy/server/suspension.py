"""Suspended clients: they stay enrolled, but are not selected until the operator reinstates them.

suspensions.json contains, by name, the clients that are suspended or had a problem in their last round. A client is
suspended by the operator, or by the server after several rounds in a row with a problem.
"""

import json
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fedtailor.core.untrusted_input import parse_json, read_text
from fedtailor.deploy.server.operator_folder import check_name, enrolled_clients
from fedtailor.errors import DeployError, unknown_name
from fedtailor.runs.files import wait_for_lock, write_atomic

log = logging.getLogger("fedtailor")
_FILE, _MAX_BYTES = "suspensions.json", 2**26
_MIN_ACTIVE = 2  # clients that the server leaves: with one, there is no federation


@dataclass(frozen=True)
class Standing:
    """What the server remembers about a client with problems."""

    problems: int = 0  # rounds in a row with a problem
    reason: str = ""  # of the last problem or of the suspension
    suspended_at: float | None = None  # seconds since the epoch; None: it is not suspended


def suspended_clients(folder: Path) -> dict[str, str]:
    """Return the suspended clients of an operator's folder with the reason.

    >>> suspended_clients(Path("nowhere"))
    {}
    """
    return {name: one.reason for name, one in _read(folder).items() if one.suspended_at is not None}


def active_clients(folder: Path) -> list[str]:
    """Return the enrolled clients that have not left and are not suspended, in the order of enrollment.

    >>> active_clients(Path("nowhere"))
    []
    """
    suspended = suspended_clients(folder)
    return [name for name, client in enrolled_clients(folder).items() if not client.left and name not in suspended]


def suspend(folder: Path, name: str, reason: str) -> None:
    """Suspend a client. Its key stays valid; a running round no longer waits for it and does not use its upload."""
    _check_enrolled(folder, name)
    with _updated(folder) as standings:
        standings[name] = Standing(reason=reason, suspended_at=time.time())


def reinstate(folder: Path, name: str) -> None:
    """End a client's suspension; it takes part from the next round on."""
    _check_enrolled(folder, name)
    with _updated(folder) as standings:
        if standings.get(name, Standing()).suspended_at is None:
            raise DeployError(f"'{name}' is not suspended.")
        del standings[name]


def count_problems(
    folder: Path, selected: Collection[str], problems: Mapping[str, str], limit: int, min_active: int | None
) -> list[str]:
    """Count a round in which the selected clients had these problems, and suspend clients with `limit` in a row.

    A round in which half of the clients or more had a problem does not count, because the cause is probably not theirs.
    No client is suspended if fewer than `min_active` would remain. Returns the clients that were suspended.
    """
    before = _read(folder)
    if 2 * len(problems) >= len(selected) or not (problems or before.keys() & set(selected)):
        return []
    newly, active = list[str](), len(active_clients(folder))
    with _updated(folder) as standings:
        for name in selected:
            standing = standings.get(name, Standing())
            if standing.suspended_at is not None:
                continue
            if name not in problems:
                standings.pop(name, None)
                continue
            count, problem = standing.problems + 1, problems[name].rstrip(".")
            standings[name] = Standing(count, problem)
            if limit and count >= limit and active > (min_active or _MIN_ACTIVE):
                reason = f"by the server after {count} rounds with problems in a row, the last one: {problem}"
                standings[name] = Standing(count, reason, time.time())
                newly, active = [*newly, name], active - 1
    for name in newly:
        log.warning("%s is suspended %s.", name, standings[name].reason)
    return newly


def _check_enrolled(folder: Path, name: str) -> None:
    clients = enrolled_clients(folder)
    if name not in clients:
        raise unknown_name("client", name, clients)
    if clients[name].left:
        raise DeployError(f"'{name}' has left the federation.")


def _read(folder: Path) -> dict[str, Standing]:
    path = folder / _FILE
    if not path.is_file():
        return {}
    try:
        standings = parse_json(read_text(path, "The list of suspensions", _MAX_BYTES))
        return {check_name(name): Standing(**fields) for name, fields in standings.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DeployError(f"'{path}' is not a valid list of suspensions; restore it from a backup.") from error


@contextmanager
def _updated(folder: Path) -> Iterator[dict[str, Standing]]:
    """Yield the standings, and write them after they were changed; the server and a command may do so at once."""
    with (folder / f".{_FILE}").open("ab") as lock:
        wait_for_lock(lock)
        yield (standings := _read(folder))
        text = json.dumps({name: asdict(standing) for name, standing in standings.items()}, indent=1)
        write_atomic(folder / _FILE, (text + "\n").encode())
