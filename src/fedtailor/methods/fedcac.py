"""FedCAC: critical parameters are shared among similar clients only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import ClientWeights, WeightedMethod
from fedtailor.core.fields import Fraction, Positive
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.trees import Params, Tree, combine, map_leaves, mean, put, repeat, take

_MIN_SENSITIVITY = 1e-10  # sensitivities up to this value are rounding errors


@dataclass(frozen=True)
class FedCAC(WeightedMethod, LocalTraining):
    """Wu et al., "Bold but Cautious: Unlocking the Potential of Personalized Federated Learning through Cautiously
    Aggressive Collaboration", ICCV 2023.

    In each tensor, the fraction τ of entries with the largest sensitivity is critical. A client receives its critical
    entries as the mean over clients with similar critical entries, and all other entries from the global model θ. After
    round β, critical entries are the client's own. The server mixes, so that each client receives one model. The paper
    assumes full participation. Under partial participation, the server stores the last model and mask of each client
    that has taken part and mixes them anew for each message; a client that has never taken part receives θ. Entries
    with a sensitivity of at most 1e-10 are not critical, because rounding errors would select them. Running statistics
    are averaged as in θ.
    """

    tau: Annotated[Fraction, "τ, fraction of critical entries per tensor (0.4 for CIFAR-100 in the paper)"] = 0.5
    beta: Annotated[Positive, "β, round after which clients do not collaborate (170 for CIFAR-100 in the paper)"] = (
        100.0
    )
    weights: Annotated[ClientWeights, "client weights in θ: by number of samples or uniform"] = "size"
    download: ClassVar[str] = "personalized mixture of models"
    upload: ClassVar[str] = "model, one bit per parameter"
    keeps_optimizer: ClassVar[bool] = True

    def init_server(self, setup: Setup) -> Tree:
        count, trainable = setup.num_clients, setup.model.trainable(setup.params)
        masks = map_leaves(lambda leaf: torch.zeros_like(leaf, dtype=torch.bool), trainable)
        return {
            "params": setup.params,  # θ
            "models": repeat(trainable, count),  # θ_i as last uploaded
            "critical": repeat(masks, count),  # M_i
            "collaborators": setup.sizes.new_zeros(count, count, dtype=torch.bool),  # [i, j]: j collaborates with i
        }

    def init_client(self, setup: Setup) -> Tree:
        return self.init_optimizer(setup.params)

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        chosen = torch.tensor(clients, device=server["collaborators"].device)
        rows = server["collaborators"][chosen].double()
        personalized = combine(rows / rows.sum(1, keepdim=True).clamp(min=1), server["models"])  # ĉ_i
        global_params = {name: server["params"][name] for name in server["models"]}
        mixed = map_leaves(
            torch.where, take(server["critical"], chosen), personalized, repeat(global_params, len(clients))
        )
        return {"params": repeat(server["params"], len(clients)) | mixed}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params, new = self.optimize(ctx, ctx.loss, message["params"], state)
        before, after = (ctx.model.trainable(tree) for tree in (message["params"], params))
        return state | new, {"params": params, "critical": map_leaves(self._critical, before, after)}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        received = exchange.received
        clients = torch.tensor(exchange.clients, device=server["collaborators"].device)
        critical = put(server["critical"], clients, received["critical"])
        # each participant collaborates with itself
        known = server["collaborators"].diagonal().index_fill(0, clients, True)
        return {
            "params": mean(received["params"], self.round_weights(exchange)),
            "models": put(server["models"], clients, exchange.model.trainable(received["params"])),
            "critical": critical,
            "collaborators": self._collaborators(critical, known, exchange.round),
        }

    def _critical(self, before: Tensor, after: Tensor) -> Tensor:
        """Mark the entries with the largest sensitivity |(after − before) · after|."""
        sensitivity = ((after - before) * after).abs()
        count = int(self.tau * sensitivity.numel())
        if count == 0:
            return torch.zeros_like(sensitivity, dtype=torch.bool)
        threshold = sensitivity.flatten().topk(count).values[-1]
        return (sensitivity >= threshold) & (sensitivity > _MIN_SENSITIVITY)

    def _collaborators(self, critical: Params, known: Tensor, round: int) -> Tensor:
        """Return which clients collaborate, [clients, clients].

        Of the clients that have taken part, those collaborate whose overlap exceeds a threshold, which rises from the
        mean to the largest overlap. Each collaborates with itself; a client without critical entries collaborates with
        no other client.
        """
        own, overlap = torch.diag(known), overlaps(critical)
        has_critical = known & torch.stack([mask.flatten(1).any(1) for mask in critical.values()]).any(0)
        pairs = (has_critical & has_critical[:, None]) & ~own
        if not pairs.any():
            return own
        average, maximum = overlap[pairs].mean(), overlap[pairs].max()
        threshold = average + round / self.beta * (maximum - average)
        return own | (pairs & (overlap >= threshold - 1e-12))  # tolerance for rounding errors


def overlaps(masks: Params) -> Tensor:
    """Return O_ij = 1 − ‖M_i − M_j‖₁ / (2 ‖M_i‖₁) for stacked masks, [clients, clients].

    >>> overlaps({"w": torch.tensor([[True, True, False], [False, True, True]])})
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]], dtype=torch.float64)
    """
    rows = [mask.flatten(1).float() for mask in masks.values()]
    # products are exact in float32 up to 2²⁴ per tensor
    intersections = torch.stack([(row @ row.T).double() for row in rows]).sum(0)
    sizes = intersections.diagonal()
    differences = sizes[:, None] + sizes - 2 * intersections
    return 1 - differences / (2 * sizes[:, None].clamp(min=1))
