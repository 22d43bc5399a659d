"""A small run on pictures, and how others read what was exported of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedtailor as ft
from fedtailor.methods import METHODS

SHAPE, MEAN, DEVIATION = (1, 4, 4), 0.4, 0.3


def pictures(clients: int = 3) -> ft.Federation:
    """Clients with small pictures in bytes, of three classes; the same in every call."""
    random = np.random.default_rng(0)

    def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = random.integers(0, 3, count)
        return (random.integers(0, 100, (count, *SHAPE)) + 50 * y[:, None, None, None]).astype(np.uint8), y

    each = [(*samples(6 + client), *samples(7)) for client in range(clients)]
    return ft.Federation.from_arrays(each, classes=3, mean=(MEAN,), deviation=(DEVIATION,))


def train(name: str, fed: ft.Federation, folder: Path | None = None, **more: Any) -> ft.Run:
    settings: dict[str, Any] = {"rounds": 1, "batch_size": 4, "engine": "sequential", "device": "cpu"} | more
    model = settings.pop("model", None) or ft.network("mlp", fed, hidden=(8,))
    return ft.simulate(METHODS[name](), model, fed, folder=folder, **settings)


def loss(answer: Callable[[Tensor], Tensor], fed: ft.Federation, client: int) -> float:
    """On the client's test data, as the record has it."""
    with torch.no_grad():
        return float(F.cross_entropy(answer(fed.x[fed.test[client]]), fed.y[fed.test[client]]))


def in_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    """A file run by ONNX Runtime itself, as somebody without this library would."""
    session = pytest.importorskip("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(["outputs"], {"inputs": x.numpy()})[0])


def in_torch(path: Path) -> Callable[[Tensor], Tensor]:
    """A file run by torch alone."""
    module: Callable[[Tensor], Tensor] = torch.export.load(path).module()
    return module
