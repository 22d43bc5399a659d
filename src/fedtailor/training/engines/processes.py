"""Forked worker processes: a work queue, workers for one call, workers that stay alive, and reliable cleanup."""

import os
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

_ORPHAN_SECONDS = 5.0  # how often an idle worker checks whether the main process was killed
_MAX_TICKETS = 4096  # of two bytes each: fits into a pipe on every system


class Tickets:
    """Numbers in a pipe, which several processes take turns to read."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.close = weakref.finalize(self, _close_files, self._reader, self._writer)
        self.close.atexit = False

    def put(self, count: int) -> None:
        """Replace all numbers by 0, ..., count − 1."""
        self.clear()
        os.write(self._writer, b"".join(number.to_bytes(2) for number in range(count)))

    def take(self) -> int | None:
        """Return the next number; None if there is none."""
        try:
            return int.from_bytes(os.read(self._reader, 2))
        except BlockingIOError:
            return None

    def clear(self) -> None:
        """Remove all remaining numbers."""
        with suppress(BlockingIOError):
            os.read(self._reader, 2 * _MAX_TICKETS)


def _close_files(*files: int) -> None:
    for file in files:
        os.close(file)


@dataclass(frozen=True)
class WorkQueue:
    """A queue of tasks for several processes: each takes the number of its next task (a ticket) from a pipe."""

    tasks: Sequence[Any]
    tickets: Tickets

    @classmethod
    def create(cls, tasks: Sequence[Any], tickets: Tickets | None = None) -> "WorkQueue":
        """Put one ticket per task into the pipe, before the processes start to take them."""
        queue = cls(tasks, tickets or Tickets())
        queue.tickets.put(queue._num_tickets)
        return queue

    @property
    def _num_tickets(self) -> int:
        """In a very long queue, ticket i stands for the tasks i, i + `_num_tickets`, ..."""
        return min(len(self.tasks), _MAX_TICKETS)

    def take(self) -> Sequence[Any]:
        """Return the tasks of the next ticket; an empty sequence if there is none."""
        ticket = self.tickets.take()
        return () if ticket is None else self.tasks[ticket :: self._num_tickets]

    def cancel(self) -> None:
        """Remove all remaining tickets, so that no process starts another task."""
        self.tickets.clear()

    def close(self) -> None:
        self.tickets.close()


class WorkerGroup:
    """Forked processes that stay alive and serve one task after another, until they are closed.

    They know what existed when they were forked. A worker that was killed is noticed at the end of a task.
    """

    def __init__(self) -> None:
        self.tickets: Tickets | None = None  # that the workers share with this process
        self._connections: list[Connection] = []
        self._kill: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        return len(self._connections)

    def start(self, count: int, serve: Callable[[Any], None]) -> None:
        """Replace the workers by `count` new ones that call serve(task) for every task."""
        self.stop()
        self.tickets = Tickets()
        pairs = [Pipe() for _ in range(count)]
        pids: list[int] = []
        ours = [own for own, _ in pairs]
        self._kill = weakref.finalize(self, _kill_group, os.getpid(), pids, ours)
        with _interrupts_blocked():
            for number, (_, theirs) in enumerate(pairs):
                others = [*ours, *(end for place, (_, end) in enumerate(pairs) if place > number)]
                pids.append(_fork(partial(_serve_tasks, os.getpid(), theirs, others, serve)))
                theirs.close()
        self._connections = ours

    def stop(self) -> None:
        """Kill the workers; `start` makes new ones."""
        self._kill()
        self._connections = []
        if self.tickets is not None:
            self.tickets.close()
            self.tickets = None

    @contextmanager
    def busy(self, task: Any) -> Iterator[None]:
        """Let all workers serve a task, and wait for them after the body; if it fails, or one is lost, kill all."""
        try:
            for connection in self._connections:
                with suppress(BrokenPipeError, ConnectionResetError):  # lost since its last task; it takes no ticket
                    connection.send(task)
            yield
            lost = [connection for connection in self._connections if not _is_finished(connection)]
            if lost:
                self.stop()  # the caller sees what is missing
        except BaseException:
            self.stop()
            raise


def _serve_tasks(main_pid: int, own: Connection, others: list[Connection], serve: Callable[[Any], None]) -> None:
    """Serve tasks in a worker until the main process closes the connection, or was killed."""
    for connection in others:  # otherwise this process would keep the connections of others open
        connection.close()
    with suppress(EOFError, OSError):
        while os.getppid() == main_pid:
            if own.poll(_ORPHAN_SECONDS):
                serve(own.recv())
                _flush()
                own.send(None)


def _is_finished(connection: Connection) -> bool:
    """Wait until a worker has finished its task, and return False if it was lost."""
    try:
        connection.recv()
    except (EOFError, ConnectionResetError):
        return False
    return True


def _kill_group(main_pid: int, pids: list[int], connections: list[Connection]) -> None:
    for connection in connections:
        connection.close()
    if os.getpid() == main_pid:  # not in a process that was forked from it
        for pid in pids:
            _kill(pid)


@contextmanager
def forked_workers(count: int, work: Callable[[], None]) -> Iterator[None]:
    """Fork `count` processes that call `work` and exit; wait for them after the body, or kill them if it fails."""
    running: list[int] = []
    try:
        with _interrupts_blocked():
            for _ in range(count):
                running.append(_fork(work))
        yield
        while running:
            _wait(running[-1])
            running.pop()
    finally:
        for pid in running:
            _kill(pid)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Only this process handles interrupts, once it knows all its workers; in the workers they stay blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(pid: int) -> None:
    with suppress(ChildProcessError):  # already reaped, so the number may belong to another process
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


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
