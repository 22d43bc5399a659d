"""APPLE: each client learns a weighting of the core models of all clients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.core import random
from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.fields import Fraction, FractionBelow1, NonNegative, NonNegativeInt, Positive, PositiveInt
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.trees import Params, Rows, Tree, map_leaves, mean, put, repeat, take

_CHOICE = 5  # salt of the random choice of cores


@dataclass(frozen=True)
class APPLE(LocalTraining):
    """Luo, Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", IJCAI 2022.

    The model of client i is Σ_j p_ij w_j over the core models of all clients. The client learns its own core w_i and
    its weights p_i, which may have any sign and any sum. p_i is stored as p_0 and its change. The penalty μ‖p_i − p_0‖²
    follows the authors' code; the paper may have half of it. All cores start at the initial model. Running statistics
    of batch normalization are the client's own, because they are not mixed. With `limit`, a client requests in its
    upload the M cores it wants next. Weight decay also pulls p_i toward p_0. The method suits tens of clients: the
    messages of a round take participants × clients models of memory.
    """

    lr: Annotated[Positive, "η_1, learning rate of the core (0.01 in the paper)"] = 0.1
    epochs: Annotated[PositiveInt, "E, local epochs (5 in the paper)"] = 2
    momentum: Annotated[FractionBelow1, "momentum of local SGD (0.9 in the paper, with its lr)"] = 0.0
    weight_lr: Annotated[NonNegative, "η_2, learning rate of p_i (0.001 in the paper)"] = 0.01
    mu: Annotated[NonNegative, "μ, weight of the penalty on p_i − p_0 (0.1 in the paper)"] = 1.0
    pull_rounds: Annotated[Fraction, "L/T, fraction of the rounds with this penalty (0.1 of 160 in the paper)"] = 1.0
    schedule: Annotated[Literal["exponential", "cosine"], "λ(r), how the penalty decays to 0"] = "exponential"
    limit: Annotated[NonNegativeInt, "M, cores sent to a client per round; 0: those of all other clients"] = 0
    download: ClassVar[str] = "core models of all other clients, or of M"
    upload: ClassVar[str] = "core model"
    client_state: ClassVar[str] = "core model, one weight per client"
    keeps_optimizer: ClassVar[bool] = True
    fixed_settings: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("optimizer", "clip_norm"), "p_i has its own learning rate through a scaled gradient, which assumes SGD"
    )
    newcomer_start: ClassVar[str] = "core models of other clients; their weighted mean as its own"

    def init_server(self, setup: Setup) -> Tree:
        num_clients = setup.num_clients
        cores = repeat(setup.model.trainable(setup.params), num_clients)
        wanted = ~torch.eye(num_clients, dtype=torch.bool, device=setup.sizes.device)
        if not self.limit:
            return {"cores": cores, "wanted": wanted}
        keys = [random.make_key(setup.seed, _CHOICE, client) for client in range(num_clients)]
        draws = torch.stack([random.uniform(key, (num_clients,), torch.float64, wanted.device) for key in keys])
        return {
            "cores": cores,
            "wanted": _smallest_entries(torch.where(wanted, draws, torch.inf), min(self.limit, num_clients - 1)),
        }

    def init_client(self, setup: Setup) -> Tree:
        like = setup.like
        shares = (setup.sizes.double() / setup.sizes.sum()).to(like)  # p_0
        learned = {"core": setup.params, "change": torch.zeros_like(shares)}
        state: Tree = {**learned, "shares": shares, **self.init_optimizer(learned)}
        if not self.limit:
            return state
        seen = torch.zeros_like(shares, dtype=torch.bool)
        return state | {"cache": repeat(setup.model.trainable(setup.params), setup.num_clients), "seen": seen}

    def grow_server(self, server: Tree, setup: Setup, before: int) -> Tree:
        """Set the core of each newcomer to the mean of all cores, weighted by number of samples.

        With this core, p_0 over more clients gives the same mixture. Other clients receive it like every other core;
        with a limit, when they request it.
        """
        new = super().grow_server(server, setup, before)
        newcomers = torch.arange(setup.num_clients, device=setup.sizes.device) >= before
        average = mean(new["cores"], torch.where(newcomers, 0, setup.sizes))
        cores = put(new["cores"], newcomers.nonzero()[:, 0], repeat(average, int(newcomers.sum())))
        return {
            "cores": cores,
            "wanted": new["wanted"] & (newcomers[:, None] | ~newcomers) if self.limit else new["wanted"],
        }

    def grow_client(self, state: Tree, setup: Setup) -> Tree:
        """Recompute p_0 for all clients and retain the change of p_i.

        With a limit, the mean of the cores seen so far replaces the core of a newcomer until the client receives it.
        """
        new = super().grow_client(state, setup) | {"shares": self.init_client(setup)["shares"]}
        if not self.limit or not state["seen"].any():
            return new
        before, seen = len(state["seen"]), state["seen"].nonzero()[:, 0]
        average = mean(take(state["cache"], seen), state["shares"][seen])
        newcomers = torch.arange(before, setup.num_clients, device=seen.device)
        return new | {"cache": put(new["cache"], newcomers, repeat(average, len(newcomers)))}

    def init_newcomer(self, setup: Setup, message: Tree) -> Tree:
        """Start the own core at the mean of the received cores, weighted by number of samples.

        With a limit, cores that were not received start there, too.
        """
        present = next(iter(message["cores"].values())).present
        average = mean({name: rows.values for name, rows in message["cores"].items()}, setup.sizes * present)
        state = self.init_client(setup) | {"core": setup.params | average}
        return state | {"cache": repeat(average, setup.num_clients)} if self.limit else state

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        present = server["wanted"][list(clients)]
        return {"cores": {name: Rows(leaf, present) for name, leaf in repeat(server["cores"], len(clients)).items()}}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        cores, known = self._known_cores(state, message)
        mixture, penalty_weight = (
            self._mixture(ctx, state, cores),
            self._penalty_weight(ctx.round - 1, ctx.rounds),
        )

        def objective(learned: Tree, batch: Batch) -> Tensor:
            fixed = learned["change"].detach()
            change = fixed + self.weight_lr / self.lr * (learned["change"] - fixed)  # same value, own learning rate
            loss: Tensor = (
                ctx.loss(mixture(learned | {"change": change}), batch) + penalty_weight * change.square().sum()
            )
            return loss

        start = {"core": state["core"], "change": state["change"]}
        learned, new = self.optimize(ctx, objective, start, state)
        upload: Tree = {"params": ctx.model.trainable(learned["core"])}
        if self.limit:
            upload["wanted"] = self._choose_cores(ctx, state["shares"] + learned["change"], known["seen"])
        return {**state, **known, **learned, **new}, upload

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        clients = torch.tensor(exchange.clients, device=server["wanted"].device)
        wanted = exchange.received.get("wanted", server["wanted"][clients])
        return {
            "cores": put(server["cores"], clients, exchange.received["params"]),
            "wanted": server["wanted"].index_copy(0, clients, wanted),
        }

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return ctx.update_batch_stats(self.trained(ctx, state, message, {}))

    def trained(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        return self._mixture(ctx, state, self._known_cores(state, message)[0])(state)

    def _known_cores(self, state: Tree, message: Tree) -> tuple[Params, Tree]:
        """Return the known cores of all clients, [clients, ...], and the state to store."""
        if not self.limit:
            return {name: rows.values for name, rows in message["cores"].items()}, {}
        fresh = next(iter(message["cores"].values())).present
        cache = {
            name: torch.where(_broadcast_rows(fresh, rows.values), rows.values, state["cache"][name])
            for name, rows in message["cores"].items()
        }
        return cache, {"cache": cache, "seen": state["seen"] | fresh}

    def _mixture(self, ctx: ClientContext, state: Tree, cores: Params) -> Callable[[Tree], Tree]:
        """Return θ_i = Σ_j p_ij w_j as a function of the own core and the change of p_i.

        All constants are precomputed. The sum is computed around the mean Σ_j p_0j w_j, so that equal cores give
        exactly this mean.
        """
        shares, start = state["shares"], ctx.model.trainable(state["core"])
        is_own = torch.arange(ctx.num_clients, device=shares.device) == ctx.index
        others = torch.where(is_own, 0, shares)
        average = map_leaves(lambda own, each: own + torch.tensordot(others, each - own, dims=1), start, cores)

        def mixture(learned: Tree) -> Tree:
            change, core = learned["change"], learned["core"]
            own_share, own_change = (torch.where(is_own, weight, 0).sum() for weight in (shares, change))
            rest = torch.where(is_own, 0, change)

            def mix(mean: Tensor, initial: Tensor, own: Tensor, each: Tensor) -> Tensor:
                mixed: Tensor = (
                    mean + own_share * (own - initial) + own_change * own + torch.tensordot(rest, each, dims=1)
                )
                return mixed

            params: Tree = core | map_leaves(mix, average, start, ctx.model.trainable(core), cores)
            return params

        return mixture

    def _penalty_weight(self, past: int, rounds: int) -> float:
        """Return λ(r) μ after the given number of rounds."""
        last = self.pull_rounds * rounds
        if past >= last:
            return 0.0
        return self.mu * (0.001 ** (past / last) if self.schedule == "exponential" else (1 + cos(pi * past / last)) / 2)

    def _choose_cores(self, ctx: ClientContext, weights: Tensor, seen: Tensor) -> Tensor:
        """Choose M other clients for the next round.

        Clients never seen come first, then others at random, with odds that grow with |p_ij|.
        """
        base = max(1.5, ctx.round * self.limit / ctx.num_clients)  # λ = 1, as in the authors' code
        draws = ctx.uniform((ctx.num_clients,), _CHOICE)
        clocks = torch.where(seen, -draws.log() / base ** weights.abs(), -draws)  # the smallest is drawn first
        is_own = torch.arange(ctx.num_clients, device=seen.device) == ctx.index
        return _smallest_entries(torch.where(is_own, torch.inf, clocks), min(self.limit, ctx.num_clients - 1))


def _smallest_entries(values: Tensor, count: int) -> Tensor:
    """Mark the `count` smallest entries of each row."""
    return values.argsort(-1).argsort(-1) < count


def _broadcast_rows(flags: Tensor, values: Tensor) -> Tensor:
    """Reshape row flags for broadcasting with the rows."""
    return flags.reshape(len(flags), *[1] * (values.ndim - 1))
