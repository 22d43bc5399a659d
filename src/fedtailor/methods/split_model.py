"""Methods that share one part of the model and keep the other."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from fedtailor.local import LocalView
from fedtailor.method import Exchange, Method, Setup, SGDMethod
from fedtailor.trees import Params, Tree, mean

Split = str | tuple[str, ...]  # the personal part, as `Model.split` takes it
Splitter = Callable[[Split], tuple[Params, Params]]  # a part -> (the rest, the part), as `Model.split` gives it


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
    newcomer: ClassVar[str] = "the shared part; the personal one is the start's"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_split(self, self.part)
        self.require_choice("weights", "size", "uniform")

    @property
    def part(self) -> Split:
        """The personal part."""
        raise NotImplementedError

    @property
    def plain_mean(self) -> bool:
        return self.weights == "uniform"

    def divide(self, split: Splitter) -> tuple[Params, Params]:
        """(shared, personal) of what is split."""
        return split(self.part)

    def init_server(self, setup: Setup) -> Tree:
        return {"params": self.divide(setup.split)[0]}

    def init_client(self, setup: Setup) -> Tree:
        return {"personal": self.divide(setup.split)[1]}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = local.sgd(local.loss, message["params"] | state["personal"], **self.descent)
        shared, personal = self.divide(partial(local.model.split, params))
        return {"personal": personal}, {"params": shared}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes if self.weights == "size" else None)

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        params: Tree = message["params"] | state["personal"]
        return params


@dataclass(frozen=True)
class _OwnHead(_Split):
    """The head is personal, the body shared."""

    down: ClassVar[str] = "body"
    up: ClassVar[str] = "body"
    keeps: ClassVar[str] = "head"
    newcomer: ClassVar[str] = "the common body; its head is the start's"

    @property
    def part(self) -> Split:
        return "head"


@dataclass(frozen=True)
class FedPer(_OwnHead):
    """Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv 2019; the head is personal."""


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
        return _alternate(local, state, message, self.descent, self.epochs)


def _alternate(
    local: LocalView, state: Tree, message: Tree, descent: dict[str, Any], personal_epochs: int
) -> tuple[Tree, Tree]:
    """`train` of one part after the other: the personal one under what was received, then the shared one under it."""
    received, personal = message["params"], state["personal"]
    if personal_epochs:
        first = descent | {"epochs": personal_epochs}
        personal = local.sgd(lambda v, batch: local.loss(received | v, batch), personal, **first)
    shared = local.sgd(lambda u, batch: local.loss(u | personal, batch), received, **descent)
    return {"personal": personal}, {"params": shared}


@dataclass(frozen=True)
class FedRep(_OwnHead):
    """Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021.

    First the head is fitted to the received body, then the body is trained under that head; each by an optimiser of its
    own, so momentum and weight decay move nothing that is frozen. The authors' code adds 10 epochs of heads alone
    to its last round; here all rounds are alike.
    """

    epochs: int = 1  # local epochs of the body
    head_epochs: int = 9  # τ, local epochs of the head

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.head_epochs >= 0, "head_epochs", "at least 0")

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        return _alternate(local, state, message, self.descent, self.head_epochs)


@dataclass(frozen=True)
class FedBABU(_OwnHead):
    """Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.

    Only the body is trained, under the head of the common start, which never moves and never crosses. To be used, a
    copy of all of it is fine-tuned on the client's data. At the moment `trained` it is not: that model is the trained
    body under the head of the start.
    """

    tuning_epochs: int = 5  # τ_f, epochs of fine-tuning, of body and head; 0: the common model as it is
    keeps: ClassVar[str] = "head of the start"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.tuning_epochs >= 0, "tuning_epochs", "at least 0")

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        return _alternate(local, state, message, self.descent, personal_epochs=0)

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        params = super().personalize(local, state, message)
        if not self.tuning_epochs:
            return params
        return local.sgd(local.loss, params, **(self.descent | {"epochs": self.tuning_epochs}))

    def trained(self, local: LocalView, state: Tree, message: Tree, upload: Tree) -> Tree:
        params: Tree = upload["params"] | state["personal"]
        return params


@dataclass(frozen=True)
class LGFedAvg(_Split):
    """Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations", arXiv
    2020; the head is shared and the body personal, FedPer's mirror.

    Everyone begins at the common start. The authors' code begins at a model that FedAvg has trained (here: `initial`)
    and reports the best model that each client has had.
    """

    weights: Literal["size", "uniform"] = "uniform"  # of clients in the average: all alike (the code's), or by samples
    down: ClassVar[str] = "head"
    up: ClassVar[str] = "head"
    keeps: ClassVar[str] = "body"
    newcomer: ClassVar[str] = "the common head; its body is the start's"

    @property
    def part(self) -> Split:
        return "head"

    def divide(self, split: Splitter) -> tuple[Params, Params]:
        body, head = split("head")
        return head, body


@dataclass(frozen=True)
class FedBN(_Split):
    """Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.

    Every batch normalisation is personal, with its running statistics, and is found by its type. For a model without
    batch normalisation, this is FedAvg. The authors' code counts all clients alike, as theirs are of one size.
    """

    down: ClassVar[str] = "all but batch normalisation"
    up: ClassVar[str] = "all but batch normalisation"
    keeps: ClassVar[str] = "batch normalisation"
    newcomer: ClassVar[str] = "the shared part; batch normalisation is the start's"

    @property
    def part(self) -> Split:
        return "batch_norm"

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.model.split(setup.params, self.part)[0]}  # the part may be empty

    def init_client(self, setup: Setup) -> Tree:
        return {"personal": setup.model.split(setup.params, self.part)[1]}
