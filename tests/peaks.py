"""How much memory this process takes, at most, from a moment on."""

import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def start_peak() -> int:
    """Bytes that this process has in memory; from now on the most is counted anew, where the system can do that."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Inside, no more memory is asked for, be it used or not, and no more is used."""
    before = start_peak()
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size and peak() - before < size
    finally:
        tracemalloc.stop()
