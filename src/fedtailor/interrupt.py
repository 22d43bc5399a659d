"""Ctrl-C: once, and a run finishes its round and is saved; twice, and it leaves at once."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger("fedtailor")


class Interrupted(KeyboardInterrupt):
    """A run that was asked to stop and has been saved; its text says how to go on."""

    def __init__(self, words: str, code: int) -> None:
        super().__init__(words)
        self.code = code  # with which a command leaves: 130 after Ctrl-C, as shells have it


@contextmanager
def noting_signals() -> Iterator[Callable[[], int | None]]:
    """Inside, the first SIGINT (Ctrl-C) or SIGTERM is only noted, to be asked for; a second one acts as it did before.

    >>> with noting_signals() as noted:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     noted() == signal.SIGTERM
    True
    """
    if threading.current_thread() is not threading.main_thread():  # no other thread hears signals
        yield lambda: None
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # None: not set from Python; SIG_IGN: who ignores a signal goes on ignoring it
    before = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    noted: list[int] = []
    home = os.getpid()

    def note(number: int, frame: Any) -> None:
        if os.getpid() != home:  # a worker's, whose parent was told too
            return
        noted.append(number)
        _restore(before)
        log.warning("Finishing the round and saving; once more, and it leaves at once.")

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: noted[0] if noted else None
    finally:
        _restore(before)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
