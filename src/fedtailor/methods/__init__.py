"""Every method, by the name the command knows it by."""

from fedtailor.method import Method
from fedtailor.methods.adapted import SelfFL
from fedtailor.methods.lag import LAG, FedLAG
from fedtailor.methods.mixed_models import FedAPA
from fedtailor.methods.one_model import FedAvg, FedExP, FedProx, Scaffold
from fedtailor.methods.split_model import FedAlt, FedAPM, FedPer, FedSim
from fedtailor.methods.two_models import Ditto, Local, PFedMe

_ALL: tuple[type[Method], ...] = (
    Local, FedAvg, FedProx, Scaffold, FedExP, FedPer, FedAlt, FedSim, Ditto, PFedMe,
    FedAPA, FedAPM, FedLAG, LAG, SelfFL,
)  # fmt: skip

METHODS: dict[str, type[Method]] = {method.__name__.lower(): method for method in _ALL}

__all__ = [
    "LAG", "METHODS", "Ditto", "FedAPA", "FedAPM", "FedAlt", "FedAvg", "FedExP", "FedLAG", "FedPer", "FedProx",
    "FedSim", "Local", "PFedMe", "Scaffold", "SelfFL",
]  # fmt: skip
