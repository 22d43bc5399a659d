"""Helpers that run a client function sequentially and under `torch.func.vmap`."""

from typing import Any

import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import SIZES, apply_mapped, tiny_federation
from fedtailor.core.batch import SharedContext
from fedtailor.core.trees import Tree
from fedtailor.training.engines.sequential import Sequential
from fedtailor.training.sample_index import SampleIndex


def make_engine(net: nn.Module, batch_size: int = 2, seed: int = 0) -> tuple[SharedContext, Sequential]:
    """Return the shared context of the tiny federation and a sequential engine for it."""
    fed = tiny_federation()
    model = ft.wrap(net)
    cpu = torch.device("cpu")
    shared = SharedContext(
        model.mode(training=True), fed.x, fed.y, fed.make_preprocessing(torch.float64, cpu), batch_size, 3, 4, 21, seed,
        torch.float64,
    )  # fmt: skip
    return shared, Sequential(shared, SampleIndex(fed.train, cpu))


def run_both(net: nn.Module, function: Any, *trees: Tree, batch_size: int = 2) -> tuple[Tree, Tree]:
    """Apply a function to all four clients and return (sequential results, vmap results), stacked."""
    shared, engine = make_engine(net, batch_size)
    clients = range(len(SIZES))
    return (
        engine.apply(function, 1, clients, *trees),
        apply_mapped(shared, engine.samples, function, 1, list(clients), *trees),
    )


def params_of(net: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the parameters of a module."""
    return {name: p.detach().clone() for name, p in net.named_parameters()}
