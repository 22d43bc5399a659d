"""Evaluate clients in their actors. The server makes the messages of a few clients at a time."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

import torch

from fedtailor.core.trees import Tree, add
from fedtailor.runs.records import update_values
from fedtailor.training.clients import Evaluation
from fedtailor.training.ray_clients.cluster import ActorGroup
from fedtailor.training.ray_clients.packets import LastPut, Messages, pack_messages
from fedtailor.training.ray_clients.shard import positions_by_actor
from fedtailor.training.server import Server

_CHUNK = 256  # clients per actor whose messages are made at once


@torch.no_grad()
def evaluate_in_actors(
    found: Evaluation,
    actors: ActorGroup,
    owner: Sequence[int],
    server: Server,
    clients: Sequence[int],
    outdated: Set[int],
) -> Evaluation:
    """Return an evaluation with the values of these clients; see `Clients.evaluate`."""
    totals: dict[int, Tree] = {}
    put = LastPut(actors.put)
    for wave in _waves(owner, clients):
        for actor, part in _evaluate_wave(actors, put, server, wave, outdated).items():
            update_values(found.values, part.values)
            update_values(found.method_values, part.method_values)
            if part.totals:
                totals[actor] = add(totals[actor], part.totals) if actor in totals else part.totals
    for actor in sorted(totals):
        found = replace(found, totals=add(found.totals, totals[actor]) if found.totals else totals[actor])
    return replace(found, method_values={name: dict(sorted(of.items())) for name, of in found.method_values.items()})


def _evaluate_wave(
    actors: ActorGroup, put: LastPut, server: Server, wave: dict[int, list[int]], outdated: Set[int]
) -> dict[int, Evaluation]:
    clients, rows = [client for own in wave.values() for client in own], dict[int, list[int]]()
    for actor, own in wave.items():
        start = sum(map(len, rows.values()))
        rows[actor] = list(range(start, start + len(own)))
    number = server.rounds_done + 1
    common, served = pack_messages(put, server.serve(server.state, clients, number), rows)
    sent: dict[int, Messages | None] = dict.fromkeys(wave)
    common_sent: Any = None
    if server.method.has_evaluation_metrics:
        common_sent, packed = pack_messages(put, server.send(server.state, clients, number), rows)
        sent |= packed
    return actors.call(
        {
            actor: (
                "evaluate", server.rounds_done, own, outdated & set(own), served[actor], common, sent[actor],
                common_sent,
            )
            for actor, own in wave.items()
        }
    )  # fmt: skip


def _waves(owner: Sequence[int], clients: Sequence[int]) -> Iterator[dict[int, list[int]]]:
    """Yield some clients of every actor at a time."""
    by_actor = {actor: [clients[p] for p in own] for actor, own in positions_by_actor(owner, clients).items()}
    for start in range(0, max(map(len, by_actor.values()), default=0), _CHUNK):
        wave = {actor: own[start : start + _CHUNK] for actor, own in by_actor.items()}
        yield {actor: own for actor, own in wave.items() if own}
