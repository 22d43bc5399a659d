"""Download of files over HTTP and HTTPS: resumed after interruptions, and compared with a checksum before any use.

A download is written to NAME.part next to its target, and the version of the file that the server names to
NAME.part.version. A later call continues it. The target exists only if its checksum is right.
"""

import errno
import http.client
import os
import re
import shutil
import socket
import ssl
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path

from fedtailor.data.download.cache import ALTERNATIVE
from fedtailor.data.download.http_client import AddressError, open_url
from fedtailor.data.download.progress import download_progress
from fedtailor.data.download.source import RemoteFile
from fedtailor.errors import DataError, reason

_WAITS = (1.0, 2.0, 4.0)  # seconds before each retry; a retry that brings new bytes starts again with the first
_CHUNK = 1 << 20
_RETRIED = (408, 425, 429)  # statuses below 500 that can pass


class _Failed(Exception):
    """The address does not provide the file; trying again would not help."""


class _Dropped(Exception):
    """The transfer ended early; another attempt may continue it."""


class _PartialFile:
    """The part of a file that was downloaded so far, and the version of the file that it belongs to."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(f"{target.name}.part")
        self._version = target.with_name(f"{target.name}.part.version")
        self.is_resumed = self.size > 0  # whether it was received in several responses, which may disagree

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    def range_headers(self) -> dict[str, str]:
        """Return the headers of a request for the rest of the file, or for all of it if it changed."""
        if not self.size:
            return {}
        version = self._version.read_text("latin-1") if self._version.is_file() else ""
        return {"Range": f"bytes={self.size}-"} | ({"If-Range": version} if version else {})

    def restart(self, headers: Message) -> None:
        self.clear()
        etag = headers.get("ETag", "")
        version = headers.get("Last-Modified", "") if not etag or etag.startswith("W/") else etag
        if version.isprintable():
            self._version.write_text(version, "latin-1", "ignore")

    def clear(self) -> None:
        self.is_resumed = False
        self.path.unlink(missing_ok=True)
        self._version.unlink(missing_ok=True)

    def finish(self, target: Path) -> None:
        self.path.replace(target)
        self._version.unlink(missing_ok=True)


def fetch(file: RemoteFile, target: Path) -> Path:
    """Download a file unless `target` is already that file, and return `target`; an earlier download is continued.

    >>> import tempfile
    >>> from hashlib import sha256
    >>> file = RemoteFile(("https://host/abc.txt",), sha256=sha256(b"abc").hexdigest(), bytes=3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "abc.txt").write_text("abc")
    ...     fetch(file, Path(folder, "abc.txt")).name  # nothing is downloaded
    'abc.txt'
    """
    folder = target.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not target.is_file() or file.mismatch(target):
                _download(file, target)
    except OSError as error:
        fix = "free some space, set FEDTAILOR_CACHE to a writable folder"
        raise DataError(f"{target.name} cannot be saved in {folder} ({reason(error)}); {fix}, {ALTERNATIVE}") from error
    return target


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process downloads into the folder; its file is then complete, or can be continued."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _download(file: RemoteFile, target: Path) -> None:
    part = _PartialFile(target)
    if part.size > file.bytes:
        part.clear()
    if shutil.disk_usage(target.parent).free < file.bytes - part.size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    failures = list[str]()
    with download_progress(file.name, file.bytes) as update:
        for url in file.urls:
            try:
                _download_from(url, file, part, update)
            except _Failed as error:
                failures.append(f"{url}: {error}")
            else:
                part.finish(target)
                return
    again = "check the network and the proxy, and try again, which continues the download"
    raise DataError(f"{file.name} could not be downloaded ({'; '.join(failures)}); {again}, {ALTERNATIVE}")


def _download_from(url: str, file: RemoteFile, part: _PartialFile, update: Callable[[int], None]) -> None:
    """Complete the partial file; start it anew if it was received in several parts that do not fit together."""
    while True:
        _transfer(url, file, part, update)
        mismatch = file.mismatch(part.path)
        if mismatch is None:
            return
        was_resumed = part.is_resumed
        part.clear()
        if not was_resumed:
            raise _Failed(f"the file has {mismatch}, and was deleted")


def _transfer(url: str, file: RemoteFile, part: _PartialFile, update: Callable[[int], None]) -> None:
    """Send requests until the partial file has all bytes."""
    waits, largest = iter(_WAITS), part.size
    while part.size < file.bytes:
        try:
            with _open(url, part) as response:
                _receive(response, file, part, update)
        except _Dropped as dropped:
            if part.size > largest:
                waits, largest = iter(_WAITS), part.size
            wait = next(waits, None)
            if wait is None:
                raise _Failed(str(dropped)) from dropped
            time.sleep(wait)


def _open(url: str, part: _PartialFile) -> http.client.HTTPResponse:
    try:
        return open_url(url, part.range_headers())
    except AddressError as error:
        raise _Failed(str(error)) from error
    except urllib.error.HTTPError as error:
        error.close()
        problem = f"the server answered {error.code} {error.reason}"
        if error.code == 416:  # the partial file is not the start of this file
            part.clear()
            raise _Dropped(problem) from error
        raise (_Dropped if error.code >= 500 or error.code in _RETRIED else _Failed)(problem) from error
    except (OSError, http.client.HTTPException) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        text = reason(cause) if isinstance(cause, BaseException) else str(cause)
        final = isinstance(cause, socket.gaierror | ssl.SSLCertVerificationError)  # no network, no such server
        raise (_Failed if final else _Dropped)(text) from error


def _receive(
    response: http.client.HTTPResponse, file: RemoteFile, part: _PartialFile, update: Callable[[int], None]
) -> None:
    """Append a response to the partial file; start it anew if the response does not continue it."""
    found = re.fullmatch(r"bytes (\d{1,18})-.*", response.headers.get("Content-Range", ""))
    start = int(found[1]) if response.status == 206 and found else 0
    if start != part.size and start > 0:
        part.clear()
        raise _Dropped("the server sent another part of the file")
    declared = response.headers.get("Content-Length", "")
    if declared.isdecimal() and start + int(declared) != file.bytes:
        raise _Failed(f"the file has {start + int(declared):,} bytes instead of {file.bytes:,}")
    if start == 0:
        part.restart(response.headers)
    part.is_resumed = start > 0
    size = start
    with part.path.open("ab") as out:
        while chunk := _read(response):
            if size + len(chunk) > file.bytes:
                part.clear()
                raise _Failed(f"the file has more than {file.bytes:,} bytes")
            out.write(chunk)
            size += len(chunk)
            update(size)
    if size < file.bytes:
        raise _Dropped(f"the connection ended after {size:,} of {file.bytes:,} bytes")


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(_CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _Dropped(f"the connection was lost, {reason(error)}") from error
