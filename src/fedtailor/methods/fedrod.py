"""FedRoD: a generic head with a balanced loss and a personal head on one shared body."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import AveragingMethod, ClientWeights
from fedtailor.core.fields import NonNegative
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Setup
from fedtailor.core.model import Inputs, Model
from fedtailor.core.trees import Tree, zeros_like
from fedtailor.methods._shared.class_statistics import class_counts


@dataclass(frozen=True)
class FedRoD(AveragingMethod, LocalTraining):
    """Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022.

    A body with two heads. The generic head and the body are trained with balanced softmax, as if the client had equally
    many samples of each class. The personal head learns what the client's class distribution adds; its loss has no
    gradient for the other parts. Both heads use the same features of a batch. The official code is not public. The
    personal head starts at zero, because a copy of the generic head, as in other code, would double all outputs; the
    paper's hypernetwork for it is omitted.
    """

    gamma: Annotated[NonNegative, "γ, exponent of the class counts in the balanced softmax"] = 1.0
    weights: Annotated[ClientWeights, "client weights: by number of samples (as in the paper) or uniform"] = "size"
    sends_global_model: ClassVar[bool] = True
    client_state: ClassVar[str] = "personal head"
    keeps_optimizer: ClassVar[bool] = True
    newcomer_start: ClassVar[str] = "the global model; a zero personal head"

    def init_client(self, setup: Setup) -> Tree:
        head = zeros_like(setup.split("head")[1])
        return {"head": head, **self.init_optimizer({"params": setup.params, "head": head})}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        model, counts = ctx.model, class_counts(ctx)
        prior = self.gamma * counts.clamp(min=torch.finfo(counts.dtype).tiny).log()  # log π, finite for absent classes

        def objective(parts: Tree, batch: Batch) -> Tensor:
            features = model.features(parts["params"], batch.x)
            generic = model.head_output(parts["params"], features)
            combined = generic.detach() + model.head_output(parts["head"], features.detach())
            shared, own = (model.losses(out, batch.y, batch.weight) for out in (generic + prior, combined))
            return batch.mean(shared + own)  # L_G + L_P

        end, new = self.optimize(ctx, objective, {"params": message["params"], "head": state["head"]}, state)
        return {"head": end["head"], **new}, {"params": end["params"]}

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return {**message["params"], "own_head": state["head"]}

    def init_personal(self, setup: Setup) -> Tree:
        return {**setup.params, "own_head": setup.split("head")[1]}

    def logits(self, model: Model, personal: Tree, x: Inputs) -> Tensor:
        features = model.features(personal, x)
        return model.head_output(personal, features) + model.head_output(personal["own_head"], features)
