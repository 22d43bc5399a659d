"""Files that are whole or not there: written beside, flushed to the disk, renamed. And a lock on a folder."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from fedtailor.errors import Refused

WRITING = ".writing"  # ends the name of what is not whole yet, and may be thrown away
_held: list[BinaryIO] = []  # locks of this process


def write(path: Path, data: bytes) -> None:
    """Write a file such that, whenever the process dies, there is the old one or the new one.

    >>> from tempfile import mkdtemp
    >>> write(Path(mkdtemp()) / "file", b"whole")
    """
    beside = path.with_name(path.name + WRITING)
    with beside.open("wb") as file:
        put(file, data)
    beside.replace(path)
    sync_folder(path.parent)


def put(file: BinaryIO, data: bytes) -> None:
    """Write bytes through to the disk."""
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into that gets its name when all is written; one that has the name already gives way."""
    beside = path.with_name(path.name + WRITING)
    remove(beside)
    beside.mkdir(parents=True)
    yield beside
    sync_folder(beside)
    remove(path)
    beside.replace(path)
    sync_folder(path.parent)


def remove(folder: Path) -> None:
    """Remove a folder if it is there. It loses its name first: half a folder must not pass for a whole one."""
    if folder.is_dir():
        gone = folder if folder.name.endswith(WRITING) else folder.with_name(folder.name + ".gone" + WRITING)
        if gone != folder:
            shutil.rmtree(gone, ignore_errors=True)
            folder.replace(gone)
        shutil.rmtree(gone)


def sync_folder(folder: Path) -> None:
    """Make names in a folder last through a loss of power, where the system has a way to say that."""
    with suppress(OSError, AttributeError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def checksum(data: bytes) -> str:
    """SHA-256, as sha256sum writes it.

    >>> checksum(b"")[:8]
    'e3b0c442'
    """
    return sha256(data).hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep everyone else out of a run's folder; the system opens the lock when this process ends, however it does."""
    try:
        file = (folder / "lock").open("ab")
    except OSError as error:
        raise Refused(f"The folder '{folder}' cannot be written: {error.strerror}.") from error
    with file:
        try:
            _lock(file)
        except BlockingIOError as error:
            raise Refused(f"Somebody is at work on the run in '{folder}'; wait for them, or stop them.") from error
        except OSError as error:
            raise Refused(f"The folder '{folder}' cannot be locked: {error.strerror}.") from error
        _held.append(file)
        try:
            yield
        finally:
            _held.remove(file)


def _lock(file: BinaryIO) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _let_go() -> None:
    """A forked process has no part in the locks: it may outlive for a moment the one that holds them."""
    while _held:
        _held.pop().close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
