"""Files of sample indices."""

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import error_message
from fedtailor.data.splits.client_indices import ClientIndices, read_indices


def read(folder: Path, content: Any, samples: int = 6) -> ClientIndices:
    path = folder / "split.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return read_indices(path, samples)


@pytest.mark.parametrize(
    ("content", "names", "samples", "test"),
    [
        ([[3, 0], [5]], ("0", "1"), [[3, 0], [5]], None),
        ({"ann": [3, 0], "bob": [5]}, ("ann", "bob"), [[3, 0], [5]], None),
        ({"train": [[3], [5]], "test": [[0, 1], []]}, ("0", "1"), [[3, 0, 1], [5]], [0, 1]),
        ({"train": {"ann": [3]}, "test": {"ann": [0]}}, ("ann",), [[3, 0]], [0]),
        ({"test": {"ann": [0]}, "train": {"ann": [3]}}, ("ann",), [[3, 0]], [0]),
    ],
)
def test_read_indices_accepts_lists_names_and_test_samples(
    tmp_path: Path, content: Any, names: tuple[str, ...], samples: list[list[int]], test: list[int] | None
) -> None:
    split = read(tmp_path, content)
    assert (split.names, [own.tolist() for own in split.samples]) == (names, samples)
    assert (None if split.is_test is None else split.is_test.nonzero()[0].tolist()) == test


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[[1, 2]", "not valid JSON"),
        ("3", "one list of sample indices per client"),
        ([], "at least one client"),
        ([[0, 1], [2, 1]], "Sample 1 is owned twice"),
        ({"train": [[0]], "test": [[0]]}, "Sample 0 is owned twice"),
        ({"train": {"ann": [0]}, "test": {"bob": [1]}}, "the same clients"),
        ({"train": [0], "test": [1]}, "client 0"),
        ({"ann": [0], "bob": [6]}, "from 0 to 5 for client bob"),
        ([[-1]], "from 0 to 5"),
        ([[10**30]], "from 0 to 5"),
        ([[0.0]], "from 0 to 5"),
        ([[True]], "from 0 to 5"),
    ],
)
def test_read_indices_of_invalid_file_names_problem(tmp_path: Path, content: Any, named: str) -> None:
    assert named in error_message(lambda: read(tmp_path, content))


def test_read_indices_of_missing_file_names_it(tmp_path: Path) -> None:
    assert "nowhere.json" in error_message(lambda: read_indices(tmp_path / "nowhere.json", 6))
