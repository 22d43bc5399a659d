"""LAG: a wrapper that makes layers with gradient conflicts personal, for any method with one global model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from fedtailor.core.method import Method
from fedtailor.core.training_settings import SETTINGS_OF_INNER
from fedtailor.methods._shared.layerwise import Layerwise
from fedtailor.methods.fedavg import FedAvg


@dataclass(frozen=True)
class LAG(Layerwise):
    """Anonymous, "Towards Layer-wise Personalized Federated Learning: Adaptive Layer Disentanglement via Conflicting
    Gradients", under review.

    Wraps any method that trains one global model, as in LAG(Scaffold()), and makes the layers with the most gradient
    conflicts personal. The inner method must store its whole model as "params" on the server and in both messages. If a
    message contains another dict of layers, clients must store it in their state under the same name.
    """

    fixed_settings: ClassVar[Mapping[str, str]] = SETTINGS_OF_INNER
    inner: Annotated[Method, "the method to wrap"] = field(default_factory=FedAvg)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(isinstance(self.inner, Method), "inner", "a method such as FedProx()")

    @property
    def wrapped(self) -> Method:
        return self.inner
