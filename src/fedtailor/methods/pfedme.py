"""pFedMe: personal models by Moreau envelopes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedtailor.core.batch import Batch
from fedtailor.core.client_context import ClientContext
from fedtailor.core.client_weights import AveragingMethod, ClientWeights
from fedtailor.core.fields import Positive, PositiveInt
from fedtailor.core.local_training import ScheduledMethod
from fedtailor.core.method import Exchange, Setup
from fedtailor.core.training_settings import plain_sgd
from fedtailor.core.trees import Tree, add, mean, scale, sub


@dataclass(frozen=True)
class PFedMe(AveragingMethod, ScheduledMethod):
    """Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020.

    In each batch, a client takes several steps on its personal model, with a proximal term toward its copy w_i of the
    global model, and then moves w_i toward the personal model.
    """

    sends_global_model: ClassVar[bool] = True
    title: ClassVar[str] = "pFedMe"
    lr: Annotated[Positive, "η, learning rate of the client's copy w_i of the global model (0.005 in the paper)"] = 0.05
    personal_lr: Annotated[Positive, "η_p, learning rate of the personal model"] = 0.09
    lam: Annotated[Positive, "λ, weight of the proximal term toward w_i"] = 15.0
    inner_steps: Annotated[PositiveInt, "K, steps of the personal model per batch"] = 5
    steps: Annotated[PositiveInt, "R, batches per round"] = 20
    beta: Annotated[Positive, "β, share of the new average in the global model"] = 1.0
    weights: Annotated[
        ClientWeights, "client weights: by number of samples (as in the code) or uniform (as in the paper)"
    ] = "size"
    fixed_settings: ClassVar[Mapping[str, str]] = plain_sgd("its step on w_i is a gradient step on the Moreau envelope")
    client_state: ClassVar[str] = "personal model"
    newcomer_start: ClassVar[str] = "the global model as its personal model"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.lr * self.lam < 1, "lr", "below 1/lam")

    def init_client(self, setup: Setup) -> Tree:
        return {"own": setup.params}

    def train(self, ctx: ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        personal_lr, share = self.scheduled(ctx, self.personal_lr), self.scheduled(ctx, self.lr * self.lam)

        def step(carry: Tree, batch: Batch) -> Tree:
            params, own = carry["params"], carry["own"]
            for _ in range(self.inner_steps):
                pull = add(ctx.grad(ctx.loss, own, batch), scale(sub(own, params), self.lam))
                own = sub(own, scale(pull, personal_lr))
            return {"params": sub(params, scale(sub(params, own), share)), "own": own}

        start = {"params": message["params"], "own": message["params"]}
        end = ctx.scan(step, start, steps=self.steps)
        return {"own": ctx.update_batch_stats(end["own"])}, {"params": ctx.update_batch_stats(end["params"])}

    def receive(self, server: Tree, exchange: Exchange) -> Tree:
        average = mean(exchange.received["params"], self.round_weights(exchange))
        old, new = (exchange.model.trainable(tree) for tree in (server["params"], average))
        return {"params": average | add(scale(old, 1 - self.beta), scale(new, self.beta))}

    def personalize(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        return {**state["own"]}
