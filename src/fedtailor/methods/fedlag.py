"""FedLAG: FedAvg with layer-wise personalization by gradient conflict."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedtailor.core.client_weights import ClientWeights, WeightedMethod
from fedtailor.core.local_training import LocalTraining, training_settings
from fedtailor.core.method import Method
from fedtailor.methods._shared.layerwise import Layerwise
from fedtailor.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedLAG(WeightedMethod, Layerwise, LocalTraining):
    """Anonymous, "Towards Layer-wise Personalized Federated Learning: Adaptive Layer Disentanglement via Conflicting
    Gradients", under review.

    FedAvg in which the layers with the most gradient conflicts are personal; equals LAG(FedAvg(...)).
    """

    weights: Annotated[ClientWeights, "client weights: uniform (as in the paper) or by number of samples"] = "uniform"
    keeps_optimizer: ClassVar[bool] = True

    @property
    def wrapped(self) -> Method:
        return FedAvg(weights=self.weights, **training_settings(self))
