"""Start Flower's commands as subprocesses, read their output, and stop them with all their descendants."""

import http.client
import logging
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path

from fedtailor.errors import DeployError, FedTailorError
from fedtailor.runs.files import folder_lock

_WATCHDOG = Path(__file__).with_name("parent_watchdog.py")
_COLOR_CODES = re.compile(r"\x1b\[[0-9;]*m")
_MAX_LOG_BYTES = 2**23  # per file; three files are kept
_HEALTH_TIMEOUT = 5.0  # seconds
_LOCAL_HOSTS = "127.0.0.1,localhost"
_HOME_VARIABLE = "FEDTAILOR_SUBPROCESS_HOME"  # environment variable that identifies a subprocess and its descendants


def flower_command(name: str) -> str:
    """Return the path of one of Flower's commands, which are installed next to this Python.

    >>> Path(flower_command("flwr")).name
    'flwr'
    """
    path = Path(sys.executable).with_name(name)
    if not path.is_file():
        raise DeployError(
            "Flower is not installed in this Python environment. Install it with: pip install 'fedtailor[flower]'."
        )
    return str(path)


def flower_environment(home: Path, **variables: str) -> dict[str, str]:
    """Return the environment of Flower's processes: files in `home`, no telemetry, frequent polling.

    >>> flower_environment(Path("home"), FEDTAILOR_CLIENT_FOLDER="hospital-a")["FLWR_TELEMETRY_ENABLED"]
    '0'
    """
    inherited = dict(os.environ)
    path = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), inherited.get("PATH")]))
    no_proxy = ",".join(filter(None, [inherited.get("NO_PROXY") or inherited.get("no_proxy"), _LOCAL_HOSTS]))
    flower = {
        "FLWR_HOME": str(home.absolute()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",  # seconds; the default is 1, and 0.1 would use a tenth of a core
        "PATH": path,  # Flower starts its commands by name
        "NO_PROXY": no_proxy,  # its processes on one machine communicate over HTTP, which must not leave the machine
        "no_proxy": no_proxy,
        "PYTHONUNBUFFERED": "1",
    }
    return inherited | flower | variables


def free_address() -> str:
    """Return an unused address on this machine.

    >>> free_address().startswith("127.0.0.1:")
    True
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def is_healthy(address: str, tls: ssl.SSLContext | None = None) -> bool:
    """Return whether one of Flower's servers on this machine responds to a health check.

    >>> is_healthy(free_address())
    False
    """
    https = http.client.HTTPSConnection(address, timeout=_HEALTH_TIMEOUT, context=tls) if tls else None
    with closing(https or http.client.HTTPConnection(address, timeout=_HEALTH_TIMEOUT)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False


@dataclass(frozen=True)
class Process:
    """A process; the start time distinguishes it from a later process with the same PID."""

    pid: int
    start_time: int
    command_line: str


def find_processes(home: Path) -> list[Process]:
    """Return all of Flower's processes that use this home, including orphans.

    Only Linux provides this information. On other systems the list is empty, and Flower's own checks must suffice.

    >>> find_processes(Path("nowhere"))
    []
    """
    marker = f"{_HOME_VARIABLE}={home.absolute()}".encode()
    found = [entry for folder in Path("/proc").glob("[0-9]*") if (entry := _read_process(folder, marker))]
    sessions = {session for _, session, marked in found if marked}
    return [process for process, session, marked in found if marked or session in sessions]


def _read_process(folder: Path, marker: bytes) -> tuple[Process, int, bool] | None:
    """Return a process, its session ID, and whether its environment contains the marker; None if it does not.

    Flower's SuperExec hides its environment even from its own user; it is identified by the session that it shares with
    a marked process.
    """
    with suppress(OSError, ValueError, IndexError):  # the process may have ended
        try:
            marked = marker in (folder / "environ").read_bytes().split(b"\0")
        except PermissionError:
            marked = False
        else:
            if not marked:
                return None
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        command_line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        if fields[0] != "Z":
            return Process(int(folder.name), int(fields[19]), command_line), int(fields[3]), marked
    return None


def stop_all(home: Path, timeout: float = 6.0) -> None:
    """Stop all processes that use this home, first with SIGTERM and then with SIGKILL.

    >>> stop_all(Path("nowhere"))
    """
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        for process in find_processes(home):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal_number)
        deadline = time.monotonic() + timeout
        while find_processes(home) and time.monotonic() < deadline:
            time.sleep(0.05)


class Subprocess:
    """A running command; `on_line` is called with each line that it or its descendants print."""

    def __init__(
        self,
        home: Path,
        command: Iterable[str],
        env: Mapping[str, str],
        log: Path,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self._home = home
        self._log = rotating_log(log)
        self._on_line = on_line or (lambda line: None)
        watched = [sys.executable, "-P", str(_WATCHDOG), str(os.getpid()), *command]
        # A new session: Ctrl-C in the terminal reaches only this process, which then stops the command cleanly.
        self._process = subprocess.Popen(
            watched,
            env={**env, _HOME_VARIABLE: str(home.absolute())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; None while the command runs."""
        return self._process.poll()

    def stop(self, timeout: float = 6.0) -> None:
        """Stop the command and all its descendants."""
        with suppress(subprocess.TimeoutExpired):
            self._process.terminate()
            self._process.wait(timeout)
        self._process.kill()
        self._process.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGTERM)
        stop_all(self._home, timeout)
        self._reader.join(1.0)
        self._log.close()

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for output in self._process.stdout:
            line = _COLOR_CODES.sub("", output).rstrip()
            self._log.emit(logging.makeLogRecord({"msg": line}))
            self._on_line(line)


def rotating_log(path: Path) -> RotatingFileHandler:
    """Return a handler that writes a log of bounded size.

    >>> from tempfile import mkdtemp
    >>> rotating_log(Path(mkdtemp()) / "log").close()
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(path, maxBytes=_MAX_LOG_BYTES, backupCount=2, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    return handler


def skip_repeats(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes sentences to `say` and skips a sentence equal to the previous one.

    >>> say = skip_repeats(print)
    >>> for sentence in ("Lost.", "Lost.", "Back."): say(sentence)
    Lost.
    Back.
    """
    previous: list[str] = []

    def say_new(sentence: str) -> None:
        if previous != [sentence]:
            previous[:] = [sentence]
            say(sentence)

    return say_new


@contextmanager
def exclusive(home: Path, message: str) -> Iterator[None]:
    """Lock a home, or raise an error with this message if another process holds the lock.

    >>> from tempfile import mkdtemp
    >>> with exclusive(Path(mkdtemp()), "The folder is in use."): print("locked")
    locked
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(home))
        except FedTailorError as error:
            raise DeployError(message if isinstance(error.__cause__, BlockingIOError) else str(error)) from error
        yield


@contextmanager
def catch_stop_signals() -> Iterator[threading.Event]:
    """Within the context, Ctrl-C and SIGTERM only set the event that it yields.

    >>> with catch_stop_signals() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.is_set()
    True
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield stop
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
