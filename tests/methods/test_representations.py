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
from fedtailor.methods import DBE, GPFL, FedCP
from support.problem import (
    BODY,
    HEAD,
    Problem,
    Weights,
    average,
    features,
    head_outputs,
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


def compute_test_loss(problem: Problem, client: int, predict: Callable[[Tensor], Tensor]) -> float:
    samples = problem.fed.test[client]
    return float(F.cross_entropy(predict(problem.fed.x[samples]), problem.fed.y[samples]))


# DBE


class LiteralDBE:
    """A literal version of DBE; the phase before round 1 is part of round 1.

    Each client has one optimizer for its copy of θ and its bias, which is never reset.
    """

    def __init__(
        self, problem: Problem, schedule: Sequence[Sequence[int]], kappa: float, mu: float, momentum: float
    ) -> None:
        self.problem, self.kappa, self.mu, self.momentum, self.epochs = problem, kappa, mu, momentum, 2
        self.theta = problem.start
        self.bias = [torch.zeros(WIDTH, dtype=torch.float64) for _ in problem.sizes]
        self.consensus = torch.zeros(WIDTH, dtype=torch.float64)
        self.trained = [problem.start for _ in problem.sizes]
        self.live = [with_grad(problem.start | {"bias": zero}) for zero in self.bias]
        self.optimizers = [self.optimizer(live) for live in self.live]
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

    def optimizer(self, live: Weights) -> torch.optim.Optimizer:
        return torch.optim.SGD(live.values(), lr=0.1, momentum=self.momentum)

    def initial_mean(self, i: int) -> Tensor:
        """Run local epochs from θ⁰ without DBE and return the running mean; weights and optimizer are discarded."""
        theta, r = with_grad(self.problem.start), torch.zeros(WIDTH, dtype=torch.float64)
        optimizer = self.optimizer(theta)
        for e in range(self.epochs):
            for batch in self.problem.batches(1, i, e):
                z = features(theta, self.problem.fed.x[batch])
                r = (1 - self.mu) * r + self.mu * z.mean(0).detach()
                optimizer.zero_grad()
                F.cross_entropy(head_outputs(theta, z), self.problem.fed.y[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return r

    def client(self, t: int, i: int) -> Weights:
        live, optimizer, r = self.live[i], self.optimizers[i], torch.zeros(WIDTH, dtype=torch.float64)
        for name, weight in self.theta.items():
            live[name].data.copy_(weight)
        for e in range(self.epochs):
            for batch in self.problem.batches(t, i, e):
                z = features(live, self.problem.fed.x[batch])
                r = (1 - self.mu) * r.detach() + self.mu * z.mean(0)
                loss = F.cross_entropy(head_outputs(live, z + live["bias"]), self.problem.fed.y[batch])
                if t > 1:
                    loss = loss + self.kappa * (0.5 * (r - self.consensus) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        trained = {name: weight.detach().clone() for name, weight in live.items()}
        self.bias[i] = trained.pop("bias")
        return trained

    def received(self, i: int, x: Tensor) -> Tensor:
        return head_outputs(self.theta, features(self.theta, x) + self.bias[i])


@pytest.mark.parametrize(("mu", "momentum"), [(1.0, 0.0), (0.3, 0.0), (0.3, 0.9)])
def test_dbe_equals_literal_version(problem: Problem, mu: float, momentum: float) -> None:
    run = problem.run(DBE(kappa=3.0, mu=mu, momentum=momentum, keep_optimizer_state=True), SCHEDULE)
    literal = LiteralDBE(problem, SCHEDULE, kappa=3.0, mu=mu, momentum=momentum)
    assert same(run.server["params"], literal.theta, 1e-10)
    assert torch.allclose(run.server["consensus"], literal.consensus, atol=1e-10)
    for i in range(5):
        assert torch.allclose(run.client(i)["memory"], literal.bias[i], atol=1e-10)
        assert same(run.personal(i, "received"), {**literal.theta, "memory": literal.bias[i]}, 1e-10)
        trained = {k: v for k, v in run.personal(i, "trained").items() if k != "memory"}
        assert same(trained, literal.trained[i], 1e-10)
        loss = compute_test_loss(problem, i, partial(literal.received, i))
        assert run.records[-1]["per_client"]["loss_received"][i] == pytest.approx(loss, abs=1e-10)


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
        self.theta, self.policy = problem.start, problem.initial_server(FedCP())["policy"]
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
        self, phi: Weights, own: Weights, global_head: Weights, policy: Weights, c: Tensor, x: Tensor,
        noise: Tensor | float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
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
        body, head = select_names(self.theta, BODY), select_names(self.theta, HEAD)
        return self.predict(body, self.heads[i], head, self.policy, self.context(i), x, 0.0)[1]


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
        self, problem: Problem, schedule: Sequence[Sequence[int]], lam: float, mu: float, weight_decay: float,
        contexts: str,
    ) -> None:  # fmt: skip
        start = problem.initial_server(GPFL())
        self.problem, self.lam, self.lr, self.epochs = problem, lam, 0.1, 2
        self.decays = [weight_decay] * 2 + [mu] * 3  # of body and head, and of valve and embeddings
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
                phi, own, gamma, beta, table = map(with_grad, (phi, own, gamma, beta, table))
                x, y = self.problem.fed.x[batch], self.problem.fed.y[batch]
                z = features(phi, x)
                loss = F.cross_entropy(head_outputs(own, self.valve(gamma, beta, z, p)), y)
                z_g = self.valve(gamma, beta, z, g)
                cosines = torch.stack([F.cosine_similarity(z_g, table["e"][k][None]) for k in range(CLASSES)], 1)
                loss = loss + F.cross_entropy(cosines, y)
                loss = loss + self.lam * (z_g - self.embeddings[y]).square().sum().sqrt()
                phi, own, gamma, beta, table = sgd_step(loss, [phi, own, gamma, beta, table], self.lr, self.decays)
        self.heads[i], self.own[i] = own, table["e"]
        self.trained[i] = lambda x: head_outputs(own, self.valve(gamma, beta, features(phi, x), p))
        return phi, gamma, beta, table

    def received(self, t: int, i: int, x: Tensor) -> Tensor:
        return head_outputs(
            self.heads[i], self.valve(self.gamma, self.beta, features(self.phi, x), self.context(t, i)[0])
        )


@pytest.mark.parametrize("contexts", ["received", "own"])
def test_gpfl_equals_literal_version(problem: Problem, contexts: Any) -> None:
    fields: dict[str, Any] = {"lam": 0.2, "mu": 0.3, "weight_decay": 0.1, "contexts": contexts}
    run, literal = problem.run(GPFL(**fields), SCHEDULE), LiteralGPFL(problem, SCHEDULE, **fields)
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
@pytest.mark.parametrize(("method", "blocks"), [(FedCP(), ["policy"]), (GPFL(), ["gain", "offset"])])
def test_added_layers_depend_on_seed_only(problem: Problem, method: ft.Method, blocks: list[str]) -> None:
    state = torch.random.get_rng_state()
    first, again, other = (problem.initial_server(method, seed) for seed in (0, 0, 1))
    assert torch.equal(state, torch.random.get_rng_state())
    assert same(first, again) and not same(first, other, 1e-3)
    for name in blocks:
        block = (first | first.get("valve", {}))[name]
        assert all(
            0.3 < float(block[part].abs().max()) <= WIDTH**-0.5 for part in ("weight", "bias")
        )  # as in nn.Linear
        assert block["weight"].is_contiguous()
    assert len(blocks) == 1 or not same(first["valve"]["gain"], first["valve"]["offset"], 1e-3)
