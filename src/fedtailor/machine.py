"""What this machine and this process have: cores, torch's threads, memory."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them


def usable_cores() -> int:
    """How many cores this process may use.

    >>> usable_cores() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def total_memory(device: torch.device) -> int:
    """All of the device's memory in bytes, taken or not, so that what is made to depend on it is always the same.

    >>> total_memory(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 4 * 2**30


def keep_memory() -> None:
    """Let this process keep what it frees, up to half a GiB. Else glibc gives every large block back to the system and
    asks for it again in the next step, and new pages take longer than the numbers that are written to them."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library knows no such thing
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_MMAP_THRESHOLD, 2**28)
            mallopt(_TRIM_THRESHOLD, 2**29)


@contextmanager
def repeatable(threads: int) -> Iterator[None]:
    """So many threads inside, and convolutions that give the same bits again on a GPU."""
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
    """So many threads inside; afterwards the process has its own number again.

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
