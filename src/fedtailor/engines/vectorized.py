"""Many clients at once: `torch.func.vmap` of a client's function over stacked clients.

Clients are sorted by the batches they have and cut into chunks, so that short ones do not wait long for long ones. On a
GPU, the step inside is captured once a chunk and replayed (see `capture.py`).
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedtailor.batch import Common
from fedtailor.engines.capture import Replay
from fedtailor.engines.sequential import check_untouched, versions
from fedtailor.errors import Refused
from fedtailor.local import LocalView
from fedtailor.samples import Samples
from fedtailor.together import Loop, Together, one_after_another
from fedtailor.trees import Tree, map_leaves, once

_STEP = 8  # what a step costs besides its clients' work, in client-steps
_CAPTURE = 400  # what capturing costs, in client-steps


class Vectorized:
    """The vectorized engine; at most `chunk` clients run at once."""

    def __init__(self, common: Common, samples: Samples, chunk: int) -> None:
        self._common, self._samples, self.chunk = common, samples, chunk
        self._batches = -(-samples.sizes // common.batch_size)
        self._replay = Replay(samples.device) if samples.device.type == "cuda" else None

    @torch.no_grad()
    def apply(self, function: Callable[..., Tree], round: int, clients: Sequence[int], *trees: Tree) -> Tree:
        """function(local, *trees) for one chunk of clients after another, all of a chunk at once."""
        chunks = cut(tuple(self._batches[list(clients)].tolist()), self.chunk, _fixed_cost(self._samples.device))
        parts = []
        try:
            for chunk in chunks:
                own = [rows_of(tree, chunk) for tree in trees] if len(chunks) > 1 else trees
                parts.append(self._at_once(function, round, [clients[position] for position in chunk], own))
        except torch.OutOfMemoryError:
            most = max(len(chunk) for chunk in chunks)
            if most == 1:
                raise
            self.chunk = most // 2
        finally:
            if self._replay is not None:
                self._replay.release()
        if len(parts) < len(chunks):  # for want of memory: again in smaller chunks
            parts.clear()
            torch.cuda.empty_cache()
            return self.apply(function, round, clients, *trees)
        return parts[0] if len(parts) == 1 else in_order(parts, chunks)

    def _at_once(self, function: Callable[..., Tree], round: int, clients: list[int], trees: Sequence[Tree]) -> Tree:
        batches, sizes = self._batches[clients], self._samples.sizes[clients]
        loop: Loop = one_after_another
        if self._replay is not None:
            self._replay.clients, loop = len(clients), self._replay
        together = Together(int(batches.min()), int(batches.max()), loop)

        def one(index: Tensor, size: Tensor, own: Tensor, *parts: Tree) -> Tree:
            return function(LocalView(self._common, round, index, size, own, together=together), *parts)

        index, size = (torch.tensor(numbers, device=self._samples.device) for numbers in (clients, sizes))
        before = versions(trees)
        try:
            found: Tree = torch.func.vmap(one)(index, size, self._samples.padded(clients), *trees)
        except (Refused, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever vmap, a method or a model raises is the reason to tell
            reason = str(error).splitlines()[0].split(". ")[0].rstrip(".") if str(error) else type(error).__name__
            raise Refused(
                f"This model or method does not run for many clients at once ({reason}); take engine 'auto', 'pool' or "
                "'sequential'."
            ) from error
        check_untouched(before, versions(trees), clients[0])
        return found


@lru_cache
def cut(batches: tuple[int, ...], most: int, fixed: int = 0) -> list[list[int]]:
    """Positions of clients in chunks of at most `most`, such that all take least: a chunk takes as many steps as its
    longest client has, each for its clients and `_STEP` more, and `fixed` once.

    >>> cut((1, 50, 1, 50), most=10)
    [[1, 3], [0, 2]]
    """
    most = -(-len(batches) // -(-len(batches) // most))  # no fewer chunks for it, but alike
    order = np.argsort(-np.array(batches), kind="stable")
    steps = np.array(batches)[order]
    cost, begins = np.zeros(len(order) + 1), np.zeros(len(order) + 1, dtype=int)
    for end in range(1, len(order) + 1):
        first = max(0, end - most)
        ways = cost[first:end] + steps[first:end] * (_STEP + end - np.arange(first, end)) + fixed
        begins[end] = first + int(ways.argmin())
        cost[end] = ways.min()
    chunks, end = [], len(order)
    while end:
        chunks.append(sorted(order[begins[end] : end].tolist()))
        end = begins[end]
    return chunks[::-1]


def waiting(batches: tuple[int, ...], most: int, device: torch.device) -> float:
    """How many times as long the clients take who wait in their chunks for the longest.

    >>> waiting((4, 2), most=2, device=torch.device("cpu"))
    1.3333333333333333
    """
    chunks = cut(batches, most, _fixed_cost(device))
    return sum(max(batches[position] for position in chunk) * len(chunk) for chunk in chunks) / sum(batches)


def _fixed_cost(device: torch.device) -> int:
    return _CAPTURE if device.type == "cuda" else 0


def rows_of(tree: Tree, positions: list[int]) -> Tree:
    """Some rows of a stacked tree; where all clients have the same, none is copied."""

    def rows(leaf: Tensor) -> Tensor:
        same = leaf.ndim > 0 and leaf.stride(0) == 0
        return leaf[: len(positions)] if same else leaf[torch.tensor(positions, dtype=torch.int64, device=leaf.device)]

    return map_leaves(rows, tree)


def in_order(parts: Sequence[Tree], chunks: Sequence[list[int]]) -> Tree:
    """The chunks' results in the order of the clients."""
    positions = torch.tensor([position for chunk in chunks for position in chunk])
    places = torch.argsort(positions)
    return map_leaves(once(lambda *leaves: torch.cat(leaves)[places.to(leaves[0].device)]), *parts)
