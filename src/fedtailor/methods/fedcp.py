"""FedCP: a conditional policy splits features between a personal head and the global head."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import AveragingMethod, ClientWeights
from fedtailor.core.fields import NonNegative, Positive
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Setup
from fedtailor.core.model import Inputs, Model
from fedtailor.core.trees import Params, Tree, add, scale
from fedtailor.errors import ConfigError
from fedtailor.methods._shared.feature_layers import layer_norm, linear, make_block
from fedtailor.methods._shared.mmd import squared_mmd

_BANDWIDTHS = [2.0 * a for a in (10, 15, 20, 50)]  # of the kernels exp(−d² / 2a)


@dataclass(frozen=True)
class FedCP(AveragingMethod, LocalTraining):
    """Zhang et al., "FedCP: Separating Feature Information for Personalized Federated Learning via Conditional Policy",
    KDD 2023.

    A policy network splits each feature z into a personal part r⊙z for the client's own head and a global part s⊙z for
    the received head, which stays fixed; the outputs are added. Gumbel noise perturbs the policy in training only:
    evaluation uses the plain softmax, so that accuracy is deterministic (the code also samples in evaluation). The
    context is the direction of the sum of the rows of the own head, from round 1 on (random in round 1 in the code).
    Own heads start at the initial head, and cross-entropy changes the rows of a linear head by steps that sum to zero,
    so the contexts of all clients stay equal, with the paper's definition as well as with this one. λ·lr is that of the
    paper's run: with λ = 5 and the default lr, training on digits failed after about fifty rounds.
    """

    lam: Annotated[
        NonNegative, "λ, weight of the MMD to the features of the received body (5 in the paper's run, at lr 0.005)"
    ] = 0.25
    tau: Annotated[Positive, "τ, temperature of the policy"] = 1.0
    weights: Annotated[ClientWeights, "client weights: by number of samples (as in the paper) or uniform"] = "size"
    download: ClassVar[str] = "model, policy network"
    upload: ClassVar[str] = "model, policy network"
    client_state: ClassVar[str] = "head"
    keeps_optimizer: ClassVar[bool] = True
    newcomer_start: ClassVar[str] = "the global model and policy network; the global head as its own"

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.params, "policy": _initial_policy(setup)}

    def init_client(self, setup: Setup) -> Tree:
        head = setup.split("head")[1]
        if f"{setup.model.head}.weight" not in head:
            raise ConfigError("FedCP computes its context from the head's weights, which another layer shares.")
        return {"head": head, **self.init_optimizer({"params": setup.params, "policy": _initial_policy(setup)})}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        body, common = ctx.model.split(message["params"])
        context = _context(ctx.model, state["head"])

        def objective(learned: Tree, batch: Batch) -> Tensor:
            # the received body runs first, because batch statistics are those of the last call
            received = ctx.model.features(message["params"], batch.x).detach()
            z = ctx.model.features(learned["params"], batch.x)
            noise = -torch.log(-torch.log(batch.uniform((len(z), 2, z.shape[1]))))  # Gumbel noise
            personal = {**learned["params"], "common": common, "policy": learned["policy"], "context": context}
            outputs = self._outputs(ctx.model, personal, z, noise)
            loss = batch.mean(ctx.model.losses(outputs, batch.y, batch.weight))
            return loss + self.lam * squared_mmd(z, received, batch.weight, _BANDWIDTHS)

        start = {"params": body | state["head"], "policy": message["policy"]}
        end, new = self.optimize(ctx, objective, start, state)
        body, head = ctx.model.split(end["params"])
        upload = {"params": body | scale(add(head, common), 0.5), "policy": end["policy"]}
        return {"head": head, **new}, upload

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        (body, common), own = ctx.model.split(message["params"]), state["head"]
        return {**body, **own, "common": common, "policy": message["policy"]}

    def trained(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        """Use the global head as in training, not as uploaded."""
        body, _ = ctx.model.split(upload["params"])
        return self.personalize(ctx, state, upload | {"params": message["params"] | body})

    def init_personal(self, setup: Setup) -> Tree:
        return {**setup.params, "common": setup.split("head")[1], "policy": _initial_policy(setup)}

    def logits(self, model: Model, personal: Tree, x: Inputs) -> Tensor:
        return self._outputs(model, {**personal, "context": _context(model, personal)}, model.features(personal, x))

    def _outputs(self, model: Model, personal: Tree, z: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        """Return h_i(r⊙z) + h_g(s⊙z) with (r, s) = softmax((a + noise) / τ), a = ReLU(LN(Linear(z⊙c_i)))."""
        policy = personal["policy"]
        scores = torch.relu(layer_norm(policy, linear(policy, z * personal["context"])))
        r, s = torch.softmax((scores.reshape(z.shape[0], 2, -1) + noise) / self.tau, 1).unbind(1)
        return model.head_output(personal, r * z) + model.head_output(personal["common"], s * z)


def _initial_policy(setup: Setup) -> Params:
    _, width = setup.model.head_size
    return make_block(setup, 0, width, 2 * width)


def _context(model: Model, head: Params) -> Tensor:
    """Return the context: the sum of the rows of the head's weights, scaled to length 1."""
    return F.normalize(head[f"{model.head}.weight"].sum(0), dim=0)
