"""Methods that shape what the head sees: features without a client's bias, or split into common and personal ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.batch import Batch
from fedtailor.classes import class_counts
from fedtailor.discrepancy import mean_discrepancy
from fedtailor.errors import Refused
from fedtailor.local import LocalView
from fedtailor.method import Exchange, Setup, SGDMethod
from fedtailor.model import Inputs, Model, cross_entropy
from fedtailor.trees import Params, Rows, Tree, add, dot, map_leaves, mean, repeat, scale, zeros_like

_START = 11  # salt: where networks that a method adds begin
_BANDWIDTHS = [2.0 * a for a in (10, 15, 20, 50)]  # of FedCP's kernels exp(−d² / 2a)


@dataclass(frozen=True)
class DBE(SGDMethod):
    """Zhang et al., "Eliminating Domain Bias for Federated Learning in Representation Space", NeurIPS 2023.

    A client's bias of features lives in a personal vector z̄_i that is added to them before the head (`memory`); what is
    left is pulled towards the consensus z̄^g of all clients (`kappa`). The paper forms z̄^g before round 1 with everyone.
    Here round 1 holds that phase: its participants first train plainly from the common start, send the running mean of
    their features and discard what they trained; then they train their ordinary round, without the pull, for there is
    no consensus yet. It stays that of round 1, and crosses to a client once, when it first takes part from round 2 on.
    κ·lr is that of the paper's run: with κ = 50 at our lr the pull overshoots in narrow networks.
    """

    kappa: float = 2.5  # κ, pull of the mean feature towards the consensus (50 in the paper's run, at lr 0.005)
    mu: float = 1.0  # μ, share of the newest batch in the running mean of features
    memory: bool = True  # a personal vector is added to the features
    down: ClassVar[str] = "model, once the consensus feature"
    up: ClassVar[str] = "model, once a mean feature"
    keeps: ClassVar[str] = "bias of features, consensus feature"
    newcomer: ClassVar[str] = "the common model, the consensus feature; its bias begins at 0"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.kappa >= 0, "kappa", "at least 0")
        self.require(0 < self.mu <= 1, "mu", "above 0 and at most 1")

    def init_server(self, setup: Setup) -> Tree:
        nobody = torch.zeros_like(setup.sizes, dtype=torch.bool)
        return {"params": setup.params, "consensus": _no_feature(setup), "told": nobody}

    def init_client(self, setup: Setup) -> Tree:
        return {"memory": _no_feature(setup), "consensus": _no_feature(setup)}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        news = ~server["told"][list(clients)][:, None] & (round > 1)
        consensus = server["consensus"].expand(len(clients), 1, -1)
        return {**repeat({"params": server["params"]}, len(clients)), "consensus": Rows(consensus, news)}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        news, first = message["consensus"], local.round == 1
        consensus = torch.where(news.present, news.values, state["consensus"])[0]
        start = {"params": message["params"], "memory": state["memory"], "running": zeros_like(state)["memory"]}
        end = self._learn(local, start, consensus, 0.0 if first else self.kappa, self.memory)
        upload: Tree = {"params": local.refresh(end["params"])}
        if first:
            plain = self._learn(local, start, consensus, kappa=0.0, memory=False)
            upload["mean"] = Rows(plain["running"][None], torch.ones_like(news.present))
        return {"memory": end["memory"], "consensus": consensus}, upload

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        new = server | {"params": mean(exchange.received["params"], exchange.sizes)}
        if exchange.round == 1:
            means = {"consensus": exchange.received["mean"].values[:, 0]}
            return new | mean(means, exchange.sizes)  # z̄^g
        here = torch.tensor(exchange.clients, device=server["told"].device)
        return new | {"told": server["told"].index_fill(0, here, True)}

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        return {**message["params"], "memory": state["memory"]}

    def logits(self, model: Model, personal: Tree, x: Inputs) -> Tensor:
        return model.answer(personal, model.features(personal, x) + personal["memory"])

    def _learn(self, local: LocalView, start: Tree, consensus: Tensor, kappa: float, memory: bool) -> Tree:
        """Local SGD on params and memory, which follows the running mean r of features besides."""

        def objective(tree: Tree, batch: Batch) -> Tensor:
            z = local.model.features(tree["params"], batch.x)
            mean = batch.weight @ z / batch.weight.sum().clamp(min=1)
            running = (1 - self.mu) * tree["running"].detach() + self.mu * mean
            outputs = local.model.answer(tree["params"], z + tree["memory"] if memory else z)
            pull: Tensor = (running - consensus).square().mean() / 2
            told: Tensor = tree["running"] @ mean.detach()  # a way to hear the mean: it is the slope by `running`
            return batch.mean(local.model.loss(outputs, batch.y)) + kappa * pull + told

        def step(carry: Tree, batch: Batch) -> Tree:
            tree, velocity = carry["tree"], carry["velocity"]
            slope = local.slope(objective, tree, batch)
            running = (1 - self.mu) * tree["running"] + self.mu * slope["running"]
            slope = map_leaves(lambda g, w: g.add(w, alpha=self.weight_decay), slope, tree)
            slope = map_leaves(lambda g, v: g.add(v, alpha=self.momentum), slope, velocity)
            moved = map_leaves(lambda w, g: w.sub(g, alpha=self.lr), tree, slope)
            return {"tree": moved | {"running": running}, "velocity": slope}

        end: Tree = local.fold(step, {"tree": start, "velocity": zeros_like(start)}, epochs=self.epochs)["tree"]
        return end


@dataclass(frozen=True)
class FedCP(SGDMethod):
    """Zhang et al., "FedCP: Separating Feature Information for Personalized Federated Learning via Conditional Policy",
    KDD 2023.

    A policy network splits every feature z into a personal part r⊙z for the client's own head and a common part s⊙z
    for the received one, which stays as it is; answers add up. Gumbel noise moves the policy in training only: at
    evaluation it is the plain softmax, so that accuracy is not a matter of luck (the code draws there too). The
    context is the direction of the sum of the own head's rows, from round 1 on (the code's is random there). Own heads
    begin as the common start's, and cross-entropy moves the rows of a linear head by steps that sum to zero: so the
    context of all clients stays the same, in the paper's definition as in ours. λ·lr is that of the
    paper's run: with λ = 5 at our lr, training on digits broke after some fifty rounds.
    """

    lam: float = 0.25  # λ, pull of features towards the received body's, by MMD (5 in the paper's run, at lr 0.005)
    tau: float = 1.0  # τ, temperature of the policy
    down: ClassVar[str] = "model, policy network"
    up: ClassVar[str] = "model, policy network"
    keeps: ClassVar[str] = "head"
    newcomer: ClassVar[str] = "the common model, where its own head begins, and policy network"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.lam >= 0, "lam", "at least 0")
        self.require(self.tau > 0, "tau", "above 0")

    def init_server(self, setup: Setup) -> Tree:
        _, width = setup.model.head_size
        return {"params": setup.params, "policy": _block(setup, 0, width, 2 * width)}

    def init_client(self, setup: Setup) -> Tree:
        head = setup.split("head")[1]
        if f"{setup.model.head}.weight" not in head:
            raise Refused("FedCP takes its context from the head's weights, and here another layer uses them too.")
        return {"head": head}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        body, common = local.model.split(message["params"])
        context = _direction(local.model, state["head"])

        def objective(learnt: Tree, batch: Batch) -> Tensor:
            # the received body first: batch normalisation's statistics are those of who runs last
            received = local.model.features(message["params"], batch.x).detach()
            z = local.model.features(learnt["params"], batch.x)
            noise = -torch.log(-torch.log(batch.uniform((len(z), 2, z.shape[1]))))  # Gumbel's
            personal = {**learnt["params"], "common": common, "policy": learnt["policy"], "context": context}
            loss = batch.mean(local.model.loss(self._answer(local.model, personal, z, noise), batch.y))
            return loss + self.lam * mean_discrepancy(z, received, batch.weight, _BANDWIDTHS)

        start = {"params": body | state["head"], "policy": message["policy"]}
        end = local.sgd(objective, start, **self.descent)
        body, head = local.model.split(end["params"])
        upload = {"params": body | scale(add(head, common), 0.5), "policy": end["policy"]}
        return {"head": head}, upload

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes)

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        (body, common), own = local.model.split(message["params"]), state["head"]
        return {**body, **own, "common": common, "policy": message["policy"], "context": _direction(local.model, own)}

    def trained(self, local: LocalView, state: Tree, message: Tree, upload: Tree) -> Tree:
        """With the common head as it was in training, not as it is uploaded."""
        body, _ = local.model.split(upload["params"])
        return self.personalize(local, state, upload | {"params": message["params"] | body})

    def logits(self, model: Model, personal: Tree, x: Inputs) -> Tensor:
        return self._answer(model, personal, model.features(personal, x))

    def _answer(self, model: Model, personal: Tree, z: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        """h_i(r⊙z) + h_g(s⊙z) with (r, s) = softmax((a + noise) / τ), a = ReLU(LN(Linear(z⊙c_i)))."""
        policy = personal["policy"]
        scores = torch.relu(_normalise(policy, _linear(policy, z * personal["context"])))
        r, s = torch.softmax((scores.reshape(z.shape[0], 2, -1) + noise) / self.tau, 1).unbind(1)
        return model.answer(personal, r * z) + model.answer(personal["common"], s * z)


@dataclass(frozen=True)
class GPFL(SGDMethod):
    """Zhang et al., "GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized
    Federated Learning", ICCV 2023.

    A conditional valve looks at a feature twice: with the client's context p_i for its own head, and with the common
    one g for the common embeddings e_k of classes, towards which it is guided by angle and, λ, by distance. Contexts
    are means of embeddings, held during a round: g of all alike, p_i by the client's share of every class. Where the
    paper takes the embeddings from is open; here they are those just received, so that p_i fits the body that came with
    them. `contexts`="own" is the code's choice. Before anything was learnt (round 1) both contexts are zero. μ times
    the learning rate is as with a rate of 0.005: with more, the valve decays until contexts change nothing.
    """

    lam: float = 0.01  # λ, weight of the distance to the own class's embedding (Frobenius, not squared, over a batch)
    mu: float = 0.005  # μ, weight decay of embeddings and valve (0.1 in the paper); weight_decay: of body and head
    contexts: Literal["received", "own"] = "received"  # embeddings that make them: received, or as the client left them
    down: ClassVar[str] = "body, embeddings of classes, valve"
    up: ClassVar[str] = "body, embeddings of classes, valve"
    keeps: ClassVar[str] = "head"
    newcomer: ClassVar[str] = "the common body, embeddings and valve; its head is the start's"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.lam >= 0, "lam", "at least 0")
        self.require(self.mu >= 0, "mu", "at least 0")
        self.require_choice("contexts", "received", "own")

    def init_server(self, setup: Setup) -> Tree:
        classes, width = setup.model.head_size
        valve = {"gain": _block(setup, 1, width, width), "offset": _block(setup, 2, width, width)}
        embeddings = torch.special.ndtri(setup.uniform((classes, width), _START, 3))  # from N(0, 1)
        return {"params": setup.split("head")[0], "embeddings": embeddings, "valve": valve}

    def init_client(self, setup: Setup) -> Tree:
        nothing = _no_feature(setup)
        state = {"head": setup.split("head")[1], "context": nothing}
        return state | ({"embeddings": nothing.repeat(setup.model.head_size[0], 1)} if self.contexts == "own" else {})

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        context, common = self._contexts(local, state, message)

        def objective(learnt: Tree, batch: Batch) -> Tensor:
            params, embeddings, valve = learnt["params"], learnt["embeddings"], learnt["valve"]
            z = local.model.features(params, batch.x)
            personal, shared = _condition(valve, z, context), _condition(valve, z, common)
            cosines = F.normalize(shared, dim=1) @ F.normalize(embeddings, dim=1).T
            losses = local.model.loss(local.model.answer(params, personal), batch.y) + cross_entropy(cosines, batch.y)
            apart = (shared - message["embeddings"][batch.y]) * batch.weight[:, None]
            added = {"embeddings": embeddings, "valve": valve}
            decay = (self.mu - self.weight_decay) / 2 * dot(added, added)
            distance: Tensor = torch.linalg.vector_norm(apart)
            return batch.mean(losses) + self.lam * distance + decay

        end = local.sgd(objective, message | {"params": message["params"] | state["head"]}, **self.descent)
        body, head = local.model.split(end["params"])
        new = {"head": head, "context": context, "embeddings": end["embeddings"]}
        return {name: new[name] for name in state}, end | {"params": body}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes)

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        context, _ = self._contexts(local, state, message)
        return {**message["params"], **state["head"], "valve": message["valve"], "context": context}

    def trained(self, local: LocalView, state: Tree, message: Tree, upload: Tree) -> Tree:
        """With the context as it was in training."""
        return {**upload["params"], **state["head"], "valve": upload["valve"], "context": state["context"]}

    def logits(self, model: Model, personal: Tree, x: Inputs) -> Tensor:
        return model.answer(personal, _condition(personal["valve"], model.features(personal, x), personal["context"]))

    def _contexts(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tensor, Tensor]:
        """p_i = Σ_k (n_ik / n_i) e_k and g = mean_k e_k."""
        embeddings: Tensor = (message if self.contexts == "received" else state)["embeddings"]
        if local.round == 1:
            embeddings = torch.zeros_like(embeddings)
        return class_counts(local) / local.size @ embeddings, embeddings.mean(0)


def _no_feature(setup: Setup) -> Tensor:
    """A vector of zeros, one for every input of the head."""
    return setup.like.new_zeros(setup.model.head_size[1])


def _direction(model: Model, head: Params) -> Tensor:
    """FedCP's context: the sum of the rows of a head's weights, at length 1."""
    return F.normalize(head[f"{model.head}.weight"].sum(0), dim=0)


def _condition(valve: Tree, z: Tensor, context: Tensor) -> Tensor:
    """GPFL's valve: ReLU(z⊙(γ + 1) + b) with γ and b from the context."""
    gain, offset = (_normalise(valve[part], torch.relu(_linear(valve[part], context))) for part in ("gain", "offset"))
    return torch.relu(z * (gain + 1) + offset)


def _block(setup: Setup, salt: int, inputs: int, outputs: int) -> Params:
    """A linear layer and a normalisation over its outputs, started as PyTorch starts them."""
    drawn = (2 * setup.uniform((inputs + 1, outputs), _START, salt) - 1) / inputs**0.5
    weight, bias = drawn[:-1].T.contiguous(), drawn[-1]
    return {"weight": weight, "bias": bias, "scale": torch.ones_like(bias), "shift": torch.zeros_like(bias)}


def _linear(block: Params, x: Tensor) -> Tensor:
    return F.linear(x, block["weight"], block["bias"])


def _normalise(block: Params, x: Tensor) -> Tensor:
    return F.layer_norm(x, block["scale"].shape, block["scale"], block["shift"])
