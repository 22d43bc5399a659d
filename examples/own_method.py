"""Write your own method: every client averages the global model with its personal model.

Run it with: python examples/own_method.py
"""

from dataclasses import dataclass
from typing import Annotated

import fedtailor as ft
from fedtailor.core.fields import Fraction
from fedtailor.core.trees import Tree, add, mean, scale


@dataclass(frozen=True)
class Blend(ft.LocalTraining):
    """Each client keeps a personal model and starts a round between it and the global model."""

    personal_weight: Annotated[Fraction, "weight of the personal model"] = 0.5

    def init_client(self, setup: ft.Setup) -> Tree:
        return {"personal": setup.params}

    def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        trained = ctx.optimize(ctx.loss, self.personalize(ctx, state, message), **self.optimizer_options)
        return {"personal": trained}, {"params": trained}

    def receive(self, server: Tree, exchange: ft.Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes)

    def personalize(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> Tree:
        return add(scale(state["personal"], self.personal_weight), scale(message["params"], 1 - self.personal_weight))


def main() -> None:
    fed = ft.load("digits", clients=20, partition="dirichlet", alpha=0.1, seed=0)
    model = ft.network("mlp", fed)
    local = ft.simulate(ft.methods.Local(), model, fed, rounds=10, batch_size=16)
    for method in (ft.methods.FedAvg(), Blend(), Blend(personal_weight=0.9)):
        last = ft.simulate(method, model, fed, rounds=10, batch_size=16).summary(local)["received"]["last"]
        better = last["better_than_local"]
        print(
            f"{method!r}: {last['weighted']:.1%} as received, {better:.0%} of clients better than with local training"
        )


if __name__ == "__main__":
    main()
