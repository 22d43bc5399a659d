"""Readers of CIFAR-100, EMNIST, and Tiny-ImageNet return the publisher's images, or name the file that is wrong."""

import gzip
import hashlib
import io
import tarfile
import zipfile
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import fedtailor as ft
from conftest import error_message
from fedtailor.cli.app import app
from fedtailor.data.download.source import RemoteFile
from fedtailor.data.images.datasets import CIFAR100, EMNIST, ArchiveData, TinyImageNet
from fedtailor.data.images.emnist import SPLITS
from fedtailor.data.sample_table import SampleTable
from support.corrupted_files import idx_bytes
from support.file_server import FileServer
from support.published_files import COLOR, write_files

Files = dict[str, bytes]
RNG = np.random.default_rng(3)
FINE, COARSE = np.arange(12) * 9, np.arange(12) % 20  # of COLOR
UPRIGHT = RNG.integers(0, 256, (5, 28, 28), np.uint8)
LETTERS = np.array([1, 26, 2, 3, 26], np.uint8)


def names_file(count: int) -> bytes:
    return "".join(f"name_{n}\n" for n in range(count)).encode() + b"\n"


def cifar100_files() -> Files:
    rows = zip(COARSE, FINE, COLOR, strict=True)
    records = [bytes([coarse, fine]) + image.tobytes() for coarse, fine, image in rows]
    return {
        "train.bin": b"".join(records[:9]),
        "test.bin": b"".join(records[9:]),
        "fine_label_names.txt": names_file(100),
        "coarse_label_names.txt": names_file(20),
    }


def emnist_files(split: str = "letters", y: np.ndarray = LETTERS) -> Files:
    """Return IDX files whose images are transposed, as the publisher's are."""
    x, start = UPRIGHT.transpose(0, 2, 1), f"emnist-{split}"
    first = int(split == "letters")
    mapping = "".join(f"{n + first} {n + 65}{f' {n + 97}' if first else ''}\n" for n in range(SPLITS[split]))
    files = {
        f"{start}-train-images-idx3-ubyte.gz": gzip.compress(idx_bytes(x[:3]), mtime=0),
        f"{start}-train-labels-idx1-ubyte.gz": gzip.compress(idx_bytes(y[:3]), mtime=0),
        f"{start}-test-images-idx3-ubyte.gz": gzip.compress(idx_bytes(x[3:]), mtime=0),
        f"{start}-test-labels-idx1-ubyte.gz": gzip.compress(idx_bytes(y[3:]), mtime=0),
    }
    return files | {f"{start}-mapping.txt": mapping.encode()}


def jpeg(color: int | tuple[int, int, int], side: int = 64) -> bytes:
    file = io.BytesIO()
    Image.new("L" if isinstance(color, int) else "RGB", (side, side), color).save(file, "JPEG", quality=95)
    return file.getvalue()


def tiny_files() -> Files:
    train = {f"train/{w}/images/{w}_{n}.JPEG": jpeg((250, 10 * n, 0)) for w in ("n02", "n01") for n in (0, 1)}
    files = {name.replace("n0", "n0000000"): content for name, content in train.items()}
    return files | {
        "wnids.txt": b"n00000002\nn00000001\n",
        "words.txt": b"n00000001\tgoldfish, Carassius auratus\nn00000002\tcat\nn00000003\tdog\n",
        "train/n00000001/n00000001_boxes.txt": b"n00000001_0.JPEG\t0\t0\t9\t9\n",
        "val/images/val_0.JPEG": jpeg(77),
        "val/images/val_1.JPEG": jpeg((0, 0, 200)),
        "val/val_annotations.txt": b"val_0.JPEG\tn00000001\t0\t32\t44\t62\nval_1.JPEG\tn00000002\t0\t1\t2\t3\n",
        "test/images/test_0.JPEG": b"not read",
    }


DATA: dict[str, tuple[ArchiveData, Files]] = {
    "cifar100": (CIFAR100(), cifar100_files()),
    "emnist": (EMNIST(split="letters"), emnist_files()),
    "tiny-imagenet": (TinyImageNet(), tiny_files()),
}


def archive_of(name: str) -> RemoteFile:
    source = DATA[name][0].source
    assert isinstance(source, RemoteFile)
    return source


def write_tree(folder: Path, files: Files) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def archive_bytes(remote: RemoteFile, files: Files) -> bytes:
    """Return the publisher's archive with these files."""
    buffer = io.BytesIO()
    if remote.name.endswith(".zip"):
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.mkdir(remote.top)
            for name, content in files.items():
                archive.writestr(f"{remote.top}/{name}", content)
    else:
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(f"{remote.top}/{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def publish(name: str, content: bytes, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Make an archive the one that the publisher of a data set provides."""
    digest = hashlib.sha256(content).hexdigest()
    remote = replace(archive_of(name), sha256=digest, bytes=len(content), **changes)
    monkeypatch.setattr(type(DATA[name][0]), "source", remote)


def read(name: str, folder: Path, changed: Files | None = None) -> SampleTable:
    """Read a data set from unpacked files, of which some are replaced."""
    data, files = DATA[name]
    return data.read_folder(write_tree(folder, files | (changed or {})))


# content


@pytest.mark.parametrize(("labels", "expected"), [("fine", FINE), ("coarse", COARSE)])
def test_read_cifar100_returns_images_and_labels(labels: Any, expected: np.ndarray, tmp_path: Path) -> None:
    table = CIFAR100(labels=labels).read_folder(write_files(tmp_path, cifar100_files()))
    np.testing.assert_array_equal(table.x, COLOR)
    assert table.y.tolist() == expected.tolist() and table.y.dtype == np.int64
    assert table.classes == {"fine": 100, "coarse": 20}[labels]
    assert table.class_names == tuple(f"name_{n}" for n in range(table.classes))
    assert table.is_test is not None and table.is_test.tolist() == [False] * 9 + [True] * 3


def test_read_emnist_turns_images_upright_and_numbers_letters_from_zero(tmp_path: Path) -> None:
    table = read("emnist", tmp_path)
    assert isinstance(table.x, np.ndarray) and table.x.flags.c_contiguous
    np.testing.assert_array_equal(table.x[:, 0], UPRIGHT)
    assert table.y.tolist() == [0, 25, 1, 2, 25] and table.classes == 26
    assert table.class_names is not None and (table.class_names[0], table.class_names[25]) == ("Aa", "Zz")
    assert table.is_test is not None and table.is_test.tolist() == [False] * 3 + [True] * 2


@pytest.mark.parametrize("split", ["byclass", "balanced", "mnist"])
def test_read_emnist_other_splits_keep_labels(split: Any, tmp_path: Path) -> None:
    y = np.array([0, SPLITS[split] - 1, 1, 2, 3], np.uint8)
    table = EMNIST(split=split).read_folder(write_files(tmp_path, emnist_files(split, y)))
    assert table.y.tolist() == y.tolist() and table.classes == SPLITS[split]


def test_read_tiny_imagenet_decodes_images_in_order_of_wnids(tmp_path: Path) -> None:
    table = read("tiny-imagenet", tmp_path)
    assert isinstance(table.x, np.ndarray) and table.x.shape == (6, 3, 64, 64) and table.x.dtype == np.uint8
    assert table.y.tolist() == [0, 0, 1, 1, 1, 0] and table.classes == 2
    assert table.class_names == ("cat", "goldfish, Carassius auratus")
    assert table.is_test is not None and table.is_test.tolist() == [False] * 4 + [True] * 2
    expected = [(250, 0, 0), (250, 10, 0), (250, 0, 0), (250, 10, 0), (77, 77, 77), (0, 0, 200)]  # one is gray
    np.testing.assert_allclose(table.x.mean((2, 3)), expected, atol=4)  # JPEG is lossy


# places


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("place", ["top folder", "archive", "unzipped and renamed"])
def test_readers_find_files_in_other_places(
    name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, files = DATA[name]
    expected = read(name, tmp_path / "plain")
    folder = tmp_path / "other"
    folder.mkdir()
    if place == "top folder":
        write_tree(folder / archive_of(name).top, files)
    elif place == "archive":
        content = archive_bytes(archive_of(name), files)
        (folder / archive_of(name).name).write_bytes(content)
        publish(name, content, monkeypatch)
    else:
        unzipped = {n.removesuffix(".gz"): gzip.decompress(c) if n.endswith(".gz") else c for n, c in files.items()}
        write_tree(folder, {n.replace("-idx", ".idx"): c for n, c in unzipped.items()})
    table = data.read_folder(folder)
    for field in ("x", "y", "is_test"):
        np.testing.assert_array_equal(getattr(table, field), getattr(expected, field))
    assert table.class_names == expected.class_names


@pytest.mark.parametrize("name", DATA)
def test_archive_with_other_checksum_is_not_opened(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, files = DATA[name]
    content = archive_bytes(archive_of(name), files)
    size = archive_of(name).bytes
    path = tmp_path / archive_of(name).name
    path.write_bytes(content[:-1] + b"x")
    monkeypatch.setattr(tarfile, "open", pytest.fail)
    monkeypatch.setattr(zipfile, "ZipFile", pytest.fail)
    assert f"instead of {size:,}" in error_message(lambda: data.read_folder(tmp_path))
    publish(name, content, monkeypatch)
    assert "SHA-256" in error_message(lambda: data.read_folder(tmp_path))


@pytest.mark.parametrize("name", DATA)
def test_folder_without_files_names_file_and_address(name: str, tmp_path: Path) -> None:
    data, files = DATA[name]
    text = error_message(lambda: data.read_folder(tmp_path))
    assert str(tmp_path) in text and str(archive_of(name)) in text
    for missing in [n for n in files if not n.startswith(("test/", "train/", "coarse"))]:
        folder = write_tree(tmp_path / missing.replace("/", "_"), {n: c for n, c in files.items() if n != missing})
        text = error_message(partial(data.read_folder, folder))
        assert f"has no {missing.removesuffix('.gz')}" in text and str(archive_of(name)) in text


# download


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", DATA)
def test_data_get_downloads_archive_once(
    name: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, files = DATA[name]
    expected, content = read(name, tmp_path / "plain"), archive_bytes(archive_of(name), files)
    with closing(FileServer(content)) as server:
        publish(name, content, monkeypatch, urls=(f"{server.address}/{archive_of(name).name}",))
        variant = ["--data.split", "letters"] if name == "emnist" else []
        assert not data.is_available
        result = CliRunner().invoke(app, ["data", "get", name, *variant], catch_exceptions=False)
        assert f"{name} saved in {cache}" in result.output.replace("\n", "") and data.is_available
        table = data.read()
        np.testing.assert_array_equal(table.x, expected.x)
        assert table.class_names == expected.class_names
        for cached in cache.glob("*.npz*"):  # another variant, or a damaged cache, needs no second download
            cached.unlink()
        np.testing.assert_array_equal(data.read().y, expected.y)
    assert server.sent == len(content)


def test_load_with_folder_reads_files_once_until_they_change(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tree(tmp_path / "files", cifar100_files())
    settings: dict[str, Any] = {"folder": str(folder), "clients": 2, "partition": "iid", "min_size": 2}
    fed = ft.load("cifar100", labels="coarse", **settings)
    assert fed.classes == 20 and fed.class_names is not None and fed.class_names[19] == "name_19"
    assert fed.mean is not None and len(fed.mean) == 3 and fed.settings["labels"] == "coarse"
    assert ft.load("cifar100", **settings).classes == 100
    with monkeypatch.context() as patch:
        patch.setattr(CIFAR100, "read_files", pytest.fail)
        assert ft.load("cifar100", **settings, test="publisher").num_clients == 2
    (folder / "test.bin").write_bytes(cifar100_files()["train.bin"])
    assert len(ft.load("cifar100", **settings).y) == 18


def test_unknown_variant_raises_before_download(cache: Path) -> None:
    assert "data.labels must be 'fine' or 'coarse'" in error_message(lambda: ft.load("cifar100", labels="corse"))
    assert "data.split must be 'byclass' or" in error_message(lambda: ft.load("emnist", split="letter"))


# damage

LETTERS_MAPPING, BAD = "emnist-letters-mapping.txt", b"\xff\xd8\xff nonsense"


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("cifar100", "train.bin", b"", "records of 3,074 bytes"),
        ("cifar100", "test.bin", bytes(3073), "records of 3,074 bytes"),
        ("cifar100", "test.bin", bytes([0, 100]) + bytes(3072), "label outside 0 to 99"),
        ("cifar100", "fine_label_names.txt", names_file(99), "99 names instead of 100"),
        ("emnist", "emnist-letters-test-images-idx3-ubyte.gz", idx_bytes(UPRIGHT[:1]), "1 images but 2 labels"),
        ("emnist", "emnist-letters-test-images-idx3-ubyte.gz", idx_bytes(UPRIGHT[0]), "not images and labels"),
        ("emnist", "emnist-letters-train-labels-idx1-ubyte.gz", idx_bytes(LETTERS[:3] * 0), "outside 0 to 25"),
        ("emnist", "emnist-letters-train-labels-idx1-ubyte.gz", idx_bytes(LETTERS[:3] + 26), "outside 0 to 25"),
        ("emnist", "emnist-letters-train-labels-idx1-ubyte.gz", b"\x1f\x8b nonsense", "damaged or truncated"),
        ("emnist", LETTERS_MAPPING, b"1 65 97\n", "does not list the characters of 26 classes"),
        ("emnist", LETTERS_MAPPING, "".join(f"{n} 7\n" for n in range(1, 27)).encode(), "does not list the characters"),
        ("emnist", LETTERS_MAPPING, "".join(f"{n}\n" for n in range(1, 27)).encode(), "does not list the characters"),
        ("emnist", LETTERS_MAPPING, "".join(f"{n} 0065{9**9}\n" for n in range(1, 27)).encode(), "does not list"),
        ("tiny-imagenet", "wnids.txt", b"n00000001\nn00000001\n", "different WordNet numbers"),
        ("tiny-imagenet", "wnids.txt", b"n00000001\n../..\n", "different WordNet numbers"),
        ("tiny-imagenet", "wnids.txt", b"n00000001\nn00000003\n", "has no folder train/n00000003/images"),
        ("tiny-imagenet", "words.txt", b"n00000001\tgoldfish\n", "without the name of n00000002"),
        ("tiny-imagenet", "val/val_annotations.txt", b"", "no images for testing"),
        ("tiny-imagenet", "val/val_annotations.txt", b"val_0.JPEG\tn00000009\n", "invalid line"),
        ("tiny-imagenet", "val/val_annotations.txt", b"../../secret\tn00000001\n", "invalid line"),
        ("tiny-imagenet", "val/val_annotations.txt", b"val_7.JPEG\tn00000001\n", "has no val/images/val_7.JPEG"),
        ("tiny-imagenet", "val/images/val_1.JPEG", BAD, "val_1.JPEG that cannot be read as an image"),
        ("tiny-imagenet", "val/images/val_1.JPEG", jpeg(3)[:-200], "val_1.JPEG that cannot be read as an image"),
        ("tiny-imagenet", "val/images/val_1.JPEG", jpeg(3, 65), "not an image of 64×64 pixels"),
    ],
)
def test_malformed_file_is_named(name: str, file: str, content: bytes, message: str, tmp_path: Path) -> None:
    text = error_message(lambda: read(name, tmp_path, {file: content}))
    assert message in text and str(tmp_path) in text


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("cifar100", "test.bin"),
        ("tiny-imagenet", "train/n00000002/images/n00000002_0.JPEG"),
        ("tiny-imagenet", "train/n00000002"),
        ("tiny-imagenet", "val"),
    ],
)
def test_link_out_of_folder_raises(name: str, link: str, tmp_path: Path) -> None:
    data, files = DATA[name]
    folder = write_tree(tmp_path / "files", files)
    (folder / link).rename(tmp_path / "outside")
    (folder / link).symlink_to(tmp_path / "outside")
    assert f"out of '{folder}'" in error_message(lambda: data.read_folder(folder))


def test_readers_reject_file_beyond_limit(tmp_path: Path) -> None:
    folder = write_tree(tmp_path, cifar100_files())
    with (folder / "train.bin").open("wb") as sparse:
        sparse.truncate((1 << 30) + 1)
    assert "train.bin that is too large" in error_message(lambda: CIFAR100().read_folder(folder))
