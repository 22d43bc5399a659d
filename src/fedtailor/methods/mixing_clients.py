"""Methods in which a client mixes its own model from others that it receives, or from the common one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtailor import hashing
from fedtailor.batch import Batch
from fedtailor.local import LocalView
from fedtailor.method import Exchange, Setup, SGDMethod
from fedtailor.model import Model
from fedtailor.newcomers import newcomer_shares, seat
from fedtailor.together import most_of
from fedtailor.trees import Params, Tree, map_leaves, mean, put, repeat, squared_norms, sub, take

_CHOICE, _PART = 5, 6  # salts: which models are sent, parts of a client's data
_WINDOW, _SETTLED = 10, 0.1  # FedALA: losses looked at, and their standard deviation below which weights are learnt


@dataclass(frozen=True)
class FedFomo(SGDMethod):
    """Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021.

    A client tries the models of M others on a part of its data that it never trains on, and moves from its own towards
    those that are better there, by how much better they are for their distance. Its own model, which would weigh
    nothing, is not sent. As in the authors' code, every one of the M is drawn at random with probability ε, which falls
    by the same amount every round; the drawn ones come after the best, among those that are left.
    """

    models: int = 5  # M, models a client gets in a round
    explore: float = 0.3  # ε, chance of a random one
    explore_decay: float = 0.05  # by which ε falls every round
    validation: float = 0.2  # share of a client's samples on which models are tried
    down: ClassVar[str] = "M models of others"
    up: ClassVar[str] = "model, M weights"
    keeps: ClassVar[str] = "own model"
    newcomer: ClassVar[str] = "M models of others to mix; its own is the start till then"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.models >= 1, "models", "at least 1")
        self.require(0 <= self.explore <= 1, "explore", "from 0 to 1")
        self.require(self.explore_decay >= 0, "explore_decay", "at least 0")
        self.require(0 < self.validation < 1, "validation", "between 0 and 1")

    def init_server(self, setup: Setup) -> Tree:
        like = setup.like
        affinity = torch.eye(setup.num_clients, dtype=like.dtype, device=like.device)  # P
        seed = torch.tensor(setup.seed, device=like.device)
        return {"models": repeat(setup.params, setup.num_clients), "affinity": affinity, "seed": seed}

    def welcome(self, server: Tree, setup: Setup, before: int) -> Tree:
        """A newcomer's model is the mean until it sends one. There are more models to choose from now, so others may be
        sent other ones."""
        wide = super().welcome(server, setup, before)
        return wide | {"models": seat(wide["models"], newcomer_shares(wide["models"], before))}

    def init_client(self, setup: Setup) -> Tree:
        return {"params": setup.params}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return {"models": take(server["models"], self._choose(server, clients, round))}  # [clients, M, ...]

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        mixed, weights = self._mix(local, state, message)
        rest = self._parts(local)[1]
        params = rest.sgd(rest.loss, mixed, **self.descent)
        return {"params": params}, {"params": params, "weights": weights}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        chosen = self._choose(server, exchange.clients, exchange.round)
        clients = torch.tensor(exchange.clients, device=chosen.device)
        rows = server["affinity"][clients].scatter_add(1, chosen, exchange.received["weights"])
        return {
            "models": put(server["models"], clients, exchange.received["params"]),
            "affinity": server["affinity"].index_copy(0, clients, rows),
            "seed": server["seed"],
        }

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        return self._mix(local, state, message)[0]

    def trained(self, local: LocalView, state: Tree, message: Tree, upload: Tree) -> Tree:
        params: Tree = state["params"]
        return params

    def monitor(self, before: Tree, after: Tree, exchange: Exchange) -> Tree:
        """P, by which models are chosen."""
        return {"affinity": after["affinity"]}

    def _parts(self, local: LocalView) -> tuple[LocalView, LocalView]:
        """To try models on, and to train on: the same in every round."""
        return local.divide(self.validation, _PART)

    def _mix(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tensor]:
        """θ_i + Σ_n (w_n⁺ / Σ w⁺) (θ_n − θ_i), and all w_n = (L(θ_i) − L(θ_n)) / ‖θ_n − θ_i‖."""
        held, own, models = self._parts(local)[0], state["params"], message["models"]
        count, serving = next(iter(models.values())).shape[0], local.model.serving

        def losses(batch: Batch) -> Tree:
            each = [
                serving.loss(serving.logits(m, batch.x), batch.y)
                for m in (own, *(take(models, n) for n in range(count)))
            ]
            return {"sums": torch.stack([(batch.weight * loss).sum() for loss in each])}

        found = held.total(losses)["sums"] / held.size
        away = map_leaves(lambda theirs, mine: theirs - mine, models, own)  # [M, ...]
        distances = squared_norms(local.model.trainable(away)).sqrt()
        weights = torch.where(distances > 0, (found[0] - found[1:]) / (distances + 1e-5), 0)
        positive = weights.clamp(min=0)
        shares = positive / torch.where(positive.sum() > 0, positive.sum(), 1)
        return map_leaves(lambda mine, apart: mine + torch.tensordot(shares, apart, dims=1), own, away), weights

    def _choose(self, server: Tree, clients: Sequence[int], round: int) -> Tensor:
        """Which models are sent, [clients, M]: a function of the server, so that it need not be kept."""
        affinity: Tensor = server["affinity"][list(clients)]
        everyone, device = affinity.shape[1], affinity.device
        count = min(self.models, everyone - 1)
        keys = [hashing.key(int(server["seed"]), round, _CHOICE, client) for client in clients]
        draws = torch.stack([hashing.uniform(key, (everyone + count,), torch.float64, device) for key in keys])
        chance = max(self.explore - self.explore_decay * (round - 1), 0.0)
        best = count - (draws[:, everyone:] < chance).sum(1, keepdim=True)
        own = torch.tensor(clients, device=device)[:, None]
        random = draws[:, :everyone].scatter(1, own, 2)
        affinity = affinity.scatter(1, own, -torch.inf)
        shuffled = random.argsort(1)  # so that equals are taken in random order
        ranked = shuffled.gather(1, affinity.gather(1, shuffled).argsort(dim=1, descending=True, stable=True))
        first = torch.where(ranked.argsort(1) < best, -1, random)
        return first.argsort(dim=1, stable=True)[:, :count]


@dataclass(frozen=True)
class FedALA(SGDMethod):
    """Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023.

    A client starts from θ_i + (θ − θ_i) ⊙ W in its last layers and from the common θ below. It learns W on a random
    share of its data, another in every round: the first time until the loss settles, then one pass a round. Where θ is
    still θ_i, as in round 1, there is nothing to learn. The authors' code counts parameter tensors (2: the last layer).
    Normalisation, with its running statistics, is the common one's.
    """

    weight_lr: float = 1.0  # η of W
    layers: int = 1  # p, last layers that are mixed
    share: float = 0.8  # s, of a client's samples, to learn W on
    first_epochs: int = 20  # most passes the first time
    keeps: ClassVar[str] = "own last layers, their weights"
    newcomer: ClassVar[str] = "the common model, where its own begins"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.weight_lr >= 0, "weight_lr", "at least 0")
        self.require(self.layers >= 1, "layers", "at least 1")
        self.require(0 < self.share <= 1, "share", "above 0 and at most 1")
        self.require(self.first_epochs >= 1, "first_epochs", "at least 1")

    def init_client(self, setup: Setup) -> Tree:
        own = self._last(setup.model, setup.params)
        begun = torch.zeros((), dtype=torch.bool, device=setup.sizes.device)
        return {"own": own, "weights": map_leaves(torch.ones_like, own), "begun": begun}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        start, learnt = self._mix(local, state, message)
        params = local.sgd(local.loss, start, **self.descent)
        return {"own": self._last(local.model, params), **learnt}, {"params": params}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes)

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        return self._mix(local, state, message)[0]

    def trained(self, local: LocalView, state: Tree, message: Tree, upload: Tree) -> Tree:
        params: Tree = upload["params"]
        return params

    def _last(self, model: Model, params: Params) -> Params:
        names = {name for layer in list(model.layers().values())[-self.layers :] for name in layer}
        return {name: leaf for name, leaf in params.items() if name in names}

    def _mix(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        """The model a client begins with, and what it learns on the way: W, and whether it ever did."""
        common, own = message["params"], state["own"]
        last = self._last(local.model, common)
        moved = torch.stack([(leaf != 0).any() for leaf in sub(last, own).values()]).any()
        first, part = ~state["begun"], local.divide(self.share, _PART, every_round=True)[0]
        epochs = torch.where(moved, torch.where(first, self.first_epochs, 1), 0)
        batches = part.steps(1)

        def fill(weights: Tree) -> Tree:
            mixed: Tree = common | map_leaves(torch.lerp, own, last, weights)
            return mixed

        def objective(tree: Tree, batch: Batch) -> Tensor:
            loss: Tensor = tree["factor"] * part.loss(fill(tree["weights"]), batch)
            return loss

        def step(carry: Tree, batch: Batch) -> Tree:
            factor = torch.ones_like(carry["step"])
            slope = part.slope(objective, {"weights": carry["weights"], "factor": factor}, batch)
            moved = map_leaves(lambda w, g: (w - self.weight_lr * g).clamp(0, 1), carry["weights"], slope["weights"])
            slots = torch.arange(_WINDOW, device=factor.device)
            here = slots == (carry["step"] / batches).floor() % _WINDOW  # the last batch of a pass stays
            losses = torch.where(here, slope["factor"], carry["losses"])  # the slope by the factor is the loss
            return {"weights": moved, "losses": losses, "step": carry["step"] + 1}

        def stop(carry: Tree) -> Tensor:
            done: Tensor = carry["step"] / batches
            settled = (done >= _WINDOW) & (carry["losses"].std(correction=0) < _SETTLED)
            enough: Tensor = (done >= epochs) | settled
            return enough

        start = {"weights": state["weights"], "losses": batches.new_zeros(_WINDOW), "step": torch.zeros_like(batches)}
        weights = part.fold(step, start, epochs=most_of(epochs), stop=stop)["weights"]
        return fill(weights), {"weights": weights, "begun": state["begun"] | moved}
