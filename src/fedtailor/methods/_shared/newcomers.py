"""Initial rows for newcomers in the state that the server stores per client."""

import torch
from torch import Tensor

from fedtailor.core.trees import Tree, combine, flatten, put


def newcomer_shares(stacked: Tree, before: int) -> Tensor:
    """Return the shares with which newcomers mix the rows of all clients: [newcomers, clients].

    Newcomers are the clients from index `before` on. All clients that have taken part get equal shares; their rows
    differ from the initial row, which newcomers still have. If no client has taken part, each newcomer has its own row.

    >>> newcomer_shares({"a": torch.tensor([[4.0], [8.0], [0.0], [0.0]])}, before=3)
    tensor([[0.5000, 0.5000, 0.0000, 0.0000]])
    """
    leaves = list(flatten(stacked).values())
    moved = torch.stack([(leaf != leaf[-1]).flatten(1).any(1) for leaf in leaves]).any(0)
    own = torch.eye(len(moved), dtype=leaves[0].dtype, device=moved.device)[before:]
    shares = moved.to(own) / moved.sum().clamp(min=1)
    return shares.expand_as(own) if bool(moved.any()) else own


def set_newcomer_rows(stacked: Tree, shares: Tensor) -> Tree:
    """Replace the rows of the newcomers, the last ones, by mixtures of all rows, one per row of `shares`.

    >>> set_newcomer_rows({"a": torch.tensor([4.0, 8.0, 0.0])}, torch.tensor([[0.5, 0.5, 0.0]]))
    {'a': tensor([4., 8., 6.])}
    """
    count = shares.shape[1]
    newcomers = torch.arange(count - len(shares), count, device=shares.device)
    return put(stacked, newcomers, combine(shares, stacked))
