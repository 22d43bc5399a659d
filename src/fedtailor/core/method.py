"""The contract that every federated learning method implements.

A method is a frozen dataclass of hyperparameters with a few pure functions over trees. Client hooks see one client;
server hooks see the clients of a round, stacked along the leading axis. The only data that is sent between them is
what `send` and `train` return.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from torch import Tensor

from fedtailor.core import random
from fedtailor.core.client_context import ClientContext
from fedtailor.core.code_reference import is_built_in
from fedtailor.core.fields import check_fields
from fedtailor.core.model import Inputs, Model
from fedtailor.core.robust import KINDS, Robust
from fedtailor.core.training_settings import TrainingSettings
from fedtailor.core.trees import Params, Tree, grow, mean, repeat
from fedtailor.errors import ConfigError


@dataclass(frozen=True)
class Setup:
    """What the server and all clients know before round 1."""

    model: Model
    params: Params  # initial parameters, the same for all clients with this model
    num_clients: int
    sizes: Tensor  # [num_clients], training samples per client
    rounds: int
    seed: int

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of the run, for `setup.like.new_zeros(...)` and similar calls."""
        return next(iter(self.params.values()))

    def uniform(self, shape: tuple[int, ...], *salts: int) -> Tensor:
        """Return random numbers in (0, 1) that depend on the seed and the salts, to initialize extra parameters."""
        return random.uniform(random.make_key(self.seed, *salts), shape, self.like.dtype, self.like.device)

    def split(self, part: str | Sequence[str]) -> tuple[Params, Params]:
        """Split the initial parameters into (rest, part), as `Model.split` does; neither may be empty."""
        rest, chosen = self.model.split(self.params, part)
        if not rest or not chosen:
            raise ConfigError(f"This method needs a model with parameters both inside and outside of {part!r}.")
        return rest, chosen


@dataclass(frozen=True)
class Exchange:
    """A round as the server sees it; `sent` and `received` are stacked in the order of `clients`."""

    round: int
    clients: Sequence[int]
    num_clients: int
    sizes: Tensor  # [len(clients)], training samples per client
    model: Model
    sent: Tree
    received: Tree
    total_size: Tensor  # training samples of all clients
    robust: Robust = field(default_factory=Robust)  # the rule by which `mean` averages

    def mean(self, stacked: Tree, weights: Tensor | None = None) -> Tree:
        """Return the mean over the clients of the round, or what the run's setting `robust` puts in its place, in which
        all clients count the same."""
        return self.robust.mean(stacked) if self.robust.replaces_mean else mean(stacked, weights)

    def for_method(self, method: "Method") -> "Exchange":
        """Return the round as the server of a method sees it: one that uses only the mean of the uploads
        (`mean_weights`) gets the robust mean in all rows, if the setting `robust` replaces means."""
        if not self.robust.replaces_mean or method.mean_weights is None:
            return self
        return replace(self, received=self.robust.mean_upload(self.received, self.sent), robust=Robust())


_PERSONAL_HOOKS = ("init_client", "send", "serve", "personalize", "trained", "logits")  # what can make models differ


@dataclass(frozen=True)
class Method:
    """Base class of federated learning methods: subclass it, add hyperparameters as fields, and override hooks.

    In each round, `send` makes one message per selected client, `train` turns a client's state and message into a new
    state and an upload, and `receive` updates the server state from the uploads. For evaluation, `personalize` and
    `trained` return a client's personal model, and `logits` computes its outputs. Only `train` has no default.

    >>> import fedtailor as ft
    >>> @dataclass(frozen=True)
    ... class Average(ft.LocalTraining):
    ...     def train(self, ctx, state, message):
    ...         return state, {"params": ctx.optimize(ctx.loss, message["params"], **self.optimizer_options)}
    ...     def receive(self, server, exchange):
    ...         return ft.trees.mean(exchange.received, exchange.sizes)
    >>> fed = ft.load("digits", clients=4)
    >>> run = ft.simulate(Average(lr=0.05), ft.network("logistic", fed), fed, rounds=2)

    Rules:

    - Hooks are pure functions: they return new trees and do not modify their arguments or keep state elsewhere.
    - Hooks that run on a client must work under `torch.func.vmap`: no `.item()`, no `if` on tensors, no in-place
      operations, and no random generators (use `ctx.uniform` and `batch.uniform`).
    - Messages and uploads contain model parameters under the name "params". An upload uses a name of the message only
      for the same quantity after training.
    - The names in a client state or server state are the same in all rounds, and so are the shapes unless clients join
      (`grow_server`, `grow_client`). The names in a message may change between rounds, but not within a round. The
      names and shapes in an upload depend only on those in the message, on the number of clients, and on whether it is
      round 1.
    """

    title: ClassVar[str] = ""  # proper name, such as "Self-FL"; empty: the name of the class
    personal: ClassVar[bool] = True  # False: all clients end with the same model, as without hooks that personalize
    _declares_personal: ClassVar[bool] = False  # whether the class or a base class sets `personal`
    sends_global_model: ClassVar[bool] = False  # True: "params" of all messages are one model that works by itself
    ranked_by: ClassVar[str | None] = None  # moment that ranks the method; None: see `ranking_moment`
    mixed_architectures: ClassVar[bool] = False  # True: clients may have different networks (`ft.client_models`)
    download: ClassVar[str] = "model"  # what a client receives per round, as text for tables
    upload: ClassVar[str] = "model"  # what a client sends per round, as text for tables
    client_state: ClassVar[str] = "nothing"  # what a client keeps between rounds, as text for tables
    newcomer_start: ClassVar[str] = "the global model"  # what a client that joins late starts with, as text for tables
    fixed_settings: ClassVar[Mapping[str, str]] = {}  # setting of `LocalTraining` -> why this method does not allow it

    if not TYPE_CHECKING:  # the generated __init__ is the signature

        def __new__(cls, *_: Any, **settings: Any) -> Self:
            """Reject settings that the method does not have because of its equations."""
            cls.check_settings(settings)
            return super().__new__(cls)

    def __init_subclass__(cls, **options: Any) -> None:
        """Give the class the short `repr`, and set `personal` to False for a method that does not declare it and makes
        no model of a client's own. `mean_weights` and `robust_kinds` of a built-in base class do not hold for a user's
        own `receive`."""
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):
            cls.__repr__ = Method.__repr__  # type: ignore[method-assign]  # dataclass would write all fields
        cls._declares_personal = cls._declares_personal or "personal" in vars(cls)
        if not cls._declares_personal:
            own = any(getattr(cls, hook) is not getattr(Method, hook) for hook in _PERSONAL_HOOKS)
            cls.personal = own or cls.train is Method.train
        if (
            {"receive", "server_metrics"} & vars(cls).keys()
            and "mean_weights" not in vars(cls)
            and not is_built_in(cls)
        ):
            cls.mean_weights = None  # type: ignore[assignment, method-assign]
        if "receive" in vars(cls) and "robust_kinds" not in vars(cls) and not is_built_in(cls):
            cls.robust_kinds = Method.robust_kinds  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        """Check the fields; those that `LocalTraining` also has satisfy its constraints in any method."""
        check_fields(self, f"{type(self).__name__}: ", base=TrainingSettings)

    @classmethod
    def check_settings(cls, names: Iterable[str]) -> None:
        """Raise `ConfigError` if one of the names is a setting that the method does not have, and say why."""
        own = {f.name for f in fields(cls)}
        for name in names:
            if name in cls.fixed_settings and name not in own:
                raise ConfigError(f"{cls.class_title()}: {cls.fixed_settings[name]}; remove {name}.")

    def _repr_html_(self) -> str:
        from fedtailor.reporting.notebook.method import method_html

        return method_html(self)

    def __repr__(self) -> str:
        """Return the method with the fields that differ from their defaults.

        >>> from fedtailor.methods import FedProx
        >>> FedProx(lr=0.5)
        FedProx(lr=0.5)
        """
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(self)}
        changed = {name: value for name, value in vars(self).items() if name in defaults and value != defaults[name]}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def require(self, condition: bool, name: str, requirement: str) -> None:
        """Raise `ConfigError` ("lr must be above 0, got -1.") for the field `name` unless the condition is true."""
        if not condition:
            raise ConfigError(f"{type(self).__name__}: {name} must be {requirement}, got {getattr(self, name)!r}.")

    @classmethod
    def class_title(cls) -> str:
        """Return the title, or the name of the class if it has none; a subclass does not inherit the title."""
        return vars(cls).get("title") or cls.__name__

    @classmethod
    def citation(cls) -> str:
        """Return the first paragraph of the docstring: the paper or, for a method without one, a description."""
        text = cls.__doc__ or ""
        is_generated = text.startswith(f"{cls.__name__}(")  # by @dataclass, for a class without a docstring
        return "" if is_generated else " ".join(text.partition("\n\n")[0].split()).removesuffix(".")

    @property
    def display_name(self) -> str:
        """Name for tables and text; a method that wraps another one names both, such as LAG (SCAFFOLD)."""
        inner = getattr(self, "inner", None)
        own = self.class_title()
        return f"{own} ({inner.display_name})" if isinstance(inner, Method) else own

    @property
    def ranking_moment(self) -> str:
        """The moment at which tables compare this method with others: "received" or "trained".

        By default, this is "trained" for personal methods and "received" for methods with one common model, because the
        common model exists only after aggregation.
        """
        return self.ranked_by or ("trained" if self.personal else "received")

    @property
    def has_global_model(self) -> bool:
        """Whether all clients receive one global model, which the setting `evaluate_global` evaluates: the "params" of
        a message. Methods without personal models have one; personal methods declare it with `sends_global_model`.

        >>> from fedtailor.methods import Ditto, FedAvg, FedPer
        >>> FedAvg().has_global_model, Ditto().has_global_model, FedPer().has_global_model
        (True, True, False)
        """
        return self.sends_global_model or not self.personal

    def check_global_model(self) -> None:
        """Raise `ConfigError` unless the method has a global model."""
        if not self.has_global_model:
            kept, sent = type(self).client_state, type(self).download
            why = f"a client receives: {sent}; it keeps: {kept}"
            raise ConfigError(f"{self.display_name} has no global model ({why}); remove evaluate_global.")

    @property
    def trains_every_round(self) -> bool:
        """Whether all clients train in every round, whichever clients the server selects; true for local training."""
        return False

    @property
    def pools_data(self) -> bool:
        """Whether one model trains on the training data of all clients together; true for centralized training."""
        return False

    @property
    def sequential_clients(self) -> bool:
        """Whether the clients of a round train one after another, each with the server state that the last one left."""
        return False

    @property
    def mean_weights(self) -> Literal["size", "uniform"] | None:
        """The weights of the clients in a mean of the uploads, if `receive` and `server_metrics` use nothing of the
        uploads but this mean; otherwise None.

        If it is declared, uploads may be averaged before they reach the server, and all rows of `exchange.received` are
        that mean. A subclass that overrides `receive` or `server_metrics` declares it again.
        """
        return None

    @property
    def uses_plain_mean(self) -> bool:
        """Whether `receive` uses only the unweighted mean of the uploads, which `Channel(trusted=True)` requires."""
        return self.mean_weights == "uniform"

    @property
    def robust_kinds(self) -> tuple[str, ...]:
        """The kinds of robust aggregation (`ft.Robust`) that protect this server.

        A norm bound changes the uploads before `receive` sees them, so it fits every server. The other kinds replace
        means: they fit if `mean_weights` are declared, or if `receive` takes all its means over clients with
        `exchange.mean`; such a method returns `KINDS` of `core/robust.py` here.

        >>> from fedtailor.methods import FedAMP, FedAvg
        >>> "median" in FedAvg().robust_kinds, FedAMP().robust_kinds
        (True, ('norm_bound',))
        """
        return KINDS if self.mean_weights is not None else ("norm_bound",)

    def check_robust(self, robust: Robust) -> None:
        """Raise `ConfigError` if a rule of robust aggregation cannot protect this server."""
        if not robust.is_on or self.pools_data:
            return
        name = self.display_name
        if self.sequential_clients:
            raise ConfigError(f"{name} processes clients one at a time, so robust.kind has none to compare; remove it.")
        if robust.kind not in self.robust_kinds:
            kinds = " or ".join(map(repr, self.robust_kinds))
            own = "" if is_built_in(type(self)) else ", or declare robust_kinds if it averages with exchange.mean"
            raise ConfigError(
                f"{name} uses more of the uploads than their mean, so robust.kind '{robust.kind}' does not protect it; "
                f"use {kinds}{own}."
            )

    # Server hooks. They run as ordinary Python, with trees stacked over the clients of the round.

    def init_server(self, setup: Setup) -> Tree:
        """Return the server state before round 1; by default the initial parameters.

        `trees.repeat(setup.params, setup.num_clients)` stores one model per client.
        """
        return {"params": setup.params}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        """Return the messages to these clients, stacked; by default all clients receive the whole server state.

        Row i of every tensor is sent to `clients[i]`. For one message per client, see `trees.take` and `trees.combine`.

        >>> import torch
        >>> Method().send({"params": {"w": torch.zeros(3)}}, clients=[5, 8], round=1)["params"]["w"].shape
        torch.Size([2, 3])
        """
        return repeat(server, len(clients))

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        """Return the server state after a round, given its messages and uploads; by default it is unchanged.

        `exchange.received` contains the uploads, stacked: row i is from client `exchange.clients[i]`, which has
        `exchange.sizes[i]` training samples. `trees.mean(exchange.received, exchange.sizes)` is FedAvg.
        """
        return server

    def serve(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        """Return the messages for evaluation and use of the models instead of training; by default those of `send`."""
        return self.send(server, clients, round)

    # Client hooks. They see one client and trees that are not stacked.

    def init_client(self, setup: Setup) -> Tree:
        """Return a client's state before its first round; by default it is empty.

        It is the same for all clients. `{"own": setup.params}` starts a personal model from the initial parameters.
        """
        return {}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        """Train for one round and return (new client state, upload).

        The state stays on the client until its next round, and the upload goes to the server. Both are new trees: a
        tensor of `state` or `message` may be returned, but not changed.

        >>> import fedtailor as ft
        >>> ctx, params = ft.example_client()
        >>> state, upload = ft.methods.Ditto().train(ctx, {"own": params}, {"params": params})
        >>> list(state), list(upload)
        (['own'], ['params'])
        """
        raise NotImplementedError

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        """Return the personal model at the moment `received`: after the message arrives and before training.

        The default is the "params" of the message. Override it if the personal model is something else: a model in the
        client's state (`{**state["own"]}`), a received body with an own head (`message["params"] | state["head"]`), or
        the received model after fine-tuning (`ctx.optimize(...)`). `trained` calls it too, so one method gives both.

        >>> Method().personalize(None, {}, {"params": {"w": 1.0}})
        {'w': 1.0}
        """
        if "params" not in message:
            name = type(self).__name__
            raise ConfigError(f"{name} sends no 'params', so {name}.personalize must return the client's model.")
        params: Tree = message["params"]
        return params

    def trained(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        """Return the personal model at the moment `trained`: after training, with the new state and the upload.

        By default, this is `personalize(ctx, state, message | upload)`: an entry of the upload replaces the entry of
        the message with the same name, so `personalize` sees the values after training. Override it only if the model
        after training cannot be computed like this, for example if the upload is a difference of models. It is called
        in every round. A client that has not trained yet has the model that it would receive.

        >>> message, upload = {"params": {"w": 1.0}, "control": {"w": 5.0}}, {"params": {"w": 2.0}}
        >>> message | upload
        {'params': {'w': 2.0}, 'control': {'w': 5.0}}
        >>> Method().trained(None, {}, message, upload)
        {'w': 2.0}
        """
        return self.personalize(ctx, state, message | upload)

    def logits(self, model: Model, personal: Tree, x: Inputs) -> Tensor:
        """Return the outputs of a personal model.

        Override it if the personal model is more than the network's parameters, such as a network with two heads:
        `personal` is the tree that `personalize` or `trained` returned, and `model.features` and `model.head_output`
        compute the two parts of the network. Override `init_personal` as well.
        """
        return model.logits(personal, x)

    def init_personal(self, setup: Setup) -> Tree:
        """Return a tree with the names and shapes of a personal model; by default the initial parameters.

        A wrapper that stores a personal model in a client's state needs it before the first round.
        """
        return setup.params

    # Hooks for clients that join late. `setup` then describes all clients, including the newcomers.

    def grow_server(self, server: Tree, setup: Setup, before: int) -> Tree:
        """Return the server state extended to the clients from number `before` on, in the shapes of `init_server`.

        The messages to the other clients must not change, except where the method's equations contain the number of
        clients.
        """
        return grow(server, self.init_server(setup))

    def grow_client(self, state: Tree, setup: Setup) -> Tree:
        """Return the state of an existing client, extended to the new number of clients."""
        return grow(state, self.init_client(setup))

    def init_newcomer(self, setup: Setup, message: Tree) -> Tree:
        """Return a newcomer's state before its first round, given the first message that it receives.

        By default, this is `init_client` with the received "params" in place of the initial parameters.
        """
        received = message.get("params", {})
        known = {name: leaf for name, leaf in received.items() if name in setup.params and isinstance(leaf, Tensor)}
        return self.init_client(replace(setup, params=setup.params | known))

    # Hooks for method metrics. Their results go into the record and are never sent.

    def server_metrics(self, before: Tree, after: Tree, exchange: Exchange) -> Tree:
        """Return metrics of the server after each round; this should be cheap.

        The result contains tensors by name and, under "per_client", tensors with one value per client of the round.
        """
        return {}

    def client_metrics(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        """Return scalar metrics of a client after it trained, with its new state, without a pass over its data."""
        return {}

    @property
    def has_evaluation_metrics(self) -> bool:
        """Whether `evaluation_metrics` is called; by default, whether the method overrides it."""
        return type(self).evaluation_metrics is not Method.evaluation_metrics

    def evaluation_metrics(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        """Return scalar metrics of a client when it is evaluated; this may pass over its data.

        `message` is the one that the client would receive in the next round. The sums over all evaluated clients go to
        `reduce_metrics`; tensors that are not scalar are used only there.
        """
        return {}

    def reduce_metrics(self, totals: Tree) -> Tree:
        """Return metrics over all evaluated clients, given the sums of what `evaluation_metrics` returned."""
        return {}
