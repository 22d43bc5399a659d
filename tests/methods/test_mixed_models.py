"""FedAMP, APPLE, FedFomo, and FedALA: literal versions and limiting cases."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import all_same, models, same
from fedtailor.core.trees import Tree
from fedtailor.methods import APPLE, FedALA, FedAMP, FedFomo
from fedtailor.training.engines.sequential import Sequential
from fedtailor.training.simulated_clients import SimulatedClients
from fedtailor.training.trainer import Trainer
from support import literal_mixtures as literal
from support.problem import HEAD, Problem, Weights, make_problem

PROBLEM = make_problem()
ALL_CLIENTS = [0, 1, 2, 3, 4]
ROUNDS = [ALL_CLIENTS, [1, 3], [0, 2, 4], [0, 1, 3]]


def run(method: ft.Method, schedule: Sequence[Sequence[int]] = ROUNDS, problem: Problem = PROBLEM) -> ft.Run:
    """Return a cached run of the library."""
    return _run(method, tuple(map(tuple, schedule)), problem)


@cache
def _run(method: ft.Method, schedule: tuple[tuple[int, ...], ...], problem: Problem) -> ft.Run:
    return ft.simulate(
        method, problem.net, problem.fed, schedule=schedule, batch_size=problem.batch_size, dtype=torch.float64,
        engine="sequential", device="cpu", evaluate_every=len(schedule),
    )  # fmt: skip


def rows_of(stacked: Weights) -> list[Weights]:
    return [{n: leaf[i] for n, leaf in stacked.items()} for i in range(len(next(iter(stacked.values()))))]


def make_simulation(method: ft.Method) -> Trainer[SimulatedClients]:
    return PROBLEM.trainer(method, [ALL_CLIENTS] * 3)


def make_context(simulated: Trainer[SimulatedClients], client: int, round: int) -> ft.ClientContext:
    assert isinstance(simulated.clients.engine, Sequential)
    return simulated.clients.engine._context(client, round)


# FedAMP

AMP: dict[str, dict[str, Any]] = {
    "defaults": {},
    "weak": {"lam": 0.1, "alpha": 0.2},
    "wide": {"sigma": 3.0},
    "plain": {"relative": False, "sigma": 0.05, "alpha": 0.02, "lam": 0.02},
    "plain, large step": {"relative": False, "sigma": 0.5, "alpha": 5.0},
    "cosine": {"attention": "cosine"},
    "cosine, sharp": {"attention": "cosine", "sharpness": 100.0, "self_weight": 0.2},
}


@pytest.mark.parametrize("case", AMP)
def test_fedamp_equals_literal_version(case: str) -> None:
    method = FedAMP(**AMP[case])
    found, (expected, rows) = run(method), literal.fedamp(PROBLEM, ROUNDS, method)
    assert all_same(models(found), expected, 1e-10) and all_same(models(found, "received"), expected, 1e-10)
    weights = torch.tensor(rows, dtype=torch.float64)
    assert torch.allclose(found.server["weights"], weights, atol=1e-10)
    assert float((weights - torch.eye(5)).abs().max()) > 1e-3  # mixtures are not trivial
    if case != "defaults":  # each field has an effect
        assert not all_same(models(found), models(run(FedAMP())), 1e-5)


# FedFomo


def affinity(record: dict[str, Any]) -> Tensor:
    return torch.tensor(record["method_metrics"]["affinity"], dtype=torch.float64)


def chosen_models(found: ft.Run, schedule: Sequence[Sequence[int]]) -> list[dict[int, list[int]]]:
    """Return the models with nonzero weight in each round, from the changes of P."""
    P = [torch.eye(5, dtype=torch.float64), *map(affinity, found.records)]
    return [
        {i: (after[i] - before[i]).nonzero()[:, 0].tolist() for i in clients}
        for (before, after), clients in zip(pairwise(P), schedule, strict=True)
    ]


@pytest.mark.parametrize(
    "method",
    [FedFomo(), FedFomo(models=2), FedFomo(models=1, explore=1.0, explore_decay=0.0), FedFomo(validation=0.5, lr=0.2)],
    ids=["all", "two", "one at random", "half"],
)
def test_fedfomo_equals_literal_version(method: FedFomo) -> None:
    schedule = [*ROUNDS, [0, 1, 2]]
    found = run(method, schedule)
    chosen = chosen_models(found, schedule)
    expected, P = literal.fedfomo(PROBLEM, schedule, method, chosen)
    assert all_same(models(found), expected, 1e-10)
    assert torch.allclose(found.server["affinity"], P, atol=1e-10)
    assert all(len(of) <= method.models and i not in of for round in chosen for i, of in round.items())
    assert any(weight > 0 for i in ALL_CLIENTS for j, weight in enumerate(P[i].tolist()) if i != j)
    for record in found.records:  # the client's own model is not sent
        assert set(record["per_client"]["bytes_down"].values()) == {8 * 64 * min(method.models, 4)}
    if method.models >= 4:  # all models are sent
        received = [
            literal.move(PROBLEM, expected, i, [j for j in ALL_CLIENTS if j != i], method)[0] for i in ALL_CLIENTS
        ]
        assert all_same(models(found, "received"), received, 1e-10)


def test_fedfomo_keeps_personal_model_if_others_have_higher_loss() -> None:
    simulated, method = make_simulation(FedFomo()), FedFomo()
    good = PROBLEM.sgd(PROBLEM.start, 1, 0, epochs=20)
    bad = {n: torch.stack([leaf, 3 * leaf]) for n, leaf in PROBLEM.start.items()}
    with torch.no_grad():
        start, weights = method._mix(make_context(simulated, 0, 2), {"params": good}, {"models": bad})
    assert same(start, good) and float(weights.max()) < 0


def choices(method: FedFomo, P: Tensor, rounds: Sequence[int]) -> Tensor:
    """Return the models that are sent to client 0, [rounds, M]."""
    server = {"affinity": P, "seed": torch.tensor(3)}
    return torch.stack([method._choose(server, [0], round)[0] for round in rounds])


def test_fedfomo_sends_best_models_and_explores_less_over_rounds() -> None:
    P = torch.tensor([[9.0, 0.1, -0.5, 0.7, 0.0, 0.3]]).expand(6, 6)
    assert set(choices(FedFomo(models=2, explore=0.0), P, [4])[0].tolist()) == {3, 5}
    counts = torch.bincount(choices(FedFomo(models=2, explore=1.0, explore_decay=0.0), P, range(1, 301)).flatten())
    assert counts[0] == 0 and float((counts[1:] / 600 - 0.2).abs().max()) < 0.05
    decaying = FedFomo(models=1, explore=1.0, explore_decay=0.5)
    for round, share in ((1, 1.0), (2, 0.5), (3, 0.0)):
        servers = [{"affinity": P, "seed": torch.tensor(seed)} for seed in range(400)]
        first = torch.cat([decaying._choose(server, [0], round)[0] for server in servers])
        assert abs(float((first != 3).double().mean()) - share * 0.8) < 0.06  # a random model may be the best
    ties = choices(FedFomo(models=1, explore=0.0), torch.eye(6), range(1, 301)).flatten()
    assert len(set(ties.tolist())) == 5  # ties are broken at random
    assert torch.equal(choices(FedFomo(), P, [1, 2]), choices(FedFomo(), P, [1, 2]))


def test_fedfomo_evaluates_models_in_evaluation_mode() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(OrderedDict(fc=nn.Linear(4, 5), drop=nn.Dropout(0.5), head=nn.Linear(5, 3)))
    problem = Problem(PROBLEM.fed, net.double().eval())  # the literal version evaluates without dropout
    found = run(FedFomo(), ROUNDS[:2], problem)
    first, second = map(affinity, found.records)
    before = models(run(FedFomo(), ROUNDS[:1], problem))
    w = literal.move(problem, before, 1, [0, 2, 3, 4], FedFomo())[1]
    assert all(abs(float(second[1, n] - first[1, n]) - w[n]) < 1e-10 for n in w) and any(w.values())


# APPLE

CORES: dict[str, dict[str, Any]] = {
    "defaults": {"weight_lr": 0.01},
    "momentum": {"weight_lr": 0.01, "momentum": 0.9},
    "fixed weights": {"weight_lr": 0.0},
    "strong penalty": {"weight_lr": 0.01, "mu": 2.0},
    "short penalty": {"weight_lr": 0.01, "mu": 2.0, "pull_rounds": 0.75},
    "cosine": {"weight_lr": 0.01, "mu": 2.0, "pull_rounds": 0.75, "schedule": "cosine"},
}


@pytest.mark.parametrize("case", CORES)
def test_apple_equals_literal_version(case: str) -> None:
    method = APPLE(epochs=2, **CORES[case])
    found, (cores, ps, trained, received) = run(method), literal.apple(PROBLEM, ROUNDS, method)
    assert all_same(rows_of(found.server["cores"]), cores, 1e-10)
    assert all_same(models(found), trained, 1e-10) and all_same(models(found, "received"), received, 1e-10)
    for i in ALL_CLIENTS:
        assert torch.allclose(found.client(i)["shares"] + found.client(i)["change"], ps[i], atol=1e-10)
        assert same(found.client(i)["core"], cores[i], 1e-10)
    moved = max(float(found.client(i)["change"].abs().max()) for i in ALL_CLIENTS)
    assert moved == 0 if case == "fixed weights" else moved > 1e-3


def test_apple_with_limit_requests_unseen_cores_first_and_caches_cores() -> None:
    schedule = [ALL_CLIENTS] * 3
    fields: dict[str, Any] = {"epochs": 1, "mu": 0.0}  # the penalty depends on the number of rounds
    found = [run(APPLE(limit=2, **fields), schedule[:rounds]) for rounds in (1, 2, 3)]
    assert not all_same(models(found[2]), models(run(APPLE(**fields), schedule)), 1e-5)
    for i in ALL_CLIENTS:
        seen = [r.client(i)["seen"] for r in found]
        assert [int(mask.sum()) for mask in seen] == [2, 4, 4] and not seen[2][i]
        assert all(record["per_client"]["bytes_down"][i] == 2 * 8 * 64 for record in found[2].records)  # two cores
        for before, after in pairwise(found):
            requested = before.server["wanted"][i]  # cores of the next round
            assert int(requested.sum()) == 2 and not requested[i]
            for name, cores in before.server["cores"].items():
                fresh = torch.where(
                    requested.reshape(5, *[1] * (cores.ndim - 1)), cores, before.client(i)["cache"][name]
                )
                assert torch.equal(after.client(i)["cache"][name], fresh)


@pytest.mark.parametrize(("number", "base"), [(1, 1.5), (20, 4.0)])
def test_apple_with_limit_prefers_cores_with_larger_weights(number: int, base: float) -> None:
    """The odds of |p| = 1 to |p| = 0 are base to 1, where the base is round · 1 / 5, at least 1.5."""
    simulated, method = make_simulation(APPLE(limit=1)), APPLE(limit=1)
    weights, seen = torch.tensor([0.0, -1.0, 0.0, 0.0, 0.0]), torch.ones(5, dtype=torch.bool)
    rounds = 1000  # the base is that of one round
    requested = np.zeros(5)
    for seed in range(rounds):
        ctx = make_context(simulated, 0, number)
        ctx._shared = replace(ctx._shared, seed=seed)
        requested += method._choose_cores(ctx, weights, seen).numpy()
    assert requested[0] == 0 and requested.sum() == rounds
    assert abs(requested[1] / rounds - base / (base + 3)) < 0.04 and abs(requested[2] / rounds - 1 / (base + 3)) < 0.04


# FedALA

ALA: dict[str, dict[str, Any]] = {
    "defaults": {},
    "fast": {"weight_lr": 50.0, "first_epochs": 11},
    "two layers": {"weight_lr": 50.0, "layers": 2, "first_epochs": 11},
    "all layers": {"weight_lr": 50.0, "layers": 3, "first_epochs": 11},
    "half": {"weight_lr": 50.0, "share": 0.5, "first_epochs": 11},
    "few epochs": {"weight_lr": 50.0, "first_epochs": 3},
    "long": {"weight_lr": 2.0, "first_epochs": 25, "lr": 0.5},
}
LAYERS = ("fc1", "fc2", "head")


@pytest.mark.parametrize("case", ALA)
def test_fedala_equals_literal_version(case: str) -> None:
    method = FedALA(**ALA[case])
    last = [f"{layer}.{kind}" for layer in LAYERS[-method.layers :] for kind in ("weight", "bias")]
    found, (shared, W, trained, received, epochs) = run(method), literal.fedala(PROBLEM, ROUNDS, method, last)
    assert same(found.server["params"], shared, 1e-10)
    assert all_same(models(found), trained, 1e-10) and all_same(models(found, "received"), received, 1e-10)
    assert all_same([found.client(i)["weights"] for i in ALL_CLIENTS], W, 1e-10)
    assert set(epochs) == set(ALL_CLIENTS)  # no client in round 1, each client in its next round
    assert set(epochs.values()) == {3} if case == "few epochs" else min(epochs.values()) >= 10
    values = torch.cat([leaf.flatten() for weights in W for leaf in weights.values()])
    assert float(values.min()) >= 0 and float(values.max()) == 1 and float(values.min()) < 0.999
    if case != "defaults":
        assert not all_same(models(found), models(run(FedALA())), 1e-6)


def test_fedala_stops_when_loss_has_converged() -> None:
    """With full batches, the loss converges after ten epochs, and a larger maximum has no effect."""
    whole, schedule = make_problem(batch_size=9), [ALL_CLIENTS] * 2
    nine, ten, twenty = (models(run(FedALA(first_epochs=most), schedule, whole)) for most in (9, 10, 20))
    assert all_same(ten, twenty) and not all_same(nine, ten, 1e-8)


def initial_state(own: Weights) -> Tree:
    """Return the state of a client that has not learned its weights."""
    ones = {n: torch.ones_like(own[n]) for n in HEAD}
    return {"own": {n: own[n] for n in HEAD}, "weights": ones, "started": torch.tensor(False)}


def test_fedala_learns_if_any_entry_differs() -> None:
    """Public code only checks the sum of the differences of one tensor."""
    simulated, method = make_simulation(FedALA(weight_lr=20.0)), FedALA(weight_lr=20.0)
    shift = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    state = initial_state(PROBLEM.start)
    shared = PROBLEM.start | {"head.bias": PROBLEM.start["head.bias"] + shift}
    with torch.no_grad():
        start, learned = method._mix(make_context(simulated, 0, 2), state, {"params": shared})
        same_start, untouched = method._mix(make_context(simulated, 0, 2), state, {"params": PROBLEM.start})
    assert learned["started"] and float(learned["weights"]["head.bias"].min()) < 1 and not same(start, shared, 1e-6)
    assert not untouched["started"] and same(untouched["weights"], state["weights"]) and same(same_start, PROBLEM.start)
