"""A method of your own in twenty lines: every client averages the common model with its own.

Run it: python examples/own_method.py
"""

from dataclasses import dataclass

import fedtailor as ft
from fedtailor.trees import Tree, add, mean, scale


@dataclass(frozen=True)
class Blend(ft.SGDMethod):
    """Each client keeps a model of its own and starts a round halfway between it and the common one."""

    own_share: float = 0.5  # how much of the own model a round starts from

    def init_client(self, setup: ft.Setup) -> Tree:
        return {"own": setup.params}

    def train(self, local: ft.LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        own = local.sgd(local.loss, self.personalize(local, state, message), **self.descent)
        return {"own": own}, {"params": own}

    def receive(self, server: Tree, exchange: ft.Exchange) -> Tree:
        return mean(exchange.received, exchange.sizes)

    def personalize(self, local: ft.LocalView, state: Tree, message: Tree) -> Tree:
        return add(scale(state["own"], self.own_share), scale(message["params"], 1 - self.own_share))


def main() -> None:
    fed = ft.load("digits", clients=20, partition="dirichlet", alpha=0.1, seed=0)
    model = ft.network("mlp", fed)
    alone = ft.simulate(ft.methods.Local(), model, fed, rounds=10, batch_size=16)
    for method in (ft.methods.FedAvg(), Blend(), Blend(own_share=0.9)):
        last = ft.simulate(method, model, fed, rounds=10, batch_size=16).summary(alone)["received"]["last"]
        gain = last["better_than_alone"]
        print(f"{method!r}: {last['weighted']:.1%} as received, {gain:.0%} of clients better than alone")


if __name__ == "__main__":
    main()
