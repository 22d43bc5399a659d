"""Forked processes: memory that they share, tickets for what to do next, and an end to them whatever happens."""

import mmap
import os
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fedtailor.trees import Tree, flatten, map_leaves

_MOST_TICKETS = 4096  # of two bytes: fits into a pipe on every system


@dataclass(frozen=True, eq=False)
class Memory:
    """Memory that stays the same in forked processes. It is used again once nothing refers to what lay in it, for
    getting new pages takes ten times as long as writing to them."""

    spare: list[mmap.mmap] = field(default_factory=list)  # at most one

    def room(self, count: int, tree: Tree) -> Tree:
        """Room for so many trees like this one, stacked."""
        sizes = {path: count * leaf.nbytes for path, leaf in flatten(tree).items()}
        ends = dict(zip(sizes, accumulate(-(-size // 64) * 64 for size in sizes.values()), strict=True))  # aligned
        memory = self._get(max([1, *ends.values()]))
        lent = memoryview(memory)  # lives as long as any tensor in it
        weakref.finalize(lent, self._take_back, memory).atexit = False
        whole, starts = torch.frombuffer(lent, dtype=torch.uint8), iter([0, *ends.values()])

        def place(leaf: Tensor) -> Tensor:
            start = next(starts)
            return whole[start : start + count * leaf.nbytes].view(leaf.dtype).view(count, *leaf.shape)

        return map_leaves(place, tree)

    def _get(self, size: int) -> mmap.mmap:
        spare = self.spare.pop() if self.spare else None
        return spare if spare is not None and len(spare) >= size else mmap.mmap(-1, size)

    def _take_back(self, memory: mmap.mmap) -> None:
        self.spare[:] = [max([memory, *self.spare], key=len)]


@dataclass(frozen=True)
class Tickets:
    """Who does what next: a pipe from which every process takes the next ticket until there is none."""

    queue: Sequence[Any]
    count: int
    pipe: int

    @classmethod
    def issue(cls, queue: Sequence[Any]) -> "Tickets":
        """One ticket a task; in a very long queue, one for every so-many-th, which keeps long and short mixed."""
        out, into = os.pipe()
        count = min(len(queue), _MOST_TICKETS)
        os.write(into, b"".join(number.to_bytes(2) for number in range(count)))
        os.close(into)
        return cls(queue, count, out)

    def take(self) -> Sequence[Any]:
        ticket = os.read(self.pipe, 2)
        return self.queue[int.from_bytes(ticket) :: self.count] if ticket else ()

    def void(self) -> None:
        """Nobody begins anything more."""
        os.read(self.pipe, 2 * _MOST_TICKETS)

    def close(self) -> None:
        os.close(self.pipe)


@contextmanager
def children(count: int, work: Callable[[], None]) -> Iterator[None]:
    """So many forked processes that do some work and end: waited for after the body, killed where that fails."""
    running: list[int] = []
    try:
        # an interrupt is for this process, once it knows all its children; they keep it blocked
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(count):
                running.append(_fork(work))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield
        while running:
            _wait(running[-1])
            running.pop()
    finally:
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _wait(pid)


def _wait(pid: int) -> None:
    with suppress(ChildProcessError):  # already gone, where the program ignores SIGCHLD
        os.waitpid(pid, 0)


def _fork(work: Callable[[], None]) -> int:
    _flush()  # else both processes would print what waits
    with warnings.catch_warnings():
        # Python warns that locks of other threads stay locked in the child; torch's own threads are all there are in
        # most programs, and with one thread the child needs none of them
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:  # whatever happened: a child never returns into its parent's program
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
