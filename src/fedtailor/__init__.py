"""FedTailor: personalised federated learning. Many clients train together, each ends with a model tailored to it.

import fedtailor as ft
fed = ft.load("digits", clients=20, partition="dirichlet", alpha=0.1, seed=0)
run = ft.simulate(ft.methods.FedPer(lr=0.05), ft.network("mlp", fed), fed, rounds=20)
"""

from collections.abc import Callable
from pathlib import Path

from torch.nn import Module

from fedtailor import methods, trees
from fedtailor.batch import Batch
from fedtailor.channel import Channel
from fedtailor.data.datasets import load
from fedtailor.errors import Refused
from fedtailor.federation import Federation
from fedtailor.lines import Record
from fedtailor.local import LocalView
from fedtailor.method import Exchange, Method, Setup, SGDMethod
from fedtailor.metrics import Metric
from fedtailor.model import Model, wrap
from fedtailor.networks import network
from fedtailor.run import Run
from fedtailor.simulate import simulate
from fedtailor.unreliable import Unreliable
from fedtailor.version import VERSION

__version__ = VERSION
__all__ = [
    "Batch",
    "Channel",
    "Exchange",
    "Federation",
    "LocalView",
    "Method",
    "Metric",
    "Model",
    "Refused",
    "Run",
    "SGDMethod",
    "Setup",
    "Unreliable",
    "load",
    "load_personal",
    "methods",
    "network",
    "open",
    "resume",
    "simulate",
    "trees",
    "wrap",
]


def open(path: str | Path) -> Run:
    """A finished run from its folder; see `fedtailor.record`."""
    from fedtailor.record import open_run  # needs safetensors, which training does not

    return open_run(path)


def load_personal(
    path: str | Path,
    client: int | None = None,
    moment: str = "trained",
    *,
    method: Method | None = None,
    model: Model | Module | None = None,
    fed: Federation | None = None,
) -> Module:
    """A client's own model as a module in evaluation mode, from a run's folder, a real client's or an exported file;
    see `fedtailor.personal.module`."""
    from fedtailor.personal.module import load_personal  # needs safetensors and pydantic, which training does not

    return load_personal(path, client, moment, method=method, model=model, fed=fed)


def resume(
    path: str | Path,
    *,
    method: Method | None = None,
    model: Model | Module | None = None,
    fed: Federation | None = None,
    record: Callable[[Record], None] | None = None,
) -> Run:
    """The finished run of a folder, loaded or carried to its end; see `fedtailor.resuming`."""
    from fedtailor.resuming import resume  # needs safetensors and pydantic, which training does not

    return resume(path, method=method, model=model, fed=fed, record=record)
