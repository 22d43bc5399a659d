"""FedFomo: each client mixes models of other clients by their loss on its validation data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedtailor.core import random
from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.fields import Fraction, InnerFraction, NonNegative, PositiveInt
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.trees import Tree, map_leaves, put, repeat, squared_norms, take
from fedtailor.methods._shared.newcomers import newcomer_shares, set_newcomer_rows

_CHOICE, _PART = 5, 6  # salts of the random choice of models, and of the data split


@dataclass(frozen=True)
class FedFomo(LocalTraining):
    """Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021.

    A client evaluates the models of M other clients on validation data that it does not train on, and moves from its
    own model toward those with a lower loss, in proportion to the decrease of the loss divided by the distance. Its own
    model would have weight 0 and is not sent. As in the authors' code, each of the M models is chosen at random with
    probability ε, which decreases by the same amount in each round; random models are chosen after the best ones, among
    those that remain.
    """

    models: Annotated[PositiveInt, "M, models sent to a client per round"] = 5
    explore: Annotated[Fraction, "ε, probability of a random model"] = 0.3
    explore_decay: Annotated[NonNegative, "amount by which ε decreases per round"] = 0.05
    validation: Annotated[InnerFraction, "fraction of a client's samples for validation"] = 0.2
    download: ClassVar[str] = "models of M other clients"
    upload: ClassVar[str] = "model, M weights"
    client_state: ClassVar[str] = "personal model"
    keeps_optimizer: ClassVar[bool] = True
    newcomer_start: ClassVar[str] = "models of M other clients; the initial model as its own until then"

    def init_server(self, setup: Setup) -> Tree:
        like = setup.like
        affinity = torch.eye(setup.num_clients, dtype=like.dtype, device=like.device)  # P
        seed = torch.tensor(setup.seed, device=like.device)
        return {"models": repeat(setup.params, setup.num_clients), "affinity": affinity, "seed": seed}

    def grow_server(self, server: Tree, setup: Setup, before: int) -> Tree:
        """Set the model of each newcomer to the mean until it sends one.

        The other clients may receive different models, because there are more to choose from.
        """
        new = super().grow_server(server, setup, before)
        return new | {"models": set_newcomer_rows(new["models"], newcomer_shares(new["models"], before))}

    def init_client(self, setup: Setup) -> Tree:
        return {"params": setup.params, **self.init_optimizer(setup.params)}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return {"models": take(server["models"], self._choose(server, clients, round))}  # [clients, M, ...]

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        mixed, weights = self._mix(ctx, state, message)
        training = self._parts(ctx)[1]
        params, new = self.optimize(training, training.loss, mixed, state)
        return {"params": params, **new}, {"params": params, "weights": weights}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        chosen = self._choose(server, exchange.clients, exchange.round)
        clients = torch.tensor(exchange.clients, device=chosen.device)
        rows = server["affinity"][clients].scatter_add(1, chosen, exchange.received["weights"])
        return {
            "models": put(server["models"], clients, exchange.received["params"]),
            "affinity": server["affinity"].index_copy(0, clients, rows),
            "seed": server["seed"],
        }

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return self._mix(ctx, state, message)[0]

    def trained(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        return {**state["params"]}

    def server_metrics(self, before: Tree, after: Tree, exchange: Exchange) -> Tree:
        """Return P, by which models are chosen."""
        return {"affinity": after["affinity"]}

    def _parts(self, ctx: ClientContext) -> tuple[ClientContext, ClientContext]:
        """Return the validation data and the training data, the same split in all rounds."""
        return ctx.split_data(self.validation, _PART)

    def _mix(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tensor]:
        """Return θ_i + Σ_n (w_n⁺ / Σ w⁺) (θ_n − θ_i), and all w_n = (L(θ_i) − L(θ_n)) / ‖θ_n − θ_i‖."""
        validation, own, models = self._parts(ctx)[0], state["params"], message["models"]
        count, serving = next(iter(models.values())).shape[0], ctx.model.eval_mode

        def losses(batch: Batch) -> Tree:
            each = [
                serving.losses(serving.logits(m, batch.x), batch.y, batch.weight)
                for m in (own, *(take(models, n) for n in range(count)))
            ]
            return {"sums": torch.stack([(batch.weight * loss).sum() for loss in each])}

        mean_losses = validation.sum_over_data(losses)["sums"] / validation.size
        differences = map_leaves(lambda other, w: other - w, models, own)  # [M, ...]
        distances = squared_norms(ctx.model.trainable(differences)).sqrt()
        weights = torch.where(distances > 0, (mean_losses[0] - mean_losses[1:]) / (distances + 1e-5), 0)
        positive = weights.clamp(min=0)
        shares = positive / torch.where(positive.sum() > 0, positive.sum(), 1)
        mixed = map_leaves(lambda w, d: w + torch.tensordot(shares, d, dims=1), own, differences)
        return mixed, weights

    def _choose(self, server: Tree, clients: Sequence[int], round: int) -> Tensor:
        """Return which models are sent, [clients, M].

        The choice is a function of the server's state, so that it need not be stored.
        """
        affinity: Tensor = server["affinity"][list(clients)]
        num_clients, device = affinity.shape[1], affinity.device
        count = min(self.models, num_clients - 1)
        keys = [random.make_key(int(server["seed"]), round, _CHOICE, client) for client in clients]
        draws = torch.stack([random.uniform(key, (num_clients + count,), torch.float64, device) for key in keys])
        probability = max(self.explore - self.explore_decay * (round - 1), 0.0)
        best = count - (draws[:, num_clients:] < probability).sum(1, keepdim=True)
        own = torch.tensor(clients, device=device)[:, None]
        priority = draws[:, :num_clients].scatter(1, own, 2)
        affinity = affinity.scatter(1, own, -torch.inf)
        shuffled = priority.argsort(1)  # ties are broken at random
        ranked = shuffled.gather(1, affinity.gather(1, shuffled).argsort(dim=1, descending=True, stable=True))
        first = torch.where(ranked.argsort(1) < best, -1, priority)
        return first.argsort(dim=1, stable=True)[:, :count]
