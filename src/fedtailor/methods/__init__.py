"""Every method, by the name the command knows it by."""

from fedtailor.method import Method
from fedtailor.methods.adapted import PerFedAvg, SelfFL
from fedtailor.methods.condensed import FedAF
from fedtailor.methods.core_models import APPLE
from fedtailor.methods.hypernetworks import PFedHN, PFedLA
from fedtailor.methods.lag import LAG, FedLAG
from fedtailor.methods.mixed_models import FedAMP, FedAPA
from fedtailor.methods.mixing_clients import FedALA, FedFomo
from fedtailor.methods.one_model import FedADMM, FedAvg, FedAvgFT, FedExP, FedProx, Scaffold
from fedtailor.methods.projected import LpProj
from fedtailor.methods.prototypes import FedGH, FedPAC, FedProto
from fedtailor.methods.representations import DBE, GPFL, FedCP
from fedtailor.methods.split_admm import FedAPM
from fedtailor.methods.split_by_data import FedAS, FedCAC
from fedtailor.methods.split_model import FedAlt, FedBABU, FedBN, FedPer, FedRep, FedSim, LGFedAvg
from fedtailor.methods.two_models import Ditto, FedPHP, FedRoD, Local, PFedMe

FAMILIES: dict[str, tuple[type[Method], ...]] = {
    "One model for all": (FedAvg, FedAvgFT, FedProx, Scaffold, FedExP, FedADMM),
    "A part of the model is shared": (
        FedPer, FedRep, FedBABU, LGFedAvg, FedBN, FedAlt, FedSim, FedAS, FedCAC, FedAPM, FedLAG, LAG,
    ),
    "An own model beside the common one": (Local, Ditto, PFedMe, FedPHP, LpProj, FedRoD),
    "Everyone gets a mixture of its own": (FedAPA, FedAMP, APPLE, FedALA, FedFomo, PFedLA, PFedHN),
    "Prototypes and representations": (FedProto, FedGH, FedPAC, DBE, FedCP, GPFL, FedAF),
    "Training adapts to the client": (SelfFL, PerFedAvg),
}  # fmt: skip

METHODS: dict[str, type[Method]] = {
    method.__name__.lower(): method for family in FAMILIES.values() for method in family
}

__all__ = [
    "APPLE", "DBE", "FAMILIES", "GPFL", "LAG", "METHODS", "Ditto", "FedADMM", "FedAF", "FedALA", "FedAMP", "FedAPA",
    "FedAPM", "FedAS", "FedAlt", "FedAvg", "FedAvgFT", "FedBABU", "FedBN", "FedCAC", "FedCP", "FedExP", "FedFomo",
    "FedGH", "FedLAG", "FedPAC", "FedPHP", "FedPer", "FedProto", "FedProx", "FedRep", "FedRoD", "FedSim", "LGFedAvg",
    "Local", "LpProj", "PFedHN", "PFedLA", "PFedMe", "PerFedAvg", "Scaffold", "SelfFL",
]  # fmt: skip
