"""DBE, FedCP and GPFL against literal versions written from their specifications, in their limits and traps."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import TinyNet, refusal, same, tiny_federation
from fedtailor import hashing
from fedtailor.method import Setup
from fedtailor.methods.one_model import FedAvg
from fedtailor.methods.representations import DBE, GPFL, FedCP
from fedtailor.methods.two_models import Local
from fedtailor.trees import Tree
from problem import PARTIAL, Problem, Weights, make_problem

SCHEDULE = [[0, 1, 2, 3], [1, 2, 4], [0, 4]]  # client 4 comes late, client 0 stays away once
WIDTH, CLASSES = 4, 3  # of the head of the problem's network
EACH = pytest.mark.parametrize("method", [DBE(), FedCP(), GPFL()], ids=lambda method: type(method).__name__)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem()


# the network by hand


def features(weights: Weights, x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ weights["fc1.weight"].T + weights["fc1.bias"])
    return torch.tanh(hidden @ weights["fc2.weight"].T + weights["fc2.bias"])


def head(weights: Weights, z: Tensor) -> Tensor:
    return z @ weights["head.weight"].T + weights["head.bias"]


def dense(block: Weights, x: Tensor) -> Tensor:
    return x @ block["weight"].T + block["bias"]


def layer_norm(block: Weights, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * block["scale"] + block["shift"]


def is_head(name: str) -> bool:
    return name.startswith("head.")


def body_of(weights: Weights) -> Weights:
    return {name: w for name, w in weights.items() if not is_head(name)}


def head_of(weights: Weights) -> Weights:
    return {name: w for name, w in weights.items() if is_head(name)}


def live(weights: Weights) -> Weights:
    return {name: w.detach().clone().requires_grad_() for name, w in weights.items()}


def descend(loss: Tensor, groups: Sequence[Weights], lr: float, decays: Sequence[float]) -> list[Weights]:
    """One step of plain SGD on every group of weights, each with its own weight decay."""
    every = [w for group in groups for w in group.values()]
    slopes = iter(torch.autograd.grad(loss, every, allow_unused=True))
    stepped = []
    for group, decay in zip(groups, decays, strict=True):
        moved = {}
        for name, w in group.items():
            slope = next(slopes)
            moved[name] = w.detach() - lr * ((0 if slope is None else slope) + decay * w.detach())
        stepped.append(moved)
    return stepped


def average(problem: Problem, clients: Sequence[int], uploads: Sequence[Weights]) -> Weights:
    total = sum(problem.sizes[i] for i in clients)
    return {
        name: sum(
            (problem.sizes[i] / total * up[name] for i, up in zip(clients, uploads, strict=True)), torch.zeros(())
        )
        for name in uploads[0]
    }


def begin(method: ft.Method, problem: Problem, seed: int = 0) -> Tree:
    """The server before round 1: where a policy or a valve begins is the library's to say."""
    sizes = torch.tensor(problem.sizes)
    return method.init_server(Setup(ft.wrap(problem.net), problem.start, problem.num_clients, sizes, 3, seed))


def loss_on_test(problem: Problem, client: int, answer: Callable[[Tensor], Tensor]) -> float:
    samples = problem.fed.test[client]
    return float(F.cross_entropy(answer(problem.fed.x[samples]), problem.fed.y[samples]))


# DBE


class LiteralDBE:
    """The specification of DBE with the phase before round 1 inside it."""

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
            self.theta = average(problem, clients, [self.trained[i] for i in clients])
            if t == 1:
                self.consensus = sum(
                    (problem.sizes[i] / total * m for i, m in zip(clients, means, strict=True)), torch.zeros(())
                )

    def initial_mean(self, i: int) -> Tensor:
        """Normal local epochs from θ⁰ without DBE; the weights are thrown away."""
        theta, r = self.problem.start, torch.zeros(WIDTH, dtype=torch.float64)
        for e in range(self.epochs):
            for batch in self.problem.batches(1, i, e):
                theta = live(theta)
                z = features(theta, self.problem.fed.x[batch])
                r = (1 - self.mu) * r + self.mu * z.mean(0).detach()
                loss = F.cross_entropy(head(theta, z), self.problem.fed.y[batch])
                [theta] = descend(loss, [theta], self.lr, [0.0])
        return r

    def client(self, t: int, i: int) -> Weights:
        theta, r = self.theta, torch.zeros(WIDTH, dtype=torch.float64)
        for e in range(self.epochs):
            for batch in self.problem.batches(t, i, e):
                theta, own = live(theta), live({"bias": self.bias[i]})
                z = features(theta, self.problem.fed.x[batch])
                r = (1 - self.mu) * r.detach() + self.mu * z.mean(0)
                loss = F.cross_entropy(head(theta, z + own["bias"]), self.problem.fed.y[batch])
                if t > 1:
                    loss = loss + self.kappa * (0.5 * (r - self.consensus) ** 2).mean()
                theta, own = descend(loss, [theta, own], self.lr, [0.0, 0.0])
                self.bias[i] = own["bias"]
        return theta

    def received(self, i: int, x: Tensor) -> Tensor:
        return head(self.theta, features(self.theta, x) + self.bias[i])


@pytest.mark.parametrize("mu", [1.0, 0.3])
def test_dbe_by_hand(problem: Problem, mu: float) -> None:
    run = problem.run(DBE(kappa=3.0, mu=mu), SCHEDULE)
    literal = LiteralDBE(problem, SCHEDULE, kappa=3.0, mu=mu)
    assert same(run.server["params"], literal.theta, 1e-10)
    assert torch.allclose(run.server["consensus"], literal.consensus, atol=1e-10)
    for i in range(5):
        assert torch.allclose(run.client(i)["memory"], literal.bias[i], atol=1e-10)
        assert same(run.personal(i, "received"), {**literal.theta, "memory": literal.bias[i]}, 1e-10)
        trained = {k: v for k, v in run.personal(i, "trained").items() if k != "memory"}
        assert same(trained, literal.trained[i], 1e-10)
        loss = loss_on_test(problem, i, partial(literal.received, i))
        assert run.records[-1]["per_client"]["loss_received"][i] == pytest.approx(loss, abs=1e-10)


@pytest.mark.parametrize("extra", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_dbe_without_pull_and_memory_is_fedavg(problem: Problem, extra: dict[str, Any]) -> None:
    debiased = problem.run(DBE(kappa=0.0, memory=False, **extra), PARTIAL)
    plain = problem.run(FedAvg(**extra), PARTIAL)
    assert same(debiased.server["params"], plain.server["params"])  # to the last bit
    assert debiased.records[-1]["loss_received"] == plain.records[-1]["loss_received"]


def test_dbe_without_pull_and_memory_is_fedavg_also_with_batch_normalisation() -> None:
    class Normed(TinyNet):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.norm(self.fc(x))))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net, fed = Normed().double(), tiny_federation()
    debiased, plain = (
        ft.simulate(m, net, fed, schedule=[[0, 1, 2, 3], [0, 3]], batch_size=3, dtype=torch.float64).server["params"]
        for m in (DBE(kappa=0.0, memory=False, weight_decay=0.01), FedAvg(weight_decay=0.01))
    )
    assert same(debiased, plain)


def test_dbe_in_round_1_has_no_pull(problem: Problem) -> None:
    """There is no consensus yet, so κ does not count; from round 2 on it does."""
    one, other = (problem.run(DBE(kappa=k), SCHEDULE[:1]) for k in (0.0, 50.0))
    assert same(one.server, other.server)
    one, other = (problem.run(DBE(kappa=k), SCHEDULE[:2]) for k in (0.0, 50.0))
    assert not same(one.server["params"], other.server["params"], 1e-6)


def test_dbe_with_a_strong_pull_brings_mean_features_to_the_consensus(problem: Problem) -> None:
    apart = []
    for kappa in (0.0, 5.0, 20.0):
        run = problem.run(DBE(kappa=kappa, lr=0.02), [[0, 1, 2, 4]] * 4)
        z = [features(run.personal(i), problem.fed.x[problem.fed.train[i]]).mean(0) for i in (0, 2, 4)]
        apart.append(sum(float((m - run.server["consensus"]).square().sum()) for m in z))
    assert apart[0] > apart[1] > apart[2]


def test_dbe_sends_its_vectors_once(problem: Problem) -> None:
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


@pytest.mark.parametrize("field", [{"kappa": 0.0}, {"memory": False}, {"mu": 0.3}])
def test_every_part_of_dbe_has_an_effect(problem: Problem, field: dict[str, Any]) -> None:
    assert not same(
        problem.run(DBE(), SCHEDULE).server["params"], problem.run(DBE(**field), SCHEDULE).server["params"], 1e-6
    )


# FedCP


def gumbel(problem: Problem, t: int, i: int, e: int, position: int, rows: int) -> Tensor:
    """The noise of a batch: like the order of batches, the library's to say."""
    key = hashing.key(hashing.key(problem.seed, t, e, torch.tensor(i), position), 3, 0)
    u = hashing.uniform(key, (rows, 2, WIDTH), torch.float64, torch.device("cpu"))
    return -torch.log(-torch.log(u))


class LiteralFedCP:
    """The specification of FedCP, context from the own head whenever a common head arrives."""

    def __init__(self, problem: Problem, schedule: Sequence[Sequence[int]], lam: float, tau: float, lr: float) -> None:
        self.problem, self.lam, self.tau, self.lr, self.epochs = problem, lam, tau, lr, 2
        self.theta, self.policy = problem.start, begin(FedCP(), problem)["policy"]
        self.heads = [head_of(problem.start) for _ in problem.sizes]
        self.trained: dict[int, Callable[[Tensor], Tensor]] = {}
        for t, clients in enumerate(schedule, start=1):
            uploads = [self.client(t, i) for i in clients]
            self.theta = average(problem, clients, [u[0] for u in uploads])
            self.policy = average(problem, clients, [u[1] for u in uploads])

    def context(self, i: int) -> Tensor:
        total = sum((self.heads[i]["head.weight"][k] for k in range(CLASSES)), torch.zeros(()))
        return total / total.square().sum().sqrt()

    def answer(
        self, phi: Weights, own: Weights, common: Weights, policy: Weights, c: Tensor, x: Tensor, noise: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        z = features(phi, x)
        a = torch.clamp(layer_norm(policy, dense(policy, z * c)), min=0).reshape(len(x), 2, WIDTH)
        odds = torch.exp((a + noise) / self.tau)
        r, s = odds[:, 0] / odds.sum(1), odds[:, 1] / odds.sum(1)
        return z, head(own, r * z) + head(common, s * z)

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
        frozen, common, c = body_of(self.theta), head_of(self.theta), self.context(i)
        phi, own, policy = frozen, self.heads[i], self.policy
        for e in range(self.epochs):
            for position, batch in enumerate(self.problem.batches(t, i, e)):
                phi, own, policy = live(phi), live(own), live(policy)
                x, y = self.problem.fed.x[batch], self.problem.fed.y[batch]
                noise = gumbel(self.problem, t, i, e, position, len(batch))
                z, outputs = self.answer(phi, own, common, policy, c, x, noise)
                loss = F.cross_entropy(outputs, y) + self.lam * self.discrepancy(z, features(frozen, x))
                phi, own, policy = descend(loss, [phi, own, policy], self.lr, [0.0] * 3)
        self.heads[i] = own
        self.trained[i] = lambda x: self.answer(phi, own, common, policy, c, x, 0.0)[1]
        return {**phi, **{n: 0.5 * own[n] + 0.5 * common[n] for n in own}}, policy

    def received(self, i: int, x: Tensor) -> Tensor:
        return self.answer(
            body_of(self.theta), self.heads[i], head_of(self.theta), self.policy, self.context(i), x, 0.0
        )[1]


def test_fedcp_by_hand(problem: Problem) -> None:
    """Also what is evaluated: the plain softmax; after training with the common head and the context of training."""
    run = problem.run(FedCP(lam=0.7, tau=1.3, lr=0.3), SCHEDULE)
    literal = LiteralFedCP(problem, SCHEDULE, lam=0.7, tau=1.3, lr=0.3)
    assert same(run.server, {"params": literal.theta, "policy": literal.policy}, 1e-10)
    losses = run.records[-1]["per_client"]
    for i in range(5):
        assert same(run.client(i)["head"], literal.heads[i], 1e-10)
        loss = loss_on_test(problem, i, partial(literal.received, i))
        assert losses["loss_received"][i] == pytest.approx(loss, abs=1e-10)
    for i in SCHEDULE[-1]:
        assert losses["loss_trained"][i] == pytest.approx(loss_on_test(problem, i, literal.trained[i]), abs=1e-10)


def test_fedcp_at_a_high_temperature_gives_each_head_half(problem: Problem) -> None:
    """τ → ∞: r = s = ½, and the policy learns nothing. Then the answer is ½(W_i + W_g) z + b_i + b_g."""
    run = problem.run(FedCP(tau=1e9, lam=0.0), SCHEDULE[:1])
    assert same(run.server["policy"], begin(FedCP(), problem)["policy"], 1e-8)
    common = head_of(problem.start)
    for i in SCHEDULE[0]:
        phi, own = body_of(problem.start), common
        for e in range(2):
            for batch in problem.batches(1, i, e):
                phi, own = live(phi), live(own)
                z = features(phi, problem.fed.x[batch])
                outputs = head(own, z / 2) + head(common, z / 2)
                phi, own = descend(F.cross_entropy(outputs, problem.fed.y[batch]), [phi, own], 0.1, [0.0, 0.0])
        assert same(run.client(i)["head"], own, 1e-7)


@pytest.mark.parametrize("field", [{"lam": 0.0}, {"tau": 5.0}])
def test_every_part_of_fedcp_has_an_effect(problem: Problem, field: dict[str, Any]) -> None:
    one, other = (problem.run(m, SCHEDULE).server for m in (FedCP(), FedCP(**field)))
    assert not same(one, other, 1e-6)


def test_fedcp_learns_its_policy_and_its_heads_apart(problem: Problem) -> None:
    run = problem.run(FedCP(), SCHEDULE)
    assert all(
        float((run.server["policy"][n] - w).abs().max()) > 1e-6 for n, w in begin(FedCP(), problem)["policy"].items()
    )
    assert not same(run.client(0)["head"], run.client(1)["head"], 1e-6)


def test_fedcp_context_is_that_of_the_start_for_ever(problem: Problem) -> None:
    """Softmax's slopes by the rows of a linear head sum to zero: so says the definition, whatever is trained."""
    run, total = problem.run(FedCP(), SCHEDULE), problem.start["head.weight"].sum(0)
    for client in range(5):
        assert torch.allclose(run.personal(client)["context"], total / total.norm(), atol=1e-12)


def test_fedcp_evaluates_without_noise_and_trains_with_fresh_noise(problem: Problem) -> None:
    """The same model answers the same twice; two epochs over one whole batch see different noise."""
    fed = tiny_federation((6,))
    run, again = (ft.simulate(FedCP(), problem.net, fed, rounds=2, batch_size=6, dtype=torch.float64) for _ in range(2))
    assert run.records[-1]["loss_received"] == again.records[-1]["loss_received"]
    noises = [gumbel(problem, t, i, e, b, 3) for t in (1, 2) for i in (0, 1) for e in (0, 1) for b in (0, 1)]
    assert all(not torch.equal(a, b) for k, a in enumerate(noises) for b in noises[:k])


def test_fedcp_with_a_strong_pull_keeps_its_features(problem: Problem) -> None:
    """The larger λ, the less the distribution of features leaves that of the received body."""
    moved = []
    for lam in (0.0, 5.0, 20.0):
        run = problem.run(FedCP(lam=lam, lr=0.02, epochs=4), [[0]])
        x = problem.fed.x[problem.fed.train[0]]
        moved.append(float((features(run.personal(0), x) - features(problem.start, x)).mean(0).square().sum()))
    assert moved[0] > moved[1] > moved[2] > 0


def test_statistics_of_batch_normalisation_are_the_trained_bodys() -> None:
    """FedCP runs two bodies on a batch; what it keeps are the statistics of its own, not of the received one."""
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
    """The specification of GPFL; contexts from received embeddings, or as the code has them."""

    def __init__(
        self, problem: Problem, schedule: Sequence[Sequence[int]], lam: float, mu: float, contexts: str = "received"
    ) -> None:
        start = begin(GPFL(), problem)
        self.problem, self.lam, self.mu, self.lr, self.epochs = problem, lam, mu, 0.1, 2
        self.phi, self.embeddings = body_of(problem.start), start["embeddings"]
        self.gamma, self.beta = start["valve"]["gain"], start["valve"]["offset"]
        self.heads = [head_of(problem.start) for _ in problem.sizes]
        self.own = [torch.zeros_like(self.embeddings) for _ in problem.sizes]
        self.contexts = contexts
        self.trained: dict[int, Callable[[Tensor], Tensor]] = {}
        for t, clients in enumerate(schedule, start=1):
            uploads = [self.client(t, i) for i in clients]
            self.phi, self.gamma, self.beta, table = (
                average(problem, clients, [upload[part] for upload in uploads]) for part in range(4)
            )
            self.embeddings = table["e"]

    def context(self, t: int, i: int) -> tuple[Tensor, Tensor]:
        """p_i and g."""
        e = self.embeddings if self.contexts == "received" else self.own[i]
        if t == 1:
            e = torch.zeros_like(e)
        y = self.problem.fed.y[self.problem.everything(i)].tolist()
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
                phi, own, gamma, beta, table = live(phi), live(own), live(gamma), live(beta), live(table)
                x, y = self.problem.fed.x[batch], self.problem.fed.y[batch]
                z = features(phi, x)
                loss = F.cross_entropy(head(own, self.valve(gamma, beta, z, p)), y)
                z_g = self.valve(gamma, beta, z, g)
                cosines = torch.stack([F.cosine_similarity(z_g, table["e"][k][None]) for k in range(CLASSES)], 1)
                loss = loss + F.cross_entropy(cosines, y)
                loss = loss + self.lam * (z_g - self.embeddings[y]).square().sum().sqrt()
                phi, own, gamma, beta, table = descend(
                    loss, [phi, own, gamma, beta, table], self.lr, [0.0, 0.0, self.mu, self.mu, self.mu]
                )
        self.heads[i], self.own[i] = own, table["e"]
        self.trained[i] = lambda x: head(own, self.valve(gamma, beta, features(phi, x), p))
        return phi, gamma, beta, table

    def received(self, t: int, i: int, x: Tensor) -> Tensor:
        return head(self.heads[i], self.valve(self.gamma, self.beta, features(self.phi, x), self.context(t, i)[0]))


@pytest.mark.parametrize("contexts", ["received", "own"])
def test_gpfl_by_hand(problem: Problem, contexts: Any) -> None:
    run = problem.run(GPFL(lam=0.2, mu=0.3, contexts=contexts), SCHEDULE)
    literal = LiteralGPFL(problem, SCHEDULE, lam=0.2, mu=0.3, contexts=contexts)
    assert same(run.server["params"], literal.phi, 1e-10)
    assert same(run.server["valve"], {"gain": literal.gamma, "offset": literal.beta}, 1e-10)
    assert torch.allclose(run.server["embeddings"], literal.embeddings, atol=1e-10)
    losses = run.records[-1]["per_client"]
    for i in range(5):
        assert same(run.client(i)["head"], literal.heads[i], 1e-10)
        loss = loss_on_test(problem, i, partial(literal.received, 4, i))
        assert losses["loss_received"][i] == pytest.approx(loss, abs=1e-10)
    for i in SCHEDULE[-1]:
        assert losses["loss_trained"][i] == pytest.approx(loss_on_test(problem, i, literal.trained[i]), abs=1e-10)


@pytest.mark.parametrize("field", [{"lam": 0.0}, {"mu": 0.0}, {"contexts": "own"}])
def test_every_part_of_gpfl_has_an_effect(problem: Problem, field: dict[str, Any]) -> None:
    one, other = (problem.run(m, SCHEDULE).server for m in (GPFL(), GPFL(**field)))
    assert not same(one, other, 1e-6)


def test_gpfl_is_guided_by_angles_alone_too(problem: Problem) -> None:
    """Without magnitude and decay, embeddings of classes still turn, and away from nothing else: their own direction
    does not stretch by the angle loss, for a cosine does not see lengths."""
    run = problem.run(GPFL(lam=0.0, mu=0.0, lr=1e-4, epochs=1), [[0]])
    before, after = begin(GPFL(), problem)["embeddings"], run.server["embeddings"]
    moved = after - before
    assert float(moved.abs().max()) > 1e-7
    assert float((moved * before).sum(1).abs().max()) < 1e-3 * float((moved.norm(dim=1) * before.norm(dim=1)).max())


def test_gpfl_decays_only_embeddings_and_valve(problem: Problem) -> None:
    """weight_decay is the body's and the head's; with both alike it is that of everything."""
    alike = problem.run(GPFL(mu=0.05, weight_decay=0.05), SCHEDULE).server
    literal = LiteralGPFL(problem, SCHEDULE, lam=0.01, mu=0.05)
    assert not same(alike["params"], literal.phi, 1e-6)
    one = problem.run(GPFL(mu=0.05, weight_decay=0.05, lr=1e-3, epochs=1), [[3]]).server["embeddings"]
    other = problem.run(GPFL(mu=0.05, lr=1e-3, epochs=1), [[3]]).server["embeddings"]
    assert torch.allclose(one, other, atol=1e-12)  # one step of the client with one sample: body's decay not yet seen


def test_gpfl_contexts_are_zero_in_round_1_and_the_clients_own_later(problem: Problem) -> None:
    run = problem.run(GPFL(), SCHEDULE[:1])
    assert all(float(run.personal(i, "trained")["context"].abs().max()) == 0 for i in SCHEDULE[0])
    embeddings = run.server["embeddings"]
    for i in range(5):
        y = problem.fed.y[problem.fed.train[i]]
        expected = torch.stack([(y == k).double().mean() * embeddings[k] for k in range(CLASSES)]).sum(0)
        assert torch.allclose(run.personal(i, "received")["context"], expected, atol=1e-12)


def test_gpfl_listens_to_its_context_for_long() -> None:
    """A decay as strong as the paper's, at our learning rate, would have silenced it after so many steps."""

    def heard(method: GPFL) -> float:
        """How much the valve's gain differs between the contexts of two clients."""
        run = problem.run(method, [[0, 1, 2, 3, 4]] * 40)
        gains = [gain_of(run.server["valve"]["gain"], run.client(i)["context"]) for i in (0, 3)]
        return float((gains[0] - gains[1]).abs().max())

    def gain_of(block: Weights, context: Tensor) -> Tensor:
        return layer_norm(block, torch.relu(dense(block, context)))

    problem = make_problem()
    assert heard(GPFL()) > 10 * heard(GPFL(mu=0.1))


def test_gpfl_embeddings_of_classes_nobody_has_stay_finite() -> None:
    """One class only, one sample only: norms and cosines have slopes."""
    fed = tiny_federation((1, 1))
    torch.manual_seed(0)
    run = ft.simulate(GPFL(lr=0.5), TinyNet().double(), fed, rounds=4, batch_size=4, dtype=torch.float64)
    assert run.records[-1]["diverged"] == []
    assert all(bool(leaf.isfinite().all()) for leaf in run.server["valve"]["gain"].values())


# all three


@EACH
def test_is_neither_local_nor_fedavg(problem: Problem, method: ft.Method) -> None:
    mine, alone, common = (problem.run(m, SCHEDULE) for m in (method, Local(), FedAvg()))
    for other in (alone, common):
        names = [name for name in problem.start if not is_head(name)]
        for moment in ("received", "trained"):
            a, b = ({n: r.personal(0, moment)[n] for n in names} for r in (mine, other))
            assert not same(a, b, 1e-6)
    losses = mine.records[-1]["per_client"]["loss_received"]
    assert all(losses[i] != common.records[-1]["per_client"]["loss_received"][i] for i in range(5))


@EACH
def test_only_classifiers_with_a_linear_head_are_taken(method: ft.Method) -> None:
    net = TinyNet().double()
    net.head = nn.Sequential(nn.Linear(5, 3).double())  # type: ignore[assignment]
    assert "classify" in refusal(lambda: ft.simulate(method, net, tiny_federation(), rounds=1, dtype=torch.float64))


def test_fedcp_refuses_a_head_whose_weights_another_layer_uses() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    net[2].weight = net[0].weight
    fed = tiny_federation()
    run = partial(ft.simulate, FedCP(), ft.wrap(net, head="2"), fed, rounds=1, dtype=torch.float64)
    assert "another layer" in refusal(run)


@pytest.mark.parametrize("method", [FedCP(), GPFL()], ids=["FedCP", "GPFL"])
def test_added_networks_begin_from_the_seed_alone(problem: Problem, method: ft.Method) -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first, again, other = begin(method, problem), begin(method, problem), begin(method, problem, seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert same(first, again) and not same(first, other, 1e-3)
    blocks = [first["policy"]] if "policy" in first else [first["valve"]["gain"], first["valve"]["offset"]]
    for block in blocks:
        for name in ("weight", "bias"):
            assert 0.3 < float(block[name].abs().max()) <= WIDTH**-0.5  # as nn.Linear begins
        assert block["weight"].is_contiguous()
    if len(blocks) == 2:
        assert not same(blocks[0], blocks[1], 1e-3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DBE(kappa=-1.0), "kappa must be at least 0"),
        (lambda: DBE(mu=0.0), "mu must be above 0"),
        (lambda: FedCP(lam=-1.0), "lam must be at least 0"),
        (lambda: FedCP(tau=0.0), "tau must be above 0"),
        (lambda: GPFL(lam=-1.0), "lam must be at least 0"),
        (lambda: GPFL(mu=-1.0), "mu must be at least 0"),
        (lambda: GPFL(contexts="sent"), "contexts must be 'received' or 'own'"),  # type: ignore[arg-type]
    ],
)
def test_senseless_fields_are_refused_in_words(make: Any, words: str) -> None:
    assert words in refusal(make)
