"""Atomic file and folder writes (temporary file, fsync, rename), checksums, and folder locks."""

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

from fedtailor.errors import RunError, reason

TEMPORARY_SUFFIX = ".writing"  # names of incomplete files and folders, which may be deleted, end with this
_held_locks: list[BinaryIO] = []  # of this process
_LOCK_ATTEMPTS, _LOCK_PAUSE = 10, 0.01  # the pause is in seconds


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file atomically: if the process dies, either the old or the new content remains.

    >>> from tempfile import mkdtemp
    >>> write_atomic(Path(mkdtemp()) / "file", b"content")
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as file:
            write_and_sync(file, data)
    except OSError:
        with suppress(OSError):
            temporary.unlink()  # on a full disk, its space is needed, for example for the reason
        raise
    temporary.replace(path)
    sync_folder(path.parent)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file that is renamed to `path` on success, for content that is written in parts.

    >>> from tempfile import mkdtemp
    >>> with atomic_file(Path(mkdtemp()) / "file") as temporary: temporary.write_bytes(b"content")
    7
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only this user can read, from its first byte on.

    >>> from tempfile import mkdtemp
    >>> write_private(Path(mkdtemp()) / "key", b"secret")
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600)
    write_atomic(path, data)


def make_private_folder(folder: Path) -> None:
    """Create a folder that only this user can open, or restrict an existing one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def write_and_sync(file: BinaryIO, data: bytes) -> None:
    """Write bytes and flush them to disk."""
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` on success and replaces what was there."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    remove_folder(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)  # as in `write_atomic`
        raise
    sync_folder(temporary)
    remove_folder(path)
    temporary.replace(path)
    sync_folder(path.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder if it exists. It is renamed first, so that a partly removed folder never looks complete."""
    if not folder.is_dir():
        return
    if not folder.name.endswith(TEMPORARY_SUFFIX):
        renamed = folder.with_name(folder.name + ".gone" + TEMPORARY_SUFFIX)
        shutil.rmtree(renamed, ignore_errors=True)
        folder = folder.replace(renamed)
    shutil.rmtree(folder)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that renames survive a power failure, where the system supports it."""
    with suppress(OSError, AttributeError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def checksum(data: bytes) -> str:
    """Return the SHA-256 checksum in the format of sha256sum.

    >>> checksum(b"")[:8]
    'e3b0c442'
    """
    return sha256(data).hexdigest()


@contextmanager
def write_errors(what: str, hint: str = "", errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Turn errors from writing files into a RunError that starts with `what` and ends with `hint`.

    >>> with write_errors("The file cannot be written"): raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    fedtailor.errors.RunError: The file cannot be written: No space left on device.
    """
    try:
        yield
    except errors as error:
        raise RunError(f"{what}: {reason(error)}{hint}.") from error


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder; the system releases it when this process ends for any reason."""
    with write_errors(f"The folder '{folder}' cannot be written"):
        file = (folder / "lock").open("ab")
    with file:
        try:
            _try_lock(file)
        except BlockingIOError as error:
            raise RunError(f"Another process is using the folder '{folder}'; wait for it or stop it.") from error
        except OSError as error:
            raise RunError(f"The folder '{folder}' cannot be locked: {error.strerror}.") from error
        _held_locks.append(file)
        try:
            yield
        finally:
            _held_locks.remove(file)


def wait_for_lock(file: BinaryIO) -> None:
    """Wait for the exclusive lock of an open file; closing the file releases it."""
    _lock(file, wait=True)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the exclusive lock of a file; unlike a file, a lock ends with its process.

    >>> from tempfile import mkdtemp
    >>> folder = Path(mkdtemp())
    >>> with folder_lock(folder): is_locked(folder / "lock")
    True
    >>> is_locked(folder / "lock")
    False
    """
    try:
        with path.open("rb") as file:
            _lock(file, shared=True)
    except BlockingIOError:
        return True
    except OSError:  # no file, or one that this user may not open
        return False
    return False


def _try_lock(file: BinaryIO) -> None:
    """Try several times, because a process that only tests the lock holds it briefly."""
    for _ in range(_LOCK_ATTEMPTS - 1):
        with suppress(BlockingIOError):
            return _lock(file)
        time.sleep(_LOCK_PAUSE)
    return _lock(file)


def safe_file_name(text: str) -> str:
    """Return text as a file name that is valid on every system.

    >>> safe_file_name("my data/one"), safe_file_name("../..")
    ('my_data_one', '_')
    """
    return re.sub(r"[^A-Za-z0-9_.+-]+", "_", text).strip(".") or "_"


def _lock(file: BinaryIO, wait: bool = False, shared: bool = False) -> None:
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except PermissionError as error:  # what Windows calls a lock that another process holds
            raise BlockingIOError(error.errno, error.strerror) from error
    else:
        import fcntl

        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


def _release_locks() -> None:
    """Close inherited lock files in a forked process, which may outlive the process that holds the locks."""
    while _held_locks:
        _held_locks.pop().close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_locks)


def read_bytes(path: Path) -> bytes:
    """Return a file's content; raise ValueError if it is not a regular file or larger than a quarter of the memory."""
    import torch  # takes a second, which commands that only show the status of a deployment do not need

    from fedtailor.core.system import total_memory

    if not path.is_file() or path.stat().st_size > total_memory(torch.device("cpu")) // 4:
        raise ValueError(f"'{path.name}' is not a file, or too large to read")
    return path.read_bytes()
