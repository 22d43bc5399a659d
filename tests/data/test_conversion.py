"""What users have: images, random transforms, labels of any kind, and clients with one sample."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset

import fedtailor as ft
from conftest import error_message
from fedtailor.analysis.tables import run_table
from support.datasets import ListDataset

RNG = np.random.default_rng(3)


@pytest.mark.parametrize(("mode", "shape"), [("L", (1, 4, 6)), ("RGB", (3, 4, 6)), ("1", (1, 4, 6)), ("P", (3, 4, 6))])
def test_from_dataset_with_pil_images_puts_channels_first(mode: str, shape: tuple[int, ...]) -> None:
    array = RNG.integers(0, 255, (4, 6, 3), np.uint8)
    image = Image.fromarray(array).convert(mode)
    fed = ft.Federation.from_dataset(ListDataset([(image, label % 2) for label in range(4)]), ["ann", "bob"] * 2)
    assert fed.shape == shape and isinstance(fed.x, Tensor) and fed.x.dtype == torch.uint8
    if mode == "RGB":
        np.testing.assert_array_equal(fed.x[0].permute(1, 2, 0), array)
    ft.simulate(ft.methods.FedAvg(), ft.network("mlp", fed), fed, rounds=1)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_from_dataset_with_random_transforms_warns(noise: float, caplog: pytest.LogCaptureFixture) -> None:
    class Noisy(ListDataset):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(3) + noise * torch.rand(3), self.samples[index]

    ft.Federation.from_dataset(Noisy([0, 1, 0, 1]), ["ann", "bob"] * 2)
    assert ("reads every sample once" in caplog.text) == bool(noise)


def test_owners_per_sample_and_indices_per_client_are_equal_everywhere() -> None:
    x, y = RNG.normal(size=(8, 2)), np.arange(8) % 2
    data, lists = TensorDataset(torch.as_tensor(x), torch.as_tensor(y)), [[0, 2, 4, 6], [1, 3, 5, 7]]
    forms: list[tuple[list[Any], list[str] | None]] = [(["ann", "bob"] * 4, None), (lists, ["ann", "bob"])]
    feds = [ft.Federation.from_owners(x, y, owners, names=names) for owners, names in forms]
    feds += [ft.Federation.from_dataset(data, owners, names=names) for owners, names in forms]
    for fed in feds:
        assert fed.names == ("ann", "bob")
        assert [own.tolist() for own in fed.test] == [own.tolist() for own in feds[0].test]


def test_text_labels_are_mapped_to_classes_with_names() -> None:
    x, y = np.zeros((4, 2)), np.array(["dog", "cat", "dog", "ant"])
    feds = [
        ft.Federation.from_arrays([(x, y, x, y)]),
        ft.Federation.from_owners(x, y, [[0, 1, 2, 3]]),
        ft.Federation.from_dataset(ListDataset(list(zip(x, y.tolist(), strict=True))), ["bob"] * 4),
    ]
    for fed in feds:
        assert fed.class_names == ("ant", "cat", "dog") and fed.classes == 3
        assert fed.y[:4].tolist() == [2, 1, 2, 0]


@pytest.mark.parametrize(
    ("y", "words"),
    [
        ([5, 7, 1001], "The labels are 5, 7, 1001, which are not the numbers from 0 to 2; pass classes=1002"),
        ([1, 2, 3], "pass classes=4"),
        ([0.0, 1.0, 1.0], "look like class numbers (0.0, 1.0); pass regression=False"),
    ],
)
def test_ambiguous_labels_are_not_guessed(y: list[float], words: str) -> None:
    x = np.zeros((3, 2))
    assert words in error_message(lambda: ft.Federation.from_arrays([(x, np.array(y), x, np.array(y))]))
    assert words in error_message(lambda: ft.Federation.from_owners(x, np.array(y), [[0, 1, 2]]))


def test_ambiguous_labels_follow_explicit_choice() -> None:
    x, y = np.zeros((3, 2)), np.array([0.0, 1.0, 1.0])
    assert ft.Federation.from_arrays([(x, np.array([5, 7, 9]), x, np.array([5, 7, 9]))], classes=10).classes == 10
    for regression, classes, dtype in ((True, None, torch.float64), (False, 2, torch.int64)):
        fed = ft.Federation.from_arrays([(x, y, x, y)], regression=regression)
        assert (fed.classes, fed.y.dtype) == (classes, dtype)
    assert ft.Federation.from_arrays([(x, y + 0.5, x, y)]).classes is None
    assert "fractions" in error_message(lambda: ft.Federation.from_arrays([(x, y + 0.5, x, y)], regression=False))


def test_client_with_one_sample_trains_and_is_not_tested() -> None:
    x, y = RNG.normal(size=(7, 4)), np.array([0, 1, 2, 0, 1, 2, 1])
    fed = ft.Federation.from_owners(x, y, ["ann"] * 6 + ["bob"])
    assert [len(own) for own in fed.train] == [4, 1] and [len(own) for own in fed.test] == [2, 0]
    run = ft.simulate(ft.methods.FedPer(), ft.network("mlp", fed), fed, rounds=2)
    assert run.records[-1]["clients"] == [0, 1]
    untested = ft.Federation.from_owners(x, y, [[0], [1], [2]])
    assert "No client has test data" in error_message(
        lambda: ft.simulate(ft.methods.FedPer(), ft.network("mlp", untested), untested, rounds=1)
    )
    assert run.records[-1]["per_client"]["accuracy_trained"].keys() == {0}
    assert "1 client without test samples: trained, not scored." in str(run_table(run).caption)
