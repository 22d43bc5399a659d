"""Methods in which clients share models to be mixed, rather than the models they use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedtailor import hashing
from fedtailor.batch import Batch
from fedtailor.local import LocalView
from fedtailor.method import Exchange, Setup, SGDMethod
from fedtailor.trees import Params, Rows, Tree, map_leaves, mean, put, repeat, take

_CHOICE = 5  # salt: which cores a client gets


@dataclass(frozen=True)
class APPLE(SGDMethod):
    """Luo, Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", IJCAI 2022.

    A client's model is Σ_j p_ij w_j over the core models of all clients; it learns its own core w_i and its p_i, which
    may take any sign and sum. p_i is kept as p_0 and its change. The pull μ‖p_i − p_0‖² is the authors' code's; the
    paper may have half of it. All cores begin at the common start. Running statistics of batch normalisation are the
    client's own, for nothing mixes them. With `limit`, a client asks in its upload for the M cores it wants next.
    Weight decay, if any, holds p_i near p_0 too. For tens of clients: what is sent takes participants × clients models
    of memory.
    """

    lr: float = 0.1  # η_1, of the core (0.01 in the paper)
    epochs: int = 2  # E, local epochs (5 in the paper)
    momentum: float = 0.0  # of local SGD (0.9 in the paper, with its lr)
    weight_lr: float = 0.01  # η_2, of p_i (0.001 in the paper)
    mu: float = 1.0  # μ, pull of p_i towards p_0 (0.1 in the paper)
    pull_rounds: float = 1.0  # L/T, share of the rounds with that pull (0.1 of 160 in the paper)
    schedule: Literal["exponential", "cosine"] = "exponential"  # λ(r), how the pull goes to 0
    limit: int = 0  # M, cores a client gets in a round; 0: those of all others
    down: ClassVar[str] = "core models of all others, or of M"
    up: ClassVar[str] = "core model"
    keeps: ClassVar[str] = "core model, weight of every client"
    newcomer: ClassVar[str] = "core models of others; its own is their mean by samples"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.weight_lr >= 0, "weight_lr", "at least 0")
        self.require(self.mu >= 0, "mu", "at least 0")
        self.require(0 <= self.pull_rounds <= 1, "pull_rounds", "from 0 to 1")
        self.require_choice("schedule", "exponential", "cosine")
        self.require(self.limit >= 0, "limit", "at least 0")

    def init_server(self, setup: Setup) -> Tree:
        everyone = setup.num_clients
        cores = repeat(setup.model.trainable(setup.params), everyone)
        wanted = ~torch.eye(everyone, dtype=torch.bool, device=setup.sizes.device)
        if not self.limit:
            return {"cores": cores, "wanted": wanted}
        keys = [hashing.key(setup.seed, _CHOICE, client) for client in range(everyone)]
        draws = torch.stack([hashing.uniform(key, (everyone,), torch.float64, wanted.device) for key in keys])
        return {
            "cores": cores,
            "wanted": _smallest(torch.where(wanted, draws, torch.inf), min(self.limit, everyone - 1)),
        }

    def init_client(self, setup: Setup) -> Tree:
        like = setup.like
        shares = (setup.sizes.double() / setup.sizes.sum()).to(like)  # p_0
        state: Tree = {"core": setup.params, "shares": shares, "change": torch.zeros_like(shares)}
        if not self.limit:
            return state
        seen = torch.zeros_like(shares, dtype=torch.bool)
        return state | {"cache": repeat(setup.model.trainable(setup.params), setup.num_clients), "seen": seen}

    def welcome(self, server: Tree, setup: Setup, before: int) -> Tree:
        """A newcomer's core is the mean of all by samples: with it, p_0 of more clients mixes the same model. Others
        are sent it as every other core; with a limit, when they ask for it."""
        wide = super().welcome(server, setup, before)
        late = torch.arange(setup.num_clients, device=setup.sizes.device) >= before
        common = mean(wide["cores"], torch.where(late, 0, setup.sizes))
        cores = put(wide["cores"], late.nonzero()[:, 0], repeat(common, int(late.sum())))
        return {"cores": cores, "wanted": wide["wanted"] & (late[:, None] | ~late) if self.limit else wide["wanted"]}

    def widen(self, state: Tree, setup: Setup) -> Tree:
        """p_0 is that of all clients there are, p_i changed from it as before; with a limit, newcomers' cores are taken
        for the mean of those seen until they are seen."""
        wide = super().widen(state, setup) | {"shares": self.init_client(setup)["shares"]}
        if not self.limit or not state["seen"].any():
            return wide
        before, seen = len(state["seen"]), state["seen"].nonzero()[:, 0]
        usual = mean(take(state["cache"], seen), state["shares"][seen])
        late = torch.arange(before, setup.num_clients, device=seen.device)
        return wide | {"cache": put(wide["cache"], late, repeat(usual, len(late)))}

    def join(self, setup: Setup, message: Tree) -> Tree:
        """The own core begins at the mean of those received, by samples; so do those that did not come."""
        present = next(iter(message["cores"].values())).present
        common = mean({name: rows.values for name, rows in message["cores"].items()}, setup.sizes * present)
        state = self.init_client(setup) | {"core": setup.params | common}
        return state | {"cache": repeat(common, setup.num_clients)} if self.limit else state

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        present = server["wanted"][list(clients)]
        return {"cores": {name: Rows(leaf, present) for name, leaf in repeat(server["cores"], len(clients)).items()}}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        cores, known = self._open(state, message)
        mixture, pull = self._mixture(local, state, cores), self._pull(local.round - 1, local.rounds)

        def objective(learnt: Tree, batch: Batch) -> Tensor:
            fixed = learnt["change"].detach()
            change = fixed + self.weight_lr / self.lr * (learnt["change"] - fixed)  # the same, with its own rate
            loss: Tensor = local.loss(mixture(learnt | {"change": change}), batch) + pull * change.square().sum()
            return loss

        start = {"core": state["core"], "change": state["change"]}
        learnt = local.sgd(objective, start, **self.descent)
        upload: Tree = {"params": local.model.trainable(learnt["core"])}
        if self.limit:
            upload["wanted"] = self._want(local, state["shares"] + learnt["change"], known["seen"])
        return {**state, **known, **learnt}, upload

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        clients = torch.tensor(exchange.clients, device=server["wanted"].device)
        wanted = exchange.received.get("wanted", server["wanted"][clients])
        return {
            "cores": put(server["cores"], clients, exchange.received["params"]),
            "wanted": server["wanted"].index_copy(0, clients, wanted),
        }

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        return local.refresh(self.trained(local, state, message, {}))

    def trained(self, local: LocalView, state: Tree, message: Tree, upload: Tree) -> Tree:
        return self._mixture(local, state, self._open(state, message)[0])(state)

    def _open(self, state: Tree, message: Tree) -> tuple[Params, Tree]:
        """Everyone's core as far as it is known, [clients, ...], and what to keep of it."""
        if not self.limit:
            return {name: rows.values for name, rows in message["cores"].items()}, {}
        fresh = next(iter(message["cores"].values())).present
        cache = {
            name: torch.where(_beside(fresh, rows.values), rows.values, state["cache"][name])
            for name, rows in message["cores"].items()
        }
        return cache, {"cache": cache, "seen": state["seen"] | fresh}

    def _mixture(self, local: LocalView, state: Tree, cores: Params) -> Callable[[Tree], Tree]:
        """θ_i = Σ_j p_ij w_j as a function of the own core and of p_i's change, with all that is constant worked out.
        Written around Σ_j p_0j w_j as a mean, so that cores that are alike give just that."""
        shares, start = state["shares"], local.model.trainable(state["core"])
        mine = torch.arange(local.num_clients, device=shares.device) == local.index
        others = torch.where(mine, 0, shares)
        average = map_leaves(lambda own, each: own + torch.tensordot(others, each - own, dims=1), start, cores)

        def mixture(learnt: Tree) -> Tree:
            change, core = learnt["change"], learnt["core"]
            own_share, own_change = (torch.where(mine, weight, 0).sum() for weight in (shares, change))
            rest = torch.where(mine, 0, change)

            def mix(mean: Tensor, begun: Tensor, own: Tensor, each: Tensor) -> Tensor:
                mixed: Tensor = (
                    mean + own_share * (own - begun) + own_change * own + torch.tensordot(rest, each, dims=1)
                )
                return mixed

            whole: Tree = core | map_leaves(mix, average, start, local.model.trainable(core), cores)
            return whole

        return mixture

    def _pull(self, past: int, rounds: int) -> float:
        """λ(r) μ after so many rounds."""
        last = self.pull_rounds * rounds
        if past >= last:
            return 0.0
        return self.mu * (0.001 ** (past / last) if self.schedule == "exponential" else (1 + cos(pi * past / last)) / 2)

    def _want(self, local: LocalView, weights: Tensor, seen: Tensor) -> Tensor:
        """M others for the next round: those never seen first; then by chance, with odds that grow with |p_ij|."""
        base = max(1.5, local.round * self.limit / local.num_clients)  # with the authors' λ = 1
        draws = local.uniform((local.num_clients,), _CHOICE)
        clocks = torch.where(seen, -draws.log() / base ** weights.abs(), -draws)  # who rings first is drawn first
        mine = torch.arange(local.num_clients, device=seen.device) == local.index
        return _smallest(torch.where(mine, torch.inf, clocks), min(self.limit, local.num_clients - 1))


def _smallest(values: Tensor, count: int) -> Tensor:
    """Where the `count` smallest of every row are."""
    return values.argsort(-1).argsort(-1) < count


def _beside(flags: Tensor, values: Tensor) -> Tensor:
    """Flags of rows, with axes to stand beside their values."""
    return flags.reshape(len(flags), *[1] * (values.ndim - 1))
