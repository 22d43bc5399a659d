"""The cache of data sets: one .npz file per table of samples, with a checksum and the source that it was made from."""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fedtailor.core.untrusted_input import parse_json
from fedtailor.data.formats.npz import map_npz
from fedtailor.data.sample_table import SampleTable
from fedtailor.errors import DataError

ALTERNATIVE = "or set data.folder to a folder with the publisher's files."
_STALE_SECONDS = 24 * 3600  # an older temporary folder was left by a process that was killed
_PART = "x."  # start of the name of an array that is one part of the inputs
_MAX_SOURCE = 1000  # bytes of a checksum file, which has two short lines


def cache_folder() -> Path:
    """Return the folder of cached data: $FEDTAILOR_CACHE, or fedtailor in the user's cache folder.

    >>> cache_folder().is_absolute()
    True
    """
    own, user_cache = os.environ.get("FEDTAILOR_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own or Path(user_cache or "~/.cache", "fedtailor")).expanduser().absolute()
    except RuntimeError as error:  # an account without a home folder
        raise DataError("There is no home folder for the cache; set FEDTAILOR_CACHE to a folder.") from error


def download_folder(name: str) -> Path:
    """Return the folder of a data set's downloaded archive, which is kept for other variants of the data set.

    >>> download_folder("emnist").parts[-2:]
    ('downloads', 'emnist')
    """
    return cache_folder() / "downloads" / name


def cached_file(name: str) -> Path:
    """Return the file of a table in the cache, which may not exist."""
    return cache_folder() / f"{name}.npz"


def ensure_cached(name: str, source: str, size: int, build: Callable[[Path], SampleTable]) -> Path:
    """Return the cached file of a table; if it is missing, damaged, or from another source, build and write it.

    `build` gets a temporary folder inside the cache, so that a read-only cache fails before a download, and renaming is
    atomic. `size` is the number of bytes that it needs there.
    """
    path = cached_file(name)
    try:
        if _is_intact(path, source):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_folders(path.parent)
        with TemporaryDirectory(dir=path.parent, prefix=".fetch-", ignore_cleanup_errors=True) as work:
            if shutil.disk_usage(work).free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _write(path, source, build(Path(work)), Path(work))
    except OSError as error:
        reason = error.strerror or str(error)
        fix = "free some space, set FEDTAILOR_CACHE to a writable folder"
        raise DataError(
            f"The cache {path.parent} cannot be used for {name} ({reason}); {fix}, {ALTERNATIVE}"
        ) from error
    return path


def read_cached(path: Path) -> SampleTable:
    """Return the table in a cached file after a check of its format; other programs may write to the cache."""
    try:
        arrays = map_npz(path)
        info = parse_json(arrays.pop("info").tobytes())
        parts = {n.removeprefix(_PART): array for n, array in arrays.items() if n.startswith(_PART)}
        x: Any = arrays.get("x", parts)
        names = {n: None if info.get(n) is None else tuple(info[n]) for n in ("class_names", "vocabulary")}
        table = SampleTable(
            x, arrays["y"], info["classes"], arrays.get("owner"), tuple(info["owner_names"]), arrays.get("is_test"),
            survival=info.get("survival") is True, **names,
        )  # fmt: skip
        table.check()
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # a FedTailorError is a ValueError
        raise DataError(f"The cached file {path} does not contain a table of samples; delete it.") from error
    return table


def is_cached(name: str) -> bool:
    """Return whether the cache contains a file for a table, or for one of a user's folder, without reading it."""
    checksum = _checksum_path(cached_file(name))
    converted = checksum.parent.glob(f"{name}-{'[0-9a-f]' * 12}.npz.sha256")
    return checksum.is_file() or any(converted)


def folder_fingerprint(folder: Path) -> str:
    """Return a hash of the names, sizes, and times of all files in a folder, which changes when the files do."""
    return files_fingerprint(Path(parent, name) for parent, _, names in os.walk(folder) for name in names)


def files_fingerprint(files: Iterable[Path]) -> str:
    """Return a hash of the names, sizes, and times of files, which changes when the files do."""
    digest = hashlib.sha256()
    for path in sorted(path.absolute() for path in files):
        with suppress(OSError):  # a link to nothing
            found = path.stat()
            digest.update(f"{path} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _write(path: Path, source: str, table: SampleTable, work: Path) -> None:
    columns = {"y": table.y, "owner": table.owner, "is_test": table.is_test}
    arrays: dict[str, Any] = {name: column for name, column in columns.items() if column is not None}
    arrays |= {f"{_PART}{n}": part for n, part in table.x.items()} if isinstance(table.x, dict) else {"x": table.x}
    info = {name: getattr(table, name) for name in ("classes", "owner_names", "class_names", "vocabulary", "survival")}
    new = work / path.name
    np.savez(new, **arrays, info=np.frombuffer(json.dumps(info).encode(), np.uint8))
    checksum = work / _checksum_path(path).name
    checksum.write_text(checksum_text(new, source))
    new.replace(path)
    checksum.replace(_checksum_path(path))  # last, so that a kill leaves a file without a valid checksum


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def checksum_text(path: Path, source: str) -> str:
    """Return the content of a cached file's checksum file: its SHA-256 for `sha256sum -c`, and its source."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"# {source}\n{digest}  {path.name}\n"


def _is_intact(path: Path, source: str) -> bool:
    if not path.is_file() or not _checksum_path(path).is_file():  # reading a pipe or a device may never end
        return False
    with _checksum_path(path).open("rb") as file:
        checksum = file.read(_MAX_SOURCE)
    if not checksum.startswith(f"# {source}\n".encode()):  # before the file is read
        return False
    return checksum == checksum_text(path, source).encode()


def _remove_stale_folders(folder: Path) -> None:
    """Remove what killed processes left in the cache, but not the folders of those that are running."""
    for work in folder.glob(".fetch-*"):
        with suppress(OSError):
            if time.time() - work.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(work, ignore_errors=True)
