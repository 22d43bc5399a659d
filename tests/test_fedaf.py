"""FedAF: two rounds written out from the specification, its limits, and what must not cross."""

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
from conftest import refusal, same, tiny_federation
from fedtailor import hashing
from fedtailor.methods import FedAF, FedAvg, Local
from fedtailor.trees import Tree
from problem import Problem, ThreeLayers, Weights, make_problem

PROBLEM = make_problem((9, 4, 7, 1))
ROUNDS = [[0, 1, 2, 3], [0, 3], [1, 2]]
QUICK: dict[str, Any] = {"per_class": 2, "steps": 2, "server_epochs": 2, "server_batch": 5, "projections": 4, "lr": 0.3}


def numbers(problem: Problem, t: int, k: int, salt: int, shape: tuple[int, ...]) -> Tensor:
    """The random numbers of a client in a round: like the order of batches, all that is shared with the library."""
    of = hashing.key(problem.seed, t, 2, torch.tensor(k), salt)
    return hashing.uniform(of, shape, torch.float64, torch.device("cpu"))


def normal(problem: Problem, t: int, k: int, salt: int, shape: tuple[int, ...]) -> Tensor:
    return math.sqrt(2) * torch.erfinv(2 * numbers(problem, t, k, salt, shape) - 1)


def features(w: Weights, x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ w["fc1.weight"].T + w["fc1.bias"])
    return torch.tanh(hidden @ w["fc2.weight"].T + w["fc2.bias"])


def logits(w: Weights, x: Tensor) -> Tensor:
    return features(w, x) @ w["head.weight"].T + w["head.bias"]


def sliced_distance(points: Tensor, centre: Tensor, directions: Tensor) -> Tensor:
    """The mean over directions of the squared Wasserstein distance (order 2) on the line: sorted against sorted."""
    total = torch.zeros((), dtype=torch.float64)
    for direction in directions:
        ours, theirs = (points @ direction).sort().values, (centre @ direction).expand(len(points)).sort().values
        total = total + (ours - theirs).square().mean()
    return total / len(directions)


@dataclass
class Literal:
    """FedAF by loops: client by client, class by class."""

    problem: Problem
    method: FedAF
    w: Weights
    V: dict[int, Tensor]

    def client(self, t: int, k: int) -> tuple[dict[int, Tensor], dict[int, Tensor], dict[int, Tensor]]:
        m, problem, w_k = self.method, self.problem, {}
        inputs = {"fc1": 4, "fc2": 5, "head": 4}
        for salt, (name, weight) in enumerate(self.w.items(), start=2):
            bound = 1 / math.sqrt(inputs[name.split(".")[0]])
            fresh = -bound + 2 * bound * numbers(problem, t, k, salt, tuple(weight.shape))
            w_k[name] = m.gamma * weight + (1 - m.gamma) * fresh
        order = torch.cat(problem.batches(t, k, 0))
        noise = m.noise * normal(problem, t, k, 0, (3, m.per_class, 4))
        directions = normal(problem, t, k, 1, (m.projections, 3))
        directions = directions / directions.norm(dim=1, keepdim=True)
        S, V_k, R_k = {}, {}, {}
        for c in sorted(set(problem.fed.y[order].tolist())):
            real = problem.fed.x[[int(i) for i in order if problem.fed.y[i] == c]]
            V_k[c] = logits(w_k, real).mean(0)
            R_k[c] = torch.softmax(V_k[c] / m.tau, 0)
            start = torch.stack([real[j % len(real)] for j in range(m.per_class)])
            S[c] = noise[c] + (start if m.start == "real" else 0)
            for _ in range(m.steps):
                live = S[c].clone().requires_grad_()
                loss = (features(w_k, real).mean(0) - features(w_k, live).mean(0)).square().sum()
                if c in self.V:
                    loss = loss + m.local_weight * sliced_distance(logits(w_k, live), self.V[c], directions)
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
            order = hashing.order(hashing.key(0, t, 1, e, torch.tensor(0)), len(y), None, torch.device("cpu"))
            for batch in torch.split(order, m.server_batch):
                live = {n: weight.clone().requires_grad_() for n, weight in self.w.items()}
                answers = logits(live, x[batch])
                loss = F.cross_entropy(answers, y[batch])
                for c in set(y[batch].tolist()):
                    T = torch.softmax(answers[y[batch] == c] / m.tau, 1).mean(0)
                    both = (R[c] * (R[c] / T).log()).sum() + (T * (T / R[c]).log()).sum()
                    loss = loss + m.server_weight / 2 * both
                slopes = torch.autograd.grad(loss, list(live.values()))
                self.w = {n: w - m.server_lr * g for (n, w), g in zip(self.w.items(), slopes, strict=True)}


@pytest.mark.parametrize("start", ["real", "noise"])
def test_fedaf_by_hand(start: Any) -> None:
    """Three rounds, clients of 9, 4, 7 and 1 samples, of which some lack classes."""
    method = FedAF(start=start, **QUICK)
    run, literal = PROBLEM.run(method, ROUNDS), Literal(PROBLEM, method, PROBLEM.start, {})
    assert any(len(set(PROBLEM.fed.y[own].tolist())) < 3 for own in PROBLEM.fed.train)
    for t, clients in enumerate(ROUNDS, start=1):
        literal.round(t, clients)
    assert same(run.server["params"], literal.w, 1e-10)
    assert same({"V": run.server["class_logits"]}, {"V": torch.stack([literal.V[c] for c in range(3)])}, 1e-10)
    assert same(run.personal(2, "received"), literal.w, 1e-10)


@dataclass(frozen=True)
class Kept(FedAF):
    """FedAF whose server keeps the last uploads."""

    def init_server(self, setup: ft.Setup) -> Tree:
        shape = (4, 3, self.per_class, 4)
        return {**super().init_server(setup), "kept": setup.params["head.bias"].new_zeros(shape)}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return super().send({name: server[name] for name in ("params", "class_logits")}, clients, round)

    def receive(self, server: Tree, exchange: ft.Exchange) -> Tree:
        return {**super().receive(server, exchange), "kept": exchange.received["samples"].values}


def test_synthetic_samples_come_nearer_to_what_they_stand_for() -> None:
    """Every step lowers ‖mean φ(real_c) − mean φ(S_c)‖²; with γ = 1 the network is the received one."""
    fields: dict[str, Any] = {"gamma": 1.0, "per_class": 3, "start": "noise", "lr": 1.0, "server_epochs": 1}
    w, own, gaps = PROBLEM.start, PROBLEM.fed.train[0], []
    for steps in (1, 10, 40):
        samples = PROBLEM.run(Kept(steps=steps, **fields), [[0, 1, 2, 3]]).server["kept"][0]  # of client 0
        real = [PROBLEM.fed.x[own[PROBLEM.fed.y[own] == c]] for c in range(3)]
        apart = [features(w, real[c]).mean(0) - features(w, samples[c]).mean(0) for c in range(3) if len(real[c])]
        gaps.append(float(torch.stack(apart).square().sum()))
    assert gaps[0] > 2 * gaps[1] > 4 * gaps[2]


def test_where_samples_need_no_change_the_server_trains_as_if_it_had_the_data() -> None:
    """As many synthetic samples as real ones, next to no noise: nothing is left to match, so the server's SGD is that
    of one client with everybody's data. No average, no drift."""
    random = np.random.default_rng(3)
    y = np.array([0, 1, 2])
    x = random.normal(size=(2, 3, 4))
    apart = ft.Federation.from_arrays([(own, y, own, y) for own in x], classes=3)
    together = ft.Federation.from_arrays([(x.reshape(6, 4), np.tile(y, 2), x[0], y)], classes=3)
    fields: dict[str, Any] = {"per_class": 1, "noise": 1e-12, "local_weight": 0.0, "server_weight": 0.0}
    method = FedAF(**fields, server_lr=0.2, server_epochs=3)
    condensed = Problem(apart, PROBLEM.net, batch_size=6).run(method, [[0, 1]] * 2)
    central = Problem(together, PROBLEM.net, batch_size=6).run(FedAvg(lr=0.2, epochs=3), [[0]] * 2)
    assert same(condensed.server["params"], central.server["params"], 1e-9)


@pytest.mark.parametrize(
    "off",
    [
        {"local_weight": 0.0}, {"server_weight": 0.0}, {"gamma": 1.0}, {"lr": 1e-9}, {"start": "noise"}, {"tau": 1.0},
        {"per_class": 1}, {"noise": 1e-6},
    ],
    ids=str,
)  # fmt: skip
def test_every_part_has_an_effect(off: dict[str, Any]) -> None:
    with_it, without = (PROBLEM.run(FedAF(**fields), ROUNDS[:2]) for fields in (QUICK, QUICK | off))
    assert not same(with_it.server["params"], without.server["params"], 1e-7)


def test_the_sliced_distance_moves_samples_once_logits_are_known() -> None:
    """Public code takes it from numbers without slope, so that it changes nothing."""
    first, second = ([PROBLEM.run(Kept(**QUICK | {"local_weight": weight}), [[0, 1, 2, 3]] * rounds).server["kept"]
                      for weight in (0.0, 0.8)] for rounds in (1, 2))  # fmt: skip
    assert torch.equal(first[0], first[1])  # in round 1 nobody has told of any class
    assert float((second[0] - second[1]).abs().max()) > 1e-4


def test_it_differs_from_fedavg_and_from_training_alone() -> None:
    condensed, avg, local = (
        PROBLEM.run(m, ROUNDS).personal(0, "received") for m in (FedAF(**QUICK), FedAvg(), Local())
    )
    assert not same(condensed, avg, 1e-3) and not same(condensed, local, 1e-3)


def test_only_classes_that_a_client_has_cross() -> None:
    """Down θ + C²; up ipc · C_i · |x| + 2 · C_i · C numbers of four bytes."""
    run = ft.simulate(
        FedAF(**QUICK), ThreeLayers(), PROBLEM.fed, schedule=ROUNDS[:1], batch_size=3, engine="sequential"
    )
    size, own = sum(p.numel() for p in PROBLEM.net.parameters()), run.records[0]["per_client"]
    for client, samples in enumerate(PROBLEM.fed.train):
        classes = len(set(PROBLEM.fed.y[samples].tolist()))
        assert own["bytes_down"][client] == 4 * (size + 9)
        assert own["bytes_up"][client] == 4 * (2 * classes * 4 + 2 * classes * 3)


def test_no_sample_crosses_as_it_is() -> None:
    """One sample of a class stands for itself, and no slope moves it; the guard of uploads would refuse it."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(3, 1, 4, 4)), np.arange(3)
    fed = ft.Federation.from_arrays([(x, y, x, y)], classes=3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    run = ft.simulate(
        FedAF(lr=1e-12, noise=1e-6, per_class=1), ft.wrap(net, head="1"), fed, rounds=1, dtype=torch.float64
    )
    assert run.records[0]["bytes_up"] > 0
    assert "noise must be above 0, so that no sample crosses as it is" in refusal(lambda: FedAF(noise=0.0))


def test_a_class_nobody_has_told_of_is_left_alone() -> None:
    """Its mean logits stay zeros, and nothing is pulled to them."""
    fed = tiny_federation((6, 6))
    fed.y[fed.y == 2] = 0
    run = Problem(fed, PROBLEM.net).run(FedAF(**QUICK), [[0, 1]] * 3)
    known = (run.server["class_logits"] != 0).any(1).tolist()
    assert known == [True, True, False]
    assert all(bool(weight.isfinite().all()) for weight in run.server["params"].values())


def test_the_server_keeps_real_statistics_of_batches() -> None:
    """With batch normalisation, statistics are of synthetic samples, for the server sees no others."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    run = ft.simulate(FedAF(**QUICK), ft.wrap(net, head="3"), tiny_federation(), rounds=2, engine="sequential")
    params = run.server["params"]
    assert float(params["1.running_var"].min()) > 0 and float(params["1.running_mean"].abs().min()) > 0
    assert run.records[-1]["loss_received"] < 3


class Parts(nn.Module):
    """Takes inputs of two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.head(torch.cat([x["a"], x["b"]], 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_inputs_of_several_parts_are_refused_in_words(engine: str) -> None:
    x, y = {"a": np.ones((4, 2)), "b": np.ones((4, 2))}, np.array([0, 1, 0, 1])
    fed = ft.Federation.from_arrays([(x, y, x, y)], classes=2)
    words = refusal(lambda: ft.simulate(FedAF(), Parts(), fed, rounds=1, engine=engine))
    assert "inputs must be one tensor" in words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps": 0}, "steps must be at least 1"), ({"gamma": 1.1}, "gamma must be between 0 and 1"),
        ({"start": "x"}, "start must be"), ({"tau": 0.0}, "tau must be above 0"), ({"lr": 0.0}, "lr must be above 0"),
        ({"local_weight": -1.0}, "local_weight must be at least 0"),
    ],
)  # fmt: skip
def test_senseless_fields_are_refused(fields: dict[str, Any], words: str) -> None:
    assert words in refusal(lambda: FedAF(**fields))
