"""Tests of client failures: results are discarded and recorded, and other clients are unaffected."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import METHOD_PARAMS, all_same, error_message, models, same, tiny_federation
from fedtailor.core.trees import Tree, flatten, map_leaves, select
from fedtailor.methods import METHODS

Corrupt = Callable[[ft.ClientContext, Tree, Tree], tuple[Tree, Tree]]
FAILING = 2  # the client that fails


def is_failing(ctx: ft.ClientContext) -> Tensor:
    return ctx.index == FAILING


def corrupted(tree: Tree, ctx: ft.ClientContext, value: float) -> Tree:
    return select(is_failing(ctx), map_leaves(lambda leaf: torch.full_like(leaf, value), tree), tree)


def raise_error(ctx: ft.ClientContext, state: Tree, upload: Tree) -> tuple[Tree, Tree]:
    if bool(is_failing(ctx)):
        raise ZeroDivisionError("empty battery")
    return state, upload


def change_shape(ctx: ft.ClientContext, state: Tree, upload: Tree) -> tuple[Tree, Tree]:
    bias = upload["params"]["fc.bias"]
    return state, {"params": upload["params"] | {"fc.bias": bias[:-1] if bool(is_failing(ctx)) else bias}}


def add_name(ctx: ft.ClientContext, state: Tree, upload: Tree) -> tuple[Tree, Tree]:
    return state, upload | ({"extra": upload["params"]["fc.bias"]} if bool(is_failing(ctx)) else {})


def add_state(ctx: ft.ClientContext, state: Tree, upload: Tree) -> tuple[Tree, Tree]:
    return state | ({"extra": upload["params"]["fc.bias"]} if bool(is_failing(ctx)) else {}), upload


def send_value(value: float) -> Corrupt:
    return lambda ctx, state, upload: (state, corrupted(upload, ctx, value))


def keep_nan(ctx: ft.ClientContext, state: Tree, upload: Tree) -> tuple[Tree, Tree]:
    return corrupted(state, ctx, math.nan), upload


@dataclass(frozen=True)
class FailingFedPer(ft.methods.FedPer):
    """FedPer with one client that fails in some rounds."""

    corrupt: Any = None
    rounds: tuple[int, ...] = (2,)

    def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        found = super().train(ctx, state, message)
        return self.corrupt(ctx, *found) if ctx.round in self.rounds else found


UNVECTORIZED = ["sequential", "pool"]
WRONG_SHAPE = "its upload 'params/fc.bias' is float64 (4,), but it was sent float64 (5,)"
WRONG_STATE = "its state must keep its names and shapes, but 'extra' changed"
ALL = [*UNVECTORIZED, "vectorized"]
FAILURES = [
    pytest.param(raise_error, "it raised ZeroDivisionError: empty battery", UNVECTORIZED, id="raises"),
    pytest.param(change_shape, WRONG_SHAPE, UNVECTORIZED, id="shape"),
    pytest.param(add_name, "its upload 'extra' is float64 (5,), others' is missing", UNVECTORIZED, id="name"),
    pytest.param(add_state, WRONG_STATE, UNVECTORIZED, id="state"),
    pytest.param(send_value(math.nan), "its upload 'params/fc.weight' has NaN or infinity", ALL, id="nan"),
    pytest.param(send_value(math.inf), "its upload 'params/fc.weight' has NaN or infinity", ALL, id="inf"),
    pytest.param(keep_nan, "its state 'personal/head.weight' has NaN or infinity", ALL, id="state nan"),
]  # fmt: skip


def simulate(method: ft.Method, net: nn.Module, schedule: list[list[int]], **settings: Any) -> ft.Run:
    fed = tiny_federation()
    return ft.simulate(method, net, fed, schedule=schedule, batch_size=2, dtype=torch.float64, **settings)


@pytest.mark.parametrize(("corrupt", "reason", "engines"), FAILURES)
def test_failing_client_is_recorded_and_others_train_as_without_it(
    corrupt: Corrupt, reason: str, engines: list[str], net: nn.Module
) -> None:
    all_clients = [0, 1, 2, 3]
    for engine in engines:
        run = simulate(FailingFedPer(corrupt=corrupt), net, [all_clients] * 3, engine=engine)
        without = simulate(ft.methods.FedPer(), net, [all_clients, [0, 1, 3], all_clients], engine=engine)
        assert [record["failed"] for record in run.records] == [{}, {FAILING: reason}, {}], engine
        assert run.records[1]["clients"] == [0, 1, 3]
        assert same(run.server, without.server) and all_same(models(run), models(without))
        assert all_same([run.client(c) for c in all_clients], [without.client(c) for c in all_clients])
        assert run.records[1]["per_client"]["bytes_up"].keys() == {0, 1, 3}
        assert run.records[1]["per_client"]["bytes_down"].keys() == {0, 1, 2, 3}


@pytest.mark.parametrize("corrupt", [change_shape, add_state, send_value(math.nan)], ids=["shape", "state", "nan"])
@pytest.mark.parametrize("second", [[FAILING, 3], [FAILING]], ids=["of two", "single"])
def test_failure_without_majority_names_failing_client(corrupt: Corrupt, second: list[int], net: nn.Module) -> None:
    """Client states and messages determine the expected structure."""
    all_clients = [0, 1, 2, 3]
    run = simulate(FailingFedPer(corrupt=corrupt), net, [all_clients, second, all_clients], max_failures=1.0)
    assert run.records[1]["failed"].keys() == {FAILING} and run.records[1]["clients"] == second[1:]
    if len(second) > 1:
        without = simulate(ft.methods.FedPer(), net, [all_clients, second[1:], all_clients])
        assert same(run.server, without.server)


@pytest.mark.parametrize("corrupt", [change_shape, add_name, add_state, raise_error, send_value(math.nan)])
def test_failure_with_sequential_clients_is_recorded(corrupt: Corrupt, net: nn.Module) -> None:
    @dataclass(frozen=True)
    class FailingFedAPA(ft.methods.FedAPA):
        def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            found = super().train(ctx, state, message)
            return corrupt(ctx, *found) if ctx.round == 2 else found

    run = simulate(FailingFedAPA(variant="code"), net, [[0, 1, 2, 3]] * 3)
    assert [record["failed"].keys() for record in run.records] == [set(), {FAILING}, set()]
    assert run.records[1]["clients"] == [0, 1, 3]


def test_too_many_failures_stop_run_and_save_checkpoint(tmp_path: Path, net: nn.Module) -> None:
    broken = [True]

    def corrupt_two(ctx: ft.ClientContext, state: Tree, upload: Tree) -> tuple[Tree, Tree]:
        bad = (ctx.index >= FAILING) & broken[0]
        return state, select(bad, map_leaves(lambda leaf: leaf * math.nan, upload), upload)

    method, schedule = FailingFedPer(corrupt=corrupt_two, rounds=(3,)), [[0, 1, 2, 3]] * 4
    message = error_message(
        lambda: simulate(method, net, schedule, folder=tmp_path, checkpoint_every=100, max_failures=0.4)
    )
    assert "In round 3, 2 of 4 clients failed, more than max_failures=0.4 allows. Client 2 failed because" in message
    tolerant = simulate(method, net, schedule, max_failures=0.5)  # exactly max_failures is allowed
    assert tolerant.records[2]["failed"].keys() == {2, 3}
    broken[0] = False
    run = ft.resume(tmp_path, method=method, model=net, fed=tiny_federation())
    assert same(run.server, simulate(ft.methods.FedPer(), net, schedule).server)


def test_error_of_all_clients_is_raised(net: nn.Module) -> None:
    def mistake(ctx: ft.ClientContext, state: Tree, upload: Tree) -> tuple[Tree, Tree]:
        raise KeyError("bug in the method")

    with pytest.raises(KeyError, match="bug in the method"):
        simulate(FailingFedPer(corrupt=mistake), net, [[0, 1, 2, 3]] * 2)


@pytest.mark.parametrize("name", METHOD_PARAMS)
def test_nan_client_never_affects_server_of_any_method(name: str, net: nn.Module) -> None:
    """One client's data make all its results NaN; servers of different methods combine uploads differently."""
    fed = tiny_federation()
    fed.x[fed.train[FAILING]] = math.nan  # after the federation's check
    method = METHODS[name]()
    run = ft.simulate(method, net, fed, rounds=2, batch_size=2, dtype=torch.float64)
    assert all(FAILING in record["failed"] for record in run.records)
    assert all(bool(leaf.isfinite().all()) for leaf in flatten(run.server).values())
    others = [model for moment in ("received", "trained") for model in models(run, moment)[:FAILING]]
    assert all(bool(leaf.isfinite().all()) for model in others for leaf in model.values())


def test_non_finite_server_state_stops_run_and_saves_checkpoint(net: nn.Module, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Overflowing(ft.methods.FedAvg):
        def receive(self, server: Tree, exchange: ft.Exchange) -> Tree:
            received = super().receive(server, exchange)
            return map_leaves(lambda leaf: leaf / 0, received) if exchange.round == 2 else received

    message = error_message(lambda: simulate(Overflowing(), net, [[0, 1]] * 3, folder=tmp_path, checkpoint_every=100))
    assert "In round 2, 'params/fc.weight' of the server state became NaN or infinite" in message
    assert (tmp_path / "checkpoints" / "000001").is_dir()


def test_large_finite_upload_is_no_failure(net: nn.Module) -> None:
    """The sum of the values overflows, but the values are finite."""
    run = simulate(FailingFedPer(corrupt=send_value(1e307)), net, [[0, 1, 2, 3]] * 2)
    assert run.records[1]["failed"] == {}
