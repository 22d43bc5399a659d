"""The contract: what a method of personalised federated learning is.

A method is a frozen dataclass of hyper-parameters with a few pure functions over trees. A client sees only itself; the
server sees the clients of a round stacked on the leading axis. What crosses between them is what `send` and `train`
return, nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fedtailor.errors import Refused
from fedtailor.model import Inputs, Model
from fedtailor.trees import Params, Tree, repeat

if TYPE_CHECKING:
    from fedtailor.local import LocalView


@dataclass(frozen=True)
class Setup:
    """What both sides know before round 1."""

    model: Model
    params: Params  # the common start
    num_clients: int
    sizes: Tensor  # [num_clients], training samples
    rounds: int
    seed: int


@dataclass(frozen=True)
class Exchange:
    """A round as the server saw it; `sent` and `received` are stacked in the order of `clients`."""

    round: int
    clients: Sequence[int]
    num_clients: int
    sizes: Tensor  # [len(clients)]
    sent: Tree
    received: Tree


@dataclass(frozen=True)
class Method:
    """Inherit, add fields, and override what differs. The client's part must be safe under `torch.func.vmap`: no
    `.item()`, no `if` on tensors, nothing in place, no random generator.

    A model crosses as "params", both ways; an upload reuses a message's name only for the same thing after training.
    States keep their names and shapes for the whole run; a message's names may change between rounds, not within one.
    """

    lr: float = 0.1  # η, local learning rate

    one_by_one: ClassVar[bool] = False  # True: clients of a round take turns, each sees the server the last one left
    personal: ClassVar[bool] = True  # False: every client ends with the same model

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(f.default, float):
                self.require(isinstance(value, Real) and isfinite(value), f.name, "a number")
            elif isinstance(f.default, int) and not isinstance(f.default, bool):
                self.require(isinstance(value, Integral), f.name, "a whole number")
        self.require(self.lr > 0, "lr", "above 0")
        for name, low in [("epochs", 1), ("momentum", 0), ("weight_decay", 0)]:
            self.require(getattr(self, name, low) >= low, name, f"at least {low}")
        self.require(getattr(self, "momentum", 0) < 1, "momentum", "below 1")

    def require(self, holds: bool, name: str, what: str) -> None:
        """Refuse a field's value in words."""
        if not holds:
            raise Refused(f"{type(self).__name__}: {name} must be {what}, not {getattr(self, name)!r}.")

    @property
    def descent(self) -> dict[str, Any]:
        """The fields that set local SGD, as `local.sgd` takes them."""
        names = {f.name for f in fields(self)}
        return {name: getattr(self, name) for name in ("lr", "epochs", "momentum", "weight_decay") if name in names}

    # the server: ordinary Python, trees stacked over the clients of the round

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.params}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        """What goes to each of these clients, stacked; by default all of the server's state to everyone."""
        return repeat(server, len(clients))

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return server

    # the client: one client, trees not stacked

    def init_client(self, setup: Setup) -> Tree:
        return {}

    def train(self, local: "LocalView", state: Tree, message: Tree) -> tuple[Tree, Tree]:
        """One round of work: (state to keep, upload to send)."""
        raise NotImplementedError

    def personalize(self, local: "LocalView", state: Tree, message: Tree) -> Tree:
        """The client's own model at the moment `received`: after a download, before training; may fine-tune."""
        if "params" not in message:
            name = type(self).__name__
            raise Refused(f"{name} sends no 'params', so {name}.personalize must say what the client's model is.")
        params: Tree = message["params"]
        return params

    def trained(self, local: "LocalView", state: Tree, message: Tree, upload: Tree) -> Tree:
        """The client's own model at the moment `trained`: the upload stands for what was received."""
        return self.personalize(local, state, message | upload)

    def measure(self, local: "LocalView", state: Tree, message: Tree) -> Tree:
        """Numbers for the record, never sent: one scalar tensor a name."""
        return {}

    def logits(self, model: Model, personal: Tree, x: Inputs) -> Tensor:
        """What the personal model answers."""
        return model.logits(personal, x)
