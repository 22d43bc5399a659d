"""The runs in a folder, followed while they grow. A thread reads what was appended; whoever asks gets what is known."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from fedtailor.errors import Refused
from fedtailor.reading import Tail
from fedtailor.record import holds_run, is_finished, read_info, read_settings
from fedtailor.run import name_of
from fedtailor.see.starting import Starter
from fedtailor.see.trail import Trail, wanted
from fedtailor.see.watched import DONE, Watched
from fedtailor.untrusted import read_toml

_EVERY = 0.5  # seconds between two looks
_LINES = 20  # of one run at a time: those that run must not wait for those that ended


class Watcher:
    """All runs below a folder, one or two levels deep."""

    def __init__(self, root: Path, starter: Starter) -> None:
        self.root, self._starter = root, starter
        self.boot = token_hex(4)  # versions of an earlier page are not ours
        self.version = 0
        self._runs: dict[str, Watched] = {}
        self._gone: dict[str, int] = {}
        self._lock = threading.Lock()  # of the list and the versions; runs themselves only ever grow
        self._stop = threading.Event()
        self._soon = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def begin(self) -> None:
        """Look once at what there is, and go on looking."""
        self._list()
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._soon.set()
        self._thread.join()

    def look_soon(self) -> None:
        """Something was started or stopped."""
        self._soon.set()

    def get(self, name: str) -> Watched:
        """A run by its name: the only way from a request to a folder."""
        with self._lock:
            if name not in self._runs:
                raise Refused("There is no such run in this folder; perhaps it was deleted or renamed.")
            return self._runs[name]

    def changes(self, since: str) -> dict[str, Any]:
        """What changed since a version that was told before, or everything."""
        boot, _, number = since.partition(".")
        known = int(number) if boot == self.boot and number.isdecimal() and len(number) < 18 else 0
        with self._lock:
            rows = [run.row() for run in self._runs.values() if run.version > known or not known]
            gone = [name for name, at in self._gone.items() if at > known and known]
            return {"version": f"{self.boot}.{self.version}", "all": not known, "runs": rows, "gone": gone}

    def look(self) -> bool:
        """One look at everything; whether there is more to be read at once."""
        self._list()
        with self._lock:
            runs = sorted(self._runs.values(), key=lambda run: (run.state in DONE, -run.at))
        more = [self._follow(run) for run in runs]
        return any(more)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self._soon.clear()
            try:
                more = self.look()
            except OSError:  # the folder itself is gone or cannot be read; it may come back
                more = False
            if not more:
                self._soon.wait(_EVERY)

    def _list(self) -> None:
        """Who came and who went."""
        found = {path.relative_to(self.root).as_posix(): path for path in _folders(self.root)}
        found |= {name: self.root / name for name in self._starter.known() if name not in found}
        with self._lock:
            for name in [name for name in self._runs if name not in found]:
                del self._runs[name]
                self.version += 1
                self._gone[name] = self.version
            for name in [name for name in found if name not in self._runs]:
                self._gone.pop(name, None)
                self._runs[name] = Watched(name, found[name])
                self._touch(self._runs[name])

    def _touch(self, run: Watched) -> None:
        self.version += 1
        run.version = self.version

    def _follow(self, run: Watched) -> bool:
        before = (run.state, run.words, run.reading, run.can_stop, run.trail and run.trail.rounds)
        try:
            self._read(run)
        except Exception as error:  # whatever lies in a folder, or is wrong with us: the others go on
            run.state, run.words, run.reading, run.trail, run.tail = "unreadable", _said(error), False, None, None
            if isinstance(error, OSError):
                run.marks = ()  # it may be readable at the next look, without having changed
        now = (run.state, run.words, run.reading, run.can_stop, run.trail and run.trail.rounds)
        if now != before:
            with self._lock:
                self._touch(run)
        return run.reading

    def _read(self, run: Watched) -> None:
        if not holds_run(run.folder):
            self._expect(run)
            return
        stats = [(run.folder / name).stat() for name in ("experiment.toml", "run.json", "rounds.jsonl")]
        marks = [(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats]
        if run.state == "unreadable" and marks == run.marks:
            return  # nothing changed since
        is_new = run.tail is None or marks[:2] != run.marks[:2]  # or another run in the same place
        run.marks, run.at = marks, stats[-1].st_mtime
        if is_new:
            run.settings, run.info = read_settings(run.folder), read_info(run.folder)
            run.method, run.data = name_of(run.settings["method"]), run.settings["data"]["name"]
            run.__dict__.pop("names", None)
            run.tail = Tail(run.folder / "rounds.jsonl", len(run.info["clients"]), wanted(run.info["score"]))
            run.trail, run.state, run.reading = None, "stopped", True
        self._read_on(run)
        self._judge(run)

    def _read_on(self, run: Watched) -> None:
        assert run.tail is not None and run.info is not None
        followed = not run.reading  # else what comes now is old
        again, lines, run.reading = run.tail.read(_LINES)
        if again or run.trail is None:
            fresh = Trail([client["test"] for client in run.info["clients"]], run.info["score"])
            run.arrivals.clear()
        else:
            fresh = run.trail
        for offset, line in lines:
            fresh.add(line, offset)
        run.trail = fresh
        if lines and followed and not again:
            run.arrivals.extend([time.time()] * len(lines))

    def _judge(self, run: Watched) -> None:
        """Its state, and how long it will take."""
        assert run.trail is not None
        process = self._starter.process(run.name)
        run.can_stop, run.words = process is not None, ""
        if is_finished(run.folder) and process is None:
            run.state = "finished"
        elif process is not None or is_held(run.folder):
            run.state = "stopping" if self._starter.is_stopping(run.name) else "running"
        else:
            run.state = "failed" if self._starter.has_failed(run.name) else "stopped"
            run.words = self._starter.last_words(run.name)
        left = run.rounds - run.trail.rounds
        pace = run.pace()
        run.until = run.at + left * pace if run.state == "running" and pace is not None else None

    def _expect(self, run: Watched) -> None:
        """What was started and is not a run yet, or failed before it was one."""
        run.reading = run.can_stop = False
        if not run.settings:
            run.settings = read_toml(self._starter.asked(run.name), "The experiment")
            run.method, run.data = _chosen(run.settings, "method", "fedavg"), _chosen(run.settings, "data", "digits")
            run.at = self._starter.asked(run.name).stat().st_mtime
        if self._starter.process(run.name) is not None:
            run.state, run.can_stop = "starting", True
        else:
            run.state = "failed" if self._starter.has_failed(run.name) else "stopped"
            run.words = self._starter.last_words(run.name)


def _said(error: Exception) -> str:
    """What is wrong with a run, in a sentence."""
    if isinstance(error, Refused):
        return str(error)
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"The record cannot be read: {why.splitlines()[0][:200].rstrip('.')}."


def _chosen(settings: dict[str, Any], part: str, default: str) -> str:
    """The name of a part in settings that somebody wrote, where it may be all that is said of it, or left out."""
    given = settings.get(part, default)
    return name_of({"name": default} | given) if isinstance(given, dict) else str(given)


def _folders(root: Path) -> Iterator[Path]:
    """Runs in a folder, or in the folders in it."""
    for path in _inside(root):
        if holds_run(path):
            yield path
        else:
            yield from (below for below in _inside(path) if holds_run(below))


def _inside(folder: Path) -> list[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(Path(e.path) for e in entries if not e.name.startswith(".") and e.is_dir())
    return []


def is_held(folder: Path) -> bool:
    """Whether some process works on a run. The lock is only tried in common with others, and for an instant: who tries
    to take it must not find it taken by who looks."""
    lock = folder / "lock"
    if not lock.is_file():  # a pipe would keep us waiting
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
