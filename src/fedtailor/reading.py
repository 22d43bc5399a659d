"""Runs as they are on disk: finished, or still being written."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fedtailor.errors import Refused
from fedtailor.lines import Lines, Record, check_line, restore
from fedtailor.record import elsewhere, holds_run, is_finished, open_run, read_info, read_settings
from fedtailor.run import Run
from fedtailor.scale import distinct, tidy
from fedtailor.untrusted import parse_json

HOW = ("engine", "chunk", "device", "checkpoint_every")  # settings that change nothing but time
LONGEST = 2**26  # bytes of a line: that of 1,000 clients has half a million
_MARK = 64  # last bytes that were read, by which a file is known again


def folders(paths: Iterable[Path]) -> list[Path]:
    """The runs' folders among these, or one level below them, each once.

    >>> folders([Path("nowhere")])
    Traceback (most recent call last):
    fedtailor.errors.Refused: There is no run in 'nowhere'.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        own = [path] if holds_run(path) else sorted(sub.parent for sub in path.glob("*/experiment.toml"))
        if not own:
            raise Refused(f"There is no run in '{path}'.")
        found |= {folder.resolve(): folder for folder in own}
    return list(found.values())


def find(paths: Iterable[Path]) -> tuple[list[Run], list[Path]]:
    """The finished runs among these folders and in them, and the folders of runs that are not finished."""
    found = folders(paths)
    return [open_run(path) for path in found if is_finished(path)], [path for path in found if not is_finished(path)]


def firsts(runs: Iterable[Run]) -> list[Run]:
    """Of every method one run, that of its first seed, in the methods' order."""
    found: dict[str, Run] = {}
    for run in runs:
        known = found.setdefault(run.method, run)
        if run.experiment["seed"] < known.experiment["seed"]:
            found[run.method] = run
    return list(found.values())


def called(run: Run) -> list[str]:
    """How clients are called in sentences: by their names, where these are more than numbers. Those that are the same
    once they are cut are numbered."""
    names = distinct([tidy(client["name"]) for client in run.info["clients"]])
    return [f"client {name}" if name.isdecimal() else name for name in names]


def experiment_of(run: Run) -> str:
    """All that must be the same, but for the method and the seeds."""
    kept = {name: value for name, value in run.experiment.items() if name not in ("method", "seed", *HOW)}
    kept["data"] = {**run.experiment["data"], "seed": None}
    judged = [run.info["score"], run.info["higher_is_better"], run.num_clients]
    return json.dumps([kept, judged], sort_keys=True, default=str)


def split_of(run: Run) -> str:
    """By what a run's clients are known again."""
    mark = run.info.get("fingerprint", {}).get("data")
    clients = [(client["name"], client["train"], client["test"]) for client in run.info["clients"]]
    return str(mark or json.dumps([run.experiment["data"], clients], sort_keys=True, default=str))


def is_alone(other: Run, run: Run) -> bool:
    """Whether another run is the training alone that a run may be compared with: client by client, all else alike."""
    if other.method != "local" or other.experiment["seed"] != run.experiment["seed"]:
        return False
    return experiment_of(other) == experiment_of(run) and split_of(other) == split_of(run)


def peek(folder: Path) -> Run:
    """A run as far as it is written, without its models: all that a page needs of one that goes on.

    >>> peek(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.Refused: There is no run in 'nowhere'.
    """
    experiment, info = read_settings(folder), read_info(folder)
    return Run(experiment, info, Lines(_lines(folder, len(info["clients"]))), {}, elsewhere, elsewhere, folder)


def _lines(folder: Path, clients: int) -> list[Record]:
    with reading_record(folder) as path:
        return [restore(line) for _, line in Tail(path, clients).read()[1]]


@contextmanager
def reading_record(folder: Path) -> Iterator[Path]:
    """The record in a run's folder; whatever is wrong with it, as one sentence.

    >>> with reading_record(Path("nowhere")) as path:
    ...     Tail(path, clients=1).read()
    Traceback (most recent call last):
    fedtailor.errors.Refused: The record in 'nowhere' cannot be read: 'rounds.jsonl' is no file.
    """
    try:
        yield folder / "rounds.jsonl"
    except (OSError, ValueError) as error:
        raise Refused(f"The record in '{folder}' cannot be read: {str(error).rstrip('.')}.") from error


class Tail:
    """The end of a record that grows: the lines that were appended since it was last read. A file that was replaced,
    cut off or written anew starts over."""

    def __init__(self, path: Path, clients: int, tables: Iterable[str] | None = None) -> None:
        self.clients, self._path = clients, path
        self._tables = None if tables is None else frozenset(tables)  # those of a line that are wanted
        self._inode, self._end, self._mark, self._count = 0, 0, b"", 0

    def read(self, most: int | None = None) -> tuple[bool, list[tuple[int, Record]], bool]:
        """Whether all before is void; the new lines, or so many of them, each with its place in the file; whether there
        are more.

        A line that is still being written waits for its end. Raises ValueError for one that is no round's; then nothing
        counts as read.
        """
        if not self._path.is_file():  # a pipe may never say anything
            raise ValueError(f"'{self._path.name}' is no file")
        with self._path.open("rb") as file:
            again = not self._goes_on(file)
            end, mark, count = (0, b"", 0) if again else (self._end, self._mark, self._count)
            file.seek(end)
            found: list[tuple[int, Record]] = []
            while room := most is None or len(found) < most:
                text = file.readline(LONGEST)
                if not text.endswith(b"\n"):
                    if len(text) == LONGEST:
                        raise ValueError(f"line {count + 1} of the record has no end")
                    break
                found.append((end, self._checked(text, count + 1)))
                end, mark, count = end + len(text), text[-_MARK:], count + 1
            self._inode, self._end, self._mark, self._count = os.fstat(file.fileno()).st_ino, end, mark, count
        return again, found, not room

    def _goes_on(self, file: BinaryIO) -> bool:
        if os.fstat(file.fileno()).st_ino != self._inode:
            return False
        file.seek(self._end - len(self._mark))
        return file.read(len(self._mark)) == self._mark

    def _checked(self, text: bytes, number: int) -> Record:
        try:
            line = parse_json(text)
        except ValueError as error:
            raise ValueError(f"line {number} of the record is no JSON") from error
        return check_line(line if self._tables is None else _only(line, self._tables), number, self.clients)


def line_at(path: Path, offset: int, clients: int) -> Record:
    """One line of a record, by its place in the file."""
    with path.open("rb") as file:
        file.seek(offset)
        line = parse_json(file.readline(LONGEST))
    return restore(check_line(line, int(line["round"]), clients))


def _only(line: Any, tables: frozenset[str]) -> Any:
    """A line without the tables that nobody asked for, which are most of it: to check them would take longest."""
    per_client = line.get("per_client") if isinstance(line, dict) else None
    if not isinstance(per_client, dict):
        return line
    return line | {"per_client": {"bytes_up": {}} | {name: per_client[name] for name in tables & per_client.keys()}}
