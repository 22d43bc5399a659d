"""FedProto, FedGH, and FedPAC: literal versions, limiting cases, and differences from public code."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedtailor as ft
from fedtailor.core.trees import Rows, Tree, unflatten
from fedtailor.methods import FedGH, FedPAC, FedProto
from fedtailor.methods._shared.quadratic_program import solve_simplex_qp
from support.problem import HEAD, Weights, average, features, head_outputs, make_problem, select_names, with_grad

SCHEDULE = [[0, 1, 2, 3], [4, 0, 2], [1, 2, 3, 4]]  # client 4 takes part late; no client takes part in all rounds
SGD: dict[str, Any] = {"momentum": 0.5, "weight_decay": 0.01, "epochs": 2}
PLAIN = {"momentum": 0.0, "weight_decay": 0.0}
PROBLEM = make_problem()
CLASSES, WIDTH = 3, 4
Means = dict[int, Tensor]  # class -> mean feature


# helpers of the literal versions: features and class means


def logits(weights: Weights, x: Tensor) -> Tensor:
    return head_outputs(weights, features(weights, x))


def class_means(weights: Weights, client: int) -> tuple[Means, dict[int, int]]:
    """Return the mean feature and the number of samples of each class that a client has."""
    members: dict[int, list[Tensor]] = {}
    for sample in PROBLEM.all_samples(client):
        members.setdefault(int(PROBLEM.fed.y[sample]), []).append(features(weights, PROBLEM.fed.x[sample]))
    return {k: sum(own) / len(own) for k, own in members.items()}, {k: len(own) for k, own in members.items()}  # type: ignore[misc]


def alignment(weights: Weights, batch: Tensor, centers: Means) -> Tensor:
    """Return the mean over batch and dimensions of (z − c_y)²; examples of classes without c_y count as 0."""
    total = torch.zeros((), dtype=torch.float64)
    for sample in batch:
        label = int(PROBLEM.fed.y[sample])
        if label in centers:
            total = total + (features(weights, PROBLEM.fed.x[sample]) - centers[label]).square().sum()
    return total / (len(batch) * WIDTH)


def update_centers(centers: Means, means: Sequence[Means], counts: Sequence[dict[int, float]]) -> None:
    """Set the center of each available class to the mean over the clients that have it, weighted by counts."""
    for k in range(CLASSES):
        owners = [i for i, own in enumerate(means) if k in own]
        if owners:
            centers[k] = average([{"c": means[i][k]} for i in owners], [counts[i][k] for i in owners])["c"]


def equal(found: Tree, expected: Weights, tolerance: float = 1e-10) -> bool:
    return all(float((found[name] - weight).abs().max()) < tolerance for name, weight in expected.items())


def equal_rows(found: Rows, expected: Means) -> bool:
    assert found.present.tolist() == [k in expected for k in range(CLASSES)]
    return all(float((found.values[k] - mean).abs().max()) < 1e-10 for k, mean in expected.items())


def personal_logits(method: ft.Method, run: ft.Run, client: int, x: Tensor, moment: str = "received") -> Tensor:
    """Return the logits of the personal model of a client."""
    return method.logits(ft.wrap(PROBLEM.net), unflatten(run.personal(client, moment)), x)


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

            now.own[i] = PROBLEM.sgd(now.own[i], t, i, loss=loss, lr=lr, **sgd)
            mean, count = class_means(now.own[i], i)
            means.append(mean)
            counts.append({k: 1 if uniform else n for k, n in count.items()})
        update_centers(now.centers, means, counts)
    return now


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_fedproto_equals_literal_version(weights: Any) -> None:
    run = PROBLEM.run(FedProto(lr=0.1, lam=0.7, weights=weights, **SGD), SCHEDULE)
    reference = literal_fedproto(0.7, weights == "uniform", lr=0.1, **SGD)
    assert equal_rows(run.server["prototypes"], reference.centers)
    for i in range(5):
        assert equal(run.client(i)["params"], reference.own[i])
    values = WIDTH + (weights == "size")  # counts are sent only if they are used
    for client, sent in run.records[0]["per_client"]["bytes_up"].items():
        assert sent == 8 * values * len(class_means(PROBLEM.start, client)[0])


@pytest.mark.parametrize(("moment", "which"), [("received", "centers"), ("trained", "before")])
def test_fedproto_predicts_nearest_prototype_of_client_classes(moment: str, which: str) -> None:
    method, x = FedProto(lr=0.1), torch.randn(40, 4, dtype=torch.float64) * 2
    run, reference = PROBLEM.run(method, SCHEDULE), literal_fedproto(1.0, False, lr=0.1, epochs=2)
    centers: Means = getattr(reference, which)
    lacking = 0
    for i in SCHEDULE[-1]:
        classes = sorted({int(k) for k in PROBLEM.fed.y[PROBLEM.all_samples(i)]})
        lacking += len(classes) < CLASSES
        found = personal_logits(method, run, i, x, moment)
        for row, z in zip(found, features(reference.own[i], x), strict=True):
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
    assert torch.equal(personal_logits(method, run, 0, x, "trained"), logits(PROBLEM.start, x))
    assert torch.equal(personal_logits(method, run, 0, x, "received"), logits(PROBLEM.start, x))
    assert torch.equal(personal_logits(method, run, 3, x, "trained"), logits(run.client(3)["params"], x))
    assert set(personal_logits(method, run, 3, x, "received").argmax(1).tolist()) == own[3]


# FedGH


def train_head(head: Weights, means: Sequence[Means], lr: float, epochs: int, batch: int) -> Weights:
    """Train the head for some epochs on (prototype, label) pairs, client by client."""
    pairs = [(mean, k) for own in means for k, mean in sorted(own.items())]
    for _ in range(epochs):
        for first in range(0, len(pairs), batch):
            examples = pairs[first : first + batch]
            live = with_grad(head)
            outputs = torch.stack([live["head.weight"] @ c + live["head.bias"] for c, _ in examples])
            loss = F.cross_entropy(outputs, torch.tensor([k for _, k in examples]))
            grads = torch.autograd.grad(loss, [live[n] for n in HEAD])
            head = {n: head[n] - lr * grad for n, grad in zip(HEAD, grads, strict=True)}
    return head


@pytest.mark.parametrize(("epochs", "batch"), [(1, 1), (2, 4)])
def test_fedgh_equals_literal_version(epochs: int, batch: int) -> None:
    server: dict[str, Any] = {"server_lr": 0.2, "server_epochs": epochs, "server_batch": batch}
    run = PROBLEM.run(FedGH(lr=0.1, **server, **SGD), SCHEDULE)
    own = [PROBLEM.start for _ in range(5)]
    head = {n: PROBLEM.start[n] for n in HEAD}
    for t, clients in enumerate(SCHEDULE, start=1):
        for i in clients:
            own[i] = PROBLEM.sgd({**own[i], **head}, t, i, lr=0.1, **SGD)
        head = train_head(head, [class_means(own[i], i)[0] for i in clients], 0.2, epochs, batch)
    assert equal(run.server["params"], head)
    for i in range(5):
        assert equal(run.personal(i, "trained"), own[i])
        assert equal(run.personal(i, "received"), {**own[i], **head})


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
    """Return the matrices P^i of the paper: P^i_jk = ⟨H_i − H_j, H_i − H_k⟩ + 1[j = k] V_j."""
    differences = [(own - H).flatten(1) for own in H]
    return [difference @ difference.T + torch.diag(V) for difference in differences]


@pytest.mark.parametrize("seed", range(3))
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
    outliers = torch.randn(100, 1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outliers[:2] = 1000.0
    weights = FedPAC()._weights(outliers, torch.zeros(100, dtype=torch.float64))
    assert bool(weights.isfinite().all()) and torch.allclose(weights.sum(1), torch.ones(100, dtype=torch.float64))


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
        z = features(weights, PROBLEM.fed.x[own[PROBLEM.fed.y[own] == k]])
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
            weights = PROBLEM.sgd(weights, t, i, names=HEAD, lr=head_lr, epochs=head_epochs, **sgd)  # (ii)

            def loss(weights: Weights, batch: Tensor, centers: Means = centers) -> Tensor:
                return PROBLEM.loss(weights, batch) + lam * alignment(weights, batch, centers)

            weights = PROBLEM.sgd(weights, t, i, names=body, loss=loss, lr=lr, epochs=epochs, **sgd)  # (iii)
            mean, count = class_means(weights, i)  # (iv)
            means.append(mean)
            counts.append({k: float(n) for k, n in count.items()})
            now.trained[i] = weights
        sizes = [PROBLEM.sizes[i] for i in clients]
        now.body = average([select_names(now.trained[i], body) for i in clients], sizes)
        update_centers(now.centers, means, counts)
        for i, P in zip(clients, matrices(torch.stack(H), torch.stack(V)), strict=True):
            alpha = solve_by_enumeration(P)
            alpha = torch.where(alpha < 1e-3, 0, alpha)
            now.mixtures.append(alpha / alpha.sum())
            now.heads[i] = average([select_names(now.trained[j], HEAD) for j in clients], alpha.tolist())
    return now


@pytest.mark.parametrize("sgd", [PLAIN, {"momentum": 0.5, "weight_decay": 0.01}], ids=["plain", "momentum"])
def test_fedpac_equals_literal_version(sgd: dict[str, float]) -> None:
    fields: dict[str, Any] = {"lr": 0.1, "head_lr": 0.3, "head_epochs": 1, "epochs": 2, "lam": 0.7, **sgd}
    run, reference = PROBLEM.run(FedPAC(**fields), SCHEDULE), literal_fedpac(SCHEDULE, **fields)
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


def test_fedpac_weights_sum_to_one_if_all_are_small() -> None:
    """Public code does not normalize after thresholding; with many clients, no weight may reach the threshold."""
    torch.manual_seed(0)
    H, V = torch.randn(12, 2, 3, dtype=torch.float64) / 10, torch.rand(12, dtype=torch.float64)
    for smallest in (0.0, 0.001, 0.08, 1.0):
        weights = FedPAC(smallest=smallest)._weights(H, V)
        assert torch.allclose(weights.sum(1), torch.ones(12, dtype=torch.float64))
        assert bool(((weights == 0) | (weights >= smallest) | (weights == weights.amax(1, keepdim=True))).all())
