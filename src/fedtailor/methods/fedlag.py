"""FedLAG: FedAvg with layer-wise personalization by gradient conflict."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fedtailor.core.method import LocalTraining, Method
from fedtailor.methods._shared.layerwise import Layerwise
from fedtailor.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedLAG(Layerwise, LocalTraining):
    """Anonymous, "Towards Layer-wise Personalized Federated Learning: Adaptive Layer Disentanglement via Conflicting
    Gradients", under review.

    FedAvg in which the layers with the most gradient conflicts are personal; equals LAG(FedAvg(...)).
    """

    weights: Annotated[
        Literal["size", "uniform"], "client weights: uniform (as in the paper) or by number of samples"
    ] = "uniform"

    @property
    def wrapped(self) -> Method:
        return FedAvg(weights=self.weights, **self.optimizer_options)
