"""Trees as bytes: what goes to disks and over wires."""

import torch

from conftest import same
from fedtailor.packing import pack, packed_size, unpack
from fedtailor.trees import Rows, Tree


def trees() -> list[Tree]:
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


def test_what_is_packed_comes_back_also_where_tensors_share_memory() -> None:
    for tree in trees():
        assert same(unpack(pack(tree)), tree)


def test_the_size_is_known_before_anything_is_packed() -> None:
    for tree in trees():
        size = len(pack(tree))
        assert size <= packed_size(tree) <= 3 * size
