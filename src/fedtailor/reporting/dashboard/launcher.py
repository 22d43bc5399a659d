"""Starts, stops and resumes experiments as processes that continue when the dashboard ends.

FOLDER/.live/NAME.toml  the settings         NAME.pid  the process ID
               NAME.log  the output          NAME.end  the exit code, written when the process ends
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

from fedtailor.core.untrusted_input import read_text, sanitize
from fedtailor.errors import FedTailorError, RunError
from fedtailor.experiments.experiment import Experiment, make_experiment, read_experiment_file
from fedtailor.experiments.resume import resume
from fedtailor.runs.files import write_atomic, write_errors
from fedtailor.runs.reader import FLOWER_ENGINE, is_finished, is_run_folder, read_info
from fedtailor.runs.run import method_label
from fedtailor.runs.toml import to_toml
from fedtailor.training.simulate import describe_method

LAUNCHER_FOLDER = ".live"
_EXPECTED_EXIT_CODES = (0, 130, 143)  # finished, or stopped by SIGINT or SIGTERM
_LOG_BYTES = 4000  # shown of a log
_PROC = Path("/proc")
_ENTRY_POINT = (  # restores Ctrl-C: a dashboard in the background ignores SIGINT, and processes would inherit that
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from fedtailor.reporting.dashboard.launcher import main; main()"
)


class Launcher:
    """Starts, stops and tracks the experiments of one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stop_requested: set[str] = set()
        self._lock = threading.Lock()

    def start(self, experiment: Experiment, settings: Mapping[str, Any]) -> str:
        """Start an experiment in a new folder and return the folder's name."""
        label = f"{method_label(describe_method(experiment.method))}-seed{experiment.seed}-{experiment.data.name}"
        with self._lock, write_errors(f"No experiment can be started in '{self._root}'"):
            folder = _new_folder(self._root, label.replace("(", "-").replace(")", ""))
            (self._root / LAUNCHER_FOLDER).mkdir(exist_ok=True)
            write_atomic(self.settings_path(folder.name), to_toml(settings).encode())
            self._spawn("start", folder.name)
        return folder.name

    def resume(self, name: str) -> None:
        """Resume a stopped run."""
        folder = self._root / name
        if is_run_folder(folder):
            if is_finished(folder):
                raise RunError(f"The run '{name}' is finished and cannot be resumed.")
            if read_info(folder)["engine"] == FLOWER_ENGINE:
                raise RunError(f"The run '{name}' has deployed clients; resume it with fedtailor deploy resume.")
        elif not self.settings_path(name).is_file():
            raise RunError(f"There is no run '{name}'.")
        with self._lock, write_errors(f"No experiment can be started in '{self._root}'"):
            if self.pid(name) is not None:
                raise RunError(f"The run '{name}' is already running.")
            folder.mkdir(exist_ok=True)
            (self._root / LAUNCHER_FOLDER).mkdir(exist_ok=True)
            self._spawn("resume" if is_run_folder(folder) else "start", name)

    def stop(self, name: str) -> None:
        """Let a run finish its round, save a checkpoint and end; a second call ends it immediately."""
        pid = self.pid(name)
        if pid is None:
            raise RunError(f"The run '{name}' was not started from the dashboard; stop it with Ctrl-C in its terminal.")
        if sys.platform == "win32":
            raise RunError("The dashboard cannot stop runs on Windows; stop the run in its terminal.")
        self._stop_requested.add(name)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)

    def remove(self, name: str) -> None:
        """Remove an experiment that ended before its first round from the list."""
        if is_run_folder(self._root / name) or self.pid(name) is not None:
            raise RunError(f"'{name}' is a run; the dashboard does not delete runs.")
        for suffix in (".toml", ".pid", ".log", ".end"):
            self._path(name, suffix).unlink(missing_ok=True)
        with suppress(OSError):
            (self._root / name).rmdir()  # only if it is empty

    def names(self) -> list[str]:
        """Return the names of launched experiments that are active or failed."""
        names = [unquote(path.name.removesuffix(".toml")) for path in (self._root / LAUNCHER_FOLDER).glob("*.toml")]
        return [n for n in names if _is_inside(n) and (self.pid(n) is not None or self.has_failed(n))]

    def settings_path(self, name: str) -> Path:
        """Return the file with an experiment's settings."""
        return self._path(name, ".toml")

    def pid(self, name: str) -> int | None:
        """Return the ID of a run's process, or None if it has ended or was not started from a dashboard."""
        if (process := self._processes.get(name)) is not None:
            return process.pid if process.poll() is None else None
        if (pid := self._read_integer(name, ".pid")) is None:
            return None
        arguments = tuple(" ".join(self.command(action, name)[3:]) for action in ("start", "resume"))
        return pid if _command_line(pid).endswith(arguments) else None

    def is_stopping(self, name: str) -> bool:
        """Return whether a run was told to stop and has not ended yet."""
        return name in self._stop_requested and self.pid(name) is not None

    def has_failed(self, name: str) -> bool:
        """Return whether a run's last process ended with an error or was killed."""
        if not self._path(name, ".pid").is_file() or self.pid(name) is not None or name in self._stop_requested:
            return False
        return self._read_integer(name, ".end") not in _EXPECTED_EXIT_CODES  # a killed process leaves no exit code

    def log_tail(self, name: str) -> str:
        """Return the end of the output of a run's last process."""
        if not self._path(name, ".log").is_file():
            return ""
        try:
            with self._path(name, ".log").open("rb") as log:
                log.seek(max(log.seek(0, os.SEEK_END) - _LOG_BYTES, 0))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        shown = [sanitize(line, 500) for line in lines if line.strip()][-12:]
        if self.has_failed(name) and not self._path(name, ".end").is_file():
            silent = "The process was killed without any output; it may have run out of memory."
            shown.append("The process ended without an exit code." if shown else silent)
        return "\n".join(shown)

    def _spawn(self, action: str, name: str) -> None:
        self._stop_requested.discard(name)
        self._path(name, ".end").unlink(missing_ok=True)
        with self._path(name, ".log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                self.command(action, name), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        write_atomic(self._path(name, ".pid"), str(self._processes[name].pid).encode())

    def command(self, action: str, name: str) -> list[str]:
        """Return the command of a process that executes `main`; later dashboards identify the process by it."""
        safe_path = "-P"  # does not import modules from the working directory, such as a file torch.py
        return [
            sys.executable, safe_path, "-c", _ENTRY_POINT, action, str(self._root / name), str(self._path(name, "")),
        ]  # fmt: skip

    def _read_integer(self, name: str, suffix: str) -> int | None:
        with suppress(FedTailorError, ValueError):
            return int(read_text(self._path(name, suffix), "The file", 100))
        return None

    def _path(self, name: str, suffix: str) -> Path:
        return self._root / LAUNCHER_FOLDER / f"{quote(name, safe='')}{suffix}"


def _is_inside(name: str) -> bool:
    """Return whether a name, which may come from untrusted files, is a path of one or two parts inside the folder."""
    parts = PurePath(name).parts
    is_plain = "/".join(parts) == name and name.isprintable() and not any(part.startswith(".") for part in parts)
    return is_plain and 0 < len(parts) < 3


def _new_folder(root: Path, label: str) -> Path:
    """Create an empty folder with an unused name; this is safe if several processes do so in parallel."""
    root.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        folder = root / (label if number == 1 else f"{label}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("unreachable")


def _command_line(pid: int) -> str:
    """Return the command line of a process, or an empty string if it has ended."""
    if (_PROC / "self" / "cmdline").exists():
        with suppress(OSError):
            return os.fsdecode((_PROC / str(pid) / "cmdline").read_bytes()).rstrip("\0").replace("\0", " ")
        return ""
    with suppress(OSError):  # Windows has no `ps`
        result = subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True)
        return result.stdout.rstrip("\n")
    return ""


# ---- the launched process


def main() -> None:
    """Run the command `start|resume FOLDER PATH`: train in FOLDER and write the exit code to PATH.end.

    `start` reads the settings from PATH.toml; `resume` continues the run in FOLDER.
    """
    action, folder, path = sys.argv[1:4]
    code = 1
    try:
        code = _execute(action, Path(folder), Path(f"{path}.toml"))
    finally:
        with suppress(OSError):
            Path(folder).rmdir()  # only if it is empty
        Path(f"{path}.end").write_text(str(code))
    sys.exit(code)


def _execute(action: str, folder: Path, settings: Path) -> int:
    """Train and return the exit code; messages go to stderr, which is the log that the dashboard shows."""
    try:
        if action == "start":
            make_experiment(read_experiment_file(settings)).run(folder=folder)
        else:
            resume(folder)
    except FedTailorError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "The run was stopped immediately.", file=sys.stderr)
        return int(getattr(interrupt, "code", 130))
    except Exception:
        traceback.print_exc()
        return 1
    return 0
