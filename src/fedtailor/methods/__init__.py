"""Every method, by the name the command knows it by."""

from fedtailor.method import Method
from fedtailor.methods.one_model import FedAvg, FedProx, Scaffold
from fedtailor.methods.split_model import FedPer
from fedtailor.methods.two_models import Ditto, Local

METHODS: dict[str, type[Method]] = {
    method.__name__.lower(): method for method in (Local, FedAvg, FedProx, Scaffold, FedPer, Ditto)
}

__all__ = ["METHODS", "Ditto", "FedAvg", "FedPer", "FedProx", "Local", "Scaffold"]
