"""Uploads that change far more than those of the other clients of the round."""

from collections.abc import Mapping
from statistics import median

from fedtailor.core.system import to_float64
from fedtailor.core.trees import Tree, flatten

_MIN_CLIENTS = 3  # with two, nobody can tell which one is right


def update_norms(upload: Tree, sent: Tree) -> dict[str, float]:
    """Return the norm of the change in each part of an upload: of the difference to what was sent, where it was sent.

    Parts without a matrix are left out: numbers of samples, losses, and the like may differ by orders of magnitude
    between clients.

    >>> import torch
    >>> update_norms({"params": {"w": torch.tensor([[3.0, 4.0]])}, "loss": torch.tensor(9.0)}, {})
    {'params': 5.0}
    """
    before, squares = flatten(sent), dict[str, float]()
    for part, tree in upload.items():
        leaves = flatten({part: tree})
        floats = {path: leaf for path, leaf in leaves.items() if leaf.is_floating_point()}
        if max((leaf.ndim for leaf in floats.values()), default=0) < 2:
            continue
        squares[part] = 0.0
        for path, leaf in floats.items():
            change = to_float64(leaf) - to_float64(before[path]) if path in before else to_float64(leaf)
            squares[part] += float(change.square().sum())
    return {part: square**0.5 for part, square in squares.items()}


def find_outliers(norms: Mapping[int, Mapping[str, float]], factor: float) -> dict[int, str]:
    """Return the clients with a norm of more than `factor` times the median over all clients, with the reason.

    >>> find_outliers({0: {"params": 1.0}, 1: {"params": 2.0}, 2: {"params": 5e5}}, factor=10)
    {2: "its upload 'params' changes 2.5e+05 times as much as the median"}
    """
    found: dict[int, str] = {}
    for part in sorted({part for by_part in norms.values() for part in by_part}):
        by_client = {client: by_part[part] for client, by_part in norms.items() if part in by_part}
        usual = median(by_client.values())
        if len(by_client) < _MIN_CLIENTS or not usual > 0:
            continue
        for client, norm in by_client.items():
            if norm > factor * usual:
                found.setdefault(client, f"its upload '{part}' changes {norm / usual:.2g} times as much as the median")
    return found
