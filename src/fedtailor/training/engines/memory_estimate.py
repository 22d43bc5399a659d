"""How many clients fit into the memory of a GPU at once, measured before round 1."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fedtailor.core.system import available_memory, peak_memory, reset_peak_memory, synchronize
from fedtailor.core.trees import Tree, flatten

_SHARE = 0.8  # of the available memory; the rest is for evaluation and fragmentation
_UNCERTAINTY = 10  # a round that needs less than this part of the memory by a rough estimate is not measured


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a round in bytes."""

    fixed: int  # independent of the number of clients
    per_client: int  # of each client that trains at the same time
    kept: int  # of each client until the round ends: its new state, its upload, and its model

    def max_clients(self, available: int, in_round: int) -> int:
        """Return how many of the clients of a round fit into the available memory at once, at least 1.

        >>> MemoryUse(fixed=100, per_client=50, kept=10).max_clients(available=1000, in_round=30)
        8
        """
        left = int(_SHARE * available) - self.fixed - in_round * self.kept
        return max(1, left // max(1, self.per_client))


def measure_memory(train: Callable[[Sequence[int]], Tree], clients: Sequence[int], device: torch.device) -> MemoryUse:
    """Measure the memory of training one client and two clients; `train` returns their results, stacked."""
    peaks, kept = [], 0
    for count in (1, 1, 2):  # the first time includes lazy initialization
        peak, result = measure_peak(lambda count=count: train(clients[:count]), device)  # type: ignore[misc]
        peaks.append(peak)
        kept = sum(leaf.nbytes for leaf in flatten(result).values()) // count
    per_client = max(0, peaks[2] - peaks[1])
    return MemoryUse(max(0, peaks[1] - per_client), per_client, kept)


def measure_peak(run: Callable[[], Tree], device: torch.device) -> tuple[int, Tree]:
    """Return the bytes of a GPU that a function takes at most, in addition to those in use, and its result."""
    synchronize(device)
    reset_peak_memory(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    synchronize(device)
    return peak_memory(device)["peak_memory"] - before, result


def limit_clients(
    train: Callable[[Sequence[int]], Tree], clients: Sequence[int], rough_bytes: int, device: torch.device
) -> int | None:
    """Return how many of a round's clients fit on a GPU at once; None: all of them, or the device is not a GPU.

    `rough_bytes` is an estimate of the memory per client. The measurement takes three short training steps, so it is
    made only if the estimate says that the clients might take more than a tenth of the memory.
    """
    if device.type != "cuda" or len(clients) < 2:
        return None
    available = available_memory(device)
    if _UNCERTAINTY * rough_bytes * len(clients) < available:
        return None
    try:
        return measure_memory(train, clients, device).max_clients(available, len(clients))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return 1
    except Exception:  # methods and models may raise anything; round 1 raises it again
        return None
