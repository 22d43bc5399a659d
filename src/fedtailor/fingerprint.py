"""By what a method, a model and a federation are known again when a run is resumed."""

import json
from functools import partial
from hashlib import sha256
from numbers import Real
from types import MappingProxyType
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
    state = model.module.state_dict()
    layers = {name: [list(value.shape), str(value.dtype)] for name, value in state.items()}
    constants = [buffer for name, buffer in model.module.named_buffers() if name not in state]  # in no state_dict
    parts = [fed.x] if isinstance(fed.x, Tensor) else [part for _, part in sorted(fed.x.items())]
    numbers = [fed.mean, fed.deviation, fed.classes]
    return {
        "method": _mark([own, kind.__qualname__, method]),
        "model": _mark([repr(model.module), model.head, sorted(layers.items()), _mark_tensors(constants)]),
        "data": _mark([fed.names, numbers, *(_mark_tensors(t) for t in ([*parts, fed.y], fed.train, fed.test))]),
    }


def _mark(value: Any) -> str:
    return sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """The same in another process, and the same as it reads from a file: 1 is 1.0 there, a function has a name."""
    if isinstance(value, (dict, MappingProxyType)):
        return {str(name): _plain(part) for name, part in value.items() if part is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(part) for part in value), key=str)
    if isinstance(value, partial):
        return _plain([value.func, value.args, value.keywords])
    if isinstance(value, Tensor):
        return _mark_tensors([value.detach().cpu()])
    if isinstance(value, (str, bool)) or value is None:
        return value
    if isinstance(value, Real):
        return float(value)
    text = getattr(value, "__qualname__", None) or str(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _mark_tensors(tensors: Any) -> str:
    total = sha256()
    for tensor in tensors:
        total.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
