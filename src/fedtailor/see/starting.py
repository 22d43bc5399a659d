"""Experiments as processes: started from the page, stopped, gone on with. They do not end with the page.

FOLDER/.live/NAME.toml  what was asked for       NAME.pid  the process
               NAME.log  all that it said        NAME.end  its exit code, when it has ended
"""

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote, unquote

from fedtailor.errors import Refused
from fedtailor.experiment import Experiment, from_toml, make
from fedtailor.files import write, writing
from fedtailor.record import FEDERATED, holds_run, is_finished, read_info
from fedtailor.resuming import resume
from fedtailor.run import name_of
from fedtailor.simulate import describe
from fedtailor.toml import to_toml
from fedtailor.untrusted import quoted, read_text

NOTES = ".live"
_STOPPED = (0, 130, 143)  # exit codes of a run that ended well, or when it was told to
_WORDS = 4000  # bytes of a log that are shown
_ENTRY = (  # Ctrl-C must reach a process also where the page itself runs in a background that ignores it
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from fedtailor.see.starting import main; main()"
)


class Starter:
    """Starts, stops and remembers the experiments of one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._own: dict[str, subprocess.Popen[bytes]] = {}
        self._stops: set[str] = set()
        self._lock = threading.Lock()

    def start(self, experiment: Experiment, settings: Mapping[str, Any]) -> str:
        """Begin an experiment in a folder of its own; the name of that."""
        label = f"{name_of(describe(experiment.method))}-seed{experiment.seed}-{experiment.data.name}"
        with self._lock, writing(f"Nothing can be started in '{self._root}'"):
            folder = _new_folder(self._root, label.replace("(", "-").replace(")", ""))
            (self._root / NOTES).mkdir(exist_ok=True)
            write(self._notes(folder.name, ".toml"), to_toml(settings).encode())
            self._spawn("start", folder.name)
        return folder.name

    def resume(self, name: str) -> None:
        """Go on with a run that was stopped."""
        folder = self._root / name
        if holds_run(folder):
            if is_finished(folder):
                raise Refused(f"The run '{name}' is finished: there is nothing to go on with.")
            if read_info(folder)["engine"] == FEDERATED:
                raise Refused("The clients of this run are real: its server goes on with fedtailor deploy resume.")
        elif not self._notes(name, ".toml").is_file():
            raise Refused(f"There is no run '{name}'.")
        with self._lock, writing(f"Nothing can be started in '{self._root}'"):
            if self.process(name) is not None:
                raise Refused(f"The run '{name}' is being worked on already.")
            folder.mkdir(exist_ok=True)
            (self._root / NOTES).mkdir(exist_ok=True)
            self._spawn("resume" if holds_run(folder) else "start", name)

    def stop(self, name: str) -> None:
        """Let a run finish its round, save itself and end; a second time, let it end at once."""
        pid = self.process(name)
        if pid is None:
            raise Refused(f"The run '{name}' was not started from this page; stop it with Ctrl-C where it was started.")
        if sys.platform == "win32":
            raise Refused("On Windows a run can only be stopped where it was started; this page cannot.")
        self._stops.add(name)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)

    def forget(self, name: str) -> None:
        """Take what failed before its first round from the list."""
        if holds_run(self._root / name) or self.process(name) is not None:
            raise Refused(f"'{name}' is a run, and this page deletes no runs.")
        for ending in (".toml", ".pid", ".log", ".end"):
            self._notes(name, ending).unlink(missing_ok=True)
        with suppress(OSError):
            (self._root / name).rmdir()  # if it is there, and empty

    def known(self) -> list[str]:
        """The names of what was started and goes on, or failed; what ended well and was deleted is none of these."""
        names = [unquote(path.name.removesuffix(".toml")) for path in (self._root / NOTES).glob("*.toml")]
        return [n for n in names if _is_inside(n) and (self.process(n) is not None or self.has_failed(n))]

    def asked(self, name: str) -> Path:
        """Where it is written what an experiment was to be."""
        return self._notes(name, ".toml")

    def process(self, name: str) -> int | None:
        """The number of the process that works on a run, if it was started from here and goes on."""
        if (own := self._own.get(name)) is not None:
            return own.pid if own.poll() is None else None
        if (pid := self._number(name, ".pid")) is None:
            return None
        ours = tuple(" ".join(self.words(what, name)[3:]) for what in ("start", "resume"))
        return pid if _command(pid).endswith(ours) else None

    def is_stopping(self, name: str) -> bool:
        """Whether it was told to stop and goes on."""
        return name in self._stops and self.process(name) is not None

    def has_failed(self, name: str) -> bool:
        """Whether its last process ended otherwise than well or as it was told."""
        if not self._notes(name, ".pid").is_file() or self.process(name) is not None or name in self._stops:
            return False
        return self._number(name, ".end") not in _STOPPED  # none at all: it was killed

    def last_words(self, name: str) -> str:
        """What the last process said at its end."""
        if not self._notes(name, ".log").is_file():
            return ""
        try:
            with self._notes(name, ".log").open("rb") as log:
                log.seek(max(log.seek(0, os.SEEK_END) - _WORDS, 0))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        said = [quoted(line, 500) for line in lines if line.strip()][-12:]
        if self.has_failed(name) and not self._notes(name, ".end").is_file():
            silent = "The process ended without a word: it was killed, perhaps for want of memory."
            said.append("It ended before it could say how." if said else silent)
        return "\n".join(said)

    def _spawn(self, what: str, name: str) -> None:
        self._stops.discard(name)
        self._notes(name, ".end").unlink(missing_ok=True)
        with self._notes(name, ".log").open("wb") as log:
            self._own[name] = subprocess.Popen(
                self.words(what, name), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        write(self._notes(name, ".pid"), str(self._own[name].pid).encode())

    def words(self, what: str, name: str) -> list[str]:
        """The command of a process, by which it is known again; `main` carries it out."""
        safe = "-P"  # no file that lies where the page was started, a torch.py perhaps, is taken for a module
        return [sys.executable, safe, "-c", _ENTRY, what, str(self._root / name), str(self._notes(name, ""))]

    def _number(self, name: str, ending: str) -> int | None:
        """What stands in a note, if it is there and a number."""
        with suppress(Refused, ValueError):
            return int(read_text(self._notes(name, ending), "The note", 100))
        return None

    def _notes(self, name: str, ending: str) -> Path:
        return self._root / NOTES / f"{quote(name, safe='')}{ending}"


def _is_inside(name: str) -> bool:
    """Whether a name is that of a folder in ours, or one level deeper: notes may come from anywhere."""
    parts = PurePath(name).parts
    is_plain = "/".join(parts) == name and name.isprintable() and not any(part.startswith(".") for part in parts)
    return is_plain and 0 < len(parts) < 3


def _new_folder(root: Path, label: str) -> Path:
    """An empty folder that nobody else has: whoever makes it first owns it."""
    root.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        folder = root / (label if number == 1 else f"{label}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("numbers do not end")


def _command(pid: int) -> str:
    """The words a process was started with; nothing of one that is gone."""
    if Path("/proc/self/cmdline").exists():
        with suppress(OSError):
            return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).rstrip("\0").replace("\0", " ")
        return ""
    said = subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True)
    return said.stdout.rstrip("\n")


# ---- the process itself


def main() -> None:
    """start|resume FOLDER NOTES: carry out what NOTES.toml asks for in FOLDER, or go on with what is there; how it
    ended is written to NOTES.end."""
    what, folder, notes = sys.argv[1:4]
    code = 1
    try:
        code = _carry_out(what, Path(folder), Path(f"{notes}.toml"))
    finally:
        with suppress(OSError):
            Path(folder).rmdir()  # if nothing was written into it
        Path(f"{notes}.end").write_text(str(code))
    sys.exit(code)


def _carry_out(what: str, folder: Path, asked: Path) -> int:
    """The exit code, as the command has it; the words go to where the page reads them."""
    try:
        if what == "start":
            make(from_toml(asked)).run(folder=folder)
        else:
            resume(folder)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(str(stop) or "Left at once.", file=sys.stderr)
        return int(getattr(stop, "code", 130))
    except Exception:
        traceback.print_exc()
        return 1
    return 0
