"""Layer-wise personalization by gradient conflict: a wrapper for methods that train one global model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.core.client_context import ClientContext
from fedtailor.core.fields import NonNegativeInt
from fedtailor.core.method import Exchange, Method, Setup
from fedtailor.core.model import Inputs, Model
from fedtailor.core.trees import Params, Rows, Tree, put, repeat, squared_norms, sub
from fedtailor.errors import ConfigError

Choice = Literal["conflict", "first", "middle", "last"]


def conflicts(changes: Params, threshold: float) -> tuple[Tensor, Tensor]:
    """Return how many pairs of clients conflict in a layer, and the mean cosine of all pairs.

    `changes` holds the layer's tensors, stacked over clients. Two clients conflict if the cosine of their changes is
    below the threshold. A client without changes conflicts with no other client.

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
class Layerwise(Method):
    """Base of LAG and FedLAG: in each round, the layers with the most gradient conflicts become personal."""

    personal_layers: Annotated[
        NonNegativeInt | None, "k, maximum number of personal layers (5 in the paper); none: 2, or all but one"
    ] = None
    threshold: Annotated[float, "ξ, two clients conflict in a layer if the cosine of their changes is below ξ"] = -0.1
    warmup: Annotated[NonNegativeInt, "round whose changes give the first choice (30 in the paper, from scratch)"] = 1
    layers: Annotated[Choice, "the personal layers: by conflict, or always the first, middle, or last k"] = "conflict"
    missing: Annotated[
        Literal["common", "own"],
        "a personal layer that a client has not trained since it became personal: its last common version, or the "
        "client's own, however old (as in the paper)",
    ] = "common"
    download: ClassVar[str] = "layers without conflict"
    client_state: ClassVar[str] = "personal model"
    newcomer_start: ClassVar[str] = "the layers without conflict, and the last common version of the others"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(-1 <= self.threshold <= 1, "threshold", "a cosine between -1 and 1")

    @property
    def wrapped(self) -> Method:
        """The inner method."""
        raise NotImplementedError

    @property
    def robust_kinds(self) -> tuple[str, ...]:
        return self.wrapped.robust_kinds

    def init_server(self, setup: Setup) -> Tree:
        inner = self.wrapped.init_server(setup)
        _check_inner(self.wrapped, inner, setup)
        layers = setup.model.layers()
        if self.personal_layers is not None and self.personal_layers >= len(layers):
            raise ConfigError(
                f"personal_layers must be below {len(layers)}, the number of layers, got {self.personal_layers}."
            )
        device = setup.like.device
        models = {name: setup.params[name] for names in layers.values() for name in names}
        return {
            "inner": inner,
            "models": repeat(models, setup.num_clients),  # as last uploaded, where each client starts next
            "common": models,  # the last common version of each layer
            "owns": torch.zeros(setup.num_clients, len(layers), dtype=torch.bool, device=device),  # see `_missing`
            "personal": torch.zeros(len(layers), dtype=torch.bool, device=device),  # in the next round
            "conflicts": torch.zeros(len(layers), dtype=torch.int64, device=device),
        }

    def init_client(self, setup: Setup) -> Tree:
        return {"inner": self.wrapped.init_client(setup), "params": setup.params}

    def grow_server(self, server: Tree, setup: Setup, before: int) -> Tree:
        return super().grow_server(
            server | {"inner": self.wrapped.grow_server(server["inner"], setup, before)}, setup, before
        )

    def grow_client(self, state: Tree, setup: Setup) -> Tree:
        return super().grow_client(state | {"inner": self.wrapped.grow_client(state["inner"], setup)}, setup)

    def init_newcomer(self, setup: Setup, message: Tree) -> Tree:
        # with `missing` = "own", personal layers start at the initial model, like the server's copy of them
        return {"inner": self.wrapped.init_newcomer(setup, message), "params": setup.params}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return self._message(server, self.wrapped.send(server["inner"], clients, round), clients)

    def serve(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return self._message(server, self.wrapped.serve(server["inner"], clients, round), clients)

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        inner, upload = self.wrapped.train(ctx, state["inner"], _complete_message(state, message))
        if upload.get("params", {}).keys() != state["params"].keys():
            name = self.wrapped.display_name
            raise ConfigError(f"LAG requires a method whose clients send their whole model, 'params'; {name} does not.")
        return {"inner": inner, "params": upload["params"]}, upload

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        inner_exchange, inner = self._inner_exchange(server, exchange)
        uploaded = exchange.received["params"]
        clients = torch.tensor(exchange.clients, device=server["personal"].device)
        personal, counts = self._choose(server, inner_exchange)
        received = self.wrapped.receive(inner, inner_exchange.for_method(self.wrapped))
        now_personal = set(_tensor_names(server["models"], personal))
        return {
            "inner": received,
            "models": put(server["models"], clients, {name: uploaded[name] for name in server["models"]}),
            "common": {n: old if n in now_personal else received["params"][n] for n, old in server["common"].items()},
            "owns": (server["owns"] & personal).index_copy(0, clients, personal.repeat(len(clients), 1)),
            "personal": personal,
            "conflicts": counts,
        }

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return self.wrapped.personalize(ctx, state["inner"], _complete_message(state, message))

    def trained(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        return self.wrapped.trained(ctx, state["inner"], _complete_message(state, message), upload)

    def init_personal(self, setup: Setup) -> Tree:
        return self.wrapped.init_personal(setup)

    def logits(self, model: Model, personal: Tree, x: Inputs) -> Tensor:
        return self.wrapped.logits(model, personal, x)

    def server_metrics(self, before: Tree, after: Tree, exchange: Exchange) -> Tree:
        """Return the conflicts per layer, the chosen layers, and the gain term of Lemma 5.1 per client."""
        inner_exchange, inner = self._inner_exchange(before, exchange)
        metrics = self.wrapped.server_metrics(inner, after["inner"], inner_exchange)
        chosen = _tensor_names(after["models"], after["personal"])
        changes = _changes(inner_exchange, chosen)
        deviations = {name: change - change.mean(0) for name, change in changes.items()}
        products = [(changes[name] * deviations[name]).flatten(1).sum(1) for name in chosen]
        zeros = next(iter(before["models"].values())).new_zeros(1, len(exchange.clients))
        gain = -torch.cat([zeros, *(product[None] for product in products)]).sum(0) / getattr(self.wrapped, "lr", 1.0)
        own_metrics = {"personal": after["personal"].to(torch.int64)}
        if len(exchange.clients) > 1:  # one client has no pairs
            own_metrics["conflicts"] = after["conflicts"]
        return metrics | own_metrics | {"per_client": metrics.get("per_client", {}) | {"gain_term": gain}}

    def client_metrics(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        return self.wrapped.client_metrics(ctx, state["inner"], _complete_message(state, message), upload)

    @property
    def has_evaluation_metrics(self) -> bool:
        return self.wrapped.has_evaluation_metrics

    def evaluation_metrics(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return self.wrapped.evaluation_metrics(ctx, state["inner"], _complete_message(state, message))

    def reduce_metrics(self, totals: Tree) -> Tree:
        return self.wrapped.reduce_metrics(totals)

    def _message(self, server: Tree, message: Tree, clients: Sequence[int]) -> Tree:
        """Remove the layers that are currently personal, and add the common version for clients that miss theirs."""
        personal = set(_tensor_names(server["models"], server["personal"]))
        message = {
            key: {n: leaf for n, leaf in node.items() if n not in personal} if isinstance(node, dict) else node
            for key, node in message.items()
        }
        missing = self._missing(server)
        common = {
            name: Rows(torch.stack([server["common"][name][None]] * len(clients)), missing[clients, layer, None])
            for layer, names in enumerate(_layers(server["models"]))
            for name in names
            if bool(missing[:, layer].any())  # of any client, so that all messages of a round have the same structure
        }
        return message | ({"common": common} if common else {})

    def _missing(self, server: Tree) -> Tensor:
        """Return which clients have no version of which personal layer, [clients, layers]: they have not trained since
        it became personal."""
        missing = server["personal"] & ~server["owns"]
        return missing if self.missing == "common" else torch.zeros_like(missing)

    def _starts(self, server: Tree, clients: Sequence[int], names: Sequence[str]) -> Params:
        """Return the personal layers with which clients start a round, stacked."""
        index = torch.tensor(clients, device=server["owns"].device)
        missing = self._missing(server)[index]
        layer_of = {name: layer for layer, own in enumerate(_layers(server["models"])) for name in own}

        def start(name: str) -> Tensor:
            own = server["models"][name][index]
            return torch.where(_like(missing[:, layer_of[name]], own), server["common"][name], own)

        return {name: start(name) for name in names}

    def _inner_exchange(self, server: Tree, exchange: Exchange) -> tuple[Exchange, Tree]:
        """Return the round as the inner method sees it, and its server state.

        For a layer that was personal, each client was sent its own copy, and the server's copy is their mean, so that
        methods that work with changes stay correct.
        """
        clients, inner = exchange.clients, server["inner"]
        personal = _tensor_names(server["models"], server["personal"])
        sent = self.wrapped.send(inner, clients, exchange.round)
        sent = {k: node | exchange.sent[k] if isinstance(node, dict) else exchange.sent[k] for k, node in sent.items()}
        if personal:
            starts = self._starts(server, clients, personal)
            sent["params"] = sent["params"] | starts
            inner = inner | {"params": inner["params"] | exchange.mean(starts)}
        # a norm bound is relative to what clients started from, including their own layers
        return replace(exchange, sent=sent, received=exchange.robust.bounded(exchange.received, sent)), inner

    def _choose(self, server: Tree, exchange: Exchange) -> tuple[Tensor, Tensor]:
        """Return which layers are personal in the next round, and the conflicts per layer in this round."""
        layers, personal, counts = _layers(server["models"]), server["personal"], server["conflicts"]
        chosen = None if self.layers == "conflict" else self._fixed_layers(len(layers))
        if len(exchange.clients) > 1:  # one client has no pairs
            scores = [conflicts(_changes(exchange, names), self.threshold) for names in layers]
            counts = torch.stack([count for count, _ in scores])
            ranked = [(-int(count), float(cosine), -place) for place, (count, cosine) in enumerate(scores)]
            conflicting = [-place for count, _, place in sorted(ranked)[: self._max_personal(len(layers))] if count]
            chosen = conflicting if chosen is None else chosen
        if chosen is None or exchange.round < self.warmup:
            return personal, counts
        return torch.zeros_like(personal).index_fill(0, torch.tensor(chosen).to(counts), True), counts

    def _max_personal(self, layers: int) -> int:
        """Return the maximum number of personal layers."""
        return min(2, layers - 1) if self.personal_layers is None else self.personal_layers

    def _fixed_layers(self, layers: int) -> list[int]:
        """Return the first, middle, or last layers."""
        count = self._max_personal(layers)
        first = {"first": 0, "middle": (layers - count) // 2, "last": layers - count}[self.layers]
        return list(range(first, first + count))


def _check_inner(inner: Method, server: Tree, setup: Setup) -> None:
    """Check that LAG can wrap the inner method."""
    name, shapes = inner.display_name, {n: p.shape for n, p in setup.params.items()}
    message, state = inner.send(server, [0], 1), inner.init_client(setup)
    for tree, drop in ((server.get("params"), 0), (message.get("params"), 1)):
        if not isinstance(tree, dict) or {n: p.shape[drop:] for n, p in tree.items()} != shapes:
            raise ConfigError(f"LAG requires a method that stores and sends a whole model, 'params'; {name} does not.")
    if inner.sequential_clients:
        raise ConfigError(f"LAG compares the clients of a round, but {name} processes them one at a time.")
    for key, node in message.items():
        if isinstance(node, dict) and key != "params" and node.keys() - state.get(key, {}).keys():
            raise ConfigError(f"LAG cannot make layers of '{key}' personal: clients of {name} do not store '{key}'.")


def _layers(models: Tree) -> list[list[str]]:
    """Return the tensor names of each layer, in order."""
    layers: dict[str, list[str]] = {}
    for name in models:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return list(layers.values())


def _tensor_names(models: Tree, chosen: Tensor) -> list[str]:
    """Return the tensor names of the chosen layers."""
    return [
        name for names, is_chosen in zip(_layers(models), chosen.tolist(), strict=True) if is_chosen for name in names
    ]


def _changes(exchange: Exchange, names: Sequence[str]) -> Params:
    """Return how training changed the given tensors."""
    uploaded, sent = exchange.received["params"], exchange.sent["params"]
    return sub({name: uploaded[name] for name in names}, {name: sent[name] for name in names})


def _complete_message(state: Tree, message: Tree) -> Tree:
    """Fill in what was not sent from the client's own state, or from the common version where that is missing."""
    common = {
        name: torch.where(_like(rows.present[0], rows.values[0]), rows.values[0], state["params"][name])
        for name, rows in message.get("common", {}).items()
    }
    own = state["inner"] | {"params": state["params"] | common}
    return {
        key: own.get(key, {}) | node if isinstance(node, dict) else node
        for key, node in message.items()
        if key != "common"
    }


def _like(mask: Tensor, tensor: Tensor) -> Tensor:
    """Return a mask over the leading axes with the number of axes of a tensor."""
    return mask.reshape(mask.shape + (1,) * (tensor.ndim - mask.ndim))
