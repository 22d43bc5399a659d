"""Tests of gradients under vmap: they equal those of `torch.func.grad`, and nothing imports PyTorch's compiler."""

import subprocess
import sys

import torch
from torch import Tensor

from fedtailor.core.losses import cross_entropy
from fedtailor.core.trees import Tree
from fedtailor.core.vmap_grad import mapped_grad

COMPILER = """
import sys
import fedtailor as ft
fed = ft.load("digits", clients=4)
before = set(sys.modules)
ft.simulate(ft.methods.FedAvg(), ft.network("mlp", fed), fed, rounds=1, engine="vectorized", device="cpu")
assert not {"torch._dynamo", "sympy"} & (set(sys.modules) - before)
"""


def loss(tree: Tree, x: Tensor) -> Tensor:
    w, scale = tree["nested"]["w"], tree["scale"]
    assert isinstance(w, Tensor) and isinstance(scale, Tensor)
    return (w * x).sin().sum() * scale  # does not depend on tree["unused"]


def trees(clients: int) -> Tree:
    w, scale = torch.rand(clients, 3, dtype=torch.float64), torch.rand(clients, dtype=torch.float64)
    return {"nested": {"w": w}, "scale": scale, "unused": torch.ones(clients, 2, dtype=torch.float64)}


def test_mapped_grad_equals_torch_func_grad() -> None:
    tree, x = trees(4), torch.rand(4, 3, dtype=torch.float64)
    own = torch.func.vmap(lambda tree, x: mapped_grad(lambda live: loss(live, x), tree))(tree, x)
    expected = torch.func.vmap(torch.func.grad(loss))(tree, x)
    assert torch.equal(own["nested"]["w"], expected["nested"]["w"]) and torch.equal(own["scale"], expected["scale"])
    assert own["unused"].tolist() == [[0.0, 0.0]] * 4


def test_mapped_grad_can_be_differentiated_again() -> None:
    tree, x = trees(4), torch.rand(4, 3, dtype=torch.float64)

    def twice(tree: Tree, x: Tensor) -> Tensor:
        def inner(outer: Tree) -> Tensor:
            found: Tensor = mapped_grad(lambda live: loss(live, x), outer)["nested"]["w"].square().sum()
            return found

        found: Tensor = mapped_grad(inner, tree)["nested"]["w"]
        return found

    w, scale = tree["nested"]["w"], tree["scale"][:, None]
    slope, curvature = scale * x * (w * x).cos(), -scale * x * x * (w * x).sin()
    assert torch.allclose(torch.func.vmap(twice)(tree, x), 2 * slope * curvature, rtol=1e-12)


def test_cross_entropy_has_same_bits_under_vmap() -> None:
    outputs, targets = torch.randn(5, 8, 4), torch.randint(0, 4, (5, 8))
    mapped = torch.func.vmap(cross_entropy)(outputs, targets)
    assert torch.equal(mapped, torch.stack([cross_entropy(*pair) for pair in zip(outputs, targets, strict=True)]))


def test_first_vectorized_round_does_not_import_compiler() -> None:
    subprocess.run([sys.executable, "-c", COMPILER], check=True, timeout=300)
