"""Attention layers under vmap compute the same values as those of PyTorch, and their dropout depends on the batch."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import fedtailor as ft
from fedtailor.core.dropout import batch_key
from fedtailor.core.functional_layers import make_functional
from fedtailor.core.trees import Params
from support.model_checks import CLOSE, is_one_sentence, normal

CAUSAL = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])
ONE_HEAD_EACH = torch.stack([CAUSAL, 2 * normal(5, 5)] * 2)  # [samples × heads, queries, keys]


@pytest.fixture(autouse=True)
def batch() -> Iterator[None]:
    """Set the batch key and the seed to 0 for every test."""
    torch.manual_seed(0)
    token = batch_key.set(0)
    yield
    batch_key.reset(token)


def check_equal(plain: nn.Module, call: Callable[..., Any], x: Tensor) -> None:
    """Check outputs and gradients against PyTorch in evaluation mode, with and without vmap.

    `call` returns the outputs of a module for `x` and a padding mask, which vmap makes a different one per client.
    """
    plain = plain.double().eval()
    functional = make_functional(copy.deepcopy(plain)).eval()
    params = {name: p.detach() for name, p in plain.named_parameters()}
    assert dict(functional.named_parameters()).keys() == params.keys()

    class Caller(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            outputs = call(self.inner, x, padding)
            parts = outputs if isinstance(outputs, tuple) else (outputs,)
            return torch.cat([part.flatten() for part in parts if part is not None])

    def run(params: dict[str, Tensor], x: Tensor, padding: Tensor) -> Tensor:
        by_path = {f"inner.{name}": p for name, p in params.items()}
        return functional_call(Caller(functional), by_path, (x, padding))  # type: ignore[no-any-return]

    expected = Caller(plain)(x, PADDING)
    grads = torch.autograd.grad(expected.sin().sum(), list(plain.parameters()), allow_unused=True)
    stacked = {name: torch.stack([p, p]) for name, p in params.items()}, torch.stack([x, x]), torch.stack([PADDING] * 2)
    with torch.no_grad():
        torch.testing.assert_close(Caller(functional)(x, PADDING), Caller(plain)(x, PADDING), rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(vmap(run)(*stacked)[1], expected, rtol=CLOSE, atol=CLOSE)
    mapped = vmap(grad(lambda *args: run(*args).sin().sum()))(*stacked)
    for name, reference in zip(params, grads, strict=True):
        if reference is not None:
            torch.testing.assert_close(mapped[name][1], reference, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 3, "vdim": 5}])
@pytest.mark.parametrize(
    "options",
    [
        {"need_weights": False},
        {"key_padding_mask": True, "need_weights": False},
        {"key_padding_mask": True, "attn_mask": CAUSAL < 0, "average_attn_weights": False},
        {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
        {"attn_mask": ONE_HEAD_EACH, "need_weights": True},
        {"attn_mask": CAUSAL < 0, "need_weights": False},
    ],
    ids=["plain", "padding", "both", "causal", "per head", "boolean"],
)
def test_attention_equals_pytorch_with_all_options(
    batch_first: bool, bias: bool, extra: dict[str, Any], options: dict[str, Any]
) -> None:
    if options.get("is_causal") and extra in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        options = options | {"is_causal": False}  # in PyTorch, the hint also hides the keys that the layer adds
    widths = {"kdim": 4, "vdim": 4} | {name: width for name, width in extra.items() if name in ("kdim", "vdim")}

    def call(module: nn.Module, x: Tensor, padding: Tensor) -> Any:
        masks = options | ({"key_padding_mask": padding} if "key_padding_mask" in options else {})
        query, key, value = x, x[..., : widths["kdim"]], torch.cat([x, x], -1)[..., : widths["vdim"]]
        inputs = (query, key, value) if "kdim" in extra else (x, x, x)
        return module(*(part if batch_first else part.transpose(0, 1) for part in inputs), **masks)

    check_equal(nn.MultiheadAttention(4, 2, bias=bias, batch_first=batch_first, **extra), call, normal(2, 5, 4))


def test_attention_without_batch_axis_equals_pytorch() -> None:
    check_equal(nn.MultiheadAttention(4, 2), lambda m, x, p: m(x, x, x, key_padding_mask=p[1]), normal(5, 4))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both"])
def test_encoder_equals_pytorch(norm_first: bool, masks: str) -> None:
    """In evaluation mode, PyTorch takes a fast path that looks at the values of the masks."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=norm_first, activation="gelu")
    plain = nn.TransformerEncoder(layer, 2, nn.LayerNorm(4), enable_nested_tensor=not norm_first)

    def call(module: nn.Module, x: Tensor, padding: Tensor) -> Any:
        used = padding if masks in ("padding", "both") else None
        out = module(x, CAUSAL < 0 if masks in ("causal", "both") else None, used)
        return out if used is None else out * ~used[..., None]  # PyTorch's fast path sets padding to 0

    check_equal(plain, call, normal(2, 5, 4))


def test_decoder_and_transformer_equal_pytorch() -> None:
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, batch_first=True), 2)
    check_equal(decoder, lambda m, x, p: m(x, x, CAUSAL, memory_key_padding_mask=p), normal(2, 5, 4))
    whole = nn.Transformer(4, 2, 1, 1, 8, batch_first=True)

    def call(module: nn.Module, x: Tensor, padding: Tensor) -> Any:
        return module(x, x, tgt_mask=CAUSAL, src_key_padding_mask=padding, memory_key_padding_mask=padding)

    check_equal(whole, call, normal(2, 5, 4))


def test_query_without_keys_gets_the_bias_of_the_projection() -> None:
    layer = make_functional(nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True).double())
    with torch.no_grad():
        layer.out_proj.bias.copy_(normal(4))  # type: ignore[union-attr, operator]
    x, nothing = normal(1, 5, 4), torch.ones(1, 5, dtype=torch.bool)
    for training in (True, False):
        out, weights = layer.train(training)(x, x, x, key_padding_mask=nothing)
        torch.testing.assert_close(out, normal(4).expand(1, 5, 4))
        assert not weights.any()
        grads = torch.autograd.grad(out.sum(), list(layer.parameters()), allow_unused=True)
        assert all(g is None or g.isfinite().all() for g in grads)


def test_causal_hint_without_mask_raises() -> None:
    layer, x = make_functional(nn.MultiheadAttention(4, 2)), torch.zeros(5, 2, 4)
    with pytest.raises(ft.ConfigError, match="attn_mask") as raised:
        layer(x, x, x, is_causal=True)
    assert is_one_sentence(str(raised.value))


# dropout


def test_attention_dropout_drops_weights_and_scales_the_rest() -> None:
    """The attention weights after dropout are 0 or the original ones divided by 1 − p, and they average the values."""
    layer = make_functional(nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True).double())
    x = normal(20, 30, 4)
    _, before = layer.eval()(x, x, x, average_attn_weights=False)
    _, after = layer.train()(x, x, x, average_attn_weights=False)
    kept = after != 0
    assert abs(float((~kept).double().mean()) - 0.3) < 0.012  # 5 standard errors for 36,000 weights
    torch.testing.assert_close(after[kept], before[kept] / 0.7)


class Bert(nn.Module):
    """The attention of BERT in Hugging Face's library, which reads the probability from a dropout layer."""

    def __init__(self, how: str, p: float = 0.5) -> None:
        super().__init__()
        self.how, self.dropout = how, nn.Dropout(p)
        self.query, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        p = self.dropout.p if self.training else 0.0
        q = self.query(x)
        if self.how == "sdpa":
            out = F.scaled_dot_product_attention(q, x, x, dropout_p=p, is_causal=True)
        else:
            weights = ((q @ x.transpose(-2, -1)) / 2 + CAUSAL.to(q)).softmax(-1)
            out = F.dropout(weights, p=p, training=self.training) @ x
        return self.head(out.mean(1))  # type: ignore[no-any-return]


def bert_federation() -> ft.Federation:
    clients = [(normal(n, 5, 4, seed=n), torch.arange(n) % 2) for n in (12, 7, 9)]
    return ft.Federation.from_arrays([(x, y, x, y) for x, y in clients], classes=2)


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_functions_with_dropout_are_reproducible_and_equal_on_all_engines(how: str) -> None:
    fed, results = bert_federation(), dict[str, Params]()
    for engine in ("sequential", "vectorized", "pool"):
        torch.manual_seed(len(results))  # must not matter
        model = ft.wrap(lambda: Bert(how))
        run = ft.simulate(ft.methods.FedAvg(), model, fed, rounds=2, batch_size=4, engine=engine, dtype="float64")
        results[engine] = run.personal(0)
    for engine in ("vectorized", "pool"):
        for name, value in results["sequential"].items():
            torch.testing.assert_close(results[engine][name], value, rtol=1e-9, atol=1e-9)
    without = ft.simulate(ft.methods.FedAvg(), lambda: Bert(how, 0.0), fed, rounds=2, batch_size=4, dtype="float64")
    assert not torch.allclose(without.personal(0)["head.weight"], results["pool"]["head.weight"])


def test_attention_function_and_weights_by_hand_drop_the_same() -> None:
    """Both ways call dropout once with the same attention weights, so they are the same network."""
    fed = bert_federation()
    runs = [
        ft.simulate(ft.methods.FedAvg(), partial(Bert, how), fed, rounds=2, batch_size=4, dtype="float64")
        for how in ("sdpa", "eager")
    ]
    for name, value in runs[0].personal(0).items():
        torch.testing.assert_close(runs[1].personal(0)[name], value, rtol=1e-9, atol=1e-9)
