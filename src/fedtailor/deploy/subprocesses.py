"""Start commands as subprocesses, read their output, restart them, and stop them with all their descendants."""

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from threading import Event

import psutil

from fedtailor.deploy.log_format import LogFormatter
from fedtailor.errors import DeployError, FedTailorError
from fedtailor.runs.files import folder_lock

_WATCHDOG = Path(__file__).with_name("parent_watchdog.py")
_COLOR_CODES = re.compile(r"\x1b\[[0-9;]*m")
_MAX_LOG_BYTES = 2**23  # per file; three files are kept
_HEALTH_TIMEOUT = 5.0  # seconds
_MIN_PAUSE, _MAX_PAUSE = 1.0, 30.0  # seconds before a command is started again
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


def find_processes(home: Path, text: str = "") -> list[psutil.Process]:
    """Return all processes that use this home, including orphans, and whose command line contains the text.

    Flower's SuperExec hides its environment even from its own user; it is identified by the session that it shares with
    a marked process.

    >>> find_processes(Path("nowhere"))
    []
    """
    marked, hidden = list[psutil.Process](), list[psutil.Process]()
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, OSError):
            try:
                if process.environ().get(_HOME_VARIABLE) == str(home.absolute()):
                    marked.append(process)
            except psutil.AccessDenied:
                hidden.append(process)
    sessions = {session for process in marked if (session := _session(process))}
    found = marked + [process for process in hidden if _session(process) in sessions]
    return [process for process in found if text in command_line(process)]


def command_line(process: psutil.Process) -> str:
    """Return the command line of a process; empty if it has ended.

    >>> "python" in command_line(psutil.Process())
    True
    """
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _session(process: psutil.Process) -> int | None:
    """Return the session of a process; None if it has ended."""
    with suppress(psutil.Error, OSError):
        return os.getsid(process.pid) if process.status() != psutil.STATUS_ZOMBIE else None
    return None


def stop_all(home: Path, timeout: float = 6.0) -> None:
    """Stop all processes that use this home, first with SIGTERM and then with SIGKILL.

    >>> stop_all(Path("nowhere"))
    """
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        processes = find_processes(home)
        for process in processes:
            with suppress(psutil.Error):
                stop(process)
        psutil.wait_procs(processes, timeout)


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
    handler = _RotatingLog(path, maxBytes=_MAX_LOG_BYTES, backupCount=2, encoding="utf-8")
    handler.setFormatter(LogFormatter(path.stem))
    return handler


class _RotatingLog(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Drop lines that cannot be written, for example to a full disk, which is reported elsewhere."""


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


def keep_running(start: Callable[[], Subprocess], watch: Callable[[Subprocess], bool], stop: Event) -> None:
    """Start a command, and start it again whenever `watch` returns, until `stop` is set.

    `watch` waits as long as the command should run, and returns whether it worked. While it does not work, the pause
    before the next start grows.
    """
    pause = _MIN_PAUSE
    while not stop.is_set():
        process = start()
        try:
            worked = watch(process)
        finally:
            process.stop()
        pause = _MIN_PAUSE if worked else min(2 * pause, _MAX_PAUSE)
        stop.wait(pause)
