"""Watches the runs in a folder: a background thread reads new records, and requests return what has been read."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from fedtailor.core.untrusted_input import read_toml
from fedtailor.errors import FedTailorError, RunError, reason
from fedtailor.reporting.dashboard.history import RunHistory, required_tables
from fedtailor.reporting.dashboard.launcher import Launcher
from fedtailor.reporting.dashboard.run_view import INACTIVE_STATES, RunView
from fedtailor.runs.reader import is_finished, is_run_folder, read_info, read_settings
from fedtailor.runs.run import client_counts, method_label
from fedtailor.runs.tail import RecordTail

_POLL_SECONDS = 0.5
_MAX_RECORDS = 20  # per run and poll, so that reading finished runs does not delay active ones


class RunMonitor:
    """All runs in a folder and in its subfolders."""

    def __init__(self, root: Path, launcher: Launcher) -> None:
        self.root, self._launcher = root, launcher
        self.instance_id = token_hex(4)  # invalidates versions that another dashboard sent
        self.version = 0
        self._runs: dict[str, RunView] = {}
        self._removed: dict[str, int] = {}  # name -> version
        self._lock = threading.Lock()  # protects the list and the versions; a run's history is only appended to
        self._list_lock = threading.Lock()  # one thread lists folders at a time, so that no older list replaces a newer
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._poll_forever, name="run-monitor", daemon=True)

    def start(self) -> None:
        """List the runs, then keep reading them in a thread."""
        self._update_list()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        self._wake.set()
        self._thread.join()

    def refresh(self) -> None:
        """List the runs again and poll soon, because a run was started, stopped, or removed."""
        self._update_list()
        self._wake.set()

    def get(self, name: str) -> RunView:
        """Return a run by its name. Requests access folders only through this method."""
        with self._lock:
            if name not in self._runs:
                raise RunError("This folder has no such run; it may have been deleted or renamed.")
            return self._runs[name]

    def changes(self, since: str) -> dict[str, Any]:
        """Return the changes since a version that was sent before, or all runs if that version is unknown."""
        instance_id, _, number = since.partition(".")
        known = int(number) if instance_id == self.instance_id and number.isdecimal() and len(number) < 18 else 0
        with self._lock:
            rows = [run.row() for run in self._runs.values() if run.version > known or not known]
            removed = [name for name, version in self._removed.items() if version > known and known]
            version = f"{self.instance_id}.{self.version}"
        return {"version": version, "complete": not known, "runs": rows, "removed": removed}

    def poll(self) -> bool:
        """Update all runs once; return whether any run has more records to read."""
        self._update_list()
        with self._lock:
            runs = sorted(self._runs.values(), key=lambda run: (run.state in INACTIVE_STATES, -run.last_update))
        more = [self._update(run) for run in runs]
        return any(more)

    def _poll_forever(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                more = self.poll()
            except OSError:  # the folder is missing or cannot be read; it may become available again
                more = False
            if not more:
                self._wake.wait(_POLL_SECONDS)

    def _update_list(self) -> None:
        """Add new runs and remove deleted ones."""
        with self._list_lock:
            launched = self._launcher.names()  # first: a run that ends after this line has a folder by then
            found = {path.relative_to(self.root).as_posix(): path for path in _run_folders(self.root)}
            found |= {name: self.root / name for name in launched if name not in found}
            with self._lock:
                for name in [name for name in self._runs if name not in found]:
                    del self._runs[name]
                    self.version += 1
                    self._removed[name] = self.version
                for name in [name for name in found if name not in self._runs]:
                    self._removed.pop(name, None)
                    self._runs[name] = RunView(name, found[name])
                    self._mark_changed(self._runs[name])

    def _mark_changed(self, run: RunView) -> None:
        self.version += 1
        run.version = self.version

    def _update(self, run: RunView) -> bool:
        before = run.status
        try:
            self._read(run)
        except Exception as error:  # an invalid run, or a bug here, must not affect other runs
            known = isinstance(error, FedTailorError)
            run.message = str(error) if known else f"The records cannot be read: {reason(error)}."
            run.state, run.reading = "unreadable", False
            run.history = run.tail = None
            if isinstance(error, OSError):
                run.file_stats = ()  # read the run again at the next poll, even if its files are unchanged
        if run.status != before:
            with self._lock:
                self._mark_changed(run)
        return run.reading

    def _read(self, run: RunView) -> None:
        if not is_run_folder(run.folder):
            self._update_pending(run)
            return
        stats = [(run.folder / name).stat() for name in ("experiment.toml", "run.json", "rounds.jsonl")]
        file_stats = [(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats]
        if run.state == "unreadable" and file_stats == run.file_stats:
            return
        is_new = run.tail is None or file_stats[:2] != run.file_stats[:2]  # the latter: the folder has another run
        run.file_stats, run.last_update = file_stats, stats[-1].st_mtime
        if is_new:
            run.settings, run.info = read_settings(run.folder), read_info(run.folder)
            run.method, run.data = run.run.method_title, run.settings["data"]["name"]
            run.__dict__.pop("names", None)
            tables = required_tables(run.info["score"])
            run.tail = RecordTail(run.folder / "rounds.jsonl", client_counts(run.info), tables)
            run.history, run.state, run.reading = None, "stopped", True
        self._read_records(run)
        self._update_state(run)

    def _read_records(self, run: RunView) -> None:
        assert run.tail is not None and run.info is not None
        is_live = not run.reading  # otherwise, these records were written earlier and give no timing
        restarted, records, run.reading = run.tail.read(_MAX_RECORDS)
        if restarted or run.history is None:
            history = RunHistory([client["test"] for client in run.info["clients"]], run.info["score"])
            run.arrivals.clear()
        else:
            history = run.history
        for offset, record in records:
            history.add(record, offset)
        run.history = history
        if records and is_live and not restarted:
            run.arrivals.extend([time.time()] * len(records))

    def _update_state(self, run: RunView) -> None:
        assert run.history is not None
        pid = self._launcher.pid(run.name)
        run.can_stop, run.message = pid is not None, ""
        if is_finished(run.folder) and pid is None:
            run.state = "finished"
        elif pid is not None or is_locked(run.folder):
            run.state = "stopping" if self._launcher.is_stopping(run.name) else "running"
        else:
            self._update_ended(run)
        left = run.rounds - run.history.rounds
        pace = run.seconds_per_round()
        run.estimated_end = run.last_update + left * pace if run.state == "running" and pace is not None else None

    def _update_pending(self, run: RunView) -> None:
        """Update a run that was launched but has no files yet, or failed before it wrote any."""
        run.reading = run.can_stop = False
        if not run.settings:
            path = self._launcher.settings_path(run.name)
            run.settings = read_toml(path, "The experiment")
            run.method = _part_name(run.settings, "method", "fedavg")
            run.data = _part_name(run.settings, "data", "digits")
            run.last_update = path.stat().st_mtime
        if self._launcher.pid(run.name) is not None:
            run.state, run.can_stop = "starting", True
        else:
            self._update_ended(run)

    def _update_ended(self, run: RunView) -> None:
        run.state = "failed" if self._launcher.has_failed(run.name) else "stopped"
        run.message = self._launcher.log_tail(run.name)


def _part_name(settings: dict[str, Any], part: str, default: str) -> str:
    """Return the name of the method or data in a user's settings, where a part is a name, a table, or missing."""
    value = settings.get(part, default)
    return method_label({"name": default} | value) if isinstance(value, dict) else str(value)


def _run_folders(root: Path) -> Iterator[Path]:
    for path in _subfolders(root):
        if is_run_folder(path):
            yield path
        else:
            yield from (below for below in _subfolders(path) if is_run_folder(below))


def _subfolders(folder: Path) -> list[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(Path(e.path) for e in entries if not e.name.startswith(".") and e.is_dir())
    return []


def is_locked(folder: Path) -> bool:
    """Return whether a process works on a run.

    The check takes a shared lock and releases it immediately, so it does not prevent a process from locking the folder.
    """
    lock = folder / "lock"
    if not lock.is_file():  # opening a named pipe would block
        return False
    try:
        with lock.open("rb") as file:
            if sys.platform == "win32":
                import msvcrt

                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
                msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
            else:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
