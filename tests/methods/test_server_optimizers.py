"""FedAdam, FedYogi, and FedAdagrad: Algorithm 2 of the paper, by hand, and its limits."""

from typing import Any

import pytest
import torch

from conftest import same, tiny_federation
from fedtailor.methods import FedAdagrad, FedAdam, FedAvg, FedYogi
from support.problem import PARTIAL, Problem, average, make_normalized_net, make_problem, zeros

PROBLEM = make_problem()
METHODS: dict[str, Any] = {"adam": FedAdam, "yogi": FedYogi, "adagrad": FedAdagrad}


def literal_server(
    kind: str, server_lr: float, beta1: float, beta2: float, tau: float, initial: float
) -> dict[str, Any]:
    """Lines 7 to 13 of Algorithm 2, entry by entry; v starts at `initial`."""
    x, m = PROBLEM.start, zeros(PROBLEM.start)
    v = {n: torch.full_like(w, initial) for n, w in x.items()}
    for t, clients in enumerate(PARTIAL, start=1):
        trained = average([PROBLEM.sgd(x, t, i) for i in clients], [PROBLEM.sizes[i] for i in clients])
        for n in x:
            delta = trained[n] - x[n]
            m[n] = beta1 * m[n] + (1 - beta1) * delta
            v[n] = {
                "adagrad": v[n] + delta**2,
                "yogi": v[n] - (1 - beta2) * delta**2 * torch.sign(v[n] - delta**2),
                "adam": beta2 * v[n] + (1 - beta2) * delta**2,
            }[kind]
            x = {**x, n: x[n] + server_lr * m[n] / (torch.sqrt(v[n]) + tau)}
    return x


@pytest.mark.parametrize("initial", [None, 0.0])
@pytest.mark.parametrize("kind", METHODS)
def test_server_optimizer_equals_algorithm_2(kind: str, initial: float | None) -> None:
    fields = {"server_lr": 0.05, "beta1": 0.8, "tau": 0.01}
    beta2 = {} if kind == "adagrad" else {"beta2": 0.7}
    run = PROBLEM.run(METHODS[kind](**fields, **beta2, initial_v=initial), PARTIAL)
    expected = literal_server(kind, **fields, beta2=0.7, initial=0.01**2 if initial is None else initial)
    assert same(run.server["params"], expected, 1e-12)


def test_first_rounds_by_hand() -> None:
    """One weight with the changes 0.3 and 0.1: v is 0.01² + 0.09 and 0.01² + 0.1 for Adagrad, with η = 1 and β₁ = 0."""
    method = FedAdagrad(server_lr=1.0, tau=0.01)
    v, steps = torch.tensor(0.01**2, dtype=torch.float64), []
    for change in (0.3, 0.1):
        v = method.second_moment(v, torch.tensor(change**2, dtype=torch.float64))
        steps.append(change / (float(v) ** 0.5 + 0.01))
    assert steps == pytest.approx([0.3 / (0.0901**0.5 + 0.01), 0.1 / (0.1001**0.5 + 0.01)], abs=1e-12)
    yogi = FedYogi(beta2=0.9)  # v = 1 is above Δ² = 0.5 and falls by 0.05; below Δ² = 2, it rises by 0.2
    small, large = (float(yogi.second_moment(torch.tensor(1.0), torch.tensor(square))) for square in (0.5, 2.0))
    assert (small, large) == pytest.approx((0.95, 1.2))


def test_server_optimizer_averages_running_statistics() -> None:
    """A step along the change could make a variance negative."""
    problem = Problem(tiny_federation((6, 3, 9)), make_normalized_net())
    clients = ((0, 1, 2),)
    adaptive, plain = (problem.run(method, clients).server["params"] for method in (FedAdam(), FedAvg()))
    names = ("norm.running_mean", "norm.running_var")
    assert all(torch.equal(adaptive[name], plain[name]) for name in names)
    assert not torch.equal(adaptive["head.weight"], plain["head.weight"])
