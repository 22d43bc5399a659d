"""A federation in a file is the federation that was saved; a damaged file is never read as if it were intact."""

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import fedtailor as ft
from conftest import tiny_federation
from fedtailor.core.tensor_hash import hash_tensors
from fedtailor.data.images.datasets import Digits
from fedtailor.data.user_data import FolderData
from fedtailor.training.fingerprint import data_fingerprint
from support.corrupted_files import change_federation
from support.memory import assert_memory_below

MIB = 2**20
RNG = np.random.default_rng(0)


def images() -> ft.Federation:
    """Return byte images with an odd number of bytes, normalization, text labels, and a common test set."""
    x, y = RNG.integers(0, 256, (7, 3, 5, 5), dtype=np.uint8), np.array(list("abcabca"))
    clients = [(x, y, x[:3], y[:3]), (x[1:], y[1:], x[:0], y[:0])]
    options: dict[str, Any] = {"mean": (0.1, 0.2, 0.3), "std": (np.float32(0.3),), "common_test": (x[2:4], y[2:4])}
    return ft.Federation.from_arrays(clients, names=["ann", "Bö, b"], settings={"name": "mine"}, **options)


def several_parts() -> ft.Federation:
    """Return inputs with three parts of different dtypes, for regression."""
    x = {"mask": RNG.random((6, 3)) < 0.5, "tokens": RNG.integers(0, 9, (6, 4)), "length": np.ones(6, np.float16)}
    return ft.Federation.from_arrays([(x, RNG.normal(size=(6, 2)), x, RNG.normal(size=(6, 2)))] * 2)


def owned_in_part() -> ft.Federation:
    """Return a federation in which no client owns the last sample, which is NaN."""
    x = torch.randn(9, 4)
    x[8] = torch.nan
    return ft.Federation.from_owners(x, [0, 1] * 4 + [0], [[0, 1, 2, 7], [6, 5, 4, 3]])


FEDERATIONS: list[Callable[[], ft.Federation]] = [tiny_federation, images, several_parts, owned_in_part]


def same(left: Any, right: Any) -> bool:
    """Return whether two values of a field are equal, with all dtypes and bits."""
    if isinstance(left, Tensor):
        return hash_tensors([left]) == hash_tensors([right])
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[name], right[name]) for name in left)
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def assert_same(found: ft.Federation, expected: ft.Federation) -> None:
    different = [f.name for f in fields(found) if not same(getattr(found, f.name), getattr(expected, f.name))]
    assert different == ["settings", "stored"] and found.is_mapped and not expected.is_mapped


@pytest.mark.parametrize("make", FEDERATIONS)
def test_saved_federation_is_mapped_with_same_bits_and_fingerprint(
    make: Callable[[], ft.Federation], tmp_path: Path
) -> None:
    fed, path = make(), tmp_path / "fed.safetensors"
    fed.save(path)
    found = ft.Federation.from_file(path, verify=True)
    assert_same(found, fed)
    assert found.settings == {"name": "file", "file": str(path)}
    assert data_fingerprint(found) == data_fingerprint(fed)
    assert data_fingerprint(found.select([1])) == data_fingerprint(fed.select([1]))
    found.save(path)  # to the file that it is mapped from
    assert_same(ft.Federation.from_file(path, verify=True), fed)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]  # no temporary files remain


def test_changed_samples_have_another_fingerprint(tmp_path: Path) -> None:
    tiny_federation().save(tmp_path / "fed")
    found = ft.Federation.from_file(tmp_path / "fed")
    changed = replace(found, x=found.x + 1)
    assert data_fingerprint(changed) == data_fingerprint(replace(changed, stored=None)) != data_fingerprint(found)
    with pytest.raises(ft.DataError, match="NaN or infinity"):
        replace(found, x=found.x * torch.nan)


@pytest.mark.parametrize("make", FEDERATIONS)
def test_any_safetensors_reader_opens_the_file(make: Callable[[], ft.Federation], tmp_path: Path) -> None:
    fed, path = make(), tmp_path / "fed.safetensors"
    fed.save(path)
    with safe_open(path, framework="pt") as file:
        parts = {f"x/{name}": part for name, part in fed.x.items()} if isinstance(fed.x, dict) else {"x": fed.x}
        assert all(same(file.get_tensor(name), part) for name, part in parts.items())
        assert same(file.get_tensor("y"), fed.y) and same(file.get_tensor("train"), torch.cat(fed.train))
        assert json.loads(bytes(file.get_tensor("description").tolist()))["names"] == list(fed.names)


@pytest.mark.parametrize("make", [tiny_federation, images, several_parts])
def test_write_client_by_client_equals_from_arrays(make: Callable[[], ft.Federation], tmp_path: Path) -> None:
    fed = make()
    labels = fed.y if fed.class_names is None else np.array(fed.class_names)[fed.y.numpy()]

    def take(rows: Tensor) -> tuple[Any, Any]:
        return {n: p[rows] for n, p in fed.x.items()} if isinstance(fed.x, dict) else fed.x[rows], labels[rows]

    def clients() -> Iterator[tuple[str, Any, Any, Any, Any]]:
        for name, train, test in zip(fed.names, fed.train, fed.test, strict=True):
            yield (name, *take(train), *take(test))

    common = None if fed.common_test is None else take(fed.common_test)
    found = ft.Federation.write(tmp_path / "fed", clients(), common_test=common, mean=fed.mean, std=fed.std)
    assert_same(found, fed)
    assert data_fingerprint(found) == data_fingerprint(fed)


X, Y = np.zeros((4, 3), np.float32), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("clients", "problem"),
    [
        ([("a", X, Y, X, Y), ("b", X[:, :2], Y, X, Y)], r"Client b's inputs are float32 \(2,\), but those of other"),
        ([("a", X, Y, X, Y), ("b", {"i": X}, Y, {"i": X}, Y)], "Client b's inputs do not have the same parts"),
        ([("a", X, Y, X, Y), ("b", X + np.nan, Y, X, Y)], "Client b has NaN or infinity in its inputs"),
        ([("a", X, Y[:3], X, Y)], "Client a's inputs have 4 rows, but there are 3 targets"),
        ([("a", X, Y, X, Y)] * 2, "2 clients have the name a"),
        ([("a", X, Y, X)], "Client a must be"),
        ([("a", X[:0], Y[:0], X[:0], Y[:0])], "no client has any"),
        ([("a", X.astype(complex), Y, X, Y)], "cannot contain inputs of dtype complex128"),
        ([], "no client has any"),
    ],
)
def test_write_with_bad_client_raises_and_leaves_no_file(clients: Any, problem: str, tmp_path: Path) -> None:
    (tmp_path / "fed").write_text("old")
    with pytest.raises(ft.DataError, match=problem):
        ft.Federation.write(tmp_path / "fed", clients)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_file_that_cannot_be_written_raises(tmp_path: Path) -> None:
    with pytest.raises(ft.DataError, match=r"cannot be written to .* No such file or directory"):
        tiny_federation().save(tmp_path / "nowhere" / "fed")


def test_error_of_the_reader_is_not_an_error_of_the_file(tmp_path: Path) -> None:
    def clients() -> Iterator[Any]:
        yield "ann", X, Y, X, Y
        raise FileNotFoundError("bob's samples")

    with pytest.raises(FileNotFoundError, match="bob's samples"):
        ft.Federation.write(tmp_path / "fed", clients())
    assert not list(tmp_path.iterdir())


def test_damage_of_any_byte_is_found(tmp_path: Path) -> None:
    """Every byte is covered: those of the inputs with `verify`, and all others always, except the header's padding."""
    path, damaged = tmp_path / "fed", tmp_path / "damaged"
    tiny_federation((1, 1)).save(path)
    content = bytearray(path.read_bytes())
    first = 8 + int.from_bytes(content[:8], "little")
    padding = range(len(bytes(content[:first]).rstrip(b" ")), first)
    inputs = range(first, first + 8 * 4 * 12)
    for position in sorted({*range(0, len(content), 3)} - {*padding}):
        content[position] ^= 1
        damaged.write_bytes(content)
        content[position] ^= 1
        with pytest.raises(ft.DataError, match="damaged"):
            ft.Federation.from_file(damaged, verify=position in inputs)


@pytest.mark.parametrize("size", [0, 7, 8, 100, 5000, 8200, -1])
def test_truncated_file_raises(size: int, tmp_path: Path) -> None:
    tiny_federation().save(tmp_path / "fed")
    content = (tmp_path / "fed").read_bytes()
    (tmp_path / "fed").write_bytes(content[:size])
    with pytest.raises(ft.DataError, match="damaged"):
        ft.Federation.from_file(tmp_path / "fed")


def test_missing_file_and_folder_raise(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ft.DataError, match="There is no file"):
            ft.Federation.from_file(path)


def malicious(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header's entries of a federation file and make its checksum valid again."""
    path.write_bytes(change_federation(path.read_bytes(), change))


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["x"].update(shape=[10**12, 4]),
        lambda header: header["x"].update(shape=[10**12, 0], data_offsets=[0, 0]),
        lambda header: header["x"].update(shape=[41, -4]),
        lambda header: header["x"].update(shape=[82, 2]),
        lambda header: header["x"].update(dtype="I64", shape=[41, 2, 2, 1] * 30),
        lambda header: header["x"].update(dtype="O"),
        lambda header: header["y"].update(dtype="U8", shape=[328]),
        lambda header: header["train"].update(dtype="F64"),
        lambda header: header["train_sizes"].update(shape=[2, 2]),
        lambda header: header.update(train=header.pop("test"), test=header.pop("train")),
        lambda header: header.pop("y"),
        lambda header: header.update(x=7),
    ],
)
def test_malicious_header_raises_before_allocation(change: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    tiny_federation().save(tmp_path / "fed")
    malicious(tmp_path / "fed", lambda header: None)
    assert ft.Federation.from_file(tmp_path / "fed").num_clients == 4  # so that the errors below are specific
    malicious(tmp_path / "fed", change)
    with assert_memory_below(5 * MIB), pytest.raises(ft.DataError):
        ft.Federation.from_file(tmp_path / "fed")


def test_named_data_set_and_folder_are_converted(tmp_path: Path) -> None:
    path = tmp_path / "fed"
    found = Digits(clients=4, seed=3).convert(path)
    assert_same(found, ft.load("digits", clients=4, seed=3))
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", x=RNG.normal(size=(8, 3)), y=np.arange(8) % 2)
    data = FolderData(folder=str(tmp_path))
    assert_same(data.convert(path), data.load())
    again = ft.load("file", file=str(path), seed=5)
    assert again.settings == {"name": "file", "file": str(path), "seed": 5}
    for settings, problem in [({}, "needs data.file"), ({"file": str(path), "test": 0.5}, "no setting .* 'test'")]:
        with pytest.raises(ft.FedTailorError, match=problem):
            ft.load("file", **settings)
