"""The only round loop: every method, whether clients are simulated or real.

send → clients work → receive
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedtailor.channel import Channel
from fedtailor.errors import Refused
from fedtailor.faults import check_finite, check_share
from fedtailor.lines import Record, by_client, extend, join, plain
from fedtailor.method import Exchange, Method
from fedtailor.model import Model
from fedtailor.privacy import Seed
from fedtailor.store import ClientStore
from fedtailor.trees import Tree, map_leaves, outline, repeat
from fedtailor.turn import Turn, left, without
from fedtailor.wire import count_bytes, deliver


@dataclass(frozen=True, eq=False)
class Arrived:
    """What came back from some clients, stacked in their order."""

    clients: list[int]
    sent: Tree  # what these were sent
    encoded: Tree  # their uploads as they crossed
    notes: Tree = field(default_factory=dict)  # a number a client, for the record
    kept: Tree = field(default_factory=dict)  # where clients are simulated: their states and models


@dataclass(eq=False, kw_only=True)  # what changes: the server is replaced round by round
class Loop:
    """The server of a run and what a round does to it; who the clients are and how they work, others say (`work`)."""

    method: Method
    model: Model
    sizes: Tensor  # [clients], training samples
    start: Tree  # the server before round 1
    server: Tree
    noise_seed: Seed  # of noise that the server adds
    channel: Channel = field(default_factory=Channel)
    max_failures: float = 0.5
    done: int = 0  # rounds
    arrived: Counter[int] = field(default_factory=Counter)  # how often something of a client arrived

    @torch.no_grad()
    def round(self, number: int, clients: Sequence[int], missed: Mapping[int, str] | None = None) -> Record:
        """One round; a method that goes one by one sees each client as a round of its own. Who `missed` it was sent
        the message and delivers nothing, and so does who fails: to them the round did not happen. Nothing is kept
        before all is done, so that a round that cannot be counted leaves everything as it was."""
        started = time.perf_counter()
        turn = Turn(self.server, missed=dict(missed or {}))
        for cohort in [[client] for client in clients] if self.method.one_by_one else [list(clients)] * bool(clients):
            self._take(turn, number, cohort)
        self.check(turn, number, clients)
        self.keep(turn)
        if self.sizes.is_cuda:
            torch.cuda.synchronize()
        return {
            "round": number,
            "clients": turn.clients,
            "missed": turn.missed,
            "failed": {client: failure.why for client, failure in turn.failures.items()},
            "bytes_up": sum(turn.up.values()),
            "bytes_down": sum(turn.down.values()),
            "seconds": time.perf_counter() - started - turn.watching,
            **dict.fromkeys(["loss", "loss_mean"]),
            **{
                f"{name}_{moment}{kind}": None
                for name in ("loss", *self.model.metrics)
                for moment in ("received", "trained")
                for kind in ("", "_mean")
            },
            **self.channel.spent(max(self.arrived.values(), default=0)),
            "monitor": {name: plain(value) for name, value in turn.monitor.items()},
            "per_client": join({"bytes_up": turn.up, "bytes_down": turn.down}, turn.notes),
        }

    def work(self, turn: Turn, number: int, clients: list[int], sent: Tree) -> Arrived | None:
        """Let these clients work on what they are sent; who fails or misses the round is noted in the turn."""
        raise NotImplementedError

    def check(self, turn: Turn, number: int, clients: Sequence[int]) -> None:
        """Refuse a round that cannot be counted."""
        check_share(turn.failures, len(clients) - len(turn.missed), self.max_failures, number)
        check_finite(turn.server, number)

    def keep(self, turn: Turn) -> None:
        """What a round left becomes what is: as it lies in memory when it comes from a file, for bits may depend on
        that."""
        self.server = map_leaves(torch.Tensor.contiguous, turn.server)
        self.done += 1
        self.count(turn.up)

    def count(self, up: Mapping[int, int]) -> None:
        """Whose uploads arrived in a round, by their bytes."""
        self.arrived.update(client for client, count in up.items() if count)

    def go_back(self, server: Tree, done: int, lines: Sequence[Record]) -> None:
        """The server as it stood after some rounds, whose lines these are."""
        if outline(server) != outline(self.start) or ClientStore(self.start).misfit(repeat(server, 1)) is not None:
            raise Refused("The server that was kept is not that of this method and model.")
        self.server = map_leaves(lambda leaf: leaf.to(self.sizes.device), server)
        self.done = done
        for line in lines:
            self.count(line["per_client"]["bytes_up"])

    def _take(self, turn: Turn, number: int, cohort: list[int]) -> None:
        """Send to these clients, let them work, receive what arrives."""
        sent = deliver(self.method.send(turn.server, cohort, number))
        turn.down |= zip(cohort, count_bytes(sent, len(cohort)), strict=True)
        cohort, sent = left(turn.missed, cohort), without(turn.missed, cohort, sent)
        back = self.work(turn, number, cohort, sent) if cohort else None
        if back is None:
            return
        turn.up |= zip(back.clients, count_bytes(back.encoded, len(back.clients)), strict=True)
        received = self.channel.decode(back.encoded, back.sent, back.clients, number, self.noise_seed)
        sizes = self.sizes[back.clients]
        exchange = Exchange(number, back.clients, len(self.sizes), sizes, self.model, back.sent, received)
        before, turn.server = turn.server, self.method.receive(turn.server, exchange)
        turn.clients += back.clients
        turn.kept.append(back.kept)
        pause = time.perf_counter()
        seen = dict(self.method.monitor(before, turn.server, exchange))
        noted = back.notes | seen.pop("per_client", {})
        extend(turn.notes, by_client(back.clients, noted))
        turn.monitor |= seen
        turn.watching += time.perf_counter() - pause  # watching is not training
