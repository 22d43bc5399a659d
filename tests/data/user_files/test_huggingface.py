"""`Federation.from_huggingface` reads Hugging Face data sets and Flower's partitions, or names the columns."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import fedtailor as ft
from conftest import error_message

datasets = pytest.importorskip("datasets")
from_huggingface = ft.Federation.from_huggingface


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def pixels(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (5, 4, 3), dtype=np.uint8)


def image_data(owners: list[str]) -> Any:
    """Return color images with their writers and a label with names, as FEMNIST has them."""
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "writer_id": datasets.Value("string"),
            "character": datasets.ClassLabel(names=["zero", "one", "two"]),
        }
    )
    content = {
        "image": [Image.fromarray(pixels(number)) for number in range(len(owners))],
        "writer_id": owners,
        "character": [number % 2 for number in range(len(owners))],
    }
    return datasets.Dataset.from_dict(content, features=features)


def number_data(count: int, start: int = 0, **columns: Any) -> Any:
    values = np.arange(start, start + count)
    return datasets.Dataset.from_dict({"x": np.stack([values, -values], 1), "label": values % 2} | columns)


def x_of(fed: ft.Federation) -> NDArray[Any]:
    assert isinstance(fed.x, torch.Tensor)
    return fed.x.numpy()


def test_column_of_clients_gives_same_split_as_from_owners(tmp_path: Path) -> None:
    owners = ["w3", "w1", "w3", "w2"] * 6
    image_data(owners).to_parquet(tmp_path / "data.parquet")
    files = {"train": str(tmp_path / "data.parquet")}
    data = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    fed = from_huggingface(data, client="writer_id", seed=3)  # the image and the label are clear
    x = np.stack([pixels(number).transpose(2, 0, 1) for number in range(24)])
    expected = ft.Federation.from_owners(x, np.arange(24) % 2, owners, seed=3, classes=3)
    assert fed.names == ("w1", "w2", "w3") and fed.classes == 3 and fed.class_names == ("zero", "one", "two")
    np.testing.assert_array_equal(x_of(fed), x)
    assert fed.x.dtype == torch.uint8
    for found, wanted in zip(fed.train + fed.test, expected.train + expected.test, strict=True):
        assert found.tolist() == wanted.tolist()
    run = ft.simulate(ft.methods.FedAvg(), ft.network("mlp", fed), fed, rounds=1)
    assert run.scores("trained").keys() == {0, 1, 2}


def test_splits_are_kept_for_every_client() -> None:
    train = number_data(6, who=[2, 1, 10, 10, 1, 2])
    test = number_data(4, start=100, who=[1, 10, 1, 1])
    fed = from_huggingface(datasets.DatasetDict(train=train, test=test), client="who")
    assert fed.names == ("1", "2", "10"), "numbers are sorted as numbers"
    assert [x_of(fed)[own.numpy(), 0].tolist() for own in fed.train] == [[1, 4], [0, 5], [2, 3]]
    assert [x_of(fed)[own.numpy(), 0].tolist() for own in fed.test] == [[100, 102, 103], [], [101]]


def test_partitions_are_clients() -> None:
    """Flower Datasets: [fds.load_partition(i) for i in range(3)], also after train_test_split."""
    whole = number_data(30)
    parts = [whole.shard(3, i, contiguous=False) for i in range(3)]
    held_out = from_huggingface(parts, test=0.2)
    for client in range(3):
        own = torch.cat([held_out.train[client], held_out.test[client]])
        assert sorted(x_of(held_out)[own, 0].tolist()) == list(range(client, 30, 3))
        assert len(held_out.test[client]) == 2
    split = {f"site-{i}": part.train_test_split(test_size=4, seed=0) for i, part in enumerate(parts)}
    fed = from_huggingface(split)
    assert fed.names == ("site-0", "site-1", "site-2")
    for client, part in enumerate(split.values()):
        assert x_of(fed)[fed.train[client]].tolist() == part["train"]["x"][:]
        assert x_of(fed)[fed.test[client]].tolist() == part["test"]["x"][:]
    assert from_huggingface(parts, names=["a", "b", "c"]).names == ("a", "b", "c")


@pytest.mark.parametrize("kind", ["uint8", "int32", "float16", "float64", "bool"])
def test_columns_keep_their_dtype_and_values(kind: str) -> None:
    values = (np.arange(24).reshape(8, 3) / 7).astype(kind)
    features = datasets.Features({"x": datasets.Sequence(datasets.Value(kind)), "label": datasets.Value("int64")})
    content = {"x": values.tolist(), "label": [0, 1] * 4}
    fed = from_huggingface([datasets.Dataset.from_dict(content, features=features).with_format("torch")])
    np.testing.assert_array_equal(x_of(fed), values)
    assert x_of(fed).dtype == values.dtype


def test_several_columns_become_a_matrix_or_the_parts_of_the_inputs() -> None:
    columns = {"age": [30, 40, 50, 60], "dose": [0.5, 0.25, 0.0, 1.0], "response": [1.5, 2.5, 3.25, 0.0]}
    data = datasets.Dataset.from_dict(columns | {"site": ["a", "a", "b", "b"]})
    fed = from_huggingface(data, client="site", x=["age", "dose"], y="response", test=0.5)
    assert x_of(fed).tolist() == [[30, 0.5], [40, 0.25], [50, 0], [60, 1]] and x_of(fed).dtype.kind == "f"
    assert fed.classes is None and fed.y.tolist() == columns["response"]
    parts = from_huggingface(data, client="site", x={"years": "age", "mg": "dose"}, y="response", test=0.5)
    assert isinstance(parts.x, dict) and {name: part.tolist() for name, part in parts.x.items()} == {
        "years": columns["age"], "mg": columns["dose"],
    }  # fmt: skip


def test_text_labels_become_classes() -> None:
    data = number_data(8, label=["dog", "cat"] * 4, who=["a"] * 8)
    fed = from_huggingface(data, client="who")
    assert fed.class_names == ("cat", "dog") and fed.y.tolist() == [1, 0] * 4


def scrambled() -> Any:
    return number_data(4, who=["a", "a", "b", "b"], weight=[1.0] * 4)


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (
            lambda: scrambled(),
            {"client": "who"},
            "Pass x= and y=, the columns of inputs and targets; the columns are x",
        ),
        (lambda: scrambled(), {}, "Pass client=, the column that names each sample's client; the columns are x"),
        (lambda: scrambled(), {"client": "writer"}, "There is no column 'writer'; the columns are x, label, who"),
        (lambda: scrambled(), {"client": "who", "x": "z"}, "There is no column 'z'"),
        (lambda: scrambled(), {"client": "who", "x": ["x", "weight"]}, "more than one number per sample"),
        (lambda: [scrambled()], {"client": "who"}, "Each partition is a client"),
        (lambda: [scrambled(), number_data(3)], {"x": "x"}, "must have the same columns"),
        (list, {}, "all be a datasets.Dataset"),
        (lambda: [number_data(4).select([])], {}, "no samples"),
        (lambda: {"a": np.zeros(3)}, {}, "got ndarray"),
        (lambda: number_data(4).to_iterable_dataset(), {"client": "who"}, "streamed"),
        (lambda: [number_data(4).with_transform(lambda batch: batch)], {}, "dataset.map"),
        (lambda: datasets.DatasetDict(train=scrambled(), validation=scrambled()), {"client": "who"}, "train and test"),
        (lambda: [number_data(2, x=["good film", "bad film"])], {}, "tokenize it"),
        (lambda: [number_data(2, x=[[1, 2], [3]])], {}, "differ in length; pad"),
        (lambda: [number_data(2, x=[1, None])], {}, "missing values"),
        (lambda: [number_data(2, x=[{"a": 1}, {"a": 2}])], {}, "must contain numbers or images"),
        (lambda: [image_data(["a"] * 4)], {"classes": 5}, "3 names of classes, but classes is 5"),
        (lambda: [number_data(4)], {"test": 1.0}, "test must be"),
    ],
)
def test_unclear_data_raises(data: Any, options: dict[str, Any], words: str) -> None:
    assert words in error_message(lambda: from_huggingface(data(), **options))


def test_images_of_different_sizes_raise() -> None:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    content = {"image": [Image.new("L", (4, 4)), Image.new("L", (5, 4))], "label": [0, 1]}
    message = error_message(lambda: from_huggingface([datasets.Dataset.from_dict(content, features=features)]))
    assert "Image 1 in the column 'image' has the shape (1, 4, 5), but the first one has (1, 4, 4)" in message
