"""Logistic regression and multilayer perceptrons."""

from dataclasses import dataclass
from math import prod
from typing import Annotated, ClassVar

from torch import nn

from fedtailor.networks.layers import Shape, check_sizes, dense_layers, sequential


@dataclass(frozen=True)
class Logistic:
    """A linear layer: multinomial logistic regression, linear regression, or, for survival times, a Cox model."""

    bias: Annotated[bool, "whether the layer has a bias"] = True
    inputs: ClassVar[str] = "numbers of any shape"
    used_by: ClassVar[str] = "Self-FL (MNIST, FEMNIST, and, without bias, gaussian); FedLAG (rectangles)"

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        return sequential(flatten=nn.Flatten(), head=nn.Linear(prod(shape), outputs, bias=self.bias))


@dataclass(frozen=True)
class MLP:
    """Fully connected layers with ReLU."""

    hidden: Annotated[tuple[int, ...], "widths of the hidden layers"] = (64, 32)
    inputs: ClassVar[str] = "numbers of any shape"
    used_by: ClassVar[str] = "FedLAG's code (MNIST, with hidden 100); default for digits"

    def __post_init__(self) -> None:
        check_sizes("hidden", self.hidden)

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        return sequential(flatten=nn.Flatten(), **dense_layers(prod(shape), tuple(self.hidden), outputs))
