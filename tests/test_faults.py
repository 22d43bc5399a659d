"""Clients that fail: one by one they are refused and named, and nothing else is disturbed."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import TinyNet, alike, models, refusal, same, tiny_federation
from fedtailor.methods import METHODS
from fedtailor.trees import Tree, flatten, map_leaves, select

Spoil = Callable[[ft.LocalView, Tree, Tree], tuple[Tree, Tree]]
BAD = 2  # the client that fails


def is_bad(local: ft.LocalView) -> Tensor:
    return local.index == BAD


def spoilt(tree: Tree, local: ft.LocalView, value: float) -> Tree:
    return select(is_bad(local), map_leaves(lambda leaf: torch.full_like(leaf, value), tree), tree)


def raises(local: ft.LocalView, state: Tree, upload: Tree) -> tuple[Tree, Tree]:
    if bool(is_bad(local)):
        raise ZeroDivisionError("no more batteries")
    return state, upload


def has_another_shape(local: ft.LocalView, state: Tree, upload: Tree) -> tuple[Tree, Tree]:
    bias = upload["params"]["fc.bias"]
    return state, {"params": upload["params"] | {"fc.bias": bias[:-1] if bool(is_bad(local)) else bias}}


def has_another_name(local: ft.LocalView, state: Tree, upload: Tree) -> tuple[Tree, Tree]:
    return state, upload | ({"extra": upload["params"]["fc.bias"]} if bool(is_bad(local)) else {})


def has_another_state(local: ft.LocalView, state: Tree, upload: Tree) -> tuple[Tree, Tree]:
    return state | ({"extra": upload["params"]["fc.bias"]} if bool(is_bad(local)) else {}), upload


def sends(value: float) -> Spoil:
    return lambda local, state, upload: (state, spoilt(upload, local, value))


def keeps_nan(local: ft.LocalView, state: Tree, upload: Tree) -> tuple[Tree, Tree]:
    return spoilt(state, local, math.nan), upload


@dataclass(frozen=True)
class Frail(ft.methods.FedPer):
    """FedPer of whose clients one fails in some rounds."""

    spoil: Any = None
    rounds: tuple[int, ...] = (2,)

    def train(self, local: ft.LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        found = super().train(local, state, message)
        return self.spoil(local, *found) if local.round in self.rounds else found


ONE_BY_ONE = ["sequential", "pool"]
UNLIKE_SENT = "its upload 'params/fc.bias' is float64 (4,), and it was sent float64 (5,)"
CHANGED = "its state changed its names or shapes at 'extra', which must stay"
ALL = [*ONE_BY_ONE, "vectorized"]
FAULTS = [
    pytest.param(raises, "it raised ZeroDivisionError: no more batteries", ONE_BY_ONE, id="raises"),
    pytest.param(has_another_shape, UNLIKE_SENT, ONE_BY_ONE, id="shape"),
    pytest.param(has_another_name, "its upload 'extra' is float64 (5,), others' is not there", ONE_BY_ONE, id="name"),
    pytest.param(has_another_state, CHANGED, ONE_BY_ONE, id="state"),
    pytest.param(sends(math.nan), "its upload 'params/fc.weight' has NaN or infinity", ALL, id="nan"),
    pytest.param(sends(math.inf), "its upload 'params/fc.weight' has NaN or infinity", ALL, id="inf"),
    pytest.param(keeps_nan, "its state 'personal/head.weight' has NaN or infinity", ALL, id="kept nan"),
]  # fmt: skip


def go(method: ft.Method, net: nn.Module, schedule: list[list[int]], **settings: Any) -> ft.Run:
    fed = tiny_federation()
    return ft.simulate(method, net, fed, schedule=schedule, batch_size=2, dtype=torch.float64, **settings)


@pytest.mark.parametrize(("spoil", "why", "engines"), FAULTS)
def test_who_fails_is_named_and_the_others_do_as_if_it_had_not_been_asked(
    spoil: Spoil, why: str, engines: list[str], net: nn.Module
) -> None:
    everyone = [0, 1, 2, 3]
    for engine in engines:
        run = go(Frail(spoil=spoil), net, [everyone] * 3, engine=engine)
        without = go(ft.methods.FedPer(), net, [everyone, [0, 1, 3], everyone], engine=engine)
        assert [line["failed"] for line in run.records] == [{}, {BAD: why}, {}], engine
        assert run.records[1]["clients"] == [0, 1, 3]
        assert same(run.server, without.server) and alike(models(run), models(without))
        assert run.records[1]["per_client"]["bytes_up"].keys() == {0, 1, 3}
        assert run.records[1]["per_client"]["bytes_down"].keys() == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "spoil", [has_another_shape, has_another_state, sends(math.nan)], ids=["shape", "state", "nan"]
)
@pytest.mark.parametrize("second", [[BAD, 3], [BAD]], ids=["of two", "alone"])
def test_where_there_is_no_majority_the_one_that_fails_is_named(
    spoil: Spoil, second: list[int], net: nn.Module
) -> None:
    """What clients keep and what they were sent tell who is right."""
    everyone = [0, 1, 2, 3]
    run = go(Frail(spoil=spoil), net, [everyone, second, everyone], max_failures=1.0)
    assert run.records[1]["failed"].keys() == {BAD} and run.records[1]["clients"] == second[1:]
    others = [everyone, second[1:], everyone] if len(second) > 1 else [everyone]
    if len(second) > 1:
        assert same(run.server, go(ft.methods.FedPer(), net, others).server)


@pytest.mark.parametrize("spoil", [has_another_shape, has_another_state, raises], ids=["shape", "state", "raises"])
def test_one_by_one_too(spoil: Spoil, net: nn.Module) -> None:
    @dataclass(frozen=True)
    class OneByOne(ft.methods.FedAPA):
        def train(self, local: ft.LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            found = super().train(local, state, message)
            return spoil(local, *found) if local.round == 2 else found

    run = go(OneByOne(variant="code"), net, [[0, 1, 2, 3]] * 3)
    assert [line["failed"].keys() for line in run.records] == [set(), {BAD}, set()]


def test_its_state_and_model_are_those_of_before(net: nn.Module) -> None:
    failing = go(Frail(spoil=sends(math.nan)), net, [[0, 1, 2, 3]] * 2)
    before = go(ft.methods.FedPer(), net, [[0, 1, 2, 3]])
    assert same(failing.client(BAD), before.client(BAD))
    assert same(failing.personal(BAD), before.personal(BAD))


def test_too_many_failures_stop_the_run_and_what_was_before_is_kept(tmp_path: Path, net: nn.Module) -> None:
    broken = [True]

    def two(local: ft.LocalView, state: Tree, upload: Tree) -> tuple[Tree, Tree]:
        bad = (local.index >= BAD) & broken[0]
        return state, select(bad, map_leaves(lambda leaf: leaf * math.nan, upload), upload)

    method, everyone = Frail(spoil=two, rounds=(3,)), [[0, 1, 2, 3]] * 4
    words = refusal(lambda: go(method, net, everyone, folder=tmp_path, checkpoint_every=100, max_failures=0.4))
    assert "In round 3 2 of 4 clients failed, more than max_failures=0.4 allows, client 2 because" in words
    assert go(method, net, everyone, max_failures=0.5).records[2]["failed"].keys() == {2, 3}  # at most is not more
    broken[0] = False
    run = ft.resume(tmp_path, method=method, model=net, fed=tiny_federation())
    assert same(run.server, go(ft.methods.FedPer(), net, everyone).server)


def test_what_everyone_raises_is_raised(net: nn.Module) -> None:
    def mistake(local: ft.LocalView, state: Tree, upload: Tree) -> tuple[Tree, Tree]:
        raise KeyError("my own mistake")

    with pytest.raises(KeyError, match="my own mistake"):
        go(Frail(spoil=mistake), net, [[0, 1, 2, 3]] * 2)


@pytest.mark.parametrize("name", METHODS)
def test_no_method_ever_lets_a_nan_into_the_server(name: str, net: nn.Module) -> None:
    """One client's data make every number of its training NaN; all methods, for a server may weigh, mix or learn."""
    fed = tiny_federation()
    fed.x[fed.train[BAD]] = math.nan  # behind the federation's own check
    method = METHODS[name]()
    run = ft.simulate(method, net, fed, rounds=3, batch_size=2, dtype=torch.float64)
    assert all(BAD in line["failed"] for line in run.records)
    assert all(bool(leaf.isfinite().all()) for leaf in flatten(run.server).values())
    others = [client for client in range(4) if client != BAD]
    for client in others:
        for moment in ("received", "trained"):
            model = run.personal(client, moment)
            assert all(bool(leaf.isfinite().all()) for leaf in model.values() if leaf.is_floating_point())


def test_a_server_that_breaks_by_itself_stops_the_run(net: nn.Module, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Overflowing(ft.methods.FedAvg):
        def receive(self, server: Tree, exchange: ft.Exchange) -> Tree:
            received = super().receive(server, exchange)
            return map_leaves(lambda leaf: leaf / 0, received) if exchange.round == 2 else received

    words = refusal(lambda: go(Overflowing(), net, [[0, 1]] * 3, folder=tmp_path, checkpoint_every=100))
    assert "In round 2 the server's 'params/fc.weight' became NaN or infinite" in words
    assert (tmp_path / "checkpoints" / "000001").is_dir()


def test_numbers_that_are_large_but_numbers_are_no_failure(net: nn.Module) -> None:
    """Their sum overflows, they do not."""
    run = go(Frail(spoil=sends(1e307)), net, [[0, 1, 2, 3]] * 2)
    assert run.records[1]["failed"] == {}


def test_a_method_that_goes_one_by_one_survives_too() -> None:
    method, fed, net = ft.methods.FedAPA(variant="code"), tiny_federation(), TinyNet().double()
    assert method.one_by_one
    fed.x[fed.train[BAD]] = math.nan
    run = ft.simulate(method, net, fed, rounds=2)
    assert all(line["failed"].keys() == {BAD} and line["clients"] == [0, 1, 3] for line in run.records)
