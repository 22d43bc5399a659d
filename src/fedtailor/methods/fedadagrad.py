"""FedAdagrad: FedAvg with Adagrad on the server."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from fedtailor.core.fields import FractionBelow1
from fedtailor.methods._shared.server_optimizer import ServerOptimizer


@dataclass(frozen=True)
class FedAdagrad(ServerOptimizer):
    """Reddi et al., "Adaptive Federated Optimization", ICLR 2021.

    FedAdam with the sum of all Δ² as the second moment, v ← v + Δ², so that the step size decreases over rounds.
    """

    beta1: Annotated[FractionBelow1, "β₁, decay of m, the mean of the changes Δ (0 in the paper)"] = 0.0

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared
