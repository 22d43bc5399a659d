"""FedAPM compared with its literal version and with statements of the paper."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import same
from fedtailor.methods import FedAlt, FedAPM, FedSim
from support import literal_fedapm as literal
from support.problem import FULL, PARTIAL, Problem, Weights, make_problem

EXACT = 1e-10
SCHEDULES = {"full": FULL[:4], "partial": PARTIAL}
PROBLEM = make_problem()
NAMED = {"output": ["head"], "input": ["fc1"]}  # layers of the named splits in ThreeLayers


def make_fedapm(**fields: Any) -> FedAPM:
    """Create FedAPM with the values of the paper, which are the defaults of the literal version."""
    return FedAPM(**{"rho": 0.01, "accuracy_decay": 0.9} | fields)


def layers_of(split: Any) -> Sequence[str]:
    return NAMED[split] if isinstance(split, str) else list(split)


def reference(problem: Problem, schedule: Sequence[Sequence[int]], **fields: Any) -> list[literal.State]:
    return literal.fedapm(problem, schedule, settings(**fields))


def settings(split: Any = "output", **fields: Any) -> literal.Settings:
    return literal.Settings(layers=layers_of(split), **fields)


def state(client: literal.Client) -> dict[str, Any]:
    """Return the state of a literal client in the form of the library."""
    accuracy = torch.tensor(client.ξ, dtype=torch.float64)
    return {"personal": client.v, "shared": client.u, "dual": client.π, "accuracy": accuracy}


def assert_equal(run: ft.Run, end: literal.State, tolerance: float = EXACT) -> None:
    assert same(run.server, {"params": end.u}, tolerance)
    for i, client in enumerate(end.clients):
        assert same(run.client(i), state(client), tolerance)
        assert same(run.personal(i, "received"), client.v | end.u, tolerance)
        assert same(run.personal(i, "trained"), client.v | client.u, tolerance)


# comparison with the literal version

CASES: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 1.0},
    "alpha by size": {"lr": 1.0, "alpha": "size"},
    "alpha one": {"lr": 0.2, "alpha": "one"},
    "strong penalties": {"lr": 0.8, "rho": 0.3, "sigma": 0.2},
    "no early stopping": {"lr": 1.0, "accuracy_start": 0},
    "absolute accuracy": {"lr": 1.0, "accuracy_start": 0.002, "accuracy_decay": 0.8},
    "unequal epochs": {"lr": 0.7, "epochs_personal": 1, "epochs_shared": 4, "accuracy_start": 0.0005},
    "shared part only": {"lr": 1.0, "epochs_personal": 0},
    "personal part only": {"lr": 1.0, "epochs_shared": 0},
    "weight decay": {"lr": 1.0, "weight_decay": 0.01},
    "personal input": {"lr": 1.0, "split": "input"},
    "list of layers": {"lr": 1.0, "split": ["fc2"]},
    "tuple of layers": {"lr": 1.0, "split": ("fc1", "head")},
    "start received": {"lr": 1.0, "start": "received", "accuracy_start": 0.001},
    "start received, accuracy decay": {"lr": 1.0, "start": "received", "accuracy_decay": 0.5},
    "together": {"lr": 1.0, "order": "together", "accuracy_start": 0},
    "together, stopping": {"lr": 1.0, "order": "together", "accuracy_decay": 0.5},
    "together with decay": {"lr": 0.5, "order": "together", "accuracy_start": 0, "weight_decay": 0.01, "rho": 0.2},
    "together and received": {"lr": 1.0, "order": "together", "start": "received", "accuracy_start": 0},
    "no duals": {"lr": 1.0, "duals": False},
    "Eq. 9 as printed": {"lr": 0.3, "printed_loss": True},
    "no duals, strong penalty": {"lr": 1.0, "duals": False, "rho": 0.3, "accuracy_start": 0},
    "no duals, no penalty": {"lr": 1.0, "duals": False, "rho": 0.0, "sigma": 0.0, "accuracy_start": 0},
}


@cache
def case(name: str, participation: str) -> list[literal.State]:
    return reference(PROBLEM, SCHEDULES[participation], **CASES[name])


@pytest.mark.parametrize("participation", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_fedapm_equals_literal_version(name: str, participation: str) -> None:
    run, fields = PROBLEM.run(make_fedapm(**CASES[name]), SCHEDULES[participation]), settings(**CASES[name])
    history = case(name, participation)
    assert_equal(run, history[-1])
    for record, after in zip(run.records, history[1:], strict=True):
        own, metrics = record["per_client"], record["method_metrics"]
        each = {i: literal.lagrangian(PROBLEM, fields, after, i) for i in range(5)}
        assert own["drift"] == pytest.approx(after.drift, rel=EXACT, abs=EXACT)
        assert own["lagrangian"] == pytest.approx(each, rel=EXACT, abs=EXACT)
        assert metrics["lagrangian"] == pytest.approx(sum(each.values()), rel=EXACT, abs=EXACT)
        assert metrics["residual"] == pytest.approx(literal.residual(PROBLEM, fields, after), rel=EXACT, abs=EXACT)
        if fields.rho > 0:
            assert metrics["lyapunov"] == pytest.approx(literal.lyapunov(PROBLEM, fields, after), rel=EXACT, abs=EXACT)


def test_convergence_metrics_do_not_affect_training() -> None:
    run = PROBLEM.run(make_fedapm(**CASES["defaults"], convergence_metrics=False), SCHEDULES["partial"])
    assert_equal(run, case("defaults", "partial")[-1])
    assert not any("lagrangian" in record["per_client"] for record in run.records)
    with pytest.raises(ft.ConfigError, match="residual"):
        run.metric("residual")


@pytest.mark.parametrize("participation", SCHEDULES)
def test_fedapm_each_case_gives_different_result(participation: str) -> None:
    """Each field has an effect, so the comparisons above cannot pass if a field is ignored."""
    ends = {name: case(name, participation)[-1].u for name in CASES if "split" not in CASES[name]}
    for name, other in combinations(ends, 2):
        assert not same(ends[name], ends[other], 1e-6), (name, other)


@pytest.mark.parametrize("participation", SCHEDULES)
@pytest.mark.parametrize("name", ["defaults", "alpha by size", "strong penalties", "absolute accuracy", "weight decay"])
def test_fedapm_some_clients_stop_early_and_some_do_not(name: str, participation: str) -> None:
    """This concerns the literal version; otherwise, the cases would not test early stopping."""
    epochs_made = [epochs for after in case(name, participation)[1:] for epochs in after.epochs.values()]
    assert min(epochs_made) < 3 and max(epochs_made) > 0 and len(set(epochs_made)) > 1


# Lemma 1, on quadratics


class SumNet(nn.Module):
    """A sum of a personal and a shared linear map of different inputs; the squared error is quadratic in both."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(2, 1), nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x[:, :2]) + self.shared(x[:, 2:])  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Quadratic(Problem):
    """A regression problem with a quadratic loss."""

    def loss(self, weights: Weights, samples: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(self.net, weights, (self.fed.x[samples],))
        return (outputs[:, 0] - self.fed.y[samples]).square().mean()

    def run(self, method: ft.Method, schedule: Sequence[Sequence[int]]) -> ft.Run:
        model = ft.wrap(self.net, head=None, loss="regression")
        settings: dict[str, Any] = {"batch_size": self.batch_size, "dtype": torch.float64, "engine": "sequential"}
        return ft.simulate(method, model, self.fed, schedule=schedule, **settings)

    def lipschitz(self, client: int) -> tuple[float, float, float]:
        """Return (L_v, L_u, L_uv), the norms of the blocks of the Hessian 2/n Σ φφᵀ.

        φ is (x₁, x₂, 1) for v and (x₃, x₄) for u.
        """
        x = self.fed.x[self.all_samples(client)]
        of_v, of_u = torch.cat([x[:, :2], torch.ones_like(x[:, :1])], 1), x[:, 2:]
        blocks = [of_v.T @ of_v, of_u.T @ of_u, of_u.T @ of_v]
        own, shared, mixed = [float(torch.linalg.matrix_norm(2 * block / len(x), 2)) for block in blocks]
        return own, shared, mixed


def make_quadratic() -> Quadratic:
    """Create clients with opposite optima of the shared part, so that agreement depends on the dual variables."""
    random = torch.Generator().manual_seed(0)

    def client(size: int, scale: float, sign: int) -> tuple[Tensor, ...]:
        x = scale * torch.randn(size + 3, 4, generator=random, dtype=torch.float64)
        y = x @ torch.tensor([0.5, -0.5, 2.0 * sign, sign], dtype=torch.float64)
        return x[:size], y[:size], x[size:], y[size:]

    torch.manual_seed(0)
    clients = [client(6, 1.0, 1), client(7, 0.8, -1), client(5, 1.2, 1), client(6, 1.0, -1)]
    return Quadratic(ft.Federation.from_arrays(clients), SumNet().double(), batch_size=7)  # type: ignore[arg-type]


def fields_within_lemma(problem: Quadratic, alpha: str, sigma_over_rho: float) -> dict[str, Any]:
    """Return fields that satisfy Lemma 1.

    ρ is the smallest value that the lemma allows. The learning rate and the numbers of epochs solve both subproblems
    (each step reduces the error of v by the factor 1 − ησ). ξ soon falls below the changes of the Lagrangian.
    """
    fields = literal.Settings(layers=["own"], lr=1.0, alpha=alpha)
    weights = [literal.client_alpha(problem, fields, i) for i in range(problem.num_clients)]
    constants = [problem.lipschitz(i) for i in range(problem.num_clients)]
    rho = 3 * max(a * max(shared, mixed) for a, (_, shared, mixed) in zip(weights, constants, strict=True))
    sigma = sigma_over_rho * rho
    curvature = max(
        max(a * own + sigma, a * shared + rho) for a, (own, shared, _) in zip(weights, constants, strict=True)
    )
    epochs = math.ceil(math.log(1e-12) / math.log(1 - sigma / curvature))
    return {
        "lr": 1 / curvature, "split": ["own"], "alpha": alpha, "rho": rho, "sigma": sigma, "accuracy_decay": 0.3,
        "epochs_personal": epochs, "epochs_shared": 100,
    }  # fmt: skip


ALL_CLIENTS = [[0, 1, 2, 3]] * 12
SOME_CLIENTS = [[0, 1], [2], [1, 3], [0, 2, 3], [3], [0, 1, 2, 3]]


def lyapunov_values(problem: Problem, fields: dict[str, Any], run: ft.Run) -> list[float]:
    """Return L̃ at the start, which is not recorded, and after each round, as recorded."""
    start = reference(problem, [], **fields)[0]
    return [literal.lyapunov(problem, settings(**fields), start)] + [
        r["method_metrics"]["lyapunov"] for r in run.records
    ]


@pytest.mark.parametrize(
    ("schedule", "alpha", "sigma_over_rho"),
    [
        (ALL_CLIENTS[:6], "uniform", 8 / 15),
        (SOME_CLIENTS, "size", 1.0),
        (SOME_CLIENTS, "uniform", 6.0),
    ],
)
def test_lyapunov_value_never_increases_within_lemma(
    schedule: list[list[int]], alpha: str, sigma_over_rho: float
) -> None:
    """Lemma 1: L̃ decreases by at least a Σ_p per round; a is 0 at the bound ρ = (15/8)σ and ρ/60 well inside."""
    problem = make_quadratic()
    fields = fields_within_lemma(problem, alpha, sigma_over_rho)
    run, history = problem.run(make_fedapm(**fields), schedule), reference(problem, schedule, **fields)
    assert_equal(run, history[-1])
    rate = max(0.0, min(fields["rho"] / 60, fields["sigma"] / 2 - 4 * fields["rho"] / 15))
    decreases = [earlier - later for earlier, later in pairwise(lyapunov_values(problem, fields, run))]
    for decrease, (before, after) in zip(decreases, pairwise(history), strict=True):
        assert decrease >= rate * literal.moved(before, after) - 1e-12
    assert run.records[-1]["method_metrics"]["residual"] < 0.9 * run.records[0]["method_metrics"]["residual"]


# splits


@pytest.mark.parametrize("kind", [FedAPM, FedAlt, FedSim])
def test_fedapm_model_parts_define_named_splits(kind: Any) -> None:
    own = ft.wrap(PROBLEM.net, parts={"split_input": ["fc2"], "output": ["fc2", "head"]})
    for name, layers in (("split_input", ["fc2"]), ("output", ["fc2", "head"])):
        named = ft.simulate(kind(lr=0.5, split=name), own, PROBLEM.fed, rounds=2, dtype=torch.float64)
        listed = ft.simulate(kind(lr=0.5, split=layers), PROBLEM.net, PROBLEM.fed, rounds=2, dtype=torch.float64)
        assert same(named.server, listed.server) and same(named.client(0), listed.client(0))


@pytest.mark.parametrize("kind", [FedAPM, FedAlt, FedSim])
def test_fedapm_cnn_output_split_contains_both_linear_layers(kind: Any) -> None:
    x, y = torch.rand(6, 1, 4, 4), torch.arange(6) % 3
    fed = ft.Federation.from_arrays([(x, y, x, y)] * 2)
    run = ft.simulate(kind(lr=0.1), ft.network("cnn", fed), fed, rounds=1)
    assert {name.split(".")[0] for name in run.client(0)["personal"]} == {"fc1", "head"}
    assert {name.split(".")[0] for name in run.server["params"]} == {"conv1", "conv2"}
