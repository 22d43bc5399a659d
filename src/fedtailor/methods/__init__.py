"""Registry of all methods, by name and by family."""

from fedtailor.core.method import Method
from fedtailor.methods.apple import APPLE
from fedtailor.methods.averaged import Averaged
from fedtailor.methods.centralized import Centralized
from fedtailor.methods.dbe import DBE
from fedtailor.methods.ditto import Ditto
from fedtailor.methods.fedadagrad import FedAdagrad
from fedtailor.methods.fedadam import FedAdam
from fedtailor.methods.fedadmm import FedADMM
from fedtailor.methods.fedaf import FedAF
from fedtailor.methods.fedala import FedALA
from fedtailor.methods.fedalt import FedAlt
from fedtailor.methods.fedamp import FedAMP
from fedtailor.methods.fedapa import FedAPA
from fedtailor.methods.fedapm import FedAPM
from fedtailor.methods.fedas import FedAS
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedavgft import FedAvgFT
from fedtailor.methods.fedbabu import FedBABU
from fedtailor.methods.fedbn import FedBN
from fedtailor.methods.fedcac import FedCAC
from fedtailor.methods.fedcp import FedCP
from fedtailor.methods.fedexp import FedExP
from fedtailor.methods.fedfomo import FedFomo
from fedtailor.methods.fedgh import FedGH
from fedtailor.methods.fedlag import FedLAG
from fedtailor.methods.fedpac import FedPAC
from fedtailor.methods.fedper import FedPer
from fedtailor.methods.fedphp import FedPHP
from fedtailor.methods.fedproto import FedProto
from fedtailor.methods.fedprox import FedProx
from fedtailor.methods.fedrep import FedRep
from fedtailor.methods.fedrod import FedRoD
from fedtailor.methods.fedsim import FedSim
from fedtailor.methods.fedyogi import FedYogi
from fedtailor.methods.gpfl import GPFL
from fedtailor.methods.lag import LAG
from fedtailor.methods.lgfedavg import LGFedAvg
from fedtailor.methods.local import Local
from fedtailor.methods.lpproj import LpProj
from fedtailor.methods.perfedavg import PerFedAvg
from fedtailor.methods.pfedhn import PFedHN
from fedtailor.methods.pfedla import PFedLA
from fedtailor.methods.pfedme import PFedMe
from fedtailor.methods.scaffold import Scaffold
from fedtailor.methods.selffl import SelfFL

FAMILIES: dict[str, tuple[type[Method], ...]] = {
    "One global model": (
        FedAvg, FedAvgFT, FedProx, Scaffold, FedExP, FedADMM, FedAdam, FedYogi, FedAdagrad,
    ),
    "Partial model sharing": (
        FedPer, FedRep, FedBABU, LGFedAvg, FedBN, FedAlt, FedSim, FedAS, FedCAC, FedAPM, FedLAG, LAG,
    ),
    "Separate personal models": (Local, Ditto, PFedMe, FedPHP, Averaged, LpProj, FedRoD),
    "Personalized aggregation": (FedAPA, FedAMP, APPLE, FedALA, FedFomo, PFedLA, PFedHN),
    "Prototypes and representations": (FedProto, FedGH, FedPAC, DBE, FedCP, GPFL, FedAF),
    "Adaptive local training": (SelfFL, PerFedAvg),
    "Reference without federation": (Centralized,),
}  # fmt: skip

METHODS: dict[str, type[Method]] = {
    method.__name__.lower(): method for family in FAMILIES.values() for method in family
}

__all__ = [
    "APPLE", "DBE", "FAMILIES", "GPFL", "LAG", "METHODS", "Averaged", "Centralized", "Ditto", "FedADMM", "FedAF",
    "FedALA",
    "FedAMP", "FedAPA", "FedAPM", "FedAS", "FedAdagrad", "FedAdam", "FedAlt", "FedAvg", "FedAvgFT", "FedBABU", "FedBN",
    "FedCAC", "FedCP", "FedExP", "FedFomo", "FedGH", "FedLAG", "FedPAC", "FedPHP", "FedPer", "FedProto", "FedProx",
    "FedRep", "FedRoD", "FedSim", "FedYogi", "LGFedAvg",
    "Local", "LpProj", "PFedHN", "PFedLA", "PFedMe", "PerFedAvg", "Scaffold", "SelfFL",
]  # fmt: skip


def __dir__() -> list[str]:
    """Return the methods and the registry, which editors and notebooks offer after `ft.methods.`"""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
