"""Layer-wise personalisation by gradient conflict: a method around any method that trains one model for all."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.errors import Refused
from fedtailor.local import LocalView
from fedtailor.method import Exchange, Method, Setup, SGDMethod
from fedtailor.methods.one_model import FedAvg
from fedtailor.model import Inputs, Model
from fedtailor.trees import Params, Tree, mean, put, repeat, squared_norms, sub, take

Choice = Literal["conflict", "first", "middle", "last"]


def conflicts(changes: Params, threshold: float) -> tuple[Tensor, Tensor]:
    """How many pairs of clients changed a layer in directions with a cosine below the threshold, and the mean cosine of
    all pairs; `changes` are the layer's tensors, stacked. Who changed nothing conflicts with nobody.

    >>> conflicts({"w": torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])}, threshold=-0.1)
    (tensor(1), tensor(-0.3333))
    """
    norms = squared_norms(changes).sqrt()
    moved = norms > 0
    rows = torch.cat([change.flatten(1) for change in changes.values()], 1) / torch.where(moved, norms, 1)[:, None]
    cosines = (rows @ rows.T).clamp(-1, 1)
    pairs = torch.ones_like(cosines, dtype=torch.bool).triu(1)
    count = (pairs & moved & moved[:, None] & (cosines < threshold)).sum()
    return count, cosines[pairs].mean()


@dataclass(frozen=True, kw_only=True)
class _Layerwise(Method):
    """What LAG and FedLAG have in common: every round, the layers with most conflict become personal."""

    personal_layers: int | None = None  # k, most layers that may be personal (5 in the paper); none: 2, or all but one
    threshold: float = -0.1  # ξ, a cosine of two clients' changes below it is a conflict
    warmup: int = 1  # the round whose changes give the first choice (30 in the paper, from scratch)
    layers: Choice = "conflict"  # the choice: by conflict, or always the first, middle or last k
    down: ClassVar[str] = "layers without conflict"
    keeps: ClassVar[str] = "own model"
    newcomer: ClassVar[str] = "the layers without conflict; the others are the start's"

    def __post_init__(self) -> None:
        super().__post_init__()
        count = self.personal_layers
        whole = isinstance(count, Integral) and not isinstance(count, bool) and count >= 0
        self.require(count is None or whole, "personal_layers", "a whole number from 0 on, or none")
        self.require(-1 <= self.threshold <= 1, "threshold", "a cosine, from -1 to 1")
        self.require(self.warmup >= 0, "warmup", "at least 0")
        self.require_choice("layers", "conflict", "first", "middle", "last")

    @property
    def wrapped(self) -> Method:
        """The method inside."""
        raise NotImplementedError

    def init_server(self, setup: Setup) -> Tree:
        inner = self.wrapped.init_server(setup)
        _check_fit(self.wrapped, inner, setup)
        layers = setup.model.layers()
        if self.personal_layers is not None and self.personal_layers >= len(layers):
            raise Refused(
                f"personal_layers is {self.personal_layers}, and must be below this model's {len(layers)} layers."
            )
        device = setup.like.device
        models = {name: setup.params[name] for names in layers.values() for name in names}
        return {
            "inner": inner,
            "models": repeat(models, setup.num_clients),  # as every client last uploaded it: where it will start
            "personal": torch.zeros(len(layers), dtype=torch.bool, device=device),  # in the next round
            "conflicts": torch.zeros(len(layers), dtype=torch.int64, device=device),
        }

    def init_client(self, setup: Setup) -> Tree:
        return {"inner": self.wrapped.init_client(setup), "params": setup.params}

    def welcome(self, server: Tree, setup: Setup, before: int) -> Tree:
        return super().welcome(server | {"inner": self.wrapped.welcome(server["inner"], setup, before)}, setup, before)

    def widen(self, state: Tree, setup: Setup) -> Tree:
        return super().widen(state | {"inner": self.wrapped.widen(state["inner"], setup)}, setup)

    def join(self, setup: Setup, message: Tree) -> Tree:
        # its personal layers do not cross, so they begin where the server's copy of a newcomer's model is: at the start
        return {"inner": self.wrapped.join(setup, message), "params": setup.params}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return self._global_part(server, self.wrapped.send(server["inner"], clients, round))

    def serve(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return self._global_part(server, self.wrapped.serve(server["inner"], clients, round))

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        inner, upload = self.wrapped.train(local, state["inner"], _complete(state, message))
        if upload.get("params", {}).keys() != state["params"].keys():
            name = type(self.wrapped).__name__
            raise Refused(f"LAG needs a method whose clients send their whole model, 'params'; {name}'s do not.")
        return {"inner": inner, "params": upload["params"]}, upload

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        inside, inner = self._inside(server, exchange)
        uploaded = exchange.received["params"]
        clients = torch.tensor(exchange.clients, device=server["personal"].device)
        personal, counts = self._choose(server, inside)
        return {
            "inner": self.wrapped.receive(inner, inside),
            "models": put(server["models"], clients, {name: uploaded[name] for name in server["models"]}),
            "personal": personal,
            "conflicts": counts,
        }

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        return self.wrapped.personalize(local, state["inner"], _complete(state, message))

    def trained(self, local: LocalView, state: Tree, message: Tree, upload: Tree) -> Tree:
        return self.wrapped.trained(local, state["inner"], _complete(state, message), upload)

    def logits(self, model: Model, personal: Tree, x: Inputs) -> Tensor:
        return self.wrapped.logits(model, personal, x)

    def monitor(self, before: Tree, after: Tree, exchange: Exchange) -> Tree:
        """Conflicts of every layer, the layers chosen, and the gain term of Lemma 5.1 of every client of the round."""
        inside, inner = self._inside(before, exchange)
        found = self.wrapped.monitor(inner, after["inner"], inside)
        chosen = _names(after["models"], after["personal"])
        changes = _changes(inside, chosen)
        away = {name: change - change.mean(0) for name, change in changes.items()}
        products = [(changes[name] * away[name]).flatten(1).sum(1) for name in chosen]
        nothing = next(iter(before["models"].values())).new_zeros(1, len(exchange.clients))
        gain = -torch.cat([nothing, *(product[None] for product in products)]).sum(0) / getattr(self.wrapped, "lr", 1.0)
        own = {"personal": after["personal"].to(torch.int64)}
        if len(exchange.clients) > 1:  # one client has no pairs
            own["conflicts"] = after["conflicts"]
        return found | own | {"per_client": found.get("per_client", {}) | {"gain_term": gain}}

    def note(self, local: LocalView, state: Tree, message: Tree, upload: Tree) -> Tree:
        return self.wrapped.note(local, state["inner"], _complete(state, message), upload)

    @property
    def measures(self) -> bool:
        return self.wrapped.measures

    def measure(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        return self.wrapped.measure(local, state["inner"], _complete(state, message))

    def overall(self, totals: Tree) -> Tree:
        return self.wrapped.overall(totals)

    def _global_part(self, server: Tree, message: Tree) -> Tree:
        """A message without the layers that are personal now."""
        personal = set(_names(server["models"], server["personal"]))
        return {
            key: {n: leaf for n, leaf in node.items() if n not in personal} if isinstance(node, dict) else node
            for key, node in message.items()
        }

    def _inside(self, server: Tree, exchange: Exchange) -> tuple[Exchange, Tree]:
        """The round as the inner method sees it, and its server: of a layer that was personal, every client was sent
        its own, and the server's copy is their mean, so that a method that works with changes stays right."""
        clients, inner = exchange.clients, server["inner"]
        personal = _names(server["models"], server["personal"])
        sent = self.wrapped.send(inner, clients, exchange.round)
        sent = {k: node | exchange.sent[k] if isinstance(node, dict) else exchange.sent[k] for k, node in sent.items()}
        if personal:
            starts = take({name: server["models"][name] for name in personal}, torch.tensor(clients))
            sent["params"] = sent["params"] | starts
            inner = inner | {"params": inner["params"] | mean(starts)}
        return replace(exchange, sent=sent), inner

    def _choose(self, server: Tree, exchange: Exchange) -> tuple[Tensor, Tensor]:
        """The layers that are personal in the next round, and the conflicts of this one."""
        layers, personal, counts = _layers(server["models"]), server["personal"], server["conflicts"]
        chosen = None if self.layers == "conflict" else self._fixed(len(layers))
        if len(exchange.clients) > 1:  # one client has no pairs
            scores = [conflicts(_changes(exchange, names), self.threshold) for names in layers]
            counts = torch.stack([count for count, _ in scores])
            ranked = [(-int(count), float(cosine), -place) for place, (count, cosine) in enumerate(scores)]
            most = [-place for count, _, place in sorted(ranked)[: self._most(len(layers))] if count]
            chosen = most if chosen is None else chosen
        if chosen is None or exchange.round < self.warmup:
            return personal, counts
        return torch.zeros_like(personal).index_fill(0, torch.tensor(chosen).to(counts), True), counts

    def _most(self, layers: int) -> int:
        return min(2, layers - 1) if self.personal_layers is None else self.personal_layers

    def _fixed(self, layers: int) -> list[int]:
        most = self._most(layers)
        first = {"first": 0, "middle": (layers - most) // 2, "last": layers - most}[self.layers]
        return list(range(first, first + most))


@dataclass(frozen=True)
class LAG(_Layerwise):
    """Anonymous, "Towards Layer-wise Personalized Federated Learning: Adaptive Layer Disentanglement via Conflicting
    Gradients", under review.

    FedLAG around any method that trains one model for all, as in LAG(Scaffold()). The question it asks of the inner
    method: which tree is the model? It must be "params", whole, on the server and in both messages. Any other tree of a
    message that speaks of layers must have its like in the client's state.
    """

    inner: Method = field(default_factory=FedAvg)  # the method whose layers become personal

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(isinstance(self.inner, Method), "inner", "a method such as FedProx()")

    @property
    def wrapped(self) -> Method:
        return self.inner


@dataclass(frozen=True)
class FedLAG(_Layerwise, SGDMethod):
    """Anonymous, "Towards Layer-wise Personalized Federated Learning: Adaptive Layer Disentanglement via Conflicting
    Gradients", under review.

    LAG around FedAvg.
    """

    weights: Literal["size", "uniform"] = "uniform"  # of clients in the average: all alike (the paper's), or by samples

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_choice("weights", "size", "uniform")

    @property
    def wrapped(self) -> Method:
        return FedAvg(weights=self.weights, **self.descent)


def _check_fit(inner: Method, server: Tree, setup: Setup) -> None:
    name, shapes = type(inner).__name__, {n: p.shape for n, p in setup.params.items()}
    message, state = inner.send(server, [0], 1), inner.init_client(setup)
    for tree, drop in ((server.get("params"), 0), (message.get("params"), 1)):
        if not isinstance(tree, dict) or {n: p.shape[drop:] for n, p in tree.items()} != shapes:
            raise Refused(f"LAG needs a method that keeps and sends one whole model, 'params'; {name} does not.")
    if inner.one_by_one:
        raise Refused(f"LAG compares the clients of a round, and {name} sees them one by one.")
    for key, node in message.items():
        if isinstance(node, dict) and key != "params" and node.keys() - state.get(key, {}).keys():
            raise Refused(
                f"LAG cannot make layers of '{key}' personal: clients of {name} keep no '{key}' of their own."
            )


def _layers(models: Tree) -> list[list[str]]:
    """The tensors of every layer, in order."""
    layers: dict[str, list[str]] = {}
    for name in models:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return list(layers.values())


def _names(models: Tree, chosen: Tensor) -> list[str]:
    """The tensors of the chosen layers."""
    return [name for names, yes in zip(_layers(models), chosen.tolist(), strict=True) if yes for name in names]


def _changes(exchange: Exchange, names: Sequence[str]) -> Params:
    """What training changed."""
    uploaded, sent = exchange.received["params"], exchange.sent["params"]
    return sub({name: uploaded[name] for name in names}, {name: sent[name] for name in names})


def _complete(state: Tree, message: Tree) -> Tree:
    """What was not sent is the client's own."""
    own = state["inner"] | {"params": state["params"]}
    return {key: own.get(key, {}) | node if isinstance(node, dict) else node for key, node in message.items()}
