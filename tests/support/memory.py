"""Measure the peak memory of this process."""

import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def start_peak() -> int:
    """Reset the peak memory, if the system supports it, and return the current one in bytes."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Return the peak memory of this process in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@contextmanager
def assert_memory_below(size: int) -> Iterator[None]:
    """Assert that the body neither allocates nor uses more than `size` bytes of memory."""
    before = start_peak()
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size and peak() - before < size
    finally:
        tracemalloc.stop()
