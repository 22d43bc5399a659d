"""Read runs that are still being written, record by record."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fedtailor.core.untrusted_input import parse_json
from fedtailor.errors import RunError, reason
from fedtailor.runs.reader import raise_remote_client, read_info, read_settings
from fedtailor.runs.records import Record, Records, restore_record, validate_record
from fedtailor.runs.run import Run, client_counts

MAX_LINE_BYTES = 2**26  # a record of 1,000 clients has about half a million bytes
_MARK_BYTES = 64  # the last bytes that were read identify the file on the next read


def read_partial_run(folder: Path) -> Run:
    """Return a run as far as it is written, without its models.

    >>> read_partial_run(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.RunError: There is no run in 'nowhere'.
    """
    experiment, info = read_settings(folder), read_info(folder)
    with record_errors(folder) as path:
        _, found, _ = RecordTail(path, client_counts(info)).read()
        records = Records(restore_record(record) for _, record in found)
    return Run(experiment, info, records, {}, raise_remote_client, raise_remote_client, folder)


@contextmanager
def record_errors(folder: Path) -> Iterator[Path]:
    """Yield the path of a run's records, and turn any error from reading it into a RunError.

    >>> with record_errors(Path("nowhere")) as path:
    ...     RecordTail(path, clients=(1, 0)).read()
    Traceback (most recent call last):
    fedtailor.errors.RunError: The records in 'nowhere' cannot be read: 'rounds.jsonl' is not a file.
    """
    try:
        yield folder / "rounds.jsonl"
    except (OSError, ValueError) as error:
        raise RunError(f"The records in '{folder}' cannot be read: {reason(error)}.") from error


class RecordTail:
    """Reads the records that were appended to a file since the last read. If the file was replaced, truncated, or
    rewritten, reading starts again from its beginning."""

    def __init__(self, path: Path, clients: tuple[int, int], tables: Iterable[str] | None = None) -> None:
        """Read the records of a run with these `client_counts`."""
        self.clients, self._path = clients, path
        self._tables = None if tables is None else frozenset(tables)  # the per-client tables to read; None: all
        self._inode, self._end, self._mark, self._count = 0, 0, b"", 0

    def read(self, limit: int | None = None) -> tuple[bool, list[tuple[int, Record]], bool]:
        """Return whether earlier records are void, the new records (at most `limit`) with their offsets in the file,
        and whether there may be more.

        An incomplete last line is left for the next read. An invalid record raises ValueError; then nothing counts as
        read.
        """
        if not self._path.is_file():  # reading a pipe could block forever
            raise ValueError(f"'{self._path.name}' is not a file")
        with self._path.open("rb") as file:
            restarted = not self._is_continuation(file)
            end, mark, count = (0, b"", 0) if restarted else (self._end, self._mark, self._count)
            file.seek(end)
            found: list[tuple[int, Record]] = []
            while below_limit := limit is None or len(found) < limit:
                text = file.readline(MAX_LINE_BYTES)
                if not text.endswith(b"\n"):
                    if len(text) == MAX_LINE_BYTES:
                        raise ValueError(f"line {count + 1} is too long")
                    break
                found.append((end, self._parse(text, count + 1)))
                end, mark, count = end + len(text), text[-_MARK_BYTES:], count + 1
            self._inode, self._end, self._mark, self._count = os.fstat(file.fileno()).st_ino, end, mark, count
        return restarted, found, not below_limit

    def _is_continuation(self, file: BinaryIO) -> bool:
        if os.fstat(file.fileno()).st_ino != self._inode:
            return False
        file.seek(self._end - len(self._mark))
        return file.read(len(self._mark)) == self._mark

    def _parse(self, text: bytes, number: int) -> Record:
        try:
            line = parse_json(text)
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON") from error
        return validate_record(line if self._tables is None else _select(line, self._tables), number, *self.clients)


def read_record_at(path: Path, offset: int, clients: tuple[int, int]) -> Record:
    """Return the record at an offset of the file."""
    with path.open("rb") as file:
        file.seek(offset)
        line = parse_json(file.readline(MAX_LINE_BYTES))
    return restore_record(validate_record(line, int(line["round"]), *clients))


def _select(line: Any, tables: frozenset[str]) -> Any:
    """Drop per-client tables that are not needed before validation, because they take most of its time."""
    per_client = line.get("per_client") if isinstance(line, dict) else None
    if not isinstance(per_client, dict):
        return line
    return line | {"per_client": {"bytes_up": {}} | {name: per_client[name] for name in tables & per_client.keys()}}
