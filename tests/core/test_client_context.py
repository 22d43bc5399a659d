"""`ClientContext`: batches, SGD, sums, and random numbers are equal in sequential and vmap execution."""

import pickle
from collections import OrderedDict
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import SIZES, same, tiny_federation
from fedtailor.core.batch import Batch
from fedtailor.core.trees import Tree
from support.contexts import make_engine, params_of, run_both


def make_context(net: nn.Module, client: int = 0, round: int = 1, **settings: int) -> ft.ClientContext:
    return make_engine(net, **settings)[1]._context(client, round)


def batches_of(ctx: ft.ClientContext, **settings: Any) -> list[list[float]]:
    """Return the first feature of every example, per batch."""
    batches: list[list[float]] = []

    def step(state: Tree, batch: Batch) -> Tree:
        batches.append(batch.x[:, 0].tolist())
        return state

    ctx.scan(step, {}, **settings)
    return batches


def test_scan_one_epoch_visits_each_sample_once(net: nn.Module) -> None:
    batches = batches_of(make_context(net, client=0), epochs=1)
    assert [len(b) for b in batches] == [2, 2, 2, 2, 1]
    own = tiny_federation().x[tiny_federation().train[0], 0].tolist()
    assert sorted(value for batch in batches for value in batch) == sorted(own)


def test_sample_order_depends_on_seed_round_and_pass(net: nn.Module) -> None:
    first, second = batches_of(make_context(net), epochs=2)[:5], batches_of(make_context(net), epochs=2)[5:]
    assert first == batches_of(make_context(net), epochs=1)
    assert first != second
    assert first != batches_of(make_context(net, round=2), epochs=1)
    assert first != batches_of(make_context(net, seed=1), epochs=1)


def test_batch_size_above_data_size_uses_all_data(net: nn.Module) -> None:
    run = ft.simulate(ft.methods.FedAvg(epochs=1), net, tiny_federation(), rounds=1, batch_size=10**9)
    exact = ft.simulate(ft.methods.FedAvg(epochs=1), net, tiny_federation(), rounds=1, batch_size=9)
    assert same(run.server, exact.server)


def test_scan_steps_continue_into_next_pass(net: nn.Module) -> None:
    """Seven steps of a client with five batches are one pass and two batches of the next pass."""
    streamed = batches_of(make_context(net), steps=torch.tensor(7), max_steps=10)
    assert streamed == batches_of(make_context(net), epochs=2)[:7]
    assert len(batches_of(make_context(net), steps=torch.tensor(70), max_steps=10)) == 10


def test_scan_with_epochs_and_steps_raises(net: nn.Module) -> None:
    for wrong in ({}, {"epochs": 1, "steps": torch.tensor(1), "max_steps": 2}, {"steps": torch.tensor(1)}):
        with pytest.raises(ft.FedTailorError, match="either epochs or steps"):
            make_context(net).scan(lambda state, batch: state, {}, **wrong)


@pytest.mark.parametrize("settings", [{"epochs": 2}, {"epochs": 2, "momentum": 0.9, "weight_decay": 0.1}])
def test_sgd_epochs_vmap_equals_sequential(net: nn.Module, settings: dict[str, Any]) -> None:
    one, mapped = run_both(net, lambda ctx: ctx.optimize(ctx.loss, params_of(net), lr=0.1, **settings))
    assert same(one, mapped, 1e-12)


def test_sgd_steps_vmap_equals_sequential(net: nn.Module) -> None:
    """The number of steps differs between clients, from none to more than a pass."""
    steps = {"n": torch.tensor([7, 0, 3, 5])}

    def train(ctx: ft.ClientContext, own: Tree) -> Tree:
        return ctx.optimize(ctx.loss, params_of(net), lr=0.1, steps=own["n"], max_steps=8)

    one, mapped = run_both(net, train, steps)
    assert same(one, mapped, 1e-12)
    assert torch.equal(one["fc.weight"][1], net.state_dict()["fc.weight"])


def test_sgd_stop_ends_training_before_a_pass(net: nn.Module) -> None:
    """A client stops once the head has changed enough; the others continue."""
    start = params_of(net)

    def train(ctx: ft.ClientContext, limit: Tree) -> Tree:
        def far(params: Tree) -> Tensor:
            moved: Tensor = params["head.bias"] - start["head.bias"]
            enough: Tensor = moved.square().sum() > limit["limit"]
            return enough

        return ctx.optimize(ctx.loss, start, lr=0.1, epochs=4, stop=far)

    limits = {"limit": torch.tensor([-1.0, 1e-4, 1e9, 1e9], dtype=torch.float64)}
    one, mapped = run_both(net, train, limits)
    assert same(one, mapped, 1e-12)
    assert torch.equal(one["fc.weight"][0], start["fc.weight"])  # `stop` is also called before the first pass
    whole, _ = run_both(net, lambda ctx: ctx.optimize(ctx.loss, start, lr=0.1, epochs=4))
    assert torch.equal(one["fc.weight"][2], whole["fc.weight"][2])
    assert not torch.equal(one["fc.weight"][1], whole["fc.weight"][1])


@pytest.mark.parametrize("batch_size", [2, 3, 100])
def test_full_grad_and_full_loss_do_not_depend_on_batch_size(net: nn.Module, batch_size: int) -> None:
    """The gradient and the value are over all data, and the penalty counts once."""
    fed, start = tiny_federation(), params_of(net)

    def objective(params: Tree, batch: Batch, ctx: ft.ClientContext) -> Tensor:
        penalty: Tensor = params["fc.weight"].square().sum()
        return ctx.loss(params, batch) + penalty

    def exact(ctx: ft.ClientContext) -> Tree:
        bound = lambda params, batch: objective(params, batch, ctx)  # noqa: E731 (an argument of two calls)
        return {"gradient": ctx.full_grad(bound, start), "value": ctx.full_loss(bound, start)}

    one, mapped = run_both(net, exact, batch_size=batch_size)
    assert same(one, mapped, 1e-12)
    for client, own in enumerate(fed.train):
        live = {name: p.clone().requires_grad_() for name, p in start.items()}
        loss = nn.functional.cross_entropy(torch.func.functional_call(net, live, (fed.x[own],)), fed.y[own])
        value = loss + live["fc.weight"].square().sum()
        torch.autograd.backward(value)
        assert torch.allclose(one["value"][client], value.detach(), atol=1e-12)
        for name in start:
            assert torch.allclose(one["gradient"][name][client], live[name].grad, atol=1e-12)  # type: ignore[arg-type]


def test_sum_over_data_counts_each_example_once(net: nn.Module) -> None:
    def count(ctx: ft.ClientContext) -> Tree:
        classes = torch.arange(3)
        return ctx.sum_over_data(lambda b: {"n": ((b.y[:, None] == classes) * b.weight[:, None]).sum(0)})

    one, mapped = run_both(net, count)
    fed = tiny_federation()
    assert one["n"].tolist() == [fed.class_counts(fed.train[client]) for client in range(4)]
    assert same(one, mapped)


def test_size_num_steps_and_uniform_differ_between_clients(net: nn.Module) -> None:
    def tell(ctx: ft.ClientContext) -> Tree:
        return {"size": ctx.size, "steps": ctx.num_steps(3), "noise": ctx.uniform((2, 2), salt=5)}

    one, mapped = run_both(net, tell)
    assert same(one, mapped)
    assert one["size"].tolist() == list(SIZES)
    assert one["steps"].tolist() == [15, 6, 12, 3]
    assert len({tuple(noise.flatten().tolist()) for noise in one["noise"]}) == 4
    again = make_context(net, round=2).uniform((2, 2), salt=5)
    assert not torch.equal(one["noise"][0], again)


def test_batch_mean_and_split_round_robin_ignore_padding() -> None:
    batch = Batch(torch.arange(5.0)[:, None], torch.arange(5), torch.tensor([1.0, 1, 1, 0, 0]))
    assert batch.mean(torch.tensor([1.0, 2, 6, 99, 99])) == 3
    even, odd = batch.split_round_robin(2)
    assert even.weight.tolist() == [1, 0, 1, 0, 0] and odd.weight.tolist() == [0, 1, 0, 0, 0]
    assert [hand.weight.sum() for hand in batch.split_round_robin(5)] == [1, 1, 1, 3, 3]  # parts without examples
    assert (
        Batch(None, torch.zeros(1), torch.zeros(1)).mean(torch.tensor([5.0])) == 0
    )  # an empty batch: 0 instead of NaN


def test_context_pickle_raises(net: nn.Module) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(make_context(net))


def noisy() -> nn.Module:
    """Return a network with dropout and batch normalization, which are hard to reproduce."""
    torch.manual_seed(1)
    layers = {"fc": nn.Linear(4, 8), "norm": nn.BatchNorm1d(8), "tanh": nn.Tanh(), "drop": nn.Dropout(0.4)}
    return nn.Sequential(OrderedDict(layers, head=nn.Linear(8, 3))).double()


def test_sgd_with_dropout_and_batch_norm_vmap_equals_sequential() -> None:
    one, mapped = run_both(noisy(), lambda ctx: ctx.optimize(ctx.loss, ctx.model.init(0), lr=0.1, epochs=2))
    assert same(one, mapped, 1e-12)
    assert "norm.running_mean" in one


def test_sgd_running_stats_are_those_of_trained_weights() -> None:
    net = noisy()
    ctx = make_engine(net, batch_size=9)[1]._context(0, 1)  # one batch, so its statistics are those of the data
    trained = ctx.optimize(ctx.loss, ctx.model.init(0), lr=0.1, epochs=2, weight_decay=0.5)
    fed = tiny_federation()
    normalized = nn.functional.linear(fed.x[fed.train[0]], trained["fc.weight"], trained["fc.bias"])
    assert torch.allclose(trained["norm.running_mean"], normalized.mean(0), atol=1e-12)
    assert torch.allclose(trained["norm.running_var"], normalized.var(0), atol=1e-12)


def test_simulate_with_dict_inputs_learns() -> None:
    """Inputs may be several tensors of different types, such as sensor values and tokens."""

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


def test_simulate_with_scalar_parameter_finds_means() -> None:
    """With one parameter and a custom loss, local training finds each client's mean and FedAvg the overall mean."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.theta.expand(len(x))

    samples = [torch.tensor([1.0, 3.0]), torch.tensor([5.0, 7.0, 9.0])]
    fed = ft.Federation.from_arrays([(torch.zeros(len(y), 1), y, torch.zeros(len(y), 1), y) for y in samples])
    model = ft.wrap(Mean(), head=None, loss=lambda outputs, y: (outputs - y).square() / 2)
    local = ft.simulate(ft.methods.Local(lr=0.5, epochs=50), model, fed, rounds=1, batch_size=9)
    assert [round(float(local.personal(i)["theta"]), 4) for i in (0, 1)] == [2, 7]
    assert local.info["score"] == "loss" and not local.info["higher_is_better"]
    fedavg = ft.simulate(ft.methods.FedAvg(lr=0.5, epochs=1), model, fed, rounds=50, batch_size=9)
    assert round(float(fedavg.server["params"]["theta"]), 4) == 5  # (1 + 3 + 5 + 7 + 9) / 5
    with pytest.raises(ft.FedTailorError, match="inside and outside of"):
        ft.simulate(ft.methods.FedPer(), model, fed, rounds=1)


def test_split_data_visits_each_sample_once(net: nn.Module) -> None:
    """A third of 9, 4, 7, and 1 samples are 3, 1, 2, and 1; a single sample is in both parts."""
    _, engine = make_engine(net)
    for client, (part, rest) in enumerate([(3, 6), (1, 3), (2, 5), (1, 1)]):
        ctx = engine._context(client, 1)
        one, other = ctx.split_data(1 / 3, salt=0)
        values = [sorted(chain(*batches_of(v, epochs=1))) for v in (one, other, ctx)]
        assert [len(v) for v in values[:2]] == [part, rest] == [int(one.size), int(other.size)]
        assert sorted(values[0] + values[1])[: len(values[2])] == values[2] or client == 3


def test_split_data_every_round_changes_split(net: nn.Module) -> None:
    def first(round: int, **options: Any) -> list[float]:
        part, _ = make_context(net, 0, round).split_data(0.5, **options)
        return sorted(chain(*batches_of(part, epochs=1)))

    assert first(1, salt=1) == first(2, salt=1)
    assert first(1, salt=1) != first(1, salt=2)
    assert first(1, salt=1, every_round=True) != first(2, salt=1, every_round=True)


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.8])
def test_split_data_training_vmap_equals_sequential(net: nn.Module, fraction: float) -> None:
    def work(ctx: ft.ClientContext, params: Tree) -> Tree:
        part, rest = ctx.split_data(fraction, salt=3)
        trained = rest.optimize(rest.loss, params, lr=0.1, epochs=2)
        return {"trained": trained, "value": part.full_loss(part.loss, trained), "few": part.optimize(
            part.loss, params, lr=0.1, steps=5)}  # fmt: skip

    one, mapped = run_both(net, work, ft.trees.repeat(params_of(net), len(SIZES)))
    assert same(one, mapped, tolerance=1e-12)


def test_batch_uniform_differs_between_batches(net: nn.Module) -> None:
    """Random numbers differ between batches, passes, and clients, and are equal under vmap."""

    def draw(ctx: ft.ClientContext) -> Tree:
        def step(state: Tree, batch: Batch) -> Tree:
            drawn = batch.uniform((2,), salt=1)
            return {"sum": state["sum"] + drawn, "product": state["product"] * drawn}

        start = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
        return ctx.scan(step, {"sum": start[0], "product": start[1]}, epochs=2)

    one, mapped = run_both(net, draw)
    assert same(one, mapped, tolerance=1e-15)
    drawn: list[float] = []

    def keep(state: Tree, batch: Batch) -> Tree:
        drawn.extend(batch.uniform((3,)).tolist())
        return state

    for client in (0, 1):
        make_context(net, client).scan(keep, {}, epochs=2)
    assert len(set(drawn)) == len(drawn) == 3 * 2 * (5 + 2)


def test_shared_uniform_is_equal_for_all_clients_and_rounds(net: nn.Module) -> None:
    draws = [make_context(net, client, round).shared_uniform((4,), 7) for client in (0, 2) for round in (1, 3)]
    assert all(torch.equal(draws[0], other) for other in draws[1:])
    assert not torch.equal(draws[0], make_context(net).shared_uniform((4,), 8))
