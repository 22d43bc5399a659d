"""Run tasks on a Ray cluster: one that exists, or one of this machine that ends with the last task.

Ray's serialization moves code and settings between the processes of one cluster; nothing else passes through it.
"""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import PicklingError
from typing import Any

from fedtailor.core.system import available_cores, limit_cores
from fedtailor.errors import ConfigError, reason
from fedtailor.progress import ProgressDisplay
from fedtailor.tasks.schedule import WORK, Schedule, progress_of
from fedtailor.tasks.task import Outcome, Outcomes, Task, failure_text
from fedtailor.training.ray_clients.cluster import connect, nodes
from fedtailor.training.signals import deferred_signals

try:
    import ray
    from ray.exceptions import RayError, TaskCancelledError, WorkerCrashedError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as missing:
    raise ConfigError("Runs on a cluster require Ray. Install it with: pip install 'fedtailor[ray]'.") from missing

log = logging.getLogger("fedtailor")
_POLL_SECONDS = 0.5  # between two looks for progress and signals
_OBJECT_STORE_BYTES = 200 * 2**20  # of a local cluster; tasks exchange little, because runs are in folders


@dataclass(frozen=True)
class RayCluster:
    """Runs tasks as Ray schedules them, each with its resources."""

    address: str
    cpus_per_run: float
    gpus_per_run: float | None  # None: one GPU if the cluster has any
    is_this_process = False

    def run(self, tasks: Sequence[Task], display: ProgressDisplay) -> Outcomes:
        with _connected(self.address), deferred_signals(work=WORK) as pending_signal:
            yield from _Job(self, Schedule(tasks, display)).run(pending_signal)


class _Job:
    """The tasks of one call on a connected cluster."""

    def __init__(self, cluster: RayCluster, schedule: Schedule) -> None:
        gpus = cluster.gpus_per_run
        gpus = float("GPU" in ray.cluster_resources()) if gpus is None else gpus
        _check_resources(cluster, gpus)
        self._schedule, self._running = schedule, dict[Any, int]()  # reference of a started task -> its position
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)  # ends with this one
        board: Any = ray.remote(_Board)
        self._board = board.options(num_cpus=0, scheduling_strategy=here).remote()
        self._execute: Any = ray.remote(num_cpus=cluster.cpus_per_run, num_gpus=gpus, max_retries=0)(_execute)
        self._cores = max(1, int(cluster.cpus_per_run))

    def run(self, pending_signal: Any) -> Outcomes:
        schedule, stopping = self._schedule, False
        while schedule.waiting or self._running:
            if pending_signal() is not None and not stopping:
                stopping = True
                schedule.waiting.clear()
                for reference in self._running:
                    ray.cancel(reference)  # as Ctrl-C in the task's process
            while schedule.waiting:
                position = schedule.waiting.popleft()
                try:
                    self._submit(position)
                except (PicklingError, TypeError, AttributeError) as error:
                    yield schedule.end(position, Outcome(failure=f"It cannot be sent to Ray: {reason(error)}."))
            ended, _ = ray.wait(list(self._running), timeout=_POLL_SECONDS) if self._running else ([], [])
            self._show_progress()
            for reference in ended:
                position = self._running.pop(reference)
                outcome = self._outcome(reference, position, stopping)
                if outcome is not None:
                    yield schedule.end(position, outcome)
        if (number := pending_signal()) is not None:
            raise schedule.interrupted(number)

    def _submit(self, position: int) -> None:
        task = ray.cloudpickle.dumps(self._schedule.tasks[position].run)
        reference = self._execute.remote(task, position, self._board, str(Path.cwd()), sys.path, self._cores)
        self._running[reference] = position

    def _outcome(self, reference: Any, position: int, stopping: bool) -> Outcome | None:
        """Return the outcome of a task; None if it was stopped, or if it starts again because its process died."""
        try:
            found: Outcome = ray.get(reference)
            return found
        except TaskCancelledError:
            return None
        except RayError as error:
            return None if stopping else self._schedule.lose(position, _cause(error))

    def _show_progress(self) -> None:
        with suppress(RayError):  # without its board, there is no progress to show
            for position, record in ray.get(self._board.take.remote(), timeout=5):
                if record is None:
                    self._schedule.start(position)
                else:
                    self._schedule.add_round(position, record)


class _Board:
    """An actor to which tasks send their progress, because Ray has no channel from a task to the driver."""

    def __init__(self) -> None:
        self._news = list[tuple[int, dict[str, Any] | None]]()

    def add(self, position: int, record: dict[str, Any] | None) -> None:
        self._news.append((position, record))

    def take(self) -> list[tuple[int, dict[str, Any] | None]]:
        news, self._news = self._news, []
        return news


def _execute(task: bytes, position: int, board: Any, folder: str, path: Sequence[str], cores: int) -> Outcome:
    """Run a task in a process of the cluster; stopping it raises `KeyboardInterrupt` here, after a checkpoint."""
    with suppress(OSError):  # a node may not have the folder; then only relative paths differ
        os.chdir(folder)
    sys.path += [entry for entry in path if entry not in sys.path]  # for the modules of the user
    limit_cores(cores)
    board.add.remote(position, None)
    try:
        run = ray.cloudpickle.loads(task)
        return Outcome(run(lambda record: board.add.remote(position, progress_of(record))))
    except Exception as error:
        return Outcome(failure=failure_text(error))


def _check_resources(cluster: RayCluster, gpus: float) -> None:
    """Raise `ConfigError`, or warn if machines may join, if no machine has the resources of one run."""
    machines = [(node.cpus, node.gpus) for node in nodes()]
    if any(cores >= cluster.cpus_per_run and own >= gpus for cores, own in machines):
        return
    problem = f"No machine of the Ray cluster is enough for a run (cores: {cluster.cpus_per_run:g}, GPUs: {gpus:g})"
    if cluster.address == "local":
        raise ConfigError(f"{problem}; reduce cpus_per_run or gpus_per_run.")
    log.warning("%s; the runs wait until one joins it.", problem)


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Connect to a cluster, or start one on this machine; a cluster that the program is connected to is used."""
    if ray.is_initialized():
        yield
        return
    connect(address, num_cpus=available_cores(), object_store_memory=_OBJECT_STORE_BYTES)
    try:
        yield
    finally:
        ray.shutdown()


def _cause(error: RayError) -> str:
    killed = isinstance(error, WorkerCrashedError)
    return "its process was killed, perhaps because memory was short" if killed else reason(error, with_type=True)
