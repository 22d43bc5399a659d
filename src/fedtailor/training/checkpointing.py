"""Save checkpoints of a run: at regular intervals, when it is interrupted, and when it fails."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING

from fedtailor.runs.run import Run, resume_hint
from fedtailor.training.clients import Clients
from fedtailor.training.server import Server
from fedtailor.training.signals import Interrupted, deferred_signals

if TYPE_CHECKING:
    from fedtailor.runs.writer import RunWriter


class CheckpointManager:
    """Context manager around the rounds of a run that is saved in a folder."""

    def __init__(self, writer: "RunWriter", server: Server, clients: Clients, run: Run, defer_signals: bool) -> None:
        self._writer, self._server, self._clients, self._run = writer, server, clients, run
        self._defer_signals, self._stack = defer_signals, ExitStack()
        self._pending_signal: Callable[[], int | None] = lambda: None

    def __enter__(self) -> "CheckpointManager":
        if self._defer_signals:
            self._pending_signal = self._stack.enter_context(deferred_signals())
        return self

    def after_round(self) -> None:
        """Save a checkpoint if one is due; if a signal arrived, save one and raise `Interrupted`."""
        number, last = len(self._run.records), self._run.experiment["rounds"]
        if self._pending_signal() is not None or number == last or self._writer.is_checkpoint_due(number):
            self._save()
        if (signal := self._pending_signal()) is not None:  # also if it arrived during saving
            self._save()
            hint = resume_hint(self._run.folder, own_code="code" in self._run.info)
            raise Interrupted(f"Stopped after round {number} of {last}; {hint}", 128 + signal)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()
        # A failed round changes nothing, so the state before it can be saved, if that round has its record.
        if isinstance(error, (Exception, Interrupted)) and self._server.rounds_done == len(self._run.records) > 0:
            with suppress(Exception):  # report the original error, not this one
                self._save()

    def _save(self) -> None:
        stores, metadata = self._clients.snapshot()
        metadata = {"environment_changes": self._run.info.get("environment_changes", [])} | metadata
        self._writer.save(len(self._run.records), self._server.state, stores, metadata)
