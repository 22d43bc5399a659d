"""DBE, FedCP, and GPFL: literal versions, limiting cases, and differences from public code."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import TinyNet, same, tiny_federation
from fedtailor.core import random
from fedtailor.core.method import Setup
from fedtailor.core.trees import Tree
from fedtailor.methods import DBE, GPFL, FedAvg, FedCP
from support.problem import (
    BODY,
    HEAD,
    PARTIAL,
    Problem,
    Weights,
    average,
    features,
    head_outputs,
    make_normalized_net,
    make_problem,
    select_names,
    with_grad,
)  # fmt: skip

SCHEDULE = [[0, 1, 2, 3], [1, 2, 4], [0, 4]]  # client 4 takes part late; client 0 is absent once
WIDTH, CLASSES = 4, 3  # size of the head of the network


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem()


# the network as plain functions


def dense(block: Weights, x: Tensor) -> Tensor:
    return x @ block["weight"].T + block["bias"]


def layer_norm(block: Weights, x: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * block["scale"] + block["shift"]


def sgd_step(loss: Tensor, groups: Sequence[Weights], lr: float, decays: Sequence[float]) -> list[Weights]:
    """Take one step of plain SGD on groups of weights, each with its own weight decay."""
    weights = [w for group in groups for w in group.values()]
    grads = iter(torch.autograd.grad(loss, weights, allow_unused=True))
    results = []
    for group, decay in zip(groups, decays, strict=True):
        moved = {}
        for name, w in group.items():
            grad = next(grads)
            moved[name] = w.detach() - lr * ((0 if grad is None else grad) + decay * w.detach())
        results.append(moved)
    return results


def initial_server(method: ft.Method, problem: Problem, seed: int = 0) -> Tree:
    """Return the server state before round 1; policy and valve have the initial values of the library."""
    sizes = torch.tensor(problem.sizes)
    return method.init_server(Setup(ft.wrap(problem.net), problem.start, problem.num_clients, sizes, 3, seed))


def compute_test_loss(problem: Problem, client: int, predict: Callable[[Tensor], Tensor]) -> float:
    samples = problem.fed.test[client]
    return float(F.cross_entropy(predict(problem.fed.x[samples]), problem.fed.y[samples]))


# DBE


class LiteralDBE:
    """A literal version of DBE; the phase before round 1 is part of round 1."""

    def __init__(self, problem: Problem, schedule: Sequence[Sequence[int]], kappa: float, mu: float) -> None:
        self.problem, self.kappa, self.mu, self.lr, self.epochs = problem, kappa, mu, 0.1, 2
        self.theta = problem.start
        self.bias = [torch.zeros(WIDTH, dtype=torch.float64) for _ in problem.sizes]
        self.consensus = torch.zeros(WIDTH, dtype=torch.float64)
        self.trained = [problem.start for _ in problem.sizes]
        for t, clients in enumerate(schedule, start=1):
            if t == 1:
                means = [self.initial_mean(i) for i in clients]
                total = sum(problem.sizes[i] for i in clients)
            for i in clients:
                self.trained[i] = self.client(t, i)
            self.theta = average([self.trained[i] for i in clients], [problem.sizes[i] for i in clients])
            if t == 1:
                self.consensus = sum(
                    (problem.sizes[i] / total * m for i, m in zip(clients, means, strict=True)), torch.zeros(())
                )

    def initial_mean(self, i: int) -> Tensor:
        """Run local epochs from θ⁰ without DBE and return the running mean; the weights are discarded."""
        theta, r = self.problem.start, torch.zeros(WIDTH, dtype=torch.float64)
        for e in range(self.epochs):
            for batch in self.problem.batches(1, i, e):
                theta = with_grad(theta)
                z = features(theta, self.problem.fed.x[batch])
                r = (1 - self.mu) * r + self.mu * z.mean(0).detach()
                loss = F.cross_entropy(head_outputs(theta, z), self.problem.fed.y[batch])
                [theta] = sgd_step(loss, [theta], self.lr, [0.0])
        return r

    def client(self, t: int, i: int) -> Weights:
        theta, r = self.theta, torch.zeros(WIDTH, dtype=torch.float64)
        for e in range(self.epochs):
            for batch in self.problem.batches(t, i, e):
                theta, own = with_grad(theta), with_grad({"bias": self.bias[i]})
                z = features(theta, self.problem.fed.x[batch])
                r = (1 - self.mu) * r.detach() + self.mu * z.mean(0)
                loss = F.cross_entropy(head_outputs(theta, z + own["bias"]), self.problem.fed.y[batch])
                if t > 1:
                    loss = loss + self.kappa * (0.5 * (r - self.consensus) ** 2).mean()
                theta, own = sgd_step(loss, [theta, own], self.lr, [0.0, 0.0])
                self.bias[i] = own["bias"]
        return theta

    def received(self, i: int, x: Tensor) -> Tensor:
        return head_outputs(self.theta, features(self.theta, x) + self.bias[i])


@pytest.mark.parametrize("mu", [1.0, 0.3])
def test_dbe_equals_literal_version(problem: Problem, mu: float) -> None:
    run = problem.run(DBE(kappa=3.0, mu=mu), SCHEDULE)
    literal = LiteralDBE(problem, SCHEDULE, kappa=3.0, mu=mu)
    assert same(run.server["params"], literal.theta, 1e-10)
    assert torch.allclose(run.server["consensus"], literal.consensus, atol=1e-10)
    for i in range(5):
        assert torch.allclose(run.client(i)["memory"], literal.bias[i], atol=1e-10)
        assert same(run.personal(i, "received"), {**literal.theta, "memory": literal.bias[i]}, 1e-10)
        trained = {k: v for k, v in run.personal(i, "trained").items() if k != "memory"}
        assert same(trained, literal.trained[i], 1e-10)
        loss = compute_test_loss(problem, i, partial(literal.received, i))
        assert run.records[-1]["per_client"]["loss_received"][i] == pytest.approx(loss, abs=1e-10)


@pytest.mark.parametrize("extra", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_dbe_without_pull_and_memory_equals_fedavg(problem: Problem, extra: dict[str, Any]) -> None:
    debiased = problem.run(DBE(kappa=0.0, memory=False, **extra), PARTIAL)
    plain = problem.run(FedAvg(**extra), PARTIAL)
    assert same(debiased.server["params"], plain.server["params"])  # bitwise equal
    assert debiased.records[-1]["loss_received"] == plain.records[-1]["loss_received"]


def test_dbe_without_pull_and_memory_equals_fedavg_with_batch_norm() -> None:
    net, fed = make_normalized_net(), tiny_federation()
    debiased, plain = (
        ft.simulate(m, net, fed, schedule=[[0, 1, 2, 3], [0, 3]], batch_size=3, dtype=torch.float64).server["params"]
        for m in (DBE(kappa=0.0, memory=False, weight_decay=0.01), FedAvg(weight_decay=0.01))
    )
    assert same(debiased, plain)


def test_dbe_has_no_pull_in_round_1(problem: Problem) -> None:
    """In round 1, there is no consensus, so κ has no effect; it has an effect from round 2 on."""
    one, other = (problem.run(DBE(kappa=k), SCHEDULE[:1]) for k in (0.0, 50.0))
    assert same(one.server, other.server)
    one, other = (problem.run(DBE(kappa=k), SCHEDULE[:2]) for k in (0.0, 50.0))
    assert not same(one.server["params"], other.server["params"], 1e-6)


def test_dbe_larger_kappa_brings_mean_features_closer_to_consensus(problem: Problem) -> None:
    distances = []
    for kappa in (0.0, 5.0, 20.0):
        run = problem.run(DBE(kappa=kappa, lr=0.02), [[0, 1, 2, 4]] * 4)
        z = [features(run.personal(i), problem.fed.x[problem.fed.train[i]]).mean(0) for i in (0, 2, 4)]
        distances.append(sum(float((m - run.server["consensus"]).square().sum()) for m in z))
    assert distances[0] > distances[1] > distances[2]


def test_dbe_sends_consensus_and_mean_feature_once(problem: Problem) -> None:
    run = problem.run(DBE(), [[0, 1], [0, 2], [0, 1, 2]])
    model, vector = 8 * sum(w.numel() for w in problem.start.values()), 8 * WIDTH
    down = [record["per_client"]["bytes_down"] for record in run.records]
    up = [record["per_client"]["bytes_up"] for record in run.records]
    assert up[0] == {0: model + vector, 1: model + vector}
    assert set(up[1].values()) == set(up[2].values()) == {model}
    assert down[0] == {0: model, 1: model}
    assert down[1] == {0: model + vector, 2: model + vector}
    assert down[2] == {0: model, 1: model + vector, 2: model}
    for client in range(3):
        assert torch.equal(run.client(client)["consensus"], run.server["consensus"])
    assert torch.equal(run.client(3)["consensus"], torch.zeros(WIDTH, dtype=torch.float64))


# FedCP


def gumbel_noise(problem: Problem, t: int, i: int, e: int, position: int, rows: int) -> Tensor:
    """Return the noise of a batch; like the order of batches, it is that of the library."""
    key = random.make_key(random.make_key(problem.seed, t, e, torch.tensor(i), position), 3, 0)
    u = random.uniform(key, (rows, 2, WIDTH), torch.float64, torch.device("cpu"))
    return -torch.log(-torch.log(u))


class LiteralFedCP:
    """A literal version of FedCP; the context is computed from the personal head in each round."""

    def __init__(self, problem: Problem, schedule: Sequence[Sequence[int]], lam: float, tau: float, lr: float) -> None:
        self.problem, self.lam, self.tau, self.lr, self.epochs = problem, lam, tau, lr, 2
        self.theta, self.policy = problem.start, initial_server(FedCP(), problem)["policy"]
        self.heads = [select_names(problem.start, HEAD) for _ in problem.sizes]
        self.trained: dict[int, Callable[[Tensor], Tensor]] = {}
        for t, clients in enumerate(schedule, start=1):
            uploads = [self.client(t, i) for i in clients]
            self.theta = average([u[0] for u in uploads], [problem.sizes[i] for i in clients])
            self.policy = average([u[1] for u in uploads], [problem.sizes[i] for i in clients])

    def context(self, i: int) -> Tensor:
        total = sum((self.heads[i]["head.weight"][k] for k in range(CLASSES)), torch.zeros(()))
        return total / total.square().sum().sqrt()

    def predict(
        self,
        phi: Weights,
        own: Weights,
        global_head: Weights,
        policy: Weights,
        c: Tensor,
        x: Tensor,
        noise: Tensor | float,
    ) -> tuple[Tensor, Tensor]:
        z = features(phi, x)
        a = torch.clamp(layer_norm(policy, dense(policy, z * c)), min=0).reshape(len(x), 2, WIDTH)
        odds = torch.exp((a + noise) / self.tau)
        r, s = odds[:, 0] / odds.sum(1), odds[:, 1] / odds.sum(1)
        return z, head_outputs(own, r * z) + head_outputs(global_head, s * z)

    def discrepancy(self, x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for a in (10, 15, 20, 50):
            for i in range(len(x)):
                for j in range(len(x)):
                    xx, yy, xy = ((p - q).square().sum() for p, q in ((x[i], x[j]), (y[i], y[j]), (x[i], y[j])))
                    k = torch.exp(-xx / (2 * a)) + torch.exp(-yy / (2 * a)) - 2 * torch.exp(-xy / (2 * a))
                    total = total + k / len(x) ** 2
        return total

    def client(self, t: int, i: int) -> tuple[Weights, Weights]:
        frozen, global_head, c = select_names(self.theta, BODY), select_names(self.theta, HEAD), self.context(i)
        phi, own, policy = frozen, self.heads[i], self.policy
        for e in range(self.epochs):
            for position, batch in enumerate(self.problem.batches(t, i, e)):
                phi, own, policy = with_grad(phi), with_grad(own), with_grad(policy)
                x, y = self.problem.fed.x[batch], self.problem.fed.y[batch]
                noise = gumbel_noise(self.problem, t, i, e, position, len(batch))
                z, outputs = self.predict(phi, own, global_head, policy, c, x, noise)
                loss = F.cross_entropy(outputs, y) + self.lam * self.discrepancy(z, features(frozen, x))
                phi, own, policy = sgd_step(loss, [phi, own, policy], self.lr, [0.0] * 3)
        self.heads[i] = own
        self.trained[i] = lambda x: self.predict(phi, own, global_head, policy, c, x, 0.0)[1]
        return {**phi, **{n: 0.5 * own[n] + 0.5 * global_head[n] for n in own}}, policy

    def received(self, i: int, x: Tensor) -> Tensor:
        return self.predict(
            select_names(self.theta, BODY),
            self.heads[i],
            select_names(self.theta, HEAD),
            self.policy,
            self.context(i),
            x,
            0.0,
        )[1]


def test_fedcp_equals_literal_version(problem: Problem) -> None:
    """Evaluation uses the plain softmax; after training, it uses the global head and the context of training."""
    run = problem.run(FedCP(lam=0.7, tau=1.3, lr=0.3), SCHEDULE)
    literal = LiteralFedCP(problem, SCHEDULE, lam=0.7, tau=1.3, lr=0.3)
    assert same(run.server, {"params": literal.theta, "policy": literal.policy}, 1e-10)
    losses = run.records[-1]["per_client"]
    for i in range(5):
        assert same(run.client(i)["head"], literal.heads[i], 1e-10)
        loss = compute_test_loss(problem, i, partial(literal.received, i))
        assert losses["loss_received"][i] == pytest.approx(loss, abs=1e-10)
    for i in SCHEDULE[-1]:
        assert losses["loss_trained"][i] == pytest.approx(compute_test_loss(problem, i, literal.trained[i]), abs=1e-10)


def test_fedcp_with_high_temperature_gives_each_head_half(problem: Problem) -> None:
    """For τ → ∞, r = s = ½, the policy does not change, and the output is ½(W_i + W_g) z + b_i + b_g."""
    run = problem.run(FedCP(tau=1e9, lam=0.0), SCHEDULE[:1])
    assert same(run.server["policy"], initial_server(FedCP(), problem)["policy"], 1e-8)
    global_head = select_names(problem.start, HEAD)
    for i in SCHEDULE[0]:
        phi, own = select_names(problem.start, BODY), global_head
        for e in range(2):
            for batch in problem.batches(1, i, e):
                phi, own = with_grad(phi), with_grad(own)
                z = features(phi, problem.fed.x[batch])
                outputs = head_outputs(own, z / 2) + head_outputs(global_head, z / 2)
                phi, own = sgd_step(F.cross_entropy(outputs, problem.fed.y[batch]), [phi, own], 0.1, [0.0, 0.0])
        assert same(run.client(i)["head"], own, 1e-7)


def test_fedcp_context_stays_constant(problem: Problem) -> None:
    """The gradients of cross-entropy with respect to the rows of a linear head sum to zero."""
    run, total = problem.run(FedCP(), SCHEDULE), problem.start["head.weight"].sum(0)
    for client in range(5):
        assert torch.allclose(run.personal(client)["context"], total / total.norm(), atol=1e-12)


def test_fedcp_evaluates_without_noise_and_trains_with_new_noise_per_batch(problem: Problem) -> None:
    """Evaluation is deterministic; rounds, clients, epochs, and batches have different noise."""
    fed = tiny_federation((6,))
    run, again = (ft.simulate(FedCP(), problem.net, fed, rounds=2, batch_size=6, dtype=torch.float64) for _ in range(2))
    assert run.records[-1]["loss_received"] == again.records[-1]["loss_received"]
    noises = [gumbel_noise(problem, t, i, e, b, 3) for t in (1, 2) for i in (0, 1) for e in (0, 1) for b in (0, 1)]
    assert all(not torch.equal(a, b) for k, a in enumerate(noises) for b in noises[:k])


def test_fedcp_larger_lambda_keeps_features_closer_to_received_ones(problem: Problem) -> None:
    """The distance between mean features decreases as λ increases."""
    moved = []
    for lam in (0.0, 5.0, 20.0):
        run = problem.run(FedCP(lam=lam, lr=0.02, epochs=4), [[0]])
        x = problem.fed.x[problem.fed.train[0]]
        moved.append(float((features(run.personal(0), x) - features(problem.start, x)).mean(0).square().sum()))
    assert moved[0] > moved[1] > moved[2] > 0


def test_fedcp_batch_norm_statistics_are_those_of_trained_body() -> None:
    """FedCP runs two bodies on each batch; the statistics are those of the trained body, not of the received one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    fed = tiny_federation((6,))
    run = ft.simulate(FedCP(lr=0.5), ft.wrap(net, head="3"), fed, schedule=[[0]], batch_size=6, dtype=torch.float64)
    trained = run.personal(0)
    before = fed.x[fed.train[0]] @ trained["0.weight"].T + trained["0.bias"]
    assert torch.allclose(trained["1.running_mean"], before.mean(0), atol=1e-12)
    assert torch.allclose(trained["1.running_var"], before.var(0), atol=1e-12)


# GPFL


class LiteralGPFL:
    """A literal version of GPFL; contexts are computed from received embeddings, or as in the code."""

    def __init__(
        self, problem: Problem, schedule: Sequence[Sequence[int]], lam: float, mu: float, contexts: str = "received"
    ) -> None:
        start = initial_server(GPFL(), problem)
        self.problem, self.lam, self.mu, self.lr, self.epochs = problem, lam, mu, 0.1, 2
        self.phi, self.embeddings = select_names(problem.start, BODY), start["embeddings"]
        self.gamma, self.beta = start["valve"]["gain"], start["valve"]["offset"]
        self.heads = [select_names(problem.start, HEAD) for _ in problem.sizes]
        self.own = [torch.zeros_like(self.embeddings) for _ in problem.sizes]
        self.contexts = contexts
        self.trained: dict[int, Callable[[Tensor], Tensor]] = {}
        for t, clients in enumerate(schedule, start=1):
            uploads = [self.client(t, i) for i in clients]
            self.phi, self.gamma, self.beta, table = (
                average([upload[part] for upload in uploads], [problem.sizes[i] for i in clients]) for part in range(4)
            )
            self.embeddings = table["e"]

    def context(self, t: int, i: int) -> tuple[Tensor, Tensor]:
        """Return p_i and g."""
        e = self.embeddings if self.contexts == "received" else self.own[i]
        if t == 1:
            e = torch.zeros_like(e)
        y = self.problem.fed.y[self.problem.all_samples(i)].tolist()
        personal = sum((y.count(k) / len(y) * e[k] for k in range(CLASSES)), torch.zeros(()))
        return personal, (e[0] + e[1] + e[2]) / CLASSES

    @staticmethod
    def valve(gamma: Weights, beta: Weights, z: Tensor, u: Tensor) -> Tensor:
        gain, offset = (layer_norm(block, dense(block, u).clamp(min=0)) for block in (gamma, beta))
        return (z * (gain + 1) + offset).clamp(min=0)

    def client(self, t: int, i: int) -> tuple[Weights, Weights, Weights, Weights]:
        p, g = self.context(t, i)
        phi, own, gamma, beta, table = self.phi, self.heads[i], self.gamma, self.beta, {"e": self.embeddings}
        for e in range(self.epochs):
            for batch in self.problem.batches(t, i, e):
                phi, own, gamma, beta, table = (
                    with_grad(phi),
                    with_grad(own),
                    with_grad(gamma),
                    with_grad(beta),
                    with_grad(table),
                )
                x, y = self.problem.fed.x[batch], self.problem.fed.y[batch]
                z = features(phi, x)
                loss = F.cross_entropy(head_outputs(own, self.valve(gamma, beta, z, p)), y)
                z_g = self.valve(gamma, beta, z, g)
                cosines = torch.stack([F.cosine_similarity(z_g, table["e"][k][None]) for k in range(CLASSES)], 1)
                loss = loss + F.cross_entropy(cosines, y)
                loss = loss + self.lam * (z_g - self.embeddings[y]).square().sum().sqrt()
                phi, own, gamma, beta, table = sgd_step(
                    loss, [phi, own, gamma, beta, table], self.lr, [0.0, 0.0, self.mu, self.mu, self.mu]
                )
        self.heads[i], self.own[i] = own, table["e"]
        self.trained[i] = lambda x: head_outputs(own, self.valve(gamma, beta, features(phi, x), p))
        return phi, gamma, beta, table

    def received(self, t: int, i: int, x: Tensor) -> Tensor:
        return head_outputs(
            self.heads[i], self.valve(self.gamma, self.beta, features(self.phi, x), self.context(t, i)[0])
        )


@pytest.mark.parametrize("contexts", ["received", "own"])
def test_gpfl_equals_literal_version(problem: Problem, contexts: Any) -> None:
    run = problem.run(GPFL(lam=0.2, mu=0.3, contexts=contexts), SCHEDULE)
    literal = LiteralGPFL(problem, SCHEDULE, lam=0.2, mu=0.3, contexts=contexts)
    assert same(run.server["params"], literal.phi, 1e-10)
    assert same(run.server["valve"], {"gain": literal.gamma, "offset": literal.beta}, 1e-10)
    assert torch.allclose(run.server["embeddings"], literal.embeddings, atol=1e-10)
    losses = run.records[-1]["per_client"]
    for i in range(5):
        assert same(run.client(i)["head"], literal.heads[i], 1e-10)
        loss = compute_test_loss(problem, i, partial(literal.received, 4, i))
        assert losses["loss_received"][i] == pytest.approx(loss, abs=1e-10)
    for i in SCHEDULE[-1]:
        assert losses["loss_trained"][i] == pytest.approx(compute_test_loss(problem, i, literal.trained[i]), abs=1e-10)


def test_gpfl_angle_loss_rotates_embeddings(problem: Problem) -> None:
    """Without distance and decay, embeddings change only orthogonally to themselves, because a cosine does not depend
    on lengths."""
    run = problem.run(GPFL(lam=0.0, mu=0.0, lr=1e-4, epochs=1), [[0]])
    before, after = initial_server(GPFL(), problem)["embeddings"], run.server["embeddings"]
    moved = after - before
    assert float(moved.abs().max()) > 1e-7
    assert float((moved * before).sum(1).abs().max()) < 1e-3 * float((moved.norm(dim=1) * before.norm(dim=1)).max())


def test_gpfl_mu_decays_embeddings_and_valve_only(problem: Problem) -> None:
    """`weight_decay` applies to body and head; if both are equal, all parts have the same decay."""
    decayed = problem.run(GPFL(mu=0.05, weight_decay=0.05), SCHEDULE).server
    literal = LiteralGPFL(problem, SCHEDULE, lam=0.01, mu=0.05)
    assert not same(decayed["params"], literal.phi, 1e-6)
    one = problem.run(GPFL(mu=0.05, weight_decay=0.05, lr=1e-3, epochs=1), [[3]]).server["embeddings"]
    other = problem.run(GPFL(mu=0.05, lr=1e-3, epochs=1), [[3]]).server["embeddings"]
    assert torch.allclose(one, other, atol=1e-12)  # in one step, the decay of the body has no effect on embeddings


def test_gpfl_contexts_are_zero_in_round_1_and_personal_later(problem: Problem) -> None:
    run = problem.run(GPFL(), SCHEDULE[:1])
    assert all(float(run.personal(i, "trained")["context"].abs().max()) == 0 for i in SCHEDULE[0])
    embeddings = run.server["embeddings"]
    for i in range(5):
        y = problem.fed.y[problem.fed.train[i]]
        expected = torch.stack([(y == k).double().mean() * embeddings[k] for k in range(CLASSES)]).sum(0)
        assert torch.allclose(run.personal(i, "received")["context"], expected, atol=1e-12)


@pytest.mark.slow
def test_gpfl_default_decay_preserves_effect_of_context() -> None:
    """With the decay of the paper and the default learning rate, contexts would have no effect after 40 rounds."""

    def context_effect(method: GPFL) -> float:
        """Return the difference between the gains of the valve for the contexts of two clients."""
        schedule = [[0, 1, 2, 3, 4]] * 40
        run = ft.simulate(method, problem.net, problem.fed, schedule=schedule, batch_size=3, evaluate_every=40)
        gains = [valve_gain(run.server["valve"]["gain"], run.client(i)["context"]) for i in (0, 3)]
        return float((gains[0] - gains[1]).abs().max())

    def valve_gain(block: Weights, context: Tensor) -> Tensor:
        return layer_norm(block, torch.relu(dense(block, context)))

    problem = make_problem()
    assert context_effect(GPFL()) > 10 * context_effect(GPFL(mu=0.1))


def test_gpfl_with_absent_classes_stays_finite() -> None:
    """With one sample, the gradients of norms and cosines are finite."""
    fed = tiny_federation((1, 1))
    torch.manual_seed(0)
    run = ft.simulate(GPFL(lr=0.5), TinyNet().double(), fed, rounds=4, batch_size=4, dtype=torch.float64)
    assert run.records[-1]["diverged"] == []
    assert all(bool(leaf.isfinite().all()) for leaf in run.server["valve"]["gain"].values())


# added layers


@pytest.mark.parametrize("method", [FedCP(), GPFL()], ids=["FedCP", "GPFL"])
def test_added_layers_depend_on_seed_only(problem: Problem, method: ft.Method) -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first, again, other = (
        initial_server(method, problem),
        initial_server(method, problem),
        initial_server(method, problem, seed=1),
    )
    assert torch.equal(state, torch.random.get_rng_state())
    assert same(first, again) and not same(first, other, 1e-3)
    blocks = [first["policy"]] if "policy" in first else [first["valve"]["gain"], first["valve"]["offset"]]
    for block in blocks:
        for name in ("weight", "bias"):
            assert 0.3 < float(block[name].abs().max()) <= WIDTH**-0.5  # as in nn.Linear
        assert block["weight"].is_contiguous()
    if len(blocks) == 2:
        assert not same(blocks[0], blocks[1], 1e-3)
