"""FedRep: a shared body and a personal head; each client trains its head first, then the body."""

from dataclasses import dataclass
from typing import Annotated

from fedtailor.core.fields import NonNegativeInt, PositiveInt
from fedtailor.methods._shared.split import AlternatingMethod, PersonalHeadMethod


@dataclass(frozen=True)
class FedRep(AlternatingMethod, PersonalHeadMethod):
    """Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021.

    Clients first train the head with the received body fixed, then the body with this head fixed. Each phase has its
    own optimizer, so momentum and weight decay do not affect frozen parameters. The authors' code adds 10 epochs of
    head training to the last round; here all rounds are the same.
    """

    epochs: Annotated[PositiveInt, "local epochs of the body"] = 1
    head_epochs: Annotated[NonNegativeInt, "τ, local epochs of the head"] = 9

    @property
    def personal_epochs(self) -> int:
        return self.head_epochs
