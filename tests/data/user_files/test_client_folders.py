"""`Federation.from_folder` reads .npz files and images, or raises an error that names the file or client."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

import fedtailor as ft
from conftest import error_message
from support.corrupted_files import NPZ, folder_error

Array = NDArray[Any]
RNG = np.random.default_rng(11)


def inputs(fed: ft.Federation) -> Tensor:
    assert isinstance(fed.x, Tensor)
    return fed.x


def save_npz(path: Path, **arrays: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


def save_four_arrays(path: Path, count: int = 6) -> dict[str, Array]:
    arrays = {
        "x_train": RNG.normal(size=(count, 3)),
        "y_train": np.arange(count) % 3,
        "x_test": RNG.normal(size=(2, 3)),
        "y_test": np.array([0, 2]),
    }
    save_npz(path, **arrays)
    return arrays


def save_image(path: Path, pixels: Array | None = None) -> Array:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = RNG.integers(0, 256, (6, 5), np.uint8) if pixels is None else pixels
    Image.fromarray(pixels).save(path)
    return pixels


def save_client(folder: Path, classes: dict[str, int]) -> dict[str, list[Array]]:
    """Save n gray images per class and return their pixels."""
    return {name: [save_image(folder / name / f"{i:03}.png") for i in range(n)] for name, n in classes.items()}


# arrays


def test_from_folder_with_four_arrays_keeps_train_and_test_data(tmp_path: Path) -> None:
    given = {name: save_four_arrays(tmp_path / f"{name}.npz", count) for name, count in (("south", 4), ("north", 9))}
    fed = ft.Federation.from_folder(tmp_path)
    assert fed.names == ("north", "south") and fed.classes == 3
    for number, name in enumerate(fed.names):
        for part, indices in (("train", fed.train[number]), ("test", fed.test[number])):
            np.testing.assert_array_equal(inputs(fed)[indices], given[name][f"x_{part}"])
            np.testing.assert_array_equal(fed.y[indices], given[name][f"y_{part}"])


@pytest.mark.parametrize("kind", [int, bool])
def test_from_folder_with_x_and_y_holds_out_same_proportions(kind: type, tmp_path: Path) -> None:
    y: Array = np.repeat([0, 1], [60, 20]).astype(kind)
    save_npz(tmp_path / "a.npz", x=np.arange(80)[:, None] / 100, y=y)
    for seed in range(3):
        fed = ft.Federation.from_folder(str(tmp_path), test=0.3, seed=seed)
        assert fed.classes == 2
        assert sorted((inputs(fed)[:, 0] * 100).round().int().tolist()) == list(range(80)), "each sample occurs once"
        np.testing.assert_array_equal(fed.y, y[(inputs(fed)[:, 0] * 100).round().int()])
        assert torch.bincount(fed.y[fed.test[0]]).tolist() == [18, 6]


def test_from_folder_held_out_samples_depend_on_seed(tmp_path: Path) -> None:
    save_npz(tmp_path / "arrays" / "a.npz", x=np.arange(40)[:, None], y=np.zeros(40, int))
    save_client(tmp_path / "images" / "a", {"cat": 40})
    for folder in ("arrays", "images"):
        feds = [ft.Federation.from_folder(tmp_path / folder, seed=seed) for seed in (0, 0, 1)]
        held = [inputs(fed)[fed.test[0]].tolist() for fed in feds]
        assert held[0] == held[1] != held[2]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float16, np.float64, ">f4"])
def test_from_folder_keeps_dtype_of_arrays(tmp_path: Path, dtype: Any) -> None:
    x = np.arange(12).reshape(4, 3).astype(dtype)
    save_npz(tmp_path / "a.npz", x_train=x, y_train=np.zeros(4, int), x_test=x, y_test=np.zeros(4, int))
    fed = ft.Federation.from_folder(tmp_path)
    assert inputs(fed).numpy().dtype == np.dtype(dtype).newbyteorder("=")
    np.testing.assert_array_equal(inputs(fed)[fed.train[0]], x)


def test_load_folder_records_settings(tmp_path: Path) -> None:
    save_four_arrays(tmp_path / "a.npz")
    fed = ft.load("folder", folder=str(tmp_path), test=0.5, seed=4)
    assert fed.settings == {"name": "folder", "folder": str(tmp_path), "test": 0.5, "seed": 4}


class PickleTrap:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["x_train", "y_test"])
def test_from_folder_with_pickle_raises_without_executing_it(tmp_path: Path, name: str) -> None:
    arrays: dict[str, Any] = save_four_arrays(tmp_path / "a.npz")
    save_npz(tmp_path / "a.npz", **arrays | {name: np.array([PickleTrap(tmp_path / "sprung")], dtype=object)})
    assert "a.npz" in folder_error(tmp_path)
    assert not (tmp_path / "sprung").exists()


def plain_npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


def zip_without_arrays() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", b"not an array")
        archive.writestr("y.npy", b"")
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"", b"text", b"\x80\x04.", plain_npy(), zip_without_arrays(), NPZ[0][:-30]],
    ids=["empty", "text", "pickle", "npy", "zip of something else", "end cut off"],
)
def test_from_folder_with_invalid_npz_raises(tmp_path: Path, content: bytes) -> None:
    save_four_arrays(tmp_path / "a.npz")
    (tmp_path / "b.npz").write_bytes(content)
    text = folder_error(tmp_path)
    assert "Client b's" in text or "'b.npz'" in text
    assert "allow_pickle" not in text, "the hint of numpy would execute the file"


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": 1, "labels": 2}, "['images', 'labels']"),
        ({"x_train": np.zeros((2, 3)), "y_train": np.zeros(2, int)}, "x_train, y_train, x_test, and y_test"),
        ({"x": np.zeros((5, 3)), "y": np.zeros(4, int)}, "b"),
        ({"x": np.zeros((4, 3)), "y": np.zeros(5, int)}, "b"),
        ({"x": np.zeros((4, 3)), "y": np.array(1)}, "b"),
        ({"x": np.array(1.0), "y": np.zeros(4, int)}, "b"),
        ({"x": np.zeros((0, 3)), "y": np.zeros(0, int)}, "Client b has no training data"),
        ({"x": np.zeros((4, 3)), "y": np.array([0, 1, 2, -1])}, "Client b has the label -1"),
    ],
)
def test_from_folder_with_invalid_arrays_names_client(tmp_path: Path, arrays: Any, words: str) -> None:
    save_four_arrays(tmp_path / "a.npz")
    save_npz(tmp_path / "b.npz", **arrays)
    text = folder_error(tmp_path)
    assert words in text and ("Client b" in text or "'b.npz'" in text)


# images


def test_from_folder_assigns_images_to_client_and_class(tmp_path: Path) -> None:
    """A class has the same label for all clients, also for those that lack other classes."""
    given = {
        "ward-1": save_client(tmp_path / "ward-1", {"benign": 12, "malignant": 8}),
        "ward-2": save_client(tmp_path / "ward-2", {"malignant": 4, "absent": 2}),
    }
    fed = ft.Federation.from_folder(tmp_path)
    assert fed.names == ("ward-1", "ward-2") and fed.classes == 3
    assert inputs(fed).dtype == torch.uint8 and fed.shape == (1, 6, 5)
    for number, name in enumerate(fed.names):
        mine = torch.cat([fed.train[number], fed.test[number]])
        found = sorted((int(fed.y[i]), inputs(fed)[i, 0].tolist()) for i in mine)
        labels = {kind: ["absent", "benign", "malignant"].index(kind) for kind in given[name]}
        assert found == sorted((labels[kind], p.tolist()) for kind, pixels in given[name].items() for p in pixels)
    assert torch.bincount(fed.y[fed.test[0]]).tolist() == [0, 3, 2], "a quarter of each class"


def read_twice(folder: Path, suffix: str, image: Image.Image, **options: Any) -> NDArray[np.uint8]:
    """Save an image twice as one class, and return what is read as [channels, height, width]."""
    place = folder / "a" / "kind"
    place.mkdir(parents=True)
    for number in range(2):
        image.save(place / f"{number}{suffix}", **options)
    first, second = inputs(ft.Federation.from_folder(folder)).numpy()
    np.testing.assert_array_equal(first, second)
    assert first.dtype == np.uint8
    return first  # type: ignore[no-any-return]


COLOR = RNG.integers(0, 256, (6, 5, 3), np.uint8)
BLACK_WHITE = np.array([[0, 255], [255, 255]], np.uint8)
DEEP = np.append(RNG.integers(0, 2**16, (5, 5)), [[0, 2**16 - 1, 255, 256, 0]], axis=0).astype(np.uint16)
PALETTE = np.array([[[255, 0, 0], [0, 0, 255]], [[0, 255, 0], [255, 0, 0]]], np.uint8)


@pytest.mark.parametrize(
    ("suffix", "image", "expected"),
    [
        *((suffix, Image.fromarray(COLOR), COLOR) for suffix in (".png", ".PNG", ".bmp", ".tif", ".tiff", ".webp")),
        (".png", Image.fromarray(COLOR).convert("RGBA"), COLOR),  # transparency is dropped
        (".png", Image.fromarray(PALETTE).quantize(4), PALETTE),  # a palette gives colors
        (".png", Image.fromarray(BLACK_WHITE).convert("1"), BLACK_WHITE),
        (".png", Image.fromarray(BLACK_WHITE).convert("LA"), BLACK_WHITE),
        *((suffix, Image.fromarray(DEEP), DEEP // 256) for suffix in (".png", ".tif")),  # the upper 8 bits
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "mode", ""),
)
def test_read_image_returns_channels_first_in_8_bits(
    suffix: str, image: Image.Image, expected: Array, tmp_path: Path
) -> None:
    options = {"lossless": True} if suffix == ".webp" else {}
    found = read_twice(tmp_path, suffix, image, **options)
    np.testing.assert_array_equal(found, np.moveaxis(np.atleast_3d(expected), 2, 0))


def test_read_image_jpeg(tmp_path: Path) -> None:
    photo = read_twice(tmp_path, ".jpg", Image.fromarray(np.full((16, 8, 3), (200, 100, 50), np.uint8)))
    assert photo.shape == (3, 16, 8)
    assert abs(photo.mean((1, 2)) - [200, 100, 50]).max() < 3


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_read_image_with_32_bit_pixels_raises(tmp_path: Path, dtype: Any) -> None:
    image = Image.fromarray((RNG.random((6, 5)) * 1e4).astype(dtype))
    assert "0.tif" in error_message(lambda: read_twice(tmp_path, ".tif", image))


@pytest.mark.parametrize(
    ("odd", "shape", "words"),
    [
        (["a/cat/odd.png"], (9, 9), ["Client a", "odd.png"]),
        (["a/cat/odd.png"], (6, 5, 3), ["Client a", "odd.png"]),
        (["b/cat/1.png", "b/cat/2.png"], (9, 9), ["Client b", "(1, 9, 9)"]),
    ],
    ids=["size", "color", "client"],
)
def test_from_folder_with_mixed_images_raises(
    odd: list[str], shape: tuple[int, ...], words: list[str], tmp_path: Path
) -> None:
    save_client(tmp_path / "a", {"cat": 3})
    for name in odd:
        save_image(tmp_path / name, np.zeros(shape, np.uint8))
    text = folder_error(tmp_path)
    assert all(word in text for word in words)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".tif", ".bmp", ".webp"])
@pytest.mark.parametrize("kept_fraction", [0.0, 0.3, 0.8])
def test_from_folder_with_truncated_image_names_it(tmp_path: Path, suffix: str, kept_fraction: float) -> None:
    broken = tmp_path / "a" / "cat" / f"broken{suffix}"
    save_image(broken, RNG.integers(0, 256, (40, 40, 3), np.uint8))
    content = broken.read_bytes()
    broken.write_bytes(content[: int(len(content) * kept_fraction)])
    assert broken.name in folder_error(tmp_path)


def test_from_folder_with_image_outside_of_class_raises(tmp_path: Path) -> None:
    for number, stray in enumerate(["cat/old/1.png", "1.png"]):
        folder = tmp_path / str(number)
        save_client(folder / "cat", {"cat": 3})  # a client with the name of a class
        save_image(folder / "cat" / stray)
        text = folder_error(folder)
        assert "Client cat" in text and stray in text


def test_from_folder_ignores_hidden_files(tmp_path: Path) -> None:
    save_client(tmp_path / "a", {"cat": 3})
    save_image(tmp_path / "a" / ".ipynb_checkpoints" / "001-checkpoint.png")
    save_image(tmp_path / "a" / "cat" / ".thumbnails" / "001.png", np.zeros((2, 2), np.uint8))
    save_image(tmp_path / ".cache" / "cat" / "001.png")
    (tmp_path / "a" / "cat" / "._001.png").write_bytes(b"no image")
    (tmp_path / "a" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "README.md").write_text("no client")
    fed = ft.Federation.from_folder(tmp_path)
    assert fed.names == ("a",) and fed.classes == 1 and len(fed.y) == 3
    save_four_arrays(tmp_path / "arrays" / "a.npz")
    (tmp_path / "arrays" / "._a.npz").write_bytes(b"no archive")
    assert ft.Federation.from_folder(tmp_path / "arrays").names == ("a",)


def test_from_folder_with_empty_folder_raises(tmp_path: Path) -> None:
    assert "There is no folder" in folder_error(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "There is no folder" in folder_error(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "one .npz file per client" in folder_error(tmp_path / "empty")
    (tmp_path / "bare" / "a").mkdir(parents=True)
    assert "one folder of images per class" in folder_error(tmp_path / "bare")
    save_client(tmp_path / "some" / "a", {"cat": 3})
    (tmp_path / "some" / "b" / "cat").mkdir(parents=True)
    assert "Client b has no training data" in folder_error(tmp_path / "some")
    save_image(tmp_path / "some" / "b" / "cat" / "0.png")
    fed = ft.Federation.from_folder(tmp_path / "some")  # one image: trained, not tested
    assert [len(own) for own in fed.test] == [1, 0]
    save_four_arrays(tmp_path / "some" / "c.npz")
    assert "either one .npz file per client or one folder" in folder_error(tmp_path / "some")


@pytest.mark.parametrize("fraction", [0.0, 1.0, float("nan")])
def test_from_folder_with_invalid_test_fraction_raises(tmp_path: Path, fraction: float) -> None:
    save_client(tmp_path / "a", {"cat": 3})
    assert "test must be" in error_message(lambda: ft.Federation.from_folder(tmp_path, test=fraction))


def test_simulate_on_folder_of_images_learns(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for number in range(8):
            dark, bright = np.full((4, 4), number, np.uint8), np.full((4, 4), 255 - number, np.uint8)
            save_image(tmp_path / name / "dark" / f"{number}.png", dark)
            save_image(tmp_path / name / "bright" / f"{number}.png", bright)
    fed = ft.Federation.from_folder(tmp_path)
    run = ft.simulate(ft.methods.FedAvg(lr=0.5), ft.network("logistic", fed), fed, rounds=10, device="cpu")
    assert run.scores("received") == {0: 1.0, 1: 1.0}
