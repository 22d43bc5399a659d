"""What clients that join late get of what a server keeps of everyone: the mean of those who took part."""

import torch
from torch import Tensor

from fedtailor.trees import Tree, combine, flatten, put


def newcomer_shares(stacked: Tree, before: int) -> Tensor:
    """With which shares the clients from number `before` on mix everyone's rows, [newcomers, clients]: alike of those
    who took part, whose rows are no longer at the start as those of the newcomers are. While nobody did: its own.

    >>> newcomer_shares({"a": torch.tensor([[4.0], [8.0], [0.0], [0.0]])}, before=3)
    tensor([[0.5000, 0.5000, 0.0000, 0.0000]])
    """
    leaves = list(flatten(stacked).values())
    moved = torch.stack([(leaf != leaf[-1]).flatten(1).any(1) for leaf in leaves]).any(0)
    own = torch.eye(len(moved), dtype=leaves[0].dtype, device=moved.device)[before:]
    shares = moved.to(own) / moved.sum().clamp(min=1)
    return shares.expand_as(own) if bool(moved.any()) else own


def seat(stacked: Tree, shares: Tensor) -> Tree:
    """Everyone's rows, the last ones replaced by mixtures of all, one for each row of shares.

    >>> seat({"a": torch.tensor([4.0, 8.0, 0.0])}, torch.tensor([[0.5, 0.5, 0.0]]))
    {'a': tensor([4., 8., 6.])}
    """
    count = shares.shape[1]
    late = torch.arange(count - len(shares), count, device=shares.device)
    return put(stacked, late, combine(shares, stacked))
