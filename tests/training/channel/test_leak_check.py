"""Tests of the check that uploads do not contain training inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.core.batch import Batch
from fedtailor.core.trees import Tree

Leak = Callable[[ft.ClientContext, list[Batch]], Tensor]


@dataclass(frozen=True)
class Leaky(ft.Method):
    """FedAvg that also uploads a function of the client's batches."""

    leak: Leak = lambda ctx, batches: torch.zeros(1)

    def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        batches: list[Batch] = []

        def keep(carry: Tree, batch: Batch) -> Tree:
            batches.append(batch)
            return carry

        ctx.scan(keep, {}, epochs=1)
        return state, {"params": message["params"], "extra": self.leak(ctx, batches)}


def inputs(ctx: ft.ClientContext, batches: list[Batch]) -> Tensor:
    return torch.cat([batch.x for batch in batches])[:4]


LEAKS: dict[str, Leak] = {
    "inputs": inputs,
    "a batch": lambda ctx, batches: batches[0].x,
    "one example": lambda ctx, batches: batches[-1].x[0],
    "one example, flat": lambda ctx, batches: batches[0].x[1].flatten(),
    "examples among zeros": lambda ctx, batches: torch.cat([torch.zeros_like(batches[0].x), batches[0].x]),
}


def image_federation(dtype: type = np.float32) -> ft.Federation:
    """Return three clients with images of 3×4, stored as floats or as bytes."""
    random = np.random.default_rng(5)
    x = random.integers(0, 256, (3, 8, 1, 3, 4))
    x = x.astype(np.uint8) if dtype is np.uint8 else (x / 7).astype(dtype)
    y = np.array([0, 1] * 4)
    return ft.Federation.from_arrays([(own, y, own, y) for own in x])


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_leak_check_rejects_training_inputs(leak: str, dtype: type) -> None:
    model = ft.network("logistic", fed := image_federation(dtype))
    with pytest.raises(ft.FedTailorError, match="Leaky would send client 0's training inputs: 'extra'"):
        ft.simulate(Leaky(leak=LEAKS[leak]), model, fed, rounds=1, batch_size=4)


def test_leak_check_rejects_single_example_in_later_round() -> None:
    """Client 1 takes part only in round 3; an upload that differs from an example in one value is accepted."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(3, 5, 100)), np.arange(5) % 2
    fed = ft.Federation.from_arrays([(own, y, own, y) for own in x])

    def leak_in_round_3(change: float) -> Leak:
        def leak(ctx: ft.ClientContext, batches: list[Batch]) -> Tensor:
            last_value = torch.zeros(100, dtype=torch.float64).index_fill(0, torch.tensor([99]), 1.0)
            factor = change if ctx.round == 3 and int(ctx.index) == 1 else 1.0
            example: Tensor = batches[0].x[2]
            return example + factor * last_value

        return leak

    settings: dict[str, Any] = {"schedule": [[0, 2], [2], [0, 1, 2]], "dtype": torch.float64, "engine": "sequential"}
    ft.simulate(Leaky(leak=leak_in_round_3(0.5)), ft.network("logistic", fed), fed, **settings)
    with pytest.raises(ft.FedTailorError, match="client 1's training inputs"):
        ft.simulate(Leaky(leak=leak_in_round_3(0.0)), ft.network("logistic", fed), fed, **settings)


def test_leak_check_rejects_raw_bytes() -> None:
    fed = image_federation(np.uint8)
    method = Leaky(leak=lambda ctx, batches: (batches[0].x * 255).round().to(torch.uint8))
    with pytest.raises(ft.FedTailorError, match="training inputs"):
        ft.simulate(method, ft.network("logistic", fed), fed, rounds=1, batch_size=4)


def test_leak_check_rejects_part_of_several_inputs() -> None:
    x = {"a": np.random.default_rng(0).normal(size=(6, 10)), "b": np.ones((6, 2)), "c": np.arange(6.0)}
    fed = ft.Federation.from_arrays([(x, np.zeros(6, int), x, np.zeros(6, int))], classes=2)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(10, 2)

        def forward(self, x: dict[str, Tensor]) -> Tensor:
            return self.head(x["a"])  # type: ignore[no-any-return]

    with pytest.raises(ft.FedTailorError, match="training inputs"):
        ft.simulate(Leaky(leak=lambda ctx, batches: batches[0].x["a"][0]), First(), fed, rounds=1)


@pytest.mark.parametrize(
    "statistic",
    [
        lambda ctx, batches: torch.cat([b.x for b in batches])[:8].mean(0),  # a mean is not an example
        lambda ctx, batches: batches[0].x[:4] * 1.5,
        lambda ctx, batches: torch.zeros(8, 12),  # equal to the constant image, which tells nothing
    ],
)
def test_leak_check_accepts_statistics_of_inputs(statistic: Leak) -> None:
    fed = image_federation()
    assert isinstance(fed.x, Tensor)
    fed.x[fed.train[0][0]] = 0  # a constant image
    ft.simulate(Leaky(leak=statistic), ft.network("logistic", fed), fed, rounds=1, batch_size=4)


def test_leak_check_accepts_single_value_and_rejects_list() -> None:
    """If examples are single values, one equal value is a coincidence; a list of them is not."""
    y = torch.arange(9.0)
    fed = ft.Federation.from_arrays([(y[:, None].clone(), y, y[:, None].clone(), y)], regression=True)
    model = ft.network("logistic", fed)
    ft.simulate(Leaky(leak=lambda ctx, batches: batches[0].x[0]), model, fed, rounds=1)
    with pytest.raises(ft.FedTailorError, match="training inputs"):
        ft.simulate(Leaky(leak=lambda ctx, batches: batches[0].x), model, fed, rounds=1)
