"""FedProto, FedGH and FedPAC against literal versions, their limits, and traps that public code falls into."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import TinyNet, refusal, same, tiny_federation
from fedtailor.classes import merge_rows
from fedtailor.methods import FedAlt, FedAvg, FedGH, FedPAC, FedProto, Local
from fedtailor.simplex import least_mixtures
from fedtailor.trees import Rows, Tree, unflatten
from problem import Weights, make_problem

SCHEDULE = [[0, 1, 2, 3], [4, 0, 2], [1, 2, 3, 4]]  # client 4 comes late, nobody is always there
SGD: dict[str, Any] = {"momentum": 0.5, "weight_decay": 0.01, "epochs": 2}
PLAIN = {"momentum": 0.0, "weight_decay": 0.0}
PROBLEM = make_problem()
CLASSES, WIDTH = 3, 4
HEAD = ("head.weight", "head.bias")
Means = dict[int, Tensor]  # class -> mean feature


# what the literal versions share: SGD, features, class means


def features_of(weights: Weights, x: Tensor) -> Tensor:
    hidden = torch.tanh(F.linear(x, weights["fc1.weight"], weights["fc1.bias"]))
    return torch.tanh(F.linear(hidden, weights["fc2.weight"], weights["fc2.bias"]))


def logits_of(weights: Weights, x: Tensor) -> Tensor:
    return F.linear(features_of(weights, x), *(weights[name] for name in HEAD))


def descend(
    weights: Weights,
    names: Sequence[str],
    loss: Callable[[Weights, Tensor], Tensor],
    round: int,
    client: int,
    lr: float,
    epochs: int,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Weights:
    """SGD on some of the weights, others held."""
    weights = dict(weights)
    velocity: Weights = {}
    for number in range(epochs):
        for batch in PROBLEM.batches(round, client, number):
            live = {n: w.detach().clone().requires_grad_(n in names) for n, w in weights.items()}
            slopes = torch.autograd.grad(loss(live, batch), [live[n] for n in names], materialize_grads=True)
            for name, slope in zip(names, slopes, strict=True):
                slope = slope + weight_decay * weights[name]
                velocity[name] = momentum * velocity[name] + slope if name in velocity else slope
                weights[name] = weights[name] - lr * velocity[name]
    return weights


def class_means(weights: Weights, client: int) -> tuple[Means, dict[int, int]]:
    """The mean feature of every class a client has, and how many samples."""
    members: dict[int, list[Tensor]] = {}
    for sample in PROBLEM.everything(client):
        members.setdefault(int(PROBLEM.fed.y[sample]), []).append(features_of(weights, PROBLEM.fed.x[sample]))
    return {k: sum(own) / len(own) for k, own in members.items()}, {k: len(own) for k, own in members.items()}  # type: ignore[misc]


def pull(weights: Weights, batch: Tensor, centres: Means) -> Tensor:
    """The mean over batch and dimensions of (z − c_y)²; an example whose class has no c_y adds 0."""
    total = torch.zeros((), dtype=torch.float64)
    for sample in batch:
        label = int(PROBLEM.fed.y[sample])
        if label in centres:
            total = total + (features_of(weights, PROBLEM.fed.x[sample]) - centres[label]).square().sum()
    return total / (len(batch) * WIDTH)


def average(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        total = total + weight / sum(weights) * part
    return total


def update(centres: Means, means: Sequence[Means], counts: Sequence[dict[int, float]]) -> None:
    """Every class that somebody has: the mean over its owners by their counts."""
    for k in range(CLASSES):
        owners = [i for i, own in enumerate(means) if k in own]
        if owners:
            centres[k] = average([means[i][k] for i in owners], [counts[i][k] for i in owners])


def equal(found: Tree, wanted: Weights, tolerance: float = 1e-10) -> bool:
    return all(float((found[name] - weight).abs().max()) < tolerance for name, weight in wanted.items())


def equal_rows(found: Rows, wanted: Means) -> bool:
    assert found.present.tolist() == [k in wanted for k in range(CLASSES)]
    return all(float((found.values[k] - mean).abs().max()) < 1e-10 for k, mean in wanted.items())


@cache
def go(method: ft.Method, rounds: int = len(SCHEDULE)) -> ft.Run:
    """The library's run; asked for again, the same."""
    return PROBLEM.run(method, SCHEDULE[:rounds])


def answers(method: ft.Method, run: ft.Run, client: int, x: Tensor, moment: str = "received") -> Tensor:
    """What a client's own model says."""
    return method.logits(ft.wrap(PROBLEM.net), unflatten(run.personal(client, moment)), x)


def models(run: ft.Run, moment: str = "trained") -> list[Weights]:
    names = [name for name, _ in PROBLEM.net.named_parameters()]
    return [{n: run.personal(client, moment)[n] for n in names} for client in range(run.num_clients)]


def alike(a: ft.Run, b: ft.Run, moment: str = "trained", tolerance: float = 0.0) -> bool:
    return all(same(x, y, tolerance) for x, y in zip(models(a, moment), models(b, moment), strict=True))


# FedProto


@dataclass
class LiteralProto:
    own: list[Weights]
    centres: Means = field(default_factory=dict)
    before: Means = field(default_factory=dict)  # the last round's message


def literal_fedproto(lam: float, uniform: bool, lr: float, **sgd: Any) -> LiteralProto:
    now = LiteralProto([PROBLEM.start for _ in range(5)])
    for t, clients in enumerate(SCHEDULE, start=1):
        now.before = dict(now.centres)
        means: list[Means] = []
        counts: list[dict[int, float]] = []
        for i in clients:

            def loss(weights: Weights, batch: Tensor) -> Tensor:
                return PROBLEM.loss(weights, batch) + lam * pull(weights, batch, now.before)

            now.own[i] = descend(now.own[i], list(PROBLEM.start), loss, t, i, lr, **sgd)
            mean, count = class_means(now.own[i], i)
            means.append(mean)
            counts.append({k: 1 if uniform else n for k, n in count.items()})
        update(now.centres, means, counts)
    return now


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_fedproto_by_hand(weights: Any) -> None:
    run = go(FedProto(lr=0.1, lam=0.7, weights=weights, **SGD))
    told = literal_fedproto(0.7, weights == "uniform", lr=0.1, **SGD)
    assert equal_rows(run.server["prototypes"], told.centres)
    for i in range(5):
        assert equal(run.client(i)["params"], told.own[i])


@pytest.mark.parametrize(("moment", "which"), [("received", "centres"), ("trained", "before")])
def test_fedproto_answers_by_the_nearest_prototype_of_the_clients_classes(moment: str, which: str) -> None:
    method, x = FedProto(lr=0.1), torch.randn(40, 4, dtype=torch.float64) * 2
    run, told = go(method), literal_fedproto(1.0, False, lr=0.1, epochs=2)
    centres: Means = getattr(told, which)
    lacking = 0
    for i in SCHEDULE[-1]:
        classes = sorted({int(k) for k in PROBLEM.fed.y[PROBLEM.everything(i)]})
        lacking += len(classes) < CLASSES
        found = answers(method, run, i, x, moment)
        for row, z in zip(found, features_of(told.own[i], x), strict=True):
            distances = {k: float((z - centres[k]).square().sum()) for k in classes}
            assert int(row.argmax()) == min(classes, key=lambda k: distances[k])
            assert all(abs(float(row[k]) + distances[k]) < 1e-9 for k in classes)
            assert all(float(row[k]) < -max(distances.values()) for k in range(CLASSES) if k not in classes)
        assert bool(found.isfinite().all())
    assert lacking  # somebody lacks classes, so that the restriction was seen


def test_fedproto_answers_by_its_head_before_it_can_by_prototypes() -> None:
    """Before round 1; as trained in round 1; and while one of the client's classes has no prototype."""
    method, x = FedProto(lr=0.1), torch.randn(9, 4, dtype=torch.float64)
    run = PROBLEM.run(method, [[3]])  # client 3 has one sample, so one class
    own = {i: {int(k) for k in PROBLEM.fed.y[PROBLEM.everything(i)]} for i in range(5)}
    assert len(own[3]) == 1 and not own[0] <= own[3]
    assert torch.equal(answers(method, run, 0, x, "trained"), logits_of(PROBLEM.start, x))
    assert torch.equal(answers(method, run, 0, x, "received"), logits_of(PROBLEM.start, x))
    assert torch.equal(answers(method, run, 3, x, "trained"), logits_of(run.client(3)["params"], x))
    assert set(answers(method, run, 3, x, "received").argmax(1).tolist()) == own[3]


def test_fedproto_without_pull_trains_alone() -> None:
    plain = {"lr": 0.1, **SGD}
    run, alone = go(FedProto(lam=0.0, **plain)), go(Local(**plain))
    assert alike(run, alone, tolerance=1e-12) and alike(run, alone, "received", 1e-12)
    by_head = go(FedProto(lam=0.0, answer="head", **plain))
    assert by_head.records[-1]["loss_received"] == pytest.approx(alone.records[-1]["loss_received"], rel=1e-10)
    assert run.records[-1]["loss_received"] != pytest.approx(alone.records[-1]["loss_received"], rel=1e-3)


def test_fedproto_is_alone_in_round_one_and_then_drawn_to_the_prototypes() -> None:
    alone = go(Local(lr=0.1), 1)
    assert alike(go(FedProto(lr=0.1), 1), alone, tolerance=1e-12)
    spread = []
    for lam in (0.0, 1.0, 10.0):
        run = PROBLEM.run(FedProto(lr=0.1, lam=lam), [[0, 1, 2]] * 3)
        means = [class_means(run.client(i)["params"], i)[0] for i in (0, 1, 2)]
        of = [torch.stack([own[k] for own in means if k in own]) for k in range(CLASSES)]
        spread.append(sum(float(rows.var(0).sum()) for rows in of if len(rows) > 1))
    assert spread[0] > spread[1] > spread[2] > 0


def test_fedproto_one_model_of_nobody() -> None:
    runs = [go(method) for method in (FedProto(lr=0.1), Local(lr=0.1), FedAvg(lr=0.1))]
    assert not any(alike(runs[0], other, moment, 1e-4) for other in runs[1:] for moment in ("received", "trained"))


def test_padding_is_nobodys_prototype() -> None:
    """A batch larger than the client's data is padded for batch normalisation, and mapped clients are padded too."""

    class Normed(TinyNet):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.norm(self.fc(x))))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net, fed = Normed().double(), tiny_federation((5, 3))
    run = ft.simulate(FedProto(lr=0.05), net, fed, rounds=1, batch_size=4, dtype=torch.float64, engine="sequential")
    params, model = [run.client(i)["params"] for i in range(2)], ft.wrap(net).serving
    total, counts = torch.zeros(3, 5, dtype=torch.float64), torch.zeros(3)
    for i in range(2):
        for sample in fed.train[i]:
            total[fed.y[sample]] += model.features(params[i], fed.x[sample][None])[0]
            counts[fed.y[sample]] += 1
    known = run.server["prototypes"]
    assert known.present.tolist() == (counts > 0).tolist()
    assert torch.allclose(known.values[known.present], (total / counts[:, None])[known.present], atol=1e-12)


# FedGH


def train_head(head: Weights, means: Sequence[Means], lr: float, epochs: int, batch: int) -> Weights:
    """One pass after another over (prototype, label), client by client."""
    pairs = [(mean, k) for own in means for k, mean in sorted(own.items())]
    for _ in range(epochs):
        for first in range(0, len(pairs), batch):
            some = pairs[first : first + batch]
            live = {n: w.detach().clone().requires_grad_() for n, w in head.items()}
            outputs = torch.stack([live["head.weight"] @ c + live["head.bias"] for c, _ in some])
            loss = F.cross_entropy(outputs, torch.tensor([k for _, k in some]))
            slopes = torch.autograd.grad(loss, [live[n] for n in HEAD])
            head = {n: head[n] - lr * slope for n, slope in zip(HEAD, slopes, strict=True)}
    return head


@pytest.mark.parametrize(("epochs", "batch"), [(1, 1), (2, 4)])
def test_fedgh_by_hand(epochs: int, batch: int) -> None:
    server: dict[str, Any] = {"server_lr": 0.2, "server_epochs": epochs, "server_batch": batch}
    run = go(FedGH(lr=0.1, **server, **SGD))
    own = [PROBLEM.start for _ in range(5)]
    head = {n: PROBLEM.start[n] for n in HEAD}
    for t, clients in enumerate(SCHEDULE, start=1):
        for i in clients:
            own[i] = descend({**own[i], **head}, list(PROBLEM.start), PROBLEM.loss, t, i, lr=0.1, **SGD)
        head = train_head(head, [class_means(own[i], i)[0] for i in clients], 0.2, epochs, batch)
    assert equal(run.server["params"], head)
    for i in range(5):
        assert equal(run.personal(i, "trained"), own[i])
        assert equal(run.personal(i, "received"), {**own[i], **head})


def test_fedgh_s_server_learns() -> None:
    """Public code steps another network: there the server's head never moves. Ours lowers its loss on prototypes."""
    methods = [FedGH(lr=0.1, server_lr=rate) for rate in (0.0, 0.1)]
    still, moving = (go(method) for method in methods)
    start = {n: PROBLEM.start[n] for n in HEAD}
    assert equal(still.server["params"], start, 1e-15) and not equal(moving.server["params"], start, 1e-2)

    def loss(run: ft.Run) -> float:
        pairs = [(mean, k) for i in SCHEDULE[-1] for k, mean in class_means(run.client(i)["params"], i)[0].items()]
        head = run.server["params"]
        outputs = torch.stack([head["head.weight"] @ c + head["head.bias"] for c, _ in pairs])
        return float(F.cross_entropy(outputs, torch.tensor([k for _, k in pairs])))

    assert loss(moving) < loss(still)


def test_fedgh_s_server_sees_no_absent_class() -> None:
    """A class nobody has is an absent row, not a sample of zeros: in one step its bias can only fall."""
    x, y = np.random.default_rng(0).normal(size=(4, 4)), np.array([0, 1, 0, 1])
    fed = ft.Federation.from_arrays([(x, y, x, y)], classes=CLASSES)
    method = FedGH(lr=0.1, server_lr=0.1, server_batch=100)
    run = ft.simulate(method, PROBLEM.net, fed, rounds=1, dtype=torch.float64)
    z, labels = features_of(run.client(0)["params"], fed.x[fed.train[0]]), fed.y[fed.train[0]]
    start = {n: PROBLEM.start[n] for n in HEAD}
    assert equal(run.server["params"], train_head(start, [{k: z[labels == k].mean(0) for k in (0, 1)}], 0.1, 1, 100))
    assert float(run.server["params"]["head.bias"][2]) < float(start["head.bias"][2])


def test_fedgh_s_first_round_is_training_alone_and_no_body_crosses() -> None:
    first, alone = go(FedGH(lr=0.1), 1), go(Local(lr=0.1), 1)
    assert alike(first, alone)
    run, later = go(FedGH(lr=0.1)), go(Local(lr=0.1))
    avg = go(FedAvg(lr=0.1))
    assert not any(alike(run, other, moment, 1e-4) for other in (later, avg) for moment in ("received", "trained"))
    heads = [{n: model[n] for n in HEAD} for model in models(run, "received")]
    bodies = [model["fc1.weight"] for model in models(run, "received")]
    assert all(same(heads[0], head) for head in heads)  # as received the head is everybody's,
    assert not torch.allclose(bodies[0], bodies[1], atol=1e-3)  # and the body nobody else's


def test_one_clients_head_is_not_the_servers() -> None:
    """In public code the server's head is the first client's object. Without server steps it must stay the start."""
    run = PROBLEM.run(FedGH(lr=0.1, server_lr=0.0), [[0, 1], [1, 0]])
    assert equal(run.server["params"], {n: PROBLEM.start[n] for n in HEAD}, 1e-15)
    assert not torch.allclose(run.personal(0, "trained")["head.weight"], PROBLEM.start["head.weight"], atol=1e-3)


# FedPAC: the best mixture


def enumerate_mixtures(P: Tensor) -> Tensor:
    """argmin αᵀPα over the simplex, by trying every support: on one, Pα is constant."""
    count, best, found = len(P), float("inf"), torch.zeros(len(P), dtype=torch.float64)
    for size in range(1, count + 1):
        for support in combinations(range(count), size):
            chosen = list(support)
            system = torch.zeros(size + 1, size + 1, dtype=torch.float64)
            system[:size, :size], system[:size, size], system[size, :size] = P[chosen][:, chosen], 1, 1
            goal = torch.zeros(size + 1, dtype=torch.float64)
            goal[size] = 1
            part = torch.linalg.lstsq(system, goal[:, None]).solution[:size, 0]
            weights = torch.zeros(count, dtype=torch.float64)
            weights[chosen] = part
            cost = float(weights @ P @ weights)
            if float(part.min()) >= -1e-14 and abs(float(part.sum()) - 1) < 1e-9 and cost < best:
                best, found = cost, weights
    return found


def matrices(H: Tensor, V: Tensor) -> list[Tensor]:
    """P^i of the paper, entry by entry."""
    count = len(H)
    return [
        torch.stack(
            [
                torch.stack([((H[i] - H[j]) * (H[i] - H[k])).sum() + (V[j] if j == k else 0.0) for k in range(count)])
                for j in range(count)
            ]
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("variance", [1.0, 0.01, 0.0])
def test_the_best_mixture_is_that_of_all_supports(seed: int, variance: float) -> None:
    torch.manual_seed(seed)
    H = torch.randn(6, 3, 4, dtype=torch.float64) + torch.randn(3, 4, dtype=torch.float64)
    V = variance * torch.rand(6, dtype=torch.float64)
    found = FedPAC(smallest=0.0)._weights(H, V)
    for weights, P in zip(found, matrices(H, V), strict=True):
        assert torch.allclose(weights, enumerate_mixtures(P), atol=1e-10)


@pytest.mark.parametrize("count", [1, 2, 9, 30])
def test_the_best_mixture_meets_its_conditions(count: int) -> None:
    """On the simplex; where a weight is positive the slope is least. Also of problems as uneven as real ones."""
    torch.manual_seed(count)
    A = torch.randn(20, count, count // 2 + 1, dtype=torch.float64)
    V = 10 ** (-6 * torch.rand(20, count, dtype=torch.float64))
    costs = A @ A.transpose(1, 2) + torch.diag_embed(V)
    found = least_mixtures(costs)
    assert float(found.min()) >= 0
    assert torch.allclose(found.sum(1), torch.ones(20, dtype=torch.float64), rtol=1e-12)
    slopes = (costs @ found[..., None])[..., 0]
    level = (slopes * found).sum(1, keepdim=True)  # αᵀPα
    assert float((level - slopes).max()) < 1e-11
    grid = torch.rand(2000, count, dtype=torch.float64) ** 4
    grid = torch.cat([grid / grid.sum(1, keepdim=True), torch.eye(count, dtype=torch.float64)])
    assert bool((level[:, 0] <= torch.einsum("gi,pij,gj->pg", grid, costs, grid).amin(1) + 1e-12).all())


def test_many_clients_are_mixed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    H, V = torch.randn(7, 3, 2, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    whole = FedPAC()._weights(H, V)
    monkeypatch.setattr("fedtailor.methods.prototypes._AT_ONCE", 100)
    assert torch.allclose(FedPAC()._weights(H, V), whole, atol=1e-13)


def test_a_mixture_that_cannot_be_told_is_none() -> None:
    """Of a singular matrix, of NaN, beside one that can; then a client keeps its own head."""
    costs = torch.stack([torch.zeros(2, 2), torch.full((2, 2), torch.nan), torch.eye(2)]).double()
    found = least_mixtures(costs)
    assert bool(found[:2].isnan().all()) and found[2].tolist() == [0.5, 0.5]
    outliers = torch.randn(400, 1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outliers[:2] = 1000.0
    weights = FedPAC()._weights(outliers, torch.zeros(400, dtype=torch.float64))
    assert bool(weights.isfinite().all()) and torch.allclose(weights.sum(1), torch.ones(400, dtype=torch.float64))


def test_mixtures_where_statistics_say_little() -> None:
    """Clients alike and without variance, features all zero, a variance below 0 by rounding, a model that diverged."""
    ones, method = torch.ones(3, dtype=torch.float64), FedPAC()
    alike = torch.tensor([[[1.0, 2.0]], [[1.0, 2.0]], [[9.0, 0.0]]])
    found = method._weights(alike, torch.zeros(3))
    assert torch.allclose(found.sum(1), ones) and float(found[:2, 2].max()) == 0 and float(found[2, 2]) == 1
    assert torch.allclose(method._weights(torch.zeros(3, 1, 2), torch.zeros(3)), ones / 3)
    assert torch.allclose(method._weights(alike, torch.tensor([-1e-9, 0.1, 0.1]))[0], torch.eye(3).double()[0])
    assert torch.equal(method._weights(alike * torch.inf, torch.zeros(3)), torch.eye(3, dtype=torch.float64))


# FedPAC


@dataclass
class LiteralPAC:
    body: Weights
    heads: list[Weights]
    trained: list[Weights]
    centres: Means = field(default_factory=dict)
    mixtures: list[Tensor] = field(default_factory=list)


def statistics(weights: Weights, client: int) -> tuple[Tensor, Tensor]:
    """H_i and V_i of the paper, class by class."""
    own, n = PROBLEM.everything(client), len(PROBLEM.everything(client))
    H, V = torch.zeros(CLASSES, WIDTH, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for k in range(CLASSES):
        z = features_of(weights, PROBLEM.fed.x[own[PROBLEM.fed.y[own] == k]])
        if len(z):
            p, mu = len(z) / n, z.mean(0)
            H[k] = p * mu
            V = V + p * z.square().sum(1).mean() - p**2 * mu.square().sum()
    return H, V / n


def literal_fedpac(
    schedule: Sequence[Sequence[int]], lam: float, lr: float, head_lr: float, head_epochs: int, epochs: int, **sgd: Any
) -> LiteralPAC:
    start = PROBLEM.start
    body = {n: w for n, w in start.items() if n not in HEAD}
    now = LiteralPAC(body, [{n: start[n] for n in HEAD} for _ in range(5)], [start for _ in range(5)])
    for t, clients in enumerate(schedule, start=1):
        means, counts, H, V = [], [], [], []
        for i in clients:
            weights = {**now.body, **now.heads[i]}
            spread, error = statistics(weights, i)  # (i)
            H.append(spread)
            V.append(error)
            centres = {} if t == 1 else {**class_means(weights, i)[0], **now.centres}
            weights = descend(weights, HEAD, PROBLEM.loss, t, i, head_lr, head_epochs, **sgd)  # (ii)

            def loss(weights: Weights, batch: Tensor, centres: Means = centres) -> Tensor:
                return PROBLEM.loss(weights, batch) + lam * pull(weights, batch, centres)

            weights = descend(weights, list(body), loss, t, i, lr, epochs, **sgd)  # (iii)
            mean, count = class_means(weights, i)  # (iv)
            means.append(mean)
            counts.append({k: float(n) for k, n in count.items()})
            now.trained[i] = weights
        sizes = [PROBLEM.sizes[i] for i in clients]
        now.body = {n: average([now.trained[i][n] for i in clients], sizes) for n in body}
        update(now.centres, means, counts)
        for i, P in zip(clients, matrices(torch.stack(H), torch.stack(V)), strict=True):
            alpha = enumerate_mixtures(P)
            alpha = torch.where(alpha < 1e-3, 0, alpha)
            now.mixtures.append(alpha / alpha.sum())
            now.heads[i] = {n: average([now.trained[j][n] for j in clients], alpha.tolist()) for n in HEAD}
    return now


@pytest.mark.parametrize("sgd", [PLAIN, {"momentum": 0.5, "weight_decay": 0.01}], ids=["plain", "momentum"])
def test_fedpac_by_hand(sgd: dict[str, float]) -> None:
    fields: dict[str, Any] = {"lr": 0.1, "head_lr": 0.3, "head_epochs": 1, "epochs": 2, "lam": 0.7, **sgd}
    run, told = go(FedPAC(**fields)), literal_fedpac(SCHEDULE, **fields)
    assert sum(int((alpha > 0).sum() > 1) for alpha in told.mixtures) > 3  # heads are mixed
    assert equal(run.server["params"], told.body)
    assert equal_rows(run.server["prototypes"], told.centres)
    for i in range(5):
        assert equal({n: heads[i] for n, heads in run.server["heads"].items()}, told.heads[i])
        assert equal(run.personal(i, "trained"), told.trained[i])
        assert equal(run.personal(i, "received"), {**told.body, **told.heads[i]})


def test_a_class_without_a_prototype_stays_where_the_client_has_it() -> None:
    """Client 3 alone, with one class, then client 0 with classes nobody has sent: by hand again."""
    fields: dict[str, Any] = {"lr": 0.2, "head_lr": 0.3, "head_epochs": 1, "epochs": 2, "lam": 2.0, **PLAIN}
    schedule = [[3], [0], [3]]
    run, told = PROBLEM.run(FedPAC(**fields), schedule), literal_fedpac(schedule, **fields)
    assert equal(run.server["params"], told.body) and equal_rows(run.server["prototypes"], told.centres)
    assert len(class_means(PROBLEM.start, 0)[0]) > 1  # some of them unknown in round 2


def test_fedpac_without_its_mechanisms_is_fedalt() -> None:
    """No pull and no mixture: the head first, then the body, and the head stays with the client."""
    bare: dict[str, Any] = {"lr": 0.1, "epochs": 2, "momentum": 0.5, "weight_decay": 0.01}
    run = go(FedPAC(lam=0.0, mix=False, head_lr=0.1, head_epochs=2, **bare))
    alt = go(FedAlt(**bare))
    assert alike(run, alt, "received", 1e-12) and alike(run, alt, "trained", 1e-12)


def test_of_one_client_the_mixture_is_its_own_head() -> None:
    run, other = (PROBLEM.run(FedPAC(lr=0.1, mix=mix), [[2], [2], [0]]) for mix in (True, False))
    assert alike(run, other, "received", 1e-12)


@pytest.mark.parametrize(
    "off", [{"lam": 0.0}, {"mix": False}, {"head_epochs": 0}, {"head_lr": 0.02}, {"smallest": 0.4}], ids=str
)
def test_every_mechanism_of_fedpac_has_an_effect(off: dict[str, Any]) -> None:
    whole, without = (go(FedPAC(**{"lr": 0.1, **f})) for f in ({}, off))
    assert not alike(whole, without, "received", 1e-4)


def test_fedpac_is_neither_alone_nor_one_model() -> None:
    run, alone, avg = (go(m) for m in (FedPAC(lr=0.1), Local(lr=0.1), FedAvg(lr=0.1)))
    assert not any(alike(run, other, moment, 1e-4) for other in (alone, avg) for moment in ("received", "trained"))


def test_fedpac_trains_the_body_also_with_one_epoch() -> None:
    """Public code takes the head's epoch out of E, so that with E = 1 the body never moves."""
    run = go(FedPAC(lr=0.1, epochs=1), 1)
    assert not torch.allclose(run.server["params"]["fc1.weight"], PROBLEM.start["fc1.weight"], atol=1e-4)


def test_mixing_weights_sum_to_one_also_where_all_are_small() -> None:
    """Public code does not normalise again; and of very many clients no weight may reach the threshold."""
    torch.manual_seed(0)
    H, V = torch.randn(12, 2, 3, dtype=torch.float64) / 10, torch.rand(12, dtype=torch.float64)
    for smallest in (0.0, 0.001, 0.08, 1.0):
        weights = FedPAC(smallest=smallest)._weights(H, V)
        assert torch.allclose(weights.sum(1), torch.ones(12, dtype=torch.float64))
        assert bool(((weights == 0) | (weights >= smallest) | (weights == weights.amax(1, keepdim=True))).all())


def test_clients_that_are_alike_share_heads_and_strangers_do_not() -> None:
    H = torch.tensor([[[5.0, 0.0]], [[5.0, 0.1]], [[-5.0, 3.0]]], dtype=torch.float64)
    weights = FedPAC()._weights(H, torch.full((3,), 0.1, dtype=torch.float64))
    assert float(weights[0, 1]) > 0.4 and float(weights[1, 0]) > 0.4 and float(weights[:2, 2].max()) < 0.01
    assert float(weights[2, 2]) > 0.95


# all three


def test_a_row_that_nobody_has_stays_and_weights_count_owners_only() -> None:
    old = Rows(torch.full((3, 1), 9.0), torch.tensor([True, False, False]))
    new = Rows(
        torch.tensor([[[0.0], [2.0], [0.0]], [[0.0], [5.0], [4.0]]]),
        torch.tensor([[False, True, False], [False, True, True]]),
    )
    merged = merge_rows(old, new, torch.tensor([[7.0, 2.0, 7.0], [7.0, 1.0, 3.0]]))
    assert merged.values.flatten().tolist() == [9.0, 3.0, 4.0] and merged.present.tolist() == [True] * 3


def test_bytes_are_those_of_the_table() -> None:
    """In scalars of 4 bytes; prototypes of classes a client does not have do not cross, nor any before round 1."""
    fed, net = tiny_federation((9, 4, 7, 1, 6)), PROBLEM.net
    owned = [len({int(k) for k in fed.y[fed.train[i]]}) for i in range(5)]
    assert min(owned) < CLASSES == max(owned)
    head, table = CLASSES * WIDTH + CLASSES, CLASSES * WIDTH
    whole = sum(p.numel() for p in net.parameters())
    expected: list[tuple[ft.Method, int, int, Callable[[int], int]]] = [
        (FedProto(), 0, table, lambda c: c * WIDTH + c),
        (FedProto(weights="uniform"), 0, table, lambda c: c * WIDTH),
        (FedGH(), head, head, lambda c: c * WIDTH),
        (FedPAC(), whole, whole + table, lambda c: whole + c * WIDTH + table + CLASSES + 1),
    ]
    for method, first, then, up in expected:
        run = ft.simulate(method, net, fed, rounds=2, dtype=torch.float32, engine="sequential")
        for record, down in zip(run.records, (first, then), strict=True):
            found = record["per_client"]
            assert [found["bytes_down"][i] for i in range(5)] == [4 * down] * 5
            assert [found["bytes_up"][i] for i in range(5)] == [4 * up(c) for c in owned]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FedProto(lam=-1), "lam must be at least 0"),
        (lambda: FedProto(answer="both"), "answer must be 'prototypes' or 'head'"),  # type: ignore[arg-type]
        (lambda: FedGH(server_lr=-0.1), "server_lr must be at least 0"),
        (lambda: FedGH(server_batch=0), "server_batch must be at least 1"),
        (lambda: FedPAC(head_lr=0.0), "head_lr must be above 0"),
        (lambda: FedPAC(smallest=1.5), "smallest must be at least 0 and at most 1"),
    ],
)
def test_senseless_fields_are_refused_in_words(make: Callable[[], ft.Method], words: str) -> None:
    assert words in refusal(make)


@pytest.mark.parametrize("method", [FedProto(), FedGH(), FedPAC()], ids=lambda m: type(m).__name__)
def test_who_does_not_classify_is_refused_in_words(method: ft.Method) -> None:
    fed = tiny_federation()
    net = ft.wrap(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)).double(), head="1", loss="regression")
    assert "classify" in refusal(lambda: ft.simulate(method, net, fed, rounds=1, dtype=torch.float64))
