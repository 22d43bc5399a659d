"""Whether this machine has memory for what is asked, found out before any of it is taken."""

from dataclasses import fields, replace
from numbers import Integral

import torch

from fedtailor.errors import Refused
from fedtailor.machine import total_memory
from fedtailor.method import Method, Setup
from fedtailor.trees import flatten

_USUAL = 10_000  # of a method's whole numbers: up to it, what it makes of them is small beside a model


def check_room(size: int, what: str) -> None:
    """Refuse more bytes than half of this machine's memory, for nearly everything is held twice at some time.

    >>> check_room(10**18, "The archive")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.Refused: The archive would fill 1,000,000,000.0 GB of memory, and this machine has room for ...
    """
    room = total_memory(torch.device("cpu")) // 2
    if size > room:
        here = f"this machine has room for {room / 1e9:,.1f}"
        raise Refused(f"{what} would fill {size / 1e9:,.1f} GB of memory, and {here}.")


def check_method(method: Method, setup: Setup) -> None:
    """Refuse a method with numbers so large that its server or a client's state would not fit."""
    for f in fields(method):
        if isinstance(inner := getattr(method, f.name), Method):
            check_method(inner, setup)
    whole = {f.name: int(value) for f in fields(method) if isinstance(value := getattr(method, f.name), Integral)}
    largest = max(whole, key=lambda name: whole[name], default="")
    if whole.get(largest, 0) <= _USUAL:
        return
    what = f"{type(method).__name__} with {largest}={whole[largest]}"
    shapes = replace(setup, params={name: p.to("meta") for name, p in setup.params.items()})  # without numbers
    try:
        made = [method.init_server(shapes), method.init_client(shapes)]
    except RuntimeError as error:
        if "overflow" in str(error):
            raise Refused(f"{what} would need more numbers than can be counted.") from error
        return  # an own method that looks at numbers: what it takes is not known beforehand
    check_room(sum(leaf.numel() * leaf.element_size() for tree in made for leaf in flatten(tree).values()), what)
