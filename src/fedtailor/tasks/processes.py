"""Run tasks in several processes of this machine.

Every task has a process of its own. It is forked from a server process without threads or GPU (`forkserver`), which has
imported the same modules as this process; on macOS and Windows, it is spawned.
"""

import os
import pickle
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from typing import Any

import torch

from fedtailor.core.system import available_cores, missing_fork
from fedtailor.errors import ConfigError, reason
from fedtailor.progress import ProgressDisplay
from fedtailor.tasks.child import run_child
from fedtailor.tasks.schedule import WORK, Schedule
from fedtailor.tasks.task import Outcome, Outcomes, Task
from fedtailor.training.signals import deferred_signals

_POLL_SECONDS = 0.2  # between two looks for a signal
_PICKLE_ERRORS = (pickle.PicklingError, AttributeError, TypeError)


@dataclass(frozen=True)
class Slot:
    """A place for one process at a time."""

    cores: int
    gpu: str | None  # what it sees as CUDA_VISIBLE_DEVICES; None: as this process


@dataclass(frozen=True)
class Processes:
    """Runs tasks in `count` processes at once. GPUs are given to the processes in turn."""

    count: int
    cpus_per_run: float | None = None  # None: the cores are divided
    gpus_per_run: float | None = None  # None: all processes share all GPUs
    is_this_process = False

    def slots(self) -> list[Slot]:
        """Return one slot per process, with its cores and its GPU."""
        gpus, share = visible_gpus(), self.gpus_per_run
        if share and not gpus:
            raise ConfigError("gpus_per_run needs a GPU, but there is none; leave it out.")
        count = min(self.count, len(gpus) * int(1 / share)) if share else self.count
        cores = available_cores() // count if self.cpus_per_run is None else int(self.cpus_per_run)
        hidden = [""] if share == 0 else []
        usable: Sequence[str | None] = hidden or gpus or [None]
        return [Slot(max(1, cores), usable[number % len(usable)]) for number in range(count)]

    def run(self, tasks: Sequence[Task], display: ProgressDisplay) -> Outcomes:
        schedule, free, running = Schedule(tasks, display), self.slots()[::-1], list[_Child]()
        try:
            with deferred_signals(work=WORK) as pending_signal:
                while schedule.waiting or running:
                    if pending_signal() is not None:
                        schedule.waiting.clear()
                        for child in running:
                            child.stop()
                    while schedule.waiting and free:
                        position = schedule.waiting.popleft()
                        schedule.start(position)
                        try:
                            running.append(_Child(position, tasks[position], free[-1]))
                            free.pop()
                        except _PICKLE_ERRORS as error:
                            yield schedule.end(position, Outcome(failure=_not_picklable(error)))
                    for child in _ready(running):
                        for record in child.read():
                            schedule.add_round(child.position, record)
                        if child.has_ended:
                            running.remove(child)
                            free.append(child.slot)
                            outcome = child.outcome
                            if outcome is None and pending_signal() is None:
                                outcome = schedule.lose(child.position, child.cause_of_death)
                            if outcome is not None:
                                yield schedule.end(child.position, outcome)
            if (number := pending_signal()) is not None:
                raise schedule.interrupted(number)
        finally:
            for child in running:
                child.kill()


class _Child:
    """The process of a task."""

    def __init__(self, position: int, task: Task, slot: Slot) -> None:
        self.position, self.slot = position, slot
        self.outcome: Outcome | None = None
        self.has_ended = False
        context = _context()
        environ = os.environ | ({} if slot.gpu is None else {"CUDA_VISIBLE_DEVICES": slot.gpu})
        payload = pickle.dumps(task.run)
        self.messages, sender = context.Pipe(duplex=False)
        receiver, self._control = context.Pipe(duplex=False)
        self._process = context.Process(
            target=run_child, args=(payload, sender, receiver, environ, slot.cores), name=task.label
        )
        self._process.start()
        sender.close()
        receiver.close()

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the progress that the process has sent, until it has ended or sent nothing else yet."""
        try:
            while not self.has_ended and self.messages.poll():
                message = self.messages.recv()
                if isinstance(message, Outcome):
                    self.outcome = message
                    self._end()
                else:
                    yield message
        except (EOFError, OSError):  # also the workers that its engine forked have ended
            self._end()

    def _end(self) -> None:
        self.has_ended = True
        self._process.join()
        self.messages.close()
        self._control.close()

    @property
    def cause_of_death(self) -> str:
        code = self._process.exitcode or 0
        if code >= 0:
            return f"its process ended with code {code}"
        hint = ", perhaps because memory was short" if code == -9 else ""
        return f"its process was killed by {signal.Signals(-code).name}{hint}"

    def stop(self) -> None:
        """Let the process finish its round, save a checkpoint, and end."""
        self._control.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    >>> isinstance(visible_gpus(), list)
    True
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(number) for number in range(torch.cuda.device_count())]


def _ready(running: Sequence[_Child]) -> list[_Child]:
    """Return the processes that have sent something or ended, after a short wait if there are none."""
    found = connection.wait([child.messages for child in running], timeout=_POLL_SECONDS) if running else []
    return [child for child in running if child.messages in found]


def _context() -> Any:
    if missing_fork():
        return get_context("spawn")
    context = get_context("forkserver")
    # The server imports what this process has imported, so that tasks start in milliseconds. Flower has threads.
    context.set_forkserver_preload([n for n in sys.modules if n.startswith("fedtailor.") and "deploy" not in n])
    return context


def _not_picklable(error: Exception) -> str:
    return f"It cannot be sent to another process ({reason(error)}); define classes and functions in a module."
