"""A module as pure functions of its parameters: what it computes is what PyTorch computes, and nothing leaks."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import TinyNet, refusal, same, tiny_federation
from fedtailor.methods import FedAvg, FedPer
from fedtailor.model import as_model
from fedtailor.trees import Params, stack, take

CLOSE = 1e-10  # in float64


class Tied(nn.Module):
    """Tokens whose embedding is also the head's weight; which of the two is registered first is a choice."""

    def __init__(self, head_first: bool = False) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(4, 7)
        self.embed, self.fc = nn.Embedding(7, 4), nn.Linear(4, 4)
        if not head_first:
            self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fc(self.embed(x).mean(1))))  # type: ignore[no-any-return]


class TwoSensors(nn.Module):
    """An accelerometer and a microphone."""

    def __init__(self) -> None:
        super().__init__()
        self.motion, self.sound, self.head = nn.Linear(3, 4), nn.Linear(5, 4), nn.Linear(8, 2)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        parts = [torch.tanh(self.motion(x["motion"])), torch.tanh(self.sound(x["sound"]))]
        return self.head(torch.cat(parts, 1))  # type: ignore[no-any-return]


class Everything(nn.Module):
    """One layer of many kinds, and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.conv, self.group, self.batch = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.BatchNorm2d(4)
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 6, bias=False))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.batch(self.group(self.conv(x * self.scale)))
        return self.head(self.inner(maps.mean((2, 3))))  # type: ignore[no-any-return]


def chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers).double()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def disturbed(params: Params, seed: int) -> Params:
    """Other parameters of the same shapes; variances stay positive."""
    moved = {name: p + 0.1 * normal(*p.shape, seed=seed).to(p) for name, p in params.items()}
    return {name: p.abs() + 0.1 if name.endswith("running_var") else p for name, p in moved.items()}


def loaded(module: nn.Module, state: Params, training: bool = False) -> nn.Module:
    """The user's own class with a state_dict, every name matched."""
    fresh = copy.deepcopy(module).train(training)
    fresh.load_state_dict(state, strict=True)
    return fresh


def one_sentence(text: str) -> bool:
    return text.endswith(".") and ". " not in text and "\n" not in text


def agree_when_mapped(model: ft.Model, x: Tensor) -> None:
    """Outputs and gradients of clients computed at once are those computed one by one."""
    clients = [disturbed(model.init(0), seed) for seed in range(3)]

    def value(params: Params, inputs: Tensor) -> Tensor:
        return model.logits(params, inputs).square().sum()

    inputs = torch.stack([x, x + 0.1, x - 0.1])
    mapped = torch.func.vmap(model.logits)(stack(clients), inputs)
    slopes = torch.func.vmap(torch.func.grad(value))(stack(clients), inputs)
    for number, params in enumerate(clients):
        live = {name: p.clone().requires_grad_() for name, p in params.items()}
        alone = model.logits(live, inputs[number])
        grads = torch.autograd.grad(alone.square().sum(), list(live.values()), materialize_grads=True)
        torch.testing.assert_close(mapped[number], alone.detach(), rtol=CLOSE, atol=CLOSE)
        assert same(take(slopes, number), dict(zip(live, grads, strict=True)), 1e-8)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Fresh modules are the same in every run and in any order of tests."""
    torch.manual_seed(0)


# the start, and the user's module


def test_a_module_starts_from_its_own_weights_whatever_the_seed(net: nn.Module) -> None:
    model = ft.wrap(net)
    assert same(model.init(0), dict(net.state_dict()))
    assert same(model.init(0), model.init(1))


def test_the_start_is_a_copy(net: nn.Module) -> None:
    model = ft.wrap(net)
    model.init(0)["fc.weight"].zero_()
    assert same(model.init(0), dict(net.state_dict()))
    before = model.init(0)
    with torch.no_grad():
        net.get_parameter("fc.weight").zero_()  # the user goes on with their module
    assert same(model.init(0), before)


@pytest.mark.parametrize("training", [True, False])
def test_the_users_module_is_never_modified(training: bool) -> None:
    """Not its weights, not its layers, not its mode, not by training."""
    module = chain(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)).train(training)
    before, text = copy.deepcopy(module.state_dict()), str(module)
    ft.simulate(FedAvg(), ft.wrap(module, head="3"), tiny_federation(), rounds=2, dtype=torch.float64)
    assert same(dict(module.state_dict()), dict(before))
    assert str(module) == text
    assert all(layer.training == training for layer in module.modules())
    assert all(p.requires_grad and p.grad is None for p in module.parameters())
    assert not any(layer._forward_pre_hooks for layer in module.modules())


def test_the_models_functions_are_pure() -> None:
    """Neither parameters nor the model change, so the same call gives the same answer."""
    model = ft.wrap(Everything().double())
    params, x = model.init(0), normal(6, 1, 5, 5)
    before, skeleton = copy.deepcopy(params), copy.deepcopy(model.module.state_dict())
    first, features = model.logits(params, x), model.features(params, x)
    assert torch.equal(model.logits(params, x), first)
    assert torch.equal(model.features(params, x), features)
    assert same(params, before)
    assert same(dict(model.module.state_dict()), dict(skeleton))


def test_the_outputs_are_the_modules_own_with_the_given_parameters(net: nn.Module) -> None:
    model, x = ft.wrap(net), normal(6, 4)
    params = disturbed(model.init(0), 1)
    torch.testing.assert_close(model.logits(params, x), loaded(net, params)(x), rtol=CLOSE, atol=CLOSE)
    assert not torch.allclose(model.logits(params, x), net(x))


def test_a_missing_parameter_is_refused_rather_than_taken_from_the_start(net: nn.Module) -> None:
    model = ft.wrap(net)
    body, _ = model.split(model.init(0))
    for function in (model.logits, model.features):
        with pytest.raises(ft.Refused, match=r"head\.weight"):
            function(body, normal(2, 4))


def test_recurrent_layers_use_the_given_parameters() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gru(x)[0][:, -1])  # type: ignore[no-any-return]

    module, x = Recurrent().double(), normal(5, 6, 3)
    model = ft.wrap(module)
    params = disturbed(model.init(0), 1)
    torch.testing.assert_close(model.logits(params, x), loaded(module, params)(x), rtol=CLOSE, atol=CLOSE)


def test_other_things_than_modules_are_refused() -> None:
    wrong: Any
    for wrong in ("lenet5", TinyNet):
        with pytest.raises(ft.Refused, match=r"ft\.network"):
            as_model(wrong)
    with pytest.raises(ft.Refused, match="no weights yet"):
        ft.wrap(nn.Sequential(nn.LazyLinear(3)), head="0")


def test_the_models_constants_follow_device_and_dtype() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    model = ft.wrap(module, head="1").to(torch.device("cpu"), torch.float64)
    assert model.logits(model.init(0), normal(2, 4)).dtype == torch.float64


# body and head


def test_body_and_head_are_the_whole(net: nn.Module) -> None:
    model = ft.wrap(net)
    params = model.init(0)
    body, head = model.split(params)
    assert set(head) == {"head.weight", "head.bias"}
    assert body | head == params and not body.keys() & head.keys()


def test_the_head_turns_features_into_logits(net: nn.Module) -> None:
    model, x = ft.wrap(net), normal(6, 4)
    params = disturbed(model.init(0), 1)
    out = F.linear(model.features(params, x), params["head.weight"], params["head.bias"])
    torch.testing.assert_close(out, model.logits(params, x), rtol=CLOSE, atol=CLOSE)


def test_features_are_what_goes_into_the_head_also_if_something_follows_it() -> None:
    class Probabilities(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log_softmax(super().forward(x), 1)

    model, x = ft.wrap(Probabilities().double()), normal(6, 4)
    params = model.init(0)
    features = torch.tanh(F.linear(x, params["fc.weight"], params["fc.bias"]))
    torch.testing.assert_close(model.features(params, x), features, rtol=CLOSE, atol=CLOSE)


def test_features_have_the_gradient_of_the_body(net: nn.Module) -> None:
    model, x = ft.wrap(net), normal(6, 4)
    slope = torch.func.grad(lambda p: model.features(p, x).sum())(model.init(0))
    (plain,) = torch.autograd.grad(torch.tanh(net.get_submodule("fc")(x)).sum(), [net.get_parameter("fc.weight")])
    torch.testing.assert_close(slope["fc.weight"], plain, rtol=CLOSE, atol=CLOSE)
    assert not slope["head.weight"].any()


def test_features_can_be_mapped(net: nn.Module) -> None:
    model, x = ft.wrap(net), normal(6, 4)
    clients = [disturbed(model.init(0), seed) for seed in range(3)]
    mapped = torch.func.vmap(lambda params: model.features(params, x))(stack(clients))
    for number, params in enumerate(clients):
        torch.testing.assert_close(mapped[number], model.features(params, x), rtol=CLOSE, atol=CLOSE)


def test_a_nested_head_is_named_by_its_path() -> None:
    classifier = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 3))
    module = nn.Sequential()
    module.add_module("body", nn.Linear(4, 5))
    module.add_module("classifier", classifier)
    model, x = ft.wrap(module.double(), head="classifier.1"), normal(6, 4)
    params = model.init(0)
    assert set(model.split(params)[1]) == {"classifier.1.weight", "classifier.1.bias"}
    torch.testing.assert_close(model.features(params, x), module[0](x).relu().detach(), rtol=CLOSE, atol=CLOSE)
    whole = ft.wrap(module, head="classifier")
    torch.testing.assert_close(whole.features(params, x), module[0](x).detach(), rtol=CLOSE, atol=CLOSE)


def test_a_head_of_a_similar_name_is_not_mixed_up() -> None:
    module = TinyNet()
    module.add_module("head2", nn.Linear(2, 2))
    model = ft.wrap(module)
    assert set(model.split(model.init(0))[1]) == {"head.weight", "head.bias"}


def test_running_statistics_in_the_head_go_with_the_head() -> None:
    model = ft.wrap(nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))), head="1")
    body, head = model.split(model.init(0))
    assert set(body) == {"0.weight", "0.bias"}
    assert {"1.0.running_mean", "1.0.running_var"} <= set(head)


@pytest.mark.parametrize("name", ["head", "", "classifier"])
def test_a_missing_head_is_refused_with_the_name_to_take(name: str) -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.ReLU(), nn.Linear(5, 3), nn.Dropout(0.1)))
    with pytest.raises(ft.Refused, match=r"head='1\.1'"):
        ft.wrap(module, head=name)
    assert ft.wrap(module, head="1.1").head == "1.1"


def test_a_model_without_a_head_trains_where_none_is_needed(fed: ft.Federation) -> None:
    model = ft.wrap(nn.Linear(4, 3).double(), head=None)
    assert ft.simulate(FedAvg(), model, fed, rounds=1).records[0]["accuracy_received"] is not None
    with pytest.raises(ft.Refused, match="head"):
        model.features(model.init(0), normal(2, 4))
    with pytest.raises(ft.Refused, match="head"):
        ft.simulate(FedPer(), model, fed, rounds=1)


def test_a_head_that_never_runs_is_said() -> None:
    class Bypassed(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.fc(x)), self.head.weight, self.head.bias)

    model = ft.wrap(Bypassed().double())
    with pytest.raises(ft.Refused, match="never calls its head"):
        model.features(model.init(0), normal(2, 4))


# frozen and tied parameters


def test_frozen_parameters_are_constants(fed: ft.Federation) -> None:
    module = TinyNet().double()
    module.fc.requires_grad_(False)
    model, x = ft.wrap(module), normal(6, 4)
    assert set(model.init(0)) == {"head.weight", "head.bias"}
    assert model.layers() == {"head": ["head.weight", "head.bias"]}
    run = ft.simulate(FedAvg(lr=1.0), model, fed, rounds=2, dtype=torch.float64)
    state = run.personal(0)
    assert torch.equal(state["fc.weight"], module.fc.weight)
    assert not torch.equal(state["head.weight"], module.head.weight)
    params = {name: state[name] for name in ("head.weight", "head.bias")}
    torch.testing.assert_close(loaded(module, state)(x), model.logits(params, x), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("head_first", [False, True])
def test_tied_weights_are_one_parameter(head_first: bool) -> None:
    module, x = Tied(head_first).double(), torch.arange(12).reshape(4, 3) % 7
    model = ft.wrap(module)
    params = disturbed(model.init(0), 1)
    assert sum(p.numel() for p in params.values()) == sum(p.numel() for p in module.parameters())
    plain = loaded(module, model.state_dict(params))
    torch.testing.assert_close(model.logits(params, x), plain(x).detach(), rtol=CLOSE, atol=CLOSE)
    features = torch.tanh(plain.get_submodule("fc")(plain.get_submodule("embed")(x).mean(1))).detach()
    torch.testing.assert_close(model.features(params, x), features, rtol=CLOSE, atol=CLOSE)
    plain(x).square().sum().backward()
    slope = torch.func.grad(lambda p: model.logits(p, x).square().sum())(params)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert same(slope, expected, 1e-9)  # of both uses together


@pytest.mark.parametrize("head_first", [False, True])
def test_a_weight_tied_across_the_cut_is_the_bodys(head_first: bool) -> None:
    model = ft.wrap(Tied(head_first))
    params = model.init(0)
    body, head = model.split(params)
    assert set(head) == {"head.bias"}
    assert body | head == params
    named = [name for own in model.layers().values() for name in own]
    assert sorted(named) == sorted(params)  # every parameter in one layer, none under a second name


def test_a_head_that_also_stands_in_a_list_is_found() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
            self.head = self.layers[-1]

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)  # type: ignore[no-any-return]

    module, x = Listed().double(), normal(3, 4)
    model = ft.wrap(module)
    params = model.init(0)
    assert {name.split(".")[-1] for name in model.split(params)[1]} == {"weight", "bias"}
    assert model.features(params, x).shape == (3, 5)
    assert loaded(module, model.state_dict(params))(x).shape == (3, 3)


# state_dict


@pytest.mark.parametrize("frozen", [False, True])
def test_a_state_dict_is_the_users_own(frozen: bool) -> None:
    module, x = Everything().double(), normal(6, 1, 5, 5)
    module.conv.requires_grad_(not frozen)
    model = ft.wrap(module)
    params = disturbed(model.init(0), 1)
    plain = loaded(module, model.state_dict(params))
    torch.testing.assert_close(
        plain(x), model.mode(training=False).logits(params, x), rtol=CLOSE, atol=CLOSE, check_stride=False
    )


def test_a_state_dict_comes_back(net: nn.Module) -> None:
    model = ft.wrap(net)
    params = disturbed(model.init(0), 1)
    assert same(model.starting_from(model.state_dict(params)).init(0), params)


def test_a_state_dict_of_another_network_is_refused(net: nn.Module) -> None:
    model = ft.wrap(net)
    params = model.init(0)
    with pytest.raises(ft.Refused, match=r"no 'head\.bias'"):
        model.starting_from({n: p for n, p in params.items() if n != "head.bias"})
    with pytest.raises(ft.Refused, match=r"'head\.bias' is \(7,\)"):
        model.starting_from(params | {"head.bias": torch.zeros(7)})


# layers


def test_layers_hold_weight_and_bias_together_without_normalisation() -> None:
    model = ft.wrap(Everything())
    own, *others = model.layers().items()
    assert own[1] == ["scale"]
    assert dict(others) == {
        "conv": ["conv.weight", "conv.bias"],
        "inner.0": ["inner.0.weight", "inner.0.bias"],
        "inner.3": ["inner.3.weight"],
        "head": ["head.weight", "head.bias"],
    }
    assert [name for name, _ in others] == ["conv", "inner.0", "inner.3", "head"]  # in order
    assert {name for names in model.layers().values() for name in names} <= set(model.init(0))


# inputs, losses, metrics


def sensors(count: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    random = np.random.default_rng(seed)
    y = random.integers(0, 2, count)
    return {"motion": random.normal(size=(count, 3)) + y[:, None], "sound": random.normal(size=(count, 5))}, y


def test_inputs_may_have_several_parts() -> None:
    fed = ft.Federation.from_arrays([(*sensors(20, c), *sensors(40, c + 9)) for c in range(3)])
    module = TwoSensors().double()
    model = ft.wrap(module)
    run = ft.simulate(FedPer(lr=0.5), module, fed, rounds=5, dtype=torch.float64)
    assert run.records[-1]["accuracy_trained"] > 0.75
    x = {name: part[:6] for name, part in fed.x.items()}
    plain = loaded(module, run.personal(1))
    params = {name: p.detach() for name, p in plain.named_parameters()}
    torch.testing.assert_close(model.logits(params, x), plain(x).detach(), rtol=CLOSE, atol=CLOSE)
    assert model.features(params, x).shape == (6, 8)


def test_classification_is_cross_entropy_and_accuracy() -> None:
    model = ft.wrap(TinyNet())
    outputs, y = normal(5, 3), torch.tensor([0, 1, 2, 0, 1])
    losses = model.loss(outputs, y)
    expected = -outputs.softmax(1)[range(5), y].log()
    torch.testing.assert_close(losses, expected, rtol=CLOSE, atol=CLOSE)
    right = sum(int(o.argmax() == t) for o, t in zip(outputs, y, strict=True))
    assert float(model.metrics["accuracy"].function(outputs, y)) == right / 5
    assert (model.score, model.higher_is_better) == ("accuracy", True)


@pytest.mark.parametrize(("outputs", "targets"), [((5,), (5,)), ((5, 1), (5,)), ((5,), (5, 1)), ((5, 3), (5, 3))])
def test_regression_is_the_squared_error_of_every_example(outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    model = ft.wrap(TinyNet(), loss="regression")
    guess, y = normal(*outputs, seed=1), normal(*targets, seed=2)
    rows = zip(guess.reshape(5, -1), y.reshape(5, -1), strict=True)
    expected = torch.stack([((a - b) ** 2).mean() for a, b in rows])
    torch.testing.assert_close(model.loss(guess, y), expected, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(model.metrics["mse"].function(guess, y), expected.mean(), rtol=CLOSE, atol=CLOSE)
    assert (model.score, model.higher_is_better) == ("mse", False)


def test_a_regressor_that_gives_bare_numbers_learns() -> None:
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).squeeze(-1)  # type: ignore[no-any-return]

    x = normal(40, 2)
    y = x @ torch.tensor([1.0, -2.0], dtype=torch.float64)
    fed = ft.Federation.from_arrays([(x, y, x, y)] * 2)
    run = ft.simulate(FedAvg(lr=0.1), ft.wrap(Line(), loss="regression"), fed, rounds=40, batch_size=8)
    assert run.records[-1]["mse_received"] < 1e-3


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).abs()


def test_a_loss_and_metrics_of_ones_own(fed: ft.Federation) -> None:
    largest = ft.Metric(lambda o, t: absolute(o, t).max(), higher_is_better=False)
    model = ft.wrap(
        TinyNet().double(), loss=absolute, metrics={"largest": largest, "first": lambda o, t: o[:, 0].sum()}
    )
    assert (model.score, model.higher_is_better) == ("largest", False)
    assert not model.metrics["first"].higher_is_better  # as of an error, unless said otherwise
    run = ft.simulate(FedAvg(), model, fed, rounds=1, dtype=torch.float64)
    x, y = fed.x[fed.test[0]], fed.y[fed.test[0]]
    outputs = loaded(TinyNet().double(), run.personal(0, "received"))(x).detach()
    values = run.records[0]["per_client"]
    assert values["largest_received"][0] == pytest.approx(float(absolute(outputs, y).max()))
    assert values["first_received"][0] == pytest.approx(float(outputs[:, 0].sum()))
    assert values["loss_received"][0] == pytest.approx(float(absolute(outputs, y).mean()))


def test_without_a_metric_the_loss_ranks() -> None:
    model = ft.wrap(TinyNet(), loss=absolute)
    assert (model.score, model.higher_is_better) == ("loss", False)


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(ft.Refused, match="classification"):
        ft.wrap(TinyNet(), loss="clasification")


def test_everything_can_be_mapped() -> None:
    agree_when_mapped(ft.wrap(Everything().double()), normal(6, 1, 5, 5))


class Senses(nn.Module):
    """Two inputs, each with a layer of its own, then two common layers."""

    def __init__(self) -> None:
        super().__init__()
        self.sound, self.picture = nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.joint, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.joint(torch.cat([self.sound(x[:, :2]), self.picture(x[:, 2:])], 1)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("part", "layers"),
    [
        ("head", ["head"]), ("output", ["head"]), ("input", ["sound"]), ("split_input", ["picture.0", "picture.1"]),
        ("joint", ["joint"]), (("sound", "head"), ["sound", "head"]), (["picture"], ["picture.0", "picture.1"]),
    ],
)  # fmt: skip
def test_a_model_is_split_at_any_layers(part: Any, layers: list[str]) -> None:
    """A part takes its layers with all they own, running statistics included; the rest is all else."""
    model = ft.wrap(Senses(), parts={"split_input": ["picture"]})
    params = model.init(0)
    rest, chosen = model.split(params, part)
    assert {name.rpartition(".")[0] for name in chosen} == set(layers)
    assert rest.keys() | chosen.keys() == params.keys() and not rest.keys() & chosen.keys()


def test_the_network_says_what_its_output_is() -> None:
    """FedAPM's CNN: both linear layers are personal."""
    model = ft.network("cnn", ft.load("digits", clients=2))
    assert {name.split(".")[0] for name in model.split(model.init(0), "output")[1]} == {"fc1", "head"}
    assert {name.split(".")[0] for name in model.split(model.init(0))[1]} == {"head"}


def test_a_split_input_is_trained_apart() -> None:
    """The named branch stays with its client."""
    fed = tiny_federation()
    model = ft.wrap(Senses(), parts={"split_input": ["sound"]})
    run = ft.simulate(ft.methods.FedAPM(split="split_input"), model, fed, rounds=2)
    assert {name.split(".")[0] for name in run.client(0)["personal"]} == {"sound"}


def test_parts_that_are_not_there_are_refused(net: nn.Module) -> None:
    assert refusal(lambda: ft.wrap(net, parts={"output": ["fcc"]})) == "There is no layer 'fcc'; did you mean 'fc'?"
    assert "lists no layers for 'split_input'" in refusal(lambda: ft.wrap(net).split({}, "split_input"))
