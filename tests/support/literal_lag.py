"""A literal version of LAG, layer-wise personalization by gradient conflict, as printed in the paper.

The module also contains literal versions of methods that LAG can wrap: FedAvg, FedProx, SCAFFOLD, FedExP, and pFedMe.
With k = 0, the wrapper equals the inner method. Objects are modified in place.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.method import Method
from fedtailor.core.trees import Tree
from fedtailor.methods import FedAvg, FedExP, FedProx, PFedMe, Scaffold
from support.problem import Problem, Weights, inner, minus, mixture, zeros


def copy(w: Weights) -> Weights:
    return {name: w[name].clone() for name in w}


def shares(problem: Problem, S: Sequence[int], by_size: bool) -> list[float]:
    """p_i = n_i / n_S, or 1/m."""
    n_S = sum(problem.sizes[i] for i in S)
    return [problem.sizes[i] / n_S if by_size else 1 / len(S) for i in S]


def layers_of(w: Weights) -> dict[str, list[str]]:
    """Return the parameters of each layer (weight and bias), in the order of the model."""
    layers: dict[str, list[str]] = {}
    for name in w:
        layers.setdefault(name.rsplit(".", 1)[0], []).append(name)
    return layers


class LiteralFedAvg:
    """Base of the methods that LAG wraps, and FedAvg itself.

    w_i: E epochs of SGD from the received model; w ← Σ p_i w_i.

    With μ > 0, the method is FedProx, whose gradient is ∇f + μ(w − received).
    """

    has_personal_models = False  # whether all layers of the clients' models are personal without LAG

    def __init__(
        self, problem: Problem, lr: float, epochs: int = 2, momentum: float = 0.0, weight_decay: float = 0.0,
        mu: float = 0.0, by_size: bool = True,
    ) -> None:  # fmt: skip
        self.problem, self.lr, self.epochs, self.momentum = problem, lr, epochs, momentum
        self.weight_decay, self.mu, self.by_size = weight_decay, mu, by_size
        self.w = problem.start  # the server model

    def train(self, r: int, i: int, start: Weights, personal: Sequence[str]) -> Weights:
        """Train client i from `start` and return its upload; the parameters in `personal` are personal."""

        def loss(w: Weights, b: Tensor) -> Tensor:
            return self.problem.loss(w, b) + self.mu / 2 * sum((w[n] - start[n]).square().sum() for n in w)

        return self.problem.sgd(
            start, r, i, lr=self.lr, epochs=self.epochs, momentum=self.momentum, weight_decay=self.weight_decay,
            loss=loss,
        )  # fmt: skip

    def aggregate(self, S: Sequence[int], starts: Sequence[Weights], uploads: Sequence[Weights]) -> None:
        """Update the server model."""
        self.w = mixture(shares(self.problem, S, self.by_size), uploads)

    def received(self, i: int) -> Weights:
        """Return the model of client i after a download."""
        return copy(self.w)

    def trained(self, i: int, upload: Weights) -> Weights:
        """Return the model of client i after training."""
        return copy(upload)

    def server_state(self) -> Tree:
        """Return the server state with the names of the library."""
        return {"params": self.w}

    def client_state(self, i: int) -> Tree:
        return {}


class LiteralFedExP(LiteralFedAvg):
    """Clients as in FedAvg; w⁺ = w + η_g Δ̄ with η_g = max{1, Σ p_i ‖Δ_i‖² / (2 (‖Δ̄‖² + ε))}."""

    def __init__(
        self, problem: Problem, lr: float, epochs: int = 2, momentum: float = 0.0, weight_decay: float = 0.0,
        by_size: bool = False, epsilon: float = 0.001, average_last: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(problem, lr, epochs, momentum, weight_decay, by_size=by_size)
        self.epsilon, self.average_last = epsilon, average_last
        self.previous = problem.start
        self.steps: list[float] = []  # η_g of each round

    def aggregate(self, S: Sequence[int], starts: Sequence[Weights], uploads: Sequence[Weights]) -> None:
        p = shares(self.problem, S, self.by_size)
        mean = mixture(p, uploads)
        delta_bar = minus(mean, self.w)  # Δ̄
        numerator = 0.0
        for p_i, start, upload in zip(p, starts, uploads, strict=True):
            delta_i = minus(upload, start)  # Δ_i, relative to the start of client i
            numerator += p_i * inner(delta_i, delta_i)
        eta_g = max(1.0, numerator / (2 * (inner(delta_bar, delta_bar) + self.epsilon)))
        self.steps.append(eta_g)
        self.previous = copy(self.w)
        self.w = {name: self.w[name] + eta_g * delta_bar[name] for name in self.w}

    def received(self, i: int) -> Weights:
        if not self.average_last:
            return copy(self.w)
        return {name: (self.previous[name] + self.w[name]) / 2 for name in self.w}  # (w_t + w_{t+1}) / 2

    def server_state(self) -> Tree:
        return {"params": self.w, "previous": self.previous}


class LiteralScaffold(LiteralFedAvg):
    """Option II: y ← y − η (∇f(y; b) − c_i + c), c_i⁺ = c_i − c + (start − y) / (K η)."""

    def __init__(self, problem: Problem, lr: float, epochs: int = 2, server_lr: float = 1.0) -> None:
        super().__init__(problem, lr, epochs)
        self.server_lr = server_lr
        self.c = zeros(self.w)
        self.c_i = [zeros(self.w) for _ in range(problem.num_clients)]
        self.delta_c: dict[int, Weights] = {}  # of the clients of the round

    def train(self, r: int, i: int, start: Weights, personal: Sequence[str]) -> Weights:
        # for personal parameters, c − c_i = 0
        c = {name: self.c_i[i][name] if name in personal else self.c[name] for name in self.c}
        y, K = copy(start), 0
        for e in range(self.epochs):
            for b in self.problem.batches(r, i, e):
                g = self.problem.gradient(y, b)
                y = {name: y[name] - self.lr * (g[name] - self.c_i[i][name] + c[name]) for name in y}
                K += 1
        new = {name: self.c_i[i][name] - c[name] + (start[name] - y[name]) / (K * self.lr) for name in y}
        self.delta_c[i] = {name: new[name] - self.c_i[i][name] for name in y}
        self.c_i[i] = new
        return y

    def aggregate(self, S: Sequence[int], starts: Sequence[Weights], uploads: Sequence[Weights]) -> None:
        mean = mixture(shares(self.problem, S, by_size=False), uploads)
        N = self.problem.num_clients
        for name in self.w:
            self.w[name] = self.w[name] + self.server_lr * (mean[name] - self.w[name])
            for i in S:
                self.c[name] = self.c[name] + self.delta_c[i][name] / N
        self.delta_c = {}

    def server_state(self) -> Tree:
        return {"params": self.w, "control": self.c}

    def client_state(self, i: int) -> Tree:
        return {"control": self.c_i[i]}


class LiteralPFedMe(LiteralFedAvg):
    """R times: θ̃ ≈ argmin f(θ; b) + (λ/2) ‖θ − w_i‖² in K steps on one batch, then w_i ← w_i − ηλ (w_i − θ̃)."""

    has_personal_models = True

    def __init__(
        self, problem: Problem, lr: float = 0.005, personal_lr: float = 0.09, lam: float = 15.0, inner_steps: int = 5,
        steps: int = 20, beta: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(problem, lr)
        self.personal_lr, self.lam, self.K, self.R, self.beta = personal_lr, lam, inner_steps, steps, beta
        self.theta = [problem.start for _ in range(problem.num_clients)]  # θ̃_i

    def train(self, r: int, i: int, start: Weights, personal: Sequence[str]) -> Weights:
        w_i, theta, stream = copy(start), copy(start), self.problem.stream(r, i)
        for _ in range(self.R):
            b = next(stream)
            for _ in range(self.K):
                g = self.problem.gradient(theta, b)
                for name in theta:
                    theta[name] = theta[name] - self.personal_lr * (g[name] + self.lam * (theta[name] - w_i[name]))
            w_i = {name: w_i[name] - self.lr * self.lam * (w_i[name] - theta[name]) for name in w_i}
        self.theta[i] = theta
        return w_i

    def aggregate(self, S: Sequence[int], starts: Sequence[Weights], uploads: Sequence[Weights]) -> None:
        mean = mixture(shares(self.problem, S, by_size=True), uploads)
        self.w = {name: (1 - self.beta) * self.w[name] + self.beta * mean[name] for name in self.w}

    def received(self, i: int) -> Weights:
        return copy(self.theta[i])

    def trained(self, i: int, upload: Weights) -> Weights:
        return copy(self.theta[i])

    def client_state(self, i: int) -> Tree:
        return {"own": self.theta[i]}


SGD: dict[str, Any] = {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.01}
ME: dict[str, Any] = {"lr": 0.1, "personal_lr": 0.05, "lam": 2.0, "inner_steps": 3, "steps": 7, "beta": 0.5}
INNER: dict[str, tuple[Method, Callable[[Problem], LiteralFedAvg]]] = {
    "fedavg": (FedAvg(**SGD), lambda p: LiteralFedAvg(p, **SGD)),
    "fedavg, uniform": (FedAvg(**SGD, weights="uniform"), lambda p: LiteralFedAvg(p, **SGD, by_size=False)),
    "fedprox": (FedProx(**SGD, mu=0.5), lambda p: LiteralFedAvg(p, **SGD, mu=0.5)),
    "scaffold": (Scaffold(lr=0.1, server_lr=0.7), lambda p: LiteralScaffold(p, 0.1, server_lr=0.7)),
    "fedexp": (FedExP(**SGD), lambda p: LiteralFedExP(p, **SGD)),
    "fedexp, size": (FedExP(**SGD, weights="size"), lambda p: LiteralFedExP(p, **SGD, by_size=True)),
    "fedexp, last": (
        FedExP(**SGD, epsilon=0.01, average_last=False),
        lambda p: LiteralFedExP(p, **SGD, epsilon=0.01, average_last=False),
    ),
    "pfedme": (PFedMe(**ME), lambda p: LiteralPFedMe(p, **ME)),
}


def cosine(h_u: Tensor, h_v: Tensor) -> float | None:
    """cos φ_l(u, v) of Definition 2.1; None if a change is zero, because the angle is undefined."""
    if float(h_u.norm()) == 0.0 or float(h_v.norm()) == 0.0:
        return None
    return float(h_u @ h_v) / (float(h_u.norm()) * float(h_v.norm()))


def conflict_score(h_l: Sequence[Tensor], xi: float) -> tuple[int, float]:
    """GC_ξ(l) of Definition 4.1 over unordered pairs of clients, and the mean cosine, which resolves ties."""
    GC, total, pairs = 0, 0.0, 0
    for u in range(len(h_l)):
        for v in range(u + 1, len(h_l)):
            phi = cosine(h_l[u], h_l[v])
            pairs += 1
            if phi is not None:
                total += phi
                GC += phi < xi
    return GC, total / pairs


def top_layers(GC: Sequence[int], mean_cosine: Sequence[float], k: int) -> set[int]:
    """Algorithm 2, line 8: the k highest scores, without scores of 0 (Remark 5.4).

    Ties are resolved by the lower mean cosine, then by the later layer.
    """
    order = sorted(range(len(GC)), key=lambda at: (-GC[at], mean_cosine[at], -at))
    return {at for at in order[:k] if GC[at] > 0}


def fixed_layers(which: str, k: int, L: int) -> set[int]:
    """First-k, Middle-k, and Last-k of Figure 4."""
    first = {"first": 0, "middle": (L - k) // 2, "last": L - k}[which]
    return set(range(first, first + k))


class LiteralLAG:
    """Algorithms 1 and 2 around an inner method."""

    def __init__(
        self, inner: LiteralFedAvg, k: int, xi: float = -0.1, warmup: int = 1, layers: str = "conflict",
        missing: str = "common",
    ) -> None:  # fmt: skip
        self.inner, self.problem, self.missing = inner, inner.problem, missing
        self.k, self.xi, self.warmup, self.which = k, xi, warmup, layers
        self.layers = layers_of(self.problem.start)
        self.L_p: set[int] = set()  # 𝕃_p: positions of the personal layers of the next round
        self.GC = [0] * len(self.layers)
        self.models = [self.problem.start for _ in range(self.problem.num_clients)]  # as last trained
        self.common = copy(self.problem.start)  # the last version of each layer that was not personal
        self.owned: list[set[int]] = [set() for _ in self.models]  # layers trained since they became personal
        self.last: dict[int, Weights] = {}  # client models after training
        self.history: list[set[int]] = []  # 𝕃_p after each round
        self.scores: list[list[int]] = []  # GC after each round
        self.gains: list[dict[int, float]] = []  # the term of Lemma 5.1 for the clients of each round

    def names(self, positions: set[int]) -> list[str]:
        """Return the parameter names of some layers."""
        return [name for at, layer in enumerate(self.layers) if at in positions for name in self.layers[layer]]

    def train(self, schedule: Sequence[Sequence[int]]) -> "LiteralLAG":
        for r, S in enumerate(schedule, start=1):
            self.round(r, S)
        return self

    def round(self, r: int, S: Sequence[int]) -> None:
        personal = self.names(self.L_p)
        starts, uploads = [], []
        for u in S:
            # (4) and (5): global layers from the server, personal layers as last trained by the client
            start = copy(self.inner.w) | self.personal_layers(u)
            starts.append(start)
            uploads.append(self.inner.train(r, u, start, personal))
        for u, upload in zip(S, uploads, strict=True):
            self.models[u] = copy(upload)
            self.last[u] = self.inner.trained(u, upload)
        mean_start = mixture([1 / len(S)] * len(S), starts)
        for name in personal:  # the server has no copy of these; the mean replaces it
            self.inner.w[name] = mean_start[name]
        self.inner.aggregate(S, starts, uploads)
        self.choose(r, starts, uploads)
        for at in range(len(self.layers)):
            for u in range(len(self.models)):
                if at not in self.L_p:
                    self.owned[u].discard(at)
                elif u in S:
                    self.owned[u].add(at)
            if at not in self.L_p:
                self.common |= {name: self.inner.w[name].clone() for name in self.names({at})}
        self.record_gains(S, starts, uploads)

    def personal_layers(self, u: int) -> Weights:
        """Return the personal layers of client u: as last trained or, without such a version, the last common ones."""
        found: Weights = {}
        for at in self.L_p:
            use_own = self.missing == "own" or at in self.owned[u]
            source = self.models[u] if use_own else self.common
            found |= {name: source[name].clone() for name in self.names({at})}
        return found

    def change(self, at: int, start: Weights, upload: Weights) -> Tensor:
        """h_{l,u} of (2), where l is the layer at a position."""
        return torch.cat([(upload[name] - start[name]).flatten() for name in self.names({at})])

    def choose(self, r: int, starts: Sequence[Weights], uploads: Sequence[Weights]) -> None:
        """Algorithm 2."""
        L, fixed = len(self.layers), self.which != "conflict"
        if r >= max(self.warmup, 1) and fixed:
            self.L_p = fixed_layers(self.which, self.k, L)
        if len(starts) >= 2:
            mean_cosine = []
            for at in range(len(self.layers)):
                h_l = [self.change(at, start, upload) for start, upload in zip(starts, uploads, strict=True)]
                self.GC[at], mean = conflict_score(h_l, self.xi)
                mean_cosine.append(mean)
            if r >= max(self.warmup, 1) and not fixed:
                self.L_p = top_layers(self.GC, mean_cosine, self.k)
        self.scores.append(list(self.GC))
        self.history.append(set(self.L_p))

    def record_gains(self, S: Sequence[int], starts: Sequence[Weights], uploads: Sequence[Weights]) -> None:
        """Lemma 5.1 by (23), where h is the change of weights: −(1/η) Σ_{l ∈ 𝕃_p} ⟨h_{l,u}, h_{l,u} − h̄_l⟩."""
        gains = dict.fromkeys(S, 0.0)
        for at in self.L_p:
            h_l = [self.change(at, start, upload) for start, upload in zip(starts, uploads, strict=True)]
            h_bar = sum(h_l, torch.zeros_like(h_l[0])) / len(S)
            for u, h in zip(S, h_l, strict=True):
                gains[u] -= float(h @ (h - h_bar)) / self.inner.lr
        self.gains.append(gains)

    def received(self, u: int) -> Weights:
        """Return the model of client u in the next round: personal layers as trained, other layers as received."""
        model = self.inner.received(u)
        if not self.inner.has_personal_models:
            model |= self.personal_layers(u)
        return model

    def trained(self, u: int) -> Weights:
        """Return the model of client u after it last trained; a client that has not trained has the received one."""
        return self.last[u] if u in self.last else self.received(u)
