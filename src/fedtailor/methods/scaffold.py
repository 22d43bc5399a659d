"""SCAFFOLD: FedAvg with control variates that correct client drift."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import AveragingMethod, ClientWeights
from fedtailor.core.fields import Positive, PositiveInt
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.training_settings import plain_sgd
from fedtailor.core.trees import Tree, add, dot, mean, scale, sub, zeros_like


@dataclass(frozen=True)
class Scaffold(AveragingMethod, LocalTraining):
    """Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020.

    Control variates correct the local gradients for client drift (option II of the paper). Local training is plain SGD:
    with momentum or weight decay, (θ − y) / (K η) would not estimate the gradient. With weights="size", both θ and c
    are means by number of samples.
    """

    title: ClassVar[str] = "SCAFFOLD"
    fixed_settings: ClassVar[Mapping[str, str]] = plain_sgd("its control variates assume plain SGD")
    epochs: Annotated[PositiveInt, "local epochs, K batches in total"] = 2
    server_lr: Annotated[Positive, "η_g, server learning rate"] = 1.0
    weights: Annotated[ClientWeights, "client weights: uniform (as in the paper) or by number of samples"] = "uniform"
    personal: ClassVar[bool] = False
    download: ClassVar[str] = "model, control variate"
    upload: ClassVar[str] = "model, change of the control variate"
    client_state: ClassVar[str] = "control variate"
    newcomer_start: ClassVar[str] = "the global model; a zero control variate"

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.params, "control": zeros_like(setup.model.trainable(setup.params))}

    def init_client(self, setup: Setup) -> Tree:
        return {"control": zeros_like(setup.model.trainable(setup.params))}

    def grow_server(self, server: Tree, setup: Setup, before: int) -> Tree:
        """Rescale c, which is the mean of all c_i, because the c_i of newcomers are 0."""
        new = super().grow_server(server, setup, before)
        sizes = (setup.sizes if self.weights == "size" else torch.ones_like(setup.sizes)).double()
        return new | {"control": scale(new["control"], sizes[:before].sum() / sizes.sum())}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        drift = sub(message["control"], state["control"])  # c − c_i
        params = ctx.optimize(
            lambda w, batch: ctx.loss(w, batch) + dot(drift, ctx.model.trainable(w)),
            message["params"],
            **self.optimizer_options,
        )
        delta = ctx.model.trainable(sub(params, message["params"]))
        steps = self.steps or ctx.num_steps(self.epochs, self.drop_last)  # K
        control = sub(scale(delta, -1 / (steps * self.scheduled(ctx, self.lr))), drift)
        return {"control": control}, {"params": params, "control_delta": sub(control, state["control"])}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        average, share = mean(exchange.received, self.round_weights(exchange)), self.round_share(exchange)
        step = sub(average["params"], server["params"])
        return {
            "params": add(server["params"], scale(step, self.server_lr)),
            "control": add(server["control"], scale(average["control_delta"], share)),
        }
