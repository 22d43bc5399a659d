"""FedAF: a literal implementation of the paper, limiting cases, and what must not be sent."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import same, tiny_federation
from fedtailor.core import random
from fedtailor.methods import FedAF, FedAvg
from support.problem import Problem, Weights, features, head_outputs, make_problem

PROBLEM = make_problem((9, 4, 7, 1))
ROUNDS = [[0, 1, 2, 3], [0, 3], [1, 2]]
QUICK: dict[str, Any] = {
    "per_class": 2, "steps": 2, "server_epochs": 2, "server_batch": 5, "projections": 4, "lr": 0.3, "gamma": 0.8,
    "tau": 1.5, "noise": 0.02, "local_weight": 0.6, "server_weight": 0.3,
}  # fmt: skip


def draw_uniform(problem: Problem, t: int, k: int, salt: int, shape: tuple[int, ...]) -> Tensor:
    """Draw the random numbers of a client in a round; like the order of batches, they are those of the library."""
    of = random.make_key(problem.seed, t, 2, torch.tensor(k), salt)
    return random.uniform(of, shape, torch.float64, torch.device("cpu"))


def draw_normal(problem: Problem, t: int, k: int, salt: int, shape: tuple[int, ...]) -> Tensor:
    """Draw standard normal random numbers."""
    return math.sqrt(2) * torch.erfinv(2 * draw_uniform(problem, t, k, salt, shape) - 1)


def model_logits(w: Weights, x: Tensor) -> Tensor:
    return head_outputs(w, features(w, x))


def sliced_distance(points: Tensor, center: Tensor, directions: Tensor) -> Tensor:
    """Return the mean over directions of the squared Wasserstein distance of order 2 in one dimension."""
    total = torch.zeros((), dtype=torch.float64)
    for direction in directions:
        ours, theirs = (points @ direction).sort().values, (center @ direction).expand(len(points)).sort().values
        total = total + (ours - theirs).square().mean()
    return total / len(directions)


@dataclass
class Literal:
    """FedAF written with loops over clients and classes."""

    problem: Problem
    method: FedAF
    w: Weights
    V: dict[int, Tensor]

    def client(self, t: int, k: int) -> tuple[dict[int, Tensor], dict[int, Tensor], dict[int, Tensor]]:
        m, problem, w_k = self.method, self.problem, {}
        inputs = {"fc1": 4, "fc2": 5, "head": 4}
        for salt, (name, weight) in enumerate(self.w.items(), start=2):
            bound = 1 / math.sqrt(inputs[name.split(".")[0]])
            fresh = -bound + 2 * bound * draw_uniform(problem, t, k, salt, tuple(weight.shape))
            w_k[name] = m.gamma * weight + (1 - m.gamma) * fresh
        order = torch.cat(problem.batches(t, k, 0))
        noise = m.noise * draw_normal(problem, t, k, 0, (3, m.per_class, 4))
        directions = draw_normal(problem, t, k, 1, (m.projections, 3))
        directions = directions / directions.norm(dim=1, keepdim=True)
        S, V_k, R_k = {}, {}, {}
        for c in sorted(set(problem.fed.y[order].tolist())):
            real = problem.fed.x[[int(i) for i in order if problem.fed.y[i] == c]]
            V_k[c] = model_logits(w_k, real).mean(0)
            R_k[c] = torch.softmax(V_k[c] / m.tau, 0)
            start = torch.stack([real[j % len(real)] for j in range(m.per_class)])
            S[c] = noise[c] + (start if m.start == "real" else 0)
            for _ in range(m.steps):
                live = S[c].clone().requires_grad_()
                loss = (features(w_k, real).mean(0) - features(w_k, live).mean(0)).square().sum()
                if c in self.V:
                    loss = loss + m.local_weight * sliced_distance(model_logits(w_k, live), self.V[c], directions)
                S[c] = S[c] - m.lr * torch.autograd.grad(loss, live)[0]
        return S, V_k, R_k

    def round(self, t: int, clients: Sequence[int]) -> None:
        m, uploads = self.method, [self.client(t, k) for k in clients]
        R = {}
        for c in range(3):
            owners = [upload for upload in uploads if c in upload[0]]
            if owners:
                self.V[c] = torch.stack([V_k[c] for _, V_k, _ in owners]).mean(0)
                R[c] = torch.stack([R_k[c] for _, _, R_k in owners]).mean(0)
        x = torch.cat([S[c] for S, _, _ in uploads for c in sorted(S)])
        y = torch.tensor([c for S, _, _ in uploads for c in sorted(S) for _ in range(m.per_class)])
        for e in range(m.server_epochs):
            order = random.permutation(random.make_key(0, t, 1, e, torch.tensor(0)), len(y), None, torch.device("cpu"))
            for batch in torch.split(order, m.server_batch):
                live = {n: weight.clone().requires_grad_() for n, weight in self.w.items()}
                outputs = model_logits(live, x[batch])
                loss = F.cross_entropy(outputs, y[batch])
                for c in set(y[batch].tolist()):
                    T = torch.softmax(outputs[y[batch] == c] / m.tau, 1).mean(0)
                    both = (R[c] * (R[c] / T).log()).sum() + (T * (T / R[c]).log()).sum()
                    loss = loss + m.server_weight / 2 * both
                grads = torch.autograd.grad(loss, list(live.values()))
                self.w = {n: w - m.server_lr * g for (n, w), g in zip(self.w.items(), grads, strict=True)}


@pytest.mark.parametrize("start", ["real", "noise"])
def test_fedaf_equals_literal_algorithm(start: Any) -> None:
    """Three rounds, clients of 9, 4, 7, and 1 samples; some clients lack classes."""
    method = FedAF(start=start, **QUICK)
    run, literal = PROBLEM.run(method, ROUNDS), Literal(PROBLEM, method, PROBLEM.start, {})
    assert any(len(set(PROBLEM.fed.y[own].tolist())) < 3 for own in PROBLEM.fed.train)
    for t, clients in enumerate(ROUNDS, start=1):
        literal.round(t, clients)
    assert same(run.server["params"], literal.w, 1e-10)
    assert same({"V": run.server["class_logits"]}, {"V": torch.stack([literal.V[c] for c in range(3)])}, 1e-10)
    assert same(run.personal(2, "received"), literal.w, 1e-10)


def test_fedaf_server_with_unchanged_samples_equals_central_training() -> None:
    """With one synthetic sample per real sample and almost no noise, samples do not change, and the SGD of the server
    equals that of one client with the data of all clients."""
    random = np.random.default_rng(3)
    y = np.array([0, 1, 2])
    x = random.normal(size=(2, 3, 4))
    separate = ft.Federation.from_arrays([(own, y, own, y) for own in x], classes=3)
    pooled = ft.Federation.from_arrays([(x.reshape(6, 4), np.tile(y, 2), x[0], y)], classes=3)
    fields: dict[str, Any] = {"per_class": 1, "noise": 1e-12, "local_weight": 0.0, "server_weight": 0.0}
    method = FedAF(**fields, server_lr=0.2, server_epochs=3)
    condensed = Problem(separate, PROBLEM.net, batch_size=6).run(method, [[0, 1]] * 2)
    central = Problem(pooled, PROBLEM.net, batch_size=6).run(FedAvg(lr=0.2, epochs=3), [[0]] * 2)
    assert same(condensed.server["params"], central.server["params"], 1e-9)


def test_fedaf_real_samples_are_not_sent_unchanged() -> None:
    """With one sample per class and almost no steps, the leak check would reject an unchanged sample."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(3, 1, 4, 4)), np.arange(3)
    fed = ft.Federation.from_arrays([(x, y, x, y)], classes=3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    run = ft.simulate(
        FedAF(lr=1e-12, noise=1e-6, per_class=1), ft.wrap(net, head="1"), fed, rounds=1, dtype=torch.float64
    )
    assert run.records[0]["bytes_up"] > 0


def test_fedaf_class_without_reports_keeps_zero_logits() -> None:
    """The mean logits of such a class stay zero, and no sample is pulled toward them."""
    fed = tiny_federation((6, 6))
    fed.y[fed.y == 2] = 0
    run = Problem(fed, PROBLEM.net).run(FedAF(**QUICK), [[0, 1]] * 3)
    known = (run.server["class_logits"] != 0).any(1).tolist()
    assert known == [True, True, False]
    assert all(bool(weight.isfinite().all()) for weight in run.server["params"].values())


def test_fedaf_server_updates_batch_norm_statistics() -> None:
    """The running statistics are those of synthetic samples, because the server has no other data."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    run = ft.simulate(FedAF(**QUICK), ft.wrap(net, head="3"), tiny_federation(), rounds=2, engine="sequential")
    params = run.server["params"]
    assert float(params["1.running_var"].min()) > 0 and float(params["1.running_mean"].abs().min()) > 0
    assert run.records[-1]["loss_received"] < 3
