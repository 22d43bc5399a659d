"""Layers that carry hidden state in PyTorch: here pure, and otherwise the same."""

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
from fedtailor.pure import batch_key, listen
from fedtailor.trees import Params, scale
from test_model import CLOSE, agree_when_mapped, chain, disturbed, loaded, normal, one_sentence


@pytest.fixture(autouse=True)
def batch() -> Iterator[None]:
    """Every test has the key 0 and leaves no other behind; fresh modules are always the same."""
    torch.manual_seed(0)
    token = batch_key.set(0)
    yield
    batch_key.reset(token)


# batch normalisation

NORMS = [(nn.BatchNorm1d, (7, 3)), (nn.BatchNorm1d, (7, 3, 4)), (nn.BatchNorm2d, (7, 3, 4, 5))]


def normalised(layer: nn.Module) -> tuple[nn.Module, ft.Model, Params]:
    """A normalisation layer with weights of its own, as a plain module and as a model."""
    module = chain(layer)
    model = ft.wrap(module, head=None)
    params = disturbed(model.init(0), 1)
    return loaded(module, model.state_dict(params), training=True), model, params


@pytest.mark.parametrize(("kind", "shape"), NORMS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracks", [True, False])
def test_batch_norm_is_pytorchs(kind: type[nn.Module], shape: tuple[int, ...], affine: bool, tracks: bool) -> None:
    plain, model, params = normalised(kind(3, eps=1e-3, affine=affine, track_running_stats=tracks))
    x, before = normal(*shape) * 2 + 1, copy.deepcopy(params)
    quiet = plain.eval()(x).detach()
    torch.testing.assert_close(model.mode(training=False).logits(params, x), quiet, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(model.logits(params, x), plain.train()(x).detach(), rtol=CLOSE, atol=CLOSE)
    assert same(params, before)
    assert len(params) == 2 * affine + 2 * tracks


@pytest.mark.parametrize(("kind", "shape"), NORMS)
def test_listening_hears_what_pytorch_would_remember(kind: Any, shape: tuple[int, ...]) -> None:
    """With momentum 1 the running statistics are those of the last batch."""
    plain, model, params = normalised(kind(3, momentum=1.0))
    x = normal(*shape) * 2 + 1
    plain(x)
    with listen() as heard:
        model.logits(params, x)
    assert set(heard) == set(model.statistics) == {"0.running_mean", "0.running_var"}
    assert same(heard, {name: plain.state_dict()[name] for name in heard}, CLOSE)


def test_nobody_hears_outside_or_in_evaluation() -> None:
    _, model, params = normalised(nn.BatchNorm1d(3))
    with listen() as heard:
        model.mode(training=False).logits(params, normal(7, 3))
    model.logits(params, normal(7, 3))
    assert not heard


def test_listening_works_for_mapped_clients_inside_a_gradient() -> None:
    _, model, params = normalised(nn.BatchNorm2d(3))
    x = torch.stack([normal(6, 3, 2, 2, seed=seed) * (seed + 1) for seed in range(4)])

    def client(own: Tensor) -> tuple[Params, Params]:
        with listen() as heard:
            slope = torch.func.grad(lambda p: model.logits(p, own).square().sum())(params)
        return slope, scale(heard, 1.0)

    _, heard = torch.func.vmap(client)(x)
    rows = x.transpose(1, 2).flatten(2)  # [clients, channels, values]
    torch.testing.assert_close(heard["0.running_mean"], rows.mean(2), rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(heard["0.running_var"], rows.var(2), rtol=CLOSE, atol=CLOSE)


def test_a_client_in_evaluation_uses_its_own_running_statistics() -> None:
    _, model, params = normalised(nn.BatchNorm1d(3))
    agree_when_mapped(model, normal(7, 3))
    agree_when_mapped(model.mode(training=False), normal(7, 3))
    other = params | {"0.running_mean": params["0.running_mean"] + 1}
    serving = model.mode(training=False)
    assert not torch.allclose(serving.logits(other, normal(7, 3)), serving.logits(params, normal(7, 3)))
    assert torch.equal(model.logits(other, normal(7, 3)), model.logits(params, normal(7, 3)))


def test_batch_norm_keeps_precision_frozen_weights_and_ties() -> None:
    first, second = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    second.weight = first.weight
    first.bias.requires_grad_(False)
    with torch.no_grad():
        first.weight.copy_(normal(3))
    model = ft.wrap(nn.Sequential(first, second), head=None)
    params = model.init(0)
    assert torch.equal(params["0.weight"], normal(3))  # every digit of a float64
    assert set(params) == {"0.weight", "1.bias", *model.statistics}


def test_a_layer_that_stands_in_two_places_stays_one() -> None:
    layer = nn.BatchNorm1d(4)
    module, x = chain(layer, nn.Linear(4, 4), layer, nn.Linear(4, 4)), normal(9, 4)
    model = ft.wrap(module, head="3")
    params = disturbed(model.init(0), 1)
    plain = loaded(module, model.state_dict(params))
    torch.testing.assert_close(model.mode(training=False).logits(params, x), plain(x), rtol=CLOSE, atol=CLOSE)
    before = copy.deepcopy(model.module.state_dict())
    model.logits(params, x)
    assert same(dict(model.module.state_dict()), dict(before))
    agree_when_mapped(model, x)


# dropout


def mask(model: ft.Model, key: int | Tensor, *shape: int) -> Tensor:
    """What dropout makes of ones."""
    token = batch_key.set(key)
    try:
        return model.logits({}, torch.ones(shape, dtype=torch.float64))
    finally:
        batch_key.reset(token)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_scales_the_rest(share: float) -> None:
    out = mask(ft.wrap(nn.Dropout(share), head=None), 3, 100, 1000)
    dropped = float((out == 0).double().mean())
    assert abs(dropped - share) < 0.006  # 100,000 numbers: 4 standard errors or more
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / (1 - share)))


def test_dropout_at_its_limits() -> None:
    assert torch.equal(mask(ft.wrap(nn.Dropout(0.0), head=None), 3, 4, 5), torch.ones(4, 5).double())
    assert torch.equal(mask(ft.wrap(nn.Dropout(1.0), head=None), 3, 4, 5), torch.zeros(4, 5).double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dropout_drops_the_same_in_every_dtype(dtype: torch.dtype) -> None:
    model = ft.wrap(nn.Dropout(0.3), head=None)
    out = model.logits({}, torch.ones(200, 300, dtype=dtype))
    assert out.dtype == dtype
    assert torch.equal(out == 0, mask(model, 0, 200, 300) == 0)


def test_the_mask_is_a_function_of_the_key() -> None:
    model = ft.wrap(nn.Dropout(0.5), head=None)
    torch.manual_seed(0)
    first = mask(model, 3, 8, 50)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(mask(model, 3, 8, 50), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(mask(model, 4, 8, 50), first)


def test_dropout_is_off_in_evaluation() -> None:
    model = ft.wrap(nn.Sequential(nn.Dropout(0.5), nn.Dropout1d(0.5)), head=None).mode(training=False)
    assert torch.equal(mask(model, 3, 4, 5, 6), torch.ones(4, 5, 6).double())


def test_modes_are_separate() -> None:
    model = ft.wrap(chain(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)), head="2")
    params, x = model.init(0), normal(9, 4)
    training = model.logits(params, x)
    quiet = model.mode(training=False).logits(params, x)
    assert not torch.allclose(training, quiet)
    assert torch.equal(model.logits(params, x), training)
    assert torch.equal(model.mode(training=False).mode(training=True).logits(params, x), training)


def survivors(share: float, times: int) -> tuple[float, float]:
    """The share that independent dropouts in a row leave, and one standard error of it for 40,000 numbers."""
    left = (1 - share) ** times
    return left, (left * (1 - left) / 40_000) ** 0.5


class Reused(nn.Module):
    """One dropout layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.drop(x))  # type: ignore[no-any-return]


_ONE = nn.Dropout(0.5)


@pytest.mark.parametrize(
    "module",
    [nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), nn.Sequential(_ONE, _ONE), Reused()],
    ids=["two layers", "one layer in two places", "one layer called twice"],
)
def test_dropouts_of_one_pass_are_independent(module: nn.Module) -> None:
    """Two equal masks would leave a half, two independent ones leave a quarter."""
    model = ft.wrap(module, head=None)
    out = mask(model, 3, 40, 1000)
    left, error = survivors(0.5, times=2)
    assert abs(float((out != 0).double().mean()) - left) < 5 * error
    assert torch.equal(mask(model, 3, 40, 1000), out)


def test_features_see_the_mask_that_logits_see() -> None:
    model, x = ft.wrap(chain(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), head="2"), normal(9, 4)
    params = model.init(0)
    out = F.linear(model.features(params, x), params["2.weight"], params["2.bias"])
    torch.testing.assert_close(out, model.logits(params, x), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(("kind", "rest"), [(nn.Dropout1d, (6,)), (nn.Dropout2d, (3, 4)), (nn.Dropout3d, (2, 3, 2))])
def test_whole_maps_are_dropped(kind: Any, rest: tuple[int, ...]) -> None:
    out = mask(ft.wrap(kind(0.5), head=None), 3, 40, 50, *rest).flatten(2)
    assert torch.equal(out, out[:, :, :1].expand_as(out))  # a map goes or stays as a whole
    assert abs(float((out[:, :, 0] == 0).double().mean()) - 0.5) < 0.06


def test_mapped_clients_have_masks_of_their_own() -> None:
    model = ft.wrap(nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.3)), head=None)
    keys = torch.tensor([11, 12, 13])
    mapped = torch.func.vmap(lambda key: mask(model, key, 2, 3, 4, 4))(keys)
    for number, key in enumerate(keys.tolist()):
        assert torch.equal(mapped[number], mask(model, key, 2, 3, 4, 4))
    assert len({tuple(one.flatten().tolist()) for one in mapped}) == 3


def test_dropout_outside_of_a_batch_is_said_in_words() -> None:
    model = ft.wrap(nn.Dropout(0.5), head=None)
    with pytest.raises(ft.Refused, match=r"mode\(training=False\)"):
        contextvars.Context().run(model.logits, {}, torch.ones(2, 3))


@pytest.mark.parametrize(
    "layer",
    [
        nn.GRU(3, 4, num_layers=2, dropout=0.1),
        nn.LSTM(3, 4, num_layers=2, dropout=0.1),
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.TransformerEncoderLayer(4, 2, 8),
        nn.AlphaDropout(0.1),
        nn.FeatureAlphaDropout(0.1),
        nn.InstanceNorm2d(3, track_running_stats=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_with_hidden_state_are_refused_in_one_sentence(layer: nn.Module) -> None:
    with pytest.raises(ft.Refused, match=r"'1.*set ") as refused:  # which layer, and what to do
        ft.wrap(nn.Sequential(nn.Linear(3, 3), layer), head="0")
    assert one_sentence(str(refused.value))


@pytest.mark.parametrize("layer", [nn.GRU(3, 4), nn.LSTM(3, 4), nn.MultiheadAttention(4, 2), nn.InstanceNorm2d(3)])
def test_the_same_layers_without_it_are_welcome(layer: nn.Module) -> None:
    assert ft.wrap(nn.Sequential(nn.Linear(3, 3), layer), head="0").head == "0"
