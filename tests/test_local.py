"""What a client can do with its data: batches, descent, exact sums, random numbers; plainly and mapped alike."""

import pickle
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import SIZES, apply_mapped, same, tiny_federation
from fedtailor.batch import Batch, Common
from fedtailor.engines.sequential import Sequential
from fedtailor.samples import Samples
from fedtailor.trees import Tree


def world(net: nn.Module, batch_size: int = 2, seed: int = 0) -> tuple[Common, Sequential]:
    fed = tiny_federation()
    model = ft.wrap(net)
    cpu = torch.device("cpu")
    common = Common(
        model.mode(training=True), fed.x, fed.y, fed.preparation(torch.float64, cpu), batch_size, 3, 4, 21, seed,
        torch.float64,
    )  # fmt: skip
    return common, Sequential(common, Samples(fed.train, cpu))


def view(net: nn.Module, client: int = 0, round: int = 1, **settings: int) -> ft.LocalView:
    return world(net, **settings)[1]._view(client, round)


def both(net: nn.Module, function: Any, *trees: Tree, batch_size: int = 2) -> tuple[Tree, Tree]:
    """The same function over all four clients, one by one and mapped."""
    common, engine = world(net, batch_size)
    clients = range(len(SIZES))
    return (
        engine.apply(function, 1, clients, *trees),
        apply_mapped(common, engine.samples, function, 1, list(clients), *trees),
    )


def params_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def seen(local: ft.LocalView, **settings: Any) -> list[list[float]]:
    """The first coordinate of every example, batch by batch."""
    batches: list[list[float]] = []

    def step(state: Tree, batch: Batch) -> Tree:
        batches.append(batch.x[:, 0].tolist())
        return state

    local.fold(step, {}, **settings)
    return batches


def test_a_pass_shows_every_sample_once_in_batches(net: nn.Module) -> None:
    batches = seen(view(net, client=0), epochs=1)
    assert [len(b) for b in batches] == [2, 2, 2, 2, 1]
    own = tiny_federation().x[tiny_federation().train[0], 0].tolist()
    assert sorted(value for batch in batches for value in batch) == sorted(own)


def test_the_order_belongs_to_seed_round_pass_and_client(net: nn.Module) -> None:
    first, second = seen(view(net), epochs=2)[:5], seen(view(net), epochs=2)[5:]
    assert first == seen(view(net), epochs=1)
    assert first != second
    assert first != seen(view(net, round=2), epochs=1)
    assert first != seen(view(net, seed=1), epochs=1)


def test_a_batch_larger_than_the_data_is_all_of_it(net: nn.Module) -> None:
    run = ft.simulate(ft.methods.FedAvg(epochs=1), net, tiny_federation(), rounds=1, batch_size=10**9)
    exact = ft.simulate(ft.methods.FedAvg(epochs=1), net, tiny_federation(), rounds=1, batch_size=9)
    assert same(run.server, exact.server)


def test_steps_stream_pass_after_pass(net: nn.Module) -> None:
    """Seven steps of a client with five batches: one whole pass, then two batches of the next."""
    streamed = seen(view(net), steps=torch.tensor(7), max_steps=10)
    assert streamed == seen(view(net), epochs=2)[:7]
    assert len(seen(view(net), steps=torch.tensor(70), max_steps=10)) == 10


def test_epochs_and_steps_exclude_each_other(net: nn.Module) -> None:
    for wrong in ({}, {"epochs": 1, "steps": torch.tensor(1), "max_steps": 2}, {"steps": torch.tensor(1)}):
        with pytest.raises(ft.Refused, match="either epochs, or steps"):
            view(net).fold(lambda state, batch: state, {}, **wrong)


@pytest.mark.parametrize("settings", [{"epochs": 2}, {"epochs": 2, "momentum": 0.9, "weight_decay": 0.1}])
def test_descent_mapped_equals_one_by_one(net: nn.Module, settings: dict[str, Any]) -> None:
    one, mapped = both(net, lambda local: local.sgd(local.loss, params_of(net), lr=0.1, **settings))
    assert same(one, mapped, 1e-12)


def test_streamed_descent_mapped_equals_one_by_one(net: nn.Module) -> None:
    """Every client its own number of steps, from none to more than a pass."""
    steps = {"n": torch.tensor([7, 0, 3, 5])}

    def train(local: ft.LocalView, own: Tree) -> Tree:
        return local.sgd(local.loss, params_of(net), lr=0.1, steps=own["n"], max_steps=8)

    one, mapped = both(net, train, steps)
    assert same(one, mapped, 1e-12)
    assert torch.equal(one["fc.weight"][1], net.state_dict()["fc.weight"])


def test_stop_is_asked_before_every_pass_and_holds(net: nn.Module) -> None:
    """A client stops once the head has moved far enough; the others go on."""
    start = params_of(net)

    def train(local: ft.LocalView, limit: Tree) -> Tree:
        def far(params: Tree) -> Tensor:
            moved: Tensor = params["head.bias"] - start["head.bias"]
            enough: Tensor = moved.square().sum() > limit["limit"]
            return enough

        return local.sgd(local.loss, start, lr=0.1, epochs=4, stop=far)

    limits = {"limit": torch.tensor([-1.0, 1e-4, 1e9, 1e9], dtype=torch.float64)}
    one, mapped = both(net, train, limits)
    assert same(one, mapped, 1e-12)
    assert torch.equal(one["fc.weight"][0], start["fc.weight"])  # asked before the first pass too
    whole, _ = both(net, lambda local: local.sgd(local.loss, start, lr=0.1, epochs=4))
    assert torch.equal(one["fc.weight"][2], whole["fc.weight"][2])
    assert not torch.equal(one["fc.weight"][1], whole["fc.weight"][1])


@pytest.mark.parametrize("batch_size", [2, 3, 100])
def test_gradient_and_value_are_exact_whatever_the_batches(net: nn.Module, batch_size: int) -> None:
    """Over all data, regulariser counted once."""
    fed, start = tiny_federation(), params_of(net)

    def objective(params: Tree, batch: Batch, local: ft.LocalView) -> Tensor:
        penalty: Tensor = params["fc.weight"].square().sum()
        return local.loss(params, batch) + penalty

    def exact(local: ft.LocalView) -> Tree:
        bound = lambda params, batch: objective(params, batch, local)  # noqa: E731 (an argument of two calls)
        return {"gradient": local.gradient(bound, start), "value": local.value(bound, start)}

    one, mapped = both(net, exact, batch_size=batch_size)
    assert same(one, mapped, 1e-12)
    for client, own in enumerate(fed.train):
        live = {name: p.clone().requires_grad_() for name, p in start.items()}
        loss = nn.functional.cross_entropy(torch.func.functional_call(net, live, (fed.x[own],)), fed.y[own])
        value = loss + live["fc.weight"].square().sum()
        torch.autograd.backward(value)
        assert torch.allclose(one["value"][client], value.detach(), atol=1e-12)
        for name in start:
            assert torch.allclose(one["gradient"][name][client], live[name].grad, atol=1e-12)  # type: ignore[arg-type]


def test_total_counts_every_example_once(net: nn.Module) -> None:
    def count(local: ft.LocalView) -> Tree:
        classes = torch.arange(3)
        return local.total(lambda b: {"n": ((b.y[:, None] == classes) * b.weight[:, None]).sum(0)})

    one, mapped = both(net, count)
    fed = tiny_federation()
    assert one["n"].tolist() == [fed.class_counts(fed.train[client]) for client in range(4)]
    assert same(one, mapped)


def test_size_steps_and_random_numbers_are_the_clients_own(net: nn.Module) -> None:
    def tell(local: ft.LocalView) -> Tree:
        return {"size": local.size, "steps": local.steps(3), "noise": local.uniform((2, 2), salt=5)}

    one, mapped = both(net, tell)
    assert same(one, mapped)
    assert one["size"].tolist() == list(SIZES)
    assert one["steps"].tolist() == [15, 6, 12, 3]
    assert len({tuple(noise.flatten().tolist()) for noise in one["noise"]}) == 4
    again = view(net, round=2).uniform((2, 2), salt=5)
    assert not torch.equal(one["noise"][0], again)


def test_batch_mean_ignores_padding_and_hands_share_the_examples() -> None:
    batch = Batch(torch.arange(5.0)[:, None], torch.arange(5), torch.tensor([1.0, 1, 1, 0, 0]))
    assert batch.mean(torch.tensor([1.0, 2, 6, 99, 99])) == 3
    even, odd = batch.deal(2)
    assert even.weight.tolist() == [1, 0, 1, 0, 0] and odd.weight.tolist() == [0, 1, 0, 0, 0]
    assert [hand.weight.sum() for hand in batch.deal(5)] == [1, 1, 1, 3, 3]  # nothing is left for the last two
    assert Batch(None, torch.zeros(1), torch.zeros(1)).mean(torch.tensor([5.0])) == 0  # nothing: zero, not NaN


def test_a_view_does_not_leave_the_client(net: nn.Module) -> None:
    with pytest.raises(TypeError, match="does not leave the client"):
        pickle.dumps(view(net))


class Noisy(nn.Module):
    """With dropout and batch normalisation: everything that is hard to repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.4)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.norm(self.fc(x)))))  # type: ignore[no-any-return]


def noisy() -> nn.Module:
    torch.manual_seed(1)
    return Noisy().double()


def test_dropout_and_batch_normalisation_are_the_same_mapped() -> None:
    net = noisy()

    def train(local: ft.LocalView) -> Tree:
        return local.sgd(local.loss, local.model.init(0), lr=0.1, epochs=2)

    one, mapped = both(net, train)
    assert same(one, mapped, 1e-12)
    assert "norm.running_mean" in one


def test_running_statistics_are_those_of_the_clients_data_under_the_trained_weights() -> None:
    net = noisy()
    local = world(net, batch_size=9)[1]._view(0, 1)  # one batch: its statistics are the data's
    trained = local.sgd(local.loss, local.model.init(0), lr=0.1, epochs=2, weight_decay=0.5)
    fed = tiny_federation()
    inside = nn.functional.linear(fed.x[fed.train[0]], trained["fc.weight"], trained["fc.bias"])
    assert torch.allclose(trained["norm.running_mean"], inside.mean(0), atol=1e-12)
    assert torch.allclose(trained["norm.running_var"], inside.var(0), atol=1e-12)


def test_a_model_of_two_sensors_learns() -> None:
    """Inputs may be several tensors, of different kinds: a sequence of numbers and one of tokens."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(7, 4)
            self.head = nn.Linear(4 + 3, 2)

        def forward(self, x: dict[str, Tensor]) -> Tensor:
            return self.head(torch.cat([self.words(x["words"]).mean(1), x["sensor"]], 1))  # type: ignore[no-any-return]

    random = np.random.default_rng(0)

    def client() -> tuple[Any, Any, Any, Any]:
        words, sensor = random.integers(0, 7, (30, 5)), random.normal(size=(30, 3)).astype(np.float32)
        y = (sensor[:, 0] + (words[:, 0] > 3) > 0.5).astype(int)
        x: dict[str, Any] = {"words": words, "sensor": sensor}
        first, rest = {k: v[:20] for k, v in x.items()}, {k: v[20:] for k, v in x.items()}
        return first, y[:20], rest, y[20:]

    fed = ft.Federation.from_arrays([client() for _ in range(3)])
    run = ft.simulate(ft.methods.FedAvg(lr=0.3), Two(), fed, rounds=15, batch_size=8)
    assert run.records[-1]["loss"] < 0.8 * run.records[0]["loss"]


def test_a_scalar_gaussian_mean_is_an_ordinary_case() -> None:
    """One number, a loss of one's own: training alone finds each client's mean, FedAvg the mean of all samples."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.theta.expand(len(x))

    samples = [torch.tensor([1.0, 3.0]), torch.tensor([5.0, 7.0, 9.0])]
    fed = ft.Federation.from_arrays([(torch.zeros(len(y), 1), y, torch.zeros(len(y), 1), y) for y in samples])
    model = ft.wrap(Mean(), head=None, loss=lambda outputs, y: (outputs - y).square() / 2)
    alone = ft.simulate(ft.methods.Local(lr=0.5, epochs=50), model, fed, rounds=1, batch_size=9)
    assert [round(float(alone.personal(i)["theta"]), 4) for i in (0, 1)] == [2, 7]
    assert alone.info["score"] == "loss" and not alone.info["higher_is_better"]
    common = ft.simulate(ft.methods.FedAvg(lr=0.5, epochs=1), model, fed, rounds=50, batch_size=9)
    assert round(float(common.server["params"]["theta"]), 4) == 5  # (1 + 3 + 5 + 7 + 9) / 5
    with pytest.raises(ft.Refused, match="needs a model that has both"):
        ft.simulate(ft.methods.FedPer(), model, fed, rounds=1)


def test_a_division_shows_every_sample_once(net: nn.Module) -> None:
    """Of 9, 4, 7 and 1 samples a third are 3, 1, 2 and 1; the rest is in the other part, and one alone is in both."""
    _, engine = world(net)
    for client, (part, rest) in enumerate([(3, 6), (1, 3), (2, 5), (1, 1)]):
        local = engine._view(client, 1)
        one, other = local.divide(1 / 3, salt=0)
        values = [sorted(chain(*seen(v, epochs=1))) for v in (one, other, local)]
        assert [len(v) for v in values[:2]] == [part, rest] == [int(one.size), int(other.size)]
        assert sorted(values[0] + values[1])[: len(values[2])] == values[2] or client == 3


def test_a_division_stays_unless_every_round_has_another(net: nn.Module) -> None:
    def first(round: int, **how: Any) -> list[float]:
        part, _ = view(net, 0, round).divide(0.5, **how)
        return sorted(chain(*seen(part, epochs=1)))

    assert first(1, salt=1) == first(2, salt=1)
    assert first(1, salt=1) != first(1, salt=2)
    assert first(1, salt=1, every_round=True) != first(2, salt=1, every_round=True)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_both_parts_of_a_division_train_the_same_mapped(net: nn.Module, share: float) -> None:
    def work(local: ft.LocalView, params: Tree) -> Tree:
        part, rest = local.divide(share, salt=3)
        trained = rest.sgd(rest.loss, params, lr=0.1, epochs=2)
        return {"trained": trained, "value": part.value(part.loss, trained), "few": part.sgd(
            part.loss, params, lr=0.1, steps=5)}  # fmt: skip

    one_by_one, mapped = both(net, work, ft.trees.repeat(params_of(net), len(SIZES)))
    assert same(one_by_one, mapped, tolerance=1e-12)


def test_a_batch_draws_its_own_numbers(net: nn.Module) -> None:
    """Others for every batch, pass and client; the same mapped."""

    def draw(local: ft.LocalView) -> Tree:
        def step(state: Tree, batch: Batch) -> Tree:
            drawn = batch.uniform((2,), salt=1)
            return {"sum": state["sum"] + drawn, "product": state["product"] * drawn}

        start = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
        return local.fold(step, {"sum": start[0], "product": start[1]}, epochs=2)

    one_by_one, mapped = both(net, draw)
    assert same(one_by_one, mapped, tolerance=1e-15)
    drawn: list[float] = []

    def keep(state: Tree, batch: Batch) -> Tree:
        drawn.extend(batch.uniform((3,)).tolist())
        return state

    for client in (0, 1):
        view(net, client).fold(keep, {}, epochs=2)
    assert len(set(drawn)) == len(drawn) == 3 * 2 * (5 + 2)


def test_common_numbers_are_everyones_in_every_round(net: nn.Module) -> None:
    draws = [view(net, client, round).shared_uniform((4,), 7) for client in (0, 2) for round in (1, 3)]
    assert all(torch.equal(draws[0], other) for other in draws[1:])
    assert not torch.equal(draws[0], view(net).shared_uniform((4,), 8))
