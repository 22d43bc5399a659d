"""Precision of forward and backward passes: bfloat16 in products, float32 in everything that sums or is kept."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.core.precision import Precision, forward_precision, training_precision
from fedtailor.core.trees import Params
from fedtailor.training.engines.kernels.adapt import adapt

EPSILON = 2**-8  # relative rounding error of bfloat16
CPU = torch.device("cpu")


class Tower(nn.Module):
    """Products around every kind of normalization, called as layers and as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch_norm, self.group_norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.fc, self.layer_norm = nn.Linear(16, 8), nn.LayerNorm(8)
        self.frozen, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.frozen.requires_grad_(False)
        self.dtypes: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        conv = self.conv(x)
        normalized = self.group_norm(self.batch_norm(conv))
        fc = self.fc(normalized.relu().flatten(1))
        function_norm = F.layer_norm(fc, (8,), self.layer_norm.weight, self.layer_norm.bias)
        frozen = self.frozen(function_norm)
        attention = frozen.softmax(-1)
        found = {"conv": conv, "normalized": normalized, "fc": fc, "function_norm": function_norm, "frozen": frozen}
        self.dtypes.update({name: value.dtype for name, value in (found | {"attention": attention}).items()})
        return self.head(attention * frozen)  # type: ignore[no-any-return]


class Sequences(nn.Module):
    """A recurrent layer after a convolution, so that its input is bfloat16."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.conv, self.recurrent, self.head = nn.Conv1d(2, 4, 1), kind(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.recurrent(self.conv(x.flatten(1).reshape(len(x), 2, -1)).transpose(1, 2))[0]
        return self.head(outputs[:, -1])  # type: ignore[no-any-return]


def wrapped(build: Callable[[], nn.Module], precision: Precision, head: str | None = "head") -> tuple[ft.Model, Params]:
    model = ft.wrap(build, head=head).with_precision(precision)
    return model, model.init(seed=0)


def vectorized(model: ft.Model) -> ft.Model:
    """Return the model with the layers of the vectorized engine."""
    return replace(model, module=adapt(model.module), body=adapt(model.body))


def gradient(model: ft.Model, params: Params, x: Tensor, y: Tensor) -> Params:
    def objective(params: Params) -> Tensor:
        return model.losses(model.logits(params, x), y).mean()

    found: Params = torch.func.grad(objective)(params)
    return found


def distance(one: Params, other: Params) -> float:
    """Return the difference of two gradients relative to their norm, over all parameters."""
    left, right = (torch.cat([tree[name].flatten() for name in one]) for tree in (one, other))
    return float((left - right).norm() / left.norm())


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 1, 4, 4, generator=generator), torch.randint(3, (16,), generator=generator)


def test_bf16_gradient_of_linear_model_is_that_of_rounded_inputs_and_weights() -> None:
    """By hand: logits are products of bfloat16 values, and the gradient with respect to them is float32."""
    x, y = torch.tensor([[1.003, -2.0]]), torch.tensor([0])
    model, params = wrapped(lambda: nn.Sequential(nn.Linear(2, 2, bias=False)), "bf16", head=None)
    weight = params["0.weight"]
    logits = (x.bfloat16() @ weight.bfloat16().T).float()
    by_hand = (logits.softmax(1) - torch.tensor([[1.0, 0.0]])).bfloat16().T @ x.bfloat16()
    found = gradient(model, params, x, y)["0.weight"]
    assert found.dtype == torch.float32 and torch.equal(found, by_hand.float())
    assert not torch.equal(found, gradient(model.with_precision("float32"), params, x, y)["0.weight"])


def test_bf16_gradient_equals_that_of_a_loop_with_autocast() -> None:
    x, y = batch()
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3))
    model = ft.wrap(module, head=None).with_precision("bf16")
    with torch.autocast("cpu", torch.bfloat16):
        outputs = module(x)
    torch.autograd.backward(F.cross_entropy(outputs.float(), y))
    found = gradient(model, model.init(0), x, y)
    assert all(p.grad is not None and torch.equal(p.grad, found[name]) for name, p in module.named_parameters())


@pytest.mark.parametrize("is_mapped", [False, True])
def test_bf16_rounds_products_and_normalizes_in_float32(is_mapped: bool) -> None:
    model, params = wrapped(Tower, "bf16")
    x, y = batch()
    if is_mapped:
        model = vectorized(model)
        stacked = {name: torch.stack([p, p]) for name, p in params.items()}
        both = torch.func.vmap(lambda own: gradient(model, own, x, y))(stacked)
        found = {name: value[1] for name, value in both.items()}
    else:
        found = gradient(model, params, x, y)
    assert isinstance(model.module, Tower)
    rounded = {name for name, dtype in model.module.dtypes.items() if dtype == torch.bfloat16}
    assert rounded == {"conv", "fc", "frozen"}
    assert {value.dtype for value in found.values()} == {torch.float32}
    exact = gradient(model.with_precision("float32"), params, x, y)
    trained = [name for name in exact if not name.startswith("conv.bias")]  # batch normalization cancels it
    assert 0 < distance({n: exact[n] for n in trained}, {n: found[n] for n in trained}) < 8 * EPSILON


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])  # other cells do not sum over time
def test_bf16_recurrent_layer_keeps_its_state_in_float32(kind: type[nn.LSTM | nn.GRU]) -> None:
    model, params = wrapped(lambda: Sequences(kind), "bf16")
    x, y = batch()
    found, exact = (gradient(m, params, x, y) for m in (model, model.with_precision("float32")))
    assert 0 < distance(exact, found) < 8 * EPSILON
    with forward_precision("bf16", CPU):
        _, state = model.module.get_submodule("recurrent")(torch.zeros(2, 3, 4).bfloat16())
    assert all(part.dtype == torch.float32 for part in (state if kind is nn.LSTM else [state]))


def test_bf16_features_and_head_are_float32_and_compose_to_the_logits() -> None:
    model, params = wrapped(Tower, "bf16")
    x, _ = batch()
    features = model.features(params, x)
    outputs = model.head_output(model.split(params)[1], features)
    assert features.dtype == outputs.dtype == torch.float32
    assert torch.equal(outputs, model.logits(params, x))


def test_bf16_second_derivative_is_close_to_float32() -> None:
    """Per-FedAvg differentiates through a gradient step."""
    x, y = batch()
    found = []
    model, params = wrapped(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)), "bf16", head=None
    )
    for one in (vectorized(model), model.with_precision("float32")):

        def after_step(params: Params, model: ft.Model = one) -> Tensor:
            step = gradient(model, params, x, y)
            return model.losses(model.logits({n: p - 0.5 * step[n] for n, p in params.items()}, x), y).mean()

        found.append(torch.func.grad(after_step)(params))
    assert 0 < distance(found[1], found[0]) < 8 * EPSILON


def test_tf32_is_set_inside_the_block_only() -> None:
    def flags() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        before = flags()
        with pytest.raises(ZeroDivisionError), training_precision("tf32"):
            assert flags() == ("high", True)
            raise ZeroDivisionError
        assert flags() == before
        for other in ("float32", "bf16"):
            with training_precision(other):
                assert flags() == before
