"""FedADMM: one global model, trained by the alternating direction method of multipliers."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import AveragingMethod, ClientWeights
from fedtailor.core.fields import Positive
from fedtailor.core.local_training import LocalTraining
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.trees import Tree, add, dot, mean, scale, squared_distance, sub, zeros_like


@dataclass(frozen=True)
class FedADMM(AveragingMethod, LocalTraining):
    """Gong, Li, Freris, "FedADMM: A Robust Federated Deep Learning Framework with Adaptivity to System Heterogeneity",
    ICDE 2022.

    Client i minimizes f_i(w) + ⟨y_i, w − θ⟩ + ρ/2 ‖w − θ‖² with its own dual variable y_i. It uploads Δ_i, the change
    of w_i + y_i/ρ since it last took part; in the authors' code (variant="code"), Δ_i is twice the change from θ.

    Implementation choices: w_i starts at θ in each round, as in the code, because ρ is so small that a w_i that starts
    at its last value is hardly influenced by θ. The server learning rate is η = m/N, which keeps θ equal to the mean of
    all w_i + y_i/ρ; with weights="size", m and N count samples. The code uses η = 1 (0.5 from round 60 on), which is
    the same under full participation; under partial participation, changes since the last participation would be
    counted repeatedly and grow. The code draws the number of epochs from 1 to 10 each time; here it is `epochs`.
    """

    lr: Annotated[Positive, "η, local learning rate (0.1 in the code)"] = 0.05
    rho: Annotated[Positive, "ρ, penalty weight"] = 0.01
    server_lr: Annotated[
        Positive | None, "η, server learning rate (1 in the code); none: m/N, the participating fraction"
    ] = None
    variant: Annotated[Literal["paper", "code"], "Δ_i relative to the client's last w_i, or to the received model"] = (
        "paper"
    )
    start: Annotated[Literal["received", "own"], "initial w_i of each round: the received model, or its last value"] = (
        "received"
    )
    weights: Annotated[ClientWeights, "client weights: uniform (as in the paper) or by number of samples"] = "uniform"
    personal: ClassVar[bool] = False
    keeps_optimizer: ClassVar[bool] = True
    upload: ClassVar[str] = "model update"
    client_state: ClassVar[str] = "local model, dual variable"
    newcomer_start: ClassVar[str] = "the global model as its local model; a zero dual variable"

    def init_client(self, setup: Setup) -> Tree:
        dual = zeros_like(setup.model.trainable(setup.params))
        return {"own": setup.params, "dual": dual, **self.init_optimizer(setup.params)}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        received, dual, trainable = message["params"], state["dual"], ctx.model.trainable

        def objective(w: Tree, batch: Batch) -> Tensor:
            penalty = self.rho / 2 * squared_distance(trainable(w), trainable(received))
            return ctx.loss(w, batch) + dot(dual, trainable(w)) + penalty

        start = received if self.start == "received" else state["own"]
        own, new = self.optimize(ctx, objective, start, state)
        gap = trainable(sub(own, received))  # (y_i⁺ − y_i) / ρ
        before = received if self.variant == "code" else state["own"]
        upload = {
            "change": add(trainable(sub(own, before)), gap),  # Δ_i
            "statistics": {name: leaf for name, leaf in own.items() if name not in dual},
        }
        return {"own": own, "dual": add(dual, scale(gap, self.rho)), **new}, upload

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        average = mean(exchange.received, self.round_weights(exchange))
        step = self.round_share(exchange) if self.server_lr is None else self.server_lr
        moved = add(exchange.model.trainable(server["params"]), scale(average["change"], step))
        return {"params": moved | average["statistics"]}

    def trained(self, ctx: ClientContext, state: Tree, message: Tree, upload: Tree) -> Tree:
        return {**state["own"]}
