"""Residual networks."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor, nn

from fedtailor.core.normalization import normalize_relu
from fedtailor.errors import ConfigError
from fedtailor.networks.layers import MAX_LAYERS, Shape, check_sizes, dense_layers, make_norm, require_image, sequential


class _Block(nn.Module):
    """Two 3×3 convolutions with a shortcut connection."""

    def __init__(self, before: int, after: int, stride: int, norm: str, normalizes_shortcut: bool) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), make_norm(norm, after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), make_norm(norm, after)
        same = stride == 1 and before == after
        self.shortcut: nn.Module = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)
        if normalizes_shortcut and not same:
            self.shortcut = sequential(conv=self.shortcut, norm=make_norm(norm, after))

    def forward(self, x: Tensor) -> Tensor:
        hidden = normalize_relu(self.norm1, self.conv1(x))
        return normalize_relu(self.norm2, self.conv2(hidden), residual=self.shortcut(x))


@dataclass(frozen=True)
class _ResNet:
    norm: Annotated[str, "normalization: group, batch, or none"] = "group"
    blocks: Annotated[tuple[int, ...], "residual blocks per group"] = ()
    channels: Annotated[tuple[int, ...], "channels per group"] = ()
    hidden: Annotated[tuple[int, ...], "widths of the linear layers before the head"] = (256, 128)
    pools_first: ClassVar[bool] = False  # whether max-pooling halves the image before the first group
    normalizes_shortcuts: ClassVar[bool] = False
    inputs: ClassVar[str] = "images of at least 8×8 pixels"

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        require_image(shape, type(self).__name__.lower(), smallest=8)
        channels, blocks = tuple(self.channels), tuple(self.blocks)
        check_sizes("channels", channels)
        check_sizes("blocks", blocks, least=0)
        check_sizes("hidden", self.hidden)
        if not channels or len(blocks) != len(channels):
            raise ConfigError(f"blocks must have one number per group of channels: {len(channels)}, got {len(blocks)}.")
        if sum(blocks) > MAX_LAYERS:
            raise ConfigError(f"A network can have at most {MAX_LAYERS} blocks, got {sum(blocks)}.")
        before = channels[0]
        layers: dict[str, nn.Module] = {
            "conv": nn.Conv2d(shape[0], before, 3, padding=1, bias=False), "norm": make_norm(self.norm, before),
            "relu": nn.ReLU(),
        }  # fmt: skip
        layers |= {"max_pool": nn.MaxPool2d(3, 2, padding=1)} if self.pools_first else {}
        for group, (after, count) in enumerate(zip(channels, blocks, strict=True), start=1):
            for number in range(1, count + 1):
                stride = 2 if group > 1 and number == 1 else 1
                layers[f"group{group}_block{number}"] = _Block(
                    before, after, stride, self.norm, self.normalizes_shortcuts
                )
                before = after
        layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
        return sequential(**layers, **dense_layers(before, tuple(self.hidden), outputs))


@dataclass(frozen=True)
class ResNet9(_ResNet):
    """FedLAG's network for MNIST and EMNIST (Table 5 of the paper)."""

    blocks: tuple[int, ...] = (1, 2, 2, 1)
    channels: tuple[int, ...] = (32, 64, 128, 256)
    used_by: ClassVar[str] = "FedLAG (MNIST, EMNIST)"


@dataclass(frozen=True)
class ResNet20(_ResNet):
    """FedLAG's network for CIFAR-10 and CIFAR-100 (Table 5 of the paper)."""

    blocks: tuple[int, ...] = (3, 3, 3)
    channels: Annotated[tuple[int, ...], "channels per group; the original ResNet-20 has 16, 32, 64"] = (64, 128, 256)
    used_by: ClassVar[str] = "FedLAG (CIFAR-10; CIFAR-100 with blocks 2,3,4)"


@dataclass(frozen=True)
class ResNet18(_ResNet):
    """ResNet-18 with a 3×3 convolution of stride 1 at the start, as in FedAPM's code."""

    norm: str = "batch"
    blocks: tuple[int, ...] = (2, 2, 2, 2)
    channels: tuple[int, ...] = (64, 128, 256, 512)
    hidden: tuple[int, ...] = ()
    pools_first: ClassVar[bool] = True
    normalizes_shortcuts: ClassVar[bool] = True
    used_by: ClassVar[str] = "FedAPM (CIFAR-100, Tiny-ImageNet)"
