"""Start and stop the run of an operator's folder, and restart it after a crash.

`home/run` contains Flower's ID of the run.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fedtailor.core.untrusted_input import read_text
from fedtailor.deploy.server import superlink
from fedtailor.deploy.server.intent import Intent, read_intent, write_intent
from fedtailor.deploy.server.operator_folder import enrolled_clients, read_status, write_status
from fedtailor.deploy.server.state.state import read_state
from fedtailor.errors import DeployError, FedTailorError, RunError, reason
from fedtailor.experiments.deployment import read_operator_deployment
from fedtailor.runs.checkpoint import Checkpoint
from fedtailor.runs.files import folder_lock, wait_for_lock, write_atomic
from fedtailor.runs.reader import is_run_folder
from fedtailor.runs.rollback import roll_back

_MAX_RESTARTS = 5  # in a row, without a new round
_FIRST_PAUSE = 10.0  # seconds before the second restart; each further pause is twice as long
_FLOWER_INTERVAL = 5.0  # seconds between questions to Flower
_END_TIMEOUT = 60.0  # seconds for the process of a stopped run to end


def start_run(folder: Path) -> None:
    """Start the run, or resume it from its last checkpoint.

    >>> start_run(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.DeployError: There is no deployment in 'nowhere'; create one with: fedtailor deploy init nowhere.
    """
    read_operator_deployment(folder)
    if not enrolled_clients(folder):
        raise DeployError(f"No clients are enrolled; run: fedtailor deploy keys {folder} --clients a,b,c.")
    if read_state(folder).is_active:
        raise DeployError(f"The run in '{folder}' is active; see: fedtailor deploy status {folder}.")
    with _controlled(folder):
        _wait_for_end(folder)
        _submit(folder, Intent(wanted=True))


def stop_run(folder: Path) -> None:
    """Stop the run; the server does not restart it.

    >>> stop_run(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.DeployError: No run in 'nowhere' is active.
    """
    if (run := run_id(folder)) is None:
        raise DeployError(f"No run in '{folder}' is active.")
    with _controlled(folder):
        was_wanted = read_intent(folder).wanted
        write_intent(folder, Intent())
        active = read_state(folder).is_active
        if not active and not was_wanted:
            raise DeployError(f"No run in '{folder}' is active.")
        if active:
            superlink.stop_run(folder, run)
            _wait_for_end(folder)
        done = {"state": "stopped", "reason": "the operator stopped it", "by_operator": True}
        write_status(folder, read_status(folder) | done)


def roll_back_run(folder: Path, number: int) -> Checkpoint:
    """Undo all rounds of a stopped or finished run after round `number`, and return its checkpoint.

    >>> roll_back_run(Path("nowhere"), 3)
    Traceback (most recent call last):
    fedtailor.errors.DeployError: The run in 'nowhere' has not been started; there is nothing to roll back.
    """
    if not is_run_folder(folder / "run"):
        raise DeployError(f"The run in '{folder}' has not been started; there is nothing to roll back.")
    running = DeployError(f"The run in '{folder}' is running; first stop it with: fedtailor deploy stop {folder}.")
    with _controlled(folder):
        if read_state(folder).is_active or is_working(folder):
            raise running
        with folder_lock(folder / "run"):
            found = roll_back(folder / "run", number)
            write_intent(folder, Intent())
            members = [member["name"] for member in found.metadata["remote"]["members"]]
            done = {"state": "stopped", "reason": f"rolled back to round {number}", "by_operator": True}
            done |= {"round": number, "members": members, "last_round": {}, "warnings": {}}
            write_status(folder, read_status(folder) | done)
    return found


def run_id(folder: Path) -> int | None:
    """Return Flower's ID of the last run that was started.

    >>> run_id(Path("nowhere"))
    """
    path = folder / "home" / "run"
    return int(read_text(path, "The run's ID", 100)) if path.is_file() else None


def is_working(folder: Path) -> bool:
    """Return whether a process works on the run, which then holds the lock of its folder.

    >>> is_working(Path("nowhere"))
    False
    """
    if not (folder / "run").is_dir():
        return False
    try:
        with folder_lock(folder / "run"):
            return False
    except RunError as error:
        if isinstance(error.__cause__, BlockingIOError):
            return True
        raise


class RunSupervisor:
    """Restarts the run while the operator wants it to continue: after a crash of its process or of the whole machine.

    It does not restart a run that ended with an error that would repeat, and it gives up after a few restarts without a
    new round.
    """

    def __init__(
        self, folder: Path, say: Callable[[str], None] = print, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._say, self._clock = folder, say, clock
        self._started: int | None = None  # the run whose process has held the lock, or has ended
        self._asked_at = -_FLOWER_INTERVAL
        self._restart_at: float | None = None

    def check(self) -> None:
        """Restart the run if its process has ended; the server calls this about once per second."""
        try:
            if read_intent(self._folder).wanted and self._has_ended():
                with _controlled(self._folder):
                    intent = read_intent(self._folder)  # a command may have stopped or resumed the run in between
                    if intent.wanted and self._has_ended():
                        self._handle_end(intent)
        except (FedTailorError, OSError) as error:
            self._say(f"The run cannot be supervised: {reason(error)}.")

    def _has_ended(self) -> bool:
        run = run_id(self._folder)
        if is_working(self._folder):
            self._started, self._restart_at = run, None
            return False
        if run == self._started:
            return True
        if self._clock() < self._asked_at + _FLOWER_INTERVAL:
            return False
        self._asked_at = self._clock()
        if run is not None and superlink.run_state(self._folder, run) not in ("finished", "unknown"):  # it is starting
            return False
        self._started = run
        return True

    def _handle_end(self, intent: Intent) -> None:
        status = read_status(self._folder)
        why = status.get("reason") if status.get("state") == "stopped" else "its process ended"
        if status.get("state") == "finished" or (status.get("state") == "stopped" and not status.get("temporary")):
            write_intent(self._folder, replace(intent, wanted=False))
            return
        progress = status.get("round", 0) > intent.round
        restarts, now = 1 if progress else intent.restarts + 1, self._clock()
        if restarts > _MAX_RESTARTS:
            why = f"{why}, after {_MAX_RESTARTS} restarts without a new round"
            write_status(self._folder, status | {"state": "stopped", "reason": why})
            write_intent(self._folder, replace(intent, wanted=False))
            self._say(f"The run stopped: {why}. Resume it with: fedtailor deploy resume {self._folder}")
            return
        if self._restart_at is None:
            self._restart_at = now if restarts == 1 else now + _FIRST_PAUSE * 2 ** (restarts - 2)
        if now < self._restart_at:
            return
        self._restart_at = None
        write_intent(self._folder, intent := Intent(True, restarts, status.get("round", 0)))
        self._say(f"The run is resumed: {why}.")
        _submit(self._folder, intent)


def _submit(folder: Path, intent: Intent) -> None:
    previous = read_status(folder)
    # until the run writes its own status
    starting = {"state": "starting", "reason": "", "by_operator": False, "temporary": False, "at": time.time()}
    write_status(folder, previous | starting)
    try:
        superlink.stop_orphaned_runs(folder)  # of a process that has died, which Flower may not have noticed
        run = superlink.submit(folder)
    except FedTailorError:
        write_status(folder, previous)
        raise
    write_atomic(folder / "home" / "run", str(run).encode())
    write_intent(folder, intent)


def _wait_for_end(folder: Path) -> None:
    """Wait until the process of a stopped run has ended, so that its last words do not replace a newer status."""
    deadline = time.monotonic() + _END_TIMEOUT
    while is_working(folder):
        if time.monotonic() > deadline:
            raise DeployError(f"The process of the run in '{folder}' does not end; restart the server.")
        time.sleep(0.1)


@contextmanager
def _controlled(folder: Path) -> Iterator[None]:
    """Exclude that a command and the server start, stop, or change the run at the same time."""
    (folder / "home").mkdir(parents=True, exist_ok=True)
    with (folder / "home" / ".intent").open("ab") as lock:
        wait_for_lock(lock)
        yield
