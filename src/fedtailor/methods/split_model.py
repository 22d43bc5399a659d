"""Methods that share one part of the model and keep the other."""

from dataclasses import dataclass

from fedtailor.errors import Refused
from fedtailor.local import LocalView
from fedtailor.method import Exchange, Method, Setup
from fedtailor.trees import Tree, mean


@dataclass(frozen=True)
class FedPer(Method):
    """Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv 2019; the head is personal."""

    epochs: int = 2  # E, local epochs
    momentum: float = 0.0  # of local SGD
    weight_decay: float = 0.0  # of local SGD

    def init_server(self, setup: Setup) -> Tree:
        body, head = setup.model.split(setup.params)
        if not head or not body:
            raise Refused("FedPer shares the body and keeps the head, so it needs a model that has both.")
        return {"params": body}

    def init_client(self, setup: Setup) -> Tree:
        return {"head": setup.model.split(setup.params)[1]}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = local.sgd(local.loss, message["params"] | state["head"], **self.descent)
        body, head = local.model.split(params)
        return {"head": head}, {"params": body}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes)

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        params: Tree = message["params"] | state["head"]
        return params
