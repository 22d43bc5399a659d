"""FedPHP: a running average of past local models teaches the next local training."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import AveragingMethod
from fedtailor.core.fields import FractionBelow1
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Setup
from fedtailor.core.trees import Tree, add, scale
from fedtailor.methods._shared.mmd import squared_mmd

_TEMPERATURE = 4.0  # temperature of the teacher; the student has none


@dataclass(frozen=True)
class FedPHP(AveragingMethod, LocalTraining):
    """Li et al., "FedPHP: Federated Personalization with Inherited Private Models", ECML-PKDD 2021.

    A client's personal model is a running mean of its past local models, in which new models have smaller weights the
    more rounds the client has taken part in. The client uses this model for prediction and as the teacher of its next
    local training, as in the authors' code. In a batch without spread (a single example), their kernels have unbounded
    gradients, which they clip; here the bandwidth is at least one hundredth of the mean squared feature. The method
    requires a classifier.
    """

    lam: Annotated[FractionBelow1, "λ, weight of the teacher in the loss"] = 0.1
    mu: Annotated[FractionBelow1, "μ, maximum weight of the past in the personal model"] = 0.9
    teaching: Annotated[
        Literal["mmd", "kd"], "R, match the teacher in its features (MMD) or its outputs (distillation)"
    ] = "mmd"
    sends_global_model: ClassVar[bool] = True
    client_state: ClassVar[str] = "personal model, 1 scalar"
    keeps_optimizer: ClassVar[bool] = True
    newcomer_start: ClassVar[str] = "the global model as its personal model"

    def init_client(self, setup: Setup) -> Tree:
        kept = self.init_optimizer(setup.params)
        return {"own": setup.params, "participations": setup.like.new_zeros(()), **kept}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        model, own, participations = ctx.model, state["own"], state["participations"]

        def objective(params: Tree, batch: Batch) -> Tensor:
            features, teacher = model.features(params, batch.x), model.eval_mode.features(own, batch.x)
            outputs = model.head_output(params, features)
            if self.teaching == "mmd":
                regularizer = squared_mmd(features, teacher, batch.weight, _bandwidths(features, teacher, batch))
            else:
                target = torch.softmax(model.head_output(own, teacher) / _TEMPERATURE, 1)
                regularizer = batch.mean(F.cross_entropy(outputs, target, reduction="none"))
            return (1 - self.lam) * batch.mean(model.losses(outputs, batch.y, batch.weight)) + self.lam * regularizer

        params, new = self.optimize(ctx, objective, message["params"], state)
        expected = max(int(ctx.participation * ctx.rounds + 1e-9), 1)  # expected rounds of participation
        past = (self.mu * participations / expected).clamp(max=self.mu)
        own = add(scale(own, past), scale(params, 1 - past))
        return {"own": own, "participations": participations + 1, **new}, {"params": params}

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return {**state["own"]}


def _bandwidths(x: Tensor, y: Tensor, batch: Batch) -> list[Tensor]:
    """Return the bandwidths of five kernels around the mean squared distance of all pairs in the union of both sets."""
    both, weight = torch.cat([x, y]).detach(), torch.cat([batch.weight, batch.weight])
    count = weight.sum().clamp(min=2)
    squared_deviations = (both - weight @ both / count).square().sum(1)  # Σ_ij ‖a_i − a_j‖² = 2 n Σ_i ‖a_i − ā‖²
    lower_bound = 0.01 * (weight @ both.square().sum(1)) / count
    base = torch.maximum(2 * (weight @ squared_deviations) / (count - 1), lower_bound) + 1e-8
    return [base * 2.0**power for power in (-2, -1, 0, 1, 2)]
