"""Building blocks that the named networks share."""

import reprlib
from collections import OrderedDict
from numbers import Integral
from typing import Annotated, Any, ClassVar, Protocol

from torch import nn

from fedtailor.core.fields import Constraint, PositiveInt
from fedtailor.errors import ConfigError, unknown_name

Shape = tuple[int, ...]  # of one sample

MAX_LAYERS = 1000  # layers or blocks; about the depth of the deepest published residual networks
MAX_WIDTH = 2**24  # outputs of a layer; wider than published networks, and the product of two widths does not overflow
MAX_POOLINGS = 30  # each one halves the input
Width = Annotated[PositiveInt, Constraint(f"at most {MAX_WIDTH}", lambda value: value <= MAX_WIDTH)]
LayerCount = Annotated[PositiveInt, Constraint(f"at most {MAX_LAYERS}", lambda value: value <= MAX_LAYERS)]


def check_sizes(name: str, sizes: Any, least: int = 1) -> None:
    """Raise `ConfigError` unless `sizes` are valid widths or numbers of layers."""
    few = isinstance(sizes, (tuple, list)) and len(sizes) <= MAX_LAYERS
    if not few or not all(isinstance(size, Integral) and least <= int(size) <= MAX_WIDTH for size in sizes):
        rule = f"at most {MAX_LAYERS} integers from {least} to {MAX_WIDTH}"
        raise ConfigError(f"{name} of a network must be {rule}, got {reprlib.repr(sizes)}.")


def check_pooled_channels(channels: Any, repeats: int = 1) -> None:
    """Raise `ConfigError` unless `channels` are valid widths of convolutions, each of which is followed by pooling."""
    check_sizes("channels", channels)
    if len(channels) > MAX_POOLINGS:
        raise ConfigError(f"A network can halve its input at most {MAX_POOLINGS} times, got {len(channels)} channels.")
    if len(channels) * repeats > MAX_LAYERS:
        raise ConfigError(f"A network can have at most {MAX_LAYERS} convolutions, got {len(channels) * repeats}.")


def make_norm(norm: str, channels: int) -> nn.Module:
    """Return the normalization layer "group", "batch", or "none".

    Networks use "group" where the paper does not say otherwise, because the running statistics of BatchNorm depend on
    how a method aggregates them.
    """
    if norm == "group":
        groups = min(32, channels // 4)
        if not groups or channels % groups:
            raise ConfigError(
                f"{channels} channels cannot be normalized in {groups} equal groups; use a power of 2, at least 4."
            )
        return nn.GroupNorm(groups, channels)
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "none":
        return nn.Identity()
    raise unknown_name("normalization", norm, ["group", "batch", "none"])


def require_image(shape: Shape, name: str, smallest: int) -> Shape:
    """Return the shape; raise `ConfigError` if it is not an image of at least `smallest` × `smallest` pixels."""
    got = f"got inputs of shape {shape}"
    if len(shape) == 2 and min(shape) >= smallest:
        raise ConfigError(
            f"{name} needs images as (channels, height, width), {got}; add a channel axis with x[:, None]."
        )
    if len(shape) == 3 and min(shape[:2]) >= smallest > shape[2]:
        fix = "move the channels first with x.transpose(0, 3, 1, 2)"
        raise ConfigError(f"{name} needs images as (channels, height, width), {got}; {fix}.")
    if len(shape) != 3 or min(shape[1:]) < smallest:
        need = f"images of at least {smallest}×{smallest} pixels as (channels, height, width)"
        raise ConfigError(f"{name} needs {need}, {got}; use mlp or logistic.")
    return shape


def sequential(**layers: nn.Module) -> nn.Module:
    """Return an `nn.Sequential` of named layers."""
    return nn.Sequential(OrderedDict(layers))


def dense_layers(inputs: int, hidden: Shape, outputs: int) -> dict[str, nn.Module]:
    """Return linear layers fc1, fc2, ... with ReLU, then the head."""
    layers: dict[str, nn.Module] = {}
    for number, width in enumerate(hidden, start=1):
        layers |= {f"fc{number}": nn.Linear(inputs, width), f"fc{number}_relu": nn.ReLU()}
        inputs = width
    return layers | {"head": nn.Linear(inputs, outputs)}


class Network(Protocol):
    """The settings of a network, which build its module."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    inputs: ClassVar[str]  # what a sample must be
    used_by: ClassVar[str]  # papers and their data sets, or other uses

    def build(self, shape: Any, outputs: int) -> nn.Module:
        """Return the module for inputs of this `Shape`, or of one shape per part, and this number of outputs."""
        ...
