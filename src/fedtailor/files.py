"""Files that are whole or not there: written beside, flushed to the disk, renamed. And a lock on a folder."""

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from fedtailor.errors import Refused

WRITING = ".writing"  # ends the name of what is not whole yet, and may be thrown away
_held: list[BinaryIO] = []  # locks of this process
_TRIES, _PAUSE = 10, 0.01  # to take a lock, and seconds between them


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


def write_private(path: Path, data: bytes) -> None:
    """Write a file that is nobody else's from its first byte on.

    >>> from tempfile import mkdtemp
    >>> write_private(Path(mkdtemp()) / "key", b"secret")
    """
    beside = path.with_name(path.name + WRITING)
    beside.unlink(missing_ok=True)
    beside.touch(mode=0o600)
    write(path, data)


def make_private(folder: Path) -> None:
    """Make a folder that nobody else can look into, or make one so."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


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
def writing(what: str, hint: str = "", against: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """What the system, or a format by errors of its own, says against writing, as one sentence.

    >>> with writing("The file cannot be written"): raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    fedtailor.errors.Refused: The file cannot be written: No space left on device.
    """
    try:
        yield
    except against as error:
        why = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise Refused(f"{what}: {why}{hint}.") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep everyone else out of a run's folder; the system opens the lock when this process ends, however it does."""
    with writing(f"The folder '{folder}' cannot be written"):
        file = (folder / "lock").open("ab")
    with file:
        try:
            _try_lock(file)
        except BlockingIOError as error:
            raise Refused(f"Somebody is at work on the run in '{folder}'; wait for them, or stop them.") from error
        except OSError as error:
            raise Refused(f"The folder '{folder}' cannot be locked: {error.strerror}.") from error
        _held.append(file)
        try:
            yield
        finally:
            _held.remove(file)


def wait_for(file: BinaryIO) -> None:
    """Wait until nobody else holds the lock of an open file, and hold it until it is closed."""
    _lock(file, wait=True)


def _try_lock(file: BinaryIO) -> None:
    """A few times: who only looks whether a lock is held has it for an instant."""
    for _ in range(_TRIES - 1):
        with suppress(BlockingIOError):
            return _lock(file)
        time.sleep(_PAUSE)
    return _lock(file)


def file_name(text: str) -> str:
    """Text as a file's name on any system.

    >>> file_name("my data/one"), file_name("../..")
    ('my_data_one', '_')
    """
    return re.sub(r"[^A-Za-z0-9_.+-]+", "_", text).strip(".") or "_"


def _lock(file: BinaryIO, wait: bool = False) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _let_go() -> None:
    """A forked process has no part in the locks: it may outlive for a moment the one that holds them."""
    while _held:
        _held.pop().close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
