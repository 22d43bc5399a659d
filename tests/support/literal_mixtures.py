"""Literal versions of FedAMP, APPLE, FedFomo, and FedALA: plain loops over clients, in float64."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedtailor.core import random
from support.problem import Problem, Weights, average, inner, minus, mixture

Schedule = Sequence[Sequence[int]]
Matrix = list[list[float]]
PART = 6  # salt of the split of a client's data


def parts(problem: Problem, client: int, share: float, round: int) -> tuple[Tensor, Tensor]:
    """Return the samples of the two parts of a client's data; with round 0, the split is the same in all rounds."""
    own = problem.all_samples(client)
    key = random.make_key(problem.seed, round, 4, torch.tensor(client), PART)
    shuffled = own[random.permutation(key, len(own), None, own.device)]
    cut = max(1, int(share * len(own)))
    return shuffled[:cut], shuffled[cut:] if len(own) > 1 else shuffled


# FedAMP


def attention(models: Sequence[Weights], s: Any) -> Matrix:
    """Return the weights of all mixtures u_i."""
    count = len(models)
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    square = {(i, j): inner(minus(models[i], models[j]), minus(models[i], models[j])) for i, j in pairs}
    unit = sum(square.values()) / len(pairs)
    rows = [[0.0] * count for _ in range(count)]
    for i, j in pairs:
        if s.attention == "cosine":
            cosine = inner(models[i], models[j])
            cosine /= math.sqrt(inner(models[i], models[i]) * inner(models[j], models[j]))
            rows[i][j] = math.exp(s.sharpness * cosine)
        elif s.relative:
            rows[i][j] = s.alpha / (count - 1) * math.exp(-square[i, j] / unit / s.sigma)
        else:
            rows[i][j] = s.alpha * math.exp(-square[i, j] / s.sigma) / s.sigma
    for i, row in enumerate(rows):
        total = sum(row)
        if s.attention == "cosine":
            rows[i] = [(1 - s.self_weight) * a / total for a in row]
        elif total > 1:
            rows[i] = [a / total for a in row]
        rows[i][i] = 1 - sum(rows[i])
    return rows


def fedamp(problem: Problem, schedule: Schedule, s: Any) -> tuple[list[Weights], Matrix]:
    """Everyone's model, and the weights of the next round's mixtures."""
    models = [problem.start for _ in range(problem.num_clients)]
    rows = [[float(i == j) for j in range(len(models))] for i in range(len(models))]
    for t, clients in enumerate(schedule, start=1):
        before = list(models)
        for i in clients:
            u = mixture(rows[i], before)

            def loss(w: Weights, batch: Tensor, u: Weights = u) -> Tensor:
                distance = torch.stack([(w[n] - u[n]).square().sum() for n in w]).sum()
                return problem.loss(w, batch) + float(s.lam / s.alpha / 2) * distance

            models[i] = problem.sgd(u, t, i, lr=s.lr, epochs=s.epochs, loss=loss)
        rows = attention(models, s)
    return models, rows


# FedFomo


def fedfomo(problem: Problem, schedule: Schedule, s: Any, chosen: Sequence[dict[int, list[int]]]) -> Any:
    """Return (models of all clients, P); `chosen` contains the models sent in each round, by client."""
    models = [problem.start for _ in range(problem.num_clients)]
    P = torch.eye(len(models), dtype=torch.float64)
    for t, clients in enumerate(schedule, start=1):
        before = list(models)
        for i in clients:
            start, w = move(problem, before, i, chosen[t - 1][i], s)
            for n, weight in w.items():
                P[i, n] += weight
            rest = parts(problem, i, s.validation, 0)[1]
            models[i] = problem.sgd(start, t, i, lr=s.lr, epochs=s.epochs, own=rest)
    return models, P


def move(
    problem: Problem, models: Sequence[Weights], i: int, chosen: Sequence[int], s: Any
) -> tuple[Weights, dict[int, float]]:
    """Return the model at which client i starts, and the weights w_n."""
    validation, own = parts(problem, i, s.validation, 0)[0], models[i]
    w: dict[int, float] = {}
    for n in chosen:
        difference = minus(models[n], own)
        gain = float(problem.loss(own, validation) - problem.loss(models[n], validation))
        w[n] = gain / (math.sqrt(inner(difference, difference)) + 1e-5)
    total = sum(max(weight, 0.0) for weight in w.values())
    if total <= 0:
        return dict(own), w
    shares = [max(weight, 0.0) / total for weight in w.values()]
    return mixture(shares, [models[n] for n in w]), w


# APPLE


def apple(problem: Problem, schedule: Schedule, s: Any) -> Any:
    """Return (cores, p of all clients, models as last trained, models at the start of the next round)."""
    count, sizes = problem.num_clients, torch.tensor(problem.sizes, dtype=torch.float64)
    p0 = sizes / sizes.sum()
    cores, ps = [problem.start for _ in range(count)], [p0.clone() for _ in range(count)]
    trained = [problem.start for _ in range(count)]
    for t, clients in enumerate(schedule):
        before, last = list(cores), s.pull_rounds * len(schedule)
        strength = 0.0
        if t < last:
            strength = 0.001 ** (t / last) if s.schedule == "exponential" else (1 + math.cos(math.pi * t / last)) / 2
        for i in clients:
            core = {n: w.clone().requires_grad_() for n, w in before[i].items()}
            p = ps[i].clone().requires_grad_()
            learned, rates = [*core.values(), p], [s.lr] * len(core) + [s.weight_lr]
            velocity = [torch.zeros_like(tensor) for tensor in learned]
            for number in range(s.epochs):
                for batch in problem.batches(t + 1, i, number):
                    loss = (
                        problem.loss(mix_cores(p, before, i, core), batch) + strength * s.mu * (p - p0).square().sum()
                    )
                    grads = torch.autograd.grad(loss, learned)
                    velocity = [s.momentum * v + grad for v, grad in zip(velocity, grads, strict=True)]
                    with torch.no_grad():
                        for tensor, v, rate in zip(learned, velocity, rates, strict=True):
                            tensor -= rate * v
            cores[i], ps[i] = {n: w.detach() for n, w in core.items()}, p.detach()
            trained[i] = mix_cores(ps[i], before, i, cores[i])
    return cores, ps, trained, [mix_cores(ps[i], cores, i, cores[i]) for i in range(count)]


def mix_cores(p: Tensor, cores: Sequence[Weights], i: int, own: Weights) -> Weights:
    """Return θ_i(p) with the current core of client i."""
    current = [own if j == i else core for j, core in enumerate(cores)]
    return {n: sum((p[j] * core[n] for j, core in enumerate(current)), torch.zeros(())) for n in own}


# FedALA


def fedala(problem: Problem, schedule: Schedule, s: Any, last: Sequence[str]) -> Any:
    """Return (global model, W of all clients, models as last trained, models at the start of the next round, epochs).

    The last item is the number of epochs that each client needed the first time.
    """
    global_model, own = problem.start, [problem.start for _ in range(problem.num_clients)]
    W = [{n: torch.ones_like(problem.start[n]) for n in last} for _ in own]
    epochs: dict[int, int] = {}

    def adapt(t: int, i: int) -> tuple[Weights, Weights, int]:
        weights = dict(W[i])
        start = {n: (1 - weights[n]) * own[i][n] + weights[n] * w if n in last else w for n, w in global_model.items()}
        if all(torch.equal(global_model[n], own[i][n]) for n in last):
            return start, weights, 0
        losses: list[float] = []
        while len(losses) < (1 if i in epochs else s.first_epochs):
            for batch in problem.batches(t, i, len(losses), parts(problem, i, s.share, t)[0]):
                loss, grad = float(problem.loss(start, batch)), problem.gradient(start, batch)
                for n in last:
                    step = s.weight_lr * grad[n] * (global_model[n] - own[i][n])
                    weights[n] = (weights[n] - step).clamp(0, 1)
                    start[n] = own[i][n] + (global_model[n] - own[i][n]) * weights[n]
            losses.append(loss)
            if len(losses) >= 10 and float(torch.tensor(losses[-10:]).double().std(correction=0)) < 0.1:
                break
        return start, weights, len(losses)

    for t, clients in enumerate(schedule, start=1):
        ends = {}
        for i in clients:
            start, W[i], count = adapt(t, i)
            if count:
                epochs.setdefault(i, count)
            ends[i] = problem.sgd(start, t, i, lr=s.lr, epochs=s.epochs)
        for i, end in ends.items():
            own[i] = end
        global_model = average(list(ends.values()), [problem.sizes[i] for i in clients])
    received = [adapt(len(schedule) + 1, i)[0] for i in range(problem.num_clients)]
    return global_model, W, own, received, epochs
