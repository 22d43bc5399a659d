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
from fedtailor.core.trees import Tree
from fedtailor.methods import SelfFL
from fedtailor.methods.selffl import client_weight, leave_one_out_start, steps_needed, update_variance
from support.literal_selffl import Known, LiteralSelfFL, squared_norm, two_pass_variance, weighted_mean
from support.problem import FULL, PARTIAL, Problem, Weights, assert_finite, make_identical_clients, make_problem

EXACT = 1e-10
PROBLEM = make_problem()
SCHEDULES = {"full": FULL, "partial": (PARTIAL * 2)[:12]}
BOTH_SCHEDULES = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
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
    "clusters": {"clusters": CLUSTERS},
    "clusters_no_warmup": {"clusters": CLUSTERS, "warmup": 0},
    "clusters_no_weights": {"clusters": CLUSTERS, "adjust_weights": False},
    "clusters_augmented": {"clusters": CLUSTERS, "augmented": True, "minimum_steps": 7, "smoothing": False},
}


def both(problem: Problem, schedule: Sequence[Sequence[int]], **fields: Any) -> tuple[ft.Run, LiteralSelfFL]:
    """Return the run of the library and the literal version."""
    fields = FIELDS | fields
    return problem.run(SelfFL(**fields), schedule), LiteralSelfFL(problem, **fields).run(schedule)


def encode(value: Known) -> Tensor:
    """Return a variance as it is sent; −1 means unknown."""
    return torch.tensor(-1.0 if value is None else value, dtype=torch.float64)


def encode_all(values: Sequence[Known]) -> Tensor:
    return torch.stack([encode(value) for value in values])


def expected_server(expected: LiteralSelfFL) -> Tree:
    tree: Tree = {
        "params": expected.theta,
        "between": encode(expected.sigma_0),
        "variances": encode_all(expected.sigmas),
    }
    if expected.clusters:
        count = max(expected.clusters) + 1
        tree["active"] = torch.tensor([c in expected.representatives for c in range(count)])
        tree["representative_variances"] = encode_all([expected.representative_sigmas.get(c) for c in range(count)])
    return tree


def check_server(run: ft.Run, expected: LiteralSelfFL) -> None:
    found = dict(run.server)
    representatives = found.pop("representatives", {})
    assert same(found, expected_server(expected), EXACT)
    for c, representative in expected.representatives.items():
        assert same({name: layer[c] for name, layer in representatives.items()}, representative, EXACT)


def check_client(run: ft.Run, expected: LiteralSelfFL, m: int) -> None:
    """Compare the client state, as far as it is defined already, and the personal model."""
    found, client = run.client(m), expected.clients[m]
    assert same(found["params"], client.theta, EXACT)
    assert int(found["count"]) == client.count
    if client.steps:
        assert int(found["steps"]) == client.steps
    if expected.augmented:
        assert same(found["minimum"], client.minimum, EXACT)
    if client.count > 0:
        assert same(found["mean"], client.mean, EXACT)
    if client.count > 1:
        assert abs(float(found["variance"]) - client.running) <= EXACT
    for moment in ("received", "trained"):
        assert same(run.personal(m, moment), client.theta, EXACT)


def check_records(run: ft.Run, expected: LiteralSelfFL) -> None:
    for record, log in zip(run.records, expected.logs, strict=True):
        metrics, own = record["method_metrics"], record["per_client"]
        assert own["steps"] == log.steps
        assert metrics["between"] == pytest.approx(log.between, abs=EXACT)
        assert metrics["variances"] == pytest.approx(encode_all(log.variances).tolist(), abs=EXACT)
        assert metrics["gains"] == pytest.approx(log.gains, abs=EXACT)


def check(run: ft.Run, expected: LiteralSelfFL) -> None:
    check_server(run, expected)
    for m in range(run.num_clients):
        check_client(run, expected, m)
    check_records(run, expected)


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
        assert max(squared_norm(a.theta, b.theta) for a, b in pairs) > 1e-6, (case, other)


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


def printed_variance(xs: Sequence[Weights]) -> float:
    """Return Eq. 19 as printed, without the square of x̄_t − x̄_{t−1}, summed over coordinates."""
    mean = {name: torch.zeros_like(layer) for name, layer in xs[0].items()}
    variance = 0.0
    for t, x in enumerate(xs, start=1):
        new = {name: (t - 1) / t * mean[name] + x[name] / t for name in x}
        mean_change = sum(float((new[name] - mean[name]).sum()) for name in x)
        variance = (t - 1) / t * variance + (t - 1) / t * mean_change + squared_norm(x, new) / t
        mean = new
    return variance


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
        assert same(mean, weighted_mean(xs, [1.0] * count), 1e-12)
        assert variance == pytest.approx(two_pass_variance(xs), rel=1e-12, abs=1e-25)


@pytest.mark.parametrize("seed", range(5))
def test_equation_19_as_printed_differs_from_variance(seed: int) -> None:
    xs = random_trees(10, seed)
    assert abs(printed_variance(xs) - two_pass_variance(xs)) > 0.01 * two_pass_variance(xs)


@pytest.mark.parametrize("forgetting", [0.1, 0.3, 0.9])
def test_selffl_forgetting_gives_weighted_variance(forgetting: float) -> None:
    """The running variance equals the two-pass variance with the weights g_i Π_{j>i} (1 − g_j)."""
    xs = random_trees(30, 0)
    gains = [max(1 / t, forgetting) for t in range(1, 31)]
    shares = [gain * math.prod(1 - later for later in gains[i + 1 :]) for i, gain in enumerate(gains)]
    assert sum(shares) == pytest.approx(1, abs=1e-12)
    mean, variance = running_variance(xs, gains)
    center = weighted_mean(xs, shares)
    assert same(mean, center, 1e-12)
    expected = sum(share * squared_norm(x, center) for x, share in zip(xs, shares, strict=True))
    assert variance == pytest.approx(expected, rel=1e-12)


def literal_fedavg(problem: Problem, schedule: Sequence[Sequence[int]], lr: float, steps: int) -> Weights:
    theta = problem.start
    for round, participants in enumerate(schedule, start=1):
        ends = []
        for m in participants:
            own, stream = theta, problem.stream(round, m)
            for _ in range(steps):
                grad = problem.gradient(own, next(stream))
                own = {name: own[name] - lr * grad[name] for name in own}
            ends.append(own)
        theta = weighted_mean(ends, [problem.sizes[m] for m in participants])
    return theta


OFF = {"adjust_start": False, "adjust_steps": False, "adjust_weights": False, "smoothing": False}


@BOTH_SCHEDULES
@pytest.mark.parametrize("fields", [{"warmup": 99}, {"warmup": 0, **OFF}, {"warmup": 99, "clusters": CLUSTERS}])
def test_selffl_in_warmup_or_without_adjustments_equals_fedavg(
    fields: dict[str, Any], schedule: list[list[int]]
) -> None:
    run = PROBLEM.run(SelfFL(lr=0.1, default_steps=5, **fields), schedule)
    assert same(run.server["params"], literal_fedavg(PROBLEM, schedule, 0.1, 5), EXACT)
    counted = fields["warmup"] == 0
    assert all((int(run.client(m)["count"]) > 0) == counted for m in range(5))
    assert (float(run.server["variances"].max()) > 0) == counted
    assert float(run.server["between"]) > 0


# the two-level Gaussian model of Sections 2.1 and G.1

RATE = torch.tensor(1e-4, dtype=torch.float64)  # η
HOMOGENEOUS, HETEROGENEOUS = (0.001, 20), (1.0, 200)  # σ_0² and the maximum number of samples per client
SETTINGS = pytest.mark.parametrize("setting", [HOMOGENEOUS, HETEROGENEOUS], ids=["homogeneous", "heterogeneous"])
SEEDS = pytest.mark.parametrize("seed", range(3))


class Gaussian:
    """Eq. 1 with M = 20, θ_0 = 1.6, and known variances; tensors are vectors over clients."""

    def __init__(self, setting: tuple[float, int], seed: int) -> None:
        random = np.random.default_rng(seed)
        between, max_size = setting
        sizes = random.integers(10, max_size + 1, 20)
        theta = random.normal(1.6, math.sqrt(between), 20)
        z = random.normal(theta, np.sqrt(0.1 / sizes))
        self.between = torch.tensor(between, dtype=torch.float64)  # σ_0²
        # N, σ², θ^(L)
        self.sizes, self.own, self.local = torch.tensor(sizes), torch.tensor(0.1 / sizes), torch.tensor(z)
        self.weight: Tensor = torch.func.vmap(client_weight, in_dims=(None, 0))(self.between, self.own)  # w
        self.others = torch.stack([self.weight[[k for k in range(20) if k != m]].sum() for m in range(20)])  # W_−m
        self.steps: Tensor = torch.func.vmap(steps_needed, in_dims=(None, 0, 0))(RATE, self.own, self.others)

    def mean(self, thetas: Tensor) -> Tensor:
        """Eqs. 2 and 11: θ^(G) for local optima, θ for the parameters of clients."""
        total: Tensor = (self.weight * thetas).sum() / self.weight.sum()
        return total

    def optimum(self) -> Tensor:
        """Eq. 3: θ^(FL) of each client."""
        found = []
        for m in range(20):
            numerator, denominator = self.local[m] / self.own[m], 1 / self.own[m]
            for k in range(20):
                if k != m:
                    numerator, denominator = numerator + self.weight[k] * self.local[k], denominator + self.weight[k]
            found.append(numerator / denominator)
        return torch.stack(found)

    def starts(self, shared: Tensor, own: Tensor) -> Tensor:
        """Eq. 10 for each client."""
        mapped = torch.func.vmap(leave_one_out_start, in_dims=(None, 0, 0, 0))
        starts: Tensor = mapped({"theta": shared}, {"theta": own}, self.weight, self.others)["theta"]
        return starts

    def train(self, starts: Tensor) -> Tensor:
        """Eq. 6: ℓ steps of gradient descent on Eq. 4 in closed form, for real ℓ."""
        left: Tensor = (1 - RATE / self.own) ** self.steps
        return (1 - left) * self.local + left * starts


def max_abs(x: Tensor) -> float:
    return float(x.abs().max())


@SETTINGS
@SEEDS
def test_selffl_one_round_reaches_optimum(setting: tuple[float, int], seed: int) -> None:
    """Eq. 10 at θ^(G) and θ^(L) is the start of Eq. 7 (Eq. 9), and the steps of Eq. 8 lead from there to Eq. 3."""
    gaussian = Gaussian(setting, seed)
    starts = gaussian.starts(gaussian.mean(gaussian.local), gaussian.local)
    for m in range(20):
        rest = [k for k in range(20) if k != m]
        seventh = (gaussian.weight[rest] * gaussian.local[rest]).sum() / gaussian.weight[rest].sum()
        assert abs(float(starts[m] - seventh)) < 1e-12
    assert max_abs(gaussian.train(starts) - gaussian.optimum()) < 1e-12
    assert max_abs(gaussian.optimum() - gaussian.local) > 1e-3 < max_abs(gaussian.optimum() - starts)


@SETTINGS
@SEEDS
def test_selffl_gradient_descent_on_mean_loss_requires_rate_divided_by_samples(
    setting: tuple[float, int], seed: int
) -> None:
    """The mean loss of N samples with variance v² = Nσ² has the gradient (θ − z)/v².

    With η/N instead of η, θ^(FL) is between the iterates before and after ℓ steps; with η, it is far from them.
    """
    gaussian = Gaussian(setting, seed)
    starts, best = gaussian.starts(gaussian.mean(gaussian.local), gaussian.local), gaussian.optimum()
    error = 0.0
    for m in range(20):
        needed = steps_needed(RATE / gaussian.sizes[m], gaussian.own[m], gaussian.others[m])
        z, path = float(gaussian.local[m]), [float(starts[m])]
        for _ in range(math.ceil(needed)):
            path.append(path[-1] - float(RATE) * (path[-1] - z) / 0.1)
        low, high = sorted(path[math.floor(needed) :][:2])
        assert low - 1e-12 <= float(best[m]) <= high + 1e-12
        error = max(error, abs(path[round(float(gaussian.steps[m]))] - float(best[m])))
    assert error > (0.5 if setting == HETEROGENEOUS else 1e-3)


@SETTINGS
@SEEDS
def test_selffl_iteration_satisfies_corrected_bound(setting: tuple[float, int], seed: int) -> None:
    """|ζ_m^t| ≤ a_m (max_k |ζ_k^{t−1}| + |D|/(1−v_m) + v_m |θ_m^(FL) − θ_m^(L)|/(1−v_m)) with D of Eq. 38.

    The bound is tight: some client reaches 90 % of it, and without D and v_m it would be violated.
    """
    gaussian, best = Gaussian(setting, seed), Gaussian(setting, seed).optimum()
    a = gaussian.others / (1 / gaussian.own + gaussian.others)
    v = gaussian.weight / gaussian.weight.sum()
    constant = (gaussian.mean(best - gaussian.local).abs() + v * (best - gaussian.local).abs()) / (1 - v)
    theta, thetas = torch.zeros((), dtype=torch.float64), torch.zeros(20, dtype=torch.float64)
    tightness, violated = 0.0, False
    for _ in range(200):
        before = max_abs(thetas - best)
        thetas = gaussian.train(gaussian.starts(theta, thetas))
        theta = gaussian.mean(thetas)
        zeta = (thetas - best).abs()
        assert bool((zeta <= a * (before + constant) + 1e-12).all())
        tightness = max(tightness, max_abs(zeta / (a * (before + constant))))
        violated = violated or bool((zeta > a * before + 1e-12).any())
    assert tightness > 0.9 and violated
    assert 1e-5 < max_abs(thetas - best) < 0.02  # close to θ^(FL), but not equal


@SEEDS
def test_steps_needed_follow_from_gain(seed: int) -> None:
    """(1 − η/σ²)^ℓ = (GAIN − 1)/GAIN."""
    random = torch.Generator().manual_seed(seed)
    variance, others = torch.rand(2, 50, generator=random, dtype=torch.float64) * torch.tensor([[1.0], [30.0]]) + 0.01
    rate = variance * torch.rand(50, generator=random, dtype=torch.float64) * 0.9
    steps, gain = steps_needed(rate, variance, others), 1 + variance * others
    assert torch.allclose((1 - rate / variance) ** steps, (gain - 1) / gain, rtol=1e-12, atol=0)


def test_client_weight_is_inverse_of_bounded_sum() -> None:
    between, own = torch.tensor([[0.5, 0.0, 0.0], [1.5, 0.25, 0.0]], dtype=torch.float64)
    assert torch.allclose(client_weight(between, own), torch.tensor([0.5, 4.0, 1e12], dtype=torch.float64), rtol=1e-15)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_steps": 1},
        {"default_steps": 1},
        {"warmup": 0},
        {"minimum_steps": 1, "augmented": True},
        {"clusters": (0,) * 5},
    ],
)
def test_selffl_smallest_valid_fields_are_accepted(fields: dict[str, Any]) -> None:
    assert_finite(PROBLEM.run(SelfFL(**FIELDS | fields), FULL))


# edge cases


def test_selffl_single_client_takes_max_steps() -> None:
    """Without other clients, Eq. 8 gives the maximum number of steps."""
    run, expected = both(make_problem((7,)), [[0]] * 6, warmup=1)
    check(run, expected)
    assert_finite(run)
    assert [record["per_client"]["steps"][0] for record in run.records] == [20, 20, 20, 40, 40, 40]
    assert same(run.server["params"], run.client(0)["params"], 1e-12)


@pytest.mark.parametrize("fields", [{}, {"warmup": 0}, {"augmented": True, "minimum_steps": 5}, {"clusters": CLUSTERS}])
def test_selffl_one_participant_per_round_keeps_between_variance_zero(fields: dict[str, Any]) -> None:
    """σ_0² stays 0, because it requires two participants."""
    run, expected = both(PROBLEM, [[0], [1], [2], [3], [4]] * 4, **fields)
    check(run, expected)
    assert_finite(run)
    assert float(run.server["between"]) == 0


@pytest.mark.parametrize("case", ["defaults", "clusters", "clusters_no_weights", "augmented"])
def test_selffl_client_without_participation_keeps_initial_state(case: str) -> None:
    run, expected = both(PROBLEM, [[0, 1, 2], [1, 3], [0, 2, 3], [0, 1]] * 3, **CASES[case])
    check(run, expected)
    assert_finite(run)
    assert (
        run.records[-1]["method_metrics"]["variances"][4] == -1 and run.records[-1]["method_metrics"]["gains"][4] == 1
    )
    assert same(run.personal(4), PROBLEM.start)


@pytest.mark.parametrize("fields", [{}, {"augmented": True, "minimum_steps": 5}, {"clusters": (0, 1, 1)}])
def test_selffl_identical_clients_have_equal_models(fields: dict[str, Any]) -> None:
    """With the same data and full batches, all uploads of a round are equal."""
    run, expected = both(make_identical_clients(3, 5), [[0, 1, 2]] * 6, **fields)
    check(run, expected)
    assert_finite(run)
    assert float(run.server["between"]) < 1e-20
    assert same(run.personal(0), run.personal(2), 1e-12)


@pytest.mark.parametrize("lr", [1e-8, 1e-30])
@pytest.mark.parametrize("case", ["no_warmup", "mean", "augmented", "clusters"])
def test_selffl_tiny_learning_rates_give_finite_results(case: str, lr: float) -> None:
    """Variances are small or zero."""
    assert_finite(PROBLEM.run(SelfFL(**FIELDS | CASES[case] | {"lr": lr, "default_steps": 3}), PARTIAL))
