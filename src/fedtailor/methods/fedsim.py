"""FedSim: partial model personalization with simultaneous updates of both parts."""

from dataclasses import dataclass
from typing import Annotated

from fedtailor.core.fields import PositiveInt
from fedtailor.methods._shared.split import Split, SplitMethod


@dataclass(frozen=True)
class FedSim(SplitMethod):
    """Pillutla et al., "Federated Learning with Partial Model Personalization", ICML 2022.

    Clients train the shared and the personal part simultaneously. The server averages the shared parts.
    """

    epochs: Annotated[PositiveInt, "E, local epochs"] = 1
    split: Annotated[Split, "the personal part: output, input, split_input, or a list of layers"] = "output"

    @property
    def part(self) -> Split:
        return self.split
