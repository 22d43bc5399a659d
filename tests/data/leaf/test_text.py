"""Sent140 and Shakespeare from LEAF's JSON files, and GloVe vectors of a vocabulary."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import error_message
from fedtailor.data.leaf.glove import glove_matrix
from fedtailor.data.leaf.sent140 import read_sent140
from fedtailor.data.leaf.shakespeare import CHARACTERS, read_shakespeare
from support.leaf_files import save_leaf, tweet


def test_sent140_tokens_are_words_by_frequency(tmp_path: Path) -> None:
    tweets = ([tweet("good day, good day"), tweet("bad DAY... good!"), tweet("a " * 30)], ["4", "0", "2"])
    table = read_sent140(save_leaf(tmp_path, "all_data", {"ann": tweets}))
    words = ("a", ".", "good", "day", "!", ",", "DAY", "bad")
    assert table.vocabulary == words, "25 of the 30 a; words of the same frequency in alphabetical order"
    assert isinstance(table.x, np.ndarray) and table.x.dtype == np.int32 and table.x.shape == (3, 25)
    assert table.x[0].tolist() == [3, 4, 6, 3, 4] + [0] * 20
    assert table.x[1].tolist() == [8, 7, 2, 2, 2, 3, 5] + [0] * 18
    assert table.x[2].tolist() == [1] * 25
    assert table.y.tolist() == [1, 0, 0] and table.classes == 2


def test_sent140_vocabulary_is_from_the_training_files(tmp_path: Path) -> None:
    save_leaf(tmp_path, "train", {"bob": ([tweet("yes no"), tweet("no")], [1, 0])})
    save_leaf(tmp_path, "test", {"bob": ([tweet("maybe yes")], [1])})
    table = read_sent140(tmp_path)
    assert table.vocabulary == ("no", "yes")
    assert isinstance(table.x, np.ndarray) and table.x[:, :2].tolist() == [[2, 1], [1, 0], [0, 2]]


@pytest.mark.parametrize(
    "x, y, problem",
    [
        (tweet("hello"), 3, "labels that are not 0, 1"),
        (tweet("hello"), [], "labels that are not 0, 1"),
        (tweet("hello")[:4], 0, "tweets that are not lists of id"),
        ("hello", 0, "tweets that are not lists of id"),
    ],
)
def test_sent140_with_damaged_tweets_is_rejected(x: Any, y: Any, problem: str, tmp_path: Path) -> None:
    folder = save_leaf(tmp_path, "all_data", {"ann": ([x], [y])})
    assert problem in error_message(lambda: read_sent140(folder))


def test_shakespeare_has_leafs_characters_and_no_padding(tmp_path: Path) -> None:
    assert len(CHARACTERS) == 80
    line = CHARACTERS.replace("}", "é")
    table = read_shakespeare(save_leaf(tmp_path, "all_data", {"HAMLET": ([line, " " * 80], ["\n", "z"])}))
    assert isinstance(table.x, np.ndarray) and table.x.dtype == np.int32
    assert table.x[0].tolist() == list(range(1, 81)), "an unknown character is the last one, as in LEAF"
    assert table.x[1].tolist() == [2] * 80
    assert table.y.tolist() == [0, 78] and table.classes == 80 and table.class_names is not None
    assert table.class_names[:3] == ("newline", "space", "!")


def test_shakespeare_accepts_leafs_count_of_test_samples(tmp_path: Path) -> None:
    """LEAF's split counts the 79 test samples that it drops because they overlap with the training data."""
    role = ([" " * 80] * 2, ["a", "b"])
    save_leaf(tmp_path, "train", {"HAMLET": role})
    assert read_shakespeare(save_leaf(tmp_path, "test", {"HAMLET": role}, num_samples=[81])).num_samples == 4
    save_leaf(tmp_path, "test", {"HAMLET": role}, num_samples=[80])
    assert "num_samples of user HAMLET is 80" in error_message(lambda: read_shakespeare(tmp_path))
    save_leaf(tmp_path, "train", {"HAMLET": role}, num_samples=[81])
    assert "num_samples of user HAMLET is 81" in error_message(lambda: read_shakespeare(tmp_path))


@pytest.mark.parametrize(
    "x, y, problem", [("too short", "a", "inputs that are not 80 characters"), (" " * 80, "ab", "targets that are not")]
)
def test_shakespeare_with_damaged_samples_is_rejected(x: str, y: str, problem: str, tmp_path: Path) -> None:
    folder = save_leaf(tmp_path, "all_data", {"HAMLET": ([x], [y])})
    assert problem in error_message(lambda: read_shakespeare(folder))


def test_glove_matrix_has_one_row_per_token(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_text("the 1 2.5\n. . 3 4\ncafé -5e-1 6\n")  # a word may contain a space
    matrix = glove_matrix(path, ["café", "unknown", ". ."])
    assert matrix.dtype == np.float32 and matrix.tolist() == [[0, 0], [-0.5, 6], [0, 0], [3, 4]]


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "its first line"),
        ("the 1 2\na 1\n", "line 2 does not have 2 numbers"),
        ("the 1 x\n", "line 1 contains text"),
        ("the 1 nan\n", "line 1 contains NaN"),
    ],
)
def test_glove_matrix_rejects_other_files(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_text(text)
    assert problem in error_message(lambda: glove_matrix(path, ["the"]))
