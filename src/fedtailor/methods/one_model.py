"""Methods that train one model for everyone."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.batch import Batch
from fedtailor.local import LocalView
from fedtailor.method import Exchange, Method, Setup, SGDMethod
from fedtailor.trees import Tree, add, dot, mean, repeat, scale, squared_distance, squared_norms, sub, zeros_like


@dataclass(frozen=True)
class _Averaging(SGDMethod):
    """Clients train what they receive, the server takes the mean."""

    weights: Literal["size", "uniform"] = "size"  # of clients in the average: by samples (the paper's), or all alike

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_choice("weights", "size", "uniform")

    @property
    def plain_mean(self) -> bool:
        return self.weights == "uniform"

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = local.sgd(local.loss, message["params"], **self.descent)
        return state, {"params": params}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes if self.weights == "size" else None)


@dataclass(frozen=True)
class FedAvg(_Averaging):
    """McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017."""

    personal: ClassVar[bool] = False


@dataclass(frozen=True)
class FedAvgFT(_Averaging):
    """Collins et al., "FedAvg with Fine Tuning: Local Updates Lead to Representation Learning", NeurIPS 2022.

    FedAvg; to use the common model, a client tunes a copy of all of it on its own data, with the rate it trains with,
    and forgets the copy. Its model at the moment `trained` is the one it uploads, which is not tuned further.
    """

    tuning_epochs: int = 5  # K_ft, epochs of fine-tuning (5 in FedBABU's code)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.tuning_epochs >= 0, "tuning_epochs", "at least 0")

    def personalize(self, local: LocalView, state: Tree, message: Tree) -> Tree:
        common = super().personalize(local, state, message)
        if not self.tuning_epochs:
            return common
        return local.sgd(local.loss, common, **(self.descent | {"epochs": self.tuning_epochs}))

    def trained(self, local: LocalView, state: Tree, message: Tree, upload: Tree) -> Tree:
        params: Tree = upload["params"]
        return params


@dataclass(frozen=True)
class FedProx(SGDMethod):
    """Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020."""

    mu: float = 0.1  # μ, pull towards the received model
    personal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.mu >= 0, "mu", "at least 0")

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = local.sgd(
            lambda w, batch: local.loss(w, batch) + self.mu / 2 * squared_distance(w, message["params"]),
            message["params"],
            **self.descent,
        )
        return state, {"params": params}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes)


@dataclass(frozen=True)
class Scaffold(Method):
    """Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, option II.

    Plain SGD only: momentum or weight decay would break the estimate of the gradient from (θ − y) / (K η).
    """

    lr: float = 0.1  # η, local learning rate
    epochs: int = 2  # local epochs, K batches in all
    server_lr: float = 1.0  # η_g, step of the server
    personal: ClassVar[bool] = False
    down: ClassVar[str] = "model, control"
    up: ClassVar[str] = "model, change of control"
    keeps: ClassVar[str] = "control"
    newcomer: ClassVar[str] = "the common model; its control begins at 0"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.server_lr > 0, "server_lr", "above 0")

    @property
    def plain_mean(self) -> bool:
        return True

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.params, "control": zeros_like(setup.model.trainable(setup.params))}

    def init_client(self, setup: Setup) -> Tree:
        return {"control": zeros_like(setup.model.trainable(setup.params))}

    def welcome(self, server: Tree, setup: Setup, before: int) -> Tree:
        """c is the mean of all c_i, and those of newcomers are 0: so it shrinks, for everyone."""
        wide = super().welcome(server, setup, before)
        return wide | {"control": scale(wide["control"], before / setup.num_clients)}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        drift = sub(message["control"], state["control"])  # c − c_i
        params = local.sgd(
            lambda w, batch: local.loss(w, batch) + dot(drift, local.model.trainable(w)),
            message["params"],
            **self.descent,
        )
        delta = local.model.trainable(sub(params, message["params"]))
        control = sub(scale(delta, -1 / (local.steps(self.epochs) * self.lr)), drift)
        return {"control": control}, {"params": params, "control_delta": sub(control, state["control"])}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        average, share = mean(exchange.received), len(exchange.clients) / exchange.num_clients
        step = sub(average["params"], server["params"])
        return {
            "params": add(server["params"], scale(step, self.server_lr)),
            "control": add(server["control"], scale(average["control_delta"], share)),
        }


@dataclass(frozen=True)
class FedExP(SGDMethod):
    """Jhunjhunwala, Wang, Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023."""

    weights: Literal["size", "uniform"] = "uniform"  # of clients in the average: all alike (the paper's), or by samples
    epsilon: float = 0.001  # ε, keeps the step finite (0.1 for EMNIST in the paper)
    average_last: bool = True  # the model to use is the mean of the last two; training goes on from the last
    personal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_choice("weights", "size", "uniform")
        self.require(self.epsilon > 0, "epsilon", "above 0")

    def init_server(self, setup: Setup) -> Tree:
        return {"params": setup.params, "previous": setup.params}

    def send(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        return repeat({"params": server["params"]}, len(clients))

    def serve(self, server: Tree, clients: Sequence[int], round: int) -> Tree:
        last, previous = server["params"], server["previous"]
        used = scale(add(last, previous), 0.5) if self.average_last else last
        return repeat({"params": used}, len(clients))

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        params = local.sgd(local.loss, message["params"], **self.descent)
        return state, {"params": params}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        weights = exchange.sizes if self.weights == "size" else torch.ones_like(exchange.sizes)
        average, trainable = mean(exchange.received["params"], weights), exchange.model.trainable
        changes = trainable(sub(exchange.received["params"], exchange.sent["params"]))  # Δ_i
        change = trainable(sub(average, server["params"]))  # their mean
        squares = mean({"mean": squared_norms(changes)}, weights)["mean"]
        step = (squares / (2 * (dot(change, change) + self.epsilon))).clamp(min=1)  # η_g
        moved = add(trainable(server["params"]), scale(change, step))
        return {"params": average | moved, "previous": server["params"]}  # running statistics are only averaged


@dataclass(frozen=True)
class FedADMM(SGDMethod):
    """Gong, Li, Freris, "FedADMM: A Robust Federated Deep Learning Framework with Adaptivity to System Heterogeneity",
    ICDE 2022.

    A client moves w_i by f_i(w) + ⟨y_i, w − θ⟩ + ρ/2 ‖w − θ‖², with a dual y_i of its own; all clients count alike. The
    upload Δ_i is the change of w_i + y_i/ρ since the client last took part; in the authors' code ("code") twice the
    change from θ. Decided here: w_i begins at θ, as in the code, for from its last place it hardly
    feels θ by so small a ρ; and η = m/N, which keeps θ the mean of all w_i + y_i/ρ. The code has η = 1 (0.5 from round
    60 on), which is the same when everyone takes part; when few do, changes since the last time would count again and
    again and grow. The code draws the number of epochs from 1 to 10 every time; here it is `epochs`.
    """

    lr: float = 0.05  # η, local learning rate (0.1 in the code)
    rho: float = 0.01  # ρ, penalty
    server_lr: float | None = None  # η, step of the server (1 in the code); none: m/N, the share of clients in a round
    variant: Literal["paper", "code"] = "paper"  # Δ_i from the client's last w_i, or from the received model
    start: Literal["received", "own"] = "received"  # w_i when training begins: what was received, or its last place
    personal: ClassVar[bool] = False
    up: ClassVar[str] = "change of the model"
    keeps: ClassVar[str] = "own model, dual"
    newcomer: ClassVar[str] = "the common model, where its own begins; its dual is 0"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.rho > 0, "rho", "above 0")
        step = self.server_lr
        self.require(step is None or (isinstance(step, Real) and 0 < step < inf), "server_lr", "above 0, or none")
        self.require_choice("variant", "paper", "code")
        self.require_choice("start", "received", "own")

    @property
    def plain_mean(self) -> bool:
        return True

    def init_client(self, setup: Setup) -> Tree:
        return {"own": setup.params, "dual": zeros_like(setup.model.trainable(setup.params))}

    def train(self, local: LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        received, dual, trainable = message["params"], state["dual"], local.model.trainable

        def objective(w: Tree, batch: Batch) -> Tensor:
            penalty = self.rho / 2 * squared_distance(trainable(w), trainable(received))
            return local.loss(w, batch) + dot(dual, trainable(w)) + penalty

        own = local.sgd(objective, received if self.start == "received" else state["own"], **self.descent)
        away = trainable(sub(own, received))  # (y_i⁺ − y_i) / ρ
        before = received if self.variant == "code" else state["own"]
        upload = {
            "change": add(trainable(sub(own, before)), away),  # Δ_i
            "statistics": {name: leaf for name, leaf in own.items() if name not in dual},
        }
        return {"own": own, "dual": add(dual, scale(away, self.rho))}, upload

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        average = mean(exchange.received)
        step = len(exchange.clients) / exchange.num_clients if self.server_lr is None else self.server_lr
        moved = add(exchange.model.trainable(server["params"]), scale(average["change"], step))
        return {"params": moved | average["statistics"]}

    def trained(self, local: LocalView, state: Tree, message: Tree, upload: Tree) -> Tree:
        own: Tree = state["own"]
        return own
