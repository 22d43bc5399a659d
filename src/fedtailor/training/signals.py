"""Handle Ctrl-C and SIGTERM after the current work: a run finishes its round, a server stops its processes."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger("fedtailor")


class Interrupted(KeyboardInterrupt):
    """Raised after an interrupted run has been saved; the message says how to resume it."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code  # exit status of the command: 130 after Ctrl-C, as in shells


class PendingSignal(threading.Event):
    """Set when a signal was received; calling it returns the signal's number, or None."""

    number: int | None = None

    def __call__(self) -> int | None:
        return self.number


@contextmanager
def deferred_signals(only_first: bool = True) -> Iterator[PendingSignal]:
    """Defer SIGINT (Ctrl-C) and SIGTERM; with `only_first`, a second signal is handled as before.

    >>> with deferred_signals() as pending_signal:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     pending_signal() == signal.SIGTERM
    True
    """
    pending = PendingSignal()
    if threading.current_thread() is not threading.main_thread():  # other threads cannot handle signals
        yield pending
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Keep handlers that were not set from Python (None) and signals that are ignored (SIG_IGN).
    before = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    main_pid = os.getpid()

    def defer(number: int, frame: Any) -> None:
        if os.getpid() != main_pid:  # in a forked worker; the main process receives the signal too
            return
        pending.number = pending.number or number
        pending.set()
        if only_first:
            _restore(before)
            log.warning("Finishing the round and saving; interrupt again to stop immediately.")

    for number in before:
        signal.signal(number, defer)
    try:
        yield pending
    finally:
        _restore(before)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
