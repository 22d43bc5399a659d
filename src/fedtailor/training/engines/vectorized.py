"""Train many clients in one batch: `torch.func.vmap` of a client's function over stacked clients.

Clients are sorted by their number of batches and split into chunks, because a chunk takes as many steps as its longest
client. On a GPU, the training step is captured once per chunk and replayed (see `cuda_graph.py`).
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from fedtailor.core.batch import SharedContext
from fedtailor.core.client_context import ClientContext
from fedtailor.core.precision import training_precision
from fedtailor.core.trees import Tree, cache_by_identity, map_leaves
from fedtailor.core.vmap_context import StepLoop, VmapContext, sequential_loop
from fedtailor.errors import ConfigError, FedTailorError, reason
from fedtailor.training.engines.cuda_graph import CudaGraphLoop
from fedtailor.training.engines.sequential import check_not_mutated, tensor_versions
from fedtailor.training.engines.staging import stage
from fedtailor.training.sample_index import SampleIndex

_STEP_OVERHEAD = 8  # fixed cost of a step, in units of one client's step
_CAPTURE_COST = 400  # cost of capturing a CUDA graph, in the same units


class Vectorized:
    """The vectorized engine: chunks of at most `chunk_size` clients, each trained in one batch."""

    def __init__(self, shared: SharedContext, samples: SampleIndex, chunk_size: int) -> None:
        self._shared, self._samples, self.chunk_size = shared, samples, chunk_size
        self._batches = -(-samples.sizes // shared.batch_size)
        self._graph_loop = self._make_graph_loop()

    def _make_graph_loop(self) -> CudaGraphLoop | None:
        return CudaGraphLoop(self._samples.device) if self._samples.device.type == "cuda" else None

    @torch.no_grad()
    def apply(self, function: Callable[..., Tree], round: int, clients: Sequence[int], *trees: Tree) -> Tree:
        """Call function(ctx, *trees) for one chunk of clients after another and stack the results."""
        chunks = make_chunks(
            tuple(self._batches[list(clients)].tolist()), self.chunk_size, _chunk_cost(self._samples.device)
        )
        results = []
        try:
            for chunk in chunks:
                chunk_trees = [select_rows(tree, chunk) for tree in trees] if len(chunks) > 1 else trees
                results.append(
                    self._apply_chunk(function, round, [clients[position] for position in chunk], chunk_trees)
                )
        except torch.OutOfMemoryError:
            largest = max(len(chunk) for chunk in chunks)
            if largest == 1:
                raise
            self.chunk_size = largest // 2
        finally:
            if self._graph_loop is not None:
                self._graph_loop.release()
        if len(results) < len(chunks):  # out of memory: try again with smaller chunks
            results.clear()
            self._graph_loop = self._make_graph_loop()  # frees the memory of the old one
            torch.cuda.empty_cache()
            return self.apply(function, round, clients, *trees)
        return results[0] if len(results) == 1 else restore_order(results, chunks)

    def _apply_chunk(
        self, function: Callable[..., Tree], round: int, clients: list[int], trees: Sequence[Tree]
    ) -> Tree:
        sizes = self._samples.sizes[clients]
        loop: StepLoop = sequential_loop
        if self._graph_loop is not None:
            self._graph_loop.clients, loop = len(clients), self._graph_loop
        vmap_context = VmapContext(int(sizes.min()), int(sizes.max()), len(clients), loop)

        shared, staged, numbers = stage(self._shared, self._samples, clients)

        def apply_one(index: Tensor, size: Tensor, samples: Tensor, *client_trees: Tree) -> Tree:
            return function(ClientContext(shared, round, index, size, samples, vmap=vmap_context), *client_trees)

        index, size = (torch.tensor(values, device=self._samples.device) for values in (clients, sizes))
        before = tensor_versions(trees)
        try:
            with training_precision(self._shared.model.precision):
                result: Tree = torch.func.vmap(apply_one)(index, size, staged.padded(numbers), *trees)
        except (FedTailorError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # vmap, methods, and models may raise anything
            raise ConfigError(
                f"The engine 'vectorized' cannot run this model or method ({reason(error)}); "
                "use engine 'auto', 'pool', or 'sequential'."
            ) from error
        check_not_mutated(before, tensor_versions(trees), clients[0])
        return result


@lru_cache
def make_chunks(batches: tuple[int, ...], chunk_size: int, chunk_cost: int = 0) -> list[list[int]]:
    """Split clients into chunks of at most `chunk_size` positions with the lowest total cost.

    `batches` is the number of batches per client. A chunk costs `chunk_cost` plus, for each step of its longest
    client, its number of clients and `_STEP_OVERHEAD`.

    >>> make_chunks((1, 50, 1, 50), chunk_size=10)
    [[1, 3], [0, 2]]
    """
    chunk_size = -(-len(batches) // -(-len(batches) // chunk_size))  # even sizes for the same number of chunks
    order = np.argsort(-np.array(batches), kind="stable")
    steps = np.array(batches)[order]
    # Dynamic programming: cost[end] is the lowest cost of the first `end` clients in this order.
    cost, starts = np.zeros(len(order) + 1), np.zeros(len(order) + 1, dtype=int)
    for end in range(1, len(order) + 1):
        first = max(0, end - chunk_size)
        costs = cost[first:end] + steps[first:end] * (_STEP_OVERHEAD + end - np.arange(first, end)) + chunk_cost
        starts[end] = first + int(costs.argmin())
        cost[end] = costs.min()
    chunks, end = [], len(order)
    while end:
        chunks.append(sorted(order[starts[end] : end].tolist()))
        end = starts[end]
    return chunks[::-1]


def padding_overhead(batches: tuple[int, ...], chunk_size: int, device: torch.device) -> float:
    """Return the factor by which steps increase because clients wait for the longest client of their chunk.

    >>> padding_overhead((4, 2), chunk_size=2, device=torch.device("cpu"))
    1.3333333333333333
    """
    chunks = make_chunks(batches, chunk_size, _chunk_cost(device))
    return sum(max(batches[position] for position in chunk) * len(chunk) for chunk in chunks) / sum(batches)


def _chunk_cost(device: torch.device) -> int:
    return _CAPTURE_COST if device.type == "cuda" else 0


def select_rows(tree: Tree, positions: list[int]) -> Tree:
    """Return some rows of a stacked tree; a leaf that all clients share (stride 0) is not copied."""

    @cache  # every copy to a GPU waits for its queue
    def index(device: torch.device) -> Tensor:
        return torch.tensor(positions, dtype=torch.int64, device=device)

    def rows(leaf: Tensor) -> Tensor:
        is_shared = leaf.ndim > 0 and leaf.stride(0) == 0
        return leaf[: len(positions)] if is_shared else leaf[index(leaf.device)]

    return map_leaves(rows, tree)


def restore_order(results: Sequence[Tree], chunks: Sequence[list[int]]) -> Tree:
    """Concatenate the results of chunks in the order of the clients."""
    positions = torch.tensor([position for chunk in chunks for position in chunk])
    order = torch.argsort(positions)
    return map_leaves(cache_by_identity(lambda *leaves: torch.cat(leaves)[order.to(leaves[0].device)]), *results)
