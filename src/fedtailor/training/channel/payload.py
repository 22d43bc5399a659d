"""The payload of messages and uploads: what is sent, and its size in bytes."""

import torch
from torch import Tensor

from fedtailor.core.trees import Rows, Tree, leaves


def mask_absent_rows(tree: Tree) -> Tree:
    """Return a tree as it is received: absent rows are not sent, so they are zero.

    >>> mask_absent_rows({"t": Rows(torch.ones(2, 1), torch.tensor([True, False]))})["t"].values.tolist()
    [[1.0], [0.0]]
    """
    return {name: _mask_node(node) for name, node in tree.items()}


def _mask_node(node: Tree | Tensor | Rows) -> Tree | Tensor | Rows:
    if isinstance(node, Rows):
        present = node.present.reshape(node.present.shape + (1,) * (node.values.ndim - node.present.ndim))
        return Rows(torch.where(present, node.values, 0), node.present)
    return mask_absent_rows(node) if isinstance(node, dict) else node


def count_bytes(stacked: Tree, clients: int) -> list[int]:
    """Return the payload of each stacked client in bytes; booleans take one bit, and absent rows take none.

    >>> count_bytes({"w": torch.zeros(2, 3), "mask": torch.zeros(2, 9, dtype=torch.bool)}, 2)
    [14, 14]
    """
    bits = torch.zeros(clients, dtype=torch.int64)
    for _, leaf in leaves(stacked):
        if isinstance(leaf, Rows):
            width = leaf.values[0, 0].numel() * _bits_per_value(leaf.values)
            bits += leaf.present.sum(1).cpu() * width
        else:
            bits += leaf[0].numel() * _bits_per_value(leaf)
    return [-(-int(b) // 8) for b in bits]


def _bits_per_value(tensor: Tensor) -> int:
    return 1 if tensor.dtype == torch.bool else 8 * tensor.element_size()
