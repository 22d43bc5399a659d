"""Methods with one global model: FedAvg, FedProx, SCAFFOLD, FedExP, and FedADMM.

FedAvg-FT is in test_split_models.py. FedAvg, FedProx, SCAFFOLD, FedExP, and pFedMe have one literal version, alone
(here) and inside of LAG (test_lag.py).
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import all_same, models, same, tiny_federation
from fedtailor.methods import FedADMM, FedAvg
from support.literal_lag import INNER, SGD, LiteralFedExP, LiteralLAG
from support.problem import FULL, PARTIAL, Weights, make_problem

PROBLEM = make_problem()
ROUNDS = [[0, 1, 2, 3, 4], [1, 3, 4], [0, 1]]


@pytest.mark.parametrize("schedule", [FULL[:3], PARTIAL], ids=["full", "partial"])
@pytest.mark.parametrize("name", INNER)
def test_method_equals_literal_algorithm(name: str, schedule: list[list[int]]) -> None:
    method, make_literal = INNER[name]
    run, inner = PROBLEM.run(method, schedule), make_literal(PROBLEM)
    literal = LiteralLAG(inner, k=0).train(schedule)
    assert same(run.server, inner.server_state(), 1e-10)
    for i in range(5):
        assert same(run.client(i), inner.client_state(i), 1e-10)
        assert same(run.personal(i, "trained"), literal.trained(i), 1e-10)
        assert same(run.personal(i, "received"), literal.received(i), 1e-10)
    assert not isinstance(inner, LiteralFedExP) or max(inner.steps) > 1  # the server extrapolates


# FedAvg, FedProx, SCAFFOLD, and FedExP


def simulate(method: ft.Method, net: nn.Module, fed: ft.Federation, rounds: int = 3, **more: Any) -> ft.Run:
    schedule = [list(range(fed.num_clients))] * rounds
    return ft.simulate(method, net, fed, schedule=schedule, dtype=torch.float64, engine="sequential", **more)


def test_fedavg_equals_torch_optim_sgd(net: nn.Module) -> None:
    """One round with momentum and weight decay equals torch.optim.SGD on full batches, averaged by size."""
    fed = tiny_federation((3, 2))
    run = simulate(FedAvg(epochs=3, **SGD), net, fed, rounds=1, batch_size=3)
    total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for client, size in enumerate((3, 2)):
        copy = type(net)().double()
        copy.load_state_dict(net.state_dict())
        optimizer = torch.optim.SGD(copy.parameters(), **SGD)
        for _ in range(3):
            optimizer.zero_grad()
            x, y = fed.x[fed.train[client]], fed.y[fed.train[client]]
            torch.autograd.backward(nn.functional.cross_entropy(copy(x), y))
            optimizer.step()
        for name, p in copy.named_parameters():
            total[name] += p.detach() * size / 5
    assert same(run.server["params"], total, 1e-12)


# FedADMM


@pytest.mark.parametrize(
    ("variant", "step", "start"),
    [("paper", None, "received"), ("paper", 0.7, "own"), ("code", None, "own"), ("code", 0.7, "received")],
)
def test_fedadmm_equals_literal_algorithm(variant: Any, step: float | None, start: Any) -> None:
    rho, zero = 0.3, {n: 0 * w for n, w in PROBLEM.start.items()}
    run = PROBLEM.run(FedADMM(lr=0.1, rho=rho, server_lr=step, variant=variant, start=start), ROUNDS)
    theta, own, y = PROBLEM.start, [PROBLEM.start for _ in range(5)], [zero for _ in range(5)]
    for t, clients in enumerate(ROUNDS, start=1):
        changes = []
        for i in clients:

            def loss(w: Weights, batch: Tensor, y_i: Weights = y[i], theta: Weights = theta) -> Tensor:
                terms = [(y_i[n] * w[n]).sum() + rho / 2 * (w[n] - theta[n]).square().sum() for n in w]
                return PROBLEM.loss(w, batch) + torch.stack(terms).sum()

            new = PROBLEM.sgd(theta if start == "received" else own[i], t, i, loss=loss)
            dual = {n: y[i][n] + rho * (new[n] - theta[n]) for n in theta}
            before = own[i] if variant == "paper" else theta
            changes.append({n: (new[n] - before[n]) + (dual[n] - y[i][n]) / rho for n in theta})
            own[i], y[i] = new, dual
        eta = len(clients) / 5 if step is None else step
        theta = {n: theta[n] + eta / len(clients) * sum(change[n] for change in changes) for n in theta}
    assert same(run.server["params"], theta, 1e-10)
    assert all_same(models(run, "received"), [theta] * 5, 1e-10)
    assert all_same(models(run, "trained"), own, 1e-10)
    assert all_same([run.client(i)["dual"] for i in range(5)], y, 1e-10)


def test_fedadmm_with_few_participants_does_not_diverge() -> None:
    """With η = 1, changes since the last participation would be counted repeatedly; the default m/N avoids this."""
    fed = tiny_federation((12,) * 10)
    rounds = [[t % 10, (t + 5) % 10] for t in range(30)]
    run = ft.simulate(
        FedADMM(lr=0.1), PROBLEM.net, fed, schedule=rounds, evaluate_every=30, dtype=torch.float64, engine="sequential"
    )
    assert run.records[-1]["loss_received"] < 1.0
