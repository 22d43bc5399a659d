"""Nothing lost: a run is saved when it is time, when it is interrupted, and when it fails."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING

from fedtailor.interrupt import Interrupted, noting_signals
from fedtailor.rounds import Rounds
from fedtailor.run import Run, go_on_with

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
        number, last = len(self._run.records), self._run.experiment["rounds"]
        if self._noted() is not None or number == last or self._writer.is_due(number):
            self._save()
        if (signal := self._noted()) is not None:  # also one that came while it was saved
            self._save()
            raise Interrupted(f"Stopped after round {number} of {last}; {go_on_with(self._run.folder)}", 128 + signal)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()
        # a round that failed changed nothing, so what was before it can be saved; unless its line is missing
        if isinstance(error, (Exception, Interrupted)) and self._loop.done == len(self._run.records) > 0:
            with suppress(Exception):  # what led here is what must be told
                self._save()

    def _save(self) -> None:
        note = {"chunk": self._loop.chunk, "continued": self._run.info.get("continued", [])}
        self._writer.save(len(self._run.records), self._loop.server, self._loop.stores, note)
