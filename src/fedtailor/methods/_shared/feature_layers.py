"""Small layers that methods insert between body and head."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.core.method import Setup
from fedtailor.core.trees import Params

FEATURE_SALT = 11  # salt of the random numbers that initialize added layers


def zero_feature(setup: Setup) -> Tensor:
    """Return a zero vector with one entry per input of the head."""
    return setup.like.new_zeros(setup.model.head_size[1])


def make_block(setup: Setup, salt: int, inputs: int, outputs: int) -> Params:
    """Create a linear layer and a layer normalization of its outputs, initialized as in PyTorch."""
    drawn = (2 * setup.uniform((inputs + 1, outputs), FEATURE_SALT, salt) - 1) / inputs**0.5
    weight, bias = drawn[:-1].T.contiguous(), drawn[-1]
    return {"weight": weight, "bias": bias, "scale": torch.ones_like(bias), "shift": torch.zeros_like(bias)}


def linear(block: Params, x: Tensor) -> Tensor:
    """Apply the linear layer of a block."""
    return F.linear(x, block["weight"], block["bias"])


def layer_norm(block: Params, x: Tensor) -> Tensor:
    """Apply the layer normalization of a block."""
    return F.layer_norm(x, block["scale"].shape, block["scale"], block["shift"])
