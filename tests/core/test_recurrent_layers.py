"""Recurrent layers under vmap compute the same values as those of PyTorch, in every option."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import fedtailor as ft
from fedtailor.core.dropout import batch_key
from fedtailor.core.functional_layers import make_functional
from fedtailor.core.trees import Params
from support.model_checks import CLOSE, is_one_sentence, normal

KINDS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "projected lstm": lambda *args, **options: nn.LSTM(*args, proj_size=2, **options),
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
}
OPTIONS = [
    {"num_layers": layers, "bias": bias, "batch_first": first, "bidirectional": both}
    for layers, bias, first, both in product((1, 2), (True, False), (True, False), (True, False))
]
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return a layer of PyTorch in float64, and its functional copy."""
    torch.manual_seed(0)
    plain = KINDS[kind](3, 4, **options).double()
    return plain, make_functional(copy.deepcopy(plain))


def all_tensors(outputs: Any) -> list[Tensor]:
    """Return the outputs and the final states as a list."""
    return [outputs] if isinstance(outputs, Tensor) else [t for part in outputs for t in all_tensors(part)]


def total(outputs: Any) -> Tensor:
    """Return a scalar that depends on all outputs and final states."""
    parts = [(part.sin() * (number + 1)).sum() for number, part in enumerate(all_tensors(outputs))]
    return torch.stack(parts).sum()


def check_equal(plain: nn.Module, functional: nn.Module, *inputs: Any) -> None:
    """Check outputs, final states, and all gradients, with and without vmap."""
    params = {name: p.detach() for name, p in plain.named_parameters()}
    assert dict(functional.named_parameters()).keys() == params.keys()

    def value(module: nn.Module, params: Params, *inputs: Any) -> Tensor:
        return total(functional_call(module, params, inputs))

    expected = all_tensors(plain(*inputs))
    expected_grads = torch.autograd.grad(total(plain(*inputs)), list(plain.parameters()))
    add_axis = torch.utils._pytree.tree_map(lambda leaf: leaf[None], (params, *inputs))
    mapped = all_tensors(vmap(lambda p, *x: functional_call(functional, p, x))(*add_axis))
    grads = vmap(grad(lambda p, *x: value(functional, p, *x)))(*add_axis)
    own_grads = torch.autograd.grad(total(functional(*inputs)), list(functional.parameters()))
    for reference, direct, under_vmap in zip(expected, all_tensors(functional(*inputs)), mapped, strict=True):
        torch.testing.assert_close(direct, reference, rtol=CLOSE, atol=CLOSE)
        torch.testing.assert_close(under_vmap[0], reference, rtol=CLOSE, atol=CLOSE)
    for name, reference, direct in zip(params, expected_grads, own_grads, strict=True):
        torch.testing.assert_close(direct, reference, rtol=CLOSE, atol=CLOSE)
        torch.testing.assert_close(grads[name][0], reference, rtol=CLOSE, atol=CLOSE)


@every_kind
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(str(int(o)) for o in options.values()))
def test_layer_equals_pytorch_with_all_options(kind: str, options: dict[str, Any]) -> None:
    plain, functional = make(kind, **options)
    check_equal(plain, functional, normal(2, 5, 3))


@every_kind
def test_layer_equals_pytorch_with_initial_state_and_without_batch(kind: str) -> None:
    plain, functional = make(kind, num_layers=2, bidirectional=True)
    hidden, cell = normal(4, 2, 2 if "projected" in kind else 4, seed=1), normal(4, 2, 4, seed=2)
    is_lstm = isinstance(plain, nn.LSTM)
    check_equal(plain, functional, normal(5, 2, 3), (hidden, cell) if is_lstm else hidden)
    one = (hidden[:, 0], cell[:, 0]) if is_lstm else hidden[:, 0]
    check_equal(plain, functional, normal(5, 3), one)
    check_equal(plain, functional, normal(5, 3))


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
@pytest.mark.parametrize("bias", [True, False])
def test_single_cell_equals_pytorch(kind: str, bias: bool) -> None:
    plain = getattr(nn, kind)(3, 4, bias=bias).double()
    functional = make_functional(copy.deepcopy(plain))
    state = (normal(2, 4, seed=1), normal(2, 4, seed=2)) if kind == "LSTMCell" else normal(2, 4, seed=1)
    check_equal(plain, functional, normal(2, 3), state)
    check_equal(plain, functional, normal(3))


def test_state_dict_and_flatten_parameters_are_those_of_pytorch() -> None:
    plain, functional = make("lstm", num_layers=2, bidirectional=True)
    assert functional.state_dict().keys() == plain.state_dict().keys()
    functional.load_state_dict(plain.state_dict())
    assert isinstance(functional, nn.LSTM)
    functional.flatten_parameters()


@every_kind
def test_dropout_between_layers_depends_on_key_and_is_equal_under_vmap(kind: str) -> None:
    options = {"num_layers": 2, "dropout": 0.4}
    _, functional = make(kind, **options)
    keys, x, params = torch.tensor([7, 8, 9]), normal(5, 2, 3), dict(functional.state_dict())

    def run(key: int | Tensor) -> Tensor:
        token = batch_key.set(key)
        functional.between.uses = 0  # type: ignore[union-attr]
        try:
            return functional_call(functional, params, (x,))[0]  # type: ignore[no-any-return]
        finally:
            batch_key.reset(token)

    mapped = vmap(run)(keys)
    for number, key in enumerate(keys.tolist()):
        torch.testing.assert_close(mapped[number], run(key), rtol=CLOSE, atol=CLOSE)
    assert not torch.allclose(mapped[0], mapped[1])
    torch.testing.assert_close(functional.eval()(x)[0], make(kind, **options)[0].eval()(x)[0], rtol=CLOSE, atol=CLOSE)


def test_dropout_between_layers_equals_dropout_of_two_separate_layers() -> None:
    _, both = make("lstm", num_layers=2, dropout=0.4)
    state = both.state_dict()
    first, second = nn.LSTM(3, 4).double(), nn.LSTM(4, 4).double()
    first.load_state_dict({name: p for name, p in state.items() if name.endswith("l0")})
    second.load_state_dict({name.replace("l1", "l0"): p for name, p in state.items() if name.endswith("l1")})
    x, token = normal(50, 40, 3), batch_key.set(3)
    try:
        outputs = both(x)[0]
        both.between.uses = 0  # type: ignore[union-attr]
        hidden = first(x)[0]
        dropped = both.between(hidden)  # type: ignore[operator]
    finally:
        batch_key.reset(token)
    torch.testing.assert_close(outputs, second(dropped)[0], rtol=CLOSE, atol=CLOSE)
    assert abs(float((dropped == 0).double().mean()) - 0.4) < 0.03  # 5 standard errors for 8000 values
    torch.testing.assert_close(dropped[dropped != 0], (hidden / 0.6)[dropped != 0])


def test_packed_sequence_raises() -> None:
    _, functional = make("gru")
    packed = nn.utils.rnn.pack_padded_sequence(normal(5, 2, 3), [5, 3])
    with pytest.raises(ft.ConfigError, match="padded") as raised:
        functional(packed)
    assert is_one_sentence(str(raised.value))


def test_subclass_of_recurrent_layer_is_not_replaced() -> None:
    class Own(nn.LSTM):
        pass

    assert type(make_functional(Own(3, 4))) is Own
    with pytest.raises(ft.ConfigError, match="Dropout inside Own"):
        make_functional(Own(3, 4, num_layers=2, dropout=0.1))
