"""Split models: FedPer, FedRep, FedBABU, LG-FedAvg, FedAlt, FedSim, FedBN, FedAS, and FedCAC.

FedAPM is in test_fedapm.py, LAG and FedLAG in test_lag.py.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from conftest import all_same, models, same, tiny_federation
from fedtailor.core.trees import stack
from fedtailor.methods import FedAlt, FedAS, FedAvg, FedAvgFT, FedBABU, FedBN, FedCAC, FedPer, FedRep, FedSim, LGFedAvg
from fedtailor.methods.fedcac import overlaps
from support.problem import BODY, HEAD, Problem, Weights, average, features, make_problem, select_names

SCHEDULE = [[0, 1, 2, 3, 4], [1, 3, 4], [0, 3]]  # all clients, then some, then one that was absent


# literal versions

PROBLEM = make_problem()
MOMENTUM: dict[str, Any] = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.01}
FC1, FC2 = ("fc1.weight", "fc1.bias"), ("fc2.weight", "fc2.bias")
ALTERNATE: list[dict[str, Any]] = [{"names": HEAD}, {"names": BODY}]
# method, names of the shared part, and how a client trains: calls of SGD, with the optimizer fields of the method
LITERAL: dict[str, tuple[ft.Method, Sequence[str], list[dict[str, Any]]]] = {
    "fedper": (FedPer(), BODY, [{}]),
    "fedrep": (FedRep(head_epochs=3, epochs=2), BODY, [{"names": HEAD, "epochs": 3}, {"names": BODY}]),
    "fedrep, momentum": (
        FedRep(head_epochs=3, epochs=2, **MOMENTUM), BODY, [{"names": HEAD, "epochs": 3}, {"names": BODY}],
    ),
    "fedbabu": (FedBABU(tuning_epochs=3), BODY, [{"names": BODY}]),
    "fedbabu, momentum": (FedBABU(tuning_epochs=3, **MOMENTUM), BODY, [{"names": BODY}]),
    "fedavgft": (FedAvgFT(tuning_epochs=3), BODY + HEAD, [{}]),
    "lgfedavg": (LGFedAvg(), HEAD, [{}]),
    "lgfedavg, size": (LGFedAvg(weights="size"), HEAD, [{}]),
    "fedalt": (FedAlt(lr=0.2), BODY, ALTERNATE),
    "fedalt, uniform": (FedAlt(epochs=3, **MOMENTUM, weights="uniform"), BODY, ALTERNATE),
    "fedalt, input": (FedAlt(**MOMENTUM, split="input"), FC2 + HEAD, [{"names": FC1}, {"names": FC2 + HEAD}]),
    "fedsim": (FedSim(lr=0.2), BODY, [{}]),
    "fedsim, uniform": (FedSim(epochs=3, **MOMENTUM, weights="uniform"), BODY, [{}]),
    "fedsim, layers": (FedSim(**MOMENTUM, split=("fc2",)), FC1 + HEAD, [{}]),
}  # fmt: skip


@pytest.mark.parametrize("name", LITERAL)
def test_split_method_equals_literal_version(name: str) -> None:
    """The server averages the shared part; for evaluation, some methods fine-tune a copy of the model."""
    method, shared, phases = LITERAL[name]
    options = {field: getattr(method, field) for field in ("lr", "epochs", "momentum", "weight_decay")}
    run = PROBLEM.run(method, SCHEDULE)
    part, trained = select_names(PROBLEM.start, shared), [PROBLEM.start] * 5
    for t, clients in enumerate(SCHEDULE, start=1):
        for i in clients:
            trained[i] = trained[i] | part
            for phase in phases:
                trained[i] = PROBLEM.sgd(trained[i], t, i, **options | phase)
        shares = [PROBLEM.sizes[i] if method.weights == "size" else 1 for i in clients]  # type: ignore[attr-defined]
        part = average([select_names(trained[i], shared) for i in clients], shares)
    received = [own | part for own in trained]
    if tuning := getattr(method, "tuning_epochs", 0):
        next_round = len(SCHEDULE) + 1
        received = [PROBLEM.sgd(own, next_round, i, **options | {"epochs": tuning}) for i, own in enumerate(received)]
    assert same(run.server, {"params": part}, 1e-10)
    assert all_same(models(run, "received"), received, 1e-10) and all_same(models(run), trained, 1e-10)


class BatchNormNet(nn.Module):
    """A network whose batch normalization is named `downsample.1`, as in ResNet, without "bn" in the name."""

    def __init__(self) -> None:
        super().__init__()
        self.downsample = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.downsample(x)))  # type: ignore[no-any-return]


def make_batch_norm_problem(sizes: Sequence[int] = (6, 3, 9)) -> Problem:
    """Create a problem with full batches only, because padding would change batch statistics."""
    torch.manual_seed(0)
    return Problem(tiny_federation(sizes), BatchNormNet().double())


def test_fedbn_equals_literal_version() -> None:
    """γ, β, and the running statistics are personal; the rest is averaged."""
    problem, lr = make_batch_norm_problem(), 0.1
    fed, schedule = problem.fed, [[0, 1, 2], [1, 2]]
    run = problem.run(FedBN(lr=lr), schedule)
    shared, normal = ["downsample.0.weight", "downsample.0.bias", *HEAD], ["downsample.1.weight", "downsample.1.bias"]

    def normalization_input(w: Weights, samples: Tensor) -> Tensor:
        """Return the input of the batch normalization."""
        return F.linear(fed.x[samples], w["downsample.0.weight"], w["downsample.0.bias"])

    def loss(w: Weights, samples: Tensor) -> Tensor:
        x = normalization_input(w, samples)
        z = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt() * w[normal[0]] + w[normal[1]]
        return F.cross_entropy(F.linear(torch.tanh(z), w["head.weight"], w["head.bias"]), fed.y[samples])

    global_model = select_names(problem.start, shared)
    initial = {"downsample.1.running_mean": torch.zeros(5), "downsample.1.running_var": torch.ones(5)}
    own = [{**select_names(problem.start, normal), **{n: v.double() for n, v in initial.items()}} for _ in range(3)]
    trained: list[Weights] = [{} for _ in range(3)]
    for t, clients in enumerate(schedule, start=1):
        for i in clients:
            w = problem.sgd({**global_model, **own[i]}, t, i, lr=lr, loss=loss, names=shared + normal)
            parts = [normalization_input(w, batch) for batch in torch.split(problem.all_samples(i), 3)]
            w["downsample.1.running_mean"] = torch.stack([x.mean(0) for x in parts]).mean(0)
            w["downsample.1.running_var"] = torch.stack([x.var(0) for x in parts]).mean(0)
            trained[i], own[i] = w, select_names(w, own[i])
        global_model = average([select_names(trained[i], shared) for i in clients], [problem.sizes[i] for i in clients])
    assert same(run.server["params"], global_model, 1e-10)
    for i in range(3):
        received, last = run.personal(i, "received"), run.personal(i, "trained")
        assert same(select_names(received, [*shared, *own[i]]), {**global_model, **own[i]}, 1e-10)
        assert same(select_names(last, trained[i]), trained[i], 1e-10)


def align(problem: Problem, received: Weights, own: Weights, lr: float, t: int, i: int) -> Weights:
    """Train one epoch so that features of the received body approach the class means of the previous body."""
    samples, y = problem.all_samples(i), problem.fed.y
    means = {k: features(own, problem.fed.x[samples[y[samples] == k]]).mean(0) for k in set(y[samples].tolist())}  # q_k

    def loss(body: Weights, batch: Tensor) -> Tensor:
        total = torch.zeros(())
        for k in set(y[batch].tolist()):
            members = features(body, problem.fed.x[batch[y[batch] == k]])
            total = total + F.mse_loss(members, means[k].expand_as(members))
        return total

    return problem.sgd(received, t, i, lr=lr, epochs=1, loss=loss)


def fisher(problem: Problem, w: Weights, i: int) -> float:
    """Return the sum over batches of the squared norm of the gradient of the mean loss."""
    return sum(
        float(sum(g.square().sum() for g in problem.gradient(w, batch).values()))
        for batch in torch.split(problem.all_samples(i), problem.batch_size)
    )


@pytest.mark.parametrize("weighting", ["fisher", "size", "uniform"])
def test_fedas_equals_literal_version(weighting: Any) -> None:
    problem = PROBLEM
    run = problem.run(FedAS(align_lr=0.5, weights=weighting), SCHEDULE)
    body = select_names(problem.start, BODY)
    own = [problem.start] * 5
    for t, clients in enumerate(SCHEDULE, start=1):
        weights = []
        for i in clients:
            aligned = align(problem, body, own[i], 0.5, t, i)
            own[i] = problem.sgd({**aligned, **select_names(own[i], HEAD)}, t, i, epochs=2)
            information = fisher(problem, own[i], i)
            weights.append({"fisher": information, "size": problem.sizes[i], "uniform": 1}[weighting])
        body = average([select_names(own[i], BODY) for i in clients], weights)
    assert same(run.server["params"], body, 1e-10)
    assert all_same(models(run, "received"), own, 1e-10) and all_same(models(run), own, 1e-10)


Mask = set[tuple[str, int]]  # critical entries: tensor name and position


def critical_entries(pre: Weights, post: Weights, tau: float) -> Mask:
    mask: Mask = set()
    for name in post:
        c = ((post[name] - pre[name]) * post[name]).abs().flatten().tolist()
        largest = sorted(c, reverse=True)[: int(tau * len(c))]
        mask |= {(name, place) for place, value in enumerate(c) if value >= min(largest, default=1e9)}
    return mask


def mix(mask: Mask, custom: Weights, global_model: Weights) -> Weights:
    mixed = {}
    for name, weight in global_model.items():
        values = weight.flatten().clone()
        for place in range(len(values)):
            if (name, place) in mask:
                values[place] = custom[name].flatten()[place]
        mixed[name] = values.reshape(weight.shape)
    return mixed


@pytest.mark.parametrize(("tau", "beta"), [(0.5, 100), (0.3, 4), (0.7, 2)])
def test_fedcac_equals_literal_version(tau: float, beta: int) -> None:
    """The server mixes models and stores the last model and mask of each client that has taken part."""
    problem, schedule = make_problem(), [[0, 1, 2], [1, 3, 4], [0, 3]]
    run = problem.run(FedCAC(tau=tau, beta=beta), schedule)
    global_model = problem.start
    last: dict[int, Weights] = {}
    masks: dict[int, Mask] = {}
    next_start = [problem.start] * 5  # start of each client in the next round
    for t, clients in enumerate(schedule):
        for i in clients:
            last[i] = problem.sgd(next_start[i], t + 1, i, epochs=2)
            masks[i] = critical_entries(next_start[i], last[i], tau)
        global_model = average([last[i] for i in clients], [problem.sizes[i] for i in clients])
        overlap = {(i, j): 1 - len(masks[i] ^ masks[j]) / (2 * len(masks[i])) for i in masks for j in masks if i != j}
        average_overlap = sum(overlap.values()) / len(overlap)
        threshold = average_overlap + (t + 1) / beta * (max(overlap.values()) - average_overlap)
        for i in range(5):
            if i not in masks:
                next_start[i] = global_model
                continue
            group = [j for j in masks if j == i or overlap[i, j] >= threshold]
            next_start[i] = mix(masks[i], average([last[j] for j in group], [1] * len(group)), global_model)
    assert same(run.server["params"], global_model, 1e-10)
    assert all_same(models(run, "received"), next_start, 1e-10)
    assert all_same(models(run), [last.get(i, problem.start) for i in range(5)], 1e-10)


# edge cases and differences from public code


def test_fedas_with_zero_fisher_information_uses_uniform_weights() -> None:
    """If the squares of all gradients underflow to 0, the mean is uniform."""
    received = stack([{"params": {"w": torch.tensor([v])}, "fisher": torch.tensor(0.0)} for v in (1.0, 3.0)])
    model = ft.wrap(make_problem().net)
    sizes = torch.tensor([5, 1])
    exchange = ft.Exchange(1, [0, 1], 2, sizes, model, sent={}, received=received, total_size=sizes.sum())
    assert FedAS().receive({}, exchange)["params"]["w"].item() == 2.0


def test_fedcac_marks_fraction_of_each_tensor_without_unchanged_entries() -> None:
    class HalfFrozenNet(nn.Module):
        """A network in which half of one layer never changes."""

        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.fc(x)) * torch.tensor([1.0, 1, 1, 0, 0, 0], dtype=x.dtype))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    problem = Problem(tiny_federation((6, 5)), HalfFrozenNet().double())
    run = problem.run(FedCAC(tau=0.75), [[0, 1]])
    for name, mask in run.server["critical"].items():
        size = prod(mask.shape[1:])
        expected = int(0.75 * size) if name == "head.bias" else size // 2
        assert mask.flatten(1).sum(1).tolist() == [expected] * 2
    assert not run.server["critical"]["fc.weight"][:, 3:].any()


def test_overlap_is_relative_to_own_mask() -> None:
    """Masks may differ in size; the overlap is then not symmetric."""
    overlap = overlaps({"w": torch.tensor([[True, True, False], [False, True, False], [False, False, False]])})
    assert overlap[:2, :2].tolist() == [[1.0, 0.75], [0.5, 1.0]]
    assert bool(overlap.isfinite().all())  # also for a client without critical entries


def test_rounding_does_not_separate_clients_with_equal_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounded mean of twelve values of 0.1 is above 0.1."""
    all_clients = torch.ones(4, dtype=torch.bool)
    monkeypatch.setattr("fedtailor.methods.fedcac.overlaps", lambda masks: torch.full((4, 4), 0.1, dtype=torch.float64))
    assert FedCAC()._collaborators({"w": all_clients[:, None]}, all_clients, round=1).all()


def test_client_without_critical_entries_does_not_affect_collaborators() -> None:
    """Its overlaps would be far below 0 and would reduce the threshold of all other clients."""
    masks = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    found = FedCAC()._collaborators({"w": masks}, torch.ones(4, dtype=torch.bool), round=1)
    without = FedCAC()._collaborators({"w": masks[:3]}, torch.ones(3, dtype=torch.bool), round=1)
    assert torch.equal(found[:3, :3], without) and found[3].tolist() == [False, False, False, True]
    assert not without.all()


def test_fedcac_averages_running_statistics() -> None:
    problem = make_batch_norm_problem()
    cac, avg = (problem.run(m, [[0, 1, 2]]) for m in (FedCAC(), FedAvg()))
    for i in range(3):
        for kind in ("running_mean", "running_var"):
            name = f"downsample.1.{kind}"
            assert torch.equal(cac.personal(i, "received")[name], cac.personal(0, "received")[name])
            assert torch.allclose(cac.personal(i, "received")[name], avg.server["params"][name])
