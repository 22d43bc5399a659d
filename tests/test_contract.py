"""Every registered method keeps the contract: pure, safe to map, constant shapes, nothing else crosses."""

import copy
import dataclasses
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import fedtailor as ft
from conftest import SOME_FAST, apply_mapped, same, tiny_federation
from fedtailor.methods import METHODS
from fedtailor.rounds import Rounds
from fedtailor.settings import Settings
from fedtailor.trees import Tree, flatten, take

EVERY = pytest.mark.parametrize("name", METHODS)
LONG = pytest.mark.parametrize("name", SOME_FAST)
GENTLE: dict[str, dict[str, Any]] = {  # fields with which a method trains gently, where that is not its lr alone
    "fedapm": {"lr": 0.02, "alpha": "one"},
    "lag": {"inner": ft.methods.FedAvg(lr=0.02)},
}
BOTH = pytest.mark.parametrize("schedule", [[[0, 1, 2, 3]] * 3, [[0, 3], [1, 2, 3], [3]]], ids=["full", "partial"])


def start(method: ft.Method, net: nn.Module, rounds: int = 3, batch_size: int = 2) -> Rounds:
    fed = tiny_federation()
    settings = Settings(batch_size=batch_size, engine="sequential", device="cpu", dtype="float64")
    return Rounds.build(settings, method, ft.wrap(net), fed, [[0, 1, 2, 3]] * rounds)


def normalised() -> nn.Module:
    """A small network for digits with batch normalisation."""
    torch.manual_seed(0)
    layers = {"flat": nn.Flatten(), "fc": nn.Linear(64, 32), "norm": nn.BatchNorm1d(32), "bend": nn.ReLU()}
    return nn.Sequential(OrderedDict(layers | {"head": nn.Linear(32, 10)}))


@EVERY
def test_is_a_frozen_dataclass_that_cites_its_source(name: str) -> None:
    method = METHODS[name]()
    assert dataclasses.is_dataclass(method)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(method, dataclasses.fields(method)[0].name, 1)
    assert method.__doc__ and not method.__doc__.startswith(f"{type(method).__name__}(")  # not the dataclass's own


@EVERY
def test_training_is_pure(name: str, net: nn.Module) -> None:
    """The same arguments give the same results, and are left as they were."""
    loop = start(METHODS[name](), net)
    clients = [0, 1, 2, 3]
    states, sent = loop.states.get(clients, loop.device), loop.method.send(loop.server, clients, 1)
    before = copy.deepcopy((flatten(states), flatten(sent)))
    first = loop.engine.apply(loop._train, 1, clients, states, sent)
    again = loop.engine.apply(loop._train, 1, clients, states, sent)
    assert same(first, again)
    assert same(before[0], flatten(states)) and same(before[1], flatten(sent))


@EVERY
def test_the_server_is_pure(name: str, net: nn.Module) -> None:
    loop = start(METHODS[name](), net)
    before = copy.deepcopy(loop.server)
    held = loop.server
    loop.round(1, [0, 1, 2, 3])
    assert same(before, held)


@EVERY
@BOTH
def test_mapping_over_clients_gives_the_same(name: str, schedule: list[list[int]], net: nn.Module) -> None:
    """One by one and all at once agree to 1e-9, with clients of 9, 4, 7 and 1 samples and batches of 2."""
    loop = start(METHODS[name](), net)
    for number, clients in enumerate(schedule, start=1):
        states, sent = loop.states.get(clients, loop.device), loop.method.send(loop.server, clients, number)
        one_by_one = loop.engine.apply(loop._train, number, clients, states, sent)
        at_once = apply_mapped(loop.common, loop.train, loop._train, number, clients, states, sent)
        assert same(one_by_one, at_once, tolerance=1e-9)
        held = loop.engine.apply(loop.method.personalize, number, clients, states, sent)
        held_at_once = apply_mapped(loop.common, loop.train, loop.method.personalize, number, clients, states, sent)
        assert same(held, held_at_once, tolerance=1e-9)
        told = loop.engine.apply(loop.method.measure, number, clients, states, sent)
        told_at_once = apply_mapped(loop.common, loop.train, loop.method.measure, number, clients, states, sent)
        assert same(told, told_at_once, tolerance=1e-9)
        loop.round(number, clients)


@EVERY
@BOTH
def test_states_and_messages_keep_names_shapes_and_dtypes(name: str, schedule: list[list[int]], net: nn.Module) -> None:
    loop = start(METHODS[name](), net)

    def kinds(tree: Tree) -> dict[str, Any]:
        return {path: (leaf.shape, leaf.dtype) for path, leaf in flatten(tree).items()}

    def schema() -> dict[str, Any]:
        return kinds({"server": loop.server, "client": loop.states.one(0)})

    def message() -> dict[str, Any]:
        return kinds(take(loop.method.send(loop.server, [0], 1), 0))

    before, first = schema(), message()
    for number, clients in enumerate(schedule, start=1):
        loop.round(number, clients)
        assert schema() == before
        assert message().items() <= first.items()  # names may be left out between rounds


@EVERY
def test_absent_clients_keep_their_state(name: str, net: nn.Module) -> None:
    loop = start(METHODS[name](), net)
    loop.round(1, [0, 1])
    kept = copy.deepcopy(loop.states.one(0))
    loop.round(2, [1, 2, 3])
    assert same(kept, loop.states.one(0))


@EVERY
def test_a_client_learns_nothing_of_others_but_by_its_message(name: str, net: nn.Module) -> None:
    """With its own state and message held, nothing the other clients have can change what a client does."""
    here, elsewhere = start(METHODS[name](), net), start(METHODS[name](), net)
    others = torch.cat([elsewhere.train[client] for client in (1, 2, 3)])
    elsewhere.common.x[others] = 7.0
    results = []
    for loop in (here, elsewhere):
        states, sent = loop.states.get([0], loop.device), loop.method.send(loop.server, [0], 1)
        results.append(loop.engine.apply(loop._train, 1, [0], states, sent))
    assert same(results[0], results[1])


@EVERY
def test_a_stranger_is_like_everyone_else(name: str, net: nn.Module) -> None:
    """Who never took part has the initial model at the moment trained: the common start, or what a server made."""
    run = ft.simulate(METHODS[name](), net, tiny_federation(), schedule=[[0, 1]] * 2, dtype=torch.float64)
    never = run.personal(3, moment="trained")
    begun = flatten(take(start(METHODS[name](), net, rounds=2, batch_size=9).as_trained([3]), 0))
    assert same(never, begun)
    if name not in ("pfedhn", "fedavgft", "fedbabu", "perfedavg"):  # made by a hypernetwork; tuned to be used
        common = {name: weight.double() for name, weight in net.state_dict().items()}
        assert same({name: never[name] for name in common}, common, tolerance=1e-12)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("local", "fedavg")])
def test_is_neither_training_alone_nor_averaging(name: str, net: nn.Module) -> None:
    """By its defaults, after three rounds; FedBN is FedAvg unless there is something to keep."""
    if name == "fedbn":
        net = nn.Sequential(OrderedDict(fc=nn.Linear(4, 5), norm=nn.BatchNorm1d(5), head=nn.Linear(5, 3))).double()

    def ends(method: ft.Method) -> list[Tree]:
        run = ft.simulate(method, net, tiny_federation(), rounds=3, batch_size=2, dtype=torch.float64)
        models = [run.personal(client, moment) for client in range(4) for moment in ("received", "trained")]
        return [{name: model[name] for name in net.state_dict()} for model in models]

    mine, *others = (ends(METHODS[n]()) for n in (name, "local", "fedavg"))
    for other in others:
        assert not all(same(a, b, tolerance=1e-6) for a, b in zip(mine, other, strict=True))


@LONG
@pytest.mark.parametrize("clients", [5, 1])
def test_is_better_than_doing_nothing(name: str, clients: int) -> None:
    """The training loss after some rounds is below where it began; also of one client alone."""
    fed = ft.load("digits", clients=clients, alpha=1.0, seed=3)
    model = ft.network("mlp", fed, hidden=(32,))
    run = ft.simulate(METHODS[name](), model, fed, rounds=8, batch_size=16, evaluate_every=8)
    start_loss = torch.log(torch.tensor(10.0))  # a model that knows nothing
    assert run.records[-1]["loss"] < 0.75 * float(start_loss)
    assert run.records[-1]["accuracy_received"] > 0.3  # one in ten by guessing


@pytest.mark.parametrize(
    "method",
    [
        ft.methods.FedExP(lr=0.05, epsilon=1e-9), ft.methods.PFedMe(lr=0.01, steps=3, beta=4.0),
        ft.methods.FedADMM(lr=0.05),
        ft.methods.FedAPM(alpha="one", lr=0.05), ft.methods.SelfFL(lr=0.05, warmup=0, default_steps=3),
        ft.methods.FedAPA(lr=0.05, clip=False, printed_sign=True, weight_lr=0.05),
        ft.methods.LAG(ft.methods.FedExP(lr=0.05, epsilon=1e-9), threshold=0.9),
    ],
    ids=lambda method: type(method).__name__,
)  # fmt: skip
def test_no_extrapolation_makes_a_running_variance_negative(method: ft.Method) -> None:
    fed = ft.load("digits", clients=4, alpha=0.1, seed=1)
    run = ft.simulate(method, normalised(), fed, rounds=5, batch_size=16, evaluate_every=5)
    models = [run.personal(client, moment) for client in range(4) for moment in ("received", "trained")]
    variances = {n: leaf for n, leaf in flatten(run.server).items() if n.endswith("running_var")}
    for tree in (variances, *models):
        assert all(float(leaf.min()) >= 0 for name, leaf in tree.items() if name.endswith("running_var"))


@LONG
def test_batch_normalisation_keeps_real_statistics(name: str) -> None:
    """A personal model serves with statistics of real data: it is right more often than by chance."""
    fed = ft.load("digits", clients=3, partition="iid", seed=1)
    gentle = GENTLE.get(name, {"lr": 0.02})
    run = ft.simulate(METHODS[name](**gentle), normalised(), fed, rounds=3, batch_size=16, evaluate_every=3)
    assert run.records[-1]["accuracy_trained"] > 0.5
    assert float(run.personal(0)["norm.running_var"].min()) >= 0
    assert not torch.equal(run.personal(0)["norm.running_mean"], torch.zeros(32))
