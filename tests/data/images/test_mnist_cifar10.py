"""Readers of data sets in the publishers' formats return the images, or name the file that is wrong."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import error_message
from fedtailor.data.images.datasets import CIFAR10, MNIST
from fedtailor.data.images.publisher_files import MAX_FILE_BYTES
from fedtailor.data.sample_table import SampleTable
from support.corrupted_files import idx_bytes
from support.published_files import COLOR, COLOR_Y, GRAY, cifar_binary, cifar_sheets, mnist_files, png, write_files

FILES = {"mnist": mnist_files(), "sheets": cifar_sheets(), "records": cifar_binary()}
IMAGES = "train-images-idx3-ubyte"
GIGABYTES = bytes([0, 0, 8, 3]) + b"\xff" * 12
ABOVE_LIMIT = bytes([0, 0, 8, 1]) + (2**30 + 1).to_bytes(4, "big")
ZIPPED = gzip.compress(idx_bytes(GRAY), mtime=0)  # mtime=0, because the bytes are part of a test's name
SHEET = png(COLOR[:2])
HUGE = SHEET[:16] + (1 << 20).to_bytes(4, "big") * 2 + SHEET[24:]


def read(folder: Path, kind: str, changed: dict[str, bytes]) -> SampleTable:
    """Read the files of a data set, of which some are replaced."""
    return (MNIST() if kind == "mnist" else CIFAR10()).read_folder(write_files(folder, FILES[kind] | changed))


def test_read_folder_prefers_unzipped_files(tmp_path: Path) -> None:
    zipped = {f"{name}.gz": gzip.compress(content) for name, content in mnist_files(255 - GRAY).items()}
    np.testing.assert_array_equal(np.asarray(read(tmp_path, "mnist", zipped).x)[:, 0], GRAY)


def test_get_with_a_folder_checks_the_folder_instead_of_downloading(tmp_path: Path) -> None:
    folder = write_files(tmp_path, FILES["mnist"])
    assert MNIST(folder=str(folder)).download() is None
    (folder / IMAGES).unlink()
    assert f"has no {IMAGES}" in error_message(MNIST(folder=str(folder)).download)


@pytest.mark.parametrize("kind", ["records", "sheets"])
def test_read_folder_of_cifar10_returns_images(kind: str, tmp_path: Path) -> None:
    table = read(tmp_path, kind, {})
    np.testing.assert_array_equal(table.x, COLOR)
    assert table.y.tolist() == COLOR_Y.tolist()
    assert table.is_test is not None and np.flatnonzero(table.is_test).tolist() == [10, 11]


@pytest.mark.parametrize(
    ("kind", "name", "content", "message"),
    [
        ("mnist", IMAGES, idx_bytes(GRAY[:3])[:-1], "declares 2,352 bytes but contains 2,351"),
        ("mnist", IMAGES, idx_bytes(GRAY[:3]) + b"x", "declares 2,352 bytes but contains more"),
        ("mnist", IMAGES, GIGABYTES, "declares 79,228,162,458,924,105,385,300,197,375 bytes; the limit is"),
        ("mnist", IMAGES, gzip.compress(GIGABYTES, mtime=0), "the limit is"),
        ("mnist", IMAGES, ABOVE_LIMIT, "declares 1,073,741,825 bytes; the limit is 1,073,741,824"),
        ("mnist", IMAGES, bytes([0, 0, 8, 3, 0]), "truncated"),
        ("mnist", IMAGES, b"", "not an IDX file"),
        ("mnist", IMAGES, bytes([0, 0, 13, 1, 0, 0, 0, 1, 0, 0, 0, 0]), "not an IDX file of unsigned bytes"),
        ("mnist", IMAGES, bytes([0, 0, 8, 255]) + bytes(1020), "not an IDX file"),
        ("mnist", IMAGES, ZIPPED[: len(ZIPPED) // 2], "truncated"),
        ("mnist", IMAGES, ZIPPED[:-6] + b"\0" * 6, "damaged"),
        ("mnist", IMAGES, idx_bytes(GRAY[:2]), "2 images but 3 labels"),
        ("mnist", IMAGES, idx_bytes(GRAY[:3].reshape(3, -1)), "not images and labels"),
        ("mnist", IMAGES, idx_bytes(GRAY[:3, :9]), "several sizes"),
        ("mnist", "t10k-labels-idx1-ubyte", idx_bytes(np.array([1, 10], np.uint8)), "outside 0 to 9"),
        ("sheets", "data_batch_3.png", b"GIF89a", "not a PNG"),
        ("sheets", "data_batch_3.png", HUGE, "1048576×1048576 pixels is not a sheet"),
        ("sheets", "data_batch_3.png", SHEET[: len(SHEET) // 2], "truncated"),
        ("sheets", "data_batch_3.png", SHEET[:60] + b"\0" * 40 + SHEET[100:], "damaged"),
        ("sheets", "data_batch_3.png", png(COLOR[:1]), "9 images but 10 labels"),
        ("sheets", "train_lables.json", b"[1, 2", "not a JSON list"),
        ("sheets", "train_lables.json", b"[" * 100_000, "not a JSON list"),
        ("sheets", "train_lables.json", b"[true, 3]", "not a JSON list"),
        ("sheets", "test_lables.json", b"[3, 10]", "labels from 0 to 9"),
        ("records", "test_batch.bin", b"", "records of 3,073 bytes"),
        ("records", "test_batch.bin", b"\0" * 3072, "records of 3,073 bytes"),
    ],
)
def test_read_folder_with_malformed_file_raises(
    kind: str, name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    limit = Image.MAX_IMAGE_PIXELS
    text = error_message(lambda: read(tmp_path, kind, {name: content}))
    assert message in text and str(tmp_path) in text
    assert limit == Image.MAX_IMAGE_PIXELS


def test_read_folder_without_usable_files_raises(tmp_path: Path) -> None:
    assert "There is no folder" in error_message(lambda: MNIST().read_folder(tmp_path / "nowhere"))
    pickles = write_files(tmp_path / "pickles", {"data_batch_1": b"\x80\x03cos\nsystem\n", "test_batch": b"\x80\x03."})
    text = error_message(lambda: CIFAR10().read_folder(pickles))
    assert "data_batch_1.bin" in text and "pickle" in text
    folder = write_files(tmp_path / "files", mnist_files())
    (folder / IMAGES).unlink()
    (folder / IMAGES).mkdir()
    assert f"has no {IMAGES};" in error_message(lambda: MNIST().read_folder(folder))
    (folder / IMAGES).rmdir()
    with (folder / IMAGES).open("wb") as sparse:
        sparse.truncate(MAX_FILE_BYTES + 1)
    assert "too large" in error_message(lambda: MNIST().read_folder(folder))
