"""Functional layers compute the same values as the stateful layers of PyTorch."""

import contextvars
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import same
from fedtailor.core.dropout import batch_key
from fedtailor.core.functional_layers import capture_batch_stats
from fedtailor.core.trees import Params, scale
from support.model_checks import CLOSE, check_vmap_agrees, is_one_sentence, load_state, normal, perturb, sequential


@pytest.fixture(autouse=True)
def batch() -> Iterator[None]:
    """Set the batch key and the seed to 0 for every test."""
    torch.manual_seed(0)
    token = batch_key.set(0)
    yield
    batch_key.reset(token)


# batch normalization

NORMS = [(nn.BatchNorm1d, (7, 3)), (nn.BatchNorm1d, (7, 3, 4)), (nn.BatchNorm2d, (7, 3, 4, 5))]


def make_norm(layer: nn.Module) -> tuple[nn.Module, ft.Model, Params]:
    """Return a normalization layer with random weights as a module, as a model, and its parameters."""
    module = sequential(layer)
    model = ft.wrap(module, head=None)
    params = perturb(model.init(0), 1)
    return load_state(module, model.state_dict(params), training=True), model, params


@pytest.mark.parametrize(("kind", "shape"), NORMS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("track_running_stats", [True, False])
def test_batch_norm_equals_pytorch(
    kind: type[nn.Module], shape: tuple[int, ...], affine: bool, track_running_stats: bool
) -> None:
    plain, model, params = make_norm(kind(3, eps=1e-3, affine=affine, track_running_stats=track_running_stats))
    x, before = normal(*shape) * 2 + 1, copy.deepcopy(params)
    evaluated = plain.eval()(x).detach()
    torch.testing.assert_close(model.mode(training=False).logits(params, x), evaluated, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(model.logits(params, x), plain.train()(x).detach(), rtol=CLOSE, atol=CLOSE)
    assert same(params, before)
    assert len(params) == 2 * affine + 2 * track_running_stats


@pytest.mark.parametrize(("kind", "shape"), NORMS)
def test_capture_batch_stats_equals_pytorch_running_stats(kind: Any, shape: tuple[int, ...]) -> None:
    """With momentum 1, PyTorch's running statistics are those of the last batch."""
    plain, model, params = make_norm(kind(3, momentum=1.0))
    x = normal(*shape) * 2 + 1
    plain(x)
    with capture_batch_stats() as captured:
        model.logits(params, x)
    assert set(captured) == set(model.running_stats) == {"0.running_mean", "0.running_var"}
    assert same(captured, {name: plain.state_dict()[name] for name in captured}, CLOSE)


def test_capture_batch_stats_in_evaluation_is_empty() -> None:
    _, model, params = make_norm(nn.BatchNorm1d(3))
    with capture_batch_stats() as captured:
        model.mode(training=False).logits(params, normal(7, 3))
    model.logits(params, normal(7, 3))
    assert not captured


def test_capture_batch_stats_under_vmap_and_grad() -> None:
    _, model, params = make_norm(nn.BatchNorm2d(3))
    x = torch.stack([normal(6, 3, 2, 2, seed=seed) * (seed + 1) for seed in range(4)])

    def client(own: Tensor) -> tuple[Params, Params]:
        with capture_batch_stats() as captured:
            gradient = torch.func.grad(lambda p: model.logits(p, own).square().sum())(params)
        return gradient, scale(captured, 1.0)

    _, captured = torch.func.vmap(client)(x)
    rows = x.transpose(1, 2).flatten(2)  # [clients, channels, values]
    torch.testing.assert_close(captured["0.running_mean"], rows.mean(2), rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(captured["0.running_var"], rows.var(2), rtol=CLOSE, atol=CLOSE)


def test_batch_norm_in_evaluation_uses_given_running_stats() -> None:
    _, model, params = make_norm(nn.BatchNorm1d(3))
    check_vmap_agrees(model, normal(7, 3))
    check_vmap_agrees(model.mode(training=False), normal(7, 3))
    other = params | {"0.running_mean": params["0.running_mean"] + 1}
    evaluation = model.mode(training=False)
    assert not torch.allclose(evaluation.logits(other, normal(7, 3)), evaluation.logits(params, normal(7, 3)))
    assert torch.equal(model.logits(other, normal(7, 3)), model.logits(params, normal(7, 3)))


def test_batch_norm_keeps_dtype_frozen_and_tied_weights() -> None:
    first, second = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    second.weight = first.weight
    first.bias.requires_grad_(False)
    with torch.no_grad():
        first.weight.copy_(normal(3))
    model = ft.wrap(nn.Sequential(first, second), head=None)
    params = model.init(0)
    assert torch.equal(params["0.weight"], normal(3))  # every digit of a float64
    assert set(params) == {"0.weight", "1.bias", *model.running_stats}


def test_make_functional_keeps_reused_layer_shared() -> None:
    layer = nn.BatchNorm1d(4)
    module, x = sequential(layer, nn.Linear(4, 4), layer, nn.Linear(4, 4)), normal(9, 4)
    model = ft.wrap(module, head="3")
    params = perturb(model.init(0), 1)
    plain = load_state(module, model.state_dict(params))
    torch.testing.assert_close(model.mode(training=False).logits(params, x), plain(x), rtol=CLOSE, atol=CLOSE)
    before = copy.deepcopy(model.module.state_dict())
    model.logits(params, x)
    assert same(dict(model.module.state_dict()), dict(before))
    check_vmap_agrees(model, x)


# dropout


def mask(model: ft.Model, key: int | Tensor, *shape: int) -> Tensor:
    """Return the output of dropout for ones."""
    token = batch_key.set(key)
    try:
        return model.logits({}, torch.ones(shape, dtype=torch.float64))
    finally:
        batch_key.reset(token)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_drops_fraction_and_scales_rest(p: float) -> None:
    out = mask(ft.wrap(nn.Dropout(p), head=None), 3, 100, 1000)
    dropped = float((out == 0).double().mean())
    assert abs(dropped - p) < 0.006 * (0 < p < 1) or dropped == p  # at least 4 standard errors for 100,000 numbers
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / (1 - p) if p < 1 else 0.0))


def test_dropout_mask_depends_only_on_key() -> None:
    model = ft.wrap(nn.Dropout(0.5), head=None)
    torch.manual_seed(0)
    first = mask(model, 3, 8, 50)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(mask(model, 3, 8, 50), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(mask(model, 4, 8, 50), first)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        out = model.logits({}, torch.ones(200, 300, dtype=dtype))
        assert out.dtype == dtype and torch.equal(out == 0, mask(model, 0, 200, 300) == 0)


def test_mode_does_not_change_original_model() -> None:
    layers = (nn.Linear(4, 5), nn.Dropout(0.5), nn.Dropout1d(0.5), nn.Linear(5, 3))
    model, plain = ft.wrap(sequential(*layers), head="3"), nn.Sequential(*layers).double().eval()
    params, x = model.init(0), normal(9, 4)
    training = model.logits(params, x)
    evaluated = model.mode(training=False).logits(params, x)
    assert not torch.allclose(training, evaluated)
    assert torch.equal(evaluated, torch.func.functional_call(plain, params, (x,)))
    assert torch.equal(model.logits(params, x), training)
    assert torch.equal(model.mode(training=False).mode(training=True).logits(params, x), training)


class Reused(nn.Module):
    """A network that calls one dropout layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.drop(x))  # type: ignore[no-any-return]


_REUSED_LAYER = nn.Dropout(0.5)


@pytest.mark.parametrize(
    "module",
    [nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), nn.Sequential(_REUSED_LAYER, _REUSED_LAYER), Reused()],
    ids=["two layers", "one layer in two places", "one layer called twice"],
)
def test_dropout_calls_in_one_pass_are_independent(module: nn.Module) -> None:
    """Two equal masks would leave a half; two independent masks leave a quarter."""
    model = ft.wrap(module, head=None)
    out = mask(model, 3, 40, 1000)
    assert abs(float((out != 0).double().mean()) - 0.25) < 5 * (0.25 * 0.75 / 40_000) ** 0.5
    assert torch.equal(mask(model, 3, 40, 1000), out)


def test_features_and_logits_use_same_dropout_mask() -> None:
    model, x = ft.wrap(sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), head="2"), normal(9, 4)
    params = model.init(0)
    out = F.linear(model.features(params, x), params["2.weight"], params["2.bias"])
    torch.testing.assert_close(out, model.logits(params, x), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(("kind", "rest"), [(nn.Dropout1d, (6,)), (nn.Dropout2d, (3, 4)), (nn.Dropout3d, (2, 3, 2))])
def test_channel_dropout_drops_whole_feature_maps(kind: Any, rest: tuple[int, ...]) -> None:
    out = mask(ft.wrap(kind(0.5), head=None), 3, 40, 50, *rest).flatten(2)
    assert torch.equal(out, out[:, :, :1].expand_as(out))  # a feature map is dropped or kept as a whole
    assert abs(float((out[:, :, 0] == 0).double().mean()) - 0.5) < 0.06


def test_dropout_masks_under_vmap_equal_sequential() -> None:
    model = ft.wrap(nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.3)), head=None)
    keys = torch.tensor([11, 12, 13])
    mapped = torch.func.vmap(lambda key: mask(model, key, 2, 3, 4, 4))(keys)
    for number, key in enumerate(keys.tolist()):
        assert torch.equal(mapped[number], mask(model, key, 2, 3, 4, 4))
    assert len({tuple(one.flatten().tolist()) for one in mapped}) == 3


def test_dropout_outside_of_a_batch_raises() -> None:
    model = ft.wrap(nn.Dropout(0.5), head=None)
    with pytest.raises(ft.FedTailorError, match=r"mode\(training=False\)"):
        contextvars.Context().run(model.logits, {}, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("layer", "supported"),
    [
        (nn.AlphaDropout(0.1), nn.AlphaDropout(0.0)),
        (nn.FeatureAlphaDropout(0.1), nn.FeatureAlphaDropout(0.0)),
        (nn.InstanceNorm2d(3, track_running_stats=True), nn.InstanceNorm2d(3)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_wrap_with_unsupported_layer_raises(layer: nn.Module, supported: nn.Module) -> None:
    with pytest.raises(ft.FedTailorError, match=r"'1.*set ") as raised:  # the layer and the fix
        ft.wrap(nn.Sequential(nn.Linear(3, 3), layer), head="0")
    assert is_one_sentence(str(raised.value))
    assert ft.wrap(nn.Sequential(nn.Linear(3, 3), supported), head="0").head == "0"


# embeddings


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_sparse_embedding_trains_as_a_dense_one_with_momentum(engine: str) -> None:
    tokens, y = torch.arange(12).reshape(4, 3) % 5, torch.tensor([0, 1, 0, 1])
    fed = ft.Federation.from_arrays([(tokens, y, tokens, y)] * 2, classes=2)

    def trained(sparse: bool) -> ft.Run:
        torch.manual_seed(0)
        layers = (nn.Embedding(5, 3, sparse=sparse), nn.Flatten(), nn.Linear(9, 2))
        method = ft.methods.FedAvg(momentum=0.9, weight_decay=0.1)
        return ft.simulate(method, ft.wrap(nn.Sequential(*layers), head="2"), fed, rounds=2, engine=engine)

    assert same(trained(sparse=True).personal(0), trained(sparse=False).personal(0))
