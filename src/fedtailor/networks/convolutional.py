"""Small convolutional networks."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import nn

from fedtailor.networks.layers import Shape, dense_layers, make_norm, require_image, sequential


@dataclass(frozen=True)
class LeNet5:
    """FedAPA's network: two 5×5 convolutions with 6 and 16 channels, then layers with 120 and 84 units."""

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        channels, height, width = require_image(shape, "lenet5", smallest=28)
        flat = 16 * _side_after_convolutions(height) * _side_after_convolutions(width)
        return sequential(
            conv1=nn.Conv2d(channels, 6, 5), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5), relu2=nn.ReLU(), pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(), **dense_layers(flat, (120, 84), outputs),
        )  # fmt: skip


def _side_after_convolutions(side: int) -> int:
    return ((side - 4) // 2 - 4) // 2


@dataclass(frozen=True)
class CNN:
    """FedAPM's network: two 3×3 convolutions with 16 and 32 channels, then a layer with 128 units."""

    norm: Annotated[str, "normalization after each convolution: none (as in the paper), group, or batch"] = "none"
    parts: ClassVar[dict[str, tuple[str, ...]]] = {"output": ("fc1", "head")}  # FedAPM's personal layers

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        channels, height, width = require_image(shape, "cnn", smallest=4)
        return sequential(
            conv1=nn.Conv2d(channels, 16, 3, padding=1), norm1=make_norm(self.norm, 16), relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(16, 32, 3, padding=1), norm2=make_norm(self.norm, 32), relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(), **dense_layers(32 * (height // 4) * (width // 4), (128,), outputs),
        )  # fmt: skip
