"""FedAdam: FedAvg with Adam on the server."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from fedtailor.core.fields import FractionBelow1
from fedtailor.methods._shared.server_optimizer import ServerOptimizer


@dataclass(frozen=True)
class FedAdam(ServerOptimizer):
    """Reddi et al., "Adaptive Federated Optimization", ICLR 2021.

    FedAvg in which the server takes a step of Adam along Δ, the mean change of the clients' models, without bias
    correction: m ← β₁ m + (1 − β₁) Δ, v ← β₂ v + (1 − β₂) Δ², θ ← θ + η m / (√v + τ). The paper averages changes
    uniformly in Algorithm 2; by default, clients have weights here as in FedAvg. Running statistics of batch
    normalization are averaged.
    """

    beta2: Annotated[FractionBelow1, "β₂, decay of v, the mean of Δ²"] = 0.99

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared
