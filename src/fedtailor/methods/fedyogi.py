"""FedYogi: FedAvg with Yogi on the server."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from fedtailor.core.fields import FractionBelow1
from fedtailor.methods._shared.server_optimizer import ServerOptimizer


@dataclass(frozen=True)
class FedYogi(ServerOptimizer):
    """Reddi et al., "Adaptive Federated Optimization", ICLR 2021.

    FedAdam with another second moment, v ← v − (1 − β₂) Δ² sign(v − Δ²), which decreases more slowly than that of Adam
    when the changes Δ become small.
    """

    beta2: Annotated[FractionBelow1, "β₂, 1 − β₂ is the weight of Δ² in v"] = 0.99

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * (v - squared).sign()
