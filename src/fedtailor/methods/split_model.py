"""Methods that share one part of the model and keep the other."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedtailor.local import LocalView
from fedtailor.method import Exchange, Method, Setup, SGDMethod
from fedtailor.trees import Tree, mean

Split = str | tuple[str, ...]  # the personal part, as `Model.split` takes it


def require_split(method: Method, split: Split) -> None:
    layers = [split] if isinstance(split, str) else split
    named = isinstance(layers, (list, tuple)) and layers and all(isinstance(layer, str) for layer in layers)
    method.require(bool(named), "split", "output, input, split_input or a list of layers")


@dataclass(frozen=True)
class _Split(SGDMethod):
    """Both parts are trained at once, the shared ones are averaged."""

    weights: Literal["size", "uniform"] = "size"  # of clients in the average: by samples, or all alike
    down: ClassVar[str] = "shared part"
    up: ClassVar[str] = "shared part"
    keeps: ClassVar[str] = "personal part"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_split(self, self.part)
        self.require_choice("weights", "size", "uniform")

    @property
    def part(self) -> Split:
        """The personal part."""
        raise NotImplementedError

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.split(self.part)[0]}

    def init_client(self, setup: Setup) -> Tree:
        return {"personal": setup.split(self.part)[1]}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = local.sgd(local.loss, message["params"] | state["personal"], **self.descent)
        shared, personal = local.model.split(params, self.part)
        return {"personal": personal}, {"params": shared}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes if self.weights == "size" else None)

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        params: Tree = message["params"] | state["personal"]
        return params


@dataclass(frozen=True)
class FedPer(_Split):
    """Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv 2019; the head is personal."""

    down: ClassVar[str] = "body"
    up: ClassVar[str] = "body"
    keeps: ClassVar[str] = "head"

    @property
    def part(self) -> Split:
        return "head"


@dataclass(frozen=True)
class FedSim(_Split):
    """Pillutla et al., "Federated Learning with Partial Model Personalization", ICML 2022: both parts at once."""

    epochs: int = 1  # E, local epochs
    split: Split = "output"  # the personal part: output, input, split_input or layers

    @property
    def part(self) -> Split:
        return self.split


@dataclass(frozen=True)
class FedAlt(_Split):
    """Pillutla et al., "Federated Learning with Partial Model Personalization", ICML 2022: one part after the other."""

    epochs: int = 1  # E, local epochs of each part
    split: Split = "output"  # the personal part: output, input, split_input or layers

    @property
    def part(self) -> Split:
        return self.split

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        received = message["params"]
        personal = local.sgd(lambda v, batch: local.loss(received | v, batch), state["personal"], **self.descent)
        shared = local.sgd(lambda u, batch: local.loss(u | personal, batch), received, **self.descent)
        return {"personal": personal}, {"params": shared}
