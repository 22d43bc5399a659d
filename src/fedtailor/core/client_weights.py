"""Means over the clients of a round, by number of samples or uniform."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torch import Tensor

from fedtailor.core.method import Exchange, Method
from fedtailor.core.system import to_float64
from fedtailor.core.trees import Tree, mean

ClientWeights = Literal["size", "uniform"]


@dataclass(frozen=True)
class WeightedMethod(Method):
    """A method whose server averages something over the clients of a round, by number of samples or uniformly.

    >>> import fedtailor as ft
    >>> ft.methods.FedExP().weights, ft.methods.Ditto().weights
    ('uniform', 'size')
    """

    weights: Annotated[ClientWeights, "client weights: by number of samples or uniform"] = field(
        default="size", kw_only=True
    )

    def round_weights(self, exchange: Exchange) -> Tensor | None:
        """Return the weights of the clients of a round, for `mean`; None: uniform."""
        return exchange.sizes if self.weights == "size" else None

    def round_share(self, exchange: Exchange) -> float | Tensor:
        """Return the sum of these weights as a share of the sum over all clients: n_S/n, or m/N if uniform."""
        if self.weights == "size":
            return to_float64(exchange.sizes).sum() / exchange.total_size
        return len(exchange.clients) / exchange.num_clients


@dataclass(frozen=True)
class AveragingMethod(WeightedMethod):
    """A method whose server uses nothing of the uploads but their mean.

    >>> import fedtailor as ft
    >>> ft.methods.Ditto(weights="uniform").uses_plain_mean
    True
    """

    @property
    def mean_weights(self) -> ClientWeights | None:
        return self.weights

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, self.round_weights(exchange))
