"""Client weights: every mean over the clients of a round is by number of samples or uniform."""

from dataclasses import fields, replace
from functools import cache

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from conftest import same
from fedtailor import methods as m
from fedtailor.core.trees import Rows, Tree, flatten, map_leaves, take
from fedtailor.methods import METHODS
from support.problem import make_problem

PER_CLASS = {"fedproto", "fedaf"}  # a client counts only for its own classes: see below, and test_prototypes.py
CASES: dict[str, ft.Method] = {
    **{name: kind() for name, kind in METHODS.items() if "weights" in {f.name for f in fields(kind)}},
    # fields with which the server state is linear in the mean
    "fedexp": m.FedExP(epsilon=1e9),  # η_g is 1
    "pfedhn": m.PFedHN(hyper_momentum=0.0, hyper_weight_decay=0.0, clip=1e9),
    "selffl, not adjusted": m.SelfFL(warmup=0, adjust_weights=False, smoothing=False),
}
# what the server averages, where it is not "params"
AVERAGED: dict[str, tuple[str, ...]] = {
    "fedadam": ("m",), "fedyogi": ("m",), "fedadagrad": ("m",), "scaffold": ("params", "control"),
    "dbe": ("params", "consensus"), "fedcp": ("params", "policy"), "gpfl": ("params", "embeddings", "valve"),
    "lpproj": ("anchor",), "fedlag": ("inner",), "pfedhn": ("network",),
}  # fmt: skip
CLIENTS = [0, 2, 4]


@cache
def one_round(name: str, sizes: tuple[int, ...]) -> tuple[Tree, ft.Exchange]:
    """Return the server state before round 1, and a round with three clients of five."""
    method = CASES[name]
    trainer = make_problem(sizes).trainer(method, [CLIENTS])
    caught: list[tuple[Tree, ft.Exchange]] = []

    def catch(_: ft.Method, server: Tree, exchange: ft.Exchange) -> Tree:
        caught.append((server, exchange))
        return server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(method), "receive", catch)
        trainer.train_round(1, CLIENTS)
    return caught[0]


def receive(name: str, weights: str, server: Tree, exchange: ft.Exchange) -> Tree:
    """Return the server state after the round."""
    return replace(CASES[name], weights=weights).receive(server, exchange)  # type: ignore[call-arg]


def averaged(name: str, weights: str, server: Tree, exchange: ft.Exchange) -> Tree:
    """Return what the server averages."""
    after = receive(name, weights, server, exchange)
    return {key: after[key] for key in AVERAGED.get(name, ("params",))}


def only(exchange: ft.Exchange, row: int) -> ft.Exchange:
    """Return the round as if this client were the only one of the federation, so that a mean is its own value."""
    rows = torch.tensor([row])
    sizes = exchange.sizes[rows]
    sent, received = take(exchange.sent, rows), take(exchange.received, rows)
    alone = {"clients": [exchange.clients[row]], "num_clients": 1, "sizes": sizes, "total_size": sizes.sum()}
    return replace(exchange, sent=sent, received=received, **alone)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(CASES.keys() - PER_CLASS))
def test_weights_give_mean_by_size_and_uniform_mean(name: str) -> None:
    """The clients have 9, 7, and 6 samples; each mean is computed by hand from the values of single clients."""
    server, exchange = one_round(name, (9, 4, 7, 1, 6))
    whole = replace(exchange, num_clients=3, total_size=torch.tensor(22))
    results = {}
    for weights, shares in {"size": (9 / 22, 7 / 22, 6 / 22), "uniform": (1 / 3, 1 / 3, 1 / 3)}.items():
        each = [averaged(name, weights, server, only(exchange, row)) for row in range(3)]
        expected = map_leaves(lambda a, b, c, s=shares: s[0] * a + s[1] * b + s[2] * c, *map(floats, each))
        results[weights] = averaged(name, weights, server, whole)
        assert same(floats(results[weights]), expected, 1e-12)
    assert not same(results["size"], results["uniform"], 1e-9)


def floats(tree: Tree) -> Tree:
    """Return the floating-point tensors of a tree, which can be averaged."""
    flat = flatten(tree)
    return {name: leaf for name, leaf in flat.items() if leaf.is_floating_point()}


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"fedproto"}))
def test_weights_of_clients_with_equally_many_samples_are_equal(name: str) -> None:
    server, exchange = one_round(name, (6, 6, 6, 6, 6))
    by_size, uniform = (receive(name, weights, server, exchange) for weights in ("size", "uniform"))
    assert same(by_size, uniform, 1e-12)


def test_fedaf_weights_apply_to_clients_that_have_the_class() -> None:
    server, exchange = one_round("fedaf", (9, 4, 7, 1, 6))
    rows: Rows = exchange.received["own_logits"]
    for weights, sizes in {"size": (9, 7, 6), "uniform": (1, 1, 1)}.items():
        found: Tensor = receive("fedaf", weights, server, exchange)["class_logits"]
        for k in range(3):
            own = [i for i in range(3) if rows.present[i, k]]
            total = sum((sizes[i] * rows.values[i, k] for i in own), torch.zeros(3, dtype=torch.float64))
            assert own and torch.allclose(found[k], total / sum(sizes[i] for i in own), atol=1e-12)
