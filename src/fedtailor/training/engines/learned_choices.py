"""Remember the fastest engine for a model on this machine, so that later runs start without a benchmark.

An entry is a small file in the cache folder. Its name is a hash of what affects speed: the network, the method, the
sizes of batches and clients, the device, and versions. An entry that cannot be read or written is ignored.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from math import log2
from pathlib import Path
from typing import Any

import torch

from fedtailor.core.batch import SharedContext, as_parts
from fedtailor.core.method import Method
from fedtailor.core.system import available_cores
from fedtailor.data.download.cache import cache_folder
from fedtailor.errors import FedTailorError
from fedtailor.runs.files import write_atomic
from fedtailor.training.engines import EngineChoice
from fedtailor.training.engines.pool import cannot_fork
from fedtailor.version import VERSION

_MAX_BYTES = 10_000
_MAX_AGE = 30 * 24 * 3600.0  # seconds, after which engines are measured again
_BUSY = 2.0  # load per core above which a measurement is not kept


@dataclass(frozen=True)
class LearnedChoice:
    """The entry for one combination of model, method, data, and machine; see `describe_workload`."""

    key: str

    def get(self) -> tuple[EngineChoice, str] | None:
        """Return the engine that was the fastest, and the reason; None if there is no valid entry."""
        try:
            path = self._path()
            if path.stat().st_size > _MAX_BYTES or not 0 <= time.time() - path.stat().st_mtime < _MAX_AGE:
                return None
            entry = json.loads(path.read_text())
            choice, reason = EngineChoice(**entry["choice"]), entry["reason"]
        except (OSError, ValueError, TypeError, KeyError, FedTailorError):
            return None
        sizes = [choice.threads, *([] if choice.chunk_size is None else [choice.chunk_size])]
        if not isinstance(reason, str) or not all(type(size) is int and size > 0 for size in sizes):
            return None
        return choice, f"{reason} Measured in an earlier run."

    def put(self, choice: EngineChoice, reason: str) -> None:
        """Keep a choice, unless other programs used the machine while it was measured."""
        if hasattr(os, "getloadavg") and os.getloadavg()[0] > _BUSY * available_cores():
            return
        entry = {"choice": asdict(choice), "reason": reason}
        try:
            path = self._path()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(entry, indent=1).encode())
        except (OSError, FedTailorError):  # a read-only or full disk, or no home folder
            return

    def _path(self) -> Path:
        return cache_folder() / "engines" / f"{self.key}.json"


def describe_workload(
    method: Method,
    contexts: Sequence[SharedContext],
    batches: Sequence[int],
    rounds: int,
    threads: int,
    device: torch.device,
) -> LearnedChoice:
    """Return the entry for a run: one context per architecture, and the number of batches of each client of a round."""
    first = contexts[0]
    inputs = {name: (str(part.dtype), tuple(part.shape[1:])) for name, part in as_parts(first.x).items()}
    facts = {
        "networks": [repr(shared.model.module) for shared in contexts],
        "loss": repr(getattr(first.model.loss, "__qualname__", first.model.loss)),
        "method": _describe(method),
        "inputs": inputs,
        "batch": (first.batch_size, str(first.dtype), first.model.precision, repr(first.augmentation)),
        "clients": (len(batches), _magnitude(sum(batches) / len(batches)), _magnitude(max(batches))),
        "rounds": _magnitude(rounds),  # a benchmark for a quick run is less exact
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "machine": (platform.machine(), torch.backends.cpu.get_cpu_capability(), available_cores(), threads),
        "can_fork": cannot_fork() is None,
        "versions": (torch.__version__, VERSION),
    }
    return LearnedChoice(hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:32])


def _describe(value: Any) -> Any:
    """Return what affects the speed of a method: of a number such as a learning rate, only whether it is 0."""
    if is_dataclass(value):
        return type(value).__qualname__, [(f.name, _describe(getattr(value, f.name))) for f in fields(value)]
    return bool(value) if isinstance(value, float) else repr(value)


def _magnitude(number: float) -> int:
    """Return the logarithm of a number in half steps, so that splits with other seeds have the same."""
    return round(2 * log2(max(number, 1)))
