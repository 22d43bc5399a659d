"""The networks of the papers. Each is a frozen dataclass of its settings that builds a module whose last layer is
`head`; the other names are the layers that layer-wise methods speak of.

GroupNorm is the default normalisation: BatchNorm's running statistics mix the clients' data in ways of their own.
"""

import reprlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from math import prod
from numbers import Integral
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from fedtailor.errors import Refused, unknown
from fedtailor.federation import Federation
from fedtailor.machine import total_memory
from fedtailor.model import Model, wrap

Shape = tuple[int, ...]
_DEEPEST = 1000  # layers or blocks; the deepest residual networks that were published have about so many
_WIDEST = 2**24  # numbers that a layer gives: more than any published one, and few enough to multiply two of them
_COPIES = 8  # of the weights, in float32, while a model trains: the skeletons, values, slopes and what is kept of them


def network(name: str, fed: Federation, **settings: Any) -> Model:
    """A named network that fits a federation's inputs and classes; it starts from the seed of the run.

    >>> import fedtailor as ft
    >>> ft.network("mlp", ft.load("digits"), hidden=(32,)).head
    'head'
    """
    if name not in NETWORKS:
        raise unknown("network", name, NETWORKS)
    kind = NETWORKS[name]
    for setting in settings:
        if setting not in (known := [f.name for f in fields(kind)]):
            raise unknown(f"field of the network {name}", setting, known)
    if fed.shape is None:
        raise Refused("Named networks take one tensor as input; for inputs of several parts, ft.wrap your own module.")
    outputs = fed.classes if fed.classes is not None else fed.y[:1].numel()
    spec = kind(**settings)
    build = partial(spec.build, fed.shape, outputs)
    with torch.random.fork_rng(devices=[]):
        _check_room(build, name)
        model = wrap(build(), loss="classification" if fed.classes is not None else "regression")
    return replace(model, build=build, description={"name": name, **vars(spec)}, parts=getattr(kind, "parts", {}))


def _check_room(build: Callable[[], nn.Module], name: str) -> None:
    """Refuse a network that this machine's memory cannot hold, before one of its tensors is made."""
    try:
        with torch.device("meta"):  # shapes without numbers
            parameters = sum(p.numel() for p in build().parameters())
    except RuntimeError as error:  # so many that they cannot be counted
        raise Refused(f"The network {name} would have layers of more numbers than can be counted.") from error
    room = total_memory(torch.device("cpu")) // (4 * _COPIES)
    if parameters > room:
        here = f"this machine has memory to train about {room:,}; take narrower layers"
        raise Refused(f"The network {name} would have {parameters:,} parameters for these data, and {here}.")


def _check_sizes(name: str, sizes: Any, least: int = 1) -> None:
    """Refuse what cannot be the widths or the numbers of layers."""
    few = isinstance(sizes, (tuple, list)) and len(sizes) <= _DEEPEST
    if not few or not all(isinstance(size, Integral) and least <= int(size) <= _WIDEST for size in sizes):
        rule = f"at most {_DEEPEST} whole numbers from {least} to {_WIDEST}"
        raise Refused(f"{name} of a network must be {rule}, not {reprlib.repr(sizes)}.")


def _normalise(norm: str, channels: int) -> nn.Module:
    if norm == "group":
        groups = min(32, channels // 4)
        if not groups or channels % groups:
            raise Refused(
                f"{channels} channels cannot be normalised in {groups} equal groups; take a power of 2 from 4 on."
            )
        return nn.GroupNorm(groups, channels)
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "none":
        return nn.Identity()
    raise unknown("normalisation", norm, ["group", "batch", "none"])


def _picture(shape: Shape, name: str, smallest: int) -> Shape:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        need = f"pictures of at least {smallest}×{smallest} (channels×height×width)"
        raise Refused(f"{name} needs {need}, and these inputs are {'×'.join(map(str, shape))}; take mlp or logistic.")
    return shape


def _sequence(**layers: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(layers))


def _dense(inputs: int, hidden: Shape, outputs: int) -> dict[str, nn.Module]:
    """Layers fc1, fc2, ... with ReLU, then the head."""
    layers: dict[str, nn.Module] = {}
    for number, width in enumerate(hidden, start=1):
        layers |= {f"fc{number}": nn.Linear(inputs, width), f"fc{number}_relu": nn.ReLU()}
        inputs = width
    return layers | {"head": nn.Linear(inputs, outputs)}


@dataclass(frozen=True)
class Logistic:
    """Multinomial logistic regression: the head alone."""

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        return _sequence(flatten=nn.Flatten(), **_dense(prod(shape), (), outputs))


@dataclass(frozen=True)
class MLP:
    """Fully connected layers with ReLU."""

    hidden: tuple[int, ...] = (64, 32)  # widths of the hidden layers

    def __post_init__(self) -> None:
        _check_sizes("hidden", self.hidden)

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        return _sequence(flatten=nn.Flatten(), **_dense(prod(shape), tuple(self.hidden), outputs))


@dataclass(frozen=True)
class LeNet5:
    """FedAPA's network: two 5×5 convolutions of 6 and 16 channels, layers of 120 and 84."""

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        channels, height, width = _picture(shape, "lenet5", smallest=28)
        flat = 16 * _twice_pooled(height) * _twice_pooled(width)
        return _sequence(
            conv1=nn.Conv2d(channels, 6, 5), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5), relu2=nn.ReLU(), pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(), **_dense(flat, (120, 84), outputs),
        )  # fmt: skip


def _twice_pooled(side: int) -> int:
    return ((side - 4) // 2 - 4) // 2


@dataclass(frozen=True)
class CNN:
    """FedAPM's network: two 3×3 convolutions of 16 and 32 channels, a layer of 128."""

    norm: str = "none"  # after each convolution: none (the paper's), group or batch
    parts: ClassVar[dict[str, tuple[str, ...]]] = {"output": ("fc1", "head")}  # FedAPM's personal layers

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        channels, height, width = _picture(shape, "cnn", smallest=4)
        return _sequence(
            conv1=nn.Conv2d(channels, 16, 3, padding=1), norm1=_normalise(self.norm, 16), relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(16, 32, 3, padding=1), norm2=_normalise(self.norm, 32), relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(), **_dense(32 * (height // 4) * (width // 4), (128,), outputs),
        )  # fmt: skip


class _Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), _normalise(norm, after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), _normalise(norm, after)
        same = stride == 1 and before == after
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(inside + self.shortcut(x))


def _residual(shape: Shape, outputs: int, channels: Shape, blocks: Shape, norm: str) -> nn.Module:
    _check_sizes("channels", channels)
    _check_sizes("blocks", blocks, least=0)
    if not channels or len(blocks) != len(channels):
        raise Refused(f"blocks must be {len(channels)} numbers, one for each group of {channels} channels.")
    if sum(blocks) > _DEEPEST:
        raise Refused(f"A network of {sum(blocks)} blocks is deeper than the {_DEEPEST} that can be had.")
    before = channels[0]
    layers: dict[str, nn.Module] = {
        "conv": nn.Conv2d(shape[0], before, 3, padding=1, bias=False), "norm": _normalise(norm, before),
        "relu": nn.ReLU(),
    }  # fmt: skip
    for group, (after, count) in enumerate(zip(channels, blocks, strict=True), start=1):
        for number in range(1, count + 1):
            stride = 2 if group > 1 and number == 1 else 1
            layers[f"group{group}_block{number}"] = _Block(before, after, stride, norm)
            before = after
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    return _sequence(**layers, **_dense(before, (256, 128), outputs))


@dataclass(frozen=True)
class ResNet9:
    """FedLAG's network for MNIST (its Table 5)."""

    norm: str = "group"  # group, batch or none
    blocks: tuple[int, ...] = (1, 2, 2, 1)  # residual blocks a group
    channels: tuple[int, ...] = (32, 64, 128, 256)  # of every group

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        channels, blocks = tuple(self.channels), tuple(self.blocks)
        return _residual(_picture(shape, "resnet9", 8), outputs, channels, blocks, self.norm)


@dataclass(frozen=True)
class ResNet20:
    """FedLAG's network for CIFAR (its Table 5; blocks (2, 3, 4) for CIFAR-100)."""

    norm: str = "group"  # group, batch or none
    blocks: tuple[int, ...] = (3, 3, 3)  # residual blocks a group
    channels: tuple[int, ...] = (
        64,
        128,
        256,
    )  # of every group; 16, 32, 64 where ResNets for CIFAR were first described

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        channels, blocks = tuple(self.channels), tuple(self.blocks)
        return _residual(_picture(shape, "resnet20", 8), outputs, channels, blocks, self.norm)


class Network(Protocol):
    """Settings of a network, and how to build it."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def build(self, shape: Shape, outputs: int) -> nn.Module: ...


NETWORKS: dict[str, type[Network]] = {
    "logistic": Logistic,
    "mlp": MLP,
    "lenet5": LeNet5,
    "cnn": CNN,
    "resnet9": ResNet9,
    "resnet20": ResNet20,
}
