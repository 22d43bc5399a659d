"""CPU cores, threads, memory, and devices of this machine and process."""

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

_MIN_RETAINED = 2**26  # bytes
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # constants of malloc.h
_core_limit: int | None = None  # of this process, see `limit_cores`


def available_cores() -> int:
    """Return the number of CPU cores that this process may use.

    >>> available_cores() >= 1
    True
    """
    return machine_cores() if _core_limit is None else min(machine_cores(), _core_limit)


def machine_cores() -> int:
    """Return the number of CPU cores for all processes that run side by side.

    >>> machine_cores() >= available_cores()
    True
    """
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def missing_fork() -> str | None:
    """Return why processes cannot be forked on this system, or None if they can.

    >>> missing_fork() is None or sys.platform != "linux"
    True
    """
    if sys.platform == "darwin":
        return "forked processes may crash in the libraries of macOS"
    return None if hasattr(os, "fork") else f"{platform.system()} cannot fork processes"


def limit_cores(count: int) -> None:
    """Let this process use so many cores, for torch's threads and for worker processes; others need the rest."""
    global _core_limit
    _core_limit = count
    torch.set_num_threads(count)


def total_memory(device: torch.device) -> int:
    """Return the total memory of a device in bytes. Free memory would make choices that depend on it irreproducible.

    >>> total_memory(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 4 * 2**30


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work; a CPU has nothing to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def float64_on(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on Apple's GPUs (mps), which have no float64.

    >>> float64_on(torch.device("cpu"))
    torch.float64
    """
    return torch.float32 if device.type == "mps" else torch.float64


def to_float64(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the dtype of `float64_on` its device.

    >>> to_float64(torch.ones(1)).dtype
    torch.float64
    """
    return x.to(float64_on(x.device))


def reset_peak_memory(device: torch.device) -> None:
    """Start to measure the peak memory of a GPU anew; PyTorch does not measure it on other devices."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the bytes of a GPU that tensors took at most since `reset_peak_memory`, and those that PyTorch reserved.

    It is empty on a CPU and on Apple's GPUs, for which PyTorch does not measure it.

    >>> peak_memory(torch.device("cpu"))
    {}
    """
    if device.type != "cuda":
        return {}
    reserved = torch.cuda.max_memory_reserved(device)
    return {"peak_memory": torch.cuda.max_memory_allocated(device), "peak_memory_reserved": reserved}


def available_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that this process could still allocate: free memory, and its own unused reserve."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def retain_freed_memory(processes: int = 1) -> None:
    """Let this process keep up to 512 MiB of freed memory, or one of several processes its share of it.

    Otherwise, glibc returns each large block to the system and requests it again in the next step, and page faults
    take longer than the computation.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # other C libraries have no mallopt
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_MMAP_THRESHOLD, 2**28)
            mallopt(_TRIM_THRESHOLD, max(_MIN_RETAINED, 2**29 // processes))


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
