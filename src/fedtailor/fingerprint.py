"""By what a method, a model and a federation are known again when a run is resumed."""

import json
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from fedtailor.federation import Federation
from fedtailor.method import Method
from fedtailor.model import Model


def fingerprint(method: dict[str, Any], kind: type[Method], model: Model, fed: Federation) -> dict[str, str]:
    """A short mark of each: of the method's class and fields, of the network's layers (its weights are in the run's
    folder), of all samples and whose they are. Code is not looked at: a mistake in an own method may be mended."""
    own = not kind.__module__.startswith("fedtailor.")
    layers = {name: [list(value.shape), str(value.dtype)] for name, value in model.module.state_dict().items()}
    parts = [fed.x] if isinstance(fed.x, Tensor) else [part for _, part in sorted(fed.x.items())]
    numbers = [fed.mean, fed.deviation, fed.classes]
    return {
        "method": _mark([own, kind.__qualname__, method]),
        "model": _mark([repr(model.module), model.head, sorted(layers.items())]),
        "data": _mark([fed.names, numbers, *(_mark_tensors(t) for t in ([*parts, fed.y], fed.train, fed.test))]),
    }


def _mark(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=lambda odd: getattr(odd, "__qualname__", str(odd)))
    return sha256(text.encode()).hexdigest()[:16]


def _mark_tensors(tensors: Any) -> str:
    total = sha256()
    for tensor in tensors:
        total.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
