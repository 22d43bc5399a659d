"""A literal version of Self-FL (Algorithms 1 and 2, Appendix G.4): loops over clients and layers, in float64.

Names follow the symbols of the paper; a variance that is not known yet is None.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from support.problem import Problem, Weights, average, inner, minus, zeros

Known = float | None  # a variance, None while it is unknown
MIN_VARIANCE = 1e-12  # lower bound of σ_0² + σ_k²


def squared_distance(x: Weights, y: Weights) -> float:
    """‖x − y‖², summed over the coordinates of all layers."""
    return inner(minus(x, y), minus(x, y))


def two_pass_variance(xs: Sequence[Weights]) -> float:
    """Eq. 18 for vectors: the mean squared distance from the mean, summed over coordinates."""
    mean = average(xs, [1.0] * len(xs))
    return sum(squared_distance(x, mean) for x in xs) / len(xs)


def w(sigma_0: float, sigma_k: float) -> float:
    """w_k = 1/(σ_0² + σ_k²); both arguments are variances."""
    return 1 / max(sigma_0 + sigma_k, MIN_VARIANCE)


def all_weights(sigma_0: float, sigmas: Sequence[Known], known: Sequence[float]) -> list[float]:
    """Return w for each variance.

    An unknown variance is replaced by the mean of the known ones; if none is known, all weights are equal.
    """
    if not known:
        return [1.0 for _ in sigmas]
    typical = sum(known) / len(known)
    return [w(sigma_0, typical if sigma is None else sigma) for sigma in sigmas]


def known_only(sigmas: Sequence[Known]) -> list[float]:
    return [sigma for sigma in sigmas if sigma is not None]


@dataclass
class Client:
    """The state of client m."""

    theta: Weights  # θ_m
    minimum: Weights  # θ_{m,t} of Algorithm 2
    mean: Weights  # x̄_t, initially 0
    running: float = 0.0  # σ̂_t² of Eq. 19
    count: int = 0  # t, counter of the client (Remark E.1)
    steps: int = 0  # ℓ in its last round
    true_sigma: Known = None  # σ_m², where it is not estimated

    @property
    def sigma(self) -> Known:
        """σ_m²; an estimate is None until two rounds are counted."""
        if self.true_sigma is not None:
            return self.true_sigma
        return self.running if self.count >= 2 else None


@dataclass
class Upload:
    """The upload of client m."""

    theta: Weights  # θ_m^t, or θ_{m,t} in Algorithm 2
    sigma: Known  # σ_m²
    samples: int


@dataclass
class Log:
    """The expected metrics of a round."""

    between: float  # σ_0² after the round
    variances: list[Known]  # known to the server after the round
    gains: list[float]  # GAIN_m with these variances; 1 if σ_m² is unknown
    steps: dict[int, int]  # ℓ_m of the participants
    variance: dict[int, Known]  # σ_m² of the participants after the round
    gain: dict[int, float]  # GAIN_m of the participants at the start of the round


@dataclass
class LiteralSelfFL:
    """Server, clients, and metrics of Self-FL."""

    problem: Problem
    lr: float  # η
    max_steps: int = 40  # ℓ_max
    default_steps: int = 20
    warmup: int = 5
    forgetting: float = 0.0
    likelihood: str = "sum"
    adjust_start: bool = True
    adjust_steps: bool = True
    adjust_weights: bool = True
    smoothing: bool = True
    augmented: bool = False
    minimum_steps: int = 100
    clusters: tuple[int, ...] = ()
    known_between: float | None = None  # σ_0²
    known_within: float | None = None  # N_m σ_m²

    theta: Weights = field(init=False)
    sigma_0: float = field(init=False, default=0.0)  # σ_0²
    sigmas: list[Known] = field(init=False)  # last known σ_k² at the server
    clients: list[Client] = field(init=False)
    representatives: dict[int, Weights] = field(init=False, default_factory=dict)  # of clusters that have taken part
    representative_sigmas: dict[int, Known] = field(init=False, default_factory=dict)
    logs: list[Log] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        start = self.problem.start
        self.theta = start
        self.sigma_0 = self.known_between or 0.0
        true = [None if self.known_within is None else self.known_within / size for size in self.problem.sizes]
        self.sigmas = list(true)
        self.clients = [Client(start, start, zeros(start), true_sigma=sigma) for sigma in true]

    def run(self, schedule: Sequence[Sequence[int]]) -> "LiteralSelfFL":
        for number, participants in enumerate(schedule, start=1):
            self.round(number, participants)
        return self

    def round(self, number: int, participants: Sequence[int]) -> None:
        total = sum(all_weights(self.sigma_0, self.sigmas, known_only(self.sigmas)))  # W = Σ_k w_k over all M clients
        gain = {m: self.gain_at_client(m, total) for m in participants}
        uploads = [self.client_update(number, m, total) for m in participants]
        self.server_update(number, participants, uploads)
        self.logs.append(
            Log(
                between=self.sigma_0,
                variances=list(self.sigmas),
                gains=[self.gain_at_server(m) for m in range(self.problem.num_clients)],
                steps={m: self.clients[m].steps for m in participants},
                variance={m: self.clients[m].sigma for m in participants},
                gain=gain,
            )
        )

    # client

    def client_update(self, number: int, m: int, total: float) -> Upload:
        client, counted = self.clients[m], number > self.warmup
        start, steps = self.theta, self.default_steps
        if counted and client.sigma is not None:
            others = total - w(self.sigma_0, client.sigma)  # W_−m
            if self.adjust_start:
                start = self.initial_value(client, client.sigma, others)
            if self.adjust_steps:
                steps = self.local_steps(m, client.sigma, others)
        client.theta = self.local_train(number, m, start, steps)
        client.steps = steps
        if self.augmented:
            client.minimum = self.local_train(number, m, client.theta, self.minimum_steps)
        if counted:
            self.update_variance(client)
        return Upload(self.optimum(client), client.sigma, self.problem.sizes[m])

    def initial_value(self, client: Client, sigma: float, others: float) -> Weights:
        """Eq. 10, and Eq. 21 of Algorithm 2: θ − (w_m/W_−m)(θ_m − θ)."""
        if self.problem.num_clients == 1:
            return self.theta
        own, ratio = self.optimum(client), w(self.sigma_0, sigma) / others
        return {name: self.theta[name] - ratio * (own[name] - self.theta[name]) for name in self.theta}

    def local_steps(self, m: int, sigma: float, others: float) -> int:
        """Eq. 8, rounded and clipped to [1, ℓ_max]; it assumes a summed loss, so a mean loss requires η/N_m."""
        if self.problem.num_clients == 1:
            return self.max_steps
        eta = self.lr / self.problem.sizes[m] if self.likelihood == "sum" else self.lr
        if eta >= sigma:
            return 1
        if eta / sigma < 2**-53:  # 1 − η/σ_m² rounds to 1: infinitely many steps
            return self.max_steps
        steps = math.log(others / (1 / sigma + others)) / math.log(1 - eta / sigma)
        return min(max(round(steps), 1), self.max_steps)

    def local_train(self, number: int, m: int, theta: Weights, steps: int) -> Weights:
        stream = self.problem.stream(number, m)
        for _ in range(steps):
            grad = self.problem.gradient(theta, next(stream))
            theta = {name: theta[name] - self.lr * grad[name] for name in theta}
        return theta

    def update_variance(self, client: Client) -> None:
        """Eq. 19 with the missing square; a forgetting factor is a lower bound of the gain."""
        x, before = self.optimum(client), client.mean
        client.count += 1
        g = max(1 / client.count, self.forgetting)
        client.mean = {name: (1 - g) * before[name] + g * x[name] for name in x}
        mean_change, deviation = squared_distance(client.mean, before), squared_distance(x, client.mean)
        client.running = (1 - g) * (client.running + mean_change) + g * deviation

    def optimum(self, client: Client) -> Weights:
        """Return the estimate of the local optimum θ_m^(L): θ_m, or the local minimum in Algorithm 2."""
        return client.minimum if self.augmented else client.theta

    # server

    def server_update(self, number: int, participants: Sequence[int], uploads: Sequence[Upload]) -> None:
        if len(uploads) > 1 and self.known_between is None:
            self.sigma_0 = two_pass_variance([upload.theta for upload in uploads])  # Eq. 14 (22) with 18
        for m, upload in zip(participants, uploads, strict=True):
            if upload.sigma is not None:
                self.sigmas[m] = upload.sigma
        if number <= self.warmup:  # FedAvg
            self.theta = average([u.theta for u in uploads], [u.samples for u in uploads])
            return
        estimate = self.mean_over_clusters(participants, uploads) if self.clusters else self.mean_over_clients(uploads)
        activity = len(uploads) / self.problem.num_clients if self.smoothing else 1.0  # C
        self.theta = {n: (1 - activity) * self.theta[n] + activity * estimate[n] for n in self.theta}

    def mean_over_clients(self, uploads: Sequence[Upload]) -> Weights:
        """θ̂ of Eq. 11 (Eq. 23) over these clients, with the variances of this round."""
        weights: list[float] = [upload.samples for upload in uploads]
        if self.adjust_weights:
            weights = all_weights(self.sigma_0, [upload.sigma for upload in uploads], known_only(self.sigmas))
        return average([upload.theta for upload in uploads], weights)

    def mean_over_clusters(self, participants: Sequence[int], uploads: Sequence[Upload]) -> Weights:
        """G.4: clusters without participants are represented by their last representative."""
        for c in range(max(self.clusters) + 1):
            members = [upload for m, upload in zip(participants, uploads, strict=True) if self.clusters[m] == c]
            if members:
                known = known_only([upload.sigma for upload in members])
                self.representatives[c] = self.mean_over_clients(members)
                self.representative_sigmas[c] = sum(known) / len(known) if known else None
        active = sorted(self.representatives)
        weights = [1.0 for _ in active]
        if self.adjust_weights:
            sigmas = [self.representative_sigmas[c] for c in active]
            weights = all_weights(self.sigma_0, sigmas, known_only(sigmas))
        return average([self.representatives[c] for c in active], weights)

    # GAIN_m = 1 + σ_m² Σ_{k≠m} w_k

    def gain_at_client(self, m: int, total: float) -> float:
        """Return the gain that the client computes from W at the start of a round."""
        sigma = self.clients[m].sigma
        return 1.0 if sigma is None else 1 + sigma * (total - w(self.sigma_0, sigma))

    def gain_at_server(self, m: int) -> float:
        """Return the gain that the server computes from its variances."""
        sigma, gain = self.sigmas[m], 1.0
        if sigma is None:
            return gain
        for k, weight in enumerate(all_weights(self.sigma_0, self.sigmas, known_only(self.sigmas))):
            if k != m:
                gain += sigma * weight
        return gain
