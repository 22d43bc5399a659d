"""Forked worker processes: shared memory for results, a work queue, and reliable cleanup."""

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

from fedtailor.core.trees import Tree, flatten, map_leaves

_MAX_TICKETS = 4096  # of two bytes each: fits into a pipe on every system


@dataclass(frozen=True, eq=False)
class SharedMemory:
    """Memory that forked processes share.

    It is reused when no tensor refers to it any more, because allocating new pages takes ten times as long as writing
    to existing ones.
    """

    unused: list[mmap.mmap] = field(default_factory=list)  # at most one

    def allocate(self, count: int, tree: Tree) -> Tree:
        """Return uninitialized memory for `count` stacked trees with the structure of `tree`."""
        sizes = {path: count * leaf.nbytes for path, leaf in flatten(tree).items()}
        ends = dict(zip(sizes, accumulate(-(-size // 64) * 64 for size in sizes.values()), strict=True))  # aligned
        memory = self._get(max([1, *ends.values()]))
        view = memoryview(memory)  # lives as long as any tensor that uses it
        weakref.finalize(view, self._release, memory).atexit = False
        buffer, starts = torch.frombuffer(view, dtype=torch.uint8), iter([0, *ends.values()])

        def place(leaf: Tensor) -> Tensor:
            start = next(starts)
            return buffer[start : start + count * leaf.nbytes].view(leaf.dtype).view(count, *leaf.shape)

        return map_leaves(place, tree)

    def _get(self, size: int) -> mmap.mmap:
        memory = self.unused.pop() if self.unused else None
        return memory if memory is not None and len(memory) >= size else mmap.mmap(-1, size)

    def _release(self, memory: mmap.mmap) -> None:
        self.unused[:] = [max([memory, *self.unused], key=len)]


@dataclass(frozen=True)
class WorkQueue:
    """A queue of tasks for several processes: each reads the number of its next task (a ticket) from a pipe."""

    tasks: Sequence[Any]
    num_tickets: int
    pipe: int

    @classmethod
    def create(cls, tasks: Sequence[Any]) -> "WorkQueue":
        """Write one ticket per task; in a very long queue, ticket i stands for tasks i, i + `num_tickets`, ..."""
        reader, writer = os.pipe()
        num_tickets = min(len(tasks), _MAX_TICKETS)
        os.write(writer, b"".join(number.to_bytes(2) for number in range(num_tickets)))
        os.close(writer)
        return cls(tasks, num_tickets, reader)

    def take(self) -> Sequence[Any]:
        """Return the tasks of the next ticket; an empty sequence if there is none."""
        ticket = os.read(self.pipe, 2)
        return self.tasks[int.from_bytes(ticket) :: self.num_tickets] if ticket else ()

    def cancel(self) -> None:
        """Remove all remaining tickets, so that no process starts another task."""
        os.read(self.pipe, 2 * _MAX_TICKETS)

    def close(self) -> None:
        os.close(self.pipe)


@contextmanager
def forked_workers(count: int, work: Callable[[], None]) -> Iterator[None]:
    """Fork `count` processes that call `work` and exit; wait for them after the body, or kill them if it fails."""
    running: list[int] = []
    try:
        # Only this process handles interrupts, once it knows all its workers; in the workers they stay blocked.
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
    with suppress(ChildProcessError):  # already reaped, if the program ignores SIGCHLD
        os.waitpid(pid, 0)


def _fork(work: Callable[[], None]) -> int:
    _flush()  # otherwise both processes would print the buffered output
    with warnings.catch_warnings():
        # Python warns that locks held by other threads stay locked in the child. Most programs have only torch's
        # threads, and a child with one torch thread needs none of them.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:  # a child must never return into its parent's program
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
