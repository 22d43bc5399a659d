"""Short simulations on the tiny federation."""

from typing import Any

import torch
from torch import nn

import fedtailor as ft
from conftest import tiny_federation


def simulate(net: nn.Module, method: ft.Method | None = None, **settings: Any) -> ft.Run:
    """Run a method on the tiny federation; by default three rounds of FedAvg in float64 with batches of 4."""
    defaults: dict[str, Any] = {"batch_size": 4, "dtype": torch.float64}
    if "schedule" not in settings:
        defaults["rounds"] = 3
    return ft.simulate(method or ft.methods.FedAvg(), net, tiny_federation(), **(defaults | settings))
