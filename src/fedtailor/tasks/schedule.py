"""What all runners in other processes have in common: which tasks wait, how often each was lost, and their bars."""

import logging
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from fedtailor.progress import Bar, ProgressDisplay
from fedtailor.tasks.task import Outcome, Task
from fedtailor.training.signals import Interrupted

log = logging.getLogger("fedtailor")
WORK = "the current round of every run and saving"  # after Ctrl-C
MAX_ATTEMPTS = 3  # of a task whose process dies


class Schedule:
    """The state of all tasks."""

    def __init__(self, tasks: Sequence[Task], display: ProgressDisplay) -> None:
        self.tasks = tasks
        self.waiting = deque(range(len(tasks)))
        self._display, self._bars = display, dict[int, Bar]()
        self._lost, self._finished = Counter[int](), 0

    def start(self, position: int) -> None:
        """Show the bar of a task that starts; a task that starts again keeps its bar."""
        if position not in self._bars:
            task = self.tasks[position]
            self._bars[position] = self._display.start(task.label, task.rounds)

    def add_round(self, position: int, record: dict[str, Any]) -> None:
        """Show a round of a task."""
        self.start(position)
        self._display.add_round(self._bars[position], record)

    def end(self, position: int, outcome: Outcome) -> tuple[int, Outcome]:
        """Show the end of a task and return what a runner yields."""
        self.start(position)
        self._display.end(self._bars[position], outcome.failure is None)
        self._finished += 1
        return position, outcome

    def lose(self, position: int, why: str) -> Outcome | None:
        """Let a task whose process died wait for another attempt, or return its outcome after the last one."""
        self._lost[position] += 1
        label, attempts = self.tasks[position].label, self._lost[position]
        if attempts >= MAX_ATTEMPTS:
            return Outcome(failure=f"Its process died in {attempts} attempts, at last because {why}.")
        log.warning(
            "%s: %s; it starts again from its last checkpoint (attempt %d of %d).",
            label, f"{why[:1].upper()}{why[1:]}", attempts + 1, MAX_ATTEMPTS,
        )  # fmt: skip
        self.waiting.append(position)
        return None

    def interrupted(self, number: int) -> Interrupted:
        """Return the exception that ends all tasks after a signal."""
        return Interrupted(f"Stopped; {self._finished} of {len(self.tasks)} runs are finished.", 128 + number)


def progress_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a round's record that a progress display shows.

    >>> progress_of({"round": 3, "accuracy_trained": 0.5, "per_client": {"loss_trained": {}}})
    {'round': 3, 'accuracy_trained': 0.5}
    """
    return {
        name: value
        for name, value in record.items()
        if name == "round" or (name.endswith(("_trained", "_received")) and isinstance(value, float | None))
    }
