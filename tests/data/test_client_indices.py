"""Splits by natural owners and by files of sample indices."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import error_message
from fedtailor.data.client_indices import ClientIndices, group_owners, read_indices
from fedtailor.data.partition import Indices

OWNER = np.array([4, 0, 0, 1, 2, 2, 2, 4, 4, 0])  # owner 3 has no samples
NAMES = ["ann", "bob", "cem", "dan", "eve"]


def lists(parts: tuple[Indices, ...] | None) -> list[list[int]]:
    assert parts is not None
    return [part.tolist() for part in parts]


def read(folder: Path, content: Any, samples: int = 6) -> ClientIndices:
    path = folder / "split.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return read_indices(path, samples)


def test_group_owners_leaves_out_small_owners() -> None:
    split = group_owners(OWNER, NAMES, min_size=2)
    assert split.names == ("ann", "cem", "eve") and split.test is None
    assert lists(split.train) == [[1, 2, 9], [4, 5, 6], [0, 7, 8]]


def test_group_owners_joins_consecutive_owners_and_keeps_incomplete_last_group() -> None:
    split = group_owners(OWNER, NAMES, owners_per_client=2)
    assert split.names == ("ann to bob", "cem to dan", "eve")
    assert lists(split.train) == [[1, 2, 3, 9], [4, 5, 6], [0, 7, 8]]


def test_group_owners_draws_clients_by_seed() -> None:
    owner, names = np.repeat(np.arange(30), 3), [str(number) for number in range(30)]
    draws = [group_owners(owner, names, clients=10, seed=seed) for seed in (0, 0, 1)]
    assert draws[0].names == draws[1].names != draws[2].names
    for split in draws:
        assert len(set(split.names)) == 10
        assert [set(owner[own]) for own in split.train] == [{int(name)} for name in split.names]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"owners_per_client": 0}, "owners_per_client"),
        ({"min_size": 5}, "smaller min_size"),
        ({"clients": 4}, "1 to 3 clients"),
        ({"clients": 0}, "1 to 3 clients"),
    ],
)
def test_group_owners_with_invalid_setting_names_it(settings: dict[str, int], named: str) -> None:
    assert named in error_message(lambda: group_owners(OWNER, NAMES, **settings))


def test_read_indices_accepts_lists_names_and_test_samples(tmp_path: Path) -> None:
    split = read(tmp_path, [[3, 0], [5]])
    assert (split.names, lists(split.train), split.test) == (("0", "1"), [[3, 0], [5]], None)
    split = read(tmp_path, {"ann": [3, 0], "bob": [5]})
    assert (split.names, lists(split.train), split.test) == (("ann", "bob"), [[3, 0], [5]], None)
    split = read(tmp_path, {"train": [[3], [5]], "test": [[0, 1], []]})
    assert (split.names, lists(split.train), lists(split.test)) == (("0", "1"), [[3], [5]], [[0, 1], []])
    split = read(tmp_path, {"train": {"ann": [3]}, "test": {"ann": [0]}})
    assert (split.names, lists(split.train), lists(split.test)) == (("ann",), [[3]], [[0]])


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
