"""Methods that adapt how a client trains to what is known about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.batch import Batch
from fedtailor.errors import Refused
from fedtailor.local import LocalView
from fedtailor.method import Exchange, Method, Setup, SGDMethod
from fedtailor.trees import (
    Tree,
    add,
    combine,
    dot,
    map_leaves,
    mean,
    put,
    repeat,
    scale,
    select,
    squared_distance,
    squared_norms,
    sub,
    take,
    zeros_like,
)  # fmt: skip

_SMALLEST = 1e-12  # of a variance, so that its inverse is finite
_UNKNOWN = -1.0  # a variance that is not known yet


def weight_of(between: Tensor, own: Tensor) -> Tensor:
    """w = 1 / (σ_0² + σ_m²).

    >>> weight_of(torch.tensor(1.0), torch.tensor(3.0))
    tensor(0.2500)
    """
    return 1 / (between + own).clamp(min=_SMALLEST)


def start_of(common: Tree, own: Tree, weight: Tensor, others: Tensor) -> Tree:
    """Equation 10: the common model θ without what this client put into it; `others` is Σ_{k≠m} w_k.

    >>> start_of({"a": torch.tensor(1.0)}, {"a": torch.tensor(3.0)}, torch.tensor(1.0), torch.tensor(2.0))
    {'a': tensor(0.)}
    """
    return sub(common, scale(sub(own, common), weight / others))


def steps_needed(rate: Tensor, variance: Tensor, others: Tensor) -> Tensor:
    """Equation 8 as a real number: the ℓ with (1 − rate/σ²)^ℓ = W_−m / (1/σ² + W_−m); needs rate < σ².

    >>> steps_needed(torch.tensor(0.5), torch.tensor(1.0), torch.tensor(1.0))
    tensor(1.)
    """
    pull = others * variance  # GAIN − 1
    return -torch.log1p(1 / pull) / torch.log1p(-rate / variance)


def update_variance(mean: Tree, variance: Tensor, new: Tree, gain: Tensor) -> tuple[Tree, Tensor]:
    """Running mean and variance (summed over coordinates) with one more value of weight `gain`, which is 1/t for the
    t-th. Equation 19 prints the middle term without its square.

    >>> update_variance({"a": torch.tensor(1.0)}, torch.tensor(0.0), {"a": torch.tensor(3.0)}, torch.tensor(0.5))
    ({'a': tensor(2.)}, tensor(1.))
    """
    moved = add(mean, scale(sub(new, mean), gain))
    variance = (1 - gain) * (variance + squared_distance(moved, mean)) + gain * squared_distance(new, moved)
    return moved, variance


def _spread(stacked: Tree) -> Tensor:
    """The variance over clients, summed over coordinates (Eq. 14 with 18)."""
    centre = mean(stacked)
    return squared_norms({name: leaf - centre[name] for name, leaf in stacked.items()}).mean()


def _fill(variances: Tensor, known: Tensor) -> Tensor:
    """Variances with the mean of the known ones for unknown; 0 would give a stranger the largest weight."""
    usual = known[known >= 0].mean() if bool((known >= 0).any()) else known.new_zeros(())
    return torch.where(variances >= 0, variances, usual)


@dataclass(frozen=True)
class SelfFL(Method):
    """Chen et al., "Self-Aware Personalized Federated Learning", NeurIPS 2022.

    σ_m² says how sure client m is of its model (its variance over rounds), σ_0² how much clients differ. They set where
    a client starts, how many steps it takes and how it counts in the mean. While the model still travels, its variance
    is travel, so the first `warmup` rounds are FedAvg. augmented is Algorithm 2; `clusters` the paper's G.4: the mean
    is over the last models of all clusters, not over the clients of the round.
    """

    lr: float = 0.1  # η, local learning rate
    max_steps: int = 40  # ℓ_max, most local steps
    default_steps: int = 20  # local steps while σ_m² is unknown, or if steps are not adjusted
    warmup: int = 5  # rounds of FedAvg before anything is counted
    forgetting: float = 0.0  # least weight of the newest model in the running variance
    likelihood: Literal["sum", "mean"] = "sum"  # Eq. 8 for a mean loss (η/N_m), or as printed (η)
    adjust_start: bool = True  # Eq. 10
    adjust_steps: bool = True  # Eq. 8
    adjust_weights: bool = True  # Eq. 11; else by samples
    smoothing: bool = True  # θ moves by the share of clients that took part
    augmented: bool = False  # Algorithm 2: variances and mean of local minima, twice the bytes
    minimum_steps: int = 100  # further steps to a local minimum, if augmented
    clusters: tuple[int, ...] = ()  # the cluster of every client, 0 to K − 1; none: no clusters
    down: ClassVar[str] = "model, 2 numbers"
    up: ClassVar[str] = "model, 1 number"
    keeps: ClassVar[str] = "own model, its mean and variance over rounds"
    newcomer: ClassVar[str] = "the common model, where its own begins; its variance is taken for the usual one"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_steps", "default_steps", "minimum_steps"):
            self.require(getattr(self, name) >= 1, name, "at least 1")
        self.require(self.warmup >= 0, "warmup", "at least 0")
        self.require(0 <= self.forgetting < 1, "forgetting", "at least 0 and below 1")
        self.require_choice("likelihood", "sum", "mean")
        known = isinstance(self.clusters, (tuple, list)) and all(type(number) is int for number in self.clusters)
        whole = known and set(self.clusters) == set(range(len(set(self.clusters))))
        self.require(whole, "clusters", "a list of whole numbers from 0 on, none left out")

    def init_server(self, setup: Setup) -> Tree:
        self.require(len(self.clusters) in (0, setup.num_clients), "clusters", "one number for every client")
        like = setup.like
        server: Tree = {
            "params": setup.params,
            "between": like.new_zeros(()),
            "variances": like.new_full((setup.num_clients,), _UNKNOWN),
        }
        count = len(set(self.clusters))
        if not count:
            return server
        return server | {
            "representatives": repeat(setup.params, count),
            "representative_variances": like.new_full((count,), _UNKNOWN),
            "active": torch.zeros(count, dtype=torch.bool, device=like.device),
        }

    def welcome(self, server: Tree, setup: Setup, before: int) -> Tree:
        """A newcomer's variance is unknown, so it counts in Σ_k w_k, which everyone is told, by the mean of the known
        ones."""
        if self.clusters:
            raise Refused("SelfFL with clusters cannot take newcomers: it does not know which cluster they are of.")
        return super().welcome(server, setup, before)

    def init_client(self, setup: Setup) -> Tree:
        like = setup.like
        state: Tree = {
            "params": setup.params,
            "mean": zeros_like(setup.params),
            "variance": like.new_zeros(()),
            "count": like.new_zeros(()),
            "steps": like.new_zeros(()),
        }
        return state | {"minimum": setup.params} if self.augmented else state

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        weights = weight_of(server["between"], _fill(server["variances"], server["variances"]))
        told = {"params": server["params"], "between": server["between"], "total_weight": weights.sum()}
        return repeat(told, len(clients))

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        adapts = (state["count"] >= 2) & (local.round > self.warmup)
        start, steps = self._start(local, state, message, adapts), self._steps(local, state, message, adapts)
        most = max(self.max_steps, self.default_steps)
        params = local.sgd(local.loss, start, lr=self.lr, steps=steps, max_steps=most)
        new: Tree = {"params": params, "steps": steps}
        if self.augmented:
            new["minimum"] = local.sgd(local.loss, params, lr=self.lr, steps=self.minimum_steps)
        new = state | new | self._count(local, state, new["minimum"] if self.augmented else params)
        upload = {"params": params, "variance": torch.where(new["count"] >= 2, new["variance"], _UNKNOWN)}
        return new, upload | ({"minimum": new["minimum"]} if self.augmented else {})

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        models = exchange.received["minimum" if self.augmented else "params"]
        clients = torch.tensor(exchange.clients, device=server["variances"].device)
        spread = _spread(exchange.model.trainable(models))
        variances = server["variances"].index_copy(0, clients, exchange.received["variance"])
        new = server | {"between": spread if len(clients) > 1 else server["between"], "variances": variances}
        if exchange.round <= self.warmup:
            return new | {"params": mean(models, exchange.sizes)}
        own = _fill(exchange.received["variance"], variances)
        weights = weight_of(new["between"], own) if self.adjust_weights else exchange.sizes
        if self.clusters:
            new |= self._represent(new, exchange, models, weights)
            estimate = self._mean_of_clusters(new)
        else:
            estimate = mean(models, weights)
        share = len(clients) / exchange.num_clients if self.smoothing else 1.0
        return new | {"params": add(scale(server["params"], 1 - share), scale(estimate, share))}

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        params: Tree = state["params"]
        return params

    def note(self, local: LocalView, state: Tree, message: Tree, upload: Tree) -> Tree:
        return {"steps": state["steps"]}

    def monitor(self, before: Tree, after: Tree, exchange: Exchange) -> Tree:
        """σ_0², every client's σ_m² (−1: unknown) and GAIN_m = 1 + σ_m² Σ_{k≠m} w_k, what it may expect to gain."""
        variances = after["variances"]
        weights = weight_of(after["between"], _fill(variances, variances))
        gains = torch.where(variances >= 0, 1 + variances * (weights.sum() - weights).clamp(min=0), 1.0)
        return {"between": after["between"], "variances": variances, "gains": gains}

    def _others(self, state: Tree, message: Tree) -> tuple[Tensor, Tensor]:
        """w_m and Σ_{k≠m} w_k; the latter is 0 where it is lost in the rounding of their sum."""
        weight, total = weight_of(message["between"], state["variance"]), message["total_weight"]
        others = total - weight
        return weight, torch.where(others > 10 * torch.finfo(total.dtype).eps * total, others, 0.0)

    def _start(self, local: LocalView, state: Tree, message: Tree, adapts: Tensor) -> Tree:
        if not self.adjust_start:
            params: Tree = message["params"]
            return params
        weight, others = self._others(state, message)
        own = state["minimum" if self.augmented else "params"]
        start = start_of(message["params"], own, weight, torch.where(others > 0, others, 1.0))
        return select(adapts & (others > 0), message["params"] | local.model.trainable(start), message["params"])

    def _steps(self, local: LocalView, state: Tree, message: Tree, adapts: Tensor) -> Tensor:
        default = torch.full_like(local.size, self.default_steps)
        if not self.adjust_steps:
            return default
        _, others = self._others(state, message)
        rate = torch.full_like(local.size, self.lr) / (local.size if self.likelihood == "sum" else 1)
        solvable = rate < state["variance"]
        variance = torch.where(solvable, state["variance"], 2 * rate)
        needed = steps_needed(rate, variance, others).round().clamp(1, self.max_steps)
        needed = torch.where(solvable, needed, 1.0 if local.num_clients > 1 else float(self.max_steps))
        return torch.where(adapts, needed, default)

    def _count(self, local: LocalView, state: Tree, new: Tree) -> Tree:
        """One more model in the running variance; those of the warm-up are not counted."""
        if local.round <= self.warmup:
            return {}
        count = state["count"] + 1
        gain = (1 / count).clamp(min=self.forgetting)
        learnt, before = local.model.trainable(new), local.model.trainable(state["mean"])
        moved, variance = update_variance(before, state["variance"], learnt, gain)
        return {"count": count, "mean": state["mean"] | moved, "variance": variance}

    def _represent(self, server: Tree, exchange: Exchange, models: Tree, weights: Tensor) -> Tree:
        """Every cluster that took part is represented by the mean of its clients of this round."""
        cluster = torch.tensor([self.clusters[client] for client in exchange.clients], device=weights.device)
        here = torch.tensor(sorted(set(cluster.tolist())), device=weights.device)
        member = (cluster[None] == here[:, None]) * weights.double()
        received = exchange.received["variance"]
        means = [received[(cluster == c) & (received >= 0)].mean() for c in here]  # NaN where none is known
        variances = torch.stack(means).nan_to_num(nan=_UNKNOWN)
        return {
            "representatives": put(server["representatives"], here, combine(member / member.sum(1, True), models)),
            "representative_variances": server["representative_variances"].index_copy(0, here, variances),
            "active": server["active"].index_fill(0, here, True),
        }

    def _mean_of_clusters(self, server: Tree) -> Tree:
        active = server["active"].nonzero()[:, 0]
        variances = server["representative_variances"][active]
        weights = weight_of(server["between"], _fill(variances, variances)) if self.adjust_weights else None
        return mean(take(server["representatives"], active), weights)


@dataclass(frozen=True)
class PerFedAvg(SGDMethod):
    """Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
    Meta-Learning Approach", NeurIPS 2020.

    The common model is trained to be good after a step of adaptation: w̃ = w − α ∇f(w; D), then w ← w − β ∇f(w̃; D′). To
    use it, a client adapts a copy to its training data and forgets it. The true slope has a factor 1 − α ∇²f(w; D″)
    before ∇f(w̃; D′): left out by "none" (FO), by "difference" (HF) made of two more slopes. A batch is dealt out to D,
    D′ and D″; where one is left without samples it is the whole batch, so that a client of one sample learns too (batch
    normalisation sees the whole batch in each). The paper's β is too small for tens of rounds; its α works.
    """

    lr: float = 0.1  # β, step of the common model (0.001 in the paper)
    inner_lr: float = 0.01  # α, step of the adaptation, in training and in use
    adapt_steps: int = 1  # steps of the adaptation in use, a batch each
    hessian: Literal["none", "difference"] = "none"  # first order (FO), or by a central difference (HF)
    delta: float = 0.001  # δ, width of that difference
    weights: Literal["uniform", "size"] = "uniform"  # of clients in the average: all alike (the paper's), or by samples

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.inner_lr >= 0, "inner_lr", "at least 0")
        self.require(self.adapt_steps >= 1, "adapt_steps", "at least 1")
        self.require_choice("hessian", "none", "difference")
        self.require(self.delta > 0, "delta", "above 0")
        self.require_choice("weights", "uniform", "size")

    @property
    def plain_mean(self) -> bool:
        return self.weights == "uniform"

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        def objective(params: Tree, batch: Batch) -> Tensor:
            parts = batch.deal(2 if self.hessian == "none" else 3)  # D, D′ and for the Hessian D″
            here = map_leaves(Tensor.detach, params)
            step = scale(local.slope(local.loss, here, parts[0]), self.inner_lr)
            loss = local.loss(sub(params, step), parts[1])  # w̃ = w − step, and its slope by w is that by w̃
            if self.hessian == "none":
                return loss
            slope = scale(local.slope(local.loss, sub(here, step), parts[1]), self.delta)
            ahead, behind = (local.slope(local.loss, move(here, slope), parts[2]) for move in (add, sub))
            curve = scale(sub(ahead, behind), self.inner_lr / (2 * self.delta))
            return loss - dot(curve, params)

        params = local.sgd(objective, message["params"], **self.descent)
        return state, {"params": local.refresh(params)}  # running statistics as w has them, not w̃

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes if self.weights == "size" else None)

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        return self._adapt(local, message["params"])

    def trained(self, local: LocalView, state: Tree, message: Tree, upload: Tree) -> Tree:
        return self._adapt(local, upload["params"])

    def _adapt(self, local: LocalView, params: Tree) -> Tree:
        return local.sgd(local.loss, params, lr=self.inner_lr, steps=self.adapt_steps)
