"""FedProto, FedGH, and FedPAC: literal versions, limiting cases, and differences from public code."""

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
from conftest import TinyNet, error_message, same, tiny_federation
from fedtailor.core.trees import Rows, Tree, unflatten
from fedtailor.methods import FedAlt, FedAvg, FedGH, FedPAC, FedProto, Local
from fedtailor.methods._shared.class_statistics import merge_rows
from fedtailor.methods._shared.quadratic_program import solve_simplex_qp
from support.problem import Weights, make_problem

SCHEDULE = [[0, 1, 2, 3], [4, 0, 2], [1, 2, 3, 4]]  # client 4 takes part late; no client takes part in all rounds
SGD: dict[str, Any] = {"momentum": 0.5, "weight_decay": 0.01, "epochs": 2}
PLAIN = {"momentum": 0.0, "weight_decay": 0.0}
PROBLEM = make_problem()
CLASSES, WIDTH = 3, 4
HEAD = ("head.weight", "head.bias")
Means = dict[int, Tensor]  # class -> mean feature


# helpers of the literal versions: SGD, features, class means


def compute_features(weights: Weights, x: Tensor) -> Tensor:
    hidden = torch.tanh(F.linear(x, weights["fc1.weight"], weights["fc1.bias"]))
    return torch.tanh(F.linear(hidden, weights["fc2.weight"], weights["fc2.bias"]))


def compute_logits(weights: Weights, x: Tensor) -> Tensor:
    return F.linear(compute_features(weights, x), *(weights[name] for name in HEAD))


def sgd_on(
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
    """Run SGD on the weights with the given names; the others are fixed."""
    weights = dict(weights)
    velocity: Weights = {}
    for number in range(epochs):
        for batch in PROBLEM.batches(round, client, number):
            live = {n: w.detach().clone().requires_grad_(n in names) for n, w in weights.items()}
            grads = torch.autograd.grad(loss(live, batch), [live[n] for n in names], materialize_grads=True)
            for name, grad in zip(names, grads, strict=True):
                step = grad + weight_decay * weights[name]
                velocity[name] = momentum * velocity[name] + step if name in velocity else step
                weights[name] = weights[name] - lr * velocity[name]
    return weights


def class_means(weights: Weights, client: int) -> tuple[Means, dict[int, int]]:
    """Return the mean feature and the number of samples of each class that a client has."""
    members: dict[int, list[Tensor]] = {}
    for sample in PROBLEM.all_samples(client):
        members.setdefault(int(PROBLEM.fed.y[sample]), []).append(compute_features(weights, PROBLEM.fed.x[sample]))
    return {k: sum(own) / len(own) for k, own in members.items()}, {k: len(own) for k, own in members.items()}  # type: ignore[misc]


def alignment(weights: Weights, batch: Tensor, centers: Means) -> Tensor:
    """Return the mean over batch and dimensions of (z − c_y)²; examples of classes without c_y count as 0."""
    total = torch.zeros((), dtype=torch.float64)
    for sample in batch:
        label = int(PROBLEM.fed.y[sample])
        if label in centers:
            total = total + (compute_features(weights, PROBLEM.fed.x[sample]) - centers[label]).square().sum()
    return total / (len(batch) * WIDTH)


def average(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        total = total + weight / sum(weights) * part
    return total


def update_centers(centers: Means, means: Sequence[Means], counts: Sequence[dict[int, float]]) -> None:
    """Set the center of each available class to the mean over the clients that have it, weighted by counts."""
    for k in range(CLASSES):
        owners = [i for i, own in enumerate(means) if k in own]
        if owners:
            centers[k] = average([means[i][k] for i in owners], [counts[i][k] for i in owners])


def equal(found: Tree, expected: Weights, tolerance: float = 1e-10) -> bool:
    return all(float((found[name] - weight).abs().max()) < tolerance for name, weight in expected.items())


def equal_rows(found: Rows, expected: Means) -> bool:
    assert found.present.tolist() == [k in expected for k in range(CLASSES)]
    return all(float((found.values[k] - mean).abs().max()) < 1e-10 for k, mean in expected.items())


@cache
def run_cached(method: ft.Method, rounds: int = len(SCHEDULE)) -> ft.Run:
    """Return a cached run of the library."""
    return PROBLEM.run(method, SCHEDULE[:rounds])


def personal_logits(method: ft.Method, run: ft.Run, client: int, x: Tensor, moment: str = "received") -> Tensor:
    """Return the logits of the personal model of a client."""
    return method.logits(ft.wrap(PROBLEM.net), unflatten(run.personal(client, moment)), x)


def models(run: ft.Run, moment: str = "trained") -> list[Weights]:
    names = [name for name, _ in PROBLEM.net.named_parameters()]
    return [{n: run.personal(client, moment)[n] for n in names} for client in range(run.num_clients)]


def models_equal(a: ft.Run, b: ft.Run, moment: str = "trained", tolerance: float = 0.0) -> bool:
    return all(same(x, y, tolerance) for x, y in zip(models(a, moment), models(b, moment), strict=True))


# FedProto


@dataclass
class LiteralProto:
    """State of the literal FedProto."""

    own: list[Weights]
    centers: Means = field(default_factory=dict)
    before: Means = field(default_factory=dict)  # centers sent in the last round


def literal_fedproto(lam: float, uniform: bool, lr: float, **sgd: Any) -> LiteralProto:
    now = LiteralProto([PROBLEM.start for _ in range(5)])
    for t, clients in enumerate(SCHEDULE, start=1):
        now.before = dict(now.centers)
        means: list[Means] = []
        counts: list[dict[int, float]] = []
        for i in clients:

            def loss(weights: Weights, batch: Tensor) -> Tensor:
                return PROBLEM.loss(weights, batch) + lam * alignment(weights, batch, now.before)

            now.own[i] = sgd_on(now.own[i], list(PROBLEM.start), loss, t, i, lr, **sgd)
            mean, count = class_means(now.own[i], i)
            means.append(mean)
            counts.append({k: 1 if uniform else n for k, n in count.items()})
        update_centers(now.centers, means, counts)
    return now


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_fedproto_equals_literal_version(weights: Any) -> None:
    run = run_cached(FedProto(lr=0.1, lam=0.7, weights=weights, **SGD))
    reference = literal_fedproto(0.7, weights == "uniform", lr=0.1, **SGD)
    assert equal_rows(run.server["prototypes"], reference.centers)
    for i in range(5):
        assert equal(run.client(i)["params"], reference.own[i])


@pytest.mark.parametrize(("moment", "which"), [("received", "centers"), ("trained", "before")])
def test_fedproto_predicts_nearest_prototype_of_client_classes(moment: str, which: str) -> None:
    method, x = FedProto(lr=0.1), torch.randn(40, 4, dtype=torch.float64) * 2
    run, reference = run_cached(method), literal_fedproto(1.0, False, lr=0.1, epochs=2)
    centers: Means = getattr(reference, which)
    lacking = 0
    for i in SCHEDULE[-1]:
        classes = sorted({int(k) for k in PROBLEM.fed.y[PROBLEM.all_samples(i)]})
        lacking += len(classes) < CLASSES
        found = personal_logits(method, run, i, x, moment)
        for row, z in zip(found, compute_features(reference.own[i], x), strict=True):
            distances = {k: float((z - centers[k]).square().sum()) for k in classes}
            assert int(row.argmax()) == min(classes, key=lambda k: distances[k])
            assert all(abs(float(row[k]) + distances[k]) < 1e-9 for k in classes)
            assert all(float(row[k]) < -max(distances.values()) for k in range(CLASSES) if k not in classes)
        assert bool(found.isfinite().all())
    assert lacking  # some client lacks classes


def test_fedproto_predicts_with_head_until_prototypes_are_complete() -> None:
    """The head predicts before round 1, after training in round 1, and while a class of the client has no prototype."""
    method, x = FedProto(lr=0.1), torch.randn(9, 4, dtype=torch.float64)
    run = PROBLEM.run(method, [[3]])  # client 3 has one sample, so one class
    own = {i: {int(k) for k in PROBLEM.fed.y[PROBLEM.all_samples(i)]} for i in range(5)}
    assert len(own[3]) == 1 and not own[0] <= own[3]
    assert torch.equal(personal_logits(method, run, 0, x, "trained"), compute_logits(PROBLEM.start, x))
    assert torch.equal(personal_logits(method, run, 0, x, "received"), compute_logits(PROBLEM.start, x))
    assert torch.equal(personal_logits(method, run, 3, x, "trained"), compute_logits(run.client(3)["params"], x))
    assert set(personal_logits(method, run, 3, x, "received").argmax(1).tolist()) == own[3]


def test_fedproto_without_alignment_equals_local_training() -> None:
    plain = {"lr": 0.1, **SGD}
    run, local = run_cached(FedProto(lam=0.0, **plain)), run_cached(Local(**plain))
    assert models_equal(run, local, tolerance=1e-12) and models_equal(run, local, "received", 1e-12)
    by_head = run_cached(FedProto(lam=0.0, answer="head", **plain))
    assert by_head.records[-1]["loss_received"] == pytest.approx(local.records[-1]["loss_received"], rel=1e-10)
    assert run.records[-1]["loss_received"] != pytest.approx(local.records[-1]["loss_received"], rel=1e-3)


def test_fedproto_equals_local_training_in_round_1_and_aligns_features_later() -> None:
    local = run_cached(Local(lr=0.1), 1)
    assert models_equal(run_cached(FedProto(lr=0.1), 1), local, tolerance=1e-12)
    spread = []
    for lam in (0.0, 1.0, 10.0):
        run = PROBLEM.run(FedProto(lr=0.1, lam=lam), [[0, 1, 2]] * 3)
        means = [class_means(run.client(i)["params"], i)[0] for i in (0, 1, 2)]
        of = [torch.stack([own[k] for own in means if k in own]) for k in range(CLASSES)]
        spread.append(sum(float(rows.var(0).sum()) for rows in of if len(rows) > 1))
    assert spread[0] > spread[1] > spread[2] > 0


def test_fedproto_differs_from_local_training_and_fedavg() -> None:
    runs = [run_cached(method) for method in (FedProto(lr=0.1), Local(lr=0.1), FedAvg(lr=0.1))]
    assert not any(
        models_equal(runs[0], other, moment, 1e-4) for other in runs[1:] for moment in ("received", "trained")
    )


def test_prototypes_ignore_padding() -> None:
    """With batch normalization, a batch that is larger than the client's data is padded."""

    class NormalizedNet(TinyNet):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.norm(self.fc(x))))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net, fed = NormalizedNet().double(), tiny_federation((5, 3))
    run = ft.simulate(FedProto(lr=0.05), net, fed, rounds=1, batch_size=4, dtype=torch.float64, engine="sequential")
    params, model = [run.client(i)["params"] for i in range(2)], ft.wrap(net).eval_mode
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
    """Train the head for some epochs on (prototype, label) pairs, client by client."""
    pairs = [(mean, k) for own in means for k, mean in sorted(own.items())]
    for _ in range(epochs):
        for first in range(0, len(pairs), batch):
            examples = pairs[first : first + batch]
            live = {n: w.detach().clone().requires_grad_() for n, w in head.items()}
            outputs = torch.stack([live["head.weight"] @ c + live["head.bias"] for c, _ in examples])
            loss = F.cross_entropy(outputs, torch.tensor([k for _, k in examples]))
            grads = torch.autograd.grad(loss, [live[n] for n in HEAD])
            head = {n: head[n] - lr * grad for n, grad in zip(HEAD, grads, strict=True)}
    return head


@pytest.mark.parametrize(("epochs", "batch"), [(1, 1), (2, 4)])
def test_fedgh_equals_literal_version(epochs: int, batch: int) -> None:
    server: dict[str, Any] = {"server_lr": 0.2, "server_epochs": epochs, "server_batch": batch}
    run = run_cached(FedGH(lr=0.1, **server, **SGD))
    own = [PROBLEM.start for _ in range(5)]
    head = {n: PROBLEM.start[n] for n in HEAD}
    for t, clients in enumerate(SCHEDULE, start=1):
        for i in clients:
            own[i] = sgd_on({**own[i], **head}, list(PROBLEM.start), PROBLEM.loss, t, i, lr=0.1, **SGD)
        head = train_head(head, [class_means(own[i], i)[0] for i in clients], 0.2, epochs, batch)
    assert equal(run.server["params"], head)
    for i in range(5):
        assert equal(run.personal(i, "trained"), own[i])
        assert equal(run.personal(i, "received"), {**own[i], **head})


def test_fedgh_server_head_reduces_loss_on_prototypes() -> None:
    """In public code, the optimizer updates another network, so the server head never changes."""
    methods = [FedGH(lr=0.1, server_lr=rate) for rate in (0.0, 0.1)]
    fixed, trained = (run_cached(method) for method in methods)
    start = {n: PROBLEM.start[n] for n in HEAD}
    assert equal(fixed.server["params"], start, 1e-15) and not equal(trained.server["params"], start, 1e-2)

    def loss(run: ft.Run) -> float:
        pairs = [(mean, k) for i in SCHEDULE[-1] for k, mean in class_means(run.client(i)["params"], i)[0].items()]
        head = run.server["params"]
        outputs = torch.stack([head["head.weight"] @ c + head["head.bias"] for c, _ in pairs])
        return float(F.cross_entropy(outputs, torch.tensor([k for _, k in pairs])))

    assert loss(trained) < loss(fixed)


def test_fedgh_server_ignores_absent_classes() -> None:
    """A class that no client has is an absent row, not a sample of zeros, so its bias decreases in the first step."""
    x, y = np.random.default_rng(0).normal(size=(4, 4)), np.array([0, 1, 0, 1])
    fed = ft.Federation.from_arrays([(x, y, x, y)], classes=CLASSES)
    method = FedGH(lr=0.1, server_lr=0.1, server_batch=100)
    run = ft.simulate(method, PROBLEM.net, fed, rounds=1, dtype=torch.float64)
    z, labels = compute_features(run.client(0)["params"], fed.x[fed.train[0]]), fed.y[fed.train[0]]
    start = {n: PROBLEM.start[n] for n in HEAD}
    assert equal(run.server["params"], train_head(start, [{k: z[labels == k].mean(0) for k in (0, 1)}], 0.1, 1, 100))
    assert float(run.server["params"]["head.bias"][2]) < float(start["head.bias"][2])


def test_fedgh_equals_local_training_in_round_1_and_keeps_bodies_personal() -> None:
    first, local = run_cached(FedGH(lr=0.1), 1), run_cached(Local(lr=0.1), 1)
    assert models_equal(first, local)
    run, later = run_cached(FedGH(lr=0.1)), run_cached(Local(lr=0.1))
    avg = run_cached(FedAvg(lr=0.1))
    assert not any(
        models_equal(run, other, moment, 1e-4) for other in (later, avg) for moment in ("received", "trained")
    )
    heads = [{n: model[n] for n in HEAD} for model in models(run, "received")]
    bodies = [model["fc1.weight"] for model in models(run, "received")]
    assert all(same(heads[0], head) for head in heads)  # the received head is the same for all clients
    assert not torch.allclose(bodies[0], bodies[1], atol=1e-3)  # bodies are personal


def test_fedgh_server_head_is_not_client_head() -> None:
    """In public code, the server head is the same object as the first client's head. Here it stays at its start."""
    run = PROBLEM.run(FedGH(lr=0.1, server_lr=0.0), [[0, 1], [1, 0]])
    assert equal(run.server["params"], {n: PROBLEM.start[n] for n in HEAD}, 1e-15)
    assert not torch.allclose(run.personal(0, "trained")["head.weight"], PROBLEM.start["head.weight"], atol=1e-3)


# FedPAC: the optimal combination of heads


def solve_by_enumeration(P: Tensor) -> Tensor:
    """Return argmin αᵀPα over the simplex by enumerating all supports; on the support, Pα is constant."""
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
    """Return the matrices P^i of the paper, entry by entry."""
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
def test_simplex_qp_equals_enumeration_of_supports(seed: int, variance: float) -> None:
    torch.manual_seed(seed)
    H = torch.randn(6, 3, 4, dtype=torch.float64) + torch.randn(3, 4, dtype=torch.float64)
    V = variance * torch.rand(6, dtype=torch.float64)
    found = FedPAC(smallest=0.0)._weights(H, V)
    for weights, P in zip(found, matrices(H, V), strict=True):
        assert torch.allclose(weights, solve_by_enumeration(P), atol=1e-10)


@pytest.mark.parametrize("count", [1, 2, 9, 30])
def test_simplex_qp_satisfies_optimality_conditions(count: int) -> None:
    """The solution is on the simplex, and the gradient is minimal where weights are positive."""
    torch.manual_seed(count)
    A = torch.randn(20, count, count // 2 + 1, dtype=torch.float64)
    V = 10 ** (-6 * torch.rand(20, count, dtype=torch.float64))
    costs = A @ A.transpose(1, 2) + torch.diag_embed(V)
    found = solve_simplex_qp(costs)
    assert float(found.min()) >= 0
    assert torch.allclose(found.sum(1), torch.ones(20, dtype=torch.float64), rtol=1e-12)
    grads = (costs @ found[..., None])[..., 0]
    level = (grads * found).sum(1, keepdim=True)  # αᵀPα
    assert float((level - grads).max()) < 1e-11
    grid = torch.rand(2000, count, dtype=torch.float64) ** 4
    grid = torch.cat([grid / grid.sum(1, keepdim=True), torch.eye(count, dtype=torch.float64)])
    assert bool((level[:, 0] <= torch.einsum("gi,pij,gj->pg", grid, costs, grid).amin(1) + 1e-12).all())


def test_fedpac_weights_do_not_depend_on_batches_of_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    H, V = torch.randn(7, 3, 2, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    whole = FedPAC()._weights(H, V)
    monkeypatch.setattr("fedtailor.methods.fedpac._MAX_ENTRIES", 100)
    assert torch.allclose(FedPAC()._weights(H, V), whole, atol=1e-13)


def test_simplex_qp_of_singular_matrix_is_nan() -> None:
    """The results of other problems of the batch are not affected; FedPAC then keeps the client's head."""
    costs = torch.stack([torch.zeros(2, 2), torch.full((2, 2), torch.nan), torch.eye(2)]).double()
    found = solve_simplex_qp(costs)
    assert bool(found[:2].isnan().all()) and found[2].tolist() == [0.5, 0.5]
    outliers = torch.randn(400, 1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outliers[:2] = 1000.0
    weights = FedPAC()._weights(outliers, torch.zeros(400, dtype=torch.float64))
    assert bool(weights.isfinite().all()) and torch.allclose(weights.sum(1), torch.ones(400, dtype=torch.float64))


def test_fedpac_weights_for_degenerate_statistics() -> None:
    """Identical clients without variance, zero features, a variance below 0 by rounding, and a diverged model."""
    ones, method = torch.ones(3, dtype=torch.float64), FedPAC()
    moments = torch.tensor([[[1.0, 2.0]], [[1.0, 2.0]], [[9.0, 0.0]]])
    found = method._weights(moments, torch.zeros(3))
    assert torch.allclose(found.sum(1), ones) and float(found[:2, 2].max()) == 0 and float(found[2, 2]) == 1
    assert torch.allclose(method._weights(torch.zeros(3, 1, 2), torch.zeros(3)), ones / 3)
    assert torch.allclose(method._weights(moments, torch.tensor([-1e-9, 0.1, 0.1]))[0], torch.eye(3).double()[0])
    assert torch.equal(method._weights(moments * torch.inf, torch.zeros(3)), torch.eye(3, dtype=torch.float64))


# FedPAC


@dataclass
class LiteralPAC:
    """State of the literal FedPAC."""

    body: Weights
    heads: list[Weights]
    trained: list[Weights]
    centers: Means = field(default_factory=dict)
    mixtures: list[Tensor] = field(default_factory=list)


def statistics(weights: Weights, client: int) -> tuple[Tensor, Tensor]:
    """Return H_i and V_i of the paper, computed class by class."""
    own, n = PROBLEM.all_samples(client), len(PROBLEM.all_samples(client))
    H, V = torch.zeros(CLASSES, WIDTH, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for k in range(CLASSES):
        z = compute_features(weights, PROBLEM.fed.x[own[PROBLEM.fed.y[own] == k]])
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
            centers = {} if t == 1 else {**class_means(weights, i)[0], **now.centers}
            weights = sgd_on(weights, HEAD, PROBLEM.loss, t, i, head_lr, head_epochs, **sgd)  # (ii)

            def loss(weights: Weights, batch: Tensor, centers: Means = centers) -> Tensor:
                return PROBLEM.loss(weights, batch) + lam * alignment(weights, batch, centers)

            weights = sgd_on(weights, list(body), loss, t, i, lr, epochs, **sgd)  # (iii)
            mean, count = class_means(weights, i)  # (iv)
            means.append(mean)
            counts.append({k: float(n) for k, n in count.items()})
            now.trained[i] = weights
        sizes = [PROBLEM.sizes[i] for i in clients]
        now.body = {n: average([now.trained[i][n] for i in clients], sizes) for n in body}
        update_centers(now.centers, means, counts)
        for i, P in zip(clients, matrices(torch.stack(H), torch.stack(V)), strict=True):
            alpha = solve_by_enumeration(P)
            alpha = torch.where(alpha < 1e-3, 0, alpha)
            now.mixtures.append(alpha / alpha.sum())
            now.heads[i] = {n: average([now.trained[j][n] for j in clients], alpha.tolist()) for n in HEAD}
    return now


@pytest.mark.parametrize("sgd", [PLAIN, {"momentum": 0.5, "weight_decay": 0.01}], ids=["plain", "momentum"])
def test_fedpac_equals_literal_version(sgd: dict[str, float]) -> None:
    fields: dict[str, Any] = {"lr": 0.1, "head_lr": 0.3, "head_epochs": 1, "epochs": 2, "lam": 0.7, **sgd}
    run, reference = run_cached(FedPAC(**fields)), literal_fedpac(SCHEDULE, **fields)
    assert sum(int((alpha > 0).sum() > 1) for alpha in reference.mixtures) > 3  # heads are combined
    assert equal(run.server["params"], reference.body)
    assert equal_rows(run.server["prototypes"], reference.centers)
    for i in range(5):
        assert equal({n: heads[i] for n, heads in run.server["heads"].items()}, reference.heads[i])
        assert equal(run.personal(i, "trained"), reference.trained[i])
        assert equal(run.personal(i, "received"), {**reference.body, **reference.heads[i]})


def test_fedpac_class_without_global_prototype_uses_client_prototype() -> None:
    """Client 3 has one class; client 0 then has classes without global prototypes."""
    fields: dict[str, Any] = {"lr": 0.2, "head_lr": 0.3, "head_epochs": 1, "epochs": 2, "lam": 2.0, **PLAIN}
    schedule = [[3], [0], [3]]
    run, reference = PROBLEM.run(FedPAC(**fields), schedule), literal_fedpac(schedule, **fields)
    assert equal(run.server["params"], reference.body) and equal_rows(run.server["prototypes"], reference.centers)
    assert len(class_means(PROBLEM.start, 0)[0]) > 1  # some are unknown in round 2


def test_fedpac_without_alignment_and_combination_equals_fedalt() -> None:
    """Clients train first the head and then the body, and heads are personal."""
    bare: dict[str, Any] = {"lr": 0.1, "epochs": 2, "momentum": 0.5, "weight_decay": 0.01}
    run = run_cached(FedPAC(lam=0.0, mix=False, head_lr=0.1, head_epochs=2, **bare))
    alt = run_cached(FedAlt(**bare))
    assert models_equal(run, alt, "received", 1e-12) and models_equal(run, alt, "trained", 1e-12)


def test_fedpac_with_single_participant_keeps_head() -> None:
    run, other = (PROBLEM.run(FedPAC(lr=0.1, mix=mix), [[2], [2], [0]]) for mix in (True, False))
    assert models_equal(run, other, "received", 1e-12)


@pytest.mark.parametrize(
    "off", [{"lam": 0.0}, {"mix": False}, {"head_epochs": 0}, {"head_lr": 0.02}, {"smallest": 0.4}], ids=str
)
def test_each_field_of_fedpac_has_effect(off: dict[str, Any]) -> None:
    default, changed = (run_cached(FedPAC(**{"lr": 0.1, **f})) for f in ({}, off))
    assert not models_equal(default, changed, "received", 1e-4)


def test_fedpac_differs_from_local_training_and_fedavg() -> None:
    run, local, avg = (run_cached(m) for m in (FedPAC(lr=0.1), Local(lr=0.1), FedAvg(lr=0.1)))
    assert not any(
        models_equal(run, other, moment, 1e-4) for other in (local, avg) for moment in ("received", "trained")
    )


def test_fedpac_with_one_epoch_trains_body() -> None:
    """In public code, the epoch of the head counts toward E, so with E = 1 the body never changes."""
    run = run_cached(FedPAC(lr=0.1, epochs=1), 1)
    assert not torch.allclose(run.server["params"]["fc1.weight"], PROBLEM.start["fc1.weight"], atol=1e-4)


def test_fedpac_weights_sum_to_one_if_all_are_small() -> None:
    """Public code does not normalize after thresholding; with many clients, no weight may reach the threshold."""
    torch.manual_seed(0)
    H, V = torch.randn(12, 2, 3, dtype=torch.float64) / 10, torch.rand(12, dtype=torch.float64)
    for smallest in (0.0, 0.001, 0.08, 1.0):
        weights = FedPAC(smallest=smallest)._weights(H, V)
        assert torch.allclose(weights.sum(1), torch.ones(12, dtype=torch.float64))
        assert bool(((weights == 0) | (weights >= smallest) | (weights == weights.amax(1, keepdim=True))).all())


def test_fedpac_combines_heads_of_similar_clients_only() -> None:
    H = torch.tensor([[[5.0, 0.0]], [[5.0, 0.1]], [[-5.0, 3.0]]], dtype=torch.float64)
    weights = FedPAC()._weights(H, torch.full((3,), 0.1, dtype=torch.float64))
    assert float(weights[0, 1]) > 0.4 and float(weights[1, 0]) > 0.4 and float(weights[:2, 2].max()) < 0.01
    assert float(weights[2, 2]) > 0.95


# all three methods


def test_merge_rows_keeps_rows_without_owners_and_weights_owners_only() -> None:
    old = Rows(torch.full((3, 1), 9.0), torch.tensor([True, False, False]))
    new = Rows(
        torch.tensor([[[0.0], [2.0], [0.0]], [[0.0], [5.0], [4.0]]]),
        torch.tensor([[False, True, False], [False, True, True]]),
    )
    merged = merge_rows(old, new, torch.tensor([[7.0, 2.0, 7.0], [7.0, 1.0, 3.0]]))
    assert merged.values.flatten().tolist() == [9.0, 3.0, 4.0] and merged.present.tolist() == [True] * 3


def test_payload_sizes_are_as_documented() -> None:
    """Values have 4 bytes. Absent prototypes are not sent, and there are none before round 1."""
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
    for method, first, later, up in expected:
        run = ft.simulate(method, net, fed, rounds=2, dtype=torch.float32, engine="sequential")
        for record, down in zip(run.records, (first, later), strict=True):
            found = record["per_client"]
            assert [found["bytes_down"][i] for i in range(5)] == [4 * down] * 5
            assert [found["bytes_up"][i] for i in range(5)] == [4 * up(c) for c in owned]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedProto(lam=-1), "lam must be at least 0"),
        (lambda: FedProto(answer="both"), "answer must be 'prototypes' or 'head'"),  # type: ignore[arg-type]
        (lambda: FedGH(server_lr=-0.1), "server_lr must be at least 0"),
        (lambda: FedGH(server_batch=0), "server_batch must be at least 1"),
        (lambda: FedPAC(head_lr=0.0), "head_lr must be above 0"),
        (lambda: FedPAC(smallest=1.5), "smallest must be from 0 to 1"),
    ],
)
def test_invalid_fields_raise(make: Callable[[], ft.Method], message: str) -> None:
    assert message in error_message(make)


@pytest.mark.parametrize("method", [FedProto(), FedGH(), FedPAC()], ids=lambda m: type(m).__name__)
def test_model_without_classifier_raises(method: ft.Method) -> None:
    fed = tiny_federation()
    net = ft.wrap(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)).double(), head="1", loss="regression")
    assert "classification" in error_message(lambda: ft.simulate(method, net, fed, rounds=1, dtype=torch.float64))
