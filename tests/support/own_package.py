"""A small package of a user's own, with a method, a network, and a loader, installed by its path."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAME = "ward_models"
CODE: dict[str, Any] = {"method": f"{NAME}:Proximal", "network": f"{NAME}:Net", "data": f"{NAME}:load"}
_FILES = {
    "__init__.py": """
from ward_models.data import load
from ward_models.methods import Proximal
from ward_models.networks import Net, Words
""",
    "methods.py": """
from dataclasses import dataclass
from typing import Annotated

import fedtailor as ft
from fedtailor.core.fields import NonNegative
from fedtailor.core.trees import mean, squared_distance

@dataclass(frozen=True)
class Proximal(ft.LocalTraining):
    mu: Annotated[NonNegative, "weight of the proximal term"] = 0.1

    def train(self, ctx, state, message):
        def objective(params, batch):
            return ctx.loss(params, batch) + self.mu / 2 * squared_distance(params, message["params"])

        return state, {"params": ctx.optimize(objective, message["params"], **self.optimizer_options)}

    def receive(self, server, exchange):
        return mean(exchange.received, exchange.sizes)
""",
    "networks.py": """
from torch import nn

class Net(nn.Module):
    def __init__(self, fed, hidden: int = 8):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(fed.x[0].numel(), hidden), nn.Tanh())
        self.head = nn.Linear(hidden, fed.classes)

    def forward(self, x):
        return self.head(self.body(x))

class Words(Net):
    def __init__(self, fed):
        super().__init__(fed)
        self.body = nn.Sequential(nn.Embedding(20, 3), nn.Flatten())
        self.head = nn.Linear(3 * fed.x[0].numel(), fed.classes)
""",
    "data.py": """
import numpy as np

def load(path, scale: float = 1.0):
    found = np.load(path / "scans.npz")
    return scale * found["pixels"], found["diagnosis"]
""",
    "weights.bin": "\0binary",
}


def install_package(site: Path, version: str = "1.2") -> Path:
    """Write the package and its metadata into a folder for Python's path, and return the package's folder."""
    package, info = site / NAME, site / f"{NAME}-{version}.dist-info"
    for folder in (package, info):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in _FILES.items():
        (package / name).write_bytes(text.encode())
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ward-models\nVersion: {version}\n")
    (info / "top_level.txt").write_text(f"{NAME}\n")
    return package


def forget_package() -> None:
    """Let the next import read the package's files again, as another process does."""
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]
    importlib.invalidate_caches()


def is_imported() -> bool:
    return NAME in sys.modules


@contextmanager
def installed(site: Path) -> Iterator[Path]:
    """Have the package on Python's path, and yield the package's folder."""
    package = install_package(site)
    sys.path.append(str(site))
    forget_package()
    try:
        yield package
    finally:
        sys.path.remove(str(site))
        forget_package()
