"""Per-FedAvg: literal algorithm, limiting cases, and differences from public code."""

from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import same
from fedtailor.methods import PerFedAvg
from support.problem import Problem, Weights, make_problem

PROBLEM = make_problem()
ROUNDS = [[0, 1, 2, 3, 4], [1, 3, 4]]
ALPHA, BETA = 0.2, 0.1


def add_scaled(w: Weights, direction: Weights, step: float) -> Weights:
    return {n: w[n] + step * direction[n] for n in w}


def split_round_robin(batch: Tensor, count: int) -> list[Tensor]:
    """Assign examples to parts in turn; a part without examples is replaced by the whole batch."""
    parts = [batch[position::count] for position in range(count)]
    return [part if len(part) else batch for part in parts]


def adapt(problem: Problem, w: Weights, t: int, i: int, steps: int = 1) -> Weights:
    stream = problem.stream(t, i)
    for _ in range(steps):
        w = add_scaled(w, problem.gradient(w, next(stream)), -ALPHA)
    return w


def first_order(problem: Problem, w: Weights, batch: Tensor) -> Weights:
    b, b_other = split_round_robin(batch, 2)
    return problem.gradient(add_scaled(w, problem.gradient(w, b), -ALPHA), b_other)


def hessian_free(problem: Problem, w: Weights, batch: Tensor, delta: float) -> Weights:
    b, b_other, b_hessian = split_round_robin(batch, 3)
    g = problem.gradient(add_scaled(w, problem.gradient(w, b), -ALPHA), b_other)
    forward = problem.gradient(add_scaled(w, g, delta), b_hessian)
    backward = problem.gradient(add_scaled(w, g, -delta), b_hessian)
    return {n: g[n] - ALPHA * (forward[n] - backward[n]) / (2 * delta) for n in w}


@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("hessian", ["none", "difference"])
def test_perfedavg_equals_literal_algorithm(hessian: Any, weights: Any) -> None:
    fields: dict[str, Any] = {"lr": BETA, "inner_lr": ALPHA, "epochs": 2, "adapt_steps": 3, "delta": 0.01}
    run = PROBLEM.run(PerFedAvg(hessian=hessian, weights=weights, **fields), ROUNDS)
    w, last = PROBLEM.start, {}
    for t, clients in enumerate(ROUNDS, start=1):
        ends: dict[int, Weights] = {}
        for i in clients:
            own = dict(w)
            for e in range(2):
                for batch in PROBLEM.batches(t, i, e):
                    use_first_order = hessian == "none"
                    grad = (
                        first_order(PROBLEM, own, batch) if use_first_order else hessian_free(PROBLEM, own, batch, 0.01)
                    )
                    own = add_scaled(own, grad, -BETA)
            ends[i] = own
            last[i] = adapt(PROBLEM, own, t, i, steps=3)
        counts = {i: 1 if weights == "uniform" else PROBLEM.sizes[i] for i in clients}
        total = sum(counts.values())
        w = {n: torch.stack([counts[i] / total * ends[i][n] for i in clients]).sum(0) for n in w}
    assert same(run.server["params"], w, 1e-10)
    for i in range(5):
        assert same(run.personal(i, "received"), adapt(PROBLEM, w, 3, i, steps=3), 1e-10)
        assert same(run.personal(i, "trained"), last[i], 1e-10)


def test_perfedavg_hessian_difference_approximates_exact_gradient() -> None:
    """For a client with one sample, D = D′ = D″, and the step follows the exact gradient of f(w − α ∇f(w))."""
    problem = make_problem((1,), batch_size=1)
    run = problem.run(PerFedAvg(lr=BETA, inner_lr=ALPHA, epochs=1, hessian="difference", delta=1e-4), [[0]])
    live = {n: w.requires_grad_() for n, w in problem.start.items()}
    sample = problem.all_samples(0)
    inner = torch.autograd.grad(problem.loss(live, sample), list(live.values()), create_graph=True)
    adapted = {n: w - ALPHA * g for (n, w), g in zip(live.items(), inner, strict=True)}
    exact = torch.autograd.grad(problem.loss(adapted, sample), list(live.values()))
    expected = {n: w.detach() - BETA * g for (n, w), g in zip(live.items(), exact, strict=True)}
    assert same(run.server["params"], expected, 1e-8)
    first = problem.run(PerFedAvg(lr=BETA, inner_lr=ALPHA, epochs=1), [[0]])
    assert not same(first.server["params"], expected, 1e-4)  # the gradient without the Hessian differs


def test_perfedavg_default_inner_lr_has_effect() -> None:
    run, none = (PROBLEM.run(method, ROUNDS) for method in (PerFedAvg(), PerFedAvg(inner_lr=0.0)))
    assert not same(run.server, none.server, 1e-5)
