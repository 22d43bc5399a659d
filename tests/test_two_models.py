"""Methods with an own model beside the common one: rounds by hand, limits, and that every mechanism counts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import pi
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import refusal, same, tiny_federation
from fedtailor import hashing
from fedtailor.methods import Ditto, FedAvg, FedPHP, FedRoD, Local, LpProj
from fedtailor.trees import Tree, add, mean, scale, stack, zeros_like
from problem import Problem, Weights, average, make_problem

SCHEDULE = [[0, 1, 2, 3, 4], [1, 2, 3], [0, 2]]  # everyone; then some, and one who was away
ROUNDS = [[0, 1, 2, 3], [0, 2], [1, 2, 3], [3]]


def go(method: ft.Method, net: nn.Module, fed: ft.Federation | None = None, **more: Any) -> ft.Run:
    settings: dict[str, Any] = {"schedule": ROUNDS, "batch_size": 3, "dtype": torch.float64} | more
    return ft.simulate(method, net, fed or tiny_federation(), engine="sequential", **settings)


def models(run: ft.Run, moment: str = "trained") -> list[dict[str, Any]]:
    return [run.personal(client, moment) for client in range(run.num_clients)]


def equal(a: Sequence[Tree], b: Sequence[Tree], tolerance: float = 1e-12) -> bool:
    return all(same(x, y, tolerance) for x, y in zip(a, b, strict=True))


# what literal versions are written with: plain autograd on the network of `problem.py`


def features_of(problem: Problem, weights: Weights, samples: Tensor) -> Tensor:
    hidden = torch.tanh(F.linear(problem.fed.x[samples], weights["fc1.weight"], weights["fc1.bias"]))
    return torch.tanh(F.linear(hidden, weights["fc2.weight"], weights["fc2.bias"]))


def answers_of(head: Weights, features: Tensor) -> Tensor:
    return F.linear(features, head["head.weight"], head["head.bias"])


def alive(weights: Weights) -> Weights:
    return {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}


def step(live: Weights, loss: Tensor, lr: float) -> Weights:
    """One step of gradient descent; the graph of the loss is kept."""
    slopes = torch.autograd.grad(loss, list(live.values()), retain_graph=True, allow_unused=True)
    return {
        name: (weight if slope is None else weight - lr * slope).detach()
        for (name, weight), slope in zip(live.items(), slopes, strict=True)
    }


# FedPHP


def literal_fedphp(problem: Problem, method: FedPHP) -> tuple[Weights, list[Weights]]:
    """The common model and everyone's history v_i after the rounds of SCHEDULE."""
    theta = problem.start
    history = [problem.start for _ in problem.sizes]
    count = [0] * problem.num_clients
    expected = max(sum(map(len, SCHEDULE)) // problem.num_clients, 1)  # ⌊(m/N)·T⌋, m the mean of |S|
    for t, clients in enumerate(SCHEDULE, start=1):
        uploads = []
        for i in clients:
            w, v = dict(theta), history[i]
            for e in range(method.epochs):
                for batch in problem.batches(t, i, e):
                    live = alive(w)
                    z, taught = features_of(problem, live, batch), features_of(problem, v, batch)
                    answers = answers_of(live, z)
                    if method.teaching == "mmd":
                        regularizer = literal_mmd(z, taught)
                    else:
                        target = torch.softmax(answers_of(v, taught) / 4, 1)
                        regularizer = -(target * torch.log_softmax(answers, 1)).sum(1).mean()
                    loss = (1 - method.lam) * F.cross_entropy(answers, problem.fed.y[batch]) + method.lam * regularizer
                    w = step(live, loss, method.lr)
            share = min(0.9 * count[i] / expected, 0.9)
            history[i] = {name: share * v[name] + (1 - share) * w[name] for name in v}
            count[i] += 1
            uploads.append(w)
        theta = average(uploads, [problem.sizes[i] for i in clients])
    return theta, history


def literal_mmd(x: Tensor, y: Tensor) -> Tensor:
    """mean(XX + YY − XY − YX) of five kernels over the joint batch, pair by pair."""
    n, both = len(x), torch.cat([x, y])
    distances = torch.stack([torch.stack([(a - b).square().sum() for b in both]) for a in both])
    base = float(distances.detach().sum() / (4 * n * n - 2 * n))
    base = max(base, 0.01 * float(both.detach().square().sum(1).mean())) + 1e-8
    kernels = sum((torch.exp(-distances / (base * 2.0**k)) for k in (-2, -1, 0, 1, 2)), torch.tensor(0.0))
    return (kernels[:n, :n] + kernels[n:, n:] - kernels[:n, n:] - kernels[n:, :n]).mean()


@pytest.mark.parametrize("method", [FedPHP(lam=0.3, epochs=1), FedPHP(teaching="kd", lam=0.4)], ids=["mmd", "kd"])
def test_fedphp_by_hand(method: FedPHP) -> None:
    problem = make_problem()
    theta, history = literal_fedphp(problem, method)
    run = problem.run(method, SCHEDULE)
    assert same(run.server["params"], theta, 1e-10)
    assert equal(models(run), history, 1e-10) and equal(models(run, "received"), history, 1e-10)


def test_fedphp_without_teaching_averages_as_fedavg(net: nn.Module) -> None:
    assert same(go(FedPHP(lam=0.0), net).server["params"], go(FedAvg(), net).server["params"], 1e-12)


def test_fedphp_without_teaching_and_past_keeps_the_model_fedavg_trained(net: nn.Module) -> None:
    assert equal(models(go(FedPHP(lam=0.0, mu=0.0), net)), models(go(FedAvg(), net)))


def test_fedphp_begins_as_its_own_teacher(net: nn.Module) -> None:
    """At w = v the features do not differ: the first step is that of the loss, of which 1 − λ is left."""
    fed, first = tiny_federation((3, 3)), [[0, 1]]
    php, avg = FedPHP(lam=0.3, lr=0.1, epochs=1), FedAvg(lr=0.07, epochs=1)
    assert equal(models(go(php, net, fed, schedule=first)), models(go(avg, net, fed, schedule=first)))


def test_the_past_counts_by_rounds_taken_not_by_the_rounds_number(net: nn.Module) -> None:
    """Who comes late for the first time has no past; who came twice has."""
    plan: dict[str, Any] = {"schedule": [[0, 1], [0, 1], [0, 1, 2]]}
    past, none = models(go(FedPHP(), net, **plan)), models(go(FedPHP(mu=0.0), net, **plan))
    assert not same(past[0], none[0], 1e-6)
    late, fresh = (go(FedPHP(lam=0.0, mu=mu), net, **plan).personal(2) for mu in (0.9, 0.0))
    assert same(late, fresh)


def test_the_past_is_capped(net: nn.Module) -> None:
    """Less than one round is expected; a client that comes every time keeps a tenth for the new model."""
    plan: dict[str, Any] = {"schedule": [[0]] * 3, "batch_size": 9}
    run, before = (go(FedPHP(lam=0.0, lr=0.1), net, schedule=[[0]] * rounds, batch_size=9) for rounds in (3, 2))
    trained = go(FedAvg(lr=0.1), net, **plan).personal(0)
    assert same(run.personal(0), add(scale(before.personal(0), 0.9), scale(trained, 0.1)), 1e-12)


@pytest.mark.parametrize("other", [{"lam": 0.0}, {"mu": 0.0}, {"teaching": "kd"}, {"lam": 0.5}])
def test_every_part_of_fedphp_counts(net: nn.Module, other: dict[str, Any]) -> None:
    assert not equal(models(go(FedPHP(), net)), models(go(replace(FedPHP(), **other), net)), 1e-6)


def test_a_lone_example_is_not_thrown_about_by_its_teacher(net: nn.Module) -> None:
    """A batch of one has no spread: kernels as narrow as its distance to the teacher would pull without bound."""
    run = go(FedPHP(), net, tiny_federation((1,)), schedule=[[0]] * 25, evaluate_every=25)
    largest = max(float(weight.abs().max()) for weight in run.personal(0).values())
    assert largest < 3 and run.records[-1]["loss"] < 0.2


# FedRoD


def literal_fedrod(problem: Problem, method: FedRoD) -> tuple[Weights, list[Weights], list[Weights]]:
    """The common model, everyone's generic model as it last trained, everyone's own head."""
    theta = problem.start
    trained = [problem.start for _ in problem.sizes]
    heads = [
        {name: torch.zeros_like(w) for name, w in theta.items() if name.startswith("head.")} for _ in problem.sizes
    ]
    for t, clients in enumerate(SCHEDULE, start=1):
        uploads = []
        for i in clients:
            w, own = dict(theta), heads[i]
            labels = problem.fed.y[problem.everything(i)].tolist()
            shares = [labels.count(c) ** method.gamma for c in range(3)]
            prior = torch.tensor([share / sum(shares) for share in shares], dtype=torch.float64).log()  # −∞ is fine
            for e in range(method.epochs):
                for batch in problem.batches(t, i, e):
                    y, live, own_live = problem.fed.y[batch], alive(w), alive(own)
                    z = features_of(problem, live, batch)
                    generic = answers_of(live, z)
                    w = step(live, F.cross_entropy(generic + prior, y), method.lr)
                    together = generic.detach() + answers_of(own_live, z.detach())
                    own = step(own_live, F.cross_entropy(together, y), method.lr)
            trained[i], heads[i] = w, own
            uploads.append(w)
        theta = average(uploads, [problem.sizes[i] for i in clients])
    return theta, trained, heads


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_fedrod_by_hand(gamma: float) -> None:
    problem, method = make_problem(), FedRoD(gamma=gamma)
    theta, trained, heads = literal_fedrod(problem, method)
    run = problem.run(method, SCHEDULE)
    assert same(run.server["params"], theta, 1e-10)
    own = [{"own_head": head} for head in heads]
    assert equal(models(run), [w | head for w, head in zip(trained, own, strict=True)], 1e-10)
    assert equal(models(run, "received"), [theta | head for head in own], 1e-10)


def test_fedrod_answers_by_the_sum_of_both_heads() -> None:
    problem, method = make_problem(), FedRoD()
    run, x = problem.run(method, SCHEDULE), problem.fed.x[:4]
    theta, own = run.server["params"], run.client(2)["head"]
    z = features_of(problem, theta, torch.arange(4))
    answers = method.logits(ft.wrap(problem.net), theta | {"own_head": own}, x)
    assert torch.allclose(answers, answers_of(theta, z) + answers_of(own, z), atol=1e-12)


def test_the_common_model_of_fedrod_without_balance_is_fedavgs(net: nn.Module) -> None:
    assert same(go(FedRoD(gamma=0.0), net).server["params"], go(FedAvg(), net).server["params"], 1e-12)


def test_fedrod_has_nothing_to_balance_where_classes_are_balanced(net: nn.Module) -> None:
    random = np.random.default_rng(0)

    def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
        return random.normal(size=(3 * count, 4)), np.tile(np.arange(3), count)

    fed = ft.Federation.from_arrays([(*samples(size), *samples(1)) for size in (4, 1, 2)], classes=3)
    rod, avg = (go(method, net, fed, schedule=[[0, 1, 2], [0, 2]]) for method in (FedRoD(), FedAvg()))
    assert same(rod.server["params"], avg.server["params"], 1e-12)


@dataclass(frozen=True)
class _StrangeHead(FedRoD):
    """Starts with an own head of ones."""

    def init_client(self, setup: ft.Setup) -> Tree:
        return {"head": {name: torch.ones_like(leaf) for name, leaf in super().init_client(setup)["head"].items()}}


def test_the_own_head_of_fedrod_teaches_nobody_else(net: nn.Module) -> None:
    """No gradient of its loss reaches the common model, whatever the own head is."""
    usual, strange = go(FedRoD(), net), go(_StrangeHead(), net)
    assert same(usual.server, strange.server) and not same(usual.client(0), strange.client(0), 1e-3)


def test_fedrod_begins_with_the_generic_answers(net: nn.Module) -> None:
    """An own head that copied the generic one would double all answers."""
    run = go(FedRoD(), net, schedule=[[0]])
    assert all(float(leaf.abs().max()) == 0 for leaf in run.client(1)["head"].values())


def test_a_class_without_samples_leaves_everything_finite(net: nn.Module) -> None:
    x, y = np.random.default_rng(0).normal(size=(6, 4)), np.zeros(6, dtype=int)
    test_x, test_y = np.random.default_rng(1).normal(size=(3, 4)), np.arange(3)
    fed = ft.Federation.from_arrays([(x, y, test_x, test_y), (x, y + 1, test_x, test_y)], classes=3)
    run = go(FedRoD(), net, fed, schedule=[[0, 1]] * 5, dtype=torch.float32)
    assert np.isfinite(run.records[-1]["loss"]) and run.records[-1]["loss_trained"] < 100
    assert all(bool(leaf.isfinite().all()) for leaf in run.personal(0).values())


def test_every_part_of_fedrod_counts(net: nn.Module) -> None:
    run, plain = go(FedRoD(), net), go(FedRoD(gamma=0.0), net)
    assert not same(run.server, plain.server, 1e-4)
    assert all(float(run.client(i)["head"]["head.weight"].abs().max()) > 1e-3 for i in range(4))


# LpProj


def literal_projection(problem: Problem, dimension: int) -> Tensor:
    """P [dimension, weights]: standard normal numbers from the library's common uniform ones, rows of length 1."""
    columns = []
    for salt, weight in enumerate(problem.start.values()):
        key = hashing.key(problem.seed, 3, salt)
        uniform = hashing.uniform(key, (dimension, weight.numel()), torch.float64, weight.device)
        columns.append(2**0.5 * torch.erfinv(2 * uniform - 1))
    normal = torch.cat(columns, 1)
    return torch.stack([row / row.square().sum().sqrt() for row in normal])


@dataclass
class LpOutcome:
    anchor: Tensor
    own: list[Weights]
    anchors: list[Tensor] = field(default_factory=list)  # after every round


def literal_lp_proj(problem: Problem, method: LpProj) -> LpOutcome:
    P = literal_projection(problem, method.dimension)
    now = LpOutcome(torch.zeros(method.dimension, dtype=torch.float64), [problem.start for _ in problem.sizes])

    def psi(x: Tensor) -> Tensor:
        """By hand, entry by entry."""
        if method.p == 2:
            return x
        norm = sum(abs(float(entry)) ** method.p for entry in x) ** (1 / method.p)
        slopes = [np.sign(float(entry)) * (abs(float(entry)) / norm) ** (method.p - 1) for entry in x]
        return torch.tensor(slopes, dtype=torch.float64)

    for t, clients in enumerate(SCHEDULE, start=1):
        uploads = []
        for i in clients:
            names, w = list(now.own[i]), now.anchor.clone()
            theta = torch.cat([now.own[i][name].flatten() for name in names])
            batches = problem.stream(t, i)
            for _ in range(method.repeats):
                for _ in range(method.steps):
                    slope = problem.gradient(unflat(problem, theta), next(batches))
                    flat = torch.cat([slope[name].flatten() for name in names])
                    theta = theta - method.lr * (flat + method.lam * P.T @ psi(P @ theta - w))
                w = w - method.anchor_lr * method.lam * psi(w - P @ theta)
            now.own[i] = unflat(problem, theta)
            uploads.append(w)
        now.anchor = (1 - method.beta) * now.anchor + method.beta * sum(uploads) / len(uploads)
        now.anchors.append(now.anchor)
    return now


def unflat(problem: Problem, theta: Tensor) -> Weights:
    parts = torch.split(theta, [weight.numel() for weight in problem.start.values()])
    return {name: part.reshape(w.shape) for (name, w), part in zip(problem.start.items(), parts, strict=True)}


@pytest.mark.parametrize("p", [1.0, 2.0, 1.5, 3.0])
def test_lp_proj_by_hand(p: float) -> None:
    problem = make_problem()
    method = LpProj(p=p, lam=0.7, dimension=6, lr=0.1, anchor_lr=0.3, steps=3, repeats=2, beta=0.6)
    found, run = literal_lp_proj(problem, method), problem.run(method, SCHEDULE)
    assert same(run.server, {"anchor": found.anchor}, 1e-10)
    assert equal(models(run), found.own, 1e-10) and equal(models(run, "received"), found.own, 1e-10)


def test_lp_proj_sends_and_keeps_no_projection(net: nn.Module) -> None:
    """As many numbers cross as P has rows, and a client keeps its own model alone."""
    run = go(LpProj(dimension=7), net, dtype=torch.float32, schedule=[[0, 1]])
    assert run.records[-1]["bytes_up"] == run.records[-1]["bytes_down"] == 2 * 7 * 4
    assert sum(leaf.numel() for leaf in run.client(0)["own"].values()) == sum(p.numel() for p in net.parameters())
    assert run.client(0).keys() == {"own"} and run.server.keys() == {"anchor"}


class _View:
    """As much of a client's view as P needs."""

    def __init__(self, model: ft.Model, seed: int) -> None:
        self.model, self.seed = model, seed

    def shared_uniform(self, shape: tuple[int, ...], salt: int) -> Tensor:
        return hashing.uniform(hashing.key(self.seed, 3, salt), shape, torch.float64, torch.device("cpu"))


def test_the_projection_is_normal_with_rows_of_length_one() -> None:
    wide = ft.wrap(nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 4)), head="1")
    method, own = LpProj(dimension=20), wide.init(0)
    rows, others = (
        torch.cat([leaf.flatten(1) for leaf in method._projection(_View(wide, seed), own).values()], 1)  # type: ignore[arg-type]
        for seed in (0, 1)
    )
    assert torch.allclose(rows.square().sum(1), torch.ones(20, dtype=torch.float64))
    entries = rows * rows.shape[1] ** 0.5  # standard normal again: E|x| = √(2/π), E x⁴ = 3
    assert float(entries.mean().abs()) < 0.02 and abs(float(entries.abs().mean()) - (2 / pi) ** 0.5) < 0.01
    assert abs(float(entries.pow(4).mean()) - 3) < 0.15
    off = rows @ rows.T - torch.eye(20, dtype=torch.float64)
    assert float(off.abs().max()) < 0.12  # nearly orthogonal: 1/√2204 = 0.02 by chance
    assert not torch.allclose(rows, others, atol=0.01)


@dataclass(frozen=True)
class _Identity(LpProj):
    """P leaves every weight as it is."""

    def _projection(self, local: ft.LocalView, own: Tree) -> Tree:
        ends = np.cumsum([0, *(leaf.numel() for leaf in own.values())])
        identity = torch.eye(int(ends[-1]), dtype=torch.float64)
        return {
            name: identity[:, ends[k] : ends[k + 1]].reshape(-1, *leaf.shape)
            for k, (name, leaf) in enumerate(own.items())
        }


@dataclass(frozen=True)
class _DittoOfOwn(Ditto):
    """Ditto's own models, pulled to the plain mean of all own models instead of a model trained beside them."""

    def init_server(self, setup: ft.Setup) -> Tree:
        return {"params": zeros_like(setup.params)}

    def train(self, local: ft.LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        state, _ = super().train(local, state, message)
        return state, {"params": state["own"]}

    def receive(self, server: Tree, exchange: ft.Exchange) -> Tree:
        return mean(exchange.received)


# two batches in every pass
EQUAL: dict[str, Any] = {"fed": tiny_federation((6, 6, 6)), "schedule": [[0, 1, 2], [0, 2], [1, 2]]}
ENTRIES = 43  # weights of the network `net`


def test_lp_proj_of_the_whole_model_is_a_ditto(net: nn.Module) -> None:
    """p = 2 and P = I; w_i lands on the own model (η_l λ = 1)."""
    method = _Identity(p=2.0, lam=0.5, anchor_lr=2.0, lr=0.1, dimension=ENTRIES, steps=4, repeats=1)
    run, ditto = go(method, net, **EQUAL), go(_DittoOfOwn(lam=0.5, lr=0.1, epochs=2), net, **EQUAL)
    assert equal(models(run), models(ditto))


def test_lp_proj_of_the_whole_model_to_nothing_is_weight_decay(net: nn.Module) -> None:
    """p = 2 and P = I; w stays where it begins, at 0."""
    method = _Identity(p=2.0, lam=0.3, anchor_lr=0.0, dimension=ENTRIES, steps=2, repeats=2, lr=0.1)
    assert equal(models(go(method, net, **EQUAL)), models(go(Local(epochs=2, weight_decay=0.3), net, **EQUAL)))


def test_lp_proj_without_pull_is_local(net: nn.Module) -> None:
    method = LpProj(lam=0.0, lr=0.1, steps=2, repeats=2)
    run = go(method, net, **EQUAL)
    assert equal(models(run), models(go(Local(lr=0.1, epochs=2), net, **EQUAL)))
    assert float(run.server["anchor"].abs().max()) == 0


@pytest.mark.parametrize("p", [1.0, 2.0, 4.0])
def test_a_model_that_is_where_it_is_pulled_is_not_pulled(p: float) -> None:
    assert torch.equal(LpProj(p=p, lam=0.5)._psi(torch.zeros(3)), torch.zeros(3))


def test_the_power_of_a_norm_is_normalised() -> None:
    """ψ is the gradient of ‖x‖_p, in both steps alike: its length in the dual norm is 1, however large x is."""
    x = torch.tensor([0.3, -2.0, 0.0, 5.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.linalg.vector_norm(x, 3.0), x)
    for size in (1.0, 100.0):
        assert torch.allclose(LpProj(p=3.0)._psi(size * x.detach()), slope, atol=1e-12)


def test_a_stronger_pull_brings_projections_closer() -> None:
    problem = make_problem()
    P = literal_projection(problem, 5)
    spreads = []
    for lam in (0.0, 0.3, 1.5):
        method = LpProj(p=2.0, lam=lam, anchor_lr=0.2, dimension=5, lr=0.1, steps=4, repeats=2)
        own = stack(models(problem.run(method, [[0, 1, 2, 3]] * 3))[:4])
        projected = torch.cat([own[name].flatten(1) for name in problem.start], 1) @ P.T
        spreads.append(float(projected.var(0).sum()))
    assert spreads[0] > 2 * spreads[1] > 2 * spreads[2]


@pytest.mark.parametrize(
    "other", [{"lam": 0.0}, {"p": 2.0}, {"p": 3.0}, {"dimension": 3}, {"anchor_lr": 0.0}, {"beta": 0.5}, {"repeats": 2}]
)
def test_every_part_of_lp_proj_counts(net: nn.Module, other: dict[str, Any]) -> None:
    short: dict[str, Any] = {"steps": 4, "repeats": 3, "lam": 0.2}
    assert not equal(models(go(LpProj(**short), net)), models(go(LpProj(**short | other), net)), 1e-6)


def test_they_are_themselves(net: nn.Module) -> None:
    """The weights that all of them have differ from FedAvg's and Local's, and from each other's."""
    methods = (FedAvg(), Local(), FedPHP(), FedRoD(), LpProj(steps=2, repeats=2, lam=0.2))
    found = [[{name: own[name] for name in net.state_dict()} for own in models(go(m, net))] for m in methods]
    for position, one in enumerate(found):
        assert not any(equal(one, other, 1e-4) for other in found[:position])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FedPHP(lam=1.0), "lam must be at least 0 and below 1"),
        (lambda: FedPHP(mu=1.0), "mu must be at least 0 and below 1"),
        (lambda: FedPHP(teaching="words"), "teaching must be 'mmd' or 'kd'"),  # type: ignore[arg-type]
        (lambda: FedRoD(gamma=-1.0), "gamma must be at least 0"),
        (lambda: LpProj(p=0.5), "p must be at least 1"),
        (lambda: LpProj(lam=-1.0), "lam must be at least 0"),
        (lambda: LpProj(p=2.0, lam=30.0), "lam must be below"),
        (lambda: LpProj(dimension=0), "dimension must be at least 1"),
        (lambda: LpProj(beta=0.0), "beta must be above 0"),
        (lambda: LpProj(repeats=0), "repeats must be at least 1"),
    ],
)
def test_senseless_fields_are_refused_in_words(make: Any, words: str) -> None:
    assert words in refusal(make)
