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


def test_grow_preserves_bits_in_new_memory() -> None:
    bits, row = torch.tensor([[0.1, -0.0, float("nan"), 5e-324]], dtype=torch.float64), torch.arange(4.0).double()
    old = Rows(bits.clone(), torch.tensor([True]))
    found = grow({"r": old}, {"r": Rows(row.expand(3, 4), torch.tensor([False] * 3))})["r"]
    assert found.present.tolist() == [True, False, False] and found.values[1:].tolist() == [row.tolist()] * 2
    assert torch.equal(found.values[:1].view(torch.int64), bits.view(torch.int64))
    found.values.zero_()
    assert torch.equal(old.values.view(torch.int64), bits.view(torch.int64)) and row.tolist() == [0, 1, 2, 3]


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
