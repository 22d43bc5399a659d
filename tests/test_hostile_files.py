"""Data files that hostile hands would make: each is refused before anything is allocated, run or followed."""

import gzip
import io
import lzma
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedtailor as ft
import odd_files
from conftest import refusal
from fedtailor import room
from fedtailor.data import fetch, images
from fedtailor.packing import unpack
from peaks import at_most

MIB = 2**20


def of_folder(folder: Path) -> str:
    return refusal(lambda: ft.Federation.from_folder(folder))


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 MiB."""
    monkeypatch.setattr(room, "total_memory", lambda device: 64 * MIB)


# ---- arrays


def claiming(shape: str, descr: str = "'<f8'", body: int = 96, **more: int) -> bytes:
    return odd_files.claiming_npz(
        "x", descr, shape, body, more.get("version", 1), more.get("length", -1), more.get("packing", 0)
    )


@pytest.mark.parametrize(
    "content",
    [
        claiming("(1000000000, 3)"),
        claiming("(1000000000000, 0)"),
        claiming("(1000000000000,)", "'|V0'"),
        claiming("(4,)", "('<f4', (1000000000,))"),
        claiming("(4294967296, 4294967296)"),
        claiming("(4, 3)", version=2, length=2**26, body=2**26, packing=zipfile.ZIP_DEFLATED),
        claiming("(4, 3)", packing=zipfile.ZIP_LZMA),
        claiming("(4, 3)", packing=zipfile.ZIP_BZIP2),
        claiming("(4, 3)", "'|O'"),
    ],
    ids=["large", "no bytes", "void", "parts", "overflow", "header", "lzma", "bzip2", "object"],
)
def test_an_array_is_what_the_file_holds(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with at_most(5 * MIB):
        assert "'a.npz' cannot be read as a .npz of plain arrays" in of_folder(tmp_path)


def test_an_honest_array_is_read(tmp_path: Path) -> None:
    """So that the refusals above are not refusals of everything."""
    (tmp_path / "a.npz").write_bytes(claiming("(4, 3)", packing=zipfile.ZIP_DEFLATED))
    assert ft.Federation.from_folder(tmp_path).shape == (3,)


@pytest.mark.usefixtures("little_memory")
def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    """Of a hundred kilobytes, 80 MiB; and in three files, none of which is too large by itself."""
    one, three = tmp_path / "one", tmp_path / "three"
    for folder, names, rows in ((one, "a", 10 * MIB), (three, "abc", 2 * MIB)):
        folder.mkdir()
        for name in names:
            np.savez_compressed(folder / f"{name}.npz", x=np.zeros((rows, 1)), y=np.zeros(rows, np.uint8))
    with at_most(5 * MIB):
        assert "would fill 0.1 GB of memory" in of_folder(one)
        assert f"The data in '{three}' would fill" in of_folder(three)
    (three / "c.npz").unlink()
    (three / "b.npz").unlink()
    assert ft.Federation.from_folder(three).num_clients == 1


def test_labels_are_numbers_of_classes(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((4, 3)), y=np.array([0, 1, 2, 2**62]))
    with at_most(5 * MIB):
        assert "Client a has the label 4611686018427387904" in of_folder(tmp_path)


# ---- folders


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    np.savez(tmp_path / "secret.npz", x=np.ones((4, 3)), y=np.arange(4))
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "a.npz").symlink_to("../secret.npz")
    assert "'a.npz' is a link that leads out of" in of_folder(tmp_path / "clients")
    (tmp_path / "clients" / "a.npz").unlink()
    (tmp_path / "secret.npz").rename(tmp_path / "clients" / "a.npz")
    (tmp_path / "clients" / "b.npz").symlink_to("a.npz")
    (tmp_path / "chosen").symlink_to("clients")  # the user's own link to the folder, and one inside
    assert ft.Federation.from_folder(tmp_path / "chosen").names == ("a", "b")


@pytest.mark.parametrize("link", ["a", "a/cat", "a/cat/2.png"])
def test_no_link_leads_to_other_pictures(link: str, tmp_path: Path) -> None:
    for folder in ("clients/a/cat", "clients/a/dog", "elsewhere/cat", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "1.png").write_bytes(odd_files.PICTURES[0])
    target = tmp_path / ("elsewhere/1.png" if link.endswith("png") else "elsewhere/cat" if "/" in link else "elsewhere")
    place = tmp_path / "clients" / link
    if place.is_dir():
        place.rename(tmp_path / "moved")
    place.symlink_to(target)
    assert "is a link that leads out of" in of_folder(tmp_path / "clients")


def test_published_files_are_no_links_either(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for name, content in odd_files.MNIST.items():
        (own / name).write_bytes(content)
    images.from_folder(images.MNIST, own)
    name = min(odd_files.MNIST)
    (own / name).rename(tmp_path / name)
    (own / name).symlink_to(tmp_path / name)
    assert "is a link that leads out of" in refusal(lambda: images.from_folder(images.MNIST, own))


def test_what_is_no_file_is_never_read(tmp_path: Path) -> None:
    """A pipe would be waited for without end."""
    os.mkfifo(tmp_path / "a.npz")
    assert "must hold one .npz a client" in of_folder(tmp_path)
    for name in odd_files.MNIST:
        os.mkfifo(tmp_path / name)
    assert "has no train-images" in refusal(lambda: images.from_folder(images.MNIST, tmp_path))


def test_a_name_that_disturbs_the_screen_is_told_without_doing_so(tmp_path: Path) -> None:
    np.savez(tmp_path / "a\x1b[2J\n.npz", x=np.ones((4, 3)), y=np.arange(4))
    assert r"'a\x1b[2J\n.npz'" in of_folder(tmp_path)
    assert "File name too long" in of_folder(tmp_path / ("x" * 300))


# ---- pictures


def put_pictures(folder: Path, *contents: bytes) -> Path:
    place = folder / "client" / "class"
    place.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(contents):
        (place / f"{number}.png").write_bytes(content)
    return folder


def black(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("1", (side, side)).save(file, "PNG")
    return file.getvalue()


def test_no_program_is_run_to_open_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow knows EPS by its first bytes, whatever the file is called, and starts Ghostscript for it."""
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%Page: 1 1\n(x) show\n%%EOF\n"
    assert "'0.png'" in of_folder(put_pictures(tmp_path / "clients", eps, eps))
    assert not (tmp_path / "started").exists()


def test_a_picture_is_measured_before_it_is_unpacked(tmp_path: Path) -> None:
    put_pictures(tmp_path, black(8200))
    with at_most(30 * MIB):
        assert "8200×8200 pixels, too many" in of_folder(tmp_path)


@pytest.mark.usefixtures("little_memory")
def test_all_pictures_together_have_room(tmp_path: Path) -> None:
    content = black(1024)
    assert ft.Federation.from_folder(put_pictures(tmp_path, content, content)).shape == (1, 1024, 1024)
    put_pictures(tmp_path, *[content] * 12)
    with at_most(10 * MIB):
        assert f"The pictures in '{tmp_path}' would fill" in of_folder(tmp_path)


@pytest.mark.usefixtures("little_memory")
def test_nothing_larger_than_the_first_picture_is_unpacked(tmp_path: Path) -> None:
    put_pictures(tmp_path, black(8), black(8000))
    with at_most(30 * MIB):
        assert "'1.png' has another size" in of_folder(tmp_path)


def test_a_picture_that_paints_itself_over_and_over_is_refused(tmp_path: Path) -> None:
    """A scan that changes nothing takes some bytes of the file and the time of the whole picture."""
    content = odd_files.picture("JPEG", "L", progressive=True)
    at = content.rindex(b"\xff\xda")
    scan = content[at:-2]
    assert ft.Federation.from_folder(put_pictures(tmp_path / "good", content, content)).num_clients == 1
    many = content[:at] + scan * 101 + content[-2:]
    assert "more than 100 times" in of_folder(put_pictures(tmp_path / "bad", many, many))


def test_a_sheet_has_one_header() -> None:
    """The second would be believed: a thousand times as many pixels."""
    sheet = odd_files.SHEET
    second = sheet[8:16] + (2**13).to_bytes(4, "big") + (2**13).to_bytes(4, "big") + sheet[24:33]
    twice = odd_files.mended_png(sheet[:33] + second + sheet[33:])
    with at_most(10 * MIB):
        assert "two headers" in refusal(lambda: images.sheet(twice))


# ---- archives


def of_archive(content: bytes) -> str:
    return refusal(lambda: images.from_archive(images.MNIST, io.BufferedReader(io.BytesIO(content)), "The archive"))


def test_of_a_packed_array_no_more_is_unpacked_than_it_promises() -> None:
    bomb = gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 4]) + bytes(100 * MIB))
    with at_most(5 * MIB):
        assert "promises 4 bytes and holds more" in refusal(lambda: images.idx(bomb))


def test_memory_is_taken_for_what_comes_and_not_for_what_is_promised() -> None:
    promise = gzip.compress(bytes([0, 0, 8, 1]) + (2**30).to_bytes(4, "big") + bytes(4))
    with at_most(5 * MIB):
        assert "promises 1,073,741,824 bytes and holds 4" in refusal(lambda: images.idx(promise))


def test_an_archive_unpacks_to_no_more_than_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "LARGEST", 3 * MIB)
    for bomb in (gzip.compress(bytes(200 * MIB), 1), lzma.compress(bytes(200 * MIB), preset=0)):
        with at_most(16 * MIB):
            assert "unpacks to more than a data set" in of_archive(bomb)


def test_an_archive_cannot_ask_for_gigabytes_to_be_unpacked_with() -> None:
    """A dictionary of 4 GiB is a single byte in the header, which has a checksum of its own."""
    packed = bytearray(lzma.compress(odd_files.TAR))
    size = (packed[12] + 1) * 4
    packed[16] = 40
    packed[12 + size - 4 : 12 + size] = zlib.crc32(packed[12 : 12 + size - 4]).to_bytes(4, "little")
    with at_most(20 * MIB):
        assert "Memory usage limit" in of_archive(bytes(packed))


@pytest.mark.parametrize(
    ("size", "kind"),
    [(b"\xff" * 11 + b"\0", b"0"), (b"\xff" * 11 + b"\0", b"x"), (b"\x80" + b"\0" * 3 + b"\x10" + b"\0" * 7, b"L")],
)
def test_a_member_of_no_sensible_size_is_no_way_back(size: bytes, kind: bytes) -> None:
    """Python's tarfile would go back to an earlier member for ever, or read on without a bound."""
    assert "a member is cut short" in of_archive(odd_files.member("x", b"", size, kind) + odd_files.TAR)


def test_headers_of_other_kinds_are_passed_over() -> None:
    """A million digits in one of them would keep Python's tarfile busy for hours."""
    headers = b"".join(odd_files.member("x", b"1" * MIB, None, kind) for kind in (b"x", b"g", b"L"))
    links = b"".join(odd_files.member("t10k-labels-idx1-ubyte", b"", b"7" * 11 + b"\0", kind) for kind in (b"1", b"2"))
    archive = headers + odd_files.MEMBERS + links
    _, y = images.from_archive(images.MNIST, io.BufferedReader(io.BytesIO(archive)), "The archive")
    assert y.tolist() == [3, 9, 3, 9]


def test_a_list_of_labels_is_bounded() -> None:
    labels = b"[" + b"[]," * MIB + b"0]"
    with at_most(MIB):
        assert "not a JSON list" in refusal(lambda: images._numbers(labels, "The file"))


def test_a_cache_that_others_wrote_into_is_read_like_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They can write the seal as well."""
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path))
    x, y = np.zeros((2, 1, 2, 2), np.uint8), np.array([0, 1])
    wrong: list[dict[str, Any]] = [
        {"x": x},
        {"x": x[0], "y": y},
        {"x": x, "y": y + 9},
        {"x": x, "y": y[:1]},
        {"x": x[:0], "y": y[:0]},
    ]
    for arrays in [*wrong, {"x": x / 2, "y": y}, {"x": x, "y": np.array([None, 1])}]:
        np.savez(tmp_path / "mnist.npz", **arrays)
        (tmp_path / "mnist.npz.sha256").write_text(fetch._seal(tmp_path / "mnist.npz", fetch.SOURCES["mnist"]))
        assert "holds no pictures and labels" in refusal(lambda: fetch.raw("mnist"))
    np.savez(tmp_path / "mnist.npz", x=x, y=y)
    (tmp_path / "mnist.npz.sha256").write_text(fetch._seal(tmp_path / "mnist.npz", fetch.SOURCES["mnist"]))
    assert fetch.raw("mnist")[1].tolist() == [0, 1]


@pytest.mark.usefixtures("little_memory")
def test_a_bomb_in_the_cache_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path))
    np.savez_compressed(tmp_path / "mnist.npz", x=np.zeros((40 * MIB, 1, 1, 1), np.uint8), y=np.zeros(5 * MIB))
    (tmp_path / "mnist.npz.sha256").write_text(fetch._seal(tmp_path / "mnist.npz", fetch.SOURCES["mnist"]))
    with at_most(5 * MIB):
        refusal(lambda: fetch.raw("mnist"))


# ---- tensors


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ((2**60).to_bytes(8, "little") + b"{}", "cut off"),
        ((10**6).to_bytes(8, "little") + b"[" * 10**6, "not JSON"),
        (b"", "cut off"),
        (
            odd_files.safetensors(
                [("a", {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]})], {"a": None}, 4
            ),
            "no tensors",
        ),
        (
            odd_files.safetensors(
                [("a", {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]})], {"a": None}, 4
            ),
            "no tensors",
        ),
        (odd_files.safetensors([], {"a": None}, 0), "differ at 'a'"),
        (odd_files.safetensors([], "[" * 100_000, 0), "without an outline"),
        (odd_files.PACKED[0] * 1000, "more than the 1000"),
    ],
    ids=["header", "nested", "nothing", "large", "overflow", "missing", "outline", "most"],
)
def test_tensors_are_what_the_bytes_hold(content: bytes, words: str) -> None:
    with at_most(16 * MIB):
        assert words in refusal(lambda: unpack(content, most=1000 if "1000" in words else None))
