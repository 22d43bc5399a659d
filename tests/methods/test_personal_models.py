"""Separate personal models: local training, Ditto, pFedMe, FedPHP, FedRoD, and lp-proj.

The literal version of pFedMe is compared in test_global_models.py.
"""

from dataclasses import dataclass, field
from math import pi
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import all_same, models, same, tiny_federation
from fedtailor.core import random
from fedtailor.core.trees import Tree, add, mean, scale, zeros_like
from fedtailor.methods import Ditto, FedAvg, FedPHP, FedRoD, Local, LpProj, PFedMe
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
    ditto, local, avg = (problem.run(method, SCHEDULE) for method in (Ditto(lam=0.7), Local(), FedAvg()))
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


def test_ditto_without_proximal_term_equals_local_training(net: nn.Module) -> None:
    assert all_same(models(simulate(Ditto(lam=0.0), net)), models(simulate(Local(), net)))


def test_ditto_with_strong_proximal_term_equals_fedavg_update(net: nn.Module) -> None:
    """With λ η = 1, one step leads to the received model minus η times its gradient."""
    fed = tiny_federation((3, 3))
    ditto, avg = Ditto(lam=10.0, lr=0.1, epochs=1), FedAvg(lr=0.1, epochs=1)
    one, other = (simulate(method, net, fed, schedule=[[0, 1]]) for method in (ditto, avg))
    assert all_same(models(one), models(other), 1e-12)  # in round 1, personal and received model are equal


def test_pfedme_with_one_inner_step_and_full_move_equals_fedavg() -> None:
    """With ηλ ≈ 1, w_i moves to θ̃, and the proximal term is 0 in the only step: SGD with learning rate η_p."""
    problem, schedule = make_problem((6, 4, 5)), [[0, 1, 2], [0, 2], [1, 2]]  # two batches per epoch for all clients
    me = problem.run(PFedMe(lr=0.25 - 1e-14, lam=4.0, personal_lr=0.1, inner_steps=1, steps=6), schedule)
    assert same(me.server["params"], problem.run(FedAvg(lr=0.1, epochs=3), schedule).server["params"], 1e-10)


def test_pfedme_with_infinite_lambda_keeps_initial_model(net: nn.Module) -> None:
    """For λ → ∞, θ̃_i → w_i; with ηλ below 1, no model changes."""
    distances = []
    for lam in (1e2, 1e4, 1e6):
        method = PFedMe(lam=lam, lr=0.5 / lam, personal_lr=0.5 / lam, steps=3)
        own = simulate(method, net, schedule=[[0]]).personal(0)
        distances.append(max(float((own[name] - start).abs().max()) for name, start in net.state_dict().items()))
    assert distances[0] > 10 * distances[1] > 100 * distances[2] > 0


# FedPHP


def literal_fedphp(problem: Problem, method: FedPHP) -> tuple[Weights, list[Weights]]:
    """Return the global model and the personal models v_i of all clients after SCHEDULE."""
    theta = problem.start
    personal = [problem.start for _ in problem.sizes]
    count = [0] * problem.num_clients
    expected = max(sum(map(len, SCHEDULE)) // problem.num_clients, 1)  # ⌊(m/N)·T⌋, where m is the mean of |S|
    for t, clients in enumerate(SCHEDULE, start=1):
        uploads = []
        for i in clients:
            w, v = dict(theta), personal[i]
            for e in range(method.epochs):
                for batch in problem.batches(t, i, e):
                    live = with_grad(w)
                    z, teacher = features(live, problem.fed.x[batch]), features(v, problem.fed.x[batch])
                    outputs = head_outputs(live, z)
                    if method.teaching == "mmd":
                        regularizer = literal_mmd(z, teacher)
                    else:
                        target = torch.softmax(head_outputs(v, teacher) / 4, 1)
                        regularizer = -(target * torch.log_softmax(outputs, 1)).sum(1).mean()
                    loss = (1 - method.lam) * F.cross_entropy(outputs, problem.fed.y[batch]) + method.lam * regularizer
                    w = step(live, loss, method.lr)
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
    run = problem.run(method, SCHEDULE)
    assert same(run.server["params"], theta, 1e-10)
    assert all_same(models(run), personal, 1e-10) and all_same(models(run, "received"), personal, 1e-10)


def test_fedphp_without_teacher_and_past_equals_fedavg(net: nn.Module) -> None:
    assert all_same(models(simulate(FedPHP(lam=0.0, mu=0.0), net)), models(simulate(FedAvg(), net)), 1e-12)


def test_fedphp_weight_of_past_depends_on_participations(net: nn.Module) -> None:
    """A client that takes part for the first time in a late round has no past; one that took part before has."""
    settings: dict[str, Any] = {"schedule": [[0, 1], [0, 1], [0, 1, 2]]}
    past, none = models(simulate(FedPHP(), net, **settings)), models(simulate(FedPHP(mu=0.0), net, **settings))
    assert not same(past[0], none[0], 1e-6)
    late, fresh = (simulate(FedPHP(lam=0.0, mu=mu), net, **settings).personal(2) for mu in (0.9, 0.0))
    assert same(late, fresh)


def test_fedphp_weight_of_past_is_at_most_mu(net: nn.Module) -> None:
    """A client with more rounds than expected gives the new model the weight 1 − μ = 0.1."""
    settings: dict[str, Any] = {"schedule": [[0]] * 3, "batch_size": 9}
    run, before = (simulate(FedPHP(lam=0.0, lr=0.1), net, schedule=[[0]] * rounds, batch_size=9) for rounds in (3, 2))
    trained = simulate(FedAvg(lr=0.1), net, **settings).personal(0)
    assert same(run.personal(0), add(scale(before.personal(0), 0.9), scale(trained, 0.1)), 1e-12)


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


def test_fedrod_with_balanced_classes_has_global_model_of_fedavg(net: nn.Module) -> None:
    random = np.random.default_rng(0)

    def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
        return random.normal(size=(3 * count, 4)), np.tile(np.arange(3), count)

    fed = ft.Federation.from_arrays([(*samples(size), *samples(1)) for size in (4, 1, 2)], classes=3)
    rod, avg = (simulate(method, net, fed, schedule=[[0, 1, 2], [0, 2]]) for method in (FedRoD(), FedAvg()))
    assert same(rod.server["params"], avg.server["params"], 1e-12)


def test_fedrod_personal_head_starts_at_zero(net: nn.Module) -> None:
    """A copy of the generic head would double all outputs."""
    run = simulate(FedRoD(), net, schedule=[[0]])
    assert all(float(leaf.abs().max()) == 0 for leaf in run.client(1)["head"].values())


def test_fedrod_with_absent_class_stays_finite(net: nn.Module) -> None:
    x, y = np.random.default_rng(0).normal(size=(6, 4)), np.zeros(6, dtype=int)
    test_x, test_y = np.random.default_rng(1).normal(size=(3, 4)), np.arange(3)
    fed = ft.Federation.from_arrays([(x, y, test_x, test_y), (x, y + 1, test_x, test_y)], classes=3)
    run = simulate(FedRoD(), net, fed, schedule=[[0, 1]] * 5, dtype=torch.float32)
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


class _ContextStub:
    """The part of a client context that P requires."""

    def __init__(self, model: ft.Model, seed: int) -> None:
        self.model, self.seed = model, seed

    def shared_uniform(self, shape: tuple[int, ...], salt: int) -> Tensor:
        return random.uniform(random.make_key(self.seed, 3, salt), shape, torch.float64, torch.device("cpu"))


def test_projection_is_normal_with_unit_rows() -> None:
    wide = ft.wrap(nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 4)), head="1")
    method, own = LpProj(dimension=20), wide.init(0)
    rows, others = (
        torch.cat([leaf.flatten(1) for leaf in method._projection(_ContextStub(wide, seed), own).values()], 1)  # type: ignore[arg-type]
        for seed in (0, 1)
    )
    assert torch.allclose(rows.square().sum(1), torch.ones(20, dtype=torch.float64))
    entries = rows * rows.shape[1] ** 0.5  # standard normal: E|x| = √(2/π), E x⁴ = 3
    assert float(entries.mean().abs()) < 0.02 and abs(float(entries.abs().mean()) - (2 / pi) ** 0.5) < 0.01
    assert abs(float(entries.pow(4).mean()) - 3) < 0.15
    off = rows @ rows.T - torch.eye(20, dtype=torch.float64)
    assert float(off.abs().max()) < 0.12  # nearly orthogonal: the expected value is 1/√2204 = 0.02
    assert not torch.allclose(rows, others, atol=0.01)


@dataclass(frozen=True)
class _IdentityProjection(LpProj):
    """lp-proj with the identity as P."""

    def _projection(self, ctx: ft.ClientContext, own: Tree) -> Tree:
        ends = np.cumsum([0, *(leaf.numel() for leaf in own.values())])
        identity = torch.eye(int(ends[-1]), dtype=torch.float64)
        return {
            name: identity[:, ends[k] : ends[k + 1]].reshape(-1, *leaf.shape)
            for k, (name, leaf) in enumerate(own.items())
        }


@dataclass(frozen=True)
class _DittoToMean(Ditto):
    """Ditto with a proximal term toward the plain mean of the personal models instead of the global model."""

    def init_server(self, setup: ft.Setup) -> Tree:
        return {"params": zeros_like(setup.params)}

    def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        state, _ = super().train(ctx, state, message)
        return state, {"params": state["own"]}

    def receive(self, server: Tree, exchange: ft.Exchange) -> Tree:
        return mean(exchange.received)


# two batches per epoch
EQUAL: dict[str, Any] = {"fed": tiny_federation((6, 6, 6)), "schedule": [[0, 1, 2], [0, 2], [1, 2]]}
ENTRIES = 43  # parameters of the network `net`


def test_lp_proj_with_identity_equals_ditto_to_mean(net: nn.Module) -> None:
    """p = 2, P = I, and η_l λ = 1, so that w_i equals the personal model."""
    method = _IdentityProjection(p=2.0, lam=0.5, anchor_lr=2.0, lr=0.1, dimension=ENTRIES, steps=4, repeats=1)
    run, ditto = simulate(method, net, **EQUAL), simulate(_DittoToMean(lam=0.5, lr=0.1, epochs=2), net, **EQUAL)
    assert all_same(models(run), models(ditto), 1e-12)


def test_lp_proj_without_penalty_equals_local_training(net: nn.Module) -> None:
    method = LpProj(lam=0.0, lr=0.1, steps=2, repeats=2)
    run = simulate(method, net, **EQUAL)
    assert all_same(models(run), models(simulate(Local(lr=0.1, epochs=2), net, **EQUAL)), 1e-12)
    assert float(run.server["anchor"].abs().max()) == 0


def test_lp_proj_penalty_gradient_equals_gradient_of_norm() -> None:
    """ψ is the gradient of ‖x‖_p and does not depend on the scale of x."""
    x = torch.tensor([0.3, -2.0, 0.0, 5.0], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(torch.linalg.vector_norm(x, 3.0), x)
    for size in (1.0, 100.0):
        assert torch.allclose(LpProj(p=3.0)._psi(size * x.detach()), grad, atol=1e-12)
    for p in (1.0, 2.0, 4.0):  # at zero, the gradient is zero
        assert torch.equal(LpProj(p=p, lam=0.5)._psi(torch.zeros(3)), torch.zeros(3))
