"""Natural owners as clients."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import error_message
from fedtailor.data.splits.owners import choose_owners, group_by_owner

OWNER = np.array([4, 0, 0, 1, 2, 2, 2, 4, 4, 0])  # owner 3 has no samples
NAMES = ["ann", "bob", "cem", "dan", "eve"]


def choose(**changes: Any) -> tuple[list[str], list[list[int]]]:
    kind: dict[str, Any] = {"clients": None, "owners_per_client": 1, "min_size": 2, "seed": 0} | changes
    names, owned = choose_owners(OWNER, NAMES, **kind)
    return names, [own.tolist() for own in owned]


def test_choose_owners_leaves_out_small_owners() -> None:
    assert choose() == (["ann", "cem", "eve"], [[1, 2, 9], [4, 5, 6], [0, 7, 8]])


def test_choose_owners_joins_consecutive_owners_and_keeps_incomplete_last_group() -> None:
    assert choose(owners_per_client=2) == (
        ["ann to bob", "cem to dan", "eve"],
        [[1, 2, 3, 9], [4, 5, 6], [0, 7, 8]],
    )


def test_choose_owners_draws_clients_by_seed() -> None:
    draws = [choose(clients=2, seed=seed)[0] for seed in range(30)]
    assert {tuple(names) for names in draws} == {("ann", "cem"), ("ann", "eve"), ("cem", "eve")}
    assert draws == [choose(clients=2, seed=seed)[0] for seed in range(30)]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"owners_per_client": 0}, "owners_per_client"),
        ({"min_size": 5}, "0 owners have 5 samples or more"),
        ({"clients": 4}, "3 owners have 2 samples or more"),
        ({"clients": 0}, "3 owners have 2 samples or more"),
        ({"clients": 2, "owners_per_client": 5}, "1 groups of owners have 2 samples or more"),
        ({"clients": 2, "seed": -1}, "seed"),
    ],
)
def test_choose_owners_with_invalid_setting_names_it(changes: dict[str, Any], named: str) -> None:
    assert named in error_message(lambda: choose(**changes))


@settings(max_examples=100)
@given(st.lists(st.integers(-20, 20), min_size=1) | st.lists(st.text("ab1é", max_size=3), min_size=1))
def test_group_by_owner_returns_indices_of_each_owner(owners: list[Any]) -> None:
    names, owned = group_by_owner(owners)
    assert names == [str(owner) for owner in sorted(set(owners))]
    assert sorted(np.concatenate(owned).tolist()) == list(range(len(owners)))
    assert all(str(owners[i]) == name for name, own in zip(names, owned, strict=True) for i in own)


def test_group_by_owner_accepts_list_array_and_tensor() -> None:
    numbers = [10, 9, 10, 2]
    for owners in (numbers, np.array(numbers), torch.tensor(numbers), list(np.array(numbers)), tuple(numbers)):
        names, owned = group_by_owner(owners)  # type: ignore[arg-type]
        assert names == ["2", "9", "10"], "numbers are sorted numerically"
        assert [own.tolist() for own in owned] == [[3], [1], [0, 2]]


@pytest.mark.parametrize(
    ("owners", "named"),
    [
        (["ann", None], "sample 1"),
        (["ann", float("nan")], "sample 1"),
        ([float("nan"), 1.0], "sample 0"),
        ([("ann", 1), ("ann", 2)], "sample 0"),
        (np.zeros((3, 2)), "sample 0"),
        (["ann", 3], "all strings or all numbers"),
        ([], "no samples"),
    ],
)
def test_group_by_owner_with_invalid_owner_raises(owners: Any, named: str) -> None:
    assert named in error_message(lambda: group_by_owner(owners))
