"""Data sets with natural clients, the publisher's test set, and the cache of their tables."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import fedtailor as ft
from conftest import error_message
from fedtailor.data.dataset import OwnedData, PartitionedData
from fedtailor.data.download.cache import ensure_cached, read_cached
from fedtailor.data.sample_table import Array, SampleTable

Y = np.arange(60) % 3
TABLE = SampleTable(
    np.arange(60.0)[:, None], Y, 3, np.repeat([0, 1, 2], [10, 20, 30]), ("ann", "bob", "eve"), np.arange(60) % 5 == 4
)


@dataclass(frozen=True, kw_only=True)
class People(OwnedData):
    """Samples of three people."""

    name: ClassVar[str] = "people"
    owners: ClassVar[str] = "3 people"

    def read_folder(self, folder: Path) -> SampleTable:
        return TABLE


def test_natural_clients_are_owners_and_may_be_chosen_by_size_and_number() -> None:
    fed = People(folder="x", test="publisher").load()
    assert fed.names == ("ann", "bob", "eve") and [len(own) for own in fed.test] == [2, 4, 6]
    assert TABLE.is_test is not None and TABLE.is_test[np.concatenate(fed.test)].all()
    assert People(folder="x", min_size=20).load().names == ("bob", "eve")
    drawn = {People(folder="x", clients=1, seed=seed).load().names for seed in range(20)}
    assert drawn == {("ann",), ("bob",), ("eve",)}
    assert "3 owners have 2 samples or more" in error_message(People(folder="x", clients=4).load)


def test_publishers_test_set_is_divided_like_the_training_set_or_common_to_all() -> None:
    fed = People(folder="x", partition="pathological", classes_per_client=1, clients=3, test="publisher").load()
    for train, test in zip(fed.train, fed.test, strict=True):
        assert set(Y[train]) == set(Y[test]) and len(set(Y[train])) == 1 and len(test) == len(train) / 4
    common = People(folder="x", common_test="publisher").load().common_test
    assert common is not None and common.tolist() == list(range(4, 60, 5))
    both = People(folder="x", test="publisher", common_test="publisher")
    assert "not both" in error_message(both.load)


def test_several_owners_may_be_one_client() -> None:
    fed = People(folder="x", owners_per_client=2).load()
    assert fed.names == ("ann to bob", "eve") and [len(own) for own in fed.train] == [22, 22]


def test_clients_have_the_samples_that_a_file_lists(tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    path.write_text(json.dumps({"train": {"a": [9, 3], "b": [20]}, "test": {"a": [7], "b": []}}), encoding="utf-8")
    fed = People(folder="x", partition="indices", indices=str(path)).load()
    assert fed.names == ("a", "b") and [own.tolist() for own in (*fed.train, *fed.test)] == [[9, 3], [20], [7], []]
    path.write_text(json.dumps([[4, 5, 6, 9], [10, 14, 15]]), encoding="utf-8")
    fed = People(folder="x", partition="indices", indices=str(path), test="publisher").load()
    assert [own.tolist() for own in (*fed.train, *fed.test)] == [[5, 6], [10, 15], [4, 9], [14]]
    fed = People(folder="x", partition="indices", indices=str(path), test=0.5).load()
    assert [len(own) for own in fed.train] == [2, 2] or [len(own) for own in fed.train] == [2, 1]
    for data in (People(folder="x", partition="indices"), People(folder="x", indices=str(path))):
        assert "data.indices" in error_message(data.load)


def test_settings_of_partitions_reach_the_split() -> None:
    def sizes(**settings: Any) -> list[int]:
        fed = ft.load("digits", clients=10, **settings)
        return [len(train) + len(test) for train, test in zip(fed.train, fed.test, strict=True)]

    assert min(sizes(alpha=0.3, min_size=100)) == 100, "samples are moved"
    assert min(sizes(alpha=0.3, min_size=100, redraw=True)) > 100, "another split is drawn"
    capped, free = (max(max(sizes(alpha=0.01, cap=cap, seed=seed)) for seed in range(3)) for cap in (True, False))
    assert capped < 400 < free, "1/10 of all samples and one class, or several classes"
    assert max(sizes(partition="lognormal", log_std=0.1)) < 2 * min(sizes(partition="lognormal", log_std=0.1))
    assert sum(sizes(partition="lognormal", log_mean=3.0, log_std=0.5)) < 1000


def test_data_without_test_set_or_owners_says_so() -> None:
    class Plain(PartitionedData):
        name = "plain"

        def read(self) -> SampleTable:
            return SampleTable(TABLE.x, Y, 3)

    assert "no test set of its publisher" in error_message(Plain(clients=2, test="publisher").load)
    assert "no owners to split by" in error_message(Plain(partition="by_owner").load)


def test_cached_table_is_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path))
    x: dict[str, Array] = {"image": np.zeros((60, 2), np.uint8), "length": np.arange(60)}
    table = SampleTable(x, Y, 3, TABLE.owner, TABLE.owner_names, TABLE.is_test, ("a", "b", "c"))
    found = read_cached(ensure_cached("people", "source", 0, lambda work: table))
    assert isinstance(found.x, dict) and list(found.x) == ["image", "length"]
    for name, part in found.x.items():
        np.testing.assert_array_equal(part, x[name], strict=True)
    for column in ("y", "owner", "is_test"):
        np.testing.assert_array_equal(getattr(found, column), getattr(table, column), strict=True)
    assert (found.classes, found.owner_names, found.class_names) == (3, table.owner_names, ("a", "b", "c"))
