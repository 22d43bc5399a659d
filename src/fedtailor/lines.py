"""The record: a line a round, and what is said in it."""

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from fedtailor.errors import Refused
from fedtailor.trees import Tree

Record = dict[str, Any]  # one round; "per_client" maps a name to client -> number
Values = dict[int, float]  # client -> number
_TABLES = ("per_client", "last_trained", "missed", "failed", "monitor")
_LISTS = ("clients", "diverged")  # of clients
LARGE = 10_000  # numbers: an array beyond is kept as a tensor, on disk in a file beside the record


class Lines(Sequence[Record]):
    """The lines of a run, one after the other. Each is kept as packed text until somebody goes through all of them, so
    that thousands take little memory while a run goes on.

    >>> lines = Lines([{"round": 1, "per_client": {"loss": {0: 0.5}}, "monitor": {}}])
    >>> lines[0]["per_client"]
    {'loss': {0: 0.5}}
    """

    def __init__(self, lines: Iterable[Record] = ()) -> None:
        self._packed: list[tuple[bytes, dict[str, Tensor]]] = []
        self._open: list[Record] | None = None
        for line in lines:
            self.append(line)

    def append(self, line: Record) -> None:
        """Add a round."""
        arrays = {name: value for name, value in line["monitor"].items() if isinstance(value, Tensor)}
        plain = line | {"monitor": {n: v for n, v in line["monitor"].items() if n not in arrays}}
        text = json.dumps(without_nan(plain))  # as in a file, so that a run in memory says the same
        self._packed.append((zlib.compress(text.encode(), 1), arrays))
        self._open = None

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, which: int) -> Record: ...
    @overload
    def __getitem__(self, which: slice) -> list[Record]: ...
    def __getitem__(self, which: int | slice) -> Record | list[Record]:
        if isinstance(which, slice) or self._open is not None:
            return self._all()[which]
        return _unpack(*self._packed[which])

    def __iter__(self) -> Iterator[Record]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def _all(self) -> list[Record]:
        if self._open is None:
            self._open = [_unpack(*packed) for packed in self._packed]
        return self._open


def _unpack(packed: bytes, arrays: dict[str, Tensor]) -> Record:
    line = restore(json.loads(zlib.decompress(packed)))
    line["monitor"] |= arrays
    return line


def check_line(line: Any, number: int, num_clients: int) -> Record:
    """A line from a file, if it is what the line of that round can be; else ValueError.

    >>> check_line({"round": 2}, 1, 4)
    Traceback (most recent call last):
    ValueError: line 1 of the record is not a round's
    """
    whole = isinstance(line, dict) and type(line.get("round")) is int and line["round"] == number
    if not whole or not all(_is_amount(line.get(name)) for name in ("seconds", "bytes_up", "bytes_down")):
        raise ValueError(f"line {number} of the record is not a round's")
    known = {str(client) for client in range(num_clients)}
    groups = [line.get(group, {}) for group in _TABLES]
    if not all(isinstance(group, dict) for group in groups) or not {"bytes_up"} <= groups[0].keys():
        raise ValueError(f"line {number} of the record lacks its tables")
    numbers = [table for group in groups[:2] for table in group.values()]
    if not all(isinstance(table, dict) and all(map(_is_number_or_none, table.values())) for table in numbers):
        raise ValueError(f"line {number} of the record has something else than numbers of clients")
    if not all(_is_number_or_none(value) for name, value in line.items() if name not in (*_TABLES, *_LISTS)):
        raise ValueError(f"line {number} of the record has something else than numbers of its round")
    if not all(isinstance(why, str) for group in groups[2:4] for why in group.values()):
        raise ValueError(f"line {number} of the record does not say why clients were not there")
    if not _is_recorded(groups[4]):
        raise ValueError(f"line {number} of the record has numbers in its monitor that are none")
    lists = [line.get("clients"), line.get("diverged", [])]
    if not all(isinstance(some, list) and all(str(client) in known for client in some) for some in lists):
        raise ValueError(f"line {number} of the record does not list clients")
    if not all(table.keys() <= known for table in (*numbers, *groups[2:4])):
        raise ValueError(f"line {number} of the record names clients that are not there")
    return dict(line)


def _is_amount(value: Any) -> bool:
    return _is_number(value) and abs(value) < 2**63  # a clock may go back a little


def _is_number(value: Any) -> bool:
    """What is no number was written as null, and whole numbers are counts of something."""
    return math.isfinite(value) if isinstance(value, float) else type(value) is int and abs(value) < 2**63


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_recorded(value: Any) -> bool:
    """Whether these are numbers, tables and lists of them, or the words about an array that lies beside the record."""
    if isinstance(value, list) and {*map(type, value)} == {float} and math.isfinite(sum(value)):
        return True  # as most are, and much faster than one by one
    if isinstance(value, dict | list):
        return all(map(_is_recorded, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str | bool) or _is_number_or_none(value)


def without_nan(value: Any) -> Any:
    """For files, as JSON has no NaN: a number that is none becomes null."""
    if isinstance(value, dict):
        return {name: without_nan(child) for name, child in value.items()}
    if isinstance(value, list):
        return [without_nan(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def restore(line: Record) -> Record:
    """JSON turned the clients' numbers into text and what is no number into null: turn them back."""
    for group in ("missed", "failed"):
        line[group] = {int(client): why for client, why in line.get(group, {}).items()}
    for group in ("per_client", "last_trained"):
        for name, values in line.get(group, {}).items():
            numbers = {int(client): math.nan if value is None else value for client, value in values.items()}
            line[group][name] = numbers
    for name in [name for name, value in line.items() if value is None]:
        if line.get("per_client", {}).get(name.removesuffix("_mean")):  # there were numbers, but their mean was none
            line[name] = math.nan
    line["monitor"] = _with_nan(line.get("monitor", {}))
    return line


def _with_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_nan(child) for name, child in value.items()}
    if isinstance(value, list):
        return [_with_nan(child) for child in value]
    return math.nan if value is None else value


def by_client(clients: Sequence[int], stacked: Tree) -> dict[str, Values]:
    """Name -> client -> number, of what is one number a client.

    >>> by_client([4, 7], {"drift": torch.tensor([0.5, 1.0]), "table": torch.ones(2, 3)})
    {'drift': {4: 0.5, 7: 1.0}}
    """
    numbers = {name: leaf for name, leaf in stacked.items() if isinstance(leaf, Tensor) and leaf.ndim == 1}
    return {name: dict(zip(clients, leaf.tolist(), strict=True)) for name, leaf in numbers.items()}


def join(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Both, if they do not speak of different things under one name."""
    if twice := sorted(values.keys() & more.keys()):
        raise Refused(f"The record already has '{twice[0]}' of every client; a method must call its number otherwise.")
    return values | more


def plain(value: Tensor | float) -> Any:
    """A number or nested lists; large arrays stay tensors, which take a tenth of the memory."""
    value = torch.as_tensor(value)
    return value.tolist() if value.numel() <= LARGE else value.cpu()


def extend(values: dict[str, Values], more: dict[str, Values]) -> None:
    """Add what is known of more clients."""
    for name, found in more.items():
        values.setdefault(name, {}).update(found)
