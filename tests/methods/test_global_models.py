"""FedAvg-FT and FedADMM: literal algorithms, limiting cases, and differences from public code.

FedAvg, FedProx, and SCAFFOLD are tested in test_identities.py, FedExP in test_lag.py.
"""

from typing import Any

import pytest
import torch

import fedtailor as ft
from conftest import all_same, error_message, models, same, tiny_federation
from fedtailor.methods import FedADMM, FedAvg, FedAvgFT, FedProx, Local
from support.problem import Problem, Weights, make_problem

PROBLEM = make_problem()
ROUNDS = [[0, 1, 2, 3, 4], [1, 3, 4]]


def sgd(problem: Problem, start: Weights, t: int, i: int, epochs: int, extra_grad: Any = None) -> Weights:
    """Run SGD for client i in round t with learning rate 0.1; `extra_grad(name, weight)` is added to the gradient."""
    w = dict(start)
    for e in range(epochs):
        for batch in problem.batches(t, i, e):
            grad = problem.gradient(w, batch)
            w = {n: w[n] - 0.1 * (grad[n] + (extra_grad(n, w[n]) if extra_grad else 0)) for n in w}
    return w


# FedAvg-FT


def test_fedavgft_equals_literal_algorithm() -> None:
    """After two rounds of FedAvg, a copy of the global model is fine-tuned with the batches of a third round."""
    run = PROBLEM.run(FedAvgFT(epochs=2, tuning_epochs=3), ROUNDS)
    theta, last = PROBLEM.start, dict[int, Weights]()
    for t, clients in enumerate(ROUNDS, start=1):
        trained = {i: sgd(PROBLEM, theta, t, i, epochs=2) for i in clients}
        total = sum(PROBLEM.sizes[i] for i in clients)
        theta = {n: torch.stack([PROBLEM.sizes[i] / total * trained[i][n] for i in clients]).sum(0) for n in theta}
        last |= trained
    assert same(run.server["params"], theta, 1e-10)
    assert all_same(models(run, "received"), [sgd(PROBLEM, theta, 3, i, epochs=3) for i in range(5)], 1e-10)
    assert all_same(models(run, "trained"), [last[i] for i in range(5)], 1e-10)


def test_fedavgft_without_tuning_equals_fedavg() -> None:
    tuned, avg = PROBLEM.run(FedAvgFT(tuning_epochs=0), ROUNDS), PROBLEM.run(FedAvg(), ROUNDS)
    assert same(tuned.server, avg.server)
    assert all_same(models(tuned, "received"), models(avg, "received"))


def test_fedavgft_with_one_client_equals_local_training_one_round_later() -> None:
    problem = make_problem((8,))
    tuned, local = problem.run(FedAvgFT(tuning_epochs=2), [[0]] * 3), problem.run(Local(epochs=2), [[0]] * 4)
    assert same(tuned.personal(0, "received"), local.personal(0, "received"))


def test_fedavgft_fine_tuning_does_not_change_server() -> None:
    """The server equals that of FedAvg even if clients are evaluated in each round. The fine-tuned model differs from
    the models of FedAvg and local training and from the uploaded model."""
    settings: dict[str, Any] = {"schedule": ROUNDS * 2, "batch_size": 3, "dtype": torch.float64, "engine": "sequential"}
    tuned, avg, local = (
        ft.simulate(method, PROBLEM.net, PROBLEM.fed, evaluate_every=1, **settings)
        for method in (FedAvgFT(), FedAvg(), Local())
    )
    assert same(tuned.server, avg.server)
    assert all_same(models(tuned, "trained")[1:2], models(avg, "trained")[1:2])
    received = models(tuned, "received")
    for others in (models(avg, "received"), models(local, "received"), models(tuned, "trained")):
        assert not any(same(one, other, 1e-4) for one, other in zip(received, others, strict=True))


def test_fedavgft_negative_tuning_epochs_raise() -> None:
    assert "tuning_epochs must be at least 0" in error_message(lambda: FedAvgFT(tuning_epochs=-1))


# FedADMM


@pytest.mark.parametrize("variant", ["paper", "code"])
@pytest.mark.parametrize("step", [None, 0.7])
@pytest.mark.parametrize("start", ["received", "own"])
def test_fedadmm_equals_literal_algorithm(variant: Any, step: float | None, start: Any) -> None:
    rho, rounds, zero = 0.3, [[0, 1, 2, 3, 4], [1, 3, 4], [0, 1]], {n: 0 * w for n, w in PROBLEM.start.items()}
    run = PROBLEM.run(FedADMM(lr=0.1, rho=rho, server_lr=step, variant=variant, start=start), rounds)
    theta, own, y = PROBLEM.start, [PROBLEM.start for _ in range(5)], [zero for _ in range(5)]
    for t, clients in enumerate(rounds, start=1):
        changes = []
        for i in clients:
            y_i, sent = y[i], theta
            new = sgd(
                PROBLEM,
                theta if start == "received" else own[i],
                t,
                i,
                epochs=2,
                extra_grad=lambda n, w, y_i=y_i, sent=sent: y_i[n] + rho * (w - sent[n]),
            )
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


def test_fedadmm_first_round_with_half_step_equals_fedprox() -> None:
    """In round 1, dual variables are zero, and Δ_i is twice the change of the model."""
    problem = make_problem((6, 6, 6))
    rounds = [[0, 1, 2]]
    prox = problem.run(FedProx(mu=0.4), rounds)
    for variant in ("paper", "code"):
        admm = problem.run(FedADMM(lr=0.1, rho=0.4, server_lr=0.5, variant=variant), rounds)
        assert same(admm.server, prox.server, 1e-12)
        assert all_same(models(admm, "trained"), models(prox, "trained"), 1e-12)
        assert not same(problem.run(FedADMM(lr=0.1, rho=0.4, variant=variant), rounds).server, prox.server, 1e-3)


def test_fedadmm_has_one_dual_variable_per_client() -> None:
    """y_i = ρ Σ (w_i − θ) over the rounds of client i; public code has a single dual variable for all clients."""
    run = PROBLEM.run(FedADMM(lr=0.1), [[0, 1]])
    expected = [{n: 0.01 * (run.personal(i)[n] - PROBLEM.start[n]) for n in PROBLEM.start} for i in (0, 1)]
    assert all_same([run.client(0)["dual"], run.client(1)["dual"]], expected, 1e-12)
    assert not same(run.client(0)["dual"], run.client(1)["dual"], 1e-5)
    assert all(float(leaf.abs().max()) == 0 for leaf in run.client(2)["dual"].values())


def test_fedadmm_settings_fedavg_and_local_training_give_different_models() -> None:
    methods = [
        FedADMM(lr=0.1),
        FedADMM(lr=0.1, rho=1.0),
        FedADMM(lr=0.1, server_lr=0.5),
        FedADMM(lr=0.1, variant="code"),
        FedAvg(),
        Local(),
    ]
    received = [models(PROBLEM.run(method, ROUNDS), "received")[0] for method in methods]
    for position, model in enumerate(received):
        assert not any(same(model, other, 1e-5) for other in received[:position])


def test_fedadmm_with_few_participants_does_not_diverge() -> None:
    """With η = 1, changes since the last participation would be counted repeatedly; the default m/N avoids this."""
    fed = tiny_federation((12,) * 10)
    rounds = [[t % 10, (t + 5) % 10] for t in range(30)]
    run = ft.simulate(
        FedADMM(lr=0.1), PROBLEM.net, fed, schedule=rounds, evaluate_every=30, dtype=torch.float64, engine="sequential"
    )
    assert run.records[-1]["loss_received"] < 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rho": 0.0}, "rho must be above 0"),
        ({"server_lr": 0}, "server_lr must"),
        ({"variant": "x"}, "variant must be"),
    ],
)
def test_fedadmm_invalid_fields_raise(fields: dict[str, Any], message: str) -> None:
    assert message in error_message(lambda: FedADMM(**fields))
