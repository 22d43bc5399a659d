"""Contract of all registered methods: pure hooks, safe under vmap, constant shapes, no hidden communication."""

import copy
import dataclasses
import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import fedtailor as ft
from conftest import FEDERATED, METHOD_PARAMS, TinyNet, all_same, apply_mapped, same, tiny_federation
from fedtailor.core.trees import Tree, flatten
from fedtailor.methods import METHODS
from fedtailor.training.config import TrainingConfig
from fedtailor.training.simulate import make_trainer
from fedtailor.training.simulated_clients import SimulatedClients
from fedtailor.training.trainer import Trainer
from support.method_variants import ALL_METHODS
from support.problem import make_normalized_net

EACH_METHOD = pytest.mark.parametrize("name", FEDERATED)
SOME_METHODS = pytest.mark.parametrize("name", METHOD_PARAMS)
SMALL_STEPS: dict[str, dict[str, Any]] = {  # fields for a small step size, where `lr` alone does not set it
    "fedapm": {"lr": 0.02, "alpha": "one"},
    "lag": {"inner": ft.methods.FedAvg(lr=0.02)},
    "averaged": {"inner": ft.methods.FedAvg(lr=0.02)},
}
SCHEDULE = [[0, 1, 2, 3], [0, 3], [1, 2, 3]]  # all clients, then some, then one that was absent
# variants that learn from the first round on, so that three rounds reach all of their code
ADAPTIVE: dict[str, ft.Method] = {
    "selffl, augmented": ft.methods.SelfFL(augmented=True, minimum_steps=3, warmup=0, default_steps=3),
    "selffl, clusters": ft.methods.SelfFL(clusters=(0, 0, 1, 1), warmup=0, default_steps=3),
    "lag, pfedme": ft.methods.LAG(ft.methods.PFedMe(steps=2), layers="last"),
}


def make_simulation(
    method: ft.Method, net: nn.Module, rounds: int = 3, batch_size: int = 2
) -> Trainer[SimulatedClients]:
    fed = tiny_federation()
    schedule = [[0, 1, 2, 3]] * rounds
    config = TrainingConfig(
        batch_size=batch_size, engine="sequential", device="cpu", dtype="float64", schedule=schedule
    )
    return make_trainer(config, method, ft.wrap(net), fed)[0]


def make_digits_net() -> nn.Module:
    """Return a small network with batch normalization for the digits data set."""
    torch.manual_seed(0)
    layers = {"flat": nn.Flatten(), "fc": nn.Linear(64, 32), "norm": nn.BatchNorm1d(32), "bend": nn.ReLU()}
    return nn.Sequential(OrderedDict(layers | {"head": nn.Linear(32, 10)}))


@EACH_METHOD
def test_method_is_frozen_dataclass_with_citation(name: str) -> None:
    method = METHODS[name]()
    assert dataclasses.is_dataclass(method)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(method, dataclasses.fields(method)[0].name, 1)
    assert method.__doc__
    assert not method.__doc__.startswith(f"{type(method).__name__}(")  # the docstring that dataclass generates


def inputs(trainer: Trainer[SimulatedClients], clients: list[int], number: int = 1) -> tuple[Tree, Tree]:
    """Return the states of these clients and the messages that they would receive."""
    clients_, server = trainer.clients, trainer.server
    return clients_.states.get(clients, clients_.device), server.method.send(server.state, clients, number)


@EACH_METHOD
def test_train_is_pure(name: str, net: nn.Module) -> None:
    """The same arguments give the same results and are not modified."""
    trainer, clients = make_simulation(METHODS[name](), net), [0, 1, 2, 3]
    states, sent = inputs(trainer, clients)
    before = copy.deepcopy((flatten(states), flatten(sent)))
    apply, update = trainer.clients.engine.apply, trainer.clients.update
    assert same(apply(update, 1, clients, states, sent), apply(update, 1, clients, states, sent))
    assert same(before[0], flatten(states)) and same(before[1], flatten(sent))


@EACH_METHOD
def test_server_hooks_do_not_modify_state(name: str, net: nn.Module) -> None:
    simulated = make_simulation(METHODS[name](), net)
    before = copy.deepcopy(simulated.server.state)
    original = simulated.server.state
    simulated.train_round(1, [0, 1, 2, 3])
    assert same(before, original)


@pytest.mark.parametrize("method", (ALL_METHODS | ADAPTIVE).values(), ids=ALL_METHODS | ADAPTIVE)
def test_vmap_over_clients_equals_sequential(method: ft.Method, net: nn.Module) -> None:
    """Sequential and vectorized execution agree to 1e-9, with clients of 9, 4, 7, and 1 samples and batches of 2."""
    trainer = make_simulation(method, net)
    simulated = trainer.clients
    for number, clients in enumerate(SCHEDULE, start=1):
        for function in (simulated.update, method.personalize, method.evaluation_metrics):
            arguments = (function, number, clients, *inputs(trainer, clients, number))
            mapped = apply_mapped(simulated.shared, simulated.training_samples, *arguments)
            assert same(simulated.engine.apply(*arguments), mapped, tolerance=1e-9)
        trainer.train_round(number, clients)


@EACH_METHOD
def test_states_messages_and_uploads_keep_names_shapes_and_dtypes(name: str, net: nn.Module) -> None:
    trainer = make_simulation(METHODS[name](), net)
    uploads: dict[Any, Any] = {}  # whether it is round 1, and names in the message -> structure of the upload

    def shapes(tree: Tree) -> dict[str, Any]:
        return {path: (leaf.shape, leaf.dtype) for path, leaf in flatten(tree).items()}

    def schema() -> dict[str, Any]:
        return shapes({"server": trainer.server.state, "client": trainer.clients.states.get_one(0)})

    before, first = schema(), shapes(inputs(trainer, [0])[1])
    for number, clients in enumerate(SCHEDULE, start=1):
        states, sent = inputs(trainer, clients[:1], number)
        upload = trainer.clients.engine.apply(trainer.clients.update, number, clients[:1], states, sent)["upload"]
        message = shapes(sent)
        assert message.items() <= first.items()  # a message may omit names in later rounds
        # A deployed server relies on this: it computes the structure of uploads only if one of these is new.
        assert shapes(upload) == uploads.setdefault((number == 1, *message), shapes(upload))
        trainer.train_round(number, clients)
        assert schema() == before


@EACH_METHOD
def test_absent_clients_keep_their_state(name: str, net: nn.Module) -> None:
    simulated = make_simulation(METHODS[name](), net)
    simulated.train_round(1, [0, 1])
    before = copy.deepcopy(simulated.clients.states.get_one(0))
    simulated.train_round(2, [1, 2, 3])
    assert same(before, simulated.clients.states.get_one(0))


@EACH_METHOD
def test_train_depends_on_other_clients_only_through_message(name: str, net: nn.Module) -> None:
    """With state and message fixed, the data of other clients does not change what a client computes."""
    original, changed = make_simulation(METHODS[name](), net), make_simulation(METHODS[name](), net)
    others = torch.cat([changed.clients.samples["train"][client] for client in (1, 2, 3)])
    changed.clients.shared.x[others] = 7.0
    results = [t.clients.engine.apply(t.clients.update, 1, [0], *inputs(t, [0])) for t in (original, changed)]
    assert same(results[0], results[1])


@EACH_METHOD
def test_client_that_has_not_trained_holds_received_model(name: str, net: nn.Module) -> None:
    run = ft.simulate(METHODS[name](), net, tiny_federation(), schedule=[[0, 1]] * 2, dtype=torch.float64)
    assert same(run.personal(3, "trained"), run.personal(3, "received"))
    record = run.records[-1]["per_client"]
    assert name == "local" or record["loss_trained"][3] == record["loss_received"][3]


@EACH_METHOD
def test_held_out_clients_never_change_the_others(name: str, net: nn.Module) -> None:
    """A run has the bits of one on the federation without them, and each can join with its model at both moments."""
    fed = tiny_federation()
    settings: dict[str, Any] = {"rounds": 2, "batch_size": 2, "dtype": torch.float64, "engine": "sequential"}
    run = ft.simulate(METHODS[name](), net, fed, held_out_clients=[1, 3], **settings)
    alone = ft.simulate(METHODS[name](), net, fed.select([0, 2]), **settings)
    assert same(run.server, alone.server)
    for record, expected in zip(run.records, alone.records, strict=True):
        assert all(record["per_client"][table] == values for table, values in expected["per_client"].items())
        for moment in ("received", "trained"):
            found = record["per_client"][f"held_out_loss_{moment}"]
            assert found.keys() == {2, 3} and all(map(math.isfinite, found.values()))
    for client in range(2):
        assert same(run.client(client), alone.client(client))
        assert all(same(run.personal(client, m), alone.personal(client, m)) for m in ("received", "trained"))


def test_ranking_moment_is_that_of_the_model_that_clients_use() -> None:
    """The common model exists only after aggregation; some personal models are made from the received one."""
    received = {name for name, method in METHODS.items() if method().ranking_moment == "received"}
    common = {"fedavg", "fedprox", "fedexp", "fedadmm", "scaffold", "fedaf", "centralized"}
    assert received == common | {"fedadam", "fedyogi", "fedadagrad", "fedavgft", "fedbabu", "perfedavg", "dbe"}
    assert ft.methods.LAG(ft.methods.FedAvg()).ranking_moment == "trained"


def test_method_that_makes_no_model_of_a_clients_own_is_ranked_as_a_common_model() -> None:
    """Otherwise, a copy of FedAvg without `personal = False` would be compared by its locally trained copies."""

    @dataclass(frozen=True)
    class Average(ft.LocalTraining):
        def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
            return state, {"params": ctx.optimize(ctx.loss, message["params"], **self.optimizer_options)}

    @dataclass(frozen=True)
    class Tuned(Average):
        def personalize(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> Tree:
            return ctx.optimize(ctx.loss, message["params"], lr=0.1, epochs=1)

    assert (Average().ranking_moment, Tuned().ranking_moment) == ("received", "trained")
    assert ft.methods.FedPer.personal and ft.methods.Local.personal


@cache
def final_models(name: str, batch_norm: bool) -> list[Tree]:
    """Return the networks of all clients at both moments after three rounds with default fields."""
    torch.manual_seed(0)
    net = make_normalized_net() if batch_norm else TinyNet().double()
    run = ft.simulate(METHODS[name](), net, tiny_federation(), rounds=3, batch_size=2, dtype=torch.float64)
    models = [run.personal(client, moment) for client in range(4) for moment in ("received", "trained")]
    return [{name: model[name] for name in net.state_dict() if name in model} for model in models]


@pytest.mark.parametrize("other", ["local", "fedavg"])
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("local", "fedavg")])
def test_method_differs_from_local_training_and_fedavg(name: str, other: str) -> None:
    """Without batch normalization, FedBN equals FedAvg."""
    batch_norm = name == "fedbn"
    assert not all_same(final_models(name, batch_norm), final_models(other, batch_norm), 1e-6)


@SOME_METHODS
@pytest.mark.parametrize("clients", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_method_reduces_training_loss(name: str, clients: int) -> None:
    """The training loss after a few rounds is clearly below its initial value, also with a single client."""
    fed = ft.load("digits", clients=clients, alpha=1.0, seed=3)
    model = ft.network("mlp", fed, hidden=(32,))
    run = ft.simulate(METHODS[name](), model, fed, rounds=8, batch_size=16, evaluate_every=8)
    initial_loss = torch.log(torch.tensor(10.0))  # loss of uniform predictions
    assert run.records[-1]["loss"] < 0.75 * float(initial_loss)
    assert run.records[-1]["accuracy_received"] > 0.3  # 0.1 by guessing


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
def test_extrapolation_keeps_running_variances_nonnegative(method: ft.Method) -> None:
    fed = ft.load("digits", clients=4, alpha=0.1, seed=1)
    run = ft.simulate(method, make_digits_net(), fed, rounds=5, batch_size=16, evaluate_every=5)
    models = [run.personal(client, moment) for client in range(4) for moment in ("received", "trained")]
    variances = {n: leaf for n, leaf in flatten(run.server).items() if n.endswith("running_var")}
    for tree in (variances, *models):
        assert all(float(leaf.min()) >= 0 for name, leaf in tree.items() if name.endswith("running_var"))


@SOME_METHODS
def test_batch_norm_statistics_are_those_of_data(name: str) -> None:
    """A personal model has running statistics of real data, so its accuracy is above that of guessing."""
    fed = ft.load("digits", clients=3, partition="iid", seed=1)
    fields = SMALL_STEPS.get(name, {"lr": 0.02})
    run = ft.simulate(METHODS[name](**fields), make_digits_net(), fed, rounds=3, batch_size=16, evaluate_every=3)
    assert run.records[-1]["accuracy_trained"] > 0.5
    assert float(run.personal(0)["norm.running_var"].min()) >= 0
    assert not torch.equal(run.personal(0)["norm.running_mean"], torch.zeros(32))
