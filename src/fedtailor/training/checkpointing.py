"""Save checkpoints of a run: at regular intervals, when it is interrupted, and when it fails.

A run in memory has no checkpoints, but an interruption leaves its finished rounds as well.
"""

import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fedtailor.runs.run import Run, resume_hint
from fedtailor.training.clients import Clients
from fedtailor.training.server import Server
from fedtailor.training.signals import Interrupted, deferred_signals

if TYPE_CHECKING:
    from fedtailor.runs.writer import RunWriter


class CheckpointManager:
    """Context manager around the rounds of a run; without a `writer`, it only handles interruptions."""

    def __init__(
        self, writer: "RunWriter | None", server: Server, clients: Clients, run: Run, defer_signals: bool
    ) -> None:
        self._writer, self._server, self._clients, self._run = writer, server, clients, run
        self._defer_signals, self._stack = defer_signals, ExitStack()
        self._pending_signal: Callable[[], int | None] = lambda: None

    def __enter__(self) -> "CheckpointManager":
        if self._defer_signals:
            # SIGTERM ends a run in memory immediately, because nothing would remain of it.
            options: dict[str, Any] = {} if self._writer else {"numbers": [signal.SIGINT], "work": "the round"}
            self._pending_signal = self._stack.enter_context(deferred_signals(**options))
        return self

    def after_round(self) -> None:
        """Save a checkpoint if one is due; if a signal arrived, save one and raise `Interrupted`."""
        number = len(self._run.records)
        is_due = self._writer is not None and (self._run.is_complete or self._writer.is_checkpoint_due(number))
        if is_due or self._pending_signal() is not None:
            self._save()
        if (pending := self._pending_signal()) is not None:  # also if it arrived during saving
            self._save()
            raise self._interrupted(128 + pending)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()
        if self._defer_signals and isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
            raise self._interrupted(immediately=True) from error
        # A failed round changes nothing, so the state before it can be saved, if that round has its record.
        if isinstance(error, (Exception, Interrupted)) and self._server.rounds_done == len(self._run.records) > 0:
            with suppress(Exception):  # report the original error, not this one
                self._save()

    def _interrupted(self, code: int = 130, immediately: bool = False) -> Interrupted:
        """Return the exception that ends the run; it contains the run if its state is that after a finished round."""
        run, number = self._run, len(self._run.records)
        run.server = self._server.state
        when = f"after round {number} of {run.experiment['rounds']}" if number else "before the end of round 1"
        stopped = f"Stopped {'immediately, ' if immediately else ''}{when}"
        hint = resume_hint(run.folder, own_code="code" in run.info)
        message = f"{stopped}; {hint}" if self._writer else f"{stopped}."
        return Interrupted(message, code, run if self._server.rounds_done == number > 0 else None, immediately)

    def _save(self) -> None:
        if self._writer is None:
            return
        stores, metadata = self._clients.snapshot()
        changes = {name: self._run.info.get(name, []) for name in ("environment_changes", "engine_changes")}
        metadata = {name: found for name, found in changes.items() if found or name == "environment_changes"} | metadata
        self._writer.save(len(self._run.records), self._server.state, stores, metadata)
