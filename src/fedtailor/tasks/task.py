"""Tasks and their outcomes, and the runner that runs them one after another in this process."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fedtailor.errors import FedTailorError, reason
from fedtailor.progress import OnRoundEnd, ProgressDisplay


@dataclass(frozen=True)
class Task:
    """One run. `run` is called with a function that it calls with the record of every round.

    A runner may call `run` in another process, and again if that process dies: a run with a folder then continues from
    its checkpoint.
    """

    label: str  # for people
    rounds: int | None
    run: Callable[[OnRoundEnd], Any]


@dataclass(frozen=True)
class Outcome:
    """What a task returned, or why it failed."""

    value: Any = None
    failure: str | None = None  # a sentence
    error: Exception | None = None  # only of tasks in this process


Outcomes = Generator[tuple[int, Outcome], None, None]  # positions of tasks with their outcomes


class Runner(Protocol):
    """Runs tasks."""

    @property
    def is_this_process(self) -> bool:
        """Whether tasks run in this process, so that they can share data and return anything."""

    def run(self, tasks: Sequence[Task], display: ProgressDisplay) -> Outcomes:
        """Yield the position and the outcome of every task when it ends; a task that fails does not stop the others.

        Raises `Interrupted` after Ctrl-C, when all tasks have saved a checkpoint. Closing the generator ends the tasks.
        """


@dataclass(frozen=True)
class InThisProcess:
    """Runs tasks one after another.

    >>> from fedtailor.progress import Silent
    >>> with ProgressDisplay(output=Silent()) as display:
    ...     [outcome.value for _, outcome in InThisProcess().run([Task("a run", 1, lambda on_round_end: 6)], display)]
    [6]
    """

    is_this_process = True

    def run(self, tasks: Sequence[Task], display: ProgressDisplay) -> Outcomes:
        for position, task in enumerate(tasks):
            try:
                with display.run(task.label, task.rounds) as on_round_end:
                    outcome = Outcome(task.run(on_round_end))
            except Exception as error:
                outcome = Outcome(failure=failure_text(error), error=error)
            yield position, outcome


def failure_text(error: Exception) -> str:
    """Return why a task failed, as a sentence.

    >>> failure_text(RuntimeError("out of order"))
    'RuntimeError: out of order.'
    """
    return f"{reason(error, with_type=not isinstance(error, FedTailorError))}."
