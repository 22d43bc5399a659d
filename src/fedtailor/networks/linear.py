"""Logistic regression and multilayer perceptrons."""

from dataclasses import dataclass
from math import prod
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fedtailor.errors import ConfigError
from fedtailor.networks.layers import Shape, check_sizes, dense_layers, sequential


class Intercept(nn.Module):
    """Adds a learned number to each output."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


@dataclass(frozen=True)
class Logistic:
    """A linear layer: multinomial logistic regression, linear regression, or, for survival times, a Cox model."""

    bias: Annotated[bool, "whether the layer has a bias"] = True
    intercept_head: Annotated[bool, "whether the head is the bias alone, so that personal heads are own intercepts"] = (
        False
    )
    inputs: ClassVar[str] = "numbers of any shape"
    used_by: ClassVar[str] = "Self-FL (MNIST, FEMNIST, and, without bias, gaussian); FedLAG (rectangles)"

    def __post_init__(self) -> None:
        if self.intercept_head and not self.bias:
            raise ConfigError("network.intercept_head must be false if network.bias is false.")

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        if self.intercept_head:
            body = nn.Linear(prod(shape), outputs, bias=False)
            return sequential(flatten=nn.Flatten(), body=body, head=Intercept(outputs))
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
