"""Checks that this machine has enough memory, made before anything is allocated."""

from dataclasses import fields, replace
from numbers import Integral

import torch

from fedtailor.core.method import Method, Setup
from fedtailor.core.system import total_memory
from fedtailor.core.trees import flatten
from fedtailor.errors import ConfigError

_HARMLESS_INTEGER = 10_000  # up to this value of an integer field, a method's state is small compared to a model


def check_memory(size: int, what: str) -> None:
    """Raise `ConfigError` if `size` bytes exceed half of this machine's memory; most data is in memory twice at times.

    >>> check_memory(10**18, "The archive")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: The archive would take 1,000,000,000.0 GB of memory; this machine allows ... GB.
    """
    limit = total_memory(torch.device("cpu")) // 2
    if size > limit:
        allowed = f"this machine allows {limit / 1e9:,.1f} GB"
        raise ConfigError(f"{what} would take {size / 1e9:,.1f} GB of memory; {allowed}.")


def fits_on_device(size: int, device: torch.device) -> bool:
    """Return whether samples of `size` bytes may be kept on a device: half of its memory is for models and batches.

    >>> fits_on_device(10**18, torch.device("cpu"))
    False
    """
    return size <= total_memory(device) // 2


def check_method_memory(method: Method, setup: Setup) -> None:
    """Raise `ConfigError` if integer fields of a method make its server state or client state too large for memory."""
    for f in fields(method):
        if isinstance(inner := getattr(method, f.name), Method):
            check_method_memory(inner, setup)
    integers = {f.name: int(value) for f in fields(method) if isinstance(value := getattr(method, f.name), Integral)}
    largest = max(integers, key=lambda name: integers[name], default="")
    if integers.get(largest, 0) <= _HARMLESS_INTEGER:
        return
    what = f"{type(method).__name__} with {largest}={integers[largest]}"
    meta_setup = replace(setup, params={name: p.to("meta") for name, p in setup.params.items()})
    try:
        states = [method.init_server(meta_setup), method.init_client(meta_setup)]
    except RuntimeError as error:
        if "overflow" in str(error):
            raise ConfigError(f"{what} needs tensors with more elements than can be counted.") from error
        return  # a user's method that reads values, which meta tensors lack: its memory is unknown
    check_memory(sum(leaf.numel() * leaf.element_size() for tree in states for leaf in flatten(tree).values()), what)
