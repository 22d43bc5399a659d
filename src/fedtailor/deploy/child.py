"""Flower's commands as child processes: started, heard, and stopped with all that they started themselves."""

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

from fedtailor.errors import Refused
from fedtailor.files import locked

_LEASH = Path(__file__).with_name("leash.py")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LOG = 2**23  # bytes of a log before it is put aside; three are kept
_PROMPT = 5.0  # seconds for an answer from this machine
_HERE = "127.0.0.1,localhost"
_MARK = "FEDTAILOR_CHILD_OF"  # the variable by which processes are known that a child started


def command(name: str) -> str:
    """The path of one of Flower's commands, beside this Python.

    >>> Path(command("flwr")).name
    'flwr'
    """
    path = Path(sys.executable).with_name(name)
    if not path.is_file():
        raise Refused("Flower is not installed beside this Python; install it with: pip install 'fedtailor[flower]'.")
    return str(path)


def environment(home: Path, **more: str) -> dict[str, str]:
    """What Flower's processes are told: to keep to `home`, to tell nobody, to look for work often.

    >>> environment(Path("home"), FEDTAILOR_SITE="site")["FLWR_TELEMETRY_ENABLED"]
    '0'
    """
    given = dict(os.environ)
    beside = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), given.get("PATH")]))
    direct = ",".join(filter(None, [given.get("NO_PROXY") or given.get("no_proxy"), _HERE]))
    ours = {
        "FLWR_HOME": str(home.absolute()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",  # seconds, 1 unless told; 0.1 would take a tenth of a core
        "PATH": beside,  # Flower starts its own commands by name
        "NO_PROXY": direct,  # its processes on one machine talk over HTTP, which must not leave it
        "no_proxy": direct,
        "PYTHONUNBUFFERED": "1",
    }
    return given | ours | more


def free_address() -> str:
    """An address on this machine that nobody uses.

    >>> free_address().startswith("127.0.0.1:")
    True
    """
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"127.0.0.1:{found.getsockname()[1]}"


def answers(address: str, trust: ssl.SSLContext | None = None) -> bool:
    """Whether one of Flower's servers on this machine is well.

    >>> answers(free_address())
    False
    """
    made = http.client.HTTPSConnection(address, timeout=_PROMPT, context=trust) if trust else None
    with closing(made or http.client.HTTPConnection(address, timeout=_PROMPT)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False


@dataclass(frozen=True)
class Process:
    """A process, told by the time it began from a later one of the same number."""

    number: int
    began: int
    words: str  # its command line


def kin(home: Path) -> list[Process]:
    """All processes of Flower's that keep to this home, whoever their parents are by now.

    Where the system does not tell (Linux does), there seem to be none, and Flower's own watch over parents must do.

    >>> kin(Path("nowhere"))
    []
    """
    mark = f"{_MARK}={home.absolute()}".encode()
    found = [each for folder in Path("/proc").glob("[0-9]*") if (each := _read(folder, mark))]
    sessions = {session for _, session, marked in found if marked}
    return [process for process, session, marked in found if marked or session in sessions]


def _read(folder: Path, mark: bytes) -> tuple[Process, int, bool] | None:
    """A process, its session and whether it has the mark; None if it has not. What starts others in Flower hides from
    its own user what it was told: such a one belongs to those with the mark whose session it shares."""
    with suppress(OSError, ValueError, IndexError):  # it may be gone by now
        try:
            marked = mark in (folder / "environ").read_bytes().split(b"\0")
        except PermissionError:
            marked = False
        else:
            if not marked:
                return None
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        if fields[0] != "Z":
            return Process(int(folder.name), int(fields[19]), words), int(fields[3]), marked
    return None


def end_all(home: Path, patience: float = 6.0) -> None:
    """End every process that keeps to this home: first asked, then made to.

    >>> end_all(Path("nowhere"))
    """
    for which in (signal.SIGTERM, signal.SIGKILL):
        for process in kin(home):
            with suppress(ProcessLookupError):
                os.kill(process.number, which)
        until = time.monotonic() + patience
        while kin(home) and time.monotonic() < until:
            time.sleep(0.05)


class Child:
    """A command that runs until it is stopped or ends; `hear` gets every line that it or its children say."""

    def __init__(
        self,
        home: Path,
        words: Iterable[str],
        told: Mapping[str, str],
        log: Path,
        hear: Callable[[str], None] | None = None,
    ) -> None:
        self._home = home
        self._log = rotating(log)
        self._hear = hear or (lambda line: None)
        leashed = [sys.executable, "-P", str(_LEASH), str(os.getpid()), *words]
        # a session of its own: a Ctrl-C at the terminal is ours to hear, and it is ended in good order
        self._process = subprocess.Popen(
            leashed,
            env={**told, _MARK: str(home.absolute())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def number(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> int | None:
        """The code it ended with; None while it runs."""
        return self._process.poll()

    def stop(self, patience: float = 6.0) -> None:
        """End it, and all that it started."""
        with suppress(subprocess.TimeoutExpired):
            self._process.terminate()
            self._process.wait(patience)
        self._process.kill()
        self._process.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.number, signal.SIGTERM)
        end_all(self._home, patience)
        self._reader.join(1.0)
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = _COLOURS.sub("", line).rstrip()
            self._log.emit(logging.makeLogRecord({"msg": said}))
            self._hear(said)


def rotating(log: Path) -> RotatingFileHandler:
    """A log that does not grow for ever.

    >>> from tempfile import mkdtemp
    >>> rotating(Path(mkdtemp()) / "log").close()
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(log, maxBytes=_LOG, backupCount=2, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    return handler


def once(say: Callable[[str], None]) -> Callable[[str], None]:
    """Say a sentence, but not the same one again and again.

    >>> say = once(print)
    >>> for words in ("Lost.", "Lost.", "Back."): say(words)
    Lost.
    Back.
    """
    last: list[str] = []

    def tell(words: str) -> None:
        if last != [words]:
            last[:] = [words]
            say(words)

    return tell


@contextmanager
def alone(home: Path, otherwise: str) -> Iterator[None]:
    """Keep to a home that nobody else keeps to, or refuse in these words.

    >>> from tempfile import mkdtemp
    >>> with alone(Path(mkdtemp()), "Somebody is there."): print("alone")
    alone
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(home))
        except Refused as error:
            raise Refused(otherwise if isinstance(error.__cause__, BlockingIOError) else str(error)) from error
        yield


@contextmanager
def hearing_stops() -> Iterator[threading.Event]:
    """Inside, Ctrl-C and SIGTERM only set the event that it gives.

    >>> with hearing_stops() as asked:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     asked.is_set()
    True
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # no other thread hears signals
        yield asked
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
