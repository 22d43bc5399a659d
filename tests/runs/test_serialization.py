"""Serialization of trees for files and messages."""

import torch

from conftest import same
from fedtailor.core.trees import Rows, Tree
from fedtailor.runs.serialization import pack, packed_size, unpack


def trees() -> list[Tree]:
    """Return trees with shared memory, transposed tensors, rows, empty tensors, and many leaves."""
    whole = torch.arange(24.0).reshape(2, 3, 4)
    rows = Rows(torch.randn(5, 3), torch.tensor([True, False, True, True, False]))
    many: Tree = {f"layer{number}.weight": torch.full((1, 2, 3, 1, number), 1.0) for number in range(300)}
    return [
        {},
        {"a": {}, "b": {"c": torch.tensor(3)}},
        {"one": whole[0], "other": whole[1], "all": whole, "again": whole, "turned": whole.mT},
        {"rows": rows, "none": torch.zeros(0, 4), "half": torch.ones(7, dtype=torch.bfloat16)},
        many,
    ]


def test_unpack_restores_packed_tree_of_bounded_size() -> None:
    for tree in trees():
        assert same(unpack(pack(tree)), tree)
        size = len(pack(tree))
        assert size <= packed_size(tree) <= 3 * size
