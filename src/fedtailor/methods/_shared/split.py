"""Split models: one part is shared and averaged, the other part is personal."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import AveragingMethod
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Method, Setup
from fedtailor.core.trees import Params, Tree

Split = str | tuple[str, ...]  # the personal part, in the form that `Model.split` accepts
Splitter = Callable[[Split], tuple[Params, Params]]  # maps a part to (rest, part), like `Model.split`


def require_split(method: Method, split: Split) -> None:
    """Check that `split` names a part of the model or a list of layers."""
    layers = [split] if isinstance(split, str) else split
    valid = isinstance(layers, (list, tuple)) and layers and all(isinstance(layer, str) for layer in layers)
    method.require(bool(valid), "split", "output, input, split_input, or a list of layers")


@dataclass(frozen=True)
class SplitMethod(AveragingMethod, LocalTraining):
    """Base of methods with a split model: clients train both parts jointly, and the server averages the shared part."""

    download: ClassVar[str] = "shared part"
    upload: ClassVar[str] = "shared part"
    client_state: ClassVar[str] = "personal part"
    keeps_optimizer: ClassVar[bool] = True
    newcomer_start: ClassVar[str] = "the global shared part; the initial personal part"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_split(self, self.part)

    @property
    def part(self) -> Split:
        """The personal part."""
        raise NotImplementedError

    def split_params(self, split: Splitter) -> tuple[Params, Params]:
        """Split parameters into (shared, personal) with the given function."""
        return split(self.part)

    def init_server(self, setup: Setup) -> Tree:
        return {"params": self.split_params(setup.split)[0]}

    def init_client(self, setup: Setup) -> Tree:
        return {"personal": self.split_params(setup.split)[1], **self.init_optimizer(setup.params)}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params, new = self.optimize(ctx, ctx.loss, message["params"] | state["personal"], state)
        shared, personal = self.split_params(partial(ctx.model.split, params))
        return {"personal": personal, **new}, {"params": shared}

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return {**message["params"], **state["personal"]}


@dataclass(frozen=True)
class PersonalHeadMethod(SplitMethod):
    """Base of methods with a shared body and a personal head."""

    download: ClassVar[str] = "body"
    upload: ClassVar[str] = "body"
    client_state: ClassVar[str] = "head"
    newcomer_start: ClassVar[str] = "the global body; the initial head"

    @property
    def part(self) -> Split:
        return "head"


@dataclass(frozen=True)
class AlternatingMethod(SplitMethod):
    """Base of methods whose clients train the two parts in turn, each with its own optimizer."""

    @property
    def personal_epochs(self) -> int | None:
        """Epochs of the personal part; None: those of the shared part, or as many steps."""
        return None

    def init_client(self, setup: Setup) -> Tree:
        shared, personal = self.split_params(setup.split)
        kept = self.init_optimizer(shared) | self.init_optimizer(personal, "personal_optimizer")
        return {"personal": personal, **kept}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        """Train the personal part with the shared part fixed, then the shared part with the personal part fixed."""
        received, personal, new = message["params"], state["personal"], state
        if self.personal_epochs != 0:
            personal, kept = self.optimize(
                ctx,
                lambda v, batch: ctx.loss(received | v, batch),
                personal,
                state,
                key="personal_optimizer",
                epochs=self.personal_epochs,
            )
            new = state | {"personal": personal} | kept
        shared, kept = self.optimize(ctx, lambda u, batch: ctx.loss(u | personal, batch), received, state)
        return new | kept, {"params": shared}
