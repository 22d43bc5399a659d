"""pFedLA: hypernetworks at the server learn layer-wise aggregation weights for each client."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vjp, vmap

from fedtailor.core.client_context import ClientContext
from fedtailor.core.fields import NonNegative, NonNegativeInt, Positive, PositiveInt
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.trees import Params, Rows, Tree, map_leaves, put, repeat, take
from fedtailor.errors import ConfigError
from fedtailor.methods._shared.hypernetwork import (
    HYPERNETWORK_SALT,
    OUTPUT_SALT,
    apply_trunk,
    draw_normal,
    make_trunk,
    pseudo_gradient,
)
from fedtailor.methods._shared.newcomers import newcomer_shares, set_newcomer_rows


@dataclass(frozen=True)
class PFedLA(LocalTraining):
    """Ma et al., "Layer-Wised Model Aggregation for Personalized Federated Learning", CVPR 2022.

    The server stores the last model θ_j of each client; one hypernetwork per client i generates the weights α_i^l with
    which the server mixes layer l of these models. A layer consists of the parameters of one module: a normalization
    layer is a layer of its own, and its running statistics are mixed like its parameters. With `retained`, the method
    is HeurpFedLA: the layers with the largest own weight stay on the client and are not communicated, so the server's
    copies of them remain as last communicated.

    There is no official code. As in the known re-implementation, weights are divided by their sum, and if all are 0,
    only the own model is used; softmax, which the paper may use, is an option. The learning rate is larger than in the
    re-implementation, where the weights hardly change within tens of rounds because gradients are divided by the sum
    over all clients. A row with a single nonzero share does not change because its gradient is 0.
    """

    title: ClassVar[str] = "pFedLA"
    lr: Annotated[Positive, "η, local learning rate (0.01 in the re-implementation)"] = 0.1
    epochs: Annotated[PositiveInt, "E, local epochs (10 in the re-implementation)"] = 2
    hyper_lr: Annotated[NonNegative, "η_hn, learning rate of the hypernetworks (0.005 in the re-implementation)"] = 1.0
    retained: Annotated[NonNegativeInt, "K, layers that stay on the client (HeurpFedLA)"] = 0
    normalize: Annotated[
        Literal["sum", "softmax"], "how outputs become shares: ReLU divided by the sum, or softmax"
    ] = "sum"
    embedding: Annotated[PositiveInt, "dimension of v_i, the embedding of client i"] = 100
    hidden: Annotated[PositiveInt, "width of the hypernetworks"] = 100
    printed_sign: Annotated[bool, "returned − sent, which ascends instead of descending"] = False
    download: ClassVar[str] = "personalized mixture per layer"
    client_state: ClassVar[str] = "nothing, or retained layers"
    keeps_optimizer: ClassVar[bool] = True
    newcomer_start: ClassVar[str] = "equal shares of all models; initial retained layers"

    def init_server(self, setup: Setup) -> Tree:
        count, layers = setup.num_clients, sorted({_layer_name(name) for name in setup.params})
        if self.retained > len(layers):
            raise ConfigError(
                f"PFedLA: retained must be at most {len(layers)}, the number of layers, got {self.retained}."
            )
        outputs = {
            layer: {
                "weight": setup.uniform((count, self.hidden), HYPERNETWORK_SALT, OUTPUT_SALT, number),
                "bias": setup.like.new_zeros(count),
            }
            for number, layer in enumerate(layers)
        }
        trunk = make_trunk(setup, (self.embedding, self.hidden, self.hidden, self.hidden))
        networks = repeat({"trunk": trunk, "outputs": outputs}, count)  # ψ_i, initially equal
        networks["embedding"] = draw_normal(setup, (count, self.embedding))  # v_i
        return {"models": repeat(setup.params, count), "networks": networks}

    def grow_server(self, server: Tree, setup: Setup, before: int) -> Tree:
        """Add newcomers whose hypernetworks give equal shares to all clients.

        The model of a newcomer is the mean until it sends one. The hypernetworks of the other clients give it the mean
        of their outputs and so send slightly more of the mean model: with a share of 0, ReLU would have no gradient by
        which the share could grow.
        """
        grown = super().grow_server(server, setup, before)
        newcomers = torch.arange(setup.num_clients, device=grown["networks"]["embedding"].device) >= before

        def fill_mean(leaf: Tensor) -> Tensor:  # [clients, outputs, ...]
            new = (newcomers[:, None] | newcomers).reshape(*leaf.shape[:2], *[1] * (leaf.ndim - 2))
            return torch.where(new, leaf[:, :before].mean(1, keepdim=True), leaf)

        outputs = map_leaves(fill_mean, grown["networks"]["outputs"])
        models = set_newcomer_rows(grown["models"], newcomer_shares(grown["models"], before))
        return {"models": models, "networks": grown["networks"] | {"outputs": outputs}}

    def init_client(self, setup: Setup) -> Tree:
        return ({"params": setup.params} if self.retained else {}) | self.init_optimizer(setup.params)

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        own = torch.tensor(clients, device=server["networks"]["embedding"].device)
        weights = self._weights(take(server["networks"], own), own)
        mixed = _mix(weights, server["models"])  # θ̄_i
        if not self.retained:
            return {"params": mixed}
        layers = sorted(weights)
        own_weights = torch.cat([weights[layer].gather(1, own[:, None]) for layer in layers], 1)  # α_ii^l
        retained = own_weights.argsort(dim=1, descending=True, stable=True)[:, : self.retained]
        sent = torch.ones_like(own_weights, dtype=torch.bool).scatter(1, retained, False)  # [clients, layers]
        sent_by_layer = dict(zip(layers, torch.split(sent, 1, dim=1), strict=True))
        return {"params": {name: Rows(leaf[:, None], sent_by_layer[_layer_name(name)]) for name, leaf in mixed.items()}}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params, new = self.optimize(ctx, ctx.loss, self.personalize(ctx, state, message), state)
        if not self.retained:
            return new, {"params": params}
        upload = {name: Rows(p[None], message["params"][name].present) for name, p in params.items()}
        return {"params": params, **new}, {"params": upload}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        own = torch.tensor(exchange.clients, device=server["networks"]["embedding"].device)
        models, networks = server["models"], take(server["networks"], own)
        returned = exchange.received["params"]
        trainable = exchange.model.trainable(models)
        # network i affects J_i only
        backward = vjp(lambda networks: _mix(self._weights(networks, own), trainable), networks)[1]
        (grads,) = backward(pseudo_gradient(exchange, self.printed_sign))
        moved = map_leaves(lambda w, grad: w.sub(grad, alpha=self.hyper_lr), networks, grads)
        if self.retained:
            returned = {name: _fill_absent(returned[name], old) for name, old in take(models, own).items()}
        return {"models": put(models, own, returned), "networks": put(server["networks"], own, moved)}

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        params: Tree = message["params"]
        if not self.retained:
            return params
        return {name: torch.where(row.present[0], row.values[0], state["params"][name]) for name, row in params.items()}

    def _weights(self, networks: Tree, own: Tensor) -> Params:
        """Return α_i^l: for each layer one row of shares per client, [clients, num_clients]."""

        def layer_weights(network: Tree, own: Tensor) -> Params:
            hidden = apply_trunk(network["trunk"], network["embedding"]).relu()
            return {
                layer: self._to_shares(F.linear(hidden, **output), own) for layer, output in network["outputs"].items()
            }

        weights: Params = vmap(layer_weights)(networks, own)
        return weights

    def _to_shares(self, values: Tensor, own: Tensor) -> Tensor:
        """Convert the outputs for one client into shares."""
        if self.normalize == "softmax":
            return values.softmax(0)
        values = values.relu()
        total = values.sum()
        own_only = (torch.arange(len(values), device=values.device) == own).to(values.dtype)
        return torch.where(total > 0, values / torch.where(total > 0, total, 1), own_only)


def _mix(weights: Params, models: Params) -> Params:
    """Return θ̄_i^l = Σ_j α_ij^l θ_j^l, stacked over i."""
    return {name: torch.tensordot(weights[_layer_name(name)], stacked, dims=1) for name, stacked in models.items()}


def _fill_absent(row: Rows, old: Tensor) -> Tensor:
    """Replace the tensors of clients that did not send them by the old ones: [clients, ...]."""
    return torch.where(row.present.reshape(-1, *[1] * (old.ndim - 1)), row.values[:, 0], old)


def _layer_name(name: str) -> str:
    """Return the name of the module that owns a parameter."""
    return name.rpartition(".")[0] or "model"
