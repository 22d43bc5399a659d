"""Repeated splits and cross-validation inside every client: what is tested, what stays, and what is fitted anew."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedtailor as ft
from conftest import error_message
from fedtailor.data.datasets import DATASETS
from fedtailor.data.splits.resampling import draw_split
from fedtailor.errors import FedTailorError

CLASSES = np.repeat([0, 1, 2], [13, 6, 1])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.data(), st.integers(0, 5))
def test_draw_split_is_stratified_and_complete(labels: list[int], data: Any, repeat: int) -> None:
    """Of n samples of a class, the client's fraction of n is tested, rounded up or down, and of all samples exactly."""
    targets, num_test = np.array(labels), data.draw(st.integers(1, len(labels) - 1))
    train, test = draw_split(targets, num_test, repeat, client=0)
    assert sorted([*train, *test]) == list(range(len(targets))) and len(test) == num_test
    for label in set(labels):
        assert abs((targets[test] == label).sum() - num_test * labels.count(label) / len(labels)) < 1


def test_draw_split_depends_on_repeat_and_client() -> None:
    found = [tuple(draw_split(CLASSES, 5, repeat, client)[1]) for repeat in range(5) for client in range(2)]
    assert len(set(found)) == len(found)
    held_out = sum(19 in draw_split(CLASSES, 5, repeat, 0)[1] for repeat in range(400)) / 400
    assert 0.18 < held_out < 0.32, "the only sample of class 2 is tested in a quarter of the splits"


@given(st.lists(st.integers(0, 3), min_size=5, max_size=40), st.integers(2, 5), st.integers(0, 3))
def test_draw_split_folds_test_each_sample_once(labels: list[int], folds: int, repetition: int) -> None:
    """The folds of one cross-validation are equally large, in total and for each class, up to one sample."""
    targets = np.array(labels)
    splits = [draw_split(targets, 1, repetition * folds + fold, 0, folds) for fold in range(folds)]
    assert sorted(sample for _, test in splits for sample in test) == list(range(len(targets)))
    assert all(sorted([*train, *test]) == list(range(len(targets))) for train, test in splits)
    for counted in (targets >= 0, *(targets == label for label in set(labels))):
        sizes = [counted[test].sum() for _, test in splits]
        assert max(sizes) - min(sizes) <= 1


def test_draw_split_cross_validations_differ() -> None:
    first, second = ([set(draw_split(CLASSES, 1, r * 4 + fold, 0, 4)[1]) for fold in range(4)] for r in range(2))
    assert all(one != other for one in first for other in second)


@pytest.mark.parametrize("options", [{"repeat": 3}, {"repeat": 6, "folds": 4}])
def test_draw_split_numbers_are_stratified_by_quantiles(options: dict[str, int]) -> None:
    """Of 40 numbers, one of each four neighbors is tested, in any order of the samples."""
    numbers = np.random.default_rng(0).permutation(40) / 7
    _, test = draw_split(numbers, 10, client=0, **options)
    assert sorted((7 * numbers[test]).round().astype(int) // 4) == list(range(10))
    _, vectors = draw_split(np.stack([numbers, numbers], 1), 10, client=0, **options)
    assert len(vectors) == 10


def owned(fed: ft.Federation) -> list[set[int]]:
    return [set(torch.cat(pair).tolist()) for pair in zip(fed.train, fed.test, strict=True)]


def test_resplit_keeps_clients_and_samples_and_ignores_current_split() -> None:
    fed = ft.load("digits", clients=5, common_test=0.1)
    new = fed.resplit(2)
    assert owned(new) == owned(fed) and new.names == fed.names and new.x is fed.x
    assert list(map(len, new.test)) == list(map(len, fed.test))
    assert new.common_test is not None and torch.equal(new.common_test, fed.common_test)  # type: ignore[arg-type]
    assert all(set(a.tolist()) != set(b.tolist()) for a, b in zip(new.test, fed.test, strict=True))
    again = fed.resplit(7).resplit(2)
    assert all(torch.equal(a, b) for a, b in zip(again.test, new.test, strict=True))


def test_resplit_client_without_test_samples_stays_untested() -> None:
    x, y = torch.zeros(6, 2), torch.tensor([0, 1] * 3)
    fed = ft.Federation.from_arrays([(x, y, x[:0], y[:0]), (x, y, x, y)], names=["ann", "bob"])
    for new in (fed.resplit(0), fed.resplit(0, folds=12)):
        assert len(new.test[0]) == 0 and len(new.train[0]) == 6 and len(new.test[1]) > 0
    assert error_message(lambda: fed.resplit(0, folds=13)) == (
        "Client bob has 12 samples, too few for 13 folds; use fewer folds."
    )


@pytest.mark.parametrize("settings", [{}, {"test": "publisher"}, {"standardize": False, "normalize": "channel"}])
def test_resplit_fits_preprocessing_on_new_training_samples(settings: dict[str, Any]) -> None:
    """The raw features, standardized by hand with the new training samples only, are the new inputs."""
    fed, raw = ft.load("heart", **settings), ft.load("heart", standardize=False).x
    assert isinstance(raw, torch.Tensor)
    new = fed.resplit(4).resplit(1)
    inputs = new.make_preprocessing(torch.float64, torch.device("cpu"))(new.x)
    assert isinstance(inputs, torch.Tensor)
    is_common = "normalize" in settings  # by the training samples of all clients, with 1/n in the variance
    for client, test in enumerate(new.test):
        train = raw[torch.cat(new.train) if is_common else new.train[client]].double()
        std = train.std(0, correction=0 if is_common else 1)
        expected = (raw[test] - train.mean(0)) / torch.where(std > 0, std, 1)
        torch.testing.assert_close(inputs[test], expected, rtol=1e-4, atol=1e-4)


def test_load_repeat_is_resplit_and_is_recorded() -> None:
    fed, loaded = ft.load("heart").resplit(3, folds=5), ft.load("heart", repeat=3, folds=5)
    assert isinstance(fed.x, torch.Tensor) and isinstance(loaded.x, torch.Tensor) and torch.equal(fed.x, loaded.x)
    assert all(torch.equal(a, b) for a, b in zip(fed.test, loaded.test, strict=True))
    assert dict(fed.settings) == dict(loaded.settings) and loaded.settings["repeat"] == 3
    assert ft.load("heart").settings["repeat"] is None


def test_resplit_after_own_preprocessing_and_normalization_repeats_both() -> None:
    x, y = torch.arange(20.0)[:, None], torch.arange(20) % 2

    def center(fed: ft.Federation) -> ft.Federation:
        assert isinstance(fed.x, torch.Tensor)
        return replace(fed, x=fed.x - fed.x[fed.train[0]].mean())

    fed = ft.Federation.from_owners(x, y, ["ann"] * 20).with_preprocessing(center).with_normalization()
    for new in (fed, fed.resplit(5)):
        train = x[new.train[0]]
        assert new.mean == pytest.approx((0.0,), abs=1e-6) and isinstance(new.x, torch.Tensor)
        assert new.std == pytest.approx((float(train.std(correction=0)),), rel=1e-5)
        torch.testing.assert_close(new.x, x - train.mean())


def test_folder_of_clients_is_split_anew_also_when_it_is_converted(tmp_path: Path) -> None:
    """A client's own test set is pooled with its training samples."""
    (tmp_path / "sites").mkdir()
    x, y = np.arange(24.0).reshape(12, 2), np.arange(12) % 2
    for name in ("ann", "bob"):
        np.savez(tmp_path / "sites" / f"{name}.npz", x_train=x[:8], y_train=y[:8], x_test=x[8:], y_test=y[8:])
    data = DATASETS["folder"](folder=str(tmp_path / "sites"), repeat=1)  # type: ignore[call-arg]
    fed, converted = data.load(), data.convert(tmp_path / "fed.safetensors")
    assert [len(own) for own in fed.test] == [4, 4] and any((own < 8).any() for own in fed.test)
    assert all(torch.equal(a, b) for a, b in zip(fed.test, converted.test, strict=True))


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda: ft.load("heart", folds=5), "data.folds needs data.repeat, the number of a fold from 0."),
        (lambda: ft.load("heart", repeat=0, folds=1), "data.folds must be at least 2, or none, got 1."),
        (lambda: ft.load("heart").resplit(-1), "repeat must be an integer of at least 0, got -1."),
        (lambda: ft.load("gaussian", repeat=0), "The test samples of gaussian are true parameters"),
    ],
)
def test_resplit_invalid_settings_raise_errors(load: Any, message: str) -> None:
    with pytest.raises(FedTailorError) as error:
        load()
    assert str(error.value).startswith(message)
