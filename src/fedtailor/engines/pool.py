"""Clients on several processes, one torch thread each, one after another or some at once (`chunk`).

Workers are forked for every call, so that nothing is sent to them: they see function, data and trees as they stand.
What they compute goes straight into memory that all processes share. This process is one of the workers.
"""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedtailor.batch import Common
from fedtailor.engines.forking import Memory, Tickets, children
from fedtailor.engines.sequential import Sequential, check_alike
from fedtailor.engines.vectorized import Vectorized, cut, in_order, rows_of
from fedtailor.errors import Refused
from fedtailor.machine import torch_threads, usable_cores
from fedtailor.samples import Samples
from fedtailor.trees import Tree, map_leaves, take

_PATIENCE = 0.01  # seconds, about what forking costs: who tries without it for as long loses at most that once more
_OPEN, _DONE, _FAILED = 0, 1, 2  # how far a client's work is

Chunk = list[int]  # positions of clients that are run together
Example = tuple[int, Tree]  # a client and what its work gave: names, shapes and dtypes without numbers


class Lost(Refused):
    """Work that was lost with the process that did it."""


@dataclass(frozen=True, eq=False)
class Pool:
    """The pool engine. It always computes with one thread, so that bits do not depend on the number of workers."""

    common: Common
    samples: Samples  # positions of every client's training samples
    workers: int = field(default_factory=usable_cores)
    chunk: int | None = None  # clients that a worker runs at once; none: one after another
    memory: Memory = field(default_factory=Memory)  # for results
    examples: dict[str, Example] = field(default_factory=dict)  # of functions that need not be tried again

    def __post_init__(self) -> None:
        if self.common.y.device.type != "cpu":
            raise Refused("The engine 'pool' is for CPUs; on a GPU take 'vectorized' or 'sequential'.")
        if why := cannot_fork():
            raise Refused(why)

    @torch.no_grad()
    def apply(self, function: Callable[..., Tree], round: int, clients: Sequence[int], *trees: Tree) -> Tree:
        """function(local, *trees) for every client: the shortest are tried here, and what would take longer is shared
        among workers, longest first."""
        sequential = Sequential(self.common, self.samples)
        engine = sequential if self.chunk is None else Vectorized(self.common, self.samples, self.chunk)

        def work(chunk: Chunk) -> Tree:
            own = [rows_of(tree, chunk) for tree in trees]
            return engine.apply(function, round, [clients[position] for position in chunk], *own)

        waiting = self._chunks(clients)
        name = getattr(function, "__qualname__", type(function).__qualname__)
        with torch_threads(1):
            if name in self.examples and not self._alone(waiting):
                try:
                    return self._share(Board.build(work, clients, self.examples[name], self.memory), waiting)
                except Lost:
                    raise
                except Refused:  # perhaps only because results have other names than in the round before
                    del self.examples[name]
            known, seconds = self._try(work, clients, waiting)
            example = _example(clients[known[0][0][0]], known[0][1])
            if seconds > _PATIENCE:
                self.examples[name] = example
            if not waiting:
                return in_order([result for _, result in known], [chunk for chunk, _ in known])
            board = Board.build(work, clients, example, self.memory)
            for chunk, result in known:
                board.put(chunk, result)
            return self._share(board, waiting)

    def _chunks(self, clients: Sequence[int]) -> list[Chunk]:
        """Positions of the clients that are run together, the shortest first."""
        sizes = self.samples.sizes[list(clients)]
        if self.chunk is None:
            return [[position] for position in np.argsort(sizes, kind="stable").tolist()]
        return cut(tuple((-(-sizes // self.common.batch_size)).tolist()), self.chunk)[::-1]

    def _try(
        self, work: Callable[[Chunk], Tree], clients: Sequence[int], waiting: list[Chunk]
    ) -> tuple[list[tuple[Chunk, Tree]], float]:
        """The results of the first that wait, as many as patience allows, and how long the last of them took."""
        known: list[tuple[Chunk, Tree]] = []
        began = last = now = time.thread_time()  # not of the clock, which runs on while others use the core
        while waiting and (not known or self._alone(waiting) or now < began + _PATIENCE):
            chunk = waiting.pop(0)
            known.append((chunk, work(chunk)))
            client, like = _example(clients[known[0][0][0]], known[0][1])
            check_alike(like, take(known[-1][1], 0), client, clients[chunk[0]])
            last, now = now, time.thread_time()
        return known, now - last

    def _share(self, board: "Board", waiting: list[Chunk]) -> Tree:
        board.fill(waiting[::-1], min(self.workers, len(waiting)))
        return board.rows

    def _alone(self, waiting: Sequence[Chunk]) -> bool:
        return min(self.workers, len(waiting)) <= 1


def _example(client: int, result: Tree) -> Example:
    return client, map_leaves(lambda leaf: torch.empty_like(leaf[0], device="meta"), result)


def cannot_fork() -> str | None:
    """Why there can be no workers here; None where there can."""
    if not hasattr(os, "fork"):
        return "The engine 'pool' needs os.fork, which is not to be had here; take 'vectorized' instead."
    if torch.accelerator.is_available():  # whose autograd threads a forked process would lack
        what = "The engine 'pool' cannot train beside a GPU, for PyTorch's autograd does not survive a fork there"
        return f"{what}; hide the GPU with CUDA_VISIBLE_DEVICES='' or take 'sequential'."
    return None


@dataclass(frozen=True, eq=False)
class Board:
    """What processes share while they work through the clients of a call."""

    work: Callable[[Chunk], Tree]  # of the clients at some positions
    clients: Sequence[int]
    example: Example  # all results must be like it
    rows: Tree  # the results, stacked
    state: Tensor  # [clients], how far each is; a chunk's is that of its first
    words: mmap.mmap  # what a worker that failed says

    @classmethod
    def build(cls, work: Callable[[Chunk], Tree], clients: Sequence[int], example: Example, memory: Memory) -> "Board":
        state = torch.frombuffer(mmap.mmap(-1, len(clients)), dtype=torch.uint8)
        rows = memory.room(len(clients), example[1])
        return cls(work, clients, example, rows, state, mmap.mmap(-1, 1024))

    def put(self, chunk: Chunk, result: Tree) -> None:
        client, like = self.example
        check_alike(like, take(result, 0), client, self.clients[chunk[0]])
        where = torch.tensor(chunk)
        map_leaves(lambda rows, leaf: rows.index_copy_(0, where, leaf), self.rows, result)
        self.state[where] = _DONE

    def fill(self, queue: Sequence[Chunk], workers: int) -> None:
        """Work through a queue with so many processes, this one among them."""
        tickets, home = Tickets.issue(queue), os.getpid()

        def work() -> None:
            while os.getppid() == home and (chunks := tickets.take()):  # an orphan stops
                for chunk in chunks:
                    self._attempt(chunk, tickets)

        with closing(tickets), children(workers - 1, work):
            while chunks := tickets.take():
                for chunk in chunks:
                    self.put(chunk, self.work(chunk))
        self._check({chunk[0]: chunk for chunk in queue})

    def _attempt(self, chunk: Chunk, tickets: Tickets) -> None:
        try:
            self.put(chunk, self.work(chunk))
        except BaseException as error:
            words = f"{type(error).__name__}: {error}".encode()[: len(self.words)]
            self.words[: len(words)] = words
            self.state[chunk[0]] = _FAILED
            tickets.void()
            raise

    def _check(self, chunks: dict[int, Chunk]) -> None:
        """That all is done; else say why not. `chunks` are known by their first positions."""
        failed, left = ((self.state == state).nonzero().flatten().tolist() for state in (_FAILED, _OPEN))
        if failed:
            client = self.clients[failed[0]]
            # a client's work is a pure function: done again it fails alike, here where it can be debugged
            self.put(chunks[failed[0]], self.work(chunks[failed[0]]))
            words = self.words[:].rstrip(b"\0").decode(errors="replace").splitlines()[0].rstrip(".")
            raise Lost(
                f"Client {client}'s work failed on a worker but not when tried again ({words}), for want of memory or "
                "because it is not a pure function; engine='sequential' tells more."
            )
        if left:
            client = self.clients[left[0]]
            raise Lost(
                f"A worker was killed while client {client} was in work, most likely for want of memory; take fewer "
                "clients a round or engine='sequential'."
            )
