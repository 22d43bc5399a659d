"""Malicious data files are rejected before anything is allocated, executed, or followed."""

import gzip
import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedtailor as ft
from conftest import error_message
from fedtailor.core import memory_limits
from fedtailor.data.download.cache import checksum_text
from fedtailor.data.images import publisher_files
from fedtailor.data.images.cifar import parse_labels, parse_sheet
from fedtailor.data.images.datasets import MNIST
from fedtailor.data.images.idx import parse_idx
from fedtailor.data.images.publisher_files import unpack_package
from fedtailor.runs.serialization import unpack
from support import corrupted_files
from support.corrupted_files import folder_error
from support.memory import assert_memory_below
from support.published_files import tar

MIB = 2**20


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with 64 MiB of memory."""
    monkeypatch.setattr(memory_limits, "total_memory", lambda device: 64 * MIB)


# arrays


def npz_with_header(shape: str, descr: str = "'<f8'", body: int = 96, **options: int) -> bytes:
    return corrupted_files.malformed_npz(
        "x", descr, shape, body, options.get("version", 1), options.get("length", -1), options.get("compression", 0)
    )


@pytest.mark.parametrize(
    "content",
    [
        npz_with_header("(1000000000, 3)"),
        npz_with_header("(1000000000000, 0)"),
        npz_with_header("(1000000000000,)", "'|V0'"),
        npz_with_header("(4,)", "('<f4', (1000000000,))"),
        npz_with_header("(4294967296, 4294967296)"),
        npz_with_header("(4, 3)", version=2, length=2**26, body=2**26, compression=zipfile.ZIP_DEFLATED),
        npz_with_header("(4, 3)", compression=zipfile.ZIP_LZMA),
        npz_with_header("(4, 3)", compression=zipfile.ZIP_BZIP2),
        npz_with_header("(4, 3)", "'|O'"),
    ],
    ids=["large", "no bytes", "void", "parts", "overflow", "header", "lzma", "bzip2", "object"],
)
def test_npz_with_false_header_raises_before_allocation(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with assert_memory_below(5 * MIB):
        assert "'a.npz' cannot be read as an .npz file of plain arrays" in folder_error(tmp_path)


def test_npz_with_valid_header_is_read(tmp_path: Path) -> None:
    """Valid files are accepted, so that the errors above are specific."""
    (tmp_path / "a.npz").write_bytes(npz_with_header("(4, 3)", compression=zipfile.ZIP_DEFLATED))
    assert ft.Federation.from_folder(tmp_path).shape == (3,)


@pytest.mark.usefixtures("little_memory")
def test_npz_bomb_is_not_decompressed(tmp_path: Path) -> None:
    """100 kB decompress to 80 MiB; then three files together are too large, but none by itself."""
    one, three = tmp_path / "one", tmp_path / "three"
    for folder, names, rows in ((one, "a", 10 * MIB), (three, "abc", 2 * MIB)):
        folder.mkdir()
        for name in names:
            np.savez_compressed(folder / f"{name}.npz", x=np.zeros((rows, 1)), y=np.zeros(rows, np.uint8))
    with assert_memory_below(5 * MIB):
        assert "would take 0.1 GB of memory" in folder_error(one)
        assert f"The data in '{three}' would take" in folder_error(three)
    (three / "c.npz").unlink()
    (three / "b.npz").unlink()
    assert ft.Federation.from_folder(three).num_clients == 1


def test_npz_with_huge_label_raises(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((4, 3)), y=np.array([0, 1, 2, 2**62]))
    with assert_memory_below(5 * MIB):
        assert "Client a has the label 4611686018427387904" in folder_error(tmp_path)


# folders


def test_link_out_of_folder_raises(tmp_path: Path) -> None:
    np.savez(tmp_path / "secret.npz", x=np.ones((4, 3)), y=np.arange(4))
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "a.npz").symlink_to("../secret.npz")
    assert "'a.npz' is a link that leads out of" in folder_error(tmp_path / "clients")
    (tmp_path / "clients" / "a.npz").unlink()
    (tmp_path / "secret.npz").rename(tmp_path / "clients" / "a.npz")
    (tmp_path / "clients" / "b.npz").symlink_to("a.npz")
    (tmp_path / "chosen").symlink_to("clients")  # a link to the folder and a link inside of it are allowed
    assert ft.Federation.from_folder(tmp_path / "chosen").names == ("a", "b")


@pytest.mark.parametrize("link", ["a", "a/cat", "a/cat/2.png"])
def test_link_to_images_outside_of_folder_raises(link: str, tmp_path: Path) -> None:
    for folder in ("clients/a/cat", "clients/a/dog", "elsewhere/cat", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "1.png").write_bytes(corrupted_files.IMAGES[0])
    target = tmp_path / ("elsewhere/1.png" if link.endswith("png") else "elsewhere/cat" if "/" in link else "elsewhere")
    place = tmp_path / "clients" / link
    if place.is_dir():
        place.rename(tmp_path / "moved")
    place.symlink_to(target)
    assert "is a link that leads out of" in folder_error(tmp_path / "clients")


def test_link_in_publisher_folder_raises(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for name, content in corrupted_files.MNIST.items():
        (own / name).write_bytes(content)
    MNIST().read_folder(own)
    name = min(corrupted_files.MNIST)
    (own / name).rename(tmp_path / name)
    (own / name).symlink_to(tmp_path / name)
    assert "is a link that leads out of" in error_message(lambda: MNIST().read_folder(own))


def test_pipe_is_never_read(tmp_path: Path) -> None:
    """Reading a pipe would block forever."""
    os.mkfifo(tmp_path / "a.npz")
    assert "must contain either one .npz file per client" in folder_error(tmp_path)
    for name in corrupted_files.MNIST:
        os.mkfifo(tmp_path / name)
    assert "has no train-images" in error_message(lambda: MNIST().read_folder(tmp_path))


def test_unprintable_name_is_escaped_in_error(tmp_path: Path) -> None:
    np.savez(tmp_path / "a\x1b[2J\n.npz", x=np.ones((4, 3)), y=np.arange(4))
    assert r"'a\x1b[2J\n.npz'" in folder_error(tmp_path)
    assert "File name too long" in folder_error(tmp_path / ("x" * 300))


# images


def write_images(folder: Path, *contents: bytes) -> Path:
    place = folder / "client" / "class"
    place.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(contents):
        (place / f"{number}.png").write_bytes(content)
    return folder


def black(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("1", (side, side)).save(file, "PNG")
    return file.getvalue()


def test_eps_image_does_not_start_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow detects EPS by its first bytes, whatever the suffix, and would start Ghostscript."""
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%Page: 1 1\n(x) show\n%%EOF\n"
    assert "'0.png'" in folder_error(write_images(tmp_path / "clients", eps, eps))
    assert not (tmp_path / "started").exists()


def test_image_with_too_many_pixels_raises_before_decoding(tmp_path: Path) -> None:
    write_images(tmp_path, black(8200))
    with assert_memory_below(30 * MIB):
        assert "too many pixels (8200×8200)" in folder_error(tmp_path)


@pytest.mark.usefixtures("little_memory")
def test_images_beyond_memory_raise_before_decoding(tmp_path: Path) -> None:
    content = black(1024)
    assert ft.Federation.from_folder(write_images(tmp_path, content, content)).shape == (1, 1024, 1024)
    write_images(tmp_path, *[content] * 12)
    with assert_memory_below(10 * MIB):
        assert f"The images in '{tmp_path}' would take" in folder_error(tmp_path)


@pytest.mark.usefixtures("little_memory")
def test_image_larger_than_first_is_not_decoded(tmp_path: Path) -> None:
    write_images(tmp_path, black(8), black(8000))
    with assert_memory_below(30 * MIB):
        assert "'1.png' differs from '0.png' in size" in folder_error(tmp_path)


def test_jpeg_with_many_scans_raises(tmp_path: Path) -> None:
    """A scan without changes takes few bytes but as much decoding time as the whole image."""
    content = corrupted_files.image_bytes("JPEG", "L", progressive=True)
    start = content.rindex(b"\xff\xda")
    scan = content[start:-2]
    assert ft.Federation.from_folder(write_images(tmp_path / "good", content, content)).num_clients == 1
    many = content[:start] + scan * 101 + content[-2:]
    assert "more than 100 scans" in folder_error(write_images(tmp_path / "bad", many, many))


def test_sheet_with_two_headers_raises() -> None:
    """Pillow would use the second header, which declares a thousand times as many pixels."""
    sheet = corrupted_files.SHEET
    second = sheet[8:16] + (2**13).to_bytes(4, "big") + (2**13).to_bytes(4, "big") + sheet[24:33]
    twice = corrupted_files.repair_png_checksums(sheet[:33] + second + sheet[33:])
    with assert_memory_below(10 * MIB):
        assert "two headers" in error_message(lambda: parse_sheet(twice))


# data sets


def test_idx_size_is_neither_allocated_nor_exceeded() -> None:
    bomb = gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 4]) + bytes(20 * MIB), 1)
    declared = gzip.compress(bytes([0, 0, 8, 1]) + (2**30).to_bytes(4, "big") + bytes(4))
    with assert_memory_below(5 * MIB):
        assert "declares 4 bytes but contains more" in error_message(lambda: parse_idx(bomb))
        assert "declares 1,073,741,824 bytes but contains 4" in error_message(lambda: parse_idx(declared))


def test_archive_with_member_beyond_limit_raises_before_decompression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_files, "MAX_FILE_BYTES", MIB)
    bomb = tar({"t10k-labels-idx1-ubyte": bytes(40 * MIB)}, "w:gz", "package/")
    with assert_memory_below(16 * MIB):
        text = error_message(lambda: unpack_package(bomb, "The archive", ""))
    assert "t10k-labels-idx1-ubyte is larger than a data set" in text


def test_labels_beyond_limit_raise() -> None:
    labels = b"[" + b"[]," * MIB + b"0]"
    with assert_memory_below(MIB):
        assert "not a JSON list" in error_message(lambda: parse_labels(labels, "The file", classes=10))


def cache_mnist(cache: Path, **arrays: Any) -> None:
    """Write a cached file with a valid checksum, as other programs can."""
    info = json.dumps({"classes": 10, "owner_names": [], "class_names": None})
    np.savez_compressed(cache / "mnist.npz", **arrays, info=np.frombuffer(info.encode(), np.uint8))
    assert MNIST.source is not None
    text = checksum_text(cache / "mnist.npz", MNIST.source.fingerprint)
    (cache / "mnist.npz.sha256").write_text(text)


def test_cache_with_invalid_arrays_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path))
    x, y = np.zeros((2, 1, 2, 2), np.uint8), np.array([0, 1])
    wrong: list[dict[str, Any]] = [
        {"x": x}, {"x": x[0], "y": y}, {"x": x, "y": y + 9}, {"x": x, "y": y[:1]}, {"x": x[:0], "y": y[:0]},
        {"x": x, "y": y / 2}, {"x": x, "y": np.array([None, 1])},
    ]  # fmt: skip
    for arrays in wrong:
        cache_mnist(tmp_path, **arrays)
        assert "does not contain a table of samples; delete it" in error_message(lambda: MNIST().read())
    cache_mnist(tmp_path, x=x, y=y)
    assert MNIST().read().y.tolist() == [0, 1]


@pytest.mark.usefixtures("little_memory")
def test_cache_bomb_is_not_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path))
    cache_mnist(tmp_path, x=np.zeros((40 * MIB, 1, 1, 1), np.uint8), y=np.zeros(5 * MIB))
    with assert_memory_below(5 * MIB):
        error_message(lambda: MNIST().read())


# tensors


def one_tensor(shape: list[int], size: int) -> bytes:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    return corrupted_files.safetensors([("a", entry)], {"a": None}, 4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ((2**60).to_bytes(8, "little") + b"{}", "truncated"),
        ((10**6).to_bytes(8, "little") + b"[" * 10**6, "not JSON"),
        (b"", "truncated"),
        (one_tensor([2**40], 2**42), "no tensors"),
        (one_tensor([2**62, 2**62], 4), "no tensors"),
        (corrupted_files.safetensors([], {"a": None}, 0), "differ at 'a'"),
        (corrupted_files.safetensors([], "[" * 100_000, 0), "no valid outline"),
        (corrupted_files.PACKED[0] * 1000, "at most 1000"),
    ],
    ids=["header", "nested", "nothing", "large", "overflow", "missing", "outline", "limit"],
)
def test_unpack_of_malformed_tensors_raises(content: bytes, words: str) -> None:
    with assert_memory_below(16 * MIB):
        assert words in error_message(lambda: unpack(content, max_bytes=1000 if "1000" in words else None))
