"""The server side of a round, shared by simulated and deployed federations.

    message = method.send(server state)         server -> clients
    upload  = method.train(client, message)     on every client
    server state = method.receive(uploads)      clients -> server

`Server` implements everything except the clients. Subclasses implement `train_clients`: `SimulatedServer` runs the
clients in an engine on this machine, and `FlowerServer` (package `deploy`) sends the messages to deployed clients.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedtailor.core.method import Exchange, Method
from fedtailor.core.model import Model
from fedtailor.core.trees import Tree, map_leaves, outline, repeat
from fedtailor.errors import RunError
from fedtailor.runs.client_states import ClientStates
from fedtailor.runs.records import Record, merge_disjoint, to_plain, update_values, values_by_client
from fedtailor.training.channel.channel import Channel
from fedtailor.training.channel.payload import count_bytes, mask_absent_rows
from fedtailor.training.channel.privacy import NoiseSeed
from fedtailor.training.client_failures import check_failure_rate, check_finite
from fedtailor.training.round_state import RoundState, drop_rows, remaining_clients


@dataclass(frozen=True, eq=False)
class ClientResults:
    """What the clients of a cohort returned, stacked in the order of `clients`."""

    clients: list[int]  # the clients that succeeded
    sent: Tree  # the messages to these clients
    encoded: Tree  # their uploads, as encoded by the channel
    client_metrics: Tree = field(default_factory=dict)  # one value per client and name, for the record
    results: Tree = field(default_factory=dict)  # in simulations: the clients' new states and trained models


@dataclass(eq=False, kw_only=True)
class Server:
    """The server of a run: its state, and how one round of training changes it.

    `train_round` is the only entry point of a round. The server state is replaced after each round, never modified in
    place.
    """

    method: Method
    model: Model
    sizes: Tensor  # [clients], number of training samples
    initial_state: Tree  # server state before round 1
    state: Tree  # server state after round `rounds_done`
    noise_seed: NoiseSeed  # of the noise that the server adds
    channel: Channel = field(default_factory=Channel)
    max_failures: float = 0.5  # largest fraction of a round's clients that may fail
    rounds_done: int = 0
    upload_counts: Counter[int] = field(default_factory=Counter)  # client -> number of uploads received

    @torch.no_grad()
    def train_round(self, number: int, clients: Sequence[int], missed: Mapping[int, str] | None = None) -> Record:
        """Train one round with these clients and return its record.

        Clients in `missed` (client -> reason), and clients that fail, receive the message but contribute nothing;
        their state is unchanged. If the round raises an error, the server and all client states stay as they were.

        The clients form one cohort, which trains on the same server state. If the method sets `sequential_clients`,
        each client is a cohort by itself and receives the server state that the previous client left.
        """
        started = time.perf_counter()
        round_state = RoundState(self.state, missed=dict(missed or {}))
        cohorts = [[client] for client in clients] if self.method.sequential_clients else [list(clients)]
        for cohort in cohorts if clients else []:
            self._run_cohort(round_state, number, cohort)
        self.check_round(round_state, number, clients)
        self.commit(round_state)
        if self.sizes.is_cuda:
            torch.cuda.synchronize()
        return self._make_record(round_state, number, time.perf_counter() - started - round_state.metrics_seconds)

    def train_clients(
        self, round_state: RoundState, number: int, clients: list[int], sent: Tree
    ) -> ClientResults | None:
        """Train these clients on the messages `sent` and return their results, or None if no client succeeded.

        Failures and clients that miss the round are added to `round_state`.
        """
        raise NotImplementedError

    def check_round(self, round_state: RoundState, number: int, clients: Sequence[int]) -> None:
        """Raise `RunError` if too many clients failed or the new server state is not finite."""
        check_failure_rate(round_state.failures, len(clients) - len(round_state.missed), self.max_failures, number)
        check_finite(round_state.server, number)

    def commit(self, round_state: RoundState) -> None:
        """Make the result of a round the current state.

        Tensors are made contiguous, as they are after loading a checkpoint, because the memory layout may affect the
        last bits of later results.
        """
        self.state = map_leaves(torch.Tensor.contiguous, round_state.server)
        self.rounds_done += 1
        self.count_uploads(round_state.bytes_up)

    def count_uploads(self, bytes_up: Mapping[int, int]) -> None:
        """Count the clients that uploaded something in a round, for the privacy accounting."""
        self.upload_counts.update(client for client, count in bytes_up.items() if count)

    def restore_state(self, server: Tree, rounds_done: int, records: Sequence[Record]) -> None:
        """Restore the server state after `rounds_done` rounds, whose records are given."""
        if (
            outline(server) != outline(self.initial_state)
            or ClientStates(self.initial_state).find_mismatch(repeat(server, 1)) is not None
        ):
            raise RunError("The saved server state does not match this method and model.")
        self.state = map_leaves(lambda leaf: leaf.to(self.sizes.device), server)
        self.rounds_done = rounds_done
        for record in records:
            self.count_uploads(record["per_client"]["bytes_up"])

    def _run_cohort(self, round_state: RoundState, number: int, cohort: list[int]) -> None:
        """Send messages to a cohort, train its clients, and update the server state with their uploads."""
        # 1. Send. All selected clients receive the message, also those that miss the round.
        sent = mask_absent_rows(self.method.send(round_state.server, cohort, number))
        round_state.bytes_down |= zip(cohort, count_bytes(sent, len(cohort)), strict=True)
        cohort, sent = remaining_clients(round_state.missed, cohort), drop_rows(round_state.missed, cohort, sent)
        # 2. Train the clients.
        trained = self.train_clients(round_state, number, cohort, sent) if cohort else None
        if trained is None:
            return
        # 3. Receive the uploads as the channel decodes them.
        clients = trained.clients
        round_state.bytes_up |= zip(clients, count_bytes(trained.encoded, len(clients)), strict=True)
        received = self.channel.decode(trained.encoded, trained.sent, clients, number, self.noise_seed)
        sizes = self.sizes[clients]
        exchange = Exchange(number, clients, len(self.sizes), sizes, self.model, trained.sent, received)
        before, round_state.server = round_state.server, self.method.receive(round_state.server, exchange)
        round_state.clients += clients
        round_state.results.append(trained.results)
        # 4. Compute the method's metrics. Their time does not count as training time.
        metrics_started = time.perf_counter()
        metrics = dict(self.method.server_metrics(before, round_state.server, exchange))
        client_metrics = trained.client_metrics | metrics.pop("per_client", {})
        update_values(round_state.client_metrics, values_by_client(clients, client_metrics))
        round_state.method_metrics |= metrics
        round_state.metrics_seconds += time.perf_counter() - metrics_started

    def _make_record(self, round_state: RoundState, number: int, seconds: float) -> Record:
        """Return the record of a round; the evaluation fills in the fields that are None here."""
        return {
            "round": number,
            "clients": round_state.clients,
            "missed": round_state.missed,
            "failed": {client: failure.reason for client, failure in round_state.failures.items()},
            "bytes_up": sum(round_state.bytes_up.values()),
            "bytes_down": sum(round_state.bytes_down.values()),
            "seconds": seconds,
            **dict.fromkeys(["loss", "loss_mean"]),
            **{
                f"{name}_{moment}{kind}": None
                for name in ("loss", *self.model.metrics)
                for moment in ("received", "trained")
                for kind in ("", "_mean")
            },
            **self.channel.privacy_spent(max(self.upload_counts.values(), default=0)),
            "method_metrics": {name: to_plain(value) for name, value in round_state.method_metrics.items()},
            "per_client": merge_disjoint(
                {"bytes_up": round_state.bytes_up, "bytes_down": round_state.bytes_down}, round_state.client_metrics
            ),
        }
