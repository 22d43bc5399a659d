"""FedPer: a shared body and a personal head, trained jointly."""

from dataclasses import dataclass

from fedtailor.methods._shared.split import PersonalHeadMethod


@dataclass(frozen=True)
class FedPer(PersonalHeadMethod):
    """Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv 2019.

    Clients train body and head jointly. The server averages the bodies; the heads are personal.
    """
