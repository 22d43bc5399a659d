"""A literal version of FedAPM (KDD 2025): loops over rounds, clients, and weights.

Symbols are those of the paper: v personal part, u shared part, π dual variable, z upload, ξ accuracy. Fields have the
names of the library.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from torch import Tensor

from support.problem import Problem, Weights, average, inner, minus, zeros

GradFunction = Callable[[Weights, Tensor], Weights]  # (weights, samples) -> gradient for the trained weights
UNKNOWN = -1.0  # ξ before a client's first round, if it is computed from the first gradient


@dataclass
class Client:
    """The state of client i."""

    v: Weights
    u: Weights
    π: Weights
    z: Weights
    ξ: float


@dataclass
class State:
    """The state after a round, or before round 1."""

    u: Weights
    clients: list[Client]
    drift: dict[int, float] = field(default_factory=dict)  # ‖u_i − ū‖ of the participants
    epochs: dict[int, int] = field(default_factory=dict)  # epochs of the step of u before it stopped


@dataclass(frozen=True)
class Settings:
    """The fields of FedAPM; `layers` are the personal ones."""

    layers: Sequence[str]
    lr: float
    rho: float = 0.01
    sigma: float = 0.01
    alpha: str = "uniform"
    accuracy_start: float | None = None
    accuracy_decay: float = 0.9
    epochs_personal: int = 3
    epochs_shared: int = 3
    weight_decay: float = 0.0
    duals: bool = True
    start: str = "own"
    order: str = "alternate"
    printed_loss: bool = False


def squared_norm(a: Weights) -> float:
    return inner(a, a)


def split(weights: Weights, layers: Sequence[str]) -> tuple[Weights, Weights]:
    """(v, u)"""
    prefixes = tuple(f"{layer}." for layer in layers)
    v = {name: weight for name, weight in weights.items() if name.startswith(prefixes)}
    return v, {name: weight for name, weight in weights.items() if name not in v}


def sgd(
    problem: Problem, s: Settings, t: int, i: int, grad: GradFunction, w: Weights, epochs: int,
    stop: Callable[[Weights], bool] | None = None,
) -> tuple[Weights, int]:  # fmt: skip
    """Run SGD; return weights and number of epochs. `stop` is called before each epoch."""
    for number in range(epochs):
        if stop is not None and stop(w):
            return w, number
        for samples in problem.batches(t, i, number):
            g = grad(w, samples)
            w = {name: w[name] - s.lr * (g[name] + s.weight_decay * w[name]) for name in w}
    return w, epochs


# FedAPM


def client_alpha(problem: Problem, s: Settings, i: int) -> float:
    """α_i"""
    if s.alpha == "uniform":
        return 1 / problem.num_clients
    if s.alpha == "size":
        return problem.sizes[i] / sum(problem.sizes)
    return 1.0


def gradients(problem: Problem, v: Weights, u: Weights, samples: Tensor) -> tuple[Weights, Weights]:
    """(∇_v f, ∇_u f)"""
    g = problem.gradient(v | u, samples)
    return {name: g[name] for name in v}, {name: g[name] for name in u}


def grad_u(
    problem: Problem, s: Settings, i: int, v: Weights, u: Weights, π: Weights, center: Weights, samples: Tensor
) -> Weights:
    """The gradient with respect to u of α f(v, u) + ⟨π, u − ū⟩ + (ρ/2)‖u − ū‖² (Eq. 16)."""
    α = client_alpha(problem, s, i)
    _, g = gradients(problem, v, u, samples)
    return {name: α * g[name] + π[name] + s.rho * (u[name] - center[name]) for name in u}


def grad_v(problem: Problem, s: Settings, i: int, v: Weights, u: Weights, before: Weights, samples: Tensor) -> Weights:
    """The gradient with respect to v of α f(v, u) + (σ/2)‖v − v_i‖² (Eq. 15; Eq. 9 prints it without α)."""
    α = 1.0 if s.printed_loss else client_alpha(problem, s, i)
    g, _ = gradients(problem, v, u, samples)
    return {name: α * g[name] + s.sigma * (v[name] - before[name]) for name in v}


def first_accuracy(problem: Problem, s: Settings, i: int, client: Client) -> float:
    """ξ_i⁰ = ‖α_i ∇_u f_i(v_i, u_i) + π_i‖², the smallest value for which Lemma 1 holds in round 1."""
    return squared_norm(grad_u(problem, s, i, client.v, client.u, client.π, client.u, problem.all_samples(i)))


def train(problem: Problem, s: Settings, t: int, i: int, old: Client, ū: Weights) -> tuple[Client, int]:
    """Line 8 of Algorithm 1."""
    samples_i = problem.all_samples(i)
    ξ = first_accuracy(problem, s, i, old) if old.ξ == UNKNOWN else old.ξ
    ξ = s.accuracy_decay * ξ  # Eq. 10
    start = ū if s.start == "received" else old.u

    def reached(v: Weights, u: Weights) -> bool:  # Eq. 16
        if s.accuracy_start == 0:
            return False
        return squared_norm(grad_u(problem, s, i, v, u, old.π, ū, samples_i)) <= ξ

    if s.order == "together":

        def both(w: Weights, samples: Tensor) -> Weights:
            v, u = split(w, s.layers)
            return grad_v(problem, s, i, v, u, old.v, samples) | grad_u(problem, s, i, v, u, old.π, ū, samples)

        w, epochs = sgd(
            problem, s, t, i, both, old.v | start, s.epochs_shared, stop=lambda w: reached(*split(w, s.layers))
        )
        v, u = split(w, s.layers)
    else:
        v, _ = sgd(
            problem, s, t, i, lambda v, samples: grad_v(problem, s, i, v, start, old.v, samples), old.v,
            s.epochs_personal,
        )  # fmt: skip
        u, epochs = sgd(
            problem, s, t, i, lambda u, samples: grad_u(problem, s, i, v, u, old.π, ū, samples), start,
            s.epochs_shared, stop=lambda u: reached(v, u),
        )  # fmt: skip

    if not s.duals:
        return Client(v, u, old.π, u, ξ), epochs
    π = {name: old.π[name] + s.rho * (u[name] - ū[name]) for name in u}  # Eq. 12
    z = {name: u[name] + π[name] / s.rho for name in u}  # Eq. 13
    return Client(v, u, π, z, ξ), epochs


def fedapm(problem: Problem, schedule: Sequence[Sequence[int]], s: Settings) -> list[State]:
    """Run Algorithm 1; return the states before round 1 and after each round."""
    v, u = split(problem.start, s.layers)
    ξ = UNKNOWN if s.accuracy_start is None else s.accuracy_start
    clients = [deepcopy(Client(v, u, zeros(u), u, ξ)) for _ in range(problem.num_clients)]
    history = [State(u, deepcopy(clients))]
    for t, chosen in enumerate(schedule, start=1):
        ū = average([client.z for client in clients], [1.0] * len(clients))  # Eq. 8, including absent clients
        state = State(ū, clients)
        for i in chosen:
            clients[i], state.epochs[i] = train(problem, s, t, i, clients[i], ū)
            state.drift[i] = math.sqrt(squared_norm(minus(clients[i].u, ū)))
        state.u = average([client.z for client in clients], [1.0] * len(clients))  # Eq. 8 of the next round
        history.append(deepcopy(state))
    return history


# method metrics


def lagrangian(problem: Problem, s: Settings, state: State, i: int) -> float:
    """L_i of Eq. 4."""
    client = state.clients[i]
    loss = float(problem.loss(client.v | client.u, problem.all_samples(i)))
    gap = minus(client.u, state.u)
    return client_alpha(problem, s, i) * loss + inner(client.π, gap) + s.rho / 2 * squared_norm(gap)


def lyapunov(problem: Problem, s: Settings, state: State) -> float:
    """Eq. 17; for a client that has not trained yet, ξ is its initial value."""
    total = 0.0
    for i, client in enumerate(state.clients):
        ξ = first_accuracy(problem, s, i, client) if client.ξ == UNKNOWN else client.ξ
        total += lagrangian(problem, s, state, i) + 29 / (s.rho * (1 - s.accuracy_decay)) * ξ
    return total


def residual(problem: Problem, s: Settings, state: State) -> float:
    """The residual of Definition 1."""
    total = 0.0
    duals = zeros(state.u)
    for i, client in enumerate(state.clients):
        samples_i = problem.all_samples(i)
        g, _ = gradients(problem, client.v, client.u, samples_i)
        total += squared_norm(grad_u(problem, s, i, client.v, client.u, client.π, state.u, samples_i))
        total += squared_norm(g) + squared_norm(minus(client.u, state.u))
        duals = {name: duals[name] + client.π[name] for name in duals}
    return math.sqrt(total + squared_norm(duals))


def moved(before: State, after: State) -> float:
    """Σ_p of Lemma 1."""
    total = 0.0
    for old, new in zip(before.clients, after.clients, strict=True):
        total += squared_norm(minus(new.v, old.v)) + squared_norm(minus(new.u, old.u))
        total += squared_norm(minus(after.u, before.u))
    return total
