"""FedTailor: personalized federated learning on PyTorch. Clients train together, and each gets a personal model.

import fedtailor as ft
fed = ft.load("digits", clients=20, partition="dirichlet", alpha=0.1, seed=0)
run = ft.simulate(ft.methods.FedPer(lr=0.05), ft.network("mlp", fed), fed, rounds=20)
"""

from collections.abc import Callable
from pathlib import Path

from torch.nn import Module

from fedtailor import methods
from fedtailor.core import trees
from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.method import Exchange, LocalTraining, Method, Setup
from fedtailor.core.metrics import Metric
from fedtailor.core.model import Model, ModelLike, wrap
from fedtailor.data.datasets import load
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError, DataError, DeployError, FedTailorError, RunError
from fedtailor.networks import network
from fedtailor.runs.records import Record
from fedtailor.runs.run import Run
from fedtailor.training.channel.channel import Channel
from fedtailor.training.simulate import simulate
from fedtailor.training.unreliable import Unreliable
from fedtailor.version import VERSION

__version__ = VERSION
__all__ = [
    "Batch",
    "Channel",
    "ClientContext",
    "ConfigError",
    "DataError",
    "DeployError",
    "Exchange",
    "FedTailorError",
    "Federation",
    "LocalTraining",
    "Method",
    "Metric",
    "Model",
    "Run",
    "RunError",
    "Setup",
    "Unreliable",
    "load",
    "load_personal",
    "load_run",
    "methods",
    "network",
    "resume",
    "simulate",
    "trees",
    "wrap",
]


def load_run(path: str | Path) -> Run:
    """Load a finished run from its folder; see `fedtailor.runs.reader`."""
    from fedtailor.runs.reader import load_run  # requires safetensors, which training does not need

    return load_run(path)


def load_personal(
    path: str | Path,
    client: int | None = None,
    moment: str = "trained",
    *,
    method: Method | str | None = None,
    model: ModelLike | str | None = None,
    fed: Federation | None = None,
    allow_code: bool = False,
) -> Module:
    """Load a client's personal model as a module in evaluation mode from a run folder, the folder of a deployed client,
    or an exported file; see `fedtailor.export.personal_model`."""
    from fedtailor.export.personal_model import load_personal  # requires safetensors and pydantic

    return load_personal(path, client, moment, method=method, model=model, fed=fed, allow_code=allow_code)


def resume(
    path: str | Path,
    *,
    method: Method | str | None = None,
    model: ModelLike | str | None = None,
    fed: Federation | str | None = None,
    on_round_end: Callable[[Record], None] | None = None,
    allow_code: bool = False,
) -> Run:
    """Resume an unfinished run from its folder, or load it if it is finished; see `fedtailor.experiments.resume`."""
    from fedtailor.experiments.resume import resume  # requires safetensors and pydantic

    return resume(path, method=method, model=model, fed=fed, on_round_end=on_round_end, allow_code=allow_code)
