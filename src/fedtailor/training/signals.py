"""Handle Ctrl-C and SIGTERM after the current work: a run finishes its round, a server stops its processes."""

import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fedtailor.runs.run import Run

log = logging.getLogger("fedtailor")


class Interrupted(KeyboardInterrupt):
    """Raised when a run is interrupted. The message says how to resume it if it is saved in a folder.

    `run` is the run with all finished rounds, or None if no round is finished. `code` is the exit status of the
    command: 130 after Ctrl-C, as in shells. `immediately` is true if the last round was not finished, because the run
    was interrupted twice.

    >>> str(Interrupted("Stopped after round 3 of 10."))
    'Stopped after round 3 of 10.'
    """

    def __init__(self, message: str, code: int = 130, run: Run | None = None, immediately: bool = False) -> None:
        super().__init__(message)
        self.code, self.run, self.immediately = code, run, immediately


class PendingSignal(threading.Event):
    """Set when a signal was received; calling it returns the signal's number, or None."""

    number: int | None = None

    def __call__(self) -> int | None:
        return self.number


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_deferred = threading.Event()  # set when this process has deferred a signal for the first time


def was_signal_deferred() -> bool:
    """Return whether this process has ever received a signal that takes effect after the current work.

    >>> with deferred_signals():
    ...     signal.raise_signal(signal.SIGTERM)
    >>> was_signal_deferred()
    True
    """
    return _deferred.is_set()


@contextmanager
def deferred_signals(
    only_first: bool = True, numbers: Sequence[signal.Signals] = _SIGNALS, work: str = "the round and saving"
) -> Iterator[PendingSignal]:
    """Defer SIGINT (Ctrl-C) and SIGTERM; with `only_first`, a second signal is handled as before, and a message names
    the `work` that continues.

    >>> with deferred_signals() as pending_signal:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     pending_signal() == signal.SIGTERM
    True
    """
    pending = PendingSignal()
    if threading.current_thread() is not threading.main_thread():  # other threads cannot handle signals
        yield pending
        return
    before = {number: signal.getsignal(number) for number in numbers}
    # Keep handlers that were not set from Python (None) and signals that are ignored (SIG_IGN).
    before = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    main_pid = os.getpid()

    def defer(number: int, frame: Any) -> None:
        if os.getpid() != main_pid:  # in a forked worker; the main process receives the signal too
            return
        pending.number = pending.number or number
        pending.set()
        _deferred.set()
        if only_first:
            _restore(before)
            level = logging.WARNING if number == signal.SIGINT else logging.INFO  # programs send SIGTERM, people SIGINT
            log.log(level, "Finishing %s; interrupt again to stop immediately.", work)

    for number in before:
        signal.signal(number, defer)
    try:
        yield pending
    finally:
        _restore(before)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
