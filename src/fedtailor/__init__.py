"""FedTailor: personalized federated learning on PyTorch. Clients train together, and each gets a personal model.

import fedtailor as ft
fed = ft.load("digits", clients=20, partition="dirichlet", alpha=0.1, seed=0)
run = ft.simulate(ft.methods.FedPer(lr=0.05), ft.network("mlp", fed), fed, rounds=20)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedtailor.version import VERSION

if TYPE_CHECKING:
    from fedtailor import methods
    from fedtailor.analysis.comparison_result import ComparisonResult
    from fedtailor.core import trees
    from fedtailor.core.augmentation import Augmentation
    from fedtailor.core.batch import Batch
    from fedtailor.core.client_context import ClientContext
    from fedtailor.core.client_models import ClientModels
    from fedtailor.core.local_training import LocalTraining
    from fedtailor.core.method import Exchange, Method, Setup
    from fedtailor.core.metrics import Metric
    from fedtailor.core.model import Model, wrap
    from fedtailor.core.robust import Robust
    from fedtailor.data.datasets import load
    from fedtailor.data.federation import Federation
    from fedtailor.errors import ConfigError, DataError, DeployError, FedTailorError, RunError
    from fedtailor.experiments.compare import compare, load_comparison
    from fedtailor.experiments.example_client import example_client
    from fedtailor.experiments.resume import resume
    from fedtailor.export.personal_model import load_personal
    from fedtailor.networks import network
    from fedtailor.networks.client_models import client_models
    from fedtailor.runs.reader import load_run
    from fedtailor.runs.run import Run
    from fedtailor.training import attacks
    from fedtailor.training.channel.channel import Channel
    from fedtailor.training.signals import Interrupted
    from fedtailor.training.simulate import simulate
    from fedtailor.training.unreliable import Unreliable

__version__ = VERSION
__all__ = [
    "Augmentation",
    "Batch",
    "Channel",
    "ClientContext",
    "ClientModels",
    "ComparisonResult",
    "ConfigError",
    "DataError",
    "DeployError",
    "Exchange",
    "FedTailorError",
    "Federation",
    "Interrupted",
    "LocalTraining",
    "Method",
    "Metric",
    "Model",
    "Robust",
    "Run",
    "RunError",
    "Setup",
    "Unreliable",
    "attacks",
    "client_models",
    "compare",
    "example_client",
    "load",
    "load_comparison",
    "load_personal",
    "load_run",
    "methods",
    "network",
    "resume",
    "simulate",
    "trees",
    "wrap",
]

# Imported on first use: torch takes a second, which commands such as `fedtailor deploy status` do not need.
_SUBMODULES = {
    "attacks": "fedtailor.training.attacks",
    "methods": "fedtailor.methods",
    "trees": "fedtailor.core.trees",
}
_SOURCES = {
    "Augmentation": "fedtailor.core.augmentation",
    "Batch": "fedtailor.core.batch",
    "Channel": "fedtailor.training.channel.channel",
    "ClientContext": "fedtailor.core.client_context",
    "ClientModels": "fedtailor.core.client_models",
    "ComparisonResult": "fedtailor.analysis.comparison_result",
    "ConfigError": "fedtailor.errors",
    "DataError": "fedtailor.errors",
    "DeployError": "fedtailor.errors",
    "Exchange": "fedtailor.core.method",
    "FedTailorError": "fedtailor.errors",
    "Federation": "fedtailor.data.federation",
    "Interrupted": "fedtailor.training.signals",
    "LocalTraining": "fedtailor.core.local_training",
    "Method": "fedtailor.core.method",
    "Metric": "fedtailor.core.metrics",
    "Model": "fedtailor.core.model",
    "Robust": "fedtailor.core.robust",
    "Run": "fedtailor.runs.run",
    "RunError": "fedtailor.errors",
    "Setup": "fedtailor.core.method",
    "Unreliable": "fedtailor.training.unreliable",
    "client_models": "fedtailor.networks.client_models",
    "compare": "fedtailor.experiments.compare",
    "example_client": "fedtailor.experiments.example_client",
    "load": "fedtailor.data.datasets",
    "load_comparison": "fedtailor.experiments.compare",
    "load_personal": "fedtailor.export.personal_model",
    "load_run": "fedtailor.runs.reader",
    "network": "fedtailor.networks",
    "resume": "fedtailor.experiments.resume",
    "simulate": "fedtailor.training.simulate",
    "wrap": "fedtailor.core.model",
}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(_SUBMODULES[name])
    if name in _SOURCES:
        return getattr(import_module(_SOURCES[name]), name)
    raise AttributeError(f"module 'fedtailor' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Return the public API, which editors and notebooks offer after `ft.`"""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
