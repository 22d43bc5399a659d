"""Methods with one global model: FedAvg, FedAvg-FT, FedProx, SCAFFOLD, FedExP, and FedADMM.

FedAvg, FedProx, SCAFFOLD, FedExP, and pFedMe have one literal version, alone (here) and inside of LAG (test_lag.py).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from conftest import all_same, models, same, tiny_federation
from fedtailor.methods import FedADMM, FedAvg, FedAvgFT, FedExP, FedProx, Local, PFedMe, Scaffold
from support.literal_lag import (
    Inner,
    LiteralFedAvg,
    LiteralFedExP,
    LiteralLAG,
    LiteralPFedMe,
    LiteralScaffold,
    library_states,
)
from support.problem import FULL, PARTIAL, Problem, Weights, average, make_problem

PROBLEM = make_problem()
ROUNDS = [[0, 1, 2, 3, 4], [1, 3, 4], [0, 1]]
SGD: dict[str, Any] = {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.01}
ME: dict[str, Any] = {"lr": 0.1, "personal_lr": 0.05, "lam": 2.0, "inner_steps": 3, "steps": 7, "beta": 0.5}
LITERAL: dict[str, tuple[ft.Method, Callable[[Problem], Inner]]] = {
    "fedavg": (FedAvg(**SGD), lambda p: LiteralFedAvg(p, **SGD)),
    "fedavg, uniform": (FedAvg(**SGD, weights="uniform"), lambda p: LiteralFedAvg(p, **SGD, by_size=False)),
    "fedprox": (FedProx(**SGD, mu=0.5), lambda p: LiteralFedAvg(p, **SGD, mu=0.5)),
    "scaffold": (Scaffold(lr=0.1, server_lr=0.7), lambda p: LiteralScaffold(p, 0.1, server_lr=0.7)),
    "fedexp": (FedExP(**SGD), lambda p: LiteralFedExP(p, **SGD)),
    "fedexp, size": (FedExP(**SGD, weights="size"), lambda p: LiteralFedExP(p, **SGD, by_size=True)),
    "fedexp, last": (
        FedExP(**SGD, epsilon=0.01, average_last=False),
        lambda p: LiteralFedExP(p, **SGD, epsilon=0.01, average_last=False),
    ),
    "pfedme": (PFedMe(**ME), lambda p: LiteralPFedMe(p, **ME)),
}


@pytest.mark.parametrize("schedule", [FULL[:3], PARTIAL], ids=["full", "partial"])
@pytest.mark.parametrize("name", LITERAL)
def test_method_equals_literal_algorithm(name: str, schedule: list[list[int]]) -> None:
    method, make_literal = LITERAL[name]
    run, inner = PROBLEM.run(method, schedule), make_literal(PROBLEM)
    literal = LiteralLAG(inner, k=0).train(schedule)
    server, clients = library_states(inner)
    assert same(run.server, server, 1e-10)
    assert all_same([run.client(i) for i in range(5)], clients, 1e-10)
    for i in range(5):
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


def test_fedavg_with_one_client_equals_local_training(net: nn.Module) -> None:
    avg, local = (simulate(m, net, tiny_federation((8,)), batch_size=3) for m in (FedAvg(), Local()))
    assert all_same(models(avg, "received"), models(local, "received"))


def test_fedprox_without_proximal_term_equals_fedavg() -> None:
    assert same(PROBLEM.run(FedProx(mu=0.0, **SGD), ROUNDS).server, PROBLEM.run(FedAvg(**SGD), ROUNDS).server)


def test_scaffold_with_one_step_and_full_participation_equals_fedavg(net: nn.Module) -> None:
    fed = tiny_federation((6, 6, 6))
    scaffold, avg = (simulate(method(epochs=1), net, fed, batch_size=6) for method in (Scaffold, FedAvg))
    assert same(scaffold.server["params"], avg.server["params"], 1e-12)


def test_scaffold_server_control_is_mean_of_client_controls() -> None:
    """c is the mean of all c_i under any participation and is not zero."""
    run = PROBLEM.run(Scaffold(), ROUNDS)
    assert same(average([run.client(i)["control"] for i in range(5)], [1] * 5), run.server["control"], 1e-12)
    assert all(float(c.abs().max()) > 0 for c in run.server["control"].values())


def test_scaffold_optimizer_options_exclude_momentum_and_weight_decay() -> None:
    assert not {"momentum", "weight_decay"} & set(Scaffold().optimizer_options)


def test_fedexp_with_large_epsilon_equals_fedavg() -> None:
    exp, avg = (PROBLEM.run(m, ROUNDS) for m in (FedExP(lr=0.2, epsilon=1e9), FedAvg(lr=0.2, weights="uniform")))
    assert same(exp.server["params"], avg.server["params"], 1e-12)


# FedAvg-FT


def test_fedavgft_equals_literal_algorithm() -> None:
    """After two rounds of FedAvg, a copy of the global model is fine-tuned with the batches of a third round."""
    run = PROBLEM.run(FedAvgFT(epochs=2, tuning_epochs=3), ROUNDS[:2])
    theta, last = PROBLEM.start, dict[int, Weights]()
    for t, clients in enumerate(ROUNDS[:2], start=1):
        last |= {i: PROBLEM.sgd(theta, t, i, epochs=2) for i in clients}
        theta = average([last[i] for i in clients], [PROBLEM.sizes[i] for i in clients])
    assert same(run.server["params"], theta, 1e-10)
    assert all_same(models(run, "received"), [PROBLEM.sgd(theta, 3, i, epochs=3) for i in range(5)], 1e-10)
    assert all_same(models(run, "trained"), [last[i] for i in range(5)], 1e-10)


def test_fedavgft_without_tuning_equals_fedavg() -> None:
    tuned, avg = PROBLEM.run(FedAvgFT(tuning_epochs=0), ROUNDS), PROBLEM.run(FedAvg(), ROUNDS)
    assert same(tuned.server, avg.server)
    assert all_same(models(tuned, "received"), models(avg, "received"))


def test_fedavgft_fine_tuning_does_not_change_server() -> None:
    """Clients are evaluated, and so fine-tuned, in each round."""
    assert same(PROBLEM.run(FedAvgFT(), ROUNDS).server, PROBLEM.run(FedAvg(), ROUNDS).server)


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


def test_fedadmm_global_model_is_mean_over_all_clients() -> None:
    """With η = m/N, θ is the mean of w_i + y_i/ρ over all N clients under any participation."""
    run = PROBLEM.run(FedADMM(lr=0.1, rho=0.3), [*ROUNDS, [0], [2, 4], [1, 2, 3]])
    states = [run.client(i) for i in range(5)]
    mean = {n: sum(s["own"][n] + s["dual"][n] / 0.3 for s in states) / 5 for n in run.server["params"]}
    assert same(run.server["params"], mean, 1e-10)


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_fedadmm_first_round_with_half_step_equals_fedprox(variant: Any) -> None:
    """In round 1, dual variables are zero, and Δ_i is twice the change of the model."""
    problem = make_problem((6, 6, 6))
    prox = problem.run(FedProx(mu=0.4), [[0, 1, 2]])
    admm = problem.run(FedADMM(lr=0.1, rho=0.4, server_lr=0.5, variant=variant), [[0, 1, 2]])
    assert same(admm.server, prox.server, 1e-12)
    assert all_same(models(admm, "trained"), models(prox, "trained"), 1e-12)


def test_fedadmm_with_few_participants_does_not_diverge() -> None:
    """With η = 1, changes since the last participation would be counted repeatedly; the default m/N avoids this."""
    fed = tiny_federation((12,) * 10)
    rounds = [[t % 10, (t + 5) % 10] for t in range(30)]
    run = ft.simulate(
        FedADMM(lr=0.1), PROBLEM.net, fed, schedule=rounds, evaluate_every=30, dtype=torch.float64, engine="sequential"
    )
    assert run.records[-1]["loss_received"] < 1.0
