"""`Model` computes the same values as the wrapped module, as pure functions of the parameters."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import TinyNet, error_message, same, tiny_federation
from fedtailor.core.model import as_model
from fedtailor.core.trees import stack
from fedtailor.methods import FedAvg, FedPer
from support.model_checks import CLOSE, check_vmap_agrees, load_state, normal, perturb, sequential


class Tied(nn.Module):
    """A token model whose embedding is also the weight of the head; either may be registered first."""

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
    """A network with two inputs, an accelerometer and a microphone."""

    def __init__(self) -> None:
        super().__init__()
        self.motion, self.sound, self.head = nn.Linear(3, 4), nn.Linear(5, 4), nn.Linear(8, 2)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        parts = [torch.tanh(self.motion(x["motion"])), torch.tanh(self.sound(x["sound"]))]
        return self.head(torch.cat(parts, 1))  # type: ignore[no-any-return]


class ManyLayers(nn.Module):
    """A network with layers of many types and a parameter outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.conv, self.group, self.batch = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.BatchNorm2d(4)
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 6, bias=False))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.batch(self.group(self.conv(x * self.scale)))
        return self.head(self.inner(maps.mean((2, 3))))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def seed_torch() -> None:
    """Seed the initial weights, so that they do not depend on the order of tests."""
    torch.manual_seed(0)


# initial weights and the user's module


def test_init_of_module_ignores_seed(net: nn.Module) -> None:
    model = ft.wrap(net)
    assert same(model.init(0), dict(net.state_dict()))
    assert same(model.init(0), model.init(1))


def test_init_of_factory_follows_seed_alone() -> None:
    model, state = ft.wrap(TinyNet), torch.get_rng_state()
    assert same(model.init(3), model.init(3))
    assert not same(model.init(3), model.init(4))
    torch.rand(5)
    assert same(model.init(3), ft.wrap(lambda: TinyNet()).init(3))
    torch.set_rng_state(state)
    model.init(3)
    assert torch.equal(torch.get_rng_state(), state)  # the user's own random numbers do not change


def test_simulate_with_factory_draws_initial_weights_from_seed(fed: ft.Federation) -> None:
    runs = [ft.simulate(FedAvg(), TinyNet, fed, rounds=1, seed=seed) for seed in (0, 0, 1)]
    first, again, other = (run.server["params"] for run in runs)
    assert same(first, again)
    assert not same(first, other)


def test_init_returns_copy(net: nn.Module) -> None:
    model = ft.wrap(net)
    model.init(0)["fc.weight"].zero_()
    assert same(model.init(0), dict(net.state_dict()))
    before = model.init(0)
    with torch.no_grad():
        net.get_parameter("fc.weight").zero_()  # the user changes the module later
    assert same(model.init(0), before)


@pytest.mark.parametrize("training", [True, False])
def test_simulate_does_not_modify_module(training: bool) -> None:
    """Training changes neither its weights nor its layers nor its mode."""
    module = sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)).train(training)
    before, text = copy.deepcopy(module.state_dict()), str(module)
    ft.simulate(FedAvg(), ft.wrap(module, head="3"), tiny_federation(), rounds=2, dtype=torch.float64)
    assert same(dict(module.state_dict()), dict(before))
    assert str(module) == text
    assert all(layer.training == training for layer in module.modules())
    assert all(p.requires_grad and p.grad is None for p in module.parameters())
    assert not any(layer._forward_pre_hooks for layer in module.modules())


def test_logits_and_features_are_pure() -> None:
    """A call changes neither the parameters nor the model, so it can be repeated."""
    model = ft.wrap(ManyLayers().double())
    params, x = model.init(0), normal(6, 1, 5, 5)
    before, skeleton = copy.deepcopy(params), copy.deepcopy(model.module.state_dict())
    first, features = model.logits(params, x), model.features(params, x)
    assert torch.equal(model.logits(params, x), first)
    assert torch.equal(model.features(params, x), features)
    assert same(params, before)
    assert same(dict(model.module.state_dict()), dict(skeleton))


def test_logits_equal_module_with_given_parameters(net: nn.Module) -> None:
    model, x = ft.wrap(net), normal(6, 4)
    params = perturb(model.init(0), 1)
    torch.testing.assert_close(model.logits(params, x), load_state(net, params)(x), rtol=CLOSE, atol=CLOSE)
    assert not torch.allclose(model.logits(params, x), net(x))


def test_logits_with_missing_parameter_raises(net: nn.Module) -> None:
    model = ft.wrap(net)
    body, _ = model.split(model.init(0))
    for function in (model.logits, model.features):
        with pytest.raises(ft.FedTailorError, match=r"head\.weight"):
            function(body, normal(2, 4))


def test_logits_of_recurrent_layers_use_given_parameters() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gru(x)[0][:, -1])  # type: ignore[no-any-return]

    module, x = Recurrent().double(), normal(5, 6, 3)
    model = ft.wrap(module)
    params = perturb(model.init(0), 1)
    torch.testing.assert_close(model.logits(params, x), load_state(module, params)(x), rtol=CLOSE, atol=CLOSE)


def test_as_model_with_invalid_model_raises() -> None:
    wrong: Any
    for wrong, hint in (("lenet5", r"ft\.network"), (nn.Linear, "lambda: Linear"), (dict, r"return an nn\.Module")):
        with pytest.raises(ft.FedTailorError, match=hint):
            as_model(wrong)
    with pytest.raises(ft.FedTailorError, match="no weights yet"):
        ft.wrap(nn.Sequential(nn.LazyLinear(3)), head="0")


def test_to_converts_frozen_weights() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    model = ft.wrap(module, head="1").to(torch.device("cpu"), torch.float64)
    assert model.logits(model.init(0), normal(2, 4)).dtype == torch.float64


# body and head


def test_head_output_on_features_equals_logits(net: nn.Module) -> None:
    model, x = ft.wrap(net), normal(6, 4)
    params = perturb(model.init(0), 1)
    _, head = model.split(params)
    assert torch.equal(model.head_output(head, model.features(params, x)), model.logits(params, x))
    assert model.head_size == (3, 5)


def test_split_batch_norm_finds_layers_by_type() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Sequential(nn.BatchNorm1d(5)), nn.Linear(5, 3))
    model = ft.wrap(module, head="3")
    rest, norms = model.split(model.init(0), "batch_norm")
    assert {name.rpartition(".")[0] for name in norms} == {"1", "2.0"} and len(norms) == 8
    assert {name.rpartition(".")[0] for name in rest} == {"0", "3"}


def test_features_with_layers_after_head_are_input_of_head() -> None:
    class Probabilities(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log_softmax(super().forward(x), 1)

    model, x = ft.wrap(Probabilities().double()), normal(6, 4)
    params = model.init(0)
    features = torch.tanh(F.linear(x, params["fc.weight"], params["fc.bias"]))
    torch.testing.assert_close(model.features(params, x), features, rtol=CLOSE, atol=CLOSE)


def test_features_gradient_equals_body_gradient(net: nn.Module) -> None:
    model, x = ft.wrap(net), normal(6, 4)
    gradient = torch.func.grad(lambda p: model.features(p, x).sum())(model.init(0))
    (plain,) = torch.autograd.grad(torch.tanh(net.get_submodule("fc")(x)).sum(), [net.get_parameter("fc.weight")])
    torch.testing.assert_close(gradient["fc.weight"], plain, rtol=CLOSE, atol=CLOSE)
    assert not gradient["head.weight"].any()


def test_features_vmap_equals_sequential(net: nn.Module) -> None:
    model, x = ft.wrap(net), normal(6, 4)
    clients = [perturb(model.init(0), seed) for seed in range(3)]
    mapped = torch.func.vmap(lambda params: model.features(params, x))(stack(clients))
    for number, params in enumerate(clients):
        torch.testing.assert_close(mapped[number], model.features(params, x), rtol=CLOSE, atol=CLOSE)


def test_wrap_with_nested_head() -> None:
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


def test_split_ignores_layer_with_similar_name() -> None:
    module = TinyNet()
    module.add_module("head2", nn.Linear(2, 2))
    model = ft.wrap(module)
    assert set(model.split(model.init(0))[1]) == {"head.weight", "head.bias"}


def test_split_head_includes_its_running_stats() -> None:
    model = ft.wrap(nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))), head="1")
    body, head = model.split(model.init(0))
    assert set(body) == {"0.weight", "0.bias"}
    assert {"1.0.running_mean", "1.0.running_var"} <= set(head)


@pytest.mark.parametrize("name", ["head", "", "classifier"])
def test_wrap_with_missing_head_suggests_last_layer(name: str) -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.ReLU(), nn.Linear(5, 3), nn.Dropout(0.1)))
    with pytest.raises(ft.FedTailorError, match=r"head='1\.1'"):
        ft.wrap(module, head=name)
    assert ft.wrap(module, head="1.1").head == "1.1"


def test_simulate_without_head_works_unless_method_needs_it(fed: ft.Federation) -> None:
    model = ft.wrap(nn.Linear(4, 3).double(), head=None)
    assert ft.simulate(FedAvg(), model, fed, rounds=1).records[0]["accuracy_received"] is not None
    with pytest.raises(ft.FedTailorError, match="head"):
        model.features(model.init(0), normal(2, 4))
    with pytest.raises(ft.FedTailorError, match="head"):
        ft.simulate(FedPer(), model, fed, rounds=1)


def test_features_with_head_that_never_runs_raises() -> None:
    class Bypassed(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.fc(x)), self.head.weight, self.head.bias)

    model = ft.wrap(Bypassed().double())
    with pytest.raises(ft.FedTailorError, match="never calls its head"):
        model.features(model.init(0), normal(2, 4))


# frozen and tied parameters


def test_frozen_parameters_stay_constant(fed: ft.Federation) -> None:
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
    torch.testing.assert_close(load_state(module, state)(x), model.logits(params, x), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("head_first", [False, True])
def test_tied_weights_are_one_parameter(head_first: bool) -> None:
    module, x = Tied(head_first).double(), torch.arange(12).reshape(4, 3) % 7
    model = ft.wrap(module)
    params = perturb(model.init(0), 1)
    assert sum(p.numel() for p in params.values()) == sum(p.numel() for p in module.parameters())
    plain = load_state(module, model.state_dict(params))
    torch.testing.assert_close(model.logits(params, x), plain(x).detach(), rtol=CLOSE, atol=CLOSE)
    features = torch.tanh(plain.get_submodule("fc")(plain.get_submodule("embed")(x).mean(1))).detach()
    torch.testing.assert_close(model.features(params, x), features, rtol=CLOSE, atol=CLOSE)
    plain(x).square().sum().backward()
    gradient = torch.func.grad(lambda p: model.logits(p, x).square().sum())(params)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert same(gradient, expected, 1e-9)  # the sum over both uses


@pytest.mark.parametrize("head_first", [False, True])
def test_split_puts_tied_weight_in_body(head_first: bool) -> None:
    model = ft.wrap(Tied(head_first))
    params = model.init(0)
    body, head = model.split(params)
    assert set(head) == {"head.bias"}
    assert body | head == params
    named = [name for own in model.layers().values() for name in own]
    assert sorted(named) == sorted(params)  # each parameter once


def test_head_that_is_also_in_a_list_is_found() -> None:
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
    assert load_state(module, model.state_dict(params))(x).shape == (3, 3)


# state_dict


@pytest.mark.parametrize("frozen", [False, True])
def test_state_dict_loads_into_users_module(frozen: bool) -> None:
    module, x = ManyLayers().double(), normal(6, 1, 5, 5)
    module.conv.requires_grad_(not frozen)
    model = ft.wrap(module)
    params = perturb(model.init(0), 1)
    plain = load_state(module, model.state_dict(params))
    torch.testing.assert_close(
        plain(x), model.mode(training=False).logits(params, x), rtol=CLOSE, atol=CLOSE, check_stride=False
    )


def test_with_initial_weights_restores_state_dict(net: nn.Module) -> None:
    model = ft.wrap(net)
    params = perturb(model.init(0), 1)
    assert same(model.with_initial_weights(model.state_dict(params)).init(0), params)


def test_with_initial_weights_of_another_network_raises(net: nn.Module) -> None:
    model = ft.wrap(net)
    params = model.init(0)
    with pytest.raises(ft.FedTailorError, match=r"no 'head\.bias'"):
        model.with_initial_weights({n: p for n, p in params.items() if n != "head.bias"})
    with pytest.raises(ft.FedTailorError, match=r"'head\.bias' is \(7,\)"):
        model.with_initial_weights(params | {"head.bias": torch.zeros(7)})


# layers


def test_layers_exclude_normalization() -> None:
    model = ft.wrap(ManyLayers())
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


def test_simulate_with_several_inputs() -> None:
    fed = ft.Federation.from_arrays([(*sensors(20, c), *sensors(40, c + 9)) for c in range(3)])
    module = TwoSensors().double()
    model = ft.wrap(module)
    run = ft.simulate(FedPer(lr=0.5), module, fed, rounds=5, dtype=torch.float64)
    assert run.records[-1]["accuracy_trained"] > 0.75
    x = {name: part[:6] for name, part in fed.x.items()}
    plain = load_state(module, run.personal(1))
    params = {name: p.detach() for name, p in plain.named_parameters()}
    torch.testing.assert_close(model.logits(params, x), plain(x).detach(), rtol=CLOSE, atol=CLOSE)
    assert model.features(params, x).shape == (6, 8)


def test_classification_loss_and_accuracy() -> None:
    model = ft.wrap(TinyNet())
    outputs, y = normal(5, 3), torch.tensor([0, 1, 2, 0, 1])
    losses = model.loss(outputs, y)
    expected = -outputs.softmax(1)[range(5), y].log()
    torch.testing.assert_close(losses, expected, rtol=CLOSE, atol=CLOSE)
    correct = sum(int(o.argmax() == t) for o, t in zip(outputs, y, strict=True))
    assert float(model.metrics["accuracy"].function(outputs, y)) == correct / 5
    assert (model.score, model.higher_is_better) == ("accuracy", True)


@pytest.mark.parametrize(("outputs", "targets"), [((5,), (5,)), ((5, 1), (5,)), ((5,), (5, 1)), ((5, 3), (5, 3))])
def test_regression_loss_is_squared_error_per_example(outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    model = ft.wrap(TinyNet(), loss="regression")
    predicted, y = normal(*outputs, seed=1), normal(*targets, seed=2)
    rows = zip(predicted.reshape(5, -1), y.reshape(5, -1), strict=True)
    expected = torch.stack([((a - b) ** 2).mean() for a, b in rows])
    torch.testing.assert_close(model.loss(predicted, y), expected, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(model.metrics["mse"].function(predicted, y), expected.mean(), rtol=CLOSE, atol=CLOSE)
    assert (model.score, model.higher_is_better) == ("mse", False)


def test_simulate_regression_with_1d_outputs_learns() -> None:
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


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).abs()


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)


def first_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[:, 0].sum()


def test_custom_loss_and_metrics(fed: ft.Federation) -> None:
    metrics: dict[str, Any] = {
        "largest": ft.Metric(lambda o, t: absolute_error(o, t).max(), higher_is_better=False),
        "first": ft.Metric(first_output, higher_is_better=True),
    }
    model = ft.wrap(TinyNet().double(), loss=absolute_error, metrics=metrics)
    assert (model.score, model.higher_is_better) == ("largest", False)
    run = ft.simulate(FedAvg(), model, fed, rounds=1, dtype=torch.float64)
    x, y = fed.x[fed.test[0]], fed.y[fed.test[0]]
    outputs = load_state(TinyNet().double(), run.personal(0, "received"))(x).detach()
    values = run.records[0]["per_client"]
    assert values["largest_received"][0] == pytest.approx(float(absolute_error(outputs, y).max()))
    assert values["first_received"][0] == pytest.approx(float(outputs[:, 0].sum()))
    assert values["loss_received"][0] == pytest.approx(float(absolute_error(outputs, y).mean()))


@pytest.mark.parametrize(("name", "higher"), [("accuracy", True), ("Macro-F1", True), ("mae", False), ("RMSE", False)])
@pytest.mark.parametrize("loss", ["classification", "regression", smoothed])
def test_metric_direction_follows_from_name_and_never_from_loss(name: str, higher: bool, loss: Any) -> None:
    assert ft.wrap(TinyNet(), loss=loss, metrics={name: first_output}).higher_is_better is higher


def test_metric_without_known_direction_raises() -> None:
    with pytest.raises(ft.FedTailorError, match=r"ft\.Metric\(function, higher_is_better=True\)"):
        ft.wrap(TinyNet(), metrics={"first": first_output})


def test_custom_loss_on_classes_keeps_classification_metrics(fed: ft.Federation) -> None:
    runs = {
        lr: ft.simulate(FedAvg(lr=lr), ft.wrap(TinyNet(), loss=smoothed), fed, rounds=3, validation=0.3)
        for lr in (1e-6, 0.5)
    }
    for run in runs.values():
        assert (run.info["score"], run.info["higher_is_better"]) == ("accuracy", True)
        assert run.records[-1]["auc_received"] is not None
        best = run.summary()["received"]["best_test"]
        assert best["weighted"] == max(record["accuracy_received"] for record in run.records)


def test_custom_loss_without_class_outputs_ranks_by_loss(fed: ft.Federation) -> None:
    class OneOutput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)  # type: ignore[no-any-return]

    run = ft.simulate(FedAvg(), ft.wrap(OneOutput(), loss=absolute_error), fed, rounds=1)
    assert (run.info["score"], run.info["higher_is_better"]) == ("loss", False)


def test_wrap_with_unknown_loss_raises() -> None:
    with pytest.raises(ft.FedTailorError, match="classification"):
        ft.wrap(TinyNet(), loss="clasification")


def test_many_layers_vmap_equals_sequential() -> None:
    check_vmap_agrees(ft.wrap(ManyLayers().double()), normal(6, 1, 5, 5))


class TwoBranches(nn.Module):
    """A network with one branch per input and two common layers."""

    def __init__(self) -> None:
        super().__init__()
        self.sound, self.image = nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.joint, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.joint(torch.cat([self.sound(x[:, :2]), self.image(x[:, 2:])], 1)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("part", "layers"),
    [
        ("head", ["head"]), ("output", ["head"]), ("input", ["sound"]), ("split_input", ["image.0", "image.1"]),
        ("joint", ["joint"]), (("sound", "head"), ["sound", "head"]), (["image"], ["image.0", "image.1"]),
    ],
)  # fmt: skip
def test_split_by_layer_names(part: Any, layers: list[str]) -> None:
    """A part contains all tensors of its layers, including running statistics."""
    model = ft.wrap(TwoBranches(), parts={"split_input": ["image"]})
    params = model.init(0)
    rest, chosen = model.split(params, part)
    assert {name.rpartition(".")[0] for name in chosen} == set(layers)
    assert rest.keys() | chosen.keys() == params.keys() and not rest.keys() & chosen.keys()


def test_split_output_of_cnn_has_both_linear_layers() -> None:
    """In FedAPM's CNN, both linear layers are personal."""
    model = ft.network("cnn", ft.load("digits", clients=2))
    assert {name.split(".")[0] for name in model.split(model.init(0), "output")[1]} == {"fc1", "head"}
    assert {name.split(".")[0] for name in model.split(model.init(0))[1]} == {"head"}


def test_split_input_stays_on_client() -> None:
    """The named branch stays on the client."""
    fed = tiny_federation()
    model = ft.wrap(TwoBranches(), parts={"split_input": ["sound"]})
    run = ft.simulate(ft.methods.FedAPM(split="split_input"), model, fed, rounds=2)
    assert {name.split(".")[0] for name in run.client(0)["personal"]} == {"sound"}


def test_wrap_with_unknown_parts_raises(net: nn.Module) -> None:
    assert (
        error_message(lambda: ft.wrap(net, parts={"output": ["fcc"]})) == "There is no layer 'fcc'; did you mean 'fc'?"
    )
    assert "lists no layers for 'split_input'" in error_message(lambda: ft.wrap(net).split({}, "split_input"))
