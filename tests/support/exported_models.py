"""A small run on images, and readers of exported files that do not use FedTailor."""

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

SHAPE, MEAN, STD = (1, 4, 4), 0.4, 0.3


def image_federation(clients: int = 3) -> ft.Federation:
    """Return clients with small uint8 images of three classes; every call returns the same data."""
    random = np.random.default_rng(0)

    def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = random.integers(0, 3, count)
        return (random.integers(0, 100, (count, *SHAPE)) + 50 * y[:, None, None, None]).astype(np.uint8), y

    arrays = [(*samples(6 + client), *samples(7)) for client in range(clients)]
    return ft.Federation.from_arrays(arrays, classes=3, mean=(MEAN,), std=(STD,))


def train(name: str, fed: ft.Federation, folder: Path | None = None, **options: Any) -> ft.Run:
    settings: dict[str, Any] = {"rounds": 1, "batch_size": 4, "engine": "sequential", "device": "cpu"} | options
    model = settings.pop("model", None) or ft.network("mlp", fed, hidden=(8,))
    return ft.simulate(METHODS[name](), model, fed, folder=folder, **settings)


def loss_on_test_data(model: Callable[[Tensor], Tensor], fed: ft.Federation, client: int) -> float:
    """Return a model's loss on a client's test data, as in the record."""
    with torch.no_grad():
        return float(F.cross_entropy(model(fed.x[fed.test[client]]), fed.y[fed.test[client]]))


def load_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    """Load a file with ONNX Runtime, without FedTailor."""
    session = pytest.importorskip("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(["outputs"], {"inputs": x.numpy()})[0])


def load_pt2(path: Path) -> Callable[[Tensor], Tensor]:
    """Load a file with PyTorch, without FedTailor."""
    module: Callable[[Tensor], Tensor] = torch.export.load(path).module()
    return module


READERS = {"onnx": load_onnx, "pt2": load_pt2}  # format -> reader
