"""pFedHN: one hypernetwork at the server generates the model of each client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch.func import vjp

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import ClientWeights, WeightedMethod
from fedtailor.core.fields import FractionBelow1, NonNegative, Positive, PositiveInt
from fedtailor.core.local_training import ScheduledMethod
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.optimizers import clip_norm
from fedtailor.core.training_settings import plain_sgd
from fedtailor.core.trees import Params, Tree, map_leaves, mean, repeat, scale, zeros_like
from fedtailor.methods._shared.hypernetwork import (
    OUTPUT_SALT,
    apply_trunk,
    draw_normal,
    draw_uniform,
    make_trunk,
    pseudo_gradient,
)


@dataclass(frozen=True)
class PFedHN(WeightedMethod, ScheduledMethod):
    """Shamsian et al., "Personalized Federated Learning using Hypernetworks", ICML 2021.

    One hypernetwork generates the model of each client from an embedding v_i with ⌊1 + N/4⌋ entries: it has four linear
    layers, followed by one linear layer per tensor of the model. With `local_head`, the method is pFedHN-PC: the head
    is personal. In the paper, the server processes one client at a time (`turns`). By default, it takes one step with
    the mean over the clients of a round, so that engines can train them in parallel. One step per client with models
    from the start of the round is not available: it overshoots, and with 20 clients it diverges at the paper's learning
    rates.

    As in the authors' code, the sign is sent − returned, momentum and weight decay also change the embeddings of absent
    clients, clipping does not affect a local head, and by default the velocities of clients start at 0 in each round.
    Batches are those of epochs over the data. Running statistics cannot be generated; they are averaged.
    """

    title: ClassVar[str] = "pFedHN"
    lr: Annotated[Positive, "α, local learning rate"] = 0.005
    steps: Annotated[PositiveInt, "K, local steps per round"] = 50
    momentum: Annotated[FractionBelow1, "momentum of local SGD"] = 0.9
    weight_decay: Annotated[NonNegative, "weight decay of local SGD"] = 5e-5
    hyper_lr: Annotated[
        NonNegative, "η, learning rate of hypernetwork and embeddings (paper: 0.01, or 0.05 with a local head)"
    ] = 0.05
    hyper_momentum: Annotated[FractionBelow1, "momentum of the hypernetwork"] = 0.9
    hyper_weight_decay: Annotated[NonNegative, "weight decay of the hypernetwork"] = 1e-3
    clip: Annotated[Positive, "maximum gradient norm, on clients and on the server"] = 50.0
    hidden: Annotated[PositiveInt, "width of the hypernetwork"] = 100
    local_head: Annotated[bool, "the head is personal (pFedHN-PC)"] = False
    turns: Annotated[bool, "clients take turns, with a server step after each (as in the paper)"] = False
    printed_sign: Annotated[bool, "returned − sent, which ascends instead of descending"] = False
    weights: Annotated[
        ClientWeights,
        "client weights in the server's step: uniform or by number of samples, which always weights running statistics",
    ] = "uniform"
    keep_optimizer_state: Annotated[bool, "keep the velocity of a client across rounds; false: reset it"] = False
    download: ClassVar[str] = "generated model"
    fixed_settings: ClassVar[Mapping[str, str]] = plain_sgd(
        "its local steps are those of the authors, SGD with momentum and a clipped gradient",
        "momentum",
        "weight_decay",
        "keep_optimizer_state",
    )
    client_state: ClassVar[str] = "nothing, or head"
    newcomer_start: ClassVar[str] = "the model of the mean embedding; the initial head if heads are personal"

    @property
    def sequential_clients(self) -> bool:
        return self.turns

    @property
    def _keeps_velocity(self) -> bool:
        return self.keep_optimizer_state and self.momentum > 0

    def init_server(self, setup: Setup) -> Tree:
        params = setup.split("head")[0] if self.local_head else setup.params
        trainable, width = setup.model.trainable(params), 1 + setup.num_clients // 4
        network = {
            "embeddings": draw_normal(setup, (setup.num_clients, width)),
            "trunk": make_trunk(setup, (width, *[self.hidden] * 4)),
            "outputs": {
                name: {
                    "weight": draw_uniform(setup, (*leaf.shape, self.hidden), self.hidden, OUTPUT_SALT, 2 * number),
                    "bias": draw_uniform(setup, tuple(leaf.shape), self.hidden, OUTPUT_SALT, 2 * number + 1),
                }
                for number, (name, leaf) in enumerate(trainable.items())
            },
        }
        statistics = {name: leaf for name, leaf in params.items() if name not in trainable}
        return {"network": network, "velocity": zeros_like(network), "statistics": statistics}

    def grow_server(self, server: Tree, setup: Setup, before: int) -> Tree:
        """Set the embedding of each newcomer to the mean.

        If embeddings have more entries for more clients, the additional ones start at 0, so that all models stay the
        same.
        """
        new = super().grow_server(server, setup, before)
        old, width = server["network"]["embeddings"], new["network"]["embeddings"].shape[1]
        rows = torch.cat([old, old.mean(0).expand(setup.num_clients - before, -1)])
        return new | {"network": new["network"] | {"embeddings": F.pad(rows, (0, width - old.shape[1]))}}

    def init_client(self, setup: Setup) -> Tree:
        head = {"head": setup.split("head")[1]} if self.local_head else {}
        return head | ({"velocity": zeros_like(setup.model.trainable(setup.params))} if self._keeps_velocity else {})

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return {"params": _generate(server["network"], clients) | repeat(server["statistics"], len(clients))}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        start = self.personalize(ctx, state, message)
        trainable = ctx.model.trainable(start)
        lr = self.scheduled(ctx, self.lr)

        def step(carry: Tree, batch: Batch) -> Tree:
            grad = ctx.grad(lambda w, batch: ctx.loss(start | w, batch), carry["params"], batch)
            generated = {name: leaf for name, leaf in grad.items() if name in message["params"]}
            grad = grad | clip_norm(generated, self.clip)
            options: Any = {"lr": lr, "momentum": self.momentum, "weight_decay": self.weight_decay}
            params, velocity = _sgd_step(**carry, grad=grad, **options)
            return {"params": params, "velocity": velocity}

        velocity = state["velocity"] if self._keeps_velocity else zeros_like(trainable)
        end = ctx.scan(step, {"params": trainable, "velocity": velocity}, steps=self.steps)
        params = ctx.update_batch_stats(start | end["params"])
        new = {"velocity": end["velocity"]} if self._keeps_velocity else {}
        if not self.local_head:
            return new, {"params": params}
        body, head = ctx.model.split(params)
        return new | {"head": head}, {"params": body}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        model_grad = self._weight_rows(pseudo_gradient(exchange, self.printed_sign), exchange)
        backward = vjp(lambda network: _generate(network, exchange.clients), server["network"])[1]
        grad = clip_norm(backward(model_grad)[0], self.clip)
        network, velocity = _sgd_step(
            server["network"], server["velocity"], grad,
            lr=self.hyper_lr, momentum=self.hyper_momentum, weight_decay=self.hyper_weight_decay,
        )  # fmt: skip
        statistics = {name: exchange.received["params"][name] for name in server["statistics"]}
        return {"network": network, "velocity": velocity, "statistics": mean(statistics, exchange.sizes)}

    def _weight_rows(self, grads: Params, exchange: Exchange) -> Params:
        """Multiply the rows of the clients of a round by their shares in the mean."""
        sizes = self.round_weights(exchange)
        if sizes is None:
            return scale(grads, 1 / len(exchange.clients))
        shares = sizes.double() / sizes.sum()
        return map_leaves(lambda leaf: torch.einsum("c,c...->c...", shares.to(leaf), leaf), grads)

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return {**message["params"], **state.get("head", {})}


def _generate(network: Tree, clients: Sequence[int]) -> Params:
    """Return θ_i = H_ψ(v_i), stacked over clients."""
    hidden = apply_trunk(network["trunk"], network["embeddings"][list(clients)])  # [clients, hidden]
    return {
        name: torch.tensordot(hidden, output["weight"], dims=([1], [-1])) + output["bias"]
        for name, output in network["outputs"].items()
    }


def _sgd_step(
    params: Tree, velocity: Tree, grad: Tree, *, lr: float, momentum: float, weight_decay: float
) -> tuple[Tree, Tree]:
    """Take one step of SGD with momentum; return the parameters and their velocity."""
    velocity = map_leaves(
        lambda g, w, v: g.add(w, alpha=weight_decay).add(v, alpha=momentum), grad, params, velocity
    )  # fmt: skip
    return map_leaves(lambda w, v: w.sub(v, alpha=lr), params, velocity), velocity
