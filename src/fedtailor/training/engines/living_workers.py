"""Workers of a pool that stay alive between rounds: what they know, and the tasks that they get."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from fedtailor.core.trees import Tree
from fedtailor.training.engines.processes import WorkerGroup, WorkQueue
from fedtailor.training.engines.shared_memory import SharedMemory

_MAX_CALLS = 4  # functions that are remembered

ClientFunction = Callable[..., Tree]


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a function for many clients."""

    function: ClientFunction
    round: int
    clients: Sequence[int]
    chunks: Sequence[Sequence[int]]
    trees: Sequence[Tree]
    results: Tree  # in shared memory


@dataclass(frozen=True)
class Task:
    """A call as workers receive it; its trees consist of `TensorPlace`."""

    function: int  # number among those that the workers know
    round: int
    clients: Sequence[int]
    chunks: Sequence[Sequence[int]]
    trees: Sequence[Tree]
    results: Tree


@dataclass(eq=False)
class LivingWorkers:
    """Starts workers for functions that are called again, and restarts them if they do not know what a task needs."""

    memory: SharedMemory
    group: WorkerGroup = field(default_factory=WorkerGroup)
    _called: deque[ClientFunction] = field(default_factory=lambda: deque(maxlen=_MAX_CALLS))
    _functions: list[ClientFunction] = field(default_factory=list)  # that the workers know
    _blocks: set[int] = field(default_factory=set)  # of the memory, that the workers know

    def is_repeated(self, function: ClientFunction) -> bool:
        """Return whether a function was called before, and remember this call."""
        if function in self._called:
            return True
        self._called.append(function)
        return False

    @contextmanager
    def serve(self, count: int, call: Call, serve: Callable[[ClientFunction, Task], None]) -> Iterator[WorkQueue]:
        """Let `count` workers call serve(function, task), and wait for them after the body; yield the chunks."""
        trees, held = self.memory.share(call.trees)  # nothing else may use the memory until the end of the call
        if call.function not in self._functions:
            self._functions = [known for known in self._functions if known in self._called] + [call.function]
            self.group.stop()
        if len(self.group) < count or not self.memory.blocks.keys() <= self._blocks:
            functions, self._blocks = self._functions, set(self.memory.blocks)
            self.group.start(count, lambda task: serve(functions[task.function], task))
        queue = WorkQueue.create(call.chunks, self.group.tickets)
        number, results = self._functions.index(call.function), self.memory.place(call.results)
        with self.group.busy(Task(number, call.round, list(call.clients), call.chunks, trees, results)):
            yield queue
        del held

    def stop(self) -> None:
        """Kill the workers and forget all functions; the next repeated call starts new ones."""
        self.group.stop()
        self._called.clear()
        self._functions = []
