"""LEAF's data sets by name: natural clients, the cache, and training with the default network."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtailor as ft
from conftest import error_message
from fedtailor.data.datasets import DATASETS
from fedtailor.data.images.datasets import EMNIST
from fedtailor.data.leaf import datasets
from fedtailor.data.leaf.femnist import read_femnist
from fedtailor.data.sample_table import SampleTable
from support.examples import run_example
from support.leaf_files import Samples, gray_image, save_leaf, tweet


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path / "cache"))


def images(count: int, label: int = 0) -> Samples:
    return [gray_image(byte) for byte in range(count)], [label] * count


def save_femnist(folder: Path) -> str:
    save_leaf(folder, "train", {"ann": images(4), "bob": images(1), "eve": images(9, 61)})
    return str(save_leaf(folder, "test", {"ann": images(2), "bob": images(1), "eve": images(1)}))


def test_clients_are_writers_with_enough_samples(tmp_path: Path) -> None:
    folder = save_femnist(tmp_path)
    fed = ft.load("femnist", folder=folder, test="publisher")
    assert fed.names == ("ann", "bob", "eve") and fed.classes == 62
    assert [len(own) for own in fed.train] == [4, 1, 9] and [len(own) for own in fed.test] == [2, 1, 1]
    assert ft.load("femnist", folder=folder, min_size=3).names == ("ann", "eve")
    assert ft.load("femnist", folder=folder, clients=2, seed=3).num_clients == 2


def test_users_that_leaf_split_into_training_and_test_users_are_pooled(tmp_path: Path) -> None:
    save_leaf(tmp_path, "train", {"ann": images(4)})
    folder = str(save_leaf(tmp_path, "test", {"bob": images(4)}))
    fed = ft.load("femnist", folder=folder)
    assert fed.names == ("ann", "bob") and all(len(own) for own in fed.test)
    assert "no test set" in error_message(lambda: ft.load("femnist", folder=folder, test="publisher"))


def test_files_are_converted_once_until_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_femnist(tmp_path)
    assert not datasets.FEMNIST().is_available
    path = datasets.FEMNIST(folder=folder).download()
    assert path is not None and path.is_relative_to(tmp_path / "cache") and datasets.FEMNIST().is_available
    before = ft.load("femnist", folder=folder)
    read = list[Path]()

    def count_reads(path: Path) -> SampleTable:
        read.append(path)
        return read_femnist(path)

    monkeypatch.setattr(datasets, "read_femnist", count_reads)
    (tmp_path / "data" / "raw_data").mkdir()
    (tmp_path / "data" / "raw_data" / "image.png").touch()  # LEAF keeps 800,000 of them, which are not read
    after = ft.load("femnist", folder=folder, partition="iid", clients=2)
    assert not read and before.sample_hash() == after.sample_hash() and before.class_names == after.class_names
    save_leaf(tmp_path, "train", {"ann": images(5), "bob": images(1), "eve": images(9, 61)})
    os.utime(tmp_path / "data" / "train" / "all_data_0_niid_0_keep_0.json", (1, 1))
    assert ft.load("femnist", folder=folder).num_clients == 3 and len(read) == 1


def test_sent140_keeps_the_most_frequent_words(tmp_path: Path) -> None:
    tweets = ([tweet("yes"), tweet("yes no"), tweet("no maybe yes")], [1, 0, 1])
    folder = str(save_leaf(tmp_path, "all_data", {"ann": tweets}))
    for words, expected in ((2, [2, 0, 1]), (None, [2, 3, 1])):
        data = datasets.Sent140(folder=folder, words=words, min_size=2)
        x = data.load().x
        assert isinstance(x, Tensor) and x[2, :3].tolist() == expected
        assert data.read().vocabulary == ("yes", "no", "maybe")[:words]
    assert "data.words must be" in error_message(lambda: datasets.Sent140(words=0))


def test_letters_are_a_to_j_and_clients_have_consecutive_ones(tmp_path: Path) -> None:
    """The images of the other characters, here 5, Z, and k, are left out."""
    labels = [36 + number % 10 for number in range(1200)] + [5, 35, 46]
    table = SampleTable(np.zeros((len(labels), 1, 28, 28), np.uint8), np.array(labels), 62)
    data = datasets.FEMNISTLetters(folder=str(tmp_path), clients=20, log_mean=2.0, log_std=0.1, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "read_femnist", lambda folder: table)
        patch.setattr(datasets.LeafData, "fingerprint", lambda self, folder: "0" * 64)
        fed = data.load()
    assert fed.class_names == tuple("abcdefghij") and fed.num_clients == 20
    own = [torch.cat(pair) for pair in zip(fed.train, fed.test, strict=True)]
    for client, samples in enumerate(own):
        assert set(fed.y[samples].tolist()) == {(client + step) % 10 for step in range(5)}
    assert torch.bincount(torch.cat(own)).max() == 1, "no two clients share an image"


def test_letters_without_a_folder_are_those_of_emnist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its byclass labels are LEAF's: 36 to 45 are a to j."""
    table = SampleTable(np.zeros((4, 1, 28, 28), np.uint8), np.array([45, 9, 36, 61]), 62)
    monkeypatch.setattr(EMNIST, "read", lambda self: table)
    assert datasets.FEMNISTLetters().read().y.tolist() == [9, 0]


def test_glove_example_writes_one_row_per_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_leaf(tmp_path, "all_data", {"ann": ([tweet("good day"), tweet("good")], [1, 0])})
    (tmp_path / "glove.txt").write_text("day 1 2\ngood 3 4\n")
    matrix = tmp_path / "glove.npy"
    run_example(monkeypatch, "glove_vectors.py", folder, tmp_path / "glove.txt", matrix)
    assert np.load(matrix).tolist() == [[0, 0], [3, 4], [1, 2]]
    assert "2 of 2 words have vectors of 2 numbers" in capsys.readouterr().out
    fed = ft.load("sent140", folder=str(folder), words=None, min_size=2)
    assert ft.network("lstm", fed, pretrained=str(matrix), hidden=4).description["vocabulary"] == 3


def samples_of(name: str, count: int) -> Samples:
    if name == "femnist":
        return images(count)
    if name == "sent140":
        return [tweet(f"word {number} !") for number in range(count)], [0, 1] * (count // 2)
    return [("To be, or not to be" * 5)[:80]] * count, ["a", "z"] * (count // 2)


@pytest.mark.parametrize("name", ["femnist", "sent140", "shakespeare"])
def test_default_network_trains_on_natural_clients(name: str, tmp_path: Path) -> None:
    folder = save_leaf(tmp_path, "all_data", {user: samples_of(name, 4) for user in ("ann", "bob")})
    fed = ft.load(name, folder=str(folder), min_size=2)
    network = DATASETS[name].network
    assert network is not None
    run = ft.simulate(ft.methods.FedAvg(), ft.network(network, fed), fed, rounds=1)
    assert run.num_clients == 2 and np.isfinite(run.records[-1]["loss_trained"]).all()


@pytest.mark.parametrize("name", ["femnist", "sent140", "shakespeare"])
def test_download_explains_how_to_make_the_files(name: str) -> None:
    text = error_message(lambda: DATASETS[name]().download())
    assert f"preprocess.sh -s niid --sf 1.0 -k 0 -t sample in data/{name} of" in text and "data.folder" in text
