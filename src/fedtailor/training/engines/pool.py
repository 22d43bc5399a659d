"""Train clients in several processes with one torch thread each, sequentially or in chunks (`chunk_size`).

Workers are forked, so neither the function nor the data have to be sent to them. For a function that is called again,
as in every round, they stay alive; they read the trees from shared memory. For others, they are forked for one call.
They write their results into shared memory. The calling process is one of the workers. It is the only one on systems
that cannot fork.
"""

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from fedtailor.core.batch import SharedContext
from fedtailor.core.system import available_cores, missing_fork, retain_freed_memory, torch_threads
from fedtailor.core.trees import Tree, map_leaves, take
from fedtailor.errors import FedTailorError, RunError, reason
from fedtailor.training.engines.living_workers import Call, ClientFunction, LivingWorkers, Task
from fedtailor.training.engines.processes import WorkQueue, forked_workers
from fedtailor.training.engines.sequential import Sequential, check_same_structure
from fedtailor.training.engines.shared_memory import SharedMemory
from fedtailor.training.engines.vectorized import Vectorized, make_chunks, restore_order, select_rows
from fedtailor.training.sample_index import SampleIndex

_FORK_SECONDS = 0.01  # about the cost of forking: less work than this is done in the calling process
_OPEN, _DONE, _FAILED = 0, 1, 2  # status of a client

Chunk = list[int]  # positions of clients that are trained together
Work = Callable[[Chunk], Tree]  # returns the results of a chunk
Template = tuple[int, Tree]  # a client and the structure of its result: names, shapes, and dtypes without values


class WorkerLostError(RunError):
    """A worker process was killed, or it failed with an error that cannot be reproduced."""


@dataclass(frozen=True, eq=False)
class Pool:
    """The pool engine. Each worker has one torch thread, so bits do not depend on the number of workers."""

    shared: SharedContext
    samples: SampleIndex  # positions of every client's training samples
    workers: int = field(default_factory=lambda: 1 if missing_fork() else available_cores())
    chunk_size: int | None = None  # clients that a worker trains in one batch; None: one after another
    memory: SharedMemory = field(default_factory=SharedMemory)  # for results
    templates: dict[str, Template] = field(default_factory=dict)  # of functions known to be worth forking for

    def __post_init__(self) -> None:
        if self.shared.y.device.type != "cpu":
            raise RunError("The engine 'pool' is for CPUs; on a GPU, use 'vectorized' or 'sequential'.")
        if (problem := cannot_fork()) and not missing_fork():
            fix = "hide the GPU with CUDA_VISIBLE_DEVICES='' or use 'sequential'"
            raise RunError(f"The engine 'pool' is not available, because {problem}; {fix}.")

    @cached_property
    def living(self) -> LivingWorkers:
        return LivingWorkers(self.memory)

    def close(self) -> None:
        """Kill the workers that stay alive between calls. The engine can still be used."""
        self.living.stop()

    @torch.no_grad()
    def apply(self, function: ClientFunction, round: int, clients: Sequence[int], *trees: Tree) -> Tree:
        """Call function(ctx, *trees) for every client and stack the results.

        The clients with the fewest samples run first in this process. If they take longer than forking, the workers
        share the others, the longest first.
        """
        work = self._work(function, round, clients, trees)
        waiting = self._chunks(clients)
        name = getattr(function, "__qualname__", type(function).__qualname__)
        with torch_threads(1):
            if name in self.templates and not self._is_single_process(waiting):
                try:
                    results = SharedResults.build(work, clients, self.templates[name], self.memory)
                    return self._run_workers(results, waiting, function, round, trees)
                except WorkerLostError:
                    raise
                except FedTailorError:  # the structure of results may differ from that of an earlier round
                    del self.templates[name]
            finished, seconds = self._run_first(work, clients, waiting)
            template = _make_template(clients[finished[0][0][0]], finished[0][1])
            if seconds > _FORK_SECONDS:
                self.templates[name] = template
            if not waiting:
                return restore_order([result for _, result in finished], [chunk for chunk, _ in finished])
            results = SharedResults.build(work, clients, template, self.memory)
            for chunk, result in finished:
                results.put(chunk, result)
            return self._run_workers(results, waiting, function, round, trees)

    def _work(self, function: ClientFunction, round: int, clients: Sequence[int], trees: Sequence[Tree]) -> Work:
        """Return the function that trains one chunk of clients."""
        sequential = Sequential(self.shared, self.samples)
        engine = sequential if self.chunk_size is None else Vectorized(self.shared, self.samples, self.chunk_size)

        def work(chunk: Chunk) -> Tree:
            chunk_trees = [select_rows(tree, chunk) for tree in trees]
            return engine.apply(function, round, [clients[position] for position in chunk], *chunk_trees)

        return work

    def _chunks(self, clients: Sequence[int]) -> list[Chunk]:
        """Return the chunks of clients, the shortest first."""
        sizes = self.samples.sizes[list(clients)]
        if self.chunk_size is None:
            return [[position] for position in np.argsort(sizes, kind="stable").tolist()]
        return make_chunks(tuple((-(-sizes // self.shared.batch_size)).tolist()), self.chunk_size)[::-1]

    def _run_first(
        self, work: Work, clients: Sequence[int], waiting: list[Chunk]
    ) -> tuple[list[tuple[Chunk, Tree]], float]:
        """Run waiting chunks in this process for `_FORK_SECONDS`; return their results and the time of the last one."""
        finished: list[tuple[Chunk, Tree]] = []
        started = last = now = time.thread_time()  # excludes the time in which other programs use the core
        while waiting and (not finished or self._is_single_process(waiting) or now < started + _FORK_SECONDS):
            chunk = waiting.pop(0)
            finished.append((chunk, work(chunk)))
            client, template = _make_template(clients[finished[0][0][0]], finished[0][1])
            check_same_structure(template, take(finished[-1][1], 0), client, clients[chunk[0]])
            last, now = now, time.thread_time()
        return finished, now - last

    def _run_workers(
        self,
        results: "SharedResults",
        waiting: list[Chunk],
        function: ClientFunction,
        round: int,
        trees: Sequence[Tree],
    ) -> Tree:
        """Compute the results of the waiting chunks with workers, and return all results."""
        chunks, count = waiting[::-1], min(self.workers, len(waiting)) - 1  # this process is a worker, too
        if self.living.is_repeated(function):
            call = Call(function, round, results.clients, chunks, trees, results.tree)
            results.fill(self.living.serve(count, call, self._serve))
        else:
            results.fill(results.forked_workers(chunks, count))
        return results.rows

    def _serve(self, function: ClientFunction, task: Task) -> None:
        """Take chunks of a task in a worker that stays alive."""
        retain_freed_memory(self.workers)  # between tasks, too
        trees = [self.memory.find(tree) for tree in task.trees]
        results = SharedResults(
            self._work(function, task.round, task.clients, trees),
            task.clients,
            self.memory.find(task.results),
            self.memory.text,
        )
        tickets = self.living.group.tickets
        assert tickets is not None, "workers share the tickets with the process that started them"
        results.work_in_child(WorkQueue(task.chunks, tickets), os.getppid())

    def _is_single_process(self, waiting: Sequence[Chunk]) -> bool:
        return min(self.workers, len(waiting)) <= 1


def _make_template(client: int, result: Tree) -> Template:
    return client, map_leaves(lambda leaf: torch.empty_like(leaf[0], device="meta"), result)


def cannot_fork() -> str | None:
    """Return why no process can be forked on this machine, or None if one can."""
    if (problem := missing_fork()) is None and torch.accelerator.is_available():
        return "PyTorch's autograd fails after a fork on a machine with a GPU"
    return problem


@dataclass(frozen=True, eq=False)
class SharedResults:
    """The results of one call, in memory that all worker processes share."""

    work: Work
    clients: Sequence[int]
    tree: Tree  # "rows", the results, stacked, and "status" [clients]; a chunk that fails marks its first client
    error_text: mmap.mmap  # message of a worker that failed
    example: int | None = None  # a client whose results had the structure that all must have

    @classmethod
    def build(cls, work: Work, clients: Sequence[int], template: Template, memory: SharedMemory) -> "SharedResults":
        tree = memory.allocate(len(clients), {"rows": template[1], "status": torch.empty((), dtype=torch.uint8)})
        tree["status"].fill_(_OPEN)
        memory.text[:] = bytes(len(memory.text))
        return cls(work, clients, tree, memory.text, template[0])

    @property
    def rows(self) -> Tree:
        rows: Tree = self.tree["rows"]
        return rows

    @property
    def status(self) -> Tensor:
        status: Tensor = self.tree["status"]
        return status

    def put(self, chunk: Chunk, result: Tree) -> None:
        """Store the results of a chunk."""
        example = self.clients[0] if self.example is None else self.example
        check_same_structure(take(self.rows, 0), take(result, 0), example, self.clients[chunk[0]])
        positions = torch.tensor(chunk)
        map_leaves(lambda rows, leaf: rows.index_copy_(0, positions, leaf), self.rows, result)
        self.status[positions] = _DONE

    @contextmanager
    def forked_workers(self, chunks: Sequence[Chunk], count: int) -> Iterator[WorkQueue]:
        """Fork `count` workers for this call, and yield the queue from which they take chunks."""
        queue = WorkQueue.create(chunks)
        with closing(queue), forked_workers(count, partial(self.work_in_child, queue, os.getpid())):
            yield queue

    def fill(self, workers: AbstractContextManager[WorkQueue]) -> None:
        """Compute the results of all chunks in the workers' queue, in this process and in the workers."""
        with workers as queue:
            while taken := queue.take():
                for chunk in taken:
                    self.put(chunk, self.work(chunk))
        self._check({chunk[0]: chunk for chunk in queue.tasks})

    def work_in_child(self, queue: WorkQueue, main_pid: int) -> None:
        """Take chunks from the queue in a worker."""
        while os.getppid() == main_pid and (taken := queue.take()):  # stops if the main process was killed
            for chunk in taken:
                self._work_in_child(chunk, queue)

    def _work_in_child(self, chunk: Chunk, queue: WorkQueue) -> None:
        try:
            self.put(chunk, self.work(chunk))
        except BaseException as error:
            text = reason(error, with_type=True).encode()[: len(self.error_text)]
            self.error_text[: len(text)] = text
            self.status[chunk[0]] = _FAILED
            queue.cancel()
            raise

    def _check(self, chunks: dict[int, Chunk]) -> None:
        """Raise the error of a chunk that failed or is missing; `chunks` maps first positions to chunks."""
        failed, missing = ((self.status == status).nonzero().flatten().tolist() for status in (_FAILED, _OPEN))
        if failed:
            client = self.clients[failed[0]]
            # Client functions are pure, so the error occurs again here, with a traceback that can be debugged.
            self.put(chunks[failed[0]], self.work(chunks[failed[0]]))
            text = self.error_text[:].rstrip(b"\0").decode(errors="replace")
            raise WorkerLostError(
                f"Client {client} failed in a worker process but not when run again ({text}), because memory was low "
                "or its training is not deterministic; use engine='sequential' to find out."
            )
        if missing:
            client = self.clients[missing[0]]
            raise WorkerLostError(
                f"A worker process was killed while it trained client {client}, probably for lack of memory; use fewer "
                "clients per round or engine='sequential'."
            )
