"""FEMNIST from LEAF's JSON files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import error_message
from fedtailor.data.leaf import json_stream
from fedtailor.data.leaf.femnist import read_femnist
from support.leaf_files import gray_image, leaf_content, save_leaf

ANN = ([gray_image(0), gray_image(200)], [10, 61])
BOB = ([gray_image(7)], [0])


def femnist_error(folder: Path) -> str:
    return error_message(lambda: read_femnist(folder))


def save_text(folder: Path, text: str) -> Path:
    (folder / "data" / "all_data").mkdir(parents=True, exist_ok=True)
    (folder / "data" / "all_data" / "all_data_0.json").write_text(text)
    return folder


def test_writers_images_and_split_are_those_of_the_files(tmp_path: Path) -> None:
    save_leaf(tmp_path, "train", {"zoe": BOB, "ann": ANN})
    save_leaf(tmp_path, "train", {"bob": BOB}, 1)
    save_leaf(tmp_path, "test", {"ann": BOB, "bob": BOB})
    table = read_femnist(tmp_path)
    assert table.owner_names == ("ann", "bob", "zoe")
    assert table.owner is not None and table.owner.tolist() == [2, 0, 0, 1, 0, 1]
    assert table.is_test is not None and table.is_test.tolist() == [False] * 4 + [True] * 2
    assert table.y.tolist() == [0, 10, 61, 0, 0, 0] and table.classes == 62
    assert table.class_names is not None and "".join(table.class_names[i] for i in (0, 9, 10, 36, 61)) == "09Aaz"
    assert isinstance(table.x, np.ndarray) and table.x.dtype == np.uint8 and table.x.shape == (6, 1, 28, 28)
    assert table.x[:, 0, 0, 0].tolist() == [7, 0, 200, 7, 7, 7] and table.x[:, 0, 27, 27].tolist() == [255] * 6


def test_every_byte_is_converted_exactly(tmp_path: Path) -> None:
    images = [[(image * 784 + pixel) % 256 / 255 for pixel in range(784)] for image in range(2)]
    x = read_femnist(save_leaf(tmp_path, "all_data", {"ann": (images, [1, 2])})).x
    assert isinstance(x, np.ndarray) and x.ravel().tolist() == [k % 256 for k in range(2 * 784)]


def test_other_numbers_than_bytes_are_kept_as_floats(tmp_path: Path) -> None:
    """One pixel that is not k / 255 makes all images float32, with the values that training makes of bytes."""
    images = {"ann": BOB, "bob": ([[0.3] + [1.0] * 783], [3]), "eve": BOB}
    x = read_femnist(save_leaf(tmp_path, "all_data", images)).x
    assert isinstance(x, np.ndarray) and x.dtype == np.float32
    np.testing.assert_array_equal(x[:, 0, 0, 0], np.array([7 / 255, 0.3, 7 / 255], np.float32))


def test_folder_with_the_json_folders_is_read_as_well(tmp_path: Path) -> None:
    save_leaf(tmp_path, "all_data", {"ann": ANN})
    assert read_femnist(tmp_path / "data").num_samples == 2
    assert read_femnist(tmp_path).is_test is None


def test_values_longer_than_a_chunk_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any position of a chunk's end, also inside of a name or between two values."""
    save_leaf(tmp_path, "all_data", {"ann": ANN, "bob": BOB})
    expected = read_femnist(tmp_path)
    for chunk in (1, 2, 3, 5, 7, 11, 100):
        monkeypatch.setattr(json_stream, "_CHUNK", chunk)
        np.testing.assert_array_equal(read_femnist(tmp_path).x, expected.x)


def test_users_may_follow_their_data_and_empty_users_are_skipped(tmp_path: Path) -> None:
    """LEAF's split by sample keeps users with fewer than two samples in user_data, without data."""
    content = leaf_content({"ann": ANN, "bob": ([], [])}, users=["ann"], num_samples=[2], hierarchies=["a", "b"])
    save_text(tmp_path, json.dumps(dict(reversed(content.items())), indent=1))
    assert read_femnist(tmp_path).owner_names == ("ann",)


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"num_samples": [3]}, "num_samples of user ann is 3, but it has 2 samples"),
        ({"users": ["ann", "bob"], "num_samples": [2, 1]}, "num_samples of user bob is 1, but it has no data"),
        ({"users": [], "num_samples": []}, "user ann is not in its list of users"),
        ({"users": ["ann"] * 2, "num_samples": [2, 2]}, "its list of users has a name twice"),
        ({"num_samples": []}, "does not have lists users and num_samples"),
        ({"user_data": [1]}, "'{' is missing"),
        ({"user_data": {"ann": {"x": [1]}}}, "user ann does not have lists x and y of the same length"),
        ({"user_data": {"ann\x1b": {"x": [], "y": []}}}, "a name that is too long or cannot be printed"),
        ({"user_data": {"ann": {"x": [[1.0] * 783] * 2, "y": [0, 0]}}}, "images that are not lists of 784 numbers"),
        ({"user_data": {"ann": {"x": [[1.0], [1.0, 0.5]], "y": [0, 0]}}}, "images that are not lists of 784 numbers"),
        ({"user_data": {"ann": {"x": [["a"] * 784], "y": [0]}}}, "images that are not lists of 784 numbers"),
        ({"user_data": {"ann": {"x": [[2.0] * 784], "y": [0]}}}, "pixels that are not from 0 to 1"),
        ({"user_data": {"ann": {"x": [gray_image(0)], "y": [62]}}}, "labels that are not integers from 0 to 61"),
        ({"user_data": {"ann": {"x": [gray_image(0)], "y": [0.5]}}}, "labels that are not integers from 0 to 61"),
        ({"user_data": {}, "users": [], "num_samples": []}, "contain no samples"),
    ],
)
def test_damaged_content_is_named(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    assert problem in femnist_error(save_leaf(tmp_path, "all_data", {"ann": ANN}, **changes))


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "'{' is missing"),
        ("[]", "'{' is missing"),
        ('{"users": ["ann"]', "is missing"),
        ('{"users": ["ann"', "delimiter"),
        ('{"users": [NaN]}', "it contains NaN"),
        ('{"users": 5}', "a list, an object, or a string is missing"),
        ('{"users": [], "num_samples": []} {}', "it does not end after its last value"),
        ('{"users": ' + "[" * 10**5, "nested too deeply"),
        ('{"user_data": {"ann": {"x": [], "y": []}, "ann": {"x": [], "y": []}}}', "contains user ann twice"),
    ],
)
def test_text_that_is_not_one_of_leafs_files_is_rejected(text: str, problem: str, tmp_path: Path) -> None:
    assert problem in femnist_error(save_text(tmp_path, text))


def test_value_that_is_too_long_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "_CHUNK", 10)
    monkeypatch.setattr(json_stream, "_MAX_VALUE", 100)
    assert "more than 100 characters" in femnist_error(save_leaf(tmp_path, "all_data", {"ann": ANN}))


def test_missing_files_are_explained(tmp_path: Path) -> None:
    assert "preprocess.sh" in femnist_error(tmp_path) and "data/femnist" in femnist_error(tmp_path)
    save_leaf(tmp_path, "train", {"ann": ANN})
    assert f"'{tmp_path / 'data' / 'test'}' has none" in femnist_error(tmp_path)


def test_user_in_two_training_files_is_rejected(tmp_path: Path) -> None:
    for number in range(2):
        save_leaf(tmp_path, "all_data", {"ann": ANN}, number)
    assert "User ann is in 'all_data_0_niid_0_keep_0.json' and 'all_data_1_" in femnist_error(tmp_path)


def test_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    save_leaf(tmp_path / "other", "train", {"ann": ANN})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "data").symlink_to(tmp_path / "other" / "data")
    assert "is a link that leads out of" in femnist_error(tmp_path / "mine")
