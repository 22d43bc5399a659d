"""Every method, by the name the command knows it by."""

from fedtailor.method import Method
from fedtailor.methods.adapted import SelfFL
from fedtailor.methods.lag import LAG, FedLAG
from fedtailor.methods.mixed_models import FedAPA
from fedtailor.methods.one_model import FedAvg, FedExP, FedProx, Scaffold
from fedtailor.methods.split_admm import FedAPM
from fedtailor.methods.split_model import FedAlt, FedPer, FedSim
from fedtailor.methods.two_models import Ditto, Local, PFedMe

FAMILIES: dict[str, tuple[type[Method], ...]] = {
    "One model for all": (FedAvg, FedProx, Scaffold, FedExP),
    "A part of the model is shared": (FedPer, FedAlt, FedSim, FedAPM, FedLAG, LAG),
    "An own model beside the common one": (Local, Ditto, PFedMe),
    "Everyone gets a mixture of its own": (FedAPA,),
    "Prototypes and representations": (),
    "Training adapts to the client": (SelfFL,),
}

METHODS: dict[str, type[Method]] = {
    method.__name__.lower(): method for family in FAMILIES.values() for method in family
}

__all__ = [
    "FAMILIES", "LAG", "METHODS", "Ditto", "FedAPA", "FedAPM", "FedAlt", "FedAvg", "FedExP", "FedLAG", "FedPer",
    "FedProx", "FedSim", "Local", "PFedMe", "Scaffold", "SelfFL",
]  # fmt: skip
