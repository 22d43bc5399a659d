"""A log of what strangers do, which they cannot fill."""

import logging
from collections import Counter
from collections.abc import Callable

_MAX_EVENTS = 100  # different ones that are logged between two calls of `flush`


class EventLog:
    """Logs an event when it first happens, and at the next `flush` how often it was repeated.

    >>> events = EventLog(print)
    >>> for _ in range(3): events.add("192.0.2.1", "opens too many connections")
    192.0.2.1: opens too many connections.
    >>> events.flush()
    192.0.2.1: opens too many connections (3 times).
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._counts: Counter[tuple[str, str]] = Counter()
        self._omitted = 0

    def add(self, address: str, event: str) -> None:
        """Record an event; `event` is a sentence, or its end if the address is the subject, without a period."""
        key = (address, event)
        if key not in self._counts and len(self._counts) >= _MAX_EVENTS:
            self._omitted += 1
            return
        self._counts[key] += 1
        if self._counts[key] == 1:
            self._write(f"{address}: {event}.")

    def flush(self) -> None:
        """Write how often events were repeated since the last flush, and start to count anew."""
        for (address, event), count in self._counts.items():
            if count > 1:
                self._write(f"{address}: {event} ({count:,} times).")
        if self._omitted:
            self._write(f"Other addresses: {self._omitted:,} more events.")
        self._counts.clear()
        self._omitted = 0


def proxy_events() -> EventLog:
    """Return a log of events that writes to the reverse proxy's log.

    >>> proxy_events().flush()
    """
    return EventLog(logging.getLogger("fedtailor.proxy").warning)
