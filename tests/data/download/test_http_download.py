"""Downloads from a local HTTP server are complete, continued, or rejected with one sentence."""

import hashlib
import os
import pty
import re
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from conftest import error_message
from fedtailor.data.download import http_download
from fedtailor.data.download.http_download import fetch
from fedtailor.data.download.source import RemoteFile
from support.file_server import FileServer

CONTENT = np.random.default_rng(0).bytes(3_000_000)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(http_download, "_WAITS", (0, 0, 0))
    running = FileServer(CONTENT)
    yield running
    running.close()


def remote(server: FileServer, path: str = "/data.bin", content: bytes = CONTENT) -> RemoteFile:
    return RemoteFile((server.address + path,), hashlib.sha256(content).hexdigest(), len(content))


def interrupt(server: FileServer, file: RemoteFile, target: Path) -> None:
    """Leave a partial download of a million bytes, as an ended process does."""
    server.cuts, server.statuses = [1_000_000], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_download, "_WAITS", ())
        assert "ended after 1,000,000 of 3,000,000 bytes" in error_message(lambda: fetch(file, target))
    assert not target.exists()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_fetch_downloads_once(server: FileServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "data.bin"
    for _ in range(2):
        assert fetch(remote(server), target).read_bytes() == CONTENT
    assert server.sent == len(CONTENT) and names(target.parent) == ["data.bin"]
    assert capfd.readouterr() == ("", ""), "no progress bar without a terminal"


def test_fetch_replaces_damaged_file(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"x" + CONTENT[1:])
    assert fetch(remote(server), tmp_path / "data.bin").read_bytes() == CONTENT


def test_fetch_after_interruption_requests_only_the_rest(server: FileServer, tmp_path: Path) -> None:
    file, target = remote(server), tmp_path / "data.bin"
    interrupt(server, file, target)
    assert fetch(file, target).read_bytes() == CONTENT
    assert server.requests[1] == ("/data.bin", "bytes=1000000-", '"1"')
    assert server.sent == len(CONTENT), "no byte was sent twice"
    assert names(tmp_path) == ["data.bin"]


def test_fetch_continues_file_by_its_time_if_its_etag_is_weak(server: FileServer, tmp_path: Path) -> None:
    file, target = remote(server), tmp_path / "data.bin"
    server.etag, server.modified = 'W/"1"', "Wed, 18 Nov 2026 05:00:00 GMT"
    interrupt(server, file, target)
    assert fetch(file, target).read_bytes() == CONTENT
    assert server.requests[1][2] == server.modified and server.sent == len(CONTENT)


def test_fetch_answered_with_another_page_keeps_partial_file(server: FileServer, tmp_path: Path) -> None:
    """As the login page of a network does."""
    file, target = remote(server), tmp_path / "data.bin"
    interrupt(server, file, target)
    server.content, server.ranges = b"<html>", False
    assert "6 bytes instead of 3,000,000" in error_message(lambda: fetch(file, target))
    server.content, server.ranges = CONTENT, True
    assert fetch(file, target).read_bytes() == CONTENT
    assert server.ranges_asked == [None, "bytes=1000000-", "bytes=1000000-"]


def test_fetch_retries_dropped_connections_as_long_as_bytes_arrive(server: FileServer, tmp_path: Path) -> None:
    server.cuts, server.statuses = [400_000] * 7, [503, 429]
    assert fetch(remote(server), tmp_path / "data.bin").read_bytes() == CONTENT
    assert server.sent == len(CONTENT) and len(server.requests) == 2 + 8


def test_fetch_gives_up_after_retries_without_progress(server: FileServer, tmp_path: Path) -> None:
    server.statuses = [500] * 9
    text = error_message(lambda: fetch(remote(server), tmp_path / "data.bin"))
    assert "the server answered 500" in text and "set data.folder" in text and server.address in text
    assert len(server.requests) == 4


def test_fetch_from_server_without_ranges_starts_again(server: FileServer, tmp_path: Path) -> None:
    file, target = remote(server), tmp_path / "data.bin"
    server.ranges, server.etag = False, None
    interrupt(server, file, target)
    assert fetch(file, target).read_bytes() == CONTENT
    assert server.ranges_asked == [None, "bytes=1000000-"] and server.sent == 4_000_000


@pytest.mark.parametrize("etag", ['"1"', 'W/"1"', None])
def test_fetch_of_file_that_changed_after_interruption_starts_again(
    server: FileServer, tmp_path: Path, etag: str | None
) -> None:
    """With a strong ETag the server notices it; otherwise the checksum does."""
    server.content, server.etag = CONTENT[::-1], etag
    file, target = remote(server), tmp_path / "data.bin"
    interrupt(server, file, target)
    server.content, server.etag = CONTENT, etag and etag.replace("1", "2")
    assert fetch(file, target).read_bytes() == CONTENT
    assert server.ranges_asked == [None, "bytes=1000000-"] + ([] if etag == '"1"' else [None])


def test_fetch_continues_partial_file_that_is_complete_or_too_long(server: FileServer, tmp_path: Path) -> None:
    part = tmp_path / "data.bin.part"
    part.write_bytes(CONTENT)
    assert fetch(remote(server), tmp_path / "data.bin").read_bytes() == CONTENT and server.requests == []
    (tmp_path / "data.bin").unlink()
    part.write_bytes(CONTENT + b"x")
    assert fetch(remote(server), tmp_path / "data.bin").read_bytes() == CONTENT and server.ranges_asked == [None]


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x" + CONTENT[1:], "SHA-256"),
        (CONTENT[:-1], "2,999,999"),
        (CONTENT + b"x", "3,000,00"),
    ],
    ids=["wrong", "truncated", "too long"],
)
def test_fetch_of_other_content_raises_and_leaves_no_target(
    server: FileServer, tmp_path: Path, content: bytes, message: str, has_length: bool
) -> None:
    server.content, server.has_length = content, has_length
    text = error_message(lambda: fetch(remote(server), tmp_path / "data.bin"))
    assert message in text and "set data.folder to a folder with the publisher's files" in text
    assert not (tmp_path / "data.bin").exists()


def test_fetch_reads_no_more_than_expected(server: FileServer, tmp_path: Path) -> None:
    server.content, server.has_length = CONTENT * 20, False
    assert "more than 3,000,000 bytes" in error_message(lambda: fetch(remote(server), tmp_path / "data.bin"))
    assert names(tmp_path) == []


def test_fetch_uses_next_address_if_one_fails(server: FileServer, tmp_path: Path) -> None:
    missing, file = remote(server, "/missing.bin"), remote(server)
    text = error_message(lambda: fetch(missing, tmp_path / "data.bin"))
    assert "/missing.bin: the server answered 404" in text and len(server.requests) == 1, "404 is not retried"
    both = RemoteFile(missing.urls + file.urls, file.sha256, file.bytes)
    assert fetch(both, tmp_path / "data.bin").read_bytes() == CONTENT


def test_fetch_follows_redirects_to_http_only(server: FileServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(CONTENT)
    for target in (secret.as_uri(), "ftp://127.0.0.1/data.bin", "data:,abc"):
        server.redirect = target
        text = error_message(lambda: fetch(remote(server, "/moved"), tmp_path / "data.bin"))
        assert target in text and re.search("not allowed|neither http nor https", text)
    server.redirect = "/data.bin"
    assert fetch(remote(server, "/moved"), tmp_path / "data.bin").read_bytes() == CONTENT


def test_fetch_without_server_or_network_raises(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RemoteFile(("http://127.0.0.1:1/data.bin",), "0", 3)
    assert "Connection refused" in error_message(lambda: fetch(file, tmp_path / "data.bin"))
    tried = list[object]()

    def fail(host: str, *rest: object, **options: object) -> None:
        tried.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    text = error_message(lambda: fetch(file, tmp_path / "data.bin"))
    assert "Name or service not known" in text and "proxy" in text and len(tried) == 1, "without a name, it is final"


def test_fetch_goes_through_proxy(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.address)
    monkeypatch.setenv("no_proxy", "")
    file = RemoteFile(("http://publisher.example/data.bin",), remote(server).sha256, len(CONTENT))
    assert fetch(file, tmp_path / "data.bin").read_bytes() == CONTENT
    assert server.requests[0][0] == "http://publisher.example/data.bin"


def test_fetch_without_disk_space_or_folder_raises(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert "FEDTAILOR_CACHE" in error_message(lambda: fetch(remote(server), tmp_path / "file" / "data.bin"))
    usage = shutil.disk_usage(tmp_path)._replace(free=len(CONTENT) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "No space left" in error_message(lambda: fetch(remote(server), tmp_path / "data.bin"))
    assert server.requests == []


def test_fetch_from_several_threads_downloads_once(server: FileServer, tmp_path: Path) -> None:
    """As from several processes: the lock belongs to the open folder, not to the process."""
    target = tmp_path / "data.bin"
    threads = [threading.Thread(target=fetch, args=(remote(server), target)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_bytes() == CONTENT and len(server.requests) == 1


def test_fetch_on_terminal_shows_progress(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with monkeypatch.context() as patch, os.fdopen(writer, "w") as terminal:
        patch.setattr(sys, "stderr", terminal)
        fetch(remote(server), tmp_path / "data.bin")
    shown = b""
    with suppress(OSError):  # the other end is closed
        while part := os.read(reader, 1 << 16):
            shown += part
    os.close(reader)
    assert "Downloading data.bin" in shown.decode() and "3.0/3.0 MB" in shown.decode()
