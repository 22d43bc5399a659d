"""Self-FL: literal version, identities of the paper, and edge cases."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtailor as ft
from conftest import same
from fedtailor.core.trees import Tree, take
from fedtailor.methods import SelfFL
from fedtailor.methods.selffl import client_weight, leave_one_out_start, steps_needed, update_variance
from support.literal_selffl import Client, Known, LiteralSelfFL, squared_distance, two_pass_variance
from support.problem import (
    FULL,
    PARTIAL,
    Problem,
    Weights,
    assert_finite,
    average,
    make_identical_clients,
    make_problem,
)

EXACT = 1e-10
PROBLEM = make_problem()
SCHEDULES = {"full": FULL, "partial": (PARTIAL * 2)[:12]}
FIELDS: dict[str, Any] = {"lr": 0.1, "warmup": 1}  # clients adapt in both schedules
CLUSTERS = (0, 0, 1, 1, 2)
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no_warmup": {"warmup": 0},
    "mean": {"likelihood": "mean", "lr": 0.5, "default_steps": 100, "max_steps": 8, "warmup": 0},
    "forgetting": {"forgetting": 0.3},
    "no_start": {"adjust_start": False},
    "fixed_steps": {"adjust_steps": False},
    "no_weights": {"adjust_weights": False},
    "only_start": {"adjust_steps": False, "adjust_weights": False},
    "only_steps": {"adjust_start": False, "adjust_weights": False},
    "only_weights": {"adjust_start": False, "adjust_steps": False},
    "no_smoothing": {"smoothing": False},
    "few_steps": {"max_steps": 3},  # less than default_steps, which ℓ_max does not limit
    "augmented": {"augmented": True, "minimum_steps": 7},
    "known": {"known_between": 0.3, "known_within": 2.0},
    "known_within": {"known_within": 2.0, "warmup": 0},
    "known_augmented": {"known_between": 0.3, "known_within": 2.0, "augmented": True, "minimum_steps": 7},
    "clusters": {"clusters": CLUSTERS},
    "clusters_no_warmup": {"clusters": CLUSTERS, "warmup": 0},
    "clusters_no_weights": {"clusters": CLUSTERS, "adjust_weights": False},
    "clusters_augmented": {"clusters": CLUSTERS, "augmented": True, "minimum_steps": 7, "smoothing": False},
}


def encode(value: Known) -> Tensor:
    """Return a variance as it is sent; −1 means unknown."""
    return torch.tensor(-1.0 if value is None else value, dtype=torch.float64)


def encode_all(values: Sequence[Known]) -> Tensor:
    return torch.stack([encode(value) for value in values])


def check(run: ft.Run, expected: LiteralSelfFL) -> None:
    """Compare the server state, the client states as far as they are defined already, and the records."""
    server: Tree = {
        "params": expected.theta,
        "between": encode(expected.sigma_0),
        "variances": encode_all(expected.sigmas),
    }
    if expected.clusters:
        count = max(expected.clusters) + 1
        server["active"] = torch.tensor([c in expected.representatives for c in range(count)])
        server["representative_variances"] = encode_all([expected.representative_sigmas.get(c) for c in range(count)])
    found = dict(run.server)
    representatives = found.pop("representatives", {})
    assert same(found, server, EXACT)
    for c, representative in expected.representatives.items():
        assert same(take(representatives, c), representative, EXACT)
    for m, client in enumerate(expected.clients):
        check_client(run, m, client, expected.augmented)
    for record, log in zip(run.records, expected.logs, strict=True):
        metrics, own = record["method_metrics"], record["per_client"]
        assert own["steps"] == log.steps
        assert metrics["between"] == pytest.approx(log.between, abs=EXACT)
        assert metrics["variances"] == pytest.approx(encode_all(log.variances).tolist(), abs=EXACT)
        assert metrics["gains"] == pytest.approx(log.gains, abs=EXACT)


def check_client(run: ft.Run, m: int, client: Client, augmented: bool) -> None:
    found = run.client(m)
    assert same(found["params"], client.theta, EXACT)
    assert int(found["count"]) == client.count
    if client.steps:
        assert int(found["steps"]) == client.steps
    if augmented:
        assert same(found["minimum"], client.minimum, EXACT)
    if client.count > 0:
        assert same(found["mean"], client.mean, EXACT)
    if client.count > 1:
        assert abs(float(found["variance"]) - client.running) <= EXACT
    for moment in ("received", "trained"):
        assert same(run.personal(m, moment), client.theta, EXACT)


# comparison with the literal version


@cache
def literal(case: str, schedule: str) -> LiteralSelfFL:
    return LiteralSelfFL(PROBLEM, **FIELDS | CASES[case]).run(SCHEDULES[schedule])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES)
def test_selffl_equals_literal_version(case: str, schedule: str) -> None:
    check(PROBLEM.run(SelfFL(**FIELDS | CASES[case]), SCHEDULES[schedule]), literal(case, schedule))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", [name for name, fields in CASES.items() if fields.get("adjust_steps", True)])
def test_literal_version_adapts_steps(case: str, schedule: str) -> None:
    """Step counts differ within a round; otherwise, the test above would not test the adaptation."""
    expected = literal(case, schedule)
    adapted = [[log.steps[m] for m in log.steps if log.gain[m] > 1] for log in expected.logs]  # where σ_m² was known
    assert any(len(set(steps)) > 1 for steps in adapted)
    assert {ell for steps in adapted for ell in steps} - {1, expected.max_steps}


def test_selffl_each_case_gives_different_result() -> None:
    """Literal models differ between any two cases; otherwise, the test above would not test all fields."""
    for case, other in combinations(CASES, 2):
        pairs = zip(literal(case, "partial").clients, literal(other, "partial").clients, strict=True)
        assert max(squared_distance(a.theta, b.theta) for a, b in pairs) > 1e-6, (case, other)


# identities


def random_trees(count: int, seed: int) -> list[Weights]:
    random = torch.Generator().manual_seed(seed)
    shift = 10 * torch.randn(3, generator=random, dtype=torch.float64)
    return [
        {
            "a": torch.randn(3, generator=random, dtype=torch.float64) + shift,
            "b": torch.randn(2, 2, generator=random, dtype=torch.float64),
        }
        for _ in range(count)
    ]


def running_variance(xs: Sequence[Weights], gains: Sequence[float]) -> tuple[Tree, float]:
    mean: Tree = {name: torch.zeros_like(layer) for name, layer in xs[0].items()}
    variance = torch.zeros((), dtype=torch.float64)
    for x, gain in zip(xs, gains, strict=True):
        mean, variance = update_variance(mean, variance, x, torch.tensor(gain, dtype=torch.float64))
    return mean, float(variance)


@pytest.mark.parametrize("seed", range(5))
def test_running_variance_equals_two_pass_variance(seed: int) -> None:
    for count in (1, 2, 3, 10, 300):
        xs = random_trees(count, seed)
        mean, variance = running_variance(xs, [1 / t for t in range(1, count + 1)])
        assert same(mean, average(xs, [1.0] * count), 1e-12)
        assert variance == pytest.approx(two_pass_variance(xs), rel=1e-12, abs=1e-25)


@pytest.mark.parametrize("forgetting", [0.1, 0.3, 0.9])
def test_selffl_forgetting_gives_weighted_variance(forgetting: float) -> None:
    """The running variance equals the two-pass variance with the weights g_i Π_{j>i} (1 − g_j)."""
    xs = random_trees(30, 0)
    gains = [max(1 / t, forgetting) for t in range(1, 31)]
    shares = [gain * math.prod(1 - later for later in gains[i + 1 :]) for i, gain in enumerate(gains)]
    assert sum(shares) == pytest.approx(1, abs=1e-12)
    mean, variance = running_variance(xs, gains)
    center = average(xs, shares)
    assert same(mean, center, 1e-12)
    expected = sum(share * squared_distance(x, center) for x, share in zip(xs, shares, strict=True))
    assert variance == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("between", "max_size"), [(0.001, 20), (1.0, 200)], ids=["homogeneous", "heterogeneous"])
def test_selffl_one_round_reaches_optimum(between: float, max_size: int, seed: int) -> None:
    """In the two-level Gaussian model (Eq. 1 and Section G.1), Eq. 10 at θ^(G) and θ^(L) is the start of Eq. 7 (Eq. 9).

    From there, the steps of Eq. 8 lead to the optimum θ^(FL) of Eq. 3. Tensors are vectors over 20 clients.
    """
    random, rate = np.random.default_rng(seed), torch.tensor(1e-4, dtype=torch.float64)  # η
    sizes = random.integers(10, max_size + 1, 20)
    local = torch.tensor(random.normal(random.normal(1.6, math.sqrt(between), 20), np.sqrt(0.1 / sizes)))  # θ^(L)
    own = torch.tensor(0.1 / sizes)  # σ_m²
    weight = client_weight(torch.tensor(between, dtype=torch.float64), own)
    rest = ~torch.eye(20, dtype=torch.bool)  # k ≠ m
    others, pull = (weight * rest).sum(1), (weight * local * rest).sum(1)  # Σ_{k≠m} w_k and Σ_{k≠m} w_k θ_k
    best = (local / own + pull) / (1 / own + others)  # Eq. 3
    shared = {"theta": (weight * local).sum() / weight.sum()}  # Eq. 2
    mapped = torch.func.vmap(leave_one_out_start, in_dims=(None, 0, 0, 0))
    starts = mapped(shared, {"theta": local}, weight, others)["theta"]
    assert torch.allclose(starts, pull / others, rtol=0, atol=1e-12)  # Eq. 7
    left = (1 - rate / own) ** steps_needed(rate, own, others)  # ℓ steps of gradient descent in closed form, Eq. 6
    assert torch.allclose((1 - left) * local + left * starts, best, rtol=0, atol=1e-12)
    assert not torch.allclose(best, local, rtol=0, atol=1e-3) and not torch.allclose(best, starts, rtol=0, atol=1e-3)


# edge cases

Edge = tuple[Problem, Sequence[Sequence[int]], dict[str, Any]]
SMALL: dict[str, Any] = {"augmented": True, "minimum_steps": 5}
SOME_FIELDS: list[dict[str, Any]] = [{}, SMALL, {"clusters": (0, 1, 1)}]
ALONE: list[dict[str, Any]] = [{}, {"warmup": 0}, SMALL, {"clusters": CLUSTERS}]
EDGES: dict[str, Edge] = {
    "single client": (make_problem((7,)), [[0]] * 6, {}),
    "single client, small steps": (make_problem((7,)), [[0]] * 6, {"lr": 1e-4}),  # η/N_m is above σ_m²
    **{f"one participant, {at}": (PROBLEM, [[0], [1], [2], [3], [4]] * 4, fields)
       for at, fields in enumerate(ALONE)},
    **{f"client without participation, {case}": (PROBLEM, [[0, 1, 2], [1, 3], [0, 2, 3], [0, 1]] * 3, CASES[case])
       for case in ("defaults", "clusters", "clusters_no_weights", "augmented")},
    **{f"identical clients, {at}": (make_identical_clients(3, 5), [[0, 1, 2]] * 6, fields)
       for at, fields in enumerate(SOME_FIELDS)},
}  # fmt: skip


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES)
def test_selffl_in_edge_case_equals_literal_version(edge: Edge) -> None:
    """Without other clients, Eq. 8 gives the maximum number of steps; σ_0² requires two participants."""
    problem, schedule, fields = edge
    run = problem.run(SelfFL(**FIELDS | fields), schedule)
    check(run, LiteralSelfFL(problem, **FIELDS | fields).run(schedule))
    assert_finite(run)


@pytest.mark.parametrize("lr", [1e-8, 1e-30])
@pytest.mark.parametrize("case", ["no_warmup", "mean", "augmented", "clusters"])
def test_selffl_tiny_learning_rates_give_finite_results(case: str, lr: float) -> None:
    """Variances are small or zero."""
    assert_finite(PROBLEM.run(SelfFL(**FIELDS | CASES[case] | {"lr": lr, "default_steps": 3}), PARTIAL))
