"""Hashes of method, model, and data, by which a resumed run checks that it continues with the same ones."""

import json
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from numbers import Real
from types import MappingProxyType
from typing import Any

from torch import Tensor

from fedtailor.core.client_models import AnyModel
from fedtailor.core.code_reference import is_built_in, is_reference, short_name
from fedtailor.core.losses import is_classification_loss
from fedtailor.core.method import Method
from fedtailor.core.model import Model
from fedtailor.core.tensor_hash import hash_tensors
from fedtailor.data.federation import Federation


def fingerprint(
    method: dict[str, Any], kind: type[Method], model: AnyModel, fed: Federation, held_out: Federation | None = None
) -> dict[str, str]:
    """Return a short hash each of method, model, and data.

    The method's hash covers its class and fields, the model's its layers (the weights are in the run folder) and what
    the user passed to `ft.wrap`, and the data's all samples, their clients, and which clients are held out. Code and
    names of modules are not covered, so a bug in a user's method may be fixed before resuming, and the method may be
    moved to another file.
    """
    is_custom = not is_built_in(kind)
    return {
        "method": _hash([is_custom, kind.__qualname__, _without_modules(method)]),
        "model": model_fingerprint(model),
        "data": data_fingerprint(fed, held_out),
    }


def model_fingerprint(model: AnyModel) -> str:
    """Return a short hash of a network, or of several networks and the clients that have them."""
    if not isinstance(model, Model):
        return _hash([*map(model_fingerprint, model.models), list(model.of_client)])
    state = model.module.state_dict()
    layers = {name: [list(value.shape), str(value.dtype)] for name, value in state.items()}
    constants = [buffer for name, buffer in model.module.named_buffers() if name not in state]  # in no state_dict
    own = _own_choices(model)
    return _hash([repr(model.module), model.head, sorted(layers.items()), hash_tensors(constants), *own])


def data_fingerprint(fed: Federation, held_out: Federation | None = None) -> str:
    """Return a short hash of all samples, their clients, and the clients that are held out."""
    preprocessing = [fed.mean, fed.std, fed.classes]
    split = [fed.sample_hash(), hash_tensors(fed.train), hash_tensors(fed.test)]
    extra: list[Any] = [] if fed.common_test is None else ["common test set", hash_tensors([fed.common_test])]
    extra += ["survival"] if fed.survival else []
    if held_out is not None:
        extra += ["held out", held_out.names, *(hash_tensors(own) for own in (held_out.train, held_out.test))]
    return _hash([fed.names, preprocessing, *split, *extra])


def _without_modules(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a method in which names have no module."""
    plain = {name: _without_modules(part) if isinstance(part, Mapping) else part for name, part in method.items()}
    name = plain.get("name")
    return plain | {"name": short_name(name).lower()} if isinstance(name, str) and is_reference(name) else plain


def _own_choices(model: Model) -> list[Any]:
    """Return what a user passed to `ft.wrap`: loss, names of metrics, and parts; empty for the defaults."""
    if not is_reference(str(model.description.get("name", ""))):
        return []
    loss = {} if is_classification_loss(model.loss) else {"loss": model.loss}
    metrics = {} if model.metrics_are_default else {"metrics": list(model.metrics)}
    chosen = loss | metrics | ({"parts": dict(model.parts)} if model.parts else {})
    return [chosen] if chosen else []


def _hash(value: Any) -> str:
    return sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Return a JSON value that is the same in other processes and after reading from a file, where 1 may be 1.0."""
    if isinstance(value, (dict, MappingProxyType)):
        return {str(name): _plain(part) for name, part in value.items() if part is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(part) for part in value), key=str)
    if isinstance(value, partial):
        return _plain([value.func, value.args, value.keywords])
    if isinstance(value, Tensor):
        return hash_tensors([value.detach().cpu()])
    if isinstance(value, (str, bool)) or value is None:
        return value
    if isinstance(value, Real):
        return float(value)
    text = getattr(value, "__qualname__", None) or str(value)
    return type(value).__qualname__ if " at 0x" in text else text
