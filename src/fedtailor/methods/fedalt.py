"""FedAlt: partial model personalization with alternating updates of the two parts."""

from dataclasses import dataclass
from typing import Annotated

from fedtailor.core.fields import PositiveInt
from fedtailor.methods._shared.split import AlternatingMethod, Split


@dataclass(frozen=True)
class FedAlt(AlternatingMethod):
    """Pillutla et al., "Federated Learning with Partial Model Personalization", ICML 2022.

    Clients first train the personal part with the shared part fixed, then the shared part with the personal part fixed.
    The server averages the shared parts.
    """

    epochs: Annotated[PositiveInt, "E, local epochs of each part"] = 1
    split: Annotated[Split, "the personal part: output, input, split_input, or a list of layers"] = "output"

    @property
    def part(self) -> Split:
        return self.split
