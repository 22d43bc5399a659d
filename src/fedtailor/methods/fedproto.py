"""FedProto: clients exchange class prototypes instead of models."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import ClientWeights, WeightedMethod
from fedtailor.core.fields import NonNegative
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.model import Inputs, Model
from fedtailor.core.robust import ROWWISE
from fedtailor.core.trees import Rows, Tree
from fedtailor.methods._shared.class_statistics import (
    aligned_loss,
    class_counts,
    fill_absent,
    merge_rows,
    no_prototypes,
    prototypes,
)
from fedtailor.methods._shared.mmd import squared_distances


@dataclass(frozen=True)
class FedProto(WeightedMethod, LocalTraining):
    """Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022.

    Clients exchange only prototypes; each client trains its own model. In round 1, there are no prototypes to align
    with. The paper does not specify how its mean over the clients of a class is normalized: here the weights n_ik / Σ_i
    n_ik sum to 1, because on any other scale prototypes would not lie among the features. A client computes its
    prototypes with its trained model in one more pass over the data; the authors' code averages over the last epoch,
    while the model still changes. A class that no client of the round has keeps its prototype. The local head predicts
    until each of the client's classes has a prototype. At the moment `trained`, a model predicts with the prototypes
    with which it was trained.
    """

    lam: Annotated[NonNegative, "λ, weight of the alignment of features with prototypes"] = 1.0
    answer: Annotated[Literal["prototypes", "head"], "nearest prototype of the client's classes, or local head"] = (
        "prototypes"
    )
    weights: Annotated[
        ClientWeights, "client weights: by number of samples of the class or uniform (as in the code)"
    ] = "size"
    mixed_architectures: ClassVar[bool] = True
    download: ClassVar[str] = "prototypes"
    upload: ClassVar[str] = "client prototypes, class sizes"
    client_state: ClassVar[str] = "personal model"
    keeps_optimizer: ClassVar[bool] = True
    newcomer_start: ClassVar[str] = "the global prototypes; the initial model"

    def init_server(self, setup: Setup) -> Tree:
        return {"prototypes": no_prototypes(setup)}

    def init_client(self, setup: Setup) -> Tree:
        return {"params": setup.params, **self.init_optimizer(setup.params)}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params, new = self.optimize(
            ctx, lambda w, batch: aligned_loss(ctx, w, batch, message["prototypes"], self.lam), state["params"], state
        )
        own = prototypes(ctx, params)
        counts = {"counts": Rows(class_counts(ctx), own.present)} if self.weights == "size" else {}
        return {"params": params, **new}, {"prototypes": own, **counts}

    @property
    def robust_kinds(self) -> tuple[str, ...]:
        return ROWWISE

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        own = exchange.received["prototypes"]
        if exchange.robust.replaces_mean:
            fresh = exchange.mean({"prototypes": own})["prototypes"]
            return {"prototypes": fill_absent(fresh, server["prototypes"])}
        counts = exchange.received["counts"].values if self.weights == "size" else own.present
        return {"prototypes": merge_rows(server["prototypes"], own, counts)}

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return self._model(state, message, class_counts(ctx) > 0)

    def trained(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        return self._model(state, message, upload["prototypes"].present)

    def _model(self, state: Tree, message: Tree, classes: Tensor) -> Tree:
        """Return the client's network and the global prototypes of its classes, or none if one is missing."""
        if self.answer == "head":
            return {**state["params"]}
        known = message["prototypes"]
        complete = (known.present | ~classes).all()
        return {**state["params"], "prototypes": Rows(known.values, classes & complete)}

    def init_personal(self, setup: Setup) -> Tree:
        return {**setup.params, **({} if self.answer == "head" else {"prototypes": no_prototypes(setup)})}

    def logits(self, model: Model, personal: Tree, x: Inputs) -> Tensor:
        """Return −‖z − c_k‖²; classes that the client does not have rank last, at a finite distance."""
        features = model.features(personal, x)
        head_outputs = model.head_output(personal, features)
        if self.answer == "head":
            return head_outputs
        values, present = personal["prototypes"]
        distances = squared_distances(features, values)
        beyond = 1 + 2 * torch.where(present, distances, 0).amax(1, keepdim=True)
        return torch.where(present.any(), -torch.where(present, distances, beyond), head_outputs)
