"""FedALA: each client learns how to mix the global model with its own before local training."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import AveragingMethod, ClientWeights
from fedtailor.core.fields import FractionAbove0, NonNegative, PositiveInt
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Setup
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, map_leaves, sub
from fedtailor.core.vmap_context import vmap_max

_SPLIT = 6  # salt of the random part of the data
_WINDOW, _CONVERGED = 10, 0.1  # number of losses, and their standard deviation below which W has converged


@dataclass(frozen=True)
class FedALA(AveragingMethod, LocalTraining):
    """Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023.

    A client starts from θ_i + (θ − θ_i) ⊙ W in its last layers and from the global θ in the layers below. It learns W
    on a random fraction of its data, another one in each round: the first time until the loss converges, then for one
    epoch per round. Where θ equals θ_i, as in round 1, there is nothing to learn. The authors' code counts parameter
    tensors (2: the last layer). Normalization layers, with their running statistics, are those of the global model.
    """

    weight_lr: Annotated[NonNegative, "η, learning rate of W"] = 1.0
    layers: Annotated[PositiveInt, "p, number of last layers that are mixed"] = 1
    share: Annotated[FractionAbove0, "s, fraction of a client's samples on which W is learned"] = 0.8
    first_epochs: Annotated[PositiveInt, "maximum number of epochs the first time"] = 20
    weights: Annotated[ClientWeights, "client weights: by number of samples (as in the paper) or uniform"] = "size"
    sends_global_model: ClassVar[bool] = True
    client_state: ClassVar[str] = "personal last layers, their weights"
    keeps_optimizer: ClassVar[bool] = True
    newcomer_start: ClassVar[str] = "the global model as its personal model"

    def init_client(self, setup: Setup) -> Tree:
        own = self._last_layers(setup.model, setup.params)
        started = torch.zeros((), dtype=torch.bool, device=setup.sizes.device)
        weights = map_leaves(torch.ones_like, own)
        return {"own": own, "weights": weights, "started": started, **self.init_optimizer(setup.params)}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        start, learned = self._mix(ctx, state, message)
        params, new = self.optimize(ctx, ctx.loss, start, state)
        return {"own": self._last_layers(ctx.model, params), **learned, **new}, {"params": params}

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return self._mix(ctx, state, message)[0]

    def trained(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        return {**upload["params"]}

    def _last_layers(self, model: Model, params: Params) -> Params:
        """Return the parameters of the last layers."""
        names = {name for layer in list(model.layers().values())[-self.layers :] for name in layer}
        return {name: leaf for name, leaf in params.items() if name in names}

    def _mix(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        """Return the model at which training starts, and the new state: W, and whether it was ever learned."""
        received, own = message["params"], state["own"]
        last = self._last_layers(ctx.model, received)
        moved = torch.stack([(leaf != 0).any() for leaf in sub(last, own).values()]).any()
        first, part = ~state["started"], ctx.split_data(self.share, _SPLIT, every_round=True)[0]
        epochs = torch.where(moved, torch.where(first, self.first_epochs, 1), 0)
        batches = part.num_steps(1)

        def fill(weights: Tree) -> Tree:
            mixed: Tree = received | map_leaves(torch.lerp, own, last, weights)
            return mixed

        def objective(tree: Tree, batch: Batch) -> Tensor:
            loss: Tensor = tree["factor"] * part.loss(fill(tree["weights"]), batch)
            return loss

        def step(carry: Tree, batch: Batch) -> Tree:
            factor = torch.ones_like(carry["step"])
            grad = part.grad(objective, {"weights": carry["weights"], "factor": factor}, batch)
            moved = map_leaves(lambda w, g: (w - self.weight_lr * g).clamp(0, 1), carry["weights"], grad["weights"])
            slots = torch.arange(_WINDOW, device=factor.device)
            here = slots == (carry["step"] / batches).floor() % _WINDOW  # the last batch of an epoch remains
            losses = torch.where(here, grad["factor"], carry["losses"])  # the gradient for the factor is the loss
            return {"weights": moved, "losses": losses, "step": carry["step"] + 1}

        def stop(carry: Tree) -> Tensor:
            done: Tensor = carry["step"] / batches
            settled = (done >= _WINDOW) & (carry["losses"].std(correction=0) < _CONVERGED)
            enough: Tensor = (done >= epochs) | settled
            return enough

        start = {"weights": state["weights"], "losses": batches.new_zeros(_WINDOW), "step": torch.zeros_like(batches)}
        weights = part.scan(step, start, epochs=vmap_max(epochs), stop=stop)["weights"]
        return fill(weights), {"weights": weights, "started": state["started"] | moved}
