"""Methods in which a hypernetwork at the server makes every client's model: as a mixture of the clients' models, or out
of a few numbers that stand for the client.

The hypernetwork learns from what it sent and what came back: J_i = ½‖sent − returned‖² falls along the vector-Jacobian
product of what makes the model with (sent − returned). Public code of pFedLA has the difference the other way round, as
the text of pFedHN's paper may be read; with a descent that climbs (`printed_sign`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vjp, vmap

from fedtailor.batch import Batch
from fedtailor.errors import Refused
from fedtailor.local import LocalView
from fedtailor.method import Exchange, Method, Setup, SGDMethod
from fedtailor.newcomers import newcomer_shares, seat
from fedtailor.trees import Params, Rows, Tree, dot, map_leaves, mean, put, repeat, scale, sub, take, zeros_like

_HYPERNETWORK = 5  # salt: apart from what clients draw from the seed
_EMBEDDING, _TRUNK, _OUTPUT = 0, 1, 2  # salts of its parts


@dataclass(frozen=True)
class PFedLA(SGDMethod):
    """Ma et al., "Layer-Wised Model Aggregation for Personalized Federated Learning", CVPR 2022.

    The server keeps every client's last model θ_j; a hypernetwork for each client i makes the weights α_i^l with which
    it mixes layer l of them. A layer is what one module owns: normalisation is one of its own, its running statistics
    mixed like its parameters. With `retained` it is HeurpFedLA: the layers with the largest own weight stay with the
    client and cross neither way, so the server's copy of them is as it last crossed.

    There is no official code. Weights are normalised by their sum, and are the own model's alone where all are 0, as in
    the known re-implementation; softmax, which the paper may use, is a switch. The step is larger than there, where the
    weights hardly leave their start in some tens of rounds: slopes are divided by the sum over all clients. A row of
    shares in which only one is left stays so, for its slope is 0.
    """

    lr: float = 0.1  # η, local learning rate (0.01 in the re-implementation)
    epochs: int = 2  # E, local epochs (10 in the re-implementation)
    hyper_lr: float = 1.0  # η_hn, step of the hypernetworks (0.005 in the re-implementation)
    retained: int = 0  # K, layers that stay with a client (HeurpFedLA)
    normalize: Literal["sum", "softmax"] = "sum"  # outputs become shares: what is above 0 by its sum, or softmax
    embedding: int = 100  # length of v_i, which stands for client i
    hidden: int = 100  # width of the hypernetworks
    printed_sign: bool = False  # returned − sent: climbs instead of descending
    down: ClassVar[str] = "own mixture, layer by layer"
    keeps: ClassVar[str] = "nothing, or retained layers"
    newcomer: ClassVar[str] = "equal shares of all models; retained layers are the start's"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.hyper_lr >= 0, "hyper_lr", "at least 0")
        self.require(self.retained >= 0, "retained", "at least 0")
        self.require_choice("normalize", "sum", "softmax")
        self.require(self.embedding >= 1, "embedding", "at least 1")
        self.require(self.hidden >= 1, "hidden", "at least 1")

    def init_server(self, setup: Setup) -> Tree:
        count, layers = setup.num_clients, sorted({_layer(name) for name in setup.params})
        if self.retained > len(layers):
            raise Refused(f"PFedLA: retained is {self.retained}, and this model has {len(layers)} layers.")
        outputs = {
            layer: {
                "weight": setup.uniform((count, self.hidden), _HYPERNETWORK, _OUTPUT, number),
                "bias": setup.like.new_zeros(count),
            }
            for number, layer in enumerate(layers)
        }
        trunk = _make_trunk(setup, (self.embedding, self.hidden, self.hidden, self.hidden))
        networks = repeat({"trunk": trunk, "outputs": outputs}, count)  # ψ_i, alike at first
        networks["embedding"] = _draw_normal(setup, (count, self.embedding))  # v_i
        return {"models": repeat(setup.params, count), "networks": networks}

    def welcome(self, server: Tree, setup: Setup, before: int) -> Tree:
        """A newcomer's hypernetwork gives all clients equal shares; its model is the mean until it sends one. Others'
        give it the mean of their outputs, and so send a little more of the mean model: with a share of 0, a ReLU would
        have no slope by which the share could ever grow."""
        wide = super().welcome(server, setup, before)
        late = torch.arange(setup.num_clients, device=wide["networks"]["embedding"].device) >= before

        def even(leaf: Tensor) -> Tensor:  # [clients, outputs, ...]
            new = (late[:, None] | late).reshape(*leaf.shape[:2], *[1] * (leaf.ndim - 2))
            return torch.where(new, leaf[:, :before].mean(1, keepdim=True), leaf)

        outputs = map_leaves(even, wide["networks"]["outputs"])
        models = seat(wide["models"], newcomer_shares(wide["models"], before))
        return {"models": models, "networks": wide["networks"] | {"outputs": outputs}}

    def init_client(self, setup: Setup) -> Tree:
        return {"params": setup.params} if self.retained else {}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        own = torch.tensor(clients, device=server["networks"]["embedding"].device)
        weights = self._weights(take(server["networks"], own), own)
        mixed = _mix(weights, server["models"])  # θ̄_i
        if not self.retained:
            return {"params": mixed}
        layers = sorted(weights)
        own_weights = torch.cat([weights[layer].gather(1, own[:, None]) for layer in layers], 1)  # α_ii^l
        kept = own_weights.argsort(dim=1, descending=True, stable=True)[:, : self.retained]
        crosses = torch.ones_like(own_weights, dtype=torch.bool).scatter(1, kept, False)  # [clients, layers]
        by_layer = dict(zip(layers, torch.split(crosses, 1, dim=1), strict=True))
        return {"params": {name: Rows(leaf[:, None], by_layer[_layer(name)]) for name, leaf in mixed.items()}}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = local.sgd(local.loss, self.personalize(local, state, message), **self.descent)
        if not self.retained:
            return {}, {"params": params}
        crossing = {name: Rows(p[None], message["params"][name].present) for name, p in params.items()}
        return {"params": params}, {"params": crossing}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        own = torch.tensor(exchange.clients, device=server["networks"]["embedding"].device)
        models, networks = server["models"], take(server["networks"], own)
        returned = exchange.received["params"]
        learnt = exchange.model.trainable(models)
        pull = vjp(lambda networks: _mix(self._weights(networks, own), learnt), networks)[1]
        (slopes,) = pull(_excess(exchange, self.printed_sign))  # of J_i: no client's network is in another's
        moved = map_leaves(lambda w, slope: w.sub(slope, alpha=self.hyper_lr), networks, slopes)
        if self.retained:
            returned = {name: _fill(returned[name], old) for name, old in take(models, own).items()}
        return {"models": put(models, own, returned), "networks": put(server["networks"], own, moved)}

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        params: Tree = message["params"]
        if not self.retained:
            return params
        return {name: torch.where(row.present[0], row.values[0], state["params"][name]) for name, row in params.items()}

    def _weights(self, networks: Tree, own: Tensor) -> Params:
        """α_i^l: for every layer one row of shares a client, [clients, num_clients]."""

        def weigh(network: Tree, own: Tensor) -> Params:
            hidden = _pass(network["trunk"], network["embedding"]).relu()
            return {layer: self._share(F.linear(hidden, **output), own) for layer, output in network["outputs"].items()}

        weights: Params = vmap(weigh)(networks, own)
        return weights

    def _share(self, values: Tensor, own: Tensor) -> Tensor:
        if self.normalize == "softmax":
            return values.softmax(0)
        values = values.relu()
        total = values.sum()
        alone = (torch.arange(len(values), device=values.device) == own).to(values.dtype)
        return torch.where(total > 0, values / torch.where(total > 0, total, 1), alone)


@dataclass(frozen=True)
class PFedHN(Method):
    """Shamsian et al., "Personalized Federated Learning using Hypernetworks", ICML 2021.

    One hypernetwork makes everybody's model of an embedding v_i of ⌊1 + N/4⌋ numbers: four linear layers, then one for
    every tensor of the model. With `local_head` it is pFedHN-PC: the head is the client's own. The paper's server meets
    one client at a time: `turns`. By default it takes one step with the mean of a round's clients, whom engines can
    then train at once. A step for each of them with models of the round's beginning is not offered: it overshoots, and
    diverges with 20 clients at the paper's rates.

    As in the authors' code, the sign is sent − returned, momentum and weight decay also move embeddings of the absent,
    and clipping leaves a local head alone. Batches are those of passes over the data, velocities of clients begin at 0
    every round. Running statistics cannot be generated: they are averaged.
    """

    lr: float = 0.005  # α, local learning rate
    steps: int = 50  # K, batches a round
    momentum: float = 0.9  # of local SGD
    weight_decay: float = 5e-5  # of local SGD
    hyper_lr: float = 0.05  # η, step of hypernetwork and embeddings (0.01 in the paper, 0.05 with a local head)
    hyper_momentum: float = 0.9  # of the hypernetwork
    hyper_weight_decay: float = 1e-3  # of the hypernetwork
    clip: float = 50.0  # largest norm of a gradient, at clients and at the server
    hidden: int = 100  # width of the hypernetwork
    local_head: bool = False  # the head stays with the client (pFedHN-PC)
    turns: bool = False  # clients take turns, with a step of the server after each (the paper's)
    printed_sign: bool = False  # returned − sent: climbs instead of descending
    down: ClassVar[str] = "own generated model"
    keeps: ClassVar[str] = "nothing, or head"
    newcomer: ClassVar[str] = "the model of the mean embedding; a head of its own is the start's"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.steps >= 1, "steps", "at least 1")
        self.require(self.hyper_lr >= 0, "hyper_lr", "at least 0")
        self.require(0 <= self.hyper_momentum < 1, "hyper_momentum", "at least 0 and below 1")
        self.require(self.hyper_weight_decay >= 0, "hyper_weight_decay", "at least 0")
        self.require(self.clip > 0, "clip", "above 0")
        self.require(self.hidden >= 1, "hidden", "at least 1")

    @property
    def one_by_one(self) -> bool:
        return self.turns

    def init_server(self, setup: Setup) -> Tree:
        params = setup.split("head")[0] if self.local_head else setup.params
        learnt, width = setup.model.trainable(params), 1 + setup.num_clients // 4
        network = {
            "embeddings": _draw_normal(setup, (setup.num_clients, width)),
            "trunk": _make_trunk(setup, (width, *[self.hidden] * 4)),
            "outputs": {
                name: {
                    "weight": _draw_around(setup, (*leaf.shape, self.hidden), self.hidden, _OUTPUT, 2 * number),
                    "bias": _draw_around(setup, tuple(leaf.shape), self.hidden, _OUTPUT, 2 * number + 1),
                }
                for number, (name, leaf) in enumerate(learnt.items())
            },
        }
        statistics = {name: leaf for name, leaf in params.items() if name not in learnt}
        return {"network": network, "velocity": zeros_like(network), "statistics": statistics}

    def welcome(self, server: Tree, setup: Setup, before: int) -> Tree:
        """A newcomer's embedding is the mean. Where more clients give embeddings more numbers, these are 0 at first,
        so that everyone's model stays."""
        wide = super().welcome(server, setup, before)
        old, width = server["network"]["embeddings"], wide["network"]["embeddings"].shape[1]
        rows = torch.cat([old, old.mean(0).expand(setup.num_clients - before, -1)])
        return wide | {"network": wide["network"] | {"embeddings": F.pad(rows, (0, width - old.shape[1]))}}

    def init_client(self, setup: Setup) -> Tree:
        return {"head": setup.split("head")[1]} if self.local_head else {}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return {"params": _generate(server["network"], clients) | repeat(server["statistics"], len(clients))}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        start = self.personalize(local, state, message)
        learnt = local.model.trainable(start)

        def step(carry: Tree, batch: Batch) -> Tree:
            slope = local.slope(lambda w, batch: local.loss(start | w, batch), carry["params"], batch)
            generated = {name: leaf for name, leaf in slope.items() if name in message["params"]}
            slope = slope | _clip(generated, self.clip)
            params, velocity = _descend(**carry, slope=slope, **self.descent)
            return {"params": params, "velocity": velocity}

        end = local.fold(step, {"params": learnt, "velocity": zeros_like(learnt)}, steps=self.steps)
        params = local.refresh(start | end["params"])
        if not self.local_head:
            return {}, {"params": params}
        body, head = local.model.split(params)
        return {"head": head}, {"params": body}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        excess = scale(_excess(exchange, self.printed_sign), 1 / len(exchange.clients))
        pull = vjp(lambda network: _generate(network, exchange.clients), server["network"])[1]
        slope = _clip(pull(excess)[0], self.clip)
        network, velocity = _descend(
            server["network"], server["velocity"], slope,
            lr=self.hyper_lr, momentum=self.hyper_momentum, weight_decay=self.hyper_weight_decay,
        )  # fmt: skip
        statistics = {name: exchange.received["params"][name] for name in server["statistics"]}
        return {"network": network, "velocity": velocity, "statistics": mean(statistics, exchange.sizes)}

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        params: Tree = message["params"] | state.get("head", {})
        return params


def _mix(weights: Params, models: Params) -> Params:
    """θ̄_i^l = Σ_j α_ij^l θ_j^l, stacked over i."""
    return {name: torch.tensordot(weights[_layer(name)], stacked, dims=1) for name, stacked in models.items()}


def _generate(network: Tree, clients: Sequence[int]) -> Params:
    """θ_i = H_ψ(v_i), stacked."""
    hidden = _pass(network["trunk"], network["embeddings"][list(clients)])  # [clients, hidden]
    return {
        name: torch.tensordot(hidden, output["weight"], dims=([1], [-1])) + output["bias"]
        for name, output in network["outputs"].items()
    }


def _excess(exchange: Exchange, printed_sign: bool) -> Params:
    """Sent − returned, of what is trained; 0 where nothing crossed."""
    sent, returned = (
        {name: leaf.values[:, 0] if isinstance(leaf, Rows) else leaf for name, leaf in tree["params"].items()}
        for tree in (exchange.sent, exchange.received)
    )
    difference = sub(returned, sent) if printed_sign else sub(sent, returned)
    return exchange.model.trainable(difference)


def _fill(row: Rows, old: Tensor) -> Tensor:
    """What crossed, and the old tensor of clients whose did not: [clients, ...]."""
    return torch.where(row.present.reshape(-1, *[1] * (old.ndim - 1)), row.values[:, 0], old)


def _clip(slope: Params, most: float) -> Params:
    """The slope, or as much of it as has the largest norm allowed."""
    return scale(slope, (most / (dot(slope, slope).sqrt() + 1e-6)).clamp(max=1))


def _descend(
    params: Tree, velocity: Tree, slope: Tree, *, lr: float, momentum: float, weight_decay: float
) -> tuple[Tree, Tree]:
    """One step of SGD with momentum: the parameters and their velocity."""
    velocity = map_leaves(
        lambda g, w, v: g.add(w, alpha=weight_decay).add(v, alpha=momentum), slope, params, velocity
    )  # fmt: skip
    return map_leaves(lambda w, v: w.sub(v, alpha=lr), params, velocity), velocity


def _layer(name: str) -> str:
    """The module that owns a parameter."""
    return name.rpartition(".")[0] or "model"


def _make_trunk(setup: Setup, widths: Sequence[int]) -> Tree:
    """Linear layers from width to width, drawn as PyTorch draws them."""
    return {
        str(number): {
            "weight": _draw_around(setup, (outputs, inputs), inputs, _TRUNK, 2 * number),
            "bias": _draw_around(setup, (outputs,), inputs, _TRUNK, 2 * number + 1),
        }
        for number, (inputs, outputs) in enumerate(pairwise(widths))
    }


def _pass(trunk: Tree, embedding: Tensor) -> Tensor:
    """Through the layers, with a ReLU between two."""
    hidden = F.linear(embedding, **trunk["0"])
    for number in range(1, len(trunk)):
        hidden = F.linear(hidden.relu(), **trunk[str(number)])
    return hidden


def _draw_around(setup: Setup, shape: tuple[int, ...], inputs: int, *salts: int) -> Tensor:
    """Numbers around 0, at most 1/√inputs away."""
    return (2 * setup.uniform(shape, _HYPERNETWORK, *salts) - 1).div(inputs**0.5)


def _draw_normal(setup: Setup, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers."""
    numbers: Tensor = torch.special.ndtri(setup.uniform(shape, _HYPERNETWORK, _EMBEDDING))
    return numbers
