"""Tests that fused group normalization of many clients equals the separate layers of each client."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedtailor.networks.resnet import ResNet20
from fedtailor.training.engines.kernels import adapt as adapt_file
from fedtailor.training.engines.kernels import normalization
from fedtailor.training.engines.kernels.adapt import adapt
from fedtailor.training.engines.kernels.geometry import Normalization
from fedtailor.training.engines.kernels.normalization import group_norm

Function = Callable[..., Tensor]
EPS = 1e-3
KINDS = {
    "norm": Normalization(2, EPS),
    "relu": Normalization(2, EPS, relu=True),
    "residual": Normalization(3, EPS, relu=True, residual=True),
}


def separate(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, kind: Normalization) -> Tensor:
    out = F.group_norm(x, kind.groups, weight, bias, kind.eps)
    out = out if residual is None else out + residual
    return F.relu(out) if kind.relu else out


def problem(device: torch.device, kind: Normalization) -> list[Tensor]:
    """Return x, weights, biases, and residuals of three clients: four samples of 6 channels and 5×7 pixels each."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4, 6, 5, 7), (3, 6), (3, 6), *([(3, 4, 6, 5, 7)] if kind.residual else [])]
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def sine(function: Function, kind: Normalization, x: Tensor, weight: Tensor, bias: Tensor, *residual: Tensor) -> Tensor:
    """Return a loss that is not linear in any argument."""
    return torch.sin(2 * function(x, weight, bias, residual[0] if residual else None, kind).float()).sum()


def gradients(loss: Function, *args: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = grad(loss, tuple(range(len(args))))(*args)
    return found


def second(loss: Function, *args: Tensor) -> tuple[Tensor, ...]:
    return gradients(lambda *t: torch.stack([torch.sin(g).sum() for g in gradients(loss, *t)]).sum(), *args)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_group_norm_and_derivatives_match_separate_layers(kind: Normalization, kernel_device: torch.device) -> None:
    args = problem(kernel_device, kind)
    ours, reference = partial(sine, group_norm, kind), partial(sine, separate, kind)
    for derivative, tolerance in ((gradients, 1e-5), (second, 1e-3)):
        found, expected = (vmap(partial(derivative, loss))(*args) for loss in (ours, reference))
        for left, right in zip(found, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance * float(right.abs().max()))
    torch.testing.assert_close(vmap(ours)(*args), vmap(reference)(*args))
    again = vmap(partial(gradients, ours))(*args)
    assert all(map(torch.equal, again, vmap(partial(gradients, ours))(*args)))  # reproducible to the bit


def test_group_norm_with_shared_weights_and_outer_gradient(kernel_device: torch.device) -> None:
    kind = KINDS["relu"]
    x, weight, bias = problem(kernel_device, kind)

    def total(function: Function, x: Tensor, weight: Tensor) -> Tensor:
        return vmap(lambda x: sine(function, kind, x, weight, bias[0]))(x).sum()

    found, expected = (grad(partial(total, function), (0, 1))(x, weight[0]) for function in (group_norm, separate))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_inputs_that_the_kernels_cannot_compute_are_as_in_pytorch(kernel_device: torch.device) -> None:
    ones = torch.ones(6, device=kernel_device)
    x, broadcast = (torch.ones(4, 6, *area, device=kernel_device) for area in ((5, 7), (1, 1)))
    assert torch.equal(group_norm(x, ones, ones, broadcast, KINDS["residual"]), torch.full_like(x, 2))
    assert group_norm(x[..., :0], ones, ones, None, KINDS["norm"]).shape == (4, 6, 5, 0)
    with pytest.raises(ValueError, match="more than 1 value"):
        group_norm(broadcast[:1], ones, ones, None, Normalization(6, EPS))


def test_relu_is_fused_with_pooling_rather_than_with_normalization(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def pool(x: Tensor) -> Tensor:
        called.append("relu and pool")
        return F.max_pool2d(x, 2)

    def norm(x: Tensor, *args: Any) -> Tensor:
        called.append("norm and relu" if args[-1].relu else "norm")
        return x

    monkeypatch.setattr(adapt_file, "relu_pool", pool)
    monkeypatch.setattr(normalization, "group_norm", norm)
    network = adapt(nn.Sequential(nn.GroupNorm(1, 2), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(1, 2), nn.ReLU()))
    network(torch.ones(1, 2, 4, 4))
    assert called == ["norm", "relu and pool", "norm and relu"]


def test_group_norm_keeps_nan(kernel_device: torch.device) -> None:
    x = torch.full((1, 2, 2, 2), float("nan"), device=kernel_device)
    ones = torch.ones(2, device=kernel_device)
    assert group_norm(x, ones, ones, None, KINDS["relu"]).isnan().all()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_group_norm_of_bf16_rounds_results_only(kind: Normalization, kernel_device: torch.device) -> None:
    """Statistics and sums are in float32, so an error is at most one unit of the last of 8 binary digits."""
    rounded = [t if t.ndim == 2 else t.bfloat16() for t in problem(kernel_device, kind)]
    exact = [t.float() for t in rounded]
    found, expected = (
        vmap(lambda x, w, b, *r, f=f: f(x, w, b, r[0] if r else None, kind))(*args)
        for f, args in ((group_norm, rounded), (separate, exact))
    )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-6)
    ours = vmap(partial(gradients, partial(sine, group_norm, kind)))(*rounded)
    reference = vmap(partial(gradients, partial(sine, separate, kind)))(*exact)
    for left, right, arg in zip(ours, reference, rounded, strict=True):
        assert left.dtype == arg.dtype
        assert (left.float() - right).norm() / right.norm() < 8 * 2**-8


def test_adapted_residual_network_has_gradients_of_original(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ResNet20(channels=(4, 8), blocks=(1, 1), hidden=(6,)).build((3, 8, 8), 5).to(kernel_device)
    adapted, seen = adapt(module), list[Normalization]()

    def recorded(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, kind: Normalization) -> Tensor:
        seen.append(kind)
        return group_norm(x, weight, bias, residual, kind)

    monkeypatch.setattr(normalization, "group_norm", recorded)
    generator = torch.Generator().manual_seed(0)
    stacked = {
        name: (value + torch.randn(2, *value.shape, generator=generator).to(value) / 8).detach()
        for name, value in module.named_parameters()
    }
    x = torch.randn(2, 3, 3, 8, 8, generator=generator).to(kernel_device)

    def loss(network: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(network, params, (x,))
        return out.square().sum()

    found, expected = (vmap(grad(partial(loss, network)))(stacked, x) for network in (adapted, module))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert [(kind.relu, kind.residual) for kind in seen] == [(True, False), *[(True, False), (True, True)] * 2]
    assert adapt(nn.Sequential(nn.GroupNorm(1, 2, affine=False), nn.ReLU()))[0](x[0, :, :2]).shape == (3, 2, 8, 8)
