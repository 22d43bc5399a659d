"""Uploads that change far more than those of the other clients of the round."""

from collections.abc import Mapping
from statistics import median

from fedtailor.core.trees import Tree, leaves
from fedtailor.core.updates import float_values, norms, updates

_MIN_CLIENTS = 3  # with two, nobody can tell which one is right


def update_norms(upload: Tree, sent: Tree) -> dict[str, float]:
    """Return the norm of the update in each part of one client's upload; both trees are stacked, with a single row.

    Parts without a matrix are left out: numbers of samples, losses, and the like may differ by orders of magnitude
    between clients.

    >>> import torch
    >>> update_norms({"params": {"w": torch.tensor([[[3.0, 4.0]]])}, "loss": torch.tensor([9.0])}, {})
    {'params': 5.0}
    """
    found: dict[str, float] = {}
    for name, part in upload.items():
        values = [float_values(leaf) for _, leaf in leaves({name: part})]
        if max((tensor.ndim for tensor in values if tensor is not None), default=0) < 3:
            continue
        if (lengths := norms(updates({name: part}, {name: sent.get(name)}))) is not None:
            found[name] = float(lengths[0])
    return found


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
