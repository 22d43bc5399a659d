"""Mathematics that several methods share: class counts, class means, and the MMD between two sets of features."""

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from conftest import same, tiny_federation
from fedtailor.core.trees import Tree
from fedtailor.methods._shared.class_statistics import class_counts, prototypes
from fedtailor.methods._shared.mmd import squared_mmd
from support.contexts import run_both
from support.problem import make_normalized_net


def test_class_counts_and_prototypes_equal_direct_computation() -> None:
    """Features are those in evaluation mode, and padding is ignored."""
    net = make_normalized_net(dropout=0.5)
    fed, model = tiny_federation(), ft.wrap(net)
    params = model.init(0)

    def statistics(ctx: ft.ClientContext) -> Tree:
        return {"counts": class_counts(ctx), "means": prototypes(ctx, params)}

    found, mapped = run_both(net, statistics)
    assert same(found, mapped, tolerance=1e-12)
    for client in range(4):
        features = model.eval_mode.features(params, fed.x[fed.train[client]])
        y = fed.y[fed.train[client]]
        assert found["counts"][client].tolist() == torch.bincount(y, minlength=3).tolist()
        for number in range(3):
            assert bool(found["means"].present[client, number]) == bool((y == number).any())
            if (y == number).any():
                assert torch.allclose(found["means"].values[client, number], features[y == number].mean(0), atol=1e-12)


@pytest.mark.parametrize("bandwidths", [[1.0], [0.5, 20.0]])
def test_squared_mmd_equals_definition_and_ignores_padding(bandwidths: list[float]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, 3, dtype=torch.float64)

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return sum((torch.exp(-(a - b).square().sum() / w) for w in bandwidths), start=torch.tensor(0.0))

    pairs = [(i, j) for i in range(3) for j in range(3)]
    expected = sum(kernel(x[i], x[j]) + kernel(y[i], y[j]) - 2 * kernel(x[i], y[j]) for i, j in pairs) / 9
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    assert torch.allclose(squared_mmd(x, y, weight, bandwidths), torch.as_tensor(expected), atol=1e-12)
