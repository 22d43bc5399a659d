"""A literal version of FedAPA (IJCAI 2025), Algorithm 1 of the paper: plain loops over clients and layers, in float64.

θ_j is the shared part of client j, φ_j its private head, A the matrix of aggregation weights, and θ̄_i the part that is
sent to client i. Comments explain choices where the paper is unclear or has misprints. The authors' code differs from
the paper; it is the variant "code".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from support.problem import Problem, Weights, inner, minus, mixture

Row = list[float]
Matrix = list[Row]


@dataclass(frozen=True)
class Settings:
    """The fields of the method, with the names of the library."""

    lr: float  # α, local learning rate
    epochs: int = 2  # E
    momentum: float = 0.0
    weight_decay: float = 0.0
    weight_lr: float = 0.01  # η
    self_weight: float = 0.5  # μ
    clip: bool = True
    self_adjust: bool = True
    normalize: bool = True
    share: str = "body"
    weight_momentum: float = 0.0
    printed_sign: bool = False
    variant: str = "paper"


@dataclass
class Outcome:
    """The state of the algorithm, and what was recorded after each round."""

    theta: list[Weights]
    phi: list[Weights]
    A: Matrix
    V: Matrix  # velocity of the weights
    trained: list[Weights]  # ω_i as last trained by client i
    received: list[Weights] = field(default_factory=list)  # ω_i at the start of the next round
    weights: list[Matrix] = field(default_factory=list)  # A after each round
    proxy_before: list[dict[int, float]] = field(default_factory=list)  # per round: client -> J_i
    proxy_after: list[dict[int, float]] = field(default_factory=list)
    unnormalized: int = 0  # rows that kept their old values because their sum was not positive


def fedapa(problem: Problem, schedule: Sequence[Sequence[int]], s: Settings) -> Outcome:
    """Run Algorithm 1; `schedule` contains S^t for each round t."""
    now = initialize(problem, s)
    for t, clients in enumerate(schedule, start=1):
        now.proxy_before.append({})
        now.proxy_after.append({})
        if s.variant == "code":
            run_round_as_code(problem, s, now, t, clients)
        else:
            run_round_as_paper(problem, s, now, t, clients)
        now.weights.append([list(row) for row in now.A])
    for i in range(problem.num_clients):
        row = prepare(now.A[i], i, s) if s.variant == "code" else now.A[i]
        now.received.append({**mixture(row, now.theta), **now.phi[i]})
    return now


def initialize(problem: Problem, s: Settings) -> Outcome:
    """Lines 1 and 2: all clients have the initial model; a_ii = 1 and a_ij = 0 (in the code, all are 0)."""
    clients = range(problem.num_clients)
    own = 0.0 if s.variant == "code" else 1.0
    return Outcome(
        theta=[shared(problem.start, s) for _ in clients],
        phi=[private(problem.start, s) for _ in clients],
        A=[[own if j == i else 0.0 for j in clients] for i in clients],
        V=[[0.0 for _ in clients] for _ in clients],
        trained=[problem.start for _ in clients],
    )


def run_round_as_paper(problem: Problem, s: Settings, now: Outcome, t: int, clients: Sequence[int]) -> None:
    """Lines 6 to 14. "In parallel" is interpreted such that all clients use θ_j and A from the start of the round."""
    theta = list(now.theta)
    for i in clients:
        theta_bar = mixture(now.A[i], theta)  # line 7, equation (5): θ̄_i = Σ_j a_ij θ_j
        theta_i = client_update(problem, s, now, t, i, theta_bar)  # line 8
        grad = proxy_grad(theta, theta_bar, theta_i, s)
        old, stepped = list(now.A[i]), []
        for j in range(problem.num_clients):
            now.V[i][j] = s.weight_momentum * now.V[i][j] + grad[j]
            stepped.append(old[j] - s.weight_lr * now.V[i][j])  # line 10, equation (7)
        now.A[i] = post_process(old, stepped, i, s, now)  # lines 11 to 13
        now.theta[i] = theta_i
        now.proxy_before[-1][i] = proxy(old, theta, theta_i)
        now.proxy_after[-1][i] = proxy(now.A[i], theta, theta_i)


def run_round_as_code(problem: Problem, s: Settings, now: Outcome, t: int, clients: Sequence[int]) -> None:
    """The authors' code: clients take turns, each with the results of the previous one; momentum changes all rows."""
    for i in clients:
        now.A[i] = prepare(now.A[i], i, s)
        used, theta = list(now.A[i]), list(now.theta)
        theta_bar = mixture(used, theta)
        theta_i = client_update(problem, s, now, t, i, theta_bar)
        grad = proxy_grad(theta, theta_bar, theta_i, s)
        for k in range(problem.num_clients):
            for j in range(problem.num_clients):
                now.V[k][j] = 0.9 * now.V[k][j] + (grad[j] if k == i else 0.0)
                now.A[k][j] = now.A[k][j] - s.weight_lr * now.V[k][j]
                if s.clip:
                    now.A[k][j] = min(max(now.A[k][j], 0.0), 1.0)
        now.theta[i] = theta_i
        now.proxy_before[-1][i] = proxy(used, theta, theta_i)
        now.proxy_after[-1][i] = proxy(now.A[i], theta, theta_i)


def client_update(problem: Problem, s: Settings, now: Outcome, t: int, i: int, theta_bar: Weights) -> Weights:
    """Lines 17 to 28, equation (4): train body and head jointly; the head is stored, and the body is uploaded."""
    omega = problem.sgd(
        theta_bar | now.phi[i], t, i, lr=s.lr, epochs=s.epochs, momentum=s.momentum, weight_decay=s.weight_decay
    )
    now.trained[i] = omega
    now.phi[i] = private(omega, s)
    return shared(omega, s)


def proxy_grad(theta: Sequence[Weights], theta_bar: Weights, theta_i: Weights, s: Settings) -> Row:
    """∂J_i/∂a_ij = ⟨θ_j, θ̄_i − θ_i⟩. Equation (7) prints Δθ_i = θ_i − θ̄_i instead, which increases J_i."""
    change = minus(theta_i, theta_bar) if s.printed_sign else minus(theta_bar, theta_i)  # equation (6), if printed
    return [inner(theta_j, change) for theta_j in theta]


def proxy(row: Row, theta: Sequence[Weights], theta_i: Weights) -> float:
    """J_i = ½‖Σ_j a_ij θ_j − θ_i‖², the proxy of the local loss (below equation (7))."""
    difference = minus(mixture(row, theta), theta_i)
    return inner(difference, difference) / 2


def post_process(old: Row, stepped: Row, i: int, s: Settings, now: Outcome) -> Row:
    """Lines 11 to 13. A row whose sum is not positive keeps its old values, because it cannot be normalized."""
    row = list(stepped)
    if s.clip:
        row = [min(max(a, 0.0), 1.0) for a in row]
    if s.self_adjust:
        row[i] = s.self_weight
    if not s.normalize:
        return row
    if not sum(row) > 0:
        now.unnormalized += 1
        return old
    return [a / sum(row) for a in row]


def prepare(row: Row, i: int, s: Settings) -> Row:
    """Prepare a row for aggregation as in the code; a row whose sum is not positive is not normalized."""
    row = list(row)
    if s.self_adjust:
        row[i] = 1.0
    if s.normalize and sum(row) > 0:
        row = [a / sum(row) for a in row]
    return row


def entropy(row: Row) -> float:
    """−Σ p log p of the normalized nonnegative part of a row; 0 if at most one entry is positive."""
    positive = [a for a in row if a > 0]
    return -sum(a / sum(positive) * math.log(a / sum(positive)) for a in positive)


def shared(omega: Weights, s: Settings) -> Weights:
    """θ: the body, or the whole model."""
    return {name: w for name, w in omega.items() if s.share == "all" or not name.startswith("head.")}


def private(omega: Weights, s: Settings) -> Weights:
    """φ: the head, or nothing."""
    return {name: w for name, w in omega.items() if s.share == "body" and name.startswith("head.")}
