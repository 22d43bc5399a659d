"""CPU cores, threads, and memory of this machine and process."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # constants of malloc.h


def available_cores() -> int:
    """Return the number of CPU cores that this process may use.

    >>> available_cores() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def total_memory(device: torch.device) -> int:
    """Return the total memory of a device in bytes. Free memory would make choices that depend on it irreproducible.

    >>> total_memory(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 4 * 2**30


def retain_freed_memory() -> None:
    """Let this process keep up to 512 MiB of freed memory.

    Otherwise, glibc returns each large block to the system and requests it again in the next step, and page faults
    take longer than the computation.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # other C libraries have no mallopt
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_MMAP_THRESHOLD, 2**28)
            mallopt(_TRIM_THRESHOLD, 2**29)


@contextmanager
def deterministic(threads: int) -> Iterator[None]:
    """Set the number of threads and use deterministic cuDNN algorithms inside the `with` block."""
    cudnn: Any = torch.backends.cudnn
    before = (cudnn.deterministic, cudnn.benchmark)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        with torch_threads(threads):
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch's threads inside the `with` block.

    >>> with torch_threads(1):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
