"""Nothing lost: a run is saved when it is time, when it is interrupted, and when it fails."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING

from fedtailor.errors import Refused
from fedtailor.interrupt import Interrupted, noting_signals
from fedtailor.rounds import Rounds
from fedtailor.run import Run

if TYPE_CHECKING:
    from fedtailor.record import RunWriter


class Keeper:
    """Watches over the rounds of a run that has a folder."""

    def __init__(self, writer: "RunWriter", loop: Rounds, run: Run) -> None:
        self._writer, self._loop, self._run = writer, loop, run
        self._stack = ExitStack()
        self._noted: Callable[[], int | None] = lambda: None

    def __enter__(self) -> "Keeper":
        self._noted = self._stack.enter_context(noting_signals())
        return self

    def after_round(self) -> None:
        """Save if it is time; if a signal came, save and leave."""
        signal, number = self._noted(), len(self._run.records)
        if signal is not None or number == self._run.experiment["rounds"] or self._writer.is_due(number):
            self._save()
        if signal is not None:
            words = f"Stopped after round {number} of {self._run.experiment['rounds']}"
            raise Interrupted(f"{words}; go on with: fedtailor resume {self._run.folder}", 128 + signal)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        # a round that failed changed nothing, so what was before it can be saved; unless its line is missing
        if isinstance(error, Exception) and self._loop.done == len(self._run.records) > 0:
            with suppress(Refused):
                self._save()

    def _save(self) -> None:
        self._writer.save(len(self._run.records), self._loop.server, self._loop.stores, {"chunk": self._loop.chunk})
