"""Hypernetworks at the server: initialization, forward pass, and the gradient that trains them.

For a client i that was sent one model and returned another, the server minimizes J_i = ½‖sent − returned‖², so the
gradient of J_i with respect to the sent model is (sent − returned). Public code of pFedLA uses the opposite sign, and
the text of the pFedHN paper can be read that way; gradient descent with that sign ascends (see `printed_sign`).
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.core.method import Exchange, Setup
from fedtailor.core.trees import Params, Rows, Tree, sub

HYPERNETWORK_SALT = 5  # salt of the random numbers, distinct from those of the clients
_EMBEDDING, _TRUNK, OUTPUT_SALT = 0, 1, 2  # salts of the parts


def pseudo_gradient(exchange: Exchange, printed_sign: bool) -> Params:
    """Return sent − returned (or its negative) for the trainable parameters; 0 where nothing was communicated."""
    sent, returned = (
        {name: leaf.values[:, 0] if isinstance(leaf, Rows) else leaf for name, leaf in tree["params"].items()}
        for tree in (exchange.sent, exchange.received)
    )
    difference = sub(returned, sent) if printed_sign else sub(sent, returned)
    return exchange.model.trainable(difference)


def make_trunk(setup: Setup, widths: Sequence[int]) -> Tree:
    """Create linear layers with the given widths, initialized as in PyTorch."""
    return {
        str(number): {
            "weight": draw_uniform(setup, (outputs, inputs), inputs, _TRUNK, 2 * number),
            "bias": draw_uniform(setup, (outputs,), inputs, _TRUNK, 2 * number + 1),
        }
        for number, (inputs, outputs) in enumerate(pairwise(widths))
    }


def apply_trunk(trunk: Tree, embedding: Tensor) -> Tensor:
    """Apply the layers, with ReLU between them."""
    hidden = F.linear(embedding, **trunk["0"])
    for number in range(1, len(trunk)):
        hidden = F.linear(hidden.relu(), **trunk[str(number)])
    return hidden


def draw_uniform(setup: Setup, shape: tuple[int, ...], inputs: int, *salts: int) -> Tensor:
    """Draw uniform random numbers between −1/√inputs and 1/√inputs."""
    return (2 * setup.uniform(shape, HYPERNETWORK_SALT, *salts) - 1).div(inputs**0.5)


def draw_normal(setup: Setup, shape: tuple[int, ...]) -> Tensor:
    """Draw standard normal random numbers."""
    numbers: Tensor = torch.special.ndtri(setup.uniform(shape, HYPERNETWORK_SALT, _EMBEDDING))
    return numbers
