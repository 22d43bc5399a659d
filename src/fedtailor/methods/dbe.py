"""DBE: a personal bias vector removes domain bias from the features."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import ClientWeights, WeightedMethod
from fedtailor.core.fields import FractionAbove0, NonNegative
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.model import Inputs, Model
from fedtailor.core.robust import KINDS
from fedtailor.core.trees import Rows, Tree, repeat
from fedtailor.methods._shared.feature_layers import zero_feature


@dataclass(frozen=True)
class DBE(WeightedMethod, LocalTraining):
    """Zhang et al., "Eliminating Domain Bias for Federated Learning in Representation Space", NeurIPS 2023.

    A personal vector z̄_i holds the client-specific bias of the features and is added to them before the head
    (`memory`); the remaining features are pulled toward the consensus z̄^g of all clients (`kappa`). In the paper, all
    clients compute z̄^g before round 1. Here, this phase is part of round 1: its participants also train plainly from
    the initial model, send the running mean of their features, and discard this model; their regular training in round
    1 has no pull, because there is no consensus yet. The consensus is that of round 1 and is sent to each client once,
    when it first takes part from round 2 on. κ·lr is that of the paper's run: with κ = 50 and the default lr, the pull
    overshoots in narrow networks.
    """

    kappa: Annotated[
        NonNegative, "κ, pull of the mean feature toward the consensus (50 in the paper's run, at lr 0.005)"
    ] = 2.5
    mu: Annotated[FractionAbove0, "μ, weight of the newest batch in the running mean of features"] = 1.0
    memory: Annotated[bool, "add a personal vector to the features"] = True
    weights: Annotated[
        ClientWeights, "client weights, also in the consensus: by number of samples (as in the paper) or uniform"
    ] = "size"
    keeps_optimizer: ClassVar[bool] = True
    ranked_by: ClassVar[str | None] = "received"  # the paper evaluates the global model with the client's feature bias
    download: ClassVar[str] = "model, once the consensus feature"
    upload: ClassVar[str] = "model, once a mean feature"
    client_state: ClassVar[str] = "feature bias, consensus feature"
    newcomer_start: ClassVar[str] = "the global model, the consensus feature; a zero feature bias"

    def init_server(self, setup: Setup) -> Tree:
        has_consensus = torch.zeros_like(setup.sizes, dtype=torch.bool)
        return {"params": setup.params, "consensus": zero_feature(setup), "has_consensus": has_consensus}

    def init_client(self, setup: Setup) -> Tree:
        zeros = zero_feature(setup)
        kept = self.init_optimizer({"params": setup.params, "memory": zeros})
        return {"memory": zeros, "consensus": zeros, **kept}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        first_time = ~server["has_consensus"][list(clients)][:, None] & (round > 1)
        consensus = server["consensus"].expand(len(clients), 1, -1)
        return {**repeat({"params": server["params"]}, len(clients)), "consensus": Rows(consensus, first_time)}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        received, first = message["consensus"], ctx.round == 1
        consensus = torch.where(received.present, received.values, state["consensus"])[0]
        start = {"params": message["params"], "memory": state["memory"], "running": torch.zeros_like(state["memory"])}
        end, kept = self._learn(ctx, start, state, consensus, 0.0 if first else self.kappa, self.memory)
        upload: Tree = {"params": ctx.update_batch_stats(end["params"])}
        if first:  # the plain training has its own optimizer, which is discarded with the model
            plain, _ = self._learn(ctx, start, {}, consensus, kappa=0.0, memory=False)
            upload["mean"] = Rows(plain["running"][None], torch.ones_like(received.present))
        new = {"memory": end["memory"], "consensus": consensus, "optimizer": kept}
        return {name: new[name] for name in state}, upload

    @property
    def robust_kinds(self) -> tuple[str, ...]:
        return KINDS

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        weights = self.round_weights(exchange)
        new = server | {"params": exchange.mean(exchange.received["params"], weights)}
        if exchange.round == 1:
            means = {"consensus": exchange.received["mean"].values[:, 0]}
            return new | exchange.mean(means, weights)  # z̄^g
        participants = torch.tensor(exchange.clients, device=server["has_consensus"].device)
        return new | {"has_consensus": server["has_consensus"].index_fill(0, participants, True)}

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return {**message["params"], "memory": state["memory"]}

    def init_personal(self, setup: Setup) -> Tree:
        return {**setup.params, "memory": zero_feature(setup)}

    def logits(self, model: Model, personal: Tree, x: Inputs) -> Tensor:
        return model.head_output(personal, model.features(personal, x) + personal["memory"])

    def _learn(
        self, ctx: ClientContext, start: Tree, state: Tree, consensus: Tensor, kappa: float, memory: bool
    ) -> tuple[Tree, Tree]:
        """Train params and memory, track the running mean of the features, and also return the optimizer state."""

        def objective(tree: Tree, batch: Batch) -> Tensor:
            z = ctx.model.features(tree["params"], batch.x)
            mean = batch.weight @ z / batch.weight.sum().clamp(min=1)
            running = (1 - self.mu) * tree["running"].detach() + self.mu * mean
            outputs = ctx.model.head_output(tree["params"], z + tree["memory"] if memory else z)
            pull: Tensor = (running - consensus).square().mean() / 2
            exposed: Tensor = tree["running"] @ mean.detach()  # exposes the mean as the gradient for `running`
            return batch.mean(ctx.model.losses(outputs, batch.y, batch.weight)) + kappa * pull + exposed

        def step(carry: Tree, batch: Batch) -> Tree:
            tree = carry["tree"]
            grad = ctx.grad(objective, tree, batch)
            running = (1 - self.mu) * tree["running"] + self.mu * grad["running"]
            moved, kept = optimizer.step(_learned(tree), _learned(grad), carry["optimizer"])
            return {"tree": moved | {"running": running}, "optimizer": kept}

        optimizer = self.make_optimizer(self.scheduled(ctx, self.lr))
        before = state["optimizer"] if "optimizer" in state else optimizer.init(_learned(start))
        end = ctx.scan(step, {"tree": start, "optimizer": before}, **self.duration)
        return end["tree"], end["optimizer"]


def _learned(tree: Tree) -> Tree:
    """Return what the optimizer changes: all but the running mean."""
    return {name: tree[name] for name in ("params", "memory")}
