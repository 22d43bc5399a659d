"""States and trained models of clients, which are in the actors: checkpoints read them and restore them there."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fedtailor.core.trees import Tree
from fedtailor.runs.client_states import StoredTrees
from fedtailor.training.engines.vectorized import restore_order, select_rows
from fedtailor.training.ray_clients.cluster import ActorGroup
from fedtailor.training.ray_clients.packets import Packet
from fedtailor.training.ray_clients.shard import positions_by_actor

_PIECE_BYTES = 2**26  # that are moved at once


@dataclass(frozen=True, eq=False)
class RemoteTrees:
    """One tree per client, in the actors; a `StoredTrees`."""

    initial: Tree
    bytes_per_client: int
    members: list[int]
    fetch: Callable[[Sequence[int]], Tree]

    def clients(self) -> list[int]:
        """Return the clients that have a tree, in ascending order."""
        return self.members

    def get(self, clients: Sequence[int], device: torch.device) -> Tree:
        """Return the trees of these clients, stacked."""
        return self.fetch(clients)


def remote_stores(
    actors: ActorGroup, owner: Sequence[int], initial: Mapping[str, Tree]
) -> tuple[dict[str, StoredTrees], dict[str, Any]]:
    """Return the stores of all actors by name, and the metadata of a checkpoint: the smallest chunk size."""
    inventories = actors.call_all("inventory")
    found: dict[str, StoredTrees] = {}
    for name in dict.fromkeys(name for stores, _ in inventories.values() for name in stores):
        parts = [stores[name] for stores, _ in inventories.values() if name in stores]
        members = sorted(client for clients, _ in parts for client in clients)
        fetch = partial(_fetch, actors, owner, name)
        found[name] = RemoteTrees(initial.get(name, {}), parts[0][1], members, fetch)
    chunk_sizes = {name: [own[name] for _, own in inventories.values()] for name in inventories[0][1]}
    known = {name: [size for size in sizes if size is not None] for name, sizes in chunk_sizes.items()}
    return found, {name: min(sizes) if sizes else None for name, sizes in known.items()}


def _fetch(actors: ActorGroup, owner: Sequence[int], name: str, clients: Sequence[int]) -> Tree:
    positions = positions_by_actor(owner, clients)
    packets = actors.call({actor: ("fetch", name, [clients[p] for p in own]) for actor, own in positions.items()})
    return restore_order([packet.unpack() for packet in packets.values()], list(positions.values()))


def put_trees(actors: ActorGroup, owner: Sequence[int], name: str, clients: Sequence[int], stacked: Tree) -> None:
    """Store trees of these clients in their actors."""
    actors.call(
        {
            actor: ("put", name, [clients[p] for p in own], Packet.pack(select_rows(stacked, own)))
            for actor, own in positions_by_actor(owner, clients).items()
        }
    )


def in_pieces(store: StoredTrees) -> Iterator[tuple[list[int], Tree]]:
    """Yield clients and their stacked trees, a few MiB at a time."""
    clients, count = store.clients(), max(1, _PIECE_BYTES // max(1, store.bytes_per_client))
    for start in range(0, len(clients), count):
        piece = clients[start : start + count]
        yield piece, store.get(piece, torch.device("cpu"))
