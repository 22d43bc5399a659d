"""Limiting cases: fields with which a method equals a simpler method.

LAG is compared with the methods that it wraps in test_lag.py.
"""

from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from torch import nn

import fedtailor as ft
from conftest import all_same, models, same, tiny_federation
from fedtailor import methods as m
from support.problem import PARTIAL, Problem, Weights, make_identical_clients, make_normalized_net, make_problem

Schedule = tuple[tuple[int, ...], ...]


def full(clients: int, rounds: int = 3) -> Schedule:
    return (tuple(range(clients)),) * rounds


def make_balanced() -> Problem:
    """Create clients that have equally many samples of each class."""
    random = np.random.default_rng(0)

    def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
        return random.normal(size=(3 * count, 4)), np.tile(np.arange(3), count)

    fed = ft.Federation.from_arrays([(*samples(size), *samples(1)) for size in (4, 1, 2)], classes=3)
    return Problem(fed, make_problem().net)


PROBLEM, SINGLE, EQUAL = make_problem(), make_problem((8,)), make_problem((6, 6, 6))
ONE_BATCH, ONE_SAMPLE = make_problem((6, 6, 6), batch_size=6), make_problem((5, 2, 1), batch_size=1)
LINEAR = Problem(PROBLEM.fed, nn.Sequential(OrderedDict(head=nn.Linear(4, 3))).double())
IDENTICAL, BALANCED = make_identical_clients(4), make_balanced()
# full batches only, because padding would change batch statistics
NORMALIZED, NORMALIZED_SINGLE = (
    Problem(tiny_federation(sizes), make_normalized_net()) for sizes in ((6, 3, 9, 3, 6), (9,))
)
ROUNDS: Schedule = tuple(map(tuple, PARTIAL))
DECAY: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01}
REDUCED: dict[str, Any] = {
    "lr": 0.2, "duals": False, "rho": 0.0, "sigma": 0.0, "alpha": "one", "accuracy_start": 0, "start": "received",
    "epochs_personal": 2, "epochs_shared": 2,
}  # fmt: skip
MIXED: dict[str, Any] = {"lr": 0.1, "hyper_lr": 2.0, "hidden": 6, "embedding": 4}


@dataclass(frozen=True)
class Limit:
    """Two methods with equal models; a tolerance of 0 means bit by bit."""

    method: ft.Method
    other: ft.Method
    problem: Problem = PROBLEM
    schedule: Schedule = ROUNDS
    tolerance: float = 0.0
    moments: tuple[str, ...] = ("received", "trained")


TRAINED, RECEIVED = ("trained",), ("received",)
LIMITS = [
    Limit(m.FedAvg(), m.Local(sampled=True), SINGLE, full(1)),
    Limit(m.FedAvgFT(tuning_epochs=0), m.FedAvg()),
    Limit(m.FedProx(mu=0.0, **DECAY), m.FedAvg(**DECAY)),
    Limit(m.Scaffold(epochs=1), m.FedAvg(epochs=1), ONE_BATCH, full(3), 1e-12, RECEIVED),
    Limit(m.FedExP(lr=0.2, epsilon=1e9, average_last=False), m.FedAvg(lr=0.2, weights="uniform"), tolerance=1e-12),
    # for a large τ, √v is negligible if v starts at 0; if it starts at τ², √v stays τ, but not with Adam's decay
    *(
        Limit(kind(beta1=0.0, tau=1e9, server_lr=1e9, initial_v=0.0), m.FedAvg(), tolerance=1e-8)
        for kind in (m.FedAdam, m.FedYogi, m.FedAdagrad)
    ),
    *(
        Limit(kind(beta1=0.0, tau=1e9, server_lr=2e9), m.FedAvg(), tolerance=1e-8)
        for kind in (m.FedYogi, m.FedAdagrad)
    ),
    # with v = 0 before round 1, v is (1 − β₂) Δ² after it for both
    Limit(m.FedYogi(initial_v=0.0), m.FedAdam(initial_v=0.0), schedule=full(5, 1), tolerance=1e-12),
    # in round 1, dual variables are zero, and Δ_i is twice the change of the model
    *(
        Limit(m.FedADMM(lr=0.1, rho=0.4, server_lr=0.5, variant=v), m.FedProx(mu=0.4), EQUAL, full(3, 1), 1e-12)
        for v in ("paper", "code")
    ),
    *(
        Limit(m.PerFedAvg(inner_lr=0.0, hessian=h), m.FedAvg(weights="uniform"), ONE_SAMPLE, full(3), 1e-12)
        for h in ("none", "difference")
    ),
    *(
        Limit(m.SelfFL(default_steps=4, **fields), m.FedAvg(), EQUAL, ((0, 1, 2), (0, 2), (1, 2)), 1e-12, TRAINED)
        for fields in (
            {"warmup": 99},
            {"warmup": 99, "clusters": (0, 0, 1)},
            {"warmup": 0, **dict.fromkeys(["adjust_start", "adjust_steps", "adjust_weights", "smoothing"], False)},
        )
    ),
    # split models
    Limit(m.FedRep(head_epochs=0, epochs=2), m.FedBABU(tuning_epochs=0)),
    Limit(m.FedRep(head_epochs=2, epochs=2), m.FedAlt(epochs=2)),
    Limit(m.LGFedAvg(), m.FedSim(split=("fc1", "fc2"), epochs=2, weights="uniform")),
    *(Limit(m.FedBN(weights=weights), m.FedAvg(weights=weights)) for weights in ("size", "uniform")),
    Limit(m.FedBN(), m.FedSim(split=("norm",), epochs=2), NORMALIZED),
    Limit(m.FedAS(align_epochs=0, weights="size"), m.FedPer(), moments=TRAINED),
    Limit(m.FedCAC(tau=0.0), m.FedAvg()),
    Limit(m.FedCAC(tau=1.0, beta=1), m.FedAvg(weights="uniform"), schedule=full(5), tolerance=1e-12),
    *(
        Limit(method, m.Local(sampled=True), problem, full(1), 1e-12)
        for method in (m.FedPer(), m.LGFedAvg(), m.FedBN(), m.FedCAC(), m.FedAS(align_epochs=0))
        for problem in (SINGLE, NORMALIZED_SINGLE)
    ),
    Limit(m.FedAPM(**REDUCED), m.FedAlt(lr=0.2, epochs=2, weights="uniform"), schedule=full(5), tolerance=1e-12),
    Limit(
        m.FedAPM(**REDUCED, order="together"),
        m.FedSim(lr=0.2, epochs=2, weights="uniform"),
        schedule=full(5),
        tolerance=1e-12,
    ),
    # the layer is chosen after round 1, so no client starts from an averaged head
    Limit(m.FedLAG(personal_layers=1, layers="last", weights="size"), m.FedPer(), tolerance=1e-12),
    # a model with one layer has no personal layers
    Limit(m.FedLAG(threshold=0.9), m.FedAvg(weights="uniform"), LINEAR),
    # separate personal models
    Limit(m.Ditto(lam=0.0), m.Local(sampled=True)),
    # with λη = 1, one step leads to the received model minus η times its gradient
    Limit(m.Ditto(lam=10.0, epochs=1), m.FedAvg(epochs=1), ONE_BATCH, full(3, 1), 1e-12, TRAINED),
    # with ηλ ≈ 1, w_i moves to θ̃, and the proximal term is 0 in the only step
    Limit(
        m.PFedMe(lr=0.25 - 1e-14, lam=4.0, personal_lr=0.1, inner_steps=1, steps=6), m.FedAvg(epochs=3), EQUAL,
        full(3), 1e-10, TRAINED,
    ),
    Limit(m.FedPHP(lam=0.0, mu=0.0), m.FedAvg(), tolerance=1e-12, moments=TRAINED),
    Limit(m.FedRoD(), m.FedAvg(), BALANCED, ((0, 1, 2), (0, 2)), 1e-12),
    Limit(m.LpProj(lam=0.0, steps=2, repeats=2), m.Local(sampled=True), EQUAL, full(3), 1e-12),
    # personalized aggregation
    *(Limit(m.FedAPA(weight_lr=0.0, variant=variant), m.Local(sampled=True)) for variant in ("paper", "code")),
    *(Limit(m.FedAPA(weight_lr=0.05, variant=v), m.Local(sampled=True), SINGLE, full(1)) for v in ("paper", "code")),
    Limit(m.FedAPA(weight_lr=0.05), m.Local(sampled=True), IDENTICAL, full(4), 1e-10),
    Limit(m.FedAMP(lam=0.0, sigma=1e-30), m.Local(sampled=True)),
    Limit(m.FedAMP(lam=0.0, attention="cosine", self_weight=1.0), m.Local(sampled=True)),
    Limit(m.FedAMP(lam=0.0), m.Local(sampled=True), SINGLE, full(1)),
    Limit(m.FedAMP(lam=0.0), m.Local(sampled=True), IDENTICAL, full(4), 1e-12),
    Limit(m.APPLE(lr=0.1, epochs=2, momentum=0.0, weight_lr=0.0), m.Local(sampled=True), SINGLE, full(1), 1e-12),
    *(Limit(m.APPLE(epochs=1, limit=limit), m.APPLE(epochs=1), tolerance=1e-12) for limit in (4, 99)),
    Limit(m.FedALA(weight_lr=0.0), m.FedAvg()),
    Limit(m.FedALA(layers=9, first_epochs=2), m.FedALA(layers=3, first_epochs=2)),
    *(Limit(m.PFedLA(**MIXED, retained=3, normalize=n), m.Local(sampled=True)) for n in ("sum", "softmax")),
    Limit(m.PFedLA(**MIXED), m.Local(sampled=True), SINGLE, full(1), 1e-12),
    Limit(m.PFedHN(turns=True), m.PFedHN(), schedule=((0,), (3,), (1,))),
    # prototypes and representations
    Limit(m.FedProto(lam=0.0, **DECAY), m.Local(sampled=True, **DECAY), tolerance=1e-12),
    Limit(m.FedProto(), m.Local(sampled=True), schedule=full(5, 1), tolerance=1e-12),
    Limit(m.FedGH(), m.Local(sampled=True), schedule=full(5, 1), moments=TRAINED),
    Limit(
        m.FedPAC(lam=0.0, mix=False, lr=0.1, head_lr=0.1, head_epochs=2, epochs=2, **DECAY),
        m.FedAlt(epochs=2, **DECAY),
        tolerance=1e-12,
    ),
    Limit(m.FedPAC(), m.FedPAC(mix=False), schedule=((2,), (2,), (0,)), tolerance=1e-12),
    Limit(m.DBE(kappa=0.0, memory=False), m.FedAvg()),
    Limit(m.DBE(kappa=0.0, memory=False, **DECAY), m.FedAvg(**DECAY), NORMALIZED),
    Limit(m.DBE(kappa=50.0), m.DBE(kappa=0.0), schedule=full(5, 1)),
]  # fmt: skip


@cache
def run(method: ft.Method, problem: Problem, schedule: Schedule) -> ft.Run:
    return problem.run(method, schedule)


def networks(run: ft.Run, problem: Problem, moment: str) -> list[Weights]:
    """Return the networks of all clients, without what a method adds to them."""
    names = problem.net.state_dict().keys()
    return [{name: own[name] for name in own if name in names} for own in models(run, moment)]


@pytest.mark.parametrize(
    "limit", LIMITS, ids=[f"{type(case.method).__name__}-{type(case.other).__name__}" for case in LIMITS]
)
def test_method_in_limiting_case_equals_other_method(limit: Limit) -> None:
    found, expected = (run(method, limit.problem, limit.schedule) for method in (limit.method, limit.other))
    for moment in limit.moments:
        actual, other = (networks(each, limit.problem, moment) for each in (found, expected))
        assert all_same(actual, other, limit.tolerance)
    start = limit.problem.start
    assert not same({name: found.personal(0)[name] for name in start}, start, 1e-4)  # models change
