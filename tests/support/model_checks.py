"""Helpers for tests of models, layers, and networks."""

import copy

import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import same
from fedtailor.core.trees import Params, stack, take

CLOSE = 1e-10  # tolerance in float64


def sequential(*layers: nn.Module) -> nn.Module:
    """Return an `nn.Sequential` in float64."""
    return nn.Sequential(*layers).double()


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def perturb(params: Params, seed: int) -> Params:
    """Return different parameters of the same shapes, with positive variances."""
    perturbed = {name: p + 0.1 * normal(*p.shape, seed=seed).to(p) for name, p in params.items()}
    return {name: p.abs() + 0.1 if name.endswith("running_var") else p for name, p in perturbed.items()}


def load_state(module: nn.Module, state: Params, training: bool = False) -> nn.Module:
    """Return a copy of the module with a state_dict loaded; all names must match."""
    fresh = copy.deepcopy(module).train(training)
    fresh.load_state_dict(state, strict=True)
    return fresh


def is_one_sentence(text: str) -> bool:
    """Return whether a message is one sentence on one line."""
    return text.endswith(".") and ". " not in text and "\n" not in text


def check_vmap_agrees(model: ft.Model, x: Tensor) -> None:
    """Check that outputs and gradients under `torch.func.vmap` equal those of one client at a time."""
    clients = [perturb(model.init(0), seed) for seed in range(3)]

    def value(params: Params, inputs: Tensor) -> Tensor:
        return model.logits(params, inputs).square().sum()

    inputs = torch.stack([x, x + 0.1, x - 0.1])
    mapped = torch.func.vmap(model.logits)(stack(clients), inputs)
    mapped_grads = torch.func.vmap(torch.func.grad(value))(stack(clients), inputs)
    for number, params in enumerate(clients):
        live = {name: p.clone().requires_grad_() for name, p in params.items()}
        expected = model.logits(live, inputs[number])
        grads = torch.autograd.grad(expected.square().sum(), list(live.values()), materialize_grads=True)
        torch.testing.assert_close(mapped[number], expected.detach(), rtol=CLOSE, atol=CLOSE)
        assert same(take(mapped_grads, number), dict(zip(live, grads, strict=True)), 1e-8)
