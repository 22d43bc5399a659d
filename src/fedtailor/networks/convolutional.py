"""Small convolutional networks."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import nn

from fedtailor.core.fields import check_fields
from fedtailor.errors import ConfigError
from fedtailor.networks.layers import (
    LayerCount,
    Shape,
    Width,
    check_pooled_channels,
    check_sizes,
    dense_layers,
    make_norm,
    require_image,
    sequential,
)


@dataclass(frozen=True)
class LeNet5:
    """FedAPA's network: two 5×5 convolutions with 6 and 16 channels, then layers with 120 and 84 units."""

    inputs: ClassVar[str] = "images of at least 28×28 pixels"
    used_by: ClassVar[str] = "FedAPA (Fashion-MNIST, CIFAR-10, CIFAR-100), Self-FL (CIFAR-10)"

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
    """Convolutions, each followed by max-pooling, and linear layers; the defaults are FedAPM's network."""

    norm: Annotated[str, "normalization after each convolution: none (as in the paper), group, or batch"] = "none"
    channels: Annotated[tuple[int, ...], "channels of the convolutions"] = (16, 32)
    kernel: Annotated[Width, "side of the convolutions' kernels"] = 3
    padded: Annotated[bool, "whether a convolution keeps the size of its input"] = True
    repeats: Annotated[LayerCount, "convolutions with the same number of channels before each pooling"] = 1
    hidden: Annotated[tuple[int, ...], "widths of the linear layers before the head"] = (128,)
    inputs: ClassVar[str] = "images"
    used_by: ClassVar[str] = "FedAPM (CIFAR-10); with other settings, LEAF (FEMNIST), FedLAG's code (EMNIST, CIFAR)"

    def __post_init__(self) -> None:
        check_fields(self, "network.")
        check_pooled_channels(self.channels, self.repeats)
        check_sizes("hidden", self.hidden)
        if self.padded and self.kernel % 2 == 0:
            raise ConfigError(f"network.kernel must be odd if padded is true, got {self.kernel}.")

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """The personal layers of FedAPM: all linear layers."""
        return {"output": (*(f"fc{number}" for number, _ in enumerate(self.hidden, start=1)), "head")}

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        before, height, width = require_image(shape, "cnn", self._smallest_side)
        layers: dict[str, nn.Module] = {}
        for group, after in enumerate(self.channels):
            for number in range(group * self.repeats + 1, (group + 1) * self.repeats + 1):
                convolution = nn.Conv2d(before, after, self.kernel, padding=self.kernel // 2 if self.padded else 0)
                layers |= {f"conv{number}": convolution, f"norm{number}": make_norm(self.norm, after)}
                layers |= {f"relu{number}": nn.ReLU()}
                before = after
            layers |= {f"pool{group + 1}": nn.MaxPool2d(2)}
        flat = before * self._side_after(height) * self._side_after(width)
        return sequential(**layers, flatten=nn.Flatten(), **dense_layers(flat, tuple(self.hidden), outputs))

    @property
    def _border(self) -> int:
        """What the convolutions before a pooling take from the side of an image."""
        return 0 if self.padded else self.repeats * (self.kernel - 1)

    @property
    def _smallest_side(self) -> int:
        side = 1
        for _ in self.channels:
            side = 2 * side + self._border
        return side

    def _side_after(self, side: int) -> int:
        """Return the side of an image after all convolutions and poolings."""
        for _ in self.channels:
            side = (side - self._border) // 2
        return side
