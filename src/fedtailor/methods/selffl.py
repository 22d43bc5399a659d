"""Self-FL: local training and aggregation adapt to within-client and between-client variances."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import ClientWeights, WeightedMethod
from fedtailor.core.fields import FractionBelow1, NonNegative, NonNegativeInt, Positive, PositiveInt
from fedtailor.core.local_training import ScheduledMethod
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.robust import KINDS
from fedtailor.core.training_settings import plain_sgd
from fedtailor.core.trees import (  # fmt: skip
    Tree,
    add,
    combine,
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
)
from fedtailor.errors import ConfigError

_MIN_VARIANCE = 1e-12  # lower bound of variances, so that their inverses are finite
_UNKNOWN = -1.0  # marks a variance that is not known yet


def client_weight(between: Tensor, own: Tensor) -> Tensor:
    """Return w = 1 / (σ_0² + σ_m²).

    >>> client_weight(torch.tensor(1.0), torch.tensor(3.0))
    tensor(0.2500)
    """
    return 1 / (between + own).clamp(min=_MIN_VARIANCE)


def leave_one_out_start(global_model: Tree, own: Tree, weight: Tensor, others: Tensor) -> Tree:
    """Return the global model θ without the contribution of this client (Equation 10); `others` is Σ_{k≠m} w_k.

    >>> leave_one_out_start({"a": torch.tensor(1.0)}, {"a": torch.tensor(3.0)}, torch.tensor(1.0), torch.tensor(2.0))
    {'a': tensor(0.)}
    """
    return sub(global_model, scale(sub(own, global_model), weight / others))


def steps_needed(rate: Tensor, variance: Tensor, others: Tensor) -> Tensor:
    """Return the real number ℓ with (1 − rate/σ²)^ℓ = W_−m / (1/σ² + W_−m) (Equation 8); requires rate < σ².

    >>> steps_needed(torch.tensor(0.5), torch.tensor(1.0), torch.tensor(1.0))
    tensor(1.)
    """
    pull = others * variance  # GAIN − 1
    return -torch.log1p(1 / pull) / torch.log1p(-rate / variance)


def update_variance(mean: Tree, variance: Tensor, new: Tree, gain: Tensor) -> tuple[Tree, Tensor]:
    """Update a running mean and variance (summed over coordinates) with a new value of weight `gain`.

    The weight is 1/t for the t-th value. Equation 19 prints the middle term without its square.

    >>> update_variance({"a": torch.tensor(1.0)}, torch.tensor(0.0), {"a": torch.tensor(3.0)}, torch.tensor(0.5))
    ({'a': tensor(2.)}, tensor(1.))
    """
    moved = add(mean, scale(sub(new, mean), gain))
    variance = (1 - gain) * (variance + squared_distance(moved, mean)) + gain * squared_distance(new, moved)
    return moved, variance


def _variance_over_clients(exchange: Exchange, stacked: Tree) -> Tensor:
    """Return the variance over clients, summed over coordinates (Eqs. 14 and 18)."""
    center = exchange.mean(stacked)
    squares = squared_norms({name: leaf - center[name] for name, leaf in stacked.items()})
    variance: Tensor = exchange.mean({"squares": squares})["squares"]
    return variance


def _fill_unknown(variances: Tensor, known: Tensor) -> Tensor:
    """Replace unknown variances by the mean of the known ones; 0 would give them the largest weight."""
    average = known[known >= 0].mean() if bool((known >= 0).any()) else known.new_zeros(())
    return torch.where(variances >= 0, variances, average)


@dataclass(frozen=True)
class SelfFL(WeightedMethod, ScheduledMethod):
    """Chen et al., "Self-Aware Personalized Federated Learning", NeurIPS 2022.

    σ_m² measures how uncertain client m's model is (its variance over rounds), and σ_0² how much clients differ.
    Together they determine where a client starts, how many steps it takes, and its weight in the mean. While the model
    still converges, its variance reflects this movement, so the first `warmup` rounds are FedAvg. `augmented` selects
    Algorithm 2. `clusters` selects the variant of Appendix G.4: the mean is over the last models of all clusters
    instead of the clients of the round. `known_between` and `known_within` are the true variances of generated data.
    """

    sends_global_model: ClassVar[bool] = True
    title: ClassVar[str] = "Self-FL"
    lr: Annotated[Positive, "η, local learning rate"] = 0.1
    max_steps: Annotated[PositiveInt, "ℓ_max, maximum number of local steps"] = 40
    default_steps: Annotated[PositiveInt, "local steps while σ_m² is unknown, or if steps are not adjusted"] = 20
    warmup: Annotated[NonNegativeInt, "initial rounds of FedAvg, which do not count for the variances"] = 5
    forgetting: Annotated[FractionBelow1, "minimum weight of the newest model in the running variance"] = 0.0
    likelihood: Annotated[Literal["sum", "mean"], "Eq. 8 for a mean loss (η/N_m), or as printed (η)"] = "sum"
    adjust_start: Annotated[bool, "adjust where local training starts (Eq. 10)"] = True
    adjust_steps: Annotated[bool, "adjust the number of local steps (Eq. 8)"] = True
    adjust_weights: Annotated[bool, "adjust client weights (Eq. 11); false: `weights`"] = True
    weights: Annotated[
        ClientWeights, "client weights in the warm-up, or if not adjusted: by number of samples or uniform"
    ] = "size"
    smoothing: Annotated[bool, "move θ by the fraction of participating clients"] = True
    augmented: Annotated[bool, "Algorithm 2: variances and mean of local minima, twice the communication"] = False
    minimum_steps: Annotated[PositiveInt, "additional steps to a local minimum, if augmented"] = 100
    known_between: Annotated[NonNegative | None, "σ_0², if it is known; none: estimated (Eq. 14)"] = None
    known_within: Annotated[Positive | None, "N_m σ_m², if it is known, as in Eq. 16; none: estimated (Eq. 13)"] = None
    clusters: Annotated[tuple[int, ...], "cluster of each client, 0 to K − 1; none: no clusters"] = ()
    download: ClassVar[str] = "model, 2 scalars"
    upload: ClassVar[str] = "model, 1 scalar"
    fixed_settings: ClassVar[Mapping[str, str]] = plain_sgd(
        "Equation 8 gives the number of steps of plain gradient descent"
    )
    client_state: ClassVar[str] = "personal model, its mean and variance over rounds"
    newcomer_start: ClassVar[str] = "the global model as its personal model; the mean of the known variances"

    def __post_init__(self) -> None:
        super().__post_init__()
        integers = isinstance(self.clusters, (tuple, list)) and all(type(number) is int for number in self.clusters)
        complete = integers and set(self.clusters) == set(range(len(set(self.clusters))))
        self.require(complete, "clusters", "a list of integers from 0 to K - 1 without gaps")

    @property
    def robust_kinds(self) -> tuple[str, ...]:
        return super().robust_kinds if self.clusters else KINDS  # the mean of a cluster may be of one client

    def init_server(self, setup: Setup) -> Tree:
        self.require(len(self.clusters) in (0, setup.num_clients), "clusters", "one integer per client")
        like = setup.like
        server: Tree = {
            "params": setup.params,
            "between": like.new_full((), self.known_between or 0.0),
            "variances": like.new_full((setup.num_clients,), _UNKNOWN)
            if self.known_within is None
            else self.known_within / setup.sizes.to(like),
        }
        count = len(set(self.clusters))
        if not count:
            return server
        return server | {
            "representatives": repeat(setup.params, count),
            "representative_variances": like.new_full((count,), _UNKNOWN),
            "active": torch.zeros(count, dtype=torch.bool, device=like.device),
        }

    def grow_server(self, server: Tree, setup: Setup, before: int) -> Tree:
        """Add newcomers with unknown variances.

        In Σ_k w_k, which all clients receive, an unknown variance is replaced by the mean of the known ones.
        """
        if self.clusters:
            raise ConfigError("Self-FL with clusters cannot take newcomers, because their clusters are unknown.")
        return super().grow_server(server, setup, before)

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
        weights = client_weight(server["between"], _fill_unknown(server["variances"], server["variances"]))
        message = {"params": server["params"], "between": server["between"], "total_weight": weights.sum()}
        return repeat(message, len(clients))

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        variance, is_known = self._variance(ctx, state)
        before, adapt = state | {"variance": variance}, is_known & (ctx.round > self.warmup)
        start, steps = self._start(ctx, before, message, adapt), self._steps(ctx, before, message, adapt)
        max_steps, lr = max(self.max_steps, self.default_steps), self.scheduled(ctx, self.lr)
        params = ctx.optimize(ctx.loss, start, lr=lr, steps=steps, max_steps=max_steps)
        new: Tree = {"params": params, "steps": steps}
        if self.augmented:
            new["minimum"] = ctx.optimize(ctx.loss, params, lr=lr, steps=self.minimum_steps)
        new = state | new | self._update_statistics(ctx, state, new["minimum"] if self.augmented else params)
        variance, is_known = self._variance(ctx, new)
        upload = {"params": params, "variance": torch.where(is_known, variance, _UNKNOWN)}
        return new, upload | ({"minimum": new["minimum"]} if self.augmented else {})

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        models = exchange.received["minimum" if self.augmented else "params"]
        clients = torch.tensor(exchange.clients, device=server["variances"].device)
        variances = server["variances"].index_copy(0, clients, exchange.received["variance"])
        new = server | {"variances": variances}
        if self.known_between is None and len(clients) > 1:
            new["between"] = _variance_over_clients(exchange, exchange.model.trainable(models))
        if exchange.round <= self.warmup:
            return new | {"params": exchange.mean(models, self.round_weights(exchange))}
        own = _fill_unknown(exchange.received["variance"], variances)
        weights = client_weight(new["between"], own) if self.adjust_weights else self.round_weights(exchange)
        if self.clusters:
            each = torch.ones_like(exchange.sizes) if weights is None else weights
            new |= self._update_representatives(new, exchange, models, each)
            estimate = self._mean_of_clusters(new)
        else:
            estimate = exchange.mean(models, weights)
        share = len(clients) / exchange.num_clients if self.smoothing else 1.0
        return new | {"params": add(scale(server["params"], 1 - share), scale(estimate, share))}

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return {**state["params"]}

    def client_metrics(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        return {"steps": state["steps"]}

    def server_metrics(self, before: Tree, after: Tree, exchange: Exchange) -> Tree:
        """Return σ_0², σ_m² of each client (−1: unknown), and GAIN_m = 1 + σ_m² Σ_{k≠m} w_k, its expected gain."""
        variances = after["variances"]
        weights = client_weight(after["between"], _fill_unknown(variances, variances))
        gains = torch.where(variances >= 0, 1 + variances * (weights.sum() - weights).clamp(min=0), 1.0)
        return {"between": after["between"], "variances": variances, "gains": gains}

    def _variance(self, ctx: ClientContext, state: Tree) -> tuple[Tensor, Tensor]:
        """Return σ_m², and whether it is known; its estimate requires two counted rounds."""
        if self.known_within is None:
            return state["variance"], state["count"] >= 2
        return self.known_within / ctx.size, torch.ones_like(ctx.size, dtype=torch.bool)

    def _others(self, state: Tree, message: Tree) -> tuple[Tensor, Tensor]:
        """Return w_m and Σ_{k≠m} w_k, which is set to 0 where it is within the rounding error of the total."""
        weight, total = client_weight(message["between"], state["variance"]), message["total_weight"]
        others = total - weight
        return weight, torch.where(others > 10 * torch.finfo(total.dtype).eps * total, others, 0.0)

    def _start(self, ctx: ClientContext, state: Tree, message: Tree, adapt: Tensor) -> Tree:
        """Return the model at which local training starts."""
        if not self.adjust_start:
            params: Tree = message["params"]
            return params
        weight, others = self._others(state, message)
        own = state["minimum" if self.augmented else "params"]
        start = leave_one_out_start(message["params"], own, weight, torch.where(others > 0, others, 1.0))
        return select(adapt & (others > 0), message["params"] | ctx.model.trainable(start), message["params"])

    def _steps(self, ctx: ClientContext, state: Tree, message: Tree, adapt: Tensor) -> Tensor:
        """Return the number of local steps."""
        default = torch.full_like(ctx.size, self.default_steps)
        if not self.adjust_steps:
            return default
        _, others = self._others(state, message)
        rate = torch.full_like(ctx.size, self.scheduled(ctx, self.lr)) / (ctx.size if self.likelihood == "sum" else 1)
        solvable = rate < state["variance"]
        variance = torch.where(solvable, state["variance"], 2 * rate)
        needed = steps_needed(rate, variance, others).round().clamp(1, self.max_steps)
        needed = torch.where(solvable, needed, 1.0 if ctx.num_clients > 1 else float(self.max_steps))
        return torch.where(adapt, needed, default)

    def _update_statistics(self, ctx: ClientContext, state: Tree, new: Tree) -> Tree:
        """Add a model to the running mean and variance; models of the warm-up are not counted."""
        if ctx.round <= self.warmup:
            return {}
        count = state["count"] + 1
        gain = (1 / count).clamp(min=self.forgetting)
        trainable, old_mean = ctx.model.trainable(new), ctx.model.trainable(state["mean"])
        new_mean, variance = update_variance(old_mean, state["variance"], trainable, gain)
        return {"count": count, "mean": state["mean"] | new_mean, "variance": variance}

    def _update_representatives(self, server: Tree, exchange: Exchange, models: Tree, weights: Tensor) -> Tree:
        """Set the representative of each participating cluster to the mean of its clients of this round."""
        cluster = torch.tensor([self.clusters[client] for client in exchange.clients], device=weights.device)
        present = torch.tensor(sorted(set(cluster.tolist())), device=weights.device)
        shares = (cluster[None] == present[:, None]) * weights.double()
        received = exchange.received["variance"]
        means = [received[(cluster == c) & (received >= 0)].mean() for c in present]  # NaN where none is known
        variances = torch.stack(means).nan_to_num(nan=_UNKNOWN)
        return {
            "representatives": put(server["representatives"], present, combine(shares / shares.sum(1, True), models)),
            "representative_variances": server["representative_variances"].index_copy(0, present, variances),
            "active": server["active"].index_fill(0, present, True),
        }

    def _mean_of_clusters(self, server: Tree) -> Tree:
        """Return the mean of the representatives of all clusters that have taken part."""
        active = server["active"].nonzero()[:, 0]
        variances = server["representative_variances"][active]
        weights = client_weight(server["between"], _fill_unknown(variances, variances)) if self.adjust_weights else None
        return mean(take(server["representatives"], active), weights)
