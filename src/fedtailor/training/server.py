"""The server of a run: it makes messages, receives uploads, and counts bytes.

    message = method.send(server state)         server -> clients
    upload  = method.train(client, message)     on every client, see `clients.py`
    server state = method.receive(uploads)      clients -> server

The server is the same for simulated and deployed clients.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedtailor.core.method import Exchange, Method, Setup
from fedtailor.core.model import Model
from fedtailor.core.robust import Robust
from fedtailor.core.trees import Tree, map_leaves, outline, repeat
from fedtailor.core.updates import update_metrics
from fedtailor.errors import RunError
from fedtailor.runs.client_states import ClientStates
from fedtailor.runs.records import Record, update_values, values_by_client
from fedtailor.training.channel.channel import Channel
from fedtailor.training.channel.payload import count_bytes, mask_absent_rows
from fedtailor.training.channel.privacy import NoiseSeed
from fedtailor.training.client_failures import TooFewClientsError
from fedtailor.training.round_state import ClientResults, RoundState


class MessageSource(Protocol):
    """The server as clients see it: it sends messages."""

    @property
    def rounds_done(self) -> int: ...

    @property
    def state(self) -> Tree: ...

    def send(self, state: Tree, clients: Sequence[int], number: int) -> Tree: ...

    def serve(self, state: Tree, clients: Sequence[int], number: int) -> Tree: ...


@dataclass(eq=False, kw_only=True)
class Server:
    """The state of the server and what it has sent and received. The state is replaced, never modified in place."""

    method: Method
    model: Model
    sizes: Tensor  # [clients], number of training samples
    initial_state: Tree  # server state before round 1
    state: Tree  # server state after round `rounds_done`
    channel: Channel
    noise_seed: Callable[[], NoiseSeed]  # of the noise that the server adds to a round's uploads
    robust: Robust
    rounds_done: int = 0
    upload_counts: Counter[int] = field(default_factory=Counter)  # client -> number of uploads received

    @classmethod
    @torch.no_grad()
    def build(
        cls, method: Method, setup: Setup, channel: Channel, noise_seed: Callable[[], NoiseSeed], robust: Robust
    ) -> "Server":
        """Return the server before round 1."""
        state = method.init_server(setup)
        return cls(
            method=method,
            model=setup.model,
            sizes=setup.sizes,
            initial_state=state,
            state=state,
            channel=channel,
            noise_seed=noise_seed,
            robust=robust,
        )

    @property
    def num_clients(self) -> int:
        return len(self.sizes)

    def send(self, state: Tree, clients: Sequence[int], number: int) -> Tree:
        """Return the messages to these clients in round `number`, stacked."""
        return mask_absent_rows(self.method.send(state, clients, number))

    def serve(self, state: Tree, clients: Sequence[int], number: int) -> Tree:
        """Return the messages from which these clients build their `received` models, stacked."""
        return mask_absent_rows(self.method.serve(state, clients, number))

    def receive(self, round_state: RoundState, number: int, results: ClientResults) -> None:
        """Update the server state of a round in progress with the uploads of a cohort."""
        clients, sent = results.clients, results.sent
        if (reason := self.robust.too_few(len(clients))) is not None:
            raise TooFewClientsError(f"In round {number}, {len(clients)} clients delivered, but {reason}.")
        if results.mean is None:
            sizes = count_bytes(results.encoded, len(clients))
            received = self.channel.decode(results.encoded, sent, clients, number, self.noise_seed())
        else:
            sizes, received = results.bytes_up, repeat(results.mean, len(clients))
        round_state.bytes_up |= zip(clients, sizes, strict=True)
        about = (number, clients, self.num_clients, self.sizes[clients], self.model)
        bounded = self.robust.bounded(received, sent)
        exchange = Exchange(*about, sent, bounded, total_size=self.sizes.sum(), robust=self.robust)
        exchange = exchange.for_method(self.method)
        before, round_state.server = round_state.server, self.method.receive(round_state.server, exchange)
        round_state.clients += clients
        round_state.results.append(results.results)
        started = time.perf_counter()  # the time of metrics does not count as training time
        metrics = dict(self.method.server_metrics(before, round_state.server, exchange))
        update = update_metrics(received, sent) if results.mean is None else {}  # else actors have recorded the norms
        client_metrics = results.client_metrics | update | metrics.pop("per_client", {})
        update_values(round_state.client_metrics, values_by_client(clients, client_metrics))
        round_state.method_metrics |= metrics
        round_state.metrics_seconds += time.perf_counter() - started

    def commit(self, round_state: RoundState) -> None:
        """Make the result of a round the current state.

        Tensors are made contiguous, as they are after loading a checkpoint, because the memory layout may affect the
        last bits of later results.
        """
        self.state = map_leaves(torch.Tensor.contiguous, round_state.server)
        self.rounds_done += 1
        self._count_uploads(round_state.bytes_up)

    def restore(self, state: Tree, rounds_done: int, records: Sequence[Record]) -> None:
        """Restore the server state after `rounds_done` rounds, whose records are given."""
        if (
            outline(state) != outline(self.initial_state)
            or ClientStates(self.initial_state).find_mismatch(repeat(state, 1)) is not None
        ):
            raise RunError("The saved server state does not match this method and model.")
        self.state = map_leaves(lambda leaf: leaf.to(self.sizes.device), state)
        self.rounds_done, self.upload_counts = rounds_done, Counter()
        for record in records:
            self._count_uploads(record["per_client"]["bytes_up"])

    @torch.no_grad()
    def grow(self, setup: Setup) -> None:
        """Extend the server to clients that join late; `setup` describes all clients."""
        self.state = self.method.grow_server(self.state, setup, self.num_clients)
        self.initial_state, self.sizes = self.method.init_server(setup), setup.sizes

    def privacy_spent(self) -> dict[str, float]:
        """Return the `epsilon` of the client with the most uploads, for the record, if the channel adds noise."""
        return self.channel.privacy_spent(max(self.upload_counts.values(), default=0))

    def _count_uploads(self, bytes_up: Mapping[int, int]) -> None:
        """Count the clients that uploaded something in a round, for the privacy accounting."""
        self.upload_counts.update(client for client, count in bytes_up.items() if count)
