"""The contract: what a method of personalised federated learning is.

A method is a frozen dataclass of hyper-parameters with a few pure functions over trees. A client sees only itself; the
server sees the clients of a round stacked on the leading axis. What crosses between them is what `send` and `train`
return, nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import inf, isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fedtailor import hashing
from fedtailor.errors import Refused
from fedtailor.model import Inputs, Model
from fedtailor.trees import Params, Tree, grown, repeat

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

    @property
    def like(self) -> Tensor:
        """A tensor in the dtype and on the device of the run, to make others like it."""
        return next(iter(self.params.values()))

    def uniform(self, shape: tuple[int, ...], *salts: int) -> Tensor:
        """Random numbers in (0, 1) from the seed, for what a method adds to the model."""
        return hashing.uniform(hashing.key(self.seed, *salts), shape, self.like.dtype, self.like.device)

    def split(self, part: str | Sequence[str]) -> tuple[Params, Params]:
        """The start without a part, and the part (see `Model.split`); each must hold something."""
        rest, chosen = self.model.split(self.params, part)
        if not rest or not chosen:
            raise Refused(f"To keep {part!r} and share the rest, a method needs a model that has both.")
        return rest, chosen


@dataclass(frozen=True)
class Exchange:
    """A round as the server saw it; `sent` and `received` are stacked in the order of `clients`."""

    round: int
    clients: Sequence[int]
    num_clients: int
    sizes: Tensor  # [len(clients)]
    model: Model
    sent: Tree
    received: Tree


@dataclass(frozen=True)
class Method:
    """Inherit, add fields, and override what differs. The client's part must be safe under `torch.func.vmap`: no
    `.item()`, no `if` on tensors, nothing in place, no random generator.

    A model crosses as "params", both ways; an upload reuses a message's name only for the same thing after training.
    States keep their names for the whole run, and their shapes unless clients join (`welcome`, `widen`); a message's
    names may change between rounds, not within one.
    """

    personal: ClassVar[bool] = True  # False: every client ends with the same model
    down: ClassVar[str] = "model"  # what crosses to a client in a round, in words for tables
    up: ClassVar[str] = "model"  # what crosses from it
    keeps: ClassVar[str] = "nothing"  # what stays with it from round to round
    newcomer: ClassVar[str] = "the common model"  # what a client that joins late gets and begins with

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(f.default, bool):
                self.require(isinstance(value, bool), f.name, "true or false")
            elif isinstance(f.default, float):
                self.require(isinstance(value, Real) and isfinite(value), f.name, "a number")
            elif isinstance(f.default, int):
                self.require(isinstance(value, Integral), f.name, "a whole number")
        lr = getattr(self, "lr", None)  # None: the method chooses, or has none
        self.require(lr is None or (isinstance(lr, Real) and 0 < float(lr) < inf), "lr", "above 0")
        for name, low in [("epochs", 1), ("momentum", 0), ("weight_decay", 0)]:
            self.require(getattr(self, name, low) >= low, name, f"at least {low}")
        self.require(getattr(self, "momentum", 0) < 1, "momentum", "below 1")

    def require(self, holds: bool, name: str, what: str) -> None:
        """Refuse a field's value in words."""
        if not holds:
            raise Refused(f"{type(self).__name__}: {name} must be {what}, not {getattr(self, name)!r}.")

    def require_choice(self, name: str, *choices: str) -> None:
        """Refuse a word that is none of these."""
        self.require(getattr(self, name) in choices, name, " or ".join(repr(choice) for choice in choices))

    @property
    def descent(self) -> dict[str, Any]:
        """The fields that set local SGD, as `local.sgd` takes them."""
        names = {f.name for f in fields(self)}
        return {name: getattr(self, name) for name in ("lr", "epochs", "momentum", "weight_decay") if name in names}

    @property
    def one_by_one(self) -> bool:
        """True: clients of a round take turns, and each sees the server the last one left."""
        return False

    @property
    def plain_mean(self) -> bool:
        """True: `receive` makes no other use of uploads than their mean, in which all clients count alike."""
        return False

    # the server: ordinary Python, trees stacked over the clients of the round

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.params}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        """What goes to each of these clients, stacked; by default all of the server's state to everyone."""
        return repeat(server, len(clients))

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return server

    def serve(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        """What clients get to use rather than to train on; by default the same."""
        return self.send(server, clients, round)

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
        """The client's own model at the moment `trained`: the upload stands for what was received. It is asked every
        round; for a client that never trained, `personalize` of the start stands for it."""
        return self.personalize(local, state, message | upload)

    def logits(self, model: Model, personal: Tree, x: Inputs) -> Tensor:
        """What the personal model answers."""
        return model.logits(personal, x)

    # clients that join late: from then on, `setup` is of all clients there are

    def welcome(self, server: Tree, setup: Setup, before: int) -> Tree:
        """The server with room for the clients from number `before` on, in the shapes of `init_server(setup)`. What the
        others are sent stays as it was, but for what the method's formula makes of the number of clients."""
        return grown(server, self.init_server(setup))

    def widen(self, state: Tree, setup: Setup) -> Tree:
        """What a client that was there keeps, with room for newcomers."""
        return grown(state, self.init_client(setup))

    def join(self, setup: Setup, message: Tree) -> Tree:
        """What a newcomer keeps before its first round, of the first message it is sent: by default as if the run had
        begun with the model it received, as far as it received one."""
        received = message.get("params", {})
        known = {name: leaf for name, leaf in received.items() if name in setup.params and isinstance(leaf, Tensor)}
        return self.init_client(replace(setup, params=setup.params | known))

    # for the record only, never sent

    def monitor(self, before: Tree, after: Tree, exchange: Exchange) -> Tree:
        """The server's numbers, every round: tensors by name, and under "per_client" one number a client of the
        round. Cheap, for it is asked after every round."""
        return {}

    def note(self, local: "LocalView", state: Tree, message: Tree, upload: Tree) -> Tree:
        """A client's numbers, every round it takes part in: one scalar a name, with its state after training. Cheap:
        no pass over the data."""
        return {}

    @property
    def measures(self) -> bool:
        """Whether there is anything to measure."""
        return type(self).measure is not Method.measure

    def measure(self, local: "LocalView", state: Tree, message: Tree) -> Tree:
        """A client's numbers when it is evaluated, with the message of a further round: one scalar a name; may pass
        over the data. Larger tensors are only summed over clients, for `overall`."""
        return {}

    def overall(self, totals: Tree) -> Tree:
        """Numbers over all evaluated clients, from the sums of what `measure` gave."""
        return {}


@dataclass(frozen=True)
class SGDMethod(Method):
    """A method whose clients train by passes of SGD over their data: `local.sgd(objective, start, **self.descent)`."""

    lr: float = 0.1  # η, local learning rate
    epochs: int = 2  # E, local epochs
    momentum: float = 0.0  # of local SGD
    weight_decay: float = 0.0  # of local SGD
