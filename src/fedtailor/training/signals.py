"""Handle Ctrl-C: the first one lets a run finish its round and save; the second one stops it immediately."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger("fedtailor")


class Interrupted(KeyboardInterrupt):
    """Raised after an interrupted run has been saved; the message says how to resume it."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code  # exit status of the command: 130 after Ctrl-C, as in shells


@contextmanager
def deferred_signals() -> Iterator[Callable[[], int | None]]:
    """Defer the first SIGINT (Ctrl-C) or SIGTERM; a second one is handled as before.

    Yields a function that returns the number of the deferred signal, or None.

    >>> with deferred_signals() as pending_signal:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     pending_signal() == signal.SIGTERM
    True
    """
    if threading.current_thread() is not threading.main_thread():  # other threads cannot handle signals
        yield lambda: None
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Keep handlers that were not set from Python (None) and signals that are ignored (SIG_IGN).
    before = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    received: list[int] = []
    main_pid = os.getpid()

    def defer(number: int, frame: Any) -> None:
        if os.getpid() != main_pid:  # in a forked worker; the main process receives the signal too
            return
        received.append(number)
        _restore(before)
        log.warning("Finishing the round and saving; interrupt again to stop immediately.")

    for number in before:
        signal.signal(number, defer)
    try:
        yield lambda: received[0] if received else None
    finally:
        _restore(before)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
