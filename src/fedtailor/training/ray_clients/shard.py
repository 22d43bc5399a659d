"""Distribute clients over actors: which clients an actor has, and what it receives of them."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.core.batch import as_parts, take_samples
from fedtailor.core.memory_limits import fits_on_device
from fedtailor.core.method import Setup
from fedtailor.core.model import Inputs
from fedtailor.data.federation import Federation
from fedtailor.data.normalization import make_normalizer
from fedtailor.runs.client_states import ClientStates
from fedtailor.training.engines import EngineChoice
from fedtailor.training.grouped_clients import AnyClients, GroupedClients
from fedtailor.training.ray_clients.packets import Packet
from fedtailor.training.sample_index import SampleIndex
from fedtailor.training.simulated_clients import SimulatedClients

_PIECE_BYTES = 2**25  # of samples that are moved at once
_MADE_BY_ACTOR = (
    "shared", "engine", "states", "trained", "held_out", "schedule", "names", "samples", "training_samples"
)  # fmt: skip


def assign_clients(sizes: Sequence[int], actors: int) -> list[int]:
    """Return the actor of every client, so that all actors have about the same number of samples.

    The clients with the most samples are assigned first, each to the actor with the fewest samples so far.

    >>> assign_clients([10, 50, 30, 30], actors=2)
    [0, 0, 1, 1]
    """
    loads = [(0, actor) for actor in range(actors)]
    owners = [0] * len(sizes)
    for client in np.argsort(-np.asarray(sizes), kind="stable").tolist():
        load, actor = heapq.heappop(loads)
        owners[client] = actor
        heapq.heappush(loads, (load + max(1, int(sizes[client])), actor))
    return owners


def positions_by_actor(owner: Sequence[int], clients: Sequence[int]) -> dict[int, list[int]]:
    """Return the positions of the clients of each actor that has some of them, given the actor of every client.

    >>> positions_by_actor([0, 1, 0], clients=[2, 1, 0])
    {0: [0, 2], 1: [1]}
    """
    found: dict[int, list[int]] = {}
    for position, client in enumerate(clients):
        found.setdefault(owner[client], []).append(position)
    return dict(sorted(found.items()))


@dataclass(frozen=True, eq=False)
class Shard:
    """What an actor receives: the samples of its clients, and what all clients share."""

    clients: list[int]
    groups: list[dict[str, Any]]  # fields of `SimulatedClients`, for each architecture
    contexts: list[Any]  # `SharedContext` of each architecture, without samples
    group_of: Sequence[int] | None  # architecture of every client; None: all have the same network
    samples: dict[str, SampleIndex]
    training_samples: SampleIndex
    inputs: Inputs  # without values
    targets: Tensor  # without values
    normalization: tuple[Any, Any, Any]

    def build(self, device: torch.device) -> AnyClients:
        """Return the clients of this shard on a device; their samples are filled in later (`sample_pieces`)."""
        parts, y = as_parts(self.inputs), torch.empty_like(self.targets, device=device)
        target = device if fits_on_device(sum(part.nbytes for part in parts.values()), device) else torch.device("cpu")
        x = {name: torch.empty_like(part, device=target) for name, part in parts.items()}
        samples = {split: index.to(device) for split, index in self.samples.items()}
        training_samples, choice = self.training_samples.to(device), EngineChoice("sequential")
        groups = []
        for template, context in zip(self.groups, self.contexts, strict=True):
            setup = _place(template["setup"], context.dtype, device)
            prepare = make_normalizer(*self.normalization, context.dtype, device)
            inputs = x[""] if list(x) == [""] else x
            model = context.model.to(device, context.dtype)
            shared = replace(context, x=inputs, y=y, prepare=prepare, model=model)
            made = {
                "setup": setup,
                "shared": shared,
                "device": device,
                "samples": samples,
                "training_samples": training_samples,
                "engine_choice": choice,
                "engine": choice.build(shared, training_samples),
                "states": ClientStates(template["method"].init_client(setup)),
                "schedule": [],
                "names": [],
            }
            groups.append(SimulatedClients(**template | made))
        return groups[0] if self.group_of is None else GroupedClients(groups, self.group_of)


def _place(setup: Setup, dtype: torch.dtype, device: torch.device) -> Setup:
    params = {name: p.to(device) for name, p in setup.params.items()}
    return replace(setup, model=setup.model.to(device, dtype), params=params, sizes=setup.sizes.to(device))


def make_shard(local: AnyClients, fed: Federation, clients: list[int]) -> tuple[Shard, Tensor]:
    """Return the shard of these clients, given all clients on this machine, and the rows of their samples."""
    groups = [local] if isinstance(local, SimulatedClients) else list(local.groups)
    first = groups[0]
    indexes = [*first.samples.values(), first.training_samples]
    rows = torch.unique(torch.cat([index.positions(clients) for index in indexes]))

    def like(part: Tensor) -> Tensor:
        return torch.empty(len(rows), *part.shape[1:], dtype=part.dtype, device="meta")

    empty, x = torch.empty(0), first.shared.x
    shard = Shard(
        clients=clients,
        groups=[_template(group) for group in groups],
        contexts=[replace(group.shared, x=empty, y=empty, prepare=_no_preprocessing) for group in groups],
        group_of=None if isinstance(local, SimulatedClients) else list(local.group_of),
        samples={split: index.restricted(clients, rows) for split, index in first.samples.items()},
        training_samples=first.training_samples.restricted(clients, rows),
        inputs={name: like(part) for name, part in x.items()} if isinstance(x, dict) else like(x),
        targets=like(first.shared.y),
        normalization=(fed.mean, fed.std, fed.shape),
    )
    return shard, rows


def sample_pieces(local: AnyClients, rows: Tensor) -> Iterator[tuple[int, list[Packet]]]:
    """Yield the samples in these rows, a few MiB at a time: the position of the first, inputs by part, and targets."""
    shared = local.group(0).shared
    count = max(1, _PIECE_BYTES // sum(part[0].nbytes for part in as_parts(shared.x).values()))
    for start in range(0, len(rows), count):
        piece = rows[start : start + count]
        parts = [*as_parts(take_samples(shared.x, piece)).values(), shared.y[piece]]
        yield start, [Packet.pack({"samples": part}) for part in parts]


def _template(group: SimulatedClients) -> dict[str, Any]:
    """Return the fields of clients that an actor does not make itself."""
    return {f.name: getattr(group, f.name) for f in fields(group) if f.name not in _MADE_BY_ACTOR}


def _no_preprocessing(x: Any) -> Any:
    return x
