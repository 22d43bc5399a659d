"""Separate personal models: local training, Ditto, pFedMe, FedPHP, FedRoD, and lp-proj.

The literal version of pFedMe is compared in test_global_models.py.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import all_same, models, same, tiny_federation
from fedtailor.core import random
from fedtailor.methods import Ditto, FedAvg, FedPHP, FedRoD, Local, LpProj
from support.problem import Problem, Weights, average, features, head_outputs, make_problem, with_grad

SCHEDULE = [[0, 1, 2, 3, 4], [1, 2, 3], [0, 2]]  # all clients, then some, then one that was absent
ROUNDS = [[0, 1, 2, 3], [0, 2], [1, 2, 3], [3]]


def simulate(method: ft.Method, net: nn.Module, fed: ft.Federation | None = None, **more: Any) -> ft.Run:
    settings: dict[str, Any] = {"schedule": ROUNDS, "batch_size": 3, "dtype": torch.float64} | more
    return ft.simulate(method, net, fed or tiny_federation(), engine="sequential", **settings)


# helpers of the literal versions


def step(live: Weights, loss: Tensor, lr: float) -> Weights:
    """Take one step of gradient descent and retain the graph of the loss."""
    grads = torch.autograd.grad(loss, list(live.values()), retain_graph=True, allow_unused=True)
    return {
        name: (weight if grad is None else weight - lr * grad).detach()
        for (name, weight), grad in zip(live.items(), grads, strict=True)
    }


# local training, Ditto, and pFedMe


def test_ditto_and_local_training_equal_literal_algorithms() -> None:
    """The proximal term pulls v_i toward the global model of FedAvg, which does not depend on any v_i."""
    problem = make_problem()
    ditto, local, avg = (problem.run(method, SCHEDULE) for method in (Ditto(lam=0.7), Local(sampled=True), FedAvg()))
    theta, own, alone = problem.start, [problem.start] * 5, [problem.start] * 5
    for t, clients in enumerate(SCHEDULE, start=1):
        for i in clients:

            def loss(v: Weights, batch: Tensor, theta: Weights = theta) -> Tensor:
                distance = torch.stack([(v[name] - theta[name]).square().sum() for name in v]).sum()
                return problem.loss(v, batch) + 0.7 / 2 * distance

            own[i] = problem.sgd(own[i], t, i, loss=loss)
            alone[i] = problem.sgd(alone[i], t, i)
        trained = [problem.sgd(theta, t, i) for i in clients]
        theta = average(trained, [problem.sizes[i] for i in clients])
    assert same(ditto.server["params"], theta, 1e-10) and same(ditto.server, avg.server)
    assert all_same(models(ditto), own, 1e-10) and all_same(models(ditto, "received"), own, 1e-10)
    assert all_same(models(local), alone, 1e-10) and all_same(models(local, "received"), alone, 1e-10)


# FedPHP


PAST = [*SCHEDULE, [2], [2]]  # client 2 takes part more often than expected


def literal_fedphp(problem: Problem, method: FedPHP) -> tuple[Weights, list[Weights]]:
    """Return the global model and the personal models v_i of all clients after PAST."""
    theta = problem.start
    personal = [problem.start for _ in problem.sizes]
    count = [0] * problem.num_clients
    expected = max(sum(map(len, PAST)) // problem.num_clients, 1)  # ⌊(m/N)·T⌋, where m is the mean of |S|
    for t, clients in enumerate(PAST, start=1):
        uploads = []
        for i in clients:
            v = personal[i]

            def loss(w: Weights, batch: Tensor, v: Weights = v) -> Tensor:
                z, teacher = features(w, problem.fed.x[batch]), features(v, problem.fed.x[batch])
                outputs = head_outputs(w, z)
                if method.teaching == "mmd":
                    regularizer = literal_mmd(z, teacher)
                else:
                    target = torch.softmax(head_outputs(v, teacher) / 4, 1)
                    regularizer = -(target * torch.log_softmax(outputs, 1)).sum(1).mean()
                return (1 - method.lam) * F.cross_entropy(outputs, problem.fed.y[batch]) + method.lam * regularizer

            w = problem.sgd(theta, t, i, lr=method.lr, epochs=method.epochs, loss=loss)
            share = min(0.9 * count[i] / expected, 0.9)
            personal[i] = {name: share * v[name] + (1 - share) * w[name] for name in v}
            count[i] += 1
            uploads.append(w)
        theta = average(uploads, [problem.sizes[i] for i in clients])
    return theta, personal


def literal_mmd(x: Tensor, y: Tensor) -> Tensor:
    """Return mean(XX + YY − XY − YX) of five kernels over all pairs of the joint batch."""
    n, both = len(x), torch.cat([x, y])
    distances = torch.stack([torch.stack([(a - b).square().sum() for b in both]) for a in both])
    base = float(distances.detach().sum() / (4 * n * n - 2 * n))
    base = max(base, 0.01 * float(both.detach().square().sum(1).mean())) + 1e-8
    kernels = sum((torch.exp(-distances / (base * 2.0**k)) for k in (-2, -1, 0, 1, 2)), torch.tensor(0.0))
    return (kernels[:n, :n] + kernels[n:, n:] - kernels[:n, n:] - kernels[n:, :n]).mean()


@pytest.mark.parametrize("method", [FedPHP(lam=0.3, epochs=1), FedPHP(teaching="kd", lam=0.4)], ids=["mmd", "kd"])
def test_fedphp_equals_literal_version(method: FedPHP) -> None:
    problem = make_problem()
    theta, personal = literal_fedphp(problem, method)
    run = problem.run(method, PAST)
    assert same(run.server["params"], theta, 1e-10)
    assert all_same(models(run), personal, 1e-10) and all_same(models(run, "received"), personal, 1e-10)


def test_fedphp_with_single_example_stays_bounded(net: nn.Module) -> None:
    """A batch of one example has no spread; without a lower bound of the bandwidth, gradients would be unbounded."""
    run = simulate(FedPHP(), net, tiny_federation((1,)), schedule=[[0]] * 25, evaluate_every=25)
    largest = max(float(weight.abs().max()) for weight in run.personal(0).values())
    assert largest < 3 and run.records[-1]["loss"] < 0.2


# FedRoD


def literal_fedrod(problem: Problem, method: FedRoD) -> tuple[Weights, list[Weights], list[Weights]]:
    """Return the global model, the generic models as last trained, and the personal heads of all clients."""
    theta = problem.start
    trained = [problem.start for _ in problem.sizes]
    heads = [
        {name: torch.zeros_like(w) for name, w in theta.items() if name.startswith("head.")} for _ in problem.sizes
    ]
    for t, clients in enumerate(SCHEDULE, start=1):
        uploads = []
        for i in clients:
            w, own = dict(theta), heads[i]
            labels = problem.fed.y[problem.all_samples(i)].tolist()
            shares = [labels.count(c) ** method.gamma for c in range(3)]
            prior = torch.tensor(
                [share / sum(shares) for share in shares], dtype=torch.float64
            ).log()  # −∞ for absent classes
            for e in range(method.epochs):
                for batch in problem.batches(t, i, e):
                    y, live, own_live = problem.fed.y[batch], with_grad(w), with_grad(own)
                    z = features(live, problem.fed.x[batch])
                    generic = head_outputs(live, z)
                    w = step(live, F.cross_entropy(generic + prior, y), method.lr)
                    combined = generic.detach() + head_outputs(own_live, z.detach())
                    own = step(own_live, F.cross_entropy(combined, y), method.lr)
            trained[i], heads[i] = w, own
            uploads.append(w)
        theta = average(uploads, [problem.sizes[i] for i in clients])
    return theta, trained, heads


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_fedrod_equals_literal_version(gamma: float) -> None:
    problem, method = make_problem(), FedRoD(gamma=gamma)
    theta, trained, heads = literal_fedrod(problem, method)
    run = problem.run(method, SCHEDULE)
    assert same(run.server["params"], theta, 1e-10)
    own = [{"own_head": head} for head in heads]
    assert all_same(models(run), [w | head for w, head in zip(trained, own, strict=True)], 1e-10)
    assert all_same(models(run, "received"), [theta | head for head in own], 1e-10)


def test_fedrod_logits_are_sum_of_both_heads() -> None:
    problem, method = make_problem(), FedRoD()
    run, x = problem.run(method, SCHEDULE), problem.fed.x[:4]
    theta, own = run.server["params"], run.client(2)["head"]
    z = features(theta, x)
    outputs = method.logits(ft.wrap(problem.net), theta | {"own_head": own}, x)
    assert torch.allclose(outputs, head_outputs(theta, z) + head_outputs(own, z), atol=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.0])
def test_fedrod_with_absent_class_stays_finite(net: nn.Module, gamma: float) -> None:
    x, y = np.random.default_rng(0).normal(size=(6, 4)), np.zeros(6, dtype=int)
    test_x, test_y = np.random.default_rng(1).normal(size=(3, 4)), np.arange(3)
    fed = ft.Federation.from_arrays([(x, y, test_x, test_y), (x, y + 1, test_x, test_y)], classes=3)
    run = simulate(FedRoD(gamma=gamma), net, fed, schedule=[[0, 1]] * 5, dtype=torch.float32)
    assert np.isfinite(run.records[-1]["loss"]) and run.records[-1]["loss_trained"] < 100
    assert all(bool(leaf.isfinite().all()) for leaf in run.personal(0).values())


# lp-proj


def literal_projection(problem: Problem, dimension: int) -> Tensor:
    """Return P, [dimension, weights]: standard normal entries from the shared random numbers, rows of length 1."""
    columns = []
    for salt, weight in enumerate(problem.start.values()):
        key = random.make_key(problem.seed, 3, salt)
        uniform = random.uniform(key, (dimension, weight.numel()), torch.float64, weight.device)
        columns.append(2**0.5 * torch.erfinv(2 * uniform - 1))
    normal = torch.cat(columns, 1)
    return torch.stack([row / row.square().sum().sqrt() for row in normal])


@dataclass
class LpOutcome:
    """Server and client states of the literal lp-proj."""

    anchor: Tensor
    own: list[Weights]
    anchors: list[Tensor] = field(default_factory=list)  # after each round


def literal_lp_proj(problem: Problem, method: LpProj) -> LpOutcome:
    P = literal_projection(problem, method.dimension)
    now = LpOutcome(torch.zeros(method.dimension, dtype=torch.float64), [problem.start for _ in problem.sizes])

    def psi(x: Tensor) -> Tensor:
        """Return the gradient of the norm, entry by entry."""
        if method.p == 2:
            return x
        norm = sum(abs(float(entry)) ** method.p for entry in x) ** (1 / method.p)
        entries = [np.sign(float(entry)) * (abs(float(entry)) / norm) ** (method.p - 1) for entry in x]
        return torch.tensor(entries, dtype=torch.float64)

    for t, clients in enumerate(SCHEDULE, start=1):
        uploads = []
        for i in clients:
            names, w = list(now.own[i]), now.anchor.clone()
            theta = torch.cat([now.own[i][name].flatten() for name in names])
            batches = problem.stream(t, i)
            for _ in range(method.repeats):
                for _ in range(method.steps):
                    grad = problem.gradient(unflatten(problem, theta), next(batches))
                    flat = torch.cat([grad[name].flatten() for name in names])
                    theta = theta - method.lr * (flat + method.lam * P.T @ psi(P @ theta - w))
                w = w - method.anchor_lr * method.lam * psi(w - P @ theta)
            now.own[i] = unflatten(problem, theta)
            uploads.append(w)
        now.anchor = (1 - method.beta) * now.anchor + method.beta * sum(uploads) / len(uploads)
        now.anchors.append(now.anchor)
    return now


def unflatten(problem: Problem, theta: Tensor) -> Weights:
    parts = torch.split(theta, [weight.numel() for weight in problem.start.values()])
    return {name: part.reshape(w.shape) for (name, w), part in zip(problem.start.items(), parts, strict=True)}


@pytest.mark.parametrize("p", [1.0, 2.0, 1.5, 3.0])
def test_lp_proj_equals_literal_version(p: float) -> None:
    problem = make_problem()
    method = LpProj(p=p, lam=0.7, dimension=6, lr=0.1, anchor_lr=0.3, steps=3, repeats=2, beta=0.6)
    found, run = literal_lp_proj(problem, method), problem.run(method, SCHEDULE)
    assert same(run.server, {"anchor": found.anchor}, 1e-10)
    assert all_same(models(run), found.own, 1e-10) and all_same(models(run, "received"), found.own, 1e-10)


# two batches per epoch


def test_lp_proj_penalty_gradient_equals_gradient_of_norm() -> None:
    """ψ is the gradient of ‖x‖_p and does not depend on the scale of x."""
    x = torch.tensor([0.3, -2.0, 0.0, 5.0], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(torch.linalg.vector_norm(x, 3.0), x)
    for size in (1.0, 100.0):
        assert torch.allclose(LpProj(p=3.0)._psi(size * x.detach()), grad, atol=1e-12)
    for p in (1.0, 2.0, 4.0):  # at zero, the gradient is zero
        assert torch.equal(LpProj(p=p, lam=0.5)._psi(torch.zeros(3)), torch.zeros(3))
