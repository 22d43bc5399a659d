"""Trees grow when clients join: old entries keep their values, and new entries are added."""

import pytest
import torch

from conftest import error_message
from fedtailor.core.trees import Rows, Tree, grow


def test_grow_keeps_old_entries_and_adds_new_ones() -> None:
    old = {"a": {"m": torch.tensor([[1, 2], [3, 4]])}, "n": torch.tensor(5.0)}
    fresh = {"n": torch.tensor(0.0), "a": {"m": torch.arange(9).reshape(3, 3) * 10}}
    found = grow(old, fresh)
    assert found["a"]["m"].tolist() == [[1, 2, 20], [3, 4, 50], [60, 70, 80]]
    assert found["n"] is old["n"] and list(found) == ["a", "n"]


def test_grow_returns_new_memory() -> None:
    old, row = torch.tensor([[1.0, 2.0]]), torch.tensor([7.0, 8.0])
    found = grow({"a": old}, {"a": row.expand(3, 2)})["a"]
    assert found.tolist() == [[1.0, 2.0], [7.0, 8.0], [7.0, 8.0]]
    found += 1
    assert old.tolist() == [[1.0, 2.0]] and row.tolist() == [7.0, 8.0]


def test_grow_preserves_bits() -> None:
    old = torch.tensor([0.1, -0.0, float("nan"), 5e-324], dtype=torch.float64)
    found = grow({"a": old}, {"a": torch.zeros(6, dtype=torch.float64)})["a"]
    assert torch.equal(found[:4].view(torch.int64), old.view(torch.int64))


def test_grow_supports_rows() -> None:
    old = Rows(torch.tensor([[1.0]]), torch.tensor([True]))
    found = grow({"r": old}, {"r": Rows(torch.zeros(2, 1), torch.tensor([False, False]))})["r"]
    assert found.values.tolist() == [[1.0], [0.0]] and found.present.tolist() == [True, False]


ONE = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("old", "fresh", "path"),
    [
        pytest.param({"a": ONE}, {"a": torch.ones(3, 1)}, "'a' has the shape (2, 2)", id="smaller"),
        pytest.param({"a": ONE}, {"a": torch.ones(2, 2, 1)}, "'a' has the shape (2, 2)", id="another axis"),
        pytest.param({"t": {"a": ONE}}, {"t": {"b": ONE}}, "'t/a'", id="another name"),
        pytest.param({"a": ONE, "b": ONE}, {"a": ONE}, "'b'", id="missing name"),
        pytest.param({"a": ONE}, {"a": ONE, "b": ONE}, "'b'", id="additional name"),
        pytest.param({"t": {"a": ONE}}, {"t": {"a": ONE.double()}}, "'t/a'", id="another dtype"),
        pytest.param({"a": ONE}, {"a": {"b": ONE}}, "'a'", id="tree instead of tensor"),
        pytest.param({"a": ONE}, {"a": Rows(ONE, ONE[0] > 0)}, "'a'", id="rows instead of tensor"),
    ],
)
def test_grow_with_incompatible_trees_raises(old: Tree, fresh: Tree, path: str) -> None:
    assert path in error_message(lambda: grow(old, fresh))
