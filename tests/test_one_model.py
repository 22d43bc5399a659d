"""FedAvgFT and FedADMM: rounds by hand, limits, and what public code gets wrong. The others are in test_identities."""

from typing import Any

import pytest
import torch

import fedtailor as ft
from conftest import alike, models, refusal, same, tiny_federation
from fedtailor.methods import FedADMM, FedAvg, FedAvgFT, FedProx, Local
from problem import Problem, Weights, make_problem

PROBLEM = make_problem()
ROUNDS = [[0, 1, 2, 3, 4], [1, 3, 4]]


def descend(problem: Problem, start: Weights, t: int, i: int, epochs: int, pull: Any = None) -> Weights:
    """Passes of SGD with a rate of 0.1 and what `pull` adds to a slope."""
    w = dict(start)
    for e in range(epochs):
        for batch in problem.batches(t, i, e):
            slope = problem.gradient(w, batch)
            w = {n: w[n] - 0.1 * (slope[n] + (pull(n, w[n]) if pull else 0)) for n in w}
    return w


# FedAvgFT


def test_fedavgft_by_hand() -> None:
    """Two rounds of FedAvg; then a copy of the common model is tuned with the batches of a further round."""
    run = PROBLEM.run(FedAvgFT(epochs=2, tuning_epochs=3), ROUNDS)
    theta, last = PROBLEM.start, dict[int, Weights]()
    for t, clients in enumerate(ROUNDS, start=1):
        trained = {i: descend(PROBLEM, theta, t, i, epochs=2) for i in clients}
        total = sum(PROBLEM.sizes[i] for i in clients)
        theta = {n: torch.stack([PROBLEM.sizes[i] / total * trained[i][n] for i in clients]).sum(0) for n in theta}
        last |= trained
    assert same(run.server["params"], theta, 1e-10)
    assert alike(models(run, "received"), [descend(PROBLEM, theta, 3, i, epochs=3) for i in range(5)], 1e-10)
    assert alike(models(run, "trained"), [last[i] for i in range(5)], 1e-10)


def test_fedavgft_without_tuning_is_fedavg() -> None:
    tuned, avg = PROBLEM.run(FedAvgFT(tuning_epochs=0), ROUNDS), PROBLEM.run(FedAvg(), ROUNDS)
    assert same(tuned.server, avg.server)
    assert alike(models(tuned, "received"), models(avg, "received"))


def test_fedavgft_of_one_client_is_local_a_round_later() -> None:
    problem = make_problem((8,))
    tuned, local = problem.run(FedAvgFT(tuning_epochs=2), [[0]] * 3), problem.run(Local(epochs=2), [[0]] * 4)
    assert same(tuned.personal(0, "received"), local.personal(0, "received"))


def test_fedavgft_tunes_a_copy_of_the_average_and_forgets_it() -> None:
    """The federation is FedAvg's, however often clients are evaluated; and the tuned model is neither FedAvg's, nor
    training alone, nor what the client uploaded."""
    settings: dict[str, Any] = {"schedule": ROUNDS * 2, "batch_size": 3, "dtype": torch.float64, "engine": "sequential"}
    tuned, avg, local = (
        ft.simulate(method, PROBLEM.net, PROBLEM.fed, evaluate_every=1, **settings)
        for method in (FedAvgFT(), FedAvg(), Local())
    )
    assert same(tuned.server, avg.server)
    assert alike(models(tuned, "trained")[1:2], models(avg, "trained")[1:2])
    received = models(tuned, "received")
    for others in (models(avg, "received"), models(local, "received"), models(tuned, "trained")):
        assert not any(same(one, other, 1e-4) for one, other in zip(received, others, strict=True))


def test_fedavgft_refuses_fewer_than_no_epochs() -> None:
    assert "tuning_epochs must be at least 0" in refusal(lambda: FedAvgFT(tuning_epochs=-1))


# FedADMM


@pytest.mark.parametrize("variant", ["paper", "code"])
@pytest.mark.parametrize("step", [None, 0.7])
@pytest.mark.parametrize("start", ["received", "own"])
def test_fedadmm_by_hand(variant: Any, step: float | None, start: Any) -> None:
    rho, rounds, zero = 0.3, [[0, 1, 2, 3, 4], [1, 3, 4], [0, 1]], {n: 0 * w for n, w in PROBLEM.start.items()}
    run = PROBLEM.run(FedADMM(lr=0.1, rho=rho, server_lr=step, variant=variant, start=start), rounds)
    theta, own, y = PROBLEM.start, [PROBLEM.start for _ in range(5)], [zero for _ in range(5)]
    for t, clients in enumerate(rounds, start=1):
        changes = []
        for i in clients:
            y_i, sent = y[i], theta
            new = descend(
                PROBLEM,
                theta if start == "received" else own[i],
                t,
                i,
                2,
                lambda n, w, y_i=y_i, sent=sent: y_i[n] + rho * (w - sent[n]),
            )
            dual = {n: y[i][n] + rho * (new[n] - theta[n]) for n in theta}
            before = own[i] if variant == "paper" else theta
            changes.append({n: (new[n] - before[n]) + (dual[n] - y[i][n]) / rho for n in theta})
            own[i], y[i] = new, dual
        eta = len(clients) / 5 if step is None else step
        theta = {n: theta[n] + eta / len(clients) * sum(change[n] for change in changes) for n in theta}
    assert same(run.server["params"], theta, 1e-10)
    assert alike(models(run, "received"), [theta] * 5, 1e-10)
    assert alike(models(run, "trained"), own, 1e-10)
    assert alike([run.client(i)["dual"] for i in range(5)], y, 1e-10)


def test_fedadmm_keeps_the_common_model_the_mean_of_all() -> None:
    """With η = m/N, θ is the mean of w_i + y_i/ρ over all N clients, whoever took part."""
    run = PROBLEM.run(FedADMM(lr=0.1, rho=0.3), [*ROUNDS, [0], [2, 4], [1, 2, 3]])
    states = [run.client(i) for i in range(5)]
    mean = {n: sum(s["own"][n] + s["dual"][n] / 0.3 for s in states) / 5 for n in run.server["params"]}
    assert same(run.server["params"], mean, 1e-10)


def test_fedadmms_first_round_with_half_a_step_is_fedproxs() -> None:
    """There are no duals yet, and Δ_i is twice the change."""
    problem = make_problem((6, 6, 6))
    rounds = [[0, 1, 2]]
    prox = problem.run(FedProx(mu=0.4), rounds)
    for variant in ("paper", "code"):
        admm = problem.run(FedADMM(lr=0.1, rho=0.4, server_lr=0.5, variant=variant), rounds)
        assert same(admm.server, prox.server, 1e-12)
        assert alike(models(admm, "trained"), models(prox, "trained"), 1e-12)
        assert not same(problem.run(FedADMM(lr=0.1, rho=0.4, variant=variant), rounds).server, prox.server, 1e-3)


def test_every_client_of_fedadmm_has_a_dual_of_its_own() -> None:
    """y_i = ρ Σ (w_i − θ) over the rounds client i took part in; public code shares one among all."""
    run = PROBLEM.run(FedADMM(lr=0.1), [[0, 1]])
    away = [{n: 0.01 * (run.personal(i)[n] - PROBLEM.start[n]) for n in PROBLEM.start} for i in (0, 1)]
    assert alike([run.client(0)["dual"], run.client(1)["dual"]], away, 1e-12)
    assert not same(run.client(0)["dual"], run.client(1)["dual"], 1e-5)
    assert all(float(leaf.abs().max()) == 0 for leaf in run.client(2)["dual"].values())


def test_every_part_of_fedadmm_has_an_effect() -> None:
    methods = [
        FedADMM(lr=0.1),
        FedADMM(lr=0.1, rho=1.0),
        FedADMM(lr=0.1, server_lr=0.5),
        FedADMM(lr=0.1, variant="code"),
        FedAvg(),
        Local(),
    ]
    runs = [models(PROBLEM.run(method, ROUNDS), "received")[0] for method in methods]
    for position, one in enumerate(runs):
        assert not any(same(one, other, 1e-5) for other in runs[:position])


def test_fedadmm_does_not_run_away_when_few_take_part() -> None:
    """With η = 1 and changes since the last time, every step would count again and again: the default is m/N."""
    fed = tiny_federation((12,) * 10)
    rounds = [[t % 10, (t + 5) % 10] for t in range(30)]
    run = ft.simulate(
        FedADMM(lr=0.1), PROBLEM.net, fed, schedule=rounds, evaluate_every=30, dtype=torch.float64, engine="sequential"
    )
    assert run.records[-1]["loss_received"] < 1.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rho": 0.0}, "rho must be above 0"),
        ({"server_lr": 0}, "server_lr must"),
        ({"variant": "x"}, "variant must be"),
    ],
)
def test_senseless_fields_of_fedadmm_are_refused(fields: dict[str, Any], words: str) -> None:
    assert words in refusal(lambda: FedADMM(**fields))
