"""GPFL: a conditional valve extracts global and personalized features."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import AveragingMethod, ClientWeights
from fedtailor.core.fields import NonNegative
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Setup
from fedtailor.core.model import Inputs, Model
from fedtailor.core.trees import Tree, dot
from fedtailor.methods._shared.class_statistics import class_counts
from fedtailor.methods._shared.feature_layers import FEATURE_SALT, layer_norm, linear, make_block, zero_feature


@dataclass(frozen=True)
class GPFL(AveragingMethod, LocalTraining):
    """Zhang et al., "GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized
    Federated Learning", ICCV 2023.

    A conditional valve transforms each feature twice: with the client's context p_i for its own head, and with the
    global context g for the global class embeddings e_k, which guide it by angle and, weighted by λ, by distance.
    Contexts are means of embeddings and are fixed during a round: g weights all classes equally, and p_i weights them
    by the client's share of each class. The paper does not specify which embeddings are used; here they are those just
    received, so that p_i fits the body that came with them. contexts="own" is the choice of the code. In round 1,
    before anything is learned, both contexts are zero. μ times the learning rate is as at a learning rate of 0.005:
    with more, the valve decays until contexts have no effect.
    """

    lam: Annotated[
        NonNegative, "λ, weight of the distance to the class embedding (Frobenius norm over a batch, not squared)"
    ] = 0.01
    mu: Annotated[
        NonNegative, "μ, weight decay of embeddings and valve (0.1 in the paper); body and head: weight_decay"
    ] = 0.005
    contexts: Annotated[Literal["received", "own"], "embeddings that define contexts: received, or last trained"] = (
        "received"
    )
    weights: Annotated[ClientWeights, "client weights: by number of samples (as in the paper) or uniform"] = "size"
    download: ClassVar[str] = "body, class embeddings, valve"
    upload: ClassVar[str] = "body, class embeddings, valve"
    client_state: ClassVar[str] = "head"
    keeps_optimizer: ClassVar[bool] = True
    newcomer_start: ClassVar[str] = "the global body, embeddings, and valve; the initial head"

    def __post_init__(self) -> None:
        super().__post_init__()
        coupled = self.optimizer != "adamw" or not self.weight_decay
        self.require(coupled, "weight_decay", "0 with adamw, because μ is part of the gradient")

    def init_server(self, setup: Setup) -> Tree:
        classes, width = setup.model.head_size
        valve = {"gain": make_block(setup, 1, width, width), "offset": make_block(setup, 2, width, width)}
        embeddings = torch.special.ndtri(setup.uniform((classes, width), FEATURE_SALT, 3))  # from N(0, 1)
        return {"params": setup.split("head")[0], "embeddings": embeddings, "valve": valve}

    def init_client(self, setup: Setup) -> Tree:
        zeros = zero_feature(setup)
        head = setup.split("head")[1]
        learned = self.init_server(setup)
        kept = self.init_optimizer(learned | {"params": learned["params"] | head})
        state = {"head": head, "context": zeros, **kept}
        return state | ({"embeddings": zeros.repeat(setup.model.head_size[0], 1)} if self.contexts == "own" else {})

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        context, global_context = self._contexts(ctx, state, message)

        def objective(learned: Tree, batch: Batch) -> Tensor:
            params, embeddings, valve = learned["params"], learned["embeddings"], learned["valve"]
            z = ctx.model.features(params, batch.x)
            personal, shared = _apply_valve(valve, z, context), _apply_valve(valve, z, global_context)
            cosines = F.normalize(shared, dim=1) @ F.normalize(embeddings, dim=1).T
            outputs = ctx.model.head_output(params, personal)
            own, angle = (ctx.model.losses(scores, batch.y, batch.weight) for scores in (outputs, cosines))
            difference = (shared - message["embeddings"][batch.y]) * batch.weight[:, None]
            added = {"embeddings": embeddings, "valve": valve}
            decay = (self.mu - self.weight_decay) / 2 * dot(added, added)
            distance: Tensor = torch.linalg.vector_norm(difference)
            return batch.mean(own + angle) + self.lam * distance + decay

        end, kept = self.optimize(ctx, objective, message | {"params": message["params"] | state["head"]}, state)
        body, head = ctx.model.split(end["params"])
        new = {"head": head, "context": context, "embeddings": end["embeddings"], **kept}
        return {name: new[name] for name in state}, end | {"params": body}

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        context, _ = self._contexts(ctx, state, message)
        return {**message["params"], **state["head"], "valve": message["valve"], "context": context}

    def trained(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        """Use the context as in training."""
        return {**upload["params"], **state["head"], "valve": upload["valve"], "context": state["context"]}

    def init_personal(self, setup: Setup) -> Tree:
        return {**setup.params, "valve": self.init_server(setup)["valve"], "context": zero_feature(setup)}

    def logits(self, model: Model, personal: Tree, x: Inputs) -> Tensor:
        return model.head_output(
            personal, _apply_valve(personal["valve"], model.features(personal, x), personal["context"])
        )

    def _contexts(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tensor, Tensor]:
        """Return p_i = Σ_k (n_ik / n_i) e_k and g = mean_k e_k."""
        embeddings: Tensor = (message if self.contexts == "received" else state)["embeddings"]
        if ctx.round == 1:
            embeddings = torch.zeros_like(embeddings)
        return class_counts(ctx) / ctx.size @ embeddings, embeddings.mean(0)


def _apply_valve(valve: Tree, z: Tensor, context: Tensor) -> Tensor:
    """Apply the valve: ReLU(z⊙(γ + 1) + b) with γ and b computed from the context."""
    gain, offset = (layer_norm(valve[part], torch.relu(linear(valve[part], context))) for part in ("gain", "offset"))
    return torch.relu(z * (gain + 1) + offset)
