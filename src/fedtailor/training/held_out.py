"""Clients that never train with the others: each is evaluated as a client that joins after the last round.

The server and the other clients do not know them, so the run of the other clients is the same as without them. The
run numbers them after the other clients, as the hooks for clients that join late expect.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedtailor.core.batch import SharedContext
from fedtailor.core.client_context import ClientContext
from fedtailor.core.method import Method, Setup
from fedtailor.core.trees import Tree, stack, take
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError
from fedtailor.runs.records import HELD_OUT, Values, update_values
from fedtailor.runs.run import MOMENTS
from fedtailor.training.client_update import client_update
from fedtailor.training.config import HeldOut
from fedtailor.training.engines import Engine, EngineChoice, close_engine
from fedtailor.training.evaluator import Evaluator, scores
from fedtailor.training.sample_index import SampleIndex
from fedtailor.training.server import MessageSource

_SALT = 10  # separates this random choice from others that depend on the seed
_CHUNK = 64  # clients whose models are in memory at once


def split_clients(fed: Federation, held_out: HeldOut, seed: int) -> tuple[Federation, Federation | None]:
    """Return the clients that train, in their order, and those that are held out.

    >>> from fedtailor.data.datasets import load
    >>> training, held_out = split_clients(load("digits", clients=4), [1], seed=0)
    >>> training.names, held_out.names
    (('0', '2', '3'), ('1',))
    """
    if held_out is None:
        return fed, None
    rest, chosen = split_numbers(fed.num_clients, held_out, seed)
    return fed.select(rest), fed.select(chosen)


def split_numbers(num_clients: int, held_out: HeldOut, seed: int) -> tuple[list[int], list[int]]:
    """Return the numbers of the clients that train and of those that are held out, both in ascending order.

    >>> split_numbers(4, [1], seed=0)
    ([0, 2, 3], [1])
    """
    chosen = [] if held_out is None else _choose(held_out, num_clients, seed)
    rest = [client for client in range(num_clients) if client not in set(chosen)]
    if not rest:
        raise ConfigError(f"held_out_clients leaves none of the {num_clients} clients to train; hold out fewer.")
    return rest, chosen


def _choose(held_out: Any, num_clients: int, seed: int) -> list[int]:
    """Return the numbers of the clients that are held out, in ascending order."""
    if isinstance(held_out, list):
        known = all(type(client) is int and 0 <= client < num_clients for client in held_out)
        if not held_out or not known or len(set(held_out)) < len(held_out):
            valid = f"different numbers from 0 to {num_clients - 1}"
            raise ConfigError(f"held_out_clients must list clients by {valid}, got {held_out!r}.")
        return sorted(held_out)
    is_count = isinstance(held_out, int) and not isinstance(held_out, bool) and held_out >= 1
    if not is_count and not (isinstance(held_out, float) and 0 < held_out < 1):
        valid = "a number of clients, a fraction between 0 and 1, or a list of clients"
        raise ConfigError(f"held_out_clients must be {valid}, got {held_out!r}.")
    count = held_out if is_count else max(1, round(held_out * num_clients))
    return sorted(np.random.default_rng([seed, _SALT]).permutation(num_clients)[:count].tolist())


@dataclass(eq=False, kw_only=True)
class HeldOutClients:
    """Evaluates held-out clients: `received` is the model on arrival, `trained` the one after a round of training."""

    method: Method
    setup: Setup  # of all clients, the held-out ones last
    shared: SharedContext
    samples: Mapping[str, SampleIndex]  # train and test samples of all clients
    engine_choice: EngineChoice
    first: int  # number of the first held-out client
    numbers: Sequence[int]  # the held-out clients with this network

    @torch.no_grad()
    def evaluate(self, server: MessageSource) -> dict[str, Values]:
        """Return the values of all held-out clients by their names in the record."""
        found: dict[str, Values] = {}
        for moment in MOMENTS:
            for clients, models in self._models(server, self.numbers, moment):
                values = scores(self._evaluator, clients, models, moment, {"test": self.samples["test"]})
                update_values(found, {f"{HELD_OUT}{name}": by_client for name, by_client in values.items()})
        return found

    @torch.no_grad()
    def model(self, server: MessageSource, client: int, moment: str) -> Tree:
        """Return the personal model of one held-out client."""
        return take(next(self._models(server, [client], moment))[1], 0)

    def close(self) -> None:
        """End the worker processes; the clients can still be used."""
        close_engine(self._engine)

    def check(self, server: MessageSource) -> None:
        """Raise the error of a method that clients cannot join."""
        self.method.grow_server(server.state, self.setup, self.first)

    def _models(
        self, server: MessageSource, clients: Sequence[int], moment: str
    ) -> Iterator[tuple[Sequence[int], Tree]]:
        """Yield chunks of clients and their personal models, stacked, as if all held-out clients joined now."""
        grown, number = self.method.grow_server(server.state, self.setup, self.first), server.rounds_done + 1
        for start in range(0, len(clients), _CHUNK):
            chunk = clients[start : start + _CHUNK]
            if moment == "received":
                sent, function = server.serve(grown, chunk, number), self.method.personalize
            else:
                sent, function = server.send(grown, chunk, number), self._train
            states = [self.method.init_newcomer(self.setup, take(sent, row)) for row in range(len(chunk))]
            yield chunk, self._engine.apply(function, number, chunk, stack(states), sent)

    def _train(self, ctx: ClientContext, state: Tree, message: Tree) -> Tree:
        trained: Tree = client_update(self.method, ctx, state, message)["trained"]
        return trained

    @cached_property
    def _engine(self) -> Engine:
        return self.engine_choice.build(self.shared, self.samples["train"])

    @cached_property
    def _evaluator(self) -> Evaluator:
        return Evaluator(self.method, self.shared, self.engine_choice)
