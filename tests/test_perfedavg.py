"""PerFedAvg: rounds by hand, its limits, and what public code gets wrong."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from conftest import refusal, same
from fedtailor.methods import FedAvg, Local, PerFedAvg
from problem import Problem, Weights, make_problem

PROBLEM = make_problem()
ROUNDS = [[0, 1, 2, 3, 4], [1, 3, 4]]
ALPHA, BETA = 0.2, 0.1


def moved(w: Weights, direction: Weights, step: float) -> Weights:
    return {n: w[n] + step * direction[n] for n in w}


def deal(batch: Tensor, hands: int) -> list[Tensor]:
    """Examples in turn; who gets none has the whole batch."""
    dealt = [batch[hand::hands] for hand in range(hands)]
    return [own if len(own) else batch for own in dealt]


def adapted(problem: Problem, w: Weights, t: int, i: int, steps: int = 1) -> Weights:
    stream = problem.stream(t, i)
    for _ in range(steps):
        w = moved(w, problem.gradient(w, next(stream)), -ALPHA)
    return w


def first_order(problem: Problem, w: Weights, batch: Tensor) -> Weights:
    b, b_other = deal(batch, 2)
    return problem.gradient(moved(w, problem.gradient(w, b), -ALPHA), b_other)


def hessian_free(problem: Problem, w: Weights, batch: Tensor, delta: float) -> Weights:
    b, b_other, b_hessian = deal(batch, 3)
    g = problem.gradient(moved(w, problem.gradient(w, b), -ALPHA), b_other)
    ahead = problem.gradient(moved(w, g, delta), b_hessian)
    behind = problem.gradient(moved(w, g, -delta), b_hessian)
    return {n: g[n] - ALPHA * (ahead[n] - behind[n]) / (2 * delta) for n in w}


@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("hessian", ["none", "difference"])
def test_perfedavg_by_hand(hessian: Any, weights: Any) -> None:
    fields: dict[str, Any] = {"lr": BETA, "inner_lr": ALPHA, "epochs": 2, "adapt_steps": 3, "delta": 0.01}
    run = PROBLEM.run(PerFedAvg(hessian=hessian, weights=weights, **fields), ROUNDS)
    w, last = PROBLEM.start, {}
    for t, clients in enumerate(ROUNDS, start=1):
        ends: dict[int, Weights] = {}
        for i in clients:
            own = dict(w)
            for e in range(2):
                for batch in PROBLEM.batches(t, i, e):
                    none = hessian == "none"
                    slope = first_order(PROBLEM, own, batch) if none else hessian_free(PROBLEM, own, batch, 0.01)
                    own = moved(own, slope, -BETA)
            ends[i] = own
            last[i] = adapted(PROBLEM, own, t, i, steps=3)
        counts = {i: 1 if weights == "uniform" else PROBLEM.sizes[i] for i in clients}
        total = sum(counts.values())
        w = {n: torch.stack([counts[i] / total * ends[i][n] for i in clients]).sum(0) for n in w}
    assert same(run.server["params"], w, 1e-10)
    for i in range(5):
        assert same(run.personal(i, "received"), adapted(PROBLEM, w, 3, i, steps=3), 1e-10)
        assert same(run.personal(i, "trained"), last[i], 1e-10)


def test_the_difference_is_the_slope_after_adaptation() -> None:
    """A client of one sample has D = D′ = D″: then the step is along the exact slope of f(w − α ∇f(w))."""
    problem = make_problem((1,), batch_size=1)
    run = problem.run(PerFedAvg(lr=BETA, inner_lr=ALPHA, epochs=1, hessian="difference", delta=1e-4), [[0]])
    live = {n: w.requires_grad_() for n, w in problem.start.items()}
    sample = problem.everything(0)
    inner = torch.autograd.grad(problem.loss(live, sample), list(live.values()), create_graph=True)
    ahead = {n: w - ALPHA * g for (n, w), g in zip(live.items(), inner, strict=True)}
    exact = torch.autograd.grad(problem.loss(ahead, sample), list(live.values()))
    wanted = {n: w.detach() - BETA * g for (n, w), g in zip(live.items(), exact, strict=True)}
    assert same(run.server["params"], wanted, 1e-8)
    first = problem.run(PerFedAvg(lr=BETA, inner_lr=ALPHA, epochs=1), [[0]])
    assert not same(first.server["params"], wanted, 1e-4)  # without the Hessian it is another slope


@pytest.mark.parametrize("hessian", ["none", "difference"])
def test_without_adaptation_it_is_fedavg(hessian: Any) -> None:
    """α = 0, batches of one sample: nothing is dealt out, and nothing is left but FedAvg with uniform weights."""
    problem = make_problem((5, 2, 1), batch_size=1)
    rounds = [[0, 1, 2], [0, 2]]
    meta = problem.run(PerFedAvg(inner_lr=0.0, hessian=hessian), rounds)
    avg = problem.run(FedAvg(weights="uniform"), rounds)
    assert same(meta.server, avg.server, 1e-12)
    assert same(meta.personal(1, "received"), avg.personal(1, "received"), 1e-12)


def test_every_part_has_an_effect() -> None:
    base: dict[str, Any] = {"inner_lr": ALPHA}
    methods = [
        PerFedAvg(**base), PerFedAvg(inner_lr=0.0), PerFedAvg(**base, hessian="difference"),
        PerFedAvg(**base, adapt_steps=2), PerFedAvg(**base, weights="size"),
        FedAvg(), FedAvg(weights="uniform"), Local(),
    ]  # fmt: skip
    runs = [PROBLEM.run(method, ROUNDS[1:]).personal(0, "received") for method in methods]
    for position, one in enumerate(runs):
        assert not any(same(one, other, 1e-5) for other in runs[:position])


def test_the_paper_s_rate_of_adaptation_is_not_nothing() -> None:
    run, none = (PROBLEM.run(method, ROUNDS) for method in (PerFedAvg(), PerFedAvg(inner_lr=0.0)))
    assert not same(run.server, none.server, 1e-5)


def test_adaptation_sees_no_test_data_and_leaves_the_server_as_it_was() -> None:
    """Public code adapts on batches of the test set."""
    held = torch.cat(list(PROBLEM.fed.test))
    other = make_problem()
    other.fed.x[held] = 9.0
    assert same(
        PROBLEM.run(PerFedAvg(), ROUNDS).personal(0, "received"), other.run(PerFedAvg(), ROUNDS).personal(0, "received")
    )
    settings: dict[str, Any] = {"schedule": ROUNDS, "batch_size": 3, "dtype": torch.float64, "engine": "sequential"}
    often, once = (
        ft.simulate(PerFedAvg(), PROBLEM.net, PROBLEM.fed, evaluate_every=every, **settings) for every in (1, 2)
    )
    assert same(often.server, once.server)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"inner_lr": -0.1}, "inner_lr must be at least 0"), ({"adapt_steps": 0}, "adapt_steps must be at least 1"),
        ({"hessian": "exact"}, "hessian must be"), ({"delta": 0.0}, "delta must be above 0"),
        ({"weights": "x"}, "weights must be"),
    ],
)  # fmt: skip
def test_senseless_fields_are_refused(fields: dict[str, Any], words: str) -> None:
    assert words in refusal(lambda: PerFedAvg(**fields))
