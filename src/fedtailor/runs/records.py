"""Records of rounds: one dict per round in memory, one line of JSON per round on disk."""

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NotRequired, TypedDict, overload

import torch
from torch import Tensor

from fedtailor.core.metrics import RESERVED_PREFIXES
from fedtailor.core.trees import Tree
from fedtailor.core.untrusted_input import sanitize
from fedtailor.errors import RunError

Values = dict[int, float]  # client -> value
COMMON = "common_"  # prefix of a metric on the common test set
HELD_OUT = "held_out_"  # prefix of a metric of clients that never train
TRAIN, GLOBAL = RESERVED_PREFIXES  # prefixes of a metric on training samples, and of a metric of the global model
Record = dict[str, Any]  # a `RoundRecord`, and the mean over clients of each metric: "accuracy_trained", "loss", ...


class RoundRecord(TypedDict):
    """The entries of a round's record whose names do not depend on the method or the metrics."""

    round: int
    clients: list[int]  # that delivered an upload
    bytes_up: int
    bytes_down: int
    seconds: float
    per_client: dict[str, Values]  # metric -> client -> value; at least "bytes_up"
    missed: NotRequired[dict[int, str]]  # clients without an upload -> reason; readers add it if it is absent
    failed: NotRequired[dict[int, str]]  # clients whose upload was rejected -> reason; as above
    warnings: NotRequired[dict[int, str]]  # clients of a deployment that are suspicious -> reason
    method_metrics: NotRequired[dict[str, Any]]  # numbers and arrays that the method records about itself; as above
    epsilon: NotRequired[float]  # the privacy spent so far
    diverged: NotRequired[list[int]]  # evaluated clients whose loss is not finite
    seconds_evaluating: NotRequired[float]
    peak_memory: NotRequired[int]  # bytes of the GPU that tensors took at most, in training and evaluation
    peak_memory_reserved: NotRequired[int]  # bytes of the GPU that PyTorch reserved at most
    stopped_early: NotRequired[bool]  # true in the last round of a run that early stopping ended


MAX_INLINE_VALUES = 10_000  # larger arrays remain tensors and are saved as files in arrays/


class Records(Sequence[Record]):
    """The records of a run in order. They are stored as compressed JSON until they are iterated over, so that thousands
    of records need little memory during training.

    >>> records = Records([{"round": 1, "per_client": {"loss": {0: 0.5}}, "method_metrics": {}}])
    >>> records[0]["per_client"]
    {'loss': {0: 0.5}}
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._compressed: list[tuple[bytes, dict[str, Tensor]]] = []
        self._expanded: list[Record] | None = None
        for record in records:
            self.append(record)

    def append(self, record: Record) -> None:
        """Add the record of a round."""
        arrays = {name: value for name, value in record["method_metrics"].items() if isinstance(value, Tensor)}
        small = {name: value for name, value in record["method_metrics"].items() if name not in arrays}
        text = json.dumps(nan_to_none(record | {"method_metrics": small}))  # as on disk, so that both are equal
        self._compressed.append((zlib.compress(text.encode(), 1), arrays))
        self._expanded = None

    def __len__(self) -> int:
        return len(self._compressed)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice) or self._expanded is not None:
            return self._all()[index]
        return _expand(*self._compressed[index])

    def __iter__(self) -> Iterator[Record]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def _all(self) -> list[Record]:
        if self._expanded is None:
            self._expanded = [_expand(*parts) for parts in self._compressed]
        return self._expanded


def _expand(compressed: bytes, arrays: dict[str, Tensor]) -> Record:
    record = restore_record(json.loads(zlib.decompress(compressed)))
    record["method_metrics"] |= arrays
    return record


def validate_record(line: Any, number: int, num_clients: int, held_out: int = 0) -> Record:
    """Return a parsed line of rounds.jsonl if it is a valid record of that round; otherwise raise ValueError.

    The numbers of `held_out` clients, which never train, follow those of the others.

    >>> validate_record({"round": 2}, 1, 4)
    Traceback (most recent call last):
    ValueError: line 1 is not the record of round 1
    """
    is_round = isinstance(line, dict) and type(line.get("round")) is int and line["round"] == number
    if not is_round or not RoundRecord.__required_keys__ <= line.keys():
        raise ValueError(f"line {number} is not the record of round {number}")
    known = {str(client) for client in range(num_clients)}
    everyone = known | {str(client) for client in range(num_clients, num_clients + held_out)}
    for name, value in line.items():
        check = _CHECKS.get(name, _is_optional_number)
        if not (check(value, known) if name != "per_client" else _is_tables(value, known, everyone)):
            raise ValueError(f"line {number} has an invalid value of '{sanitize(name, 40)}'")
    return dict(line)


def _is_client_list(value: Any, known: set[str]) -> bool:
    return isinstance(value, list) and all(str(client) in known for client in value)


def _is_reasons(value: Any, known: set[str]) -> bool:
    return isinstance(value, dict) and value.keys() <= known and all(isinstance(why, str) for why in value.values())


def _is_tables(value: Any, known: set[str], everyone: set[str]) -> bool:
    """Return whether a value maps metrics to numbers by client; only metrics of held-out clients may name these."""
    return (
        isinstance(value, dict)
        and "bytes_up" in value
        and all(_is_table(table, everyone if name.startswith(HELD_OUT) else known) for name, table in value.items())
    )


def _is_table(value: Any, known: set[str]) -> bool:
    return isinstance(value, dict) and value.keys() <= known and all(map(_is_number_or_none, value.values()))


def _is_metrics(value: Any, known: set[str]) -> bool:
    return isinstance(value, dict) and _is_metric(value)


def _is_amount(value: Any, known: set[str]) -> bool:
    return _is_number(value) and abs(value) < 2**63  # excludes floats such as 1e300


def _is_optional_number(value: Any, known: set[str]) -> bool:
    return _is_number_or_none(value)


_CHECKS: dict[str, Callable[[Any, set[str]], bool]] = {  # of the entries of a `RoundRecord`; all others are numbers
    "clients": _is_client_list, "diverged": _is_client_list, "missed": _is_reasons, "failed": _is_reasons,
    "warnings": _is_reasons,
    "method_metrics": _is_metrics,
    "bytes_up": _is_amount, "bytes_down": _is_amount, "seconds": _is_amount,
    "peak_memory": _is_amount, "peak_memory_reserved": _is_amount,
    "stopped_early": lambda value, known: value is True,
}  # fmt: skip


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number; NaN and infinity are written as null."""
    return math.isfinite(value) if isinstance(value, float) else type(value) is int and abs(value) < 2**63


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_metric(value: Any) -> bool:
    """Return whether a value is a number, a nested dict or list of numbers, or the description of an array's file."""
    if isinstance(value, list) and {*map(type, value)} == {float} and math.isfinite(sum(value)):
        return True  # the common case, much faster than checking each value
    if isinstance(value, dict | list):
        return all(map(_is_metric, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str | bool) or _is_number_or_none(value)


def nan_to_none(value: Any) -> Any:
    """Replace NaN and infinities by None, because JSON cannot represent them."""
    if isinstance(value, dict):
        return {name: nan_to_none(child) for name, child in value.items()}
    if isinstance(value, list):
        return [nan_to_none(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def restore_record(record: Record) -> Record:
    """Undo what JSON changed, in place: turn client keys back into integers and null into NaN."""
    for group in ("missed", "failed", *({"warnings"} & record.keys())):
        record[group] = {int(client): reason for client, reason in record.get(group, {}).items()}
    for name, values in record.get("per_client", {}).items():
        record["per_client"][name] = {
            int(client): math.nan if value is None else value for client, value in values.items()
        }
    for name in [name for name, value in record.items() if value is None]:
        if record.get("per_client", {}).get(name.removesuffix("_mean")):  # so the mean was NaN
            record[name] = math.nan
    record["method_metrics"] = _none_to_nan(record.get("method_metrics", {}))
    return record


def _none_to_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _none_to_nan(child) for name, child in value.items()}
    if isinstance(value, list):
        return [_none_to_nan(child) for child in value]
    return math.nan if value is None else value


def values_by_client(clients: Sequence[int], stacked: Tree) -> dict[str, Values]:
    """Return name -> client -> value for all leaves with one value per client.

    >>> values_by_client([4, 7], {"drift": torch.tensor([0.5, 1.0]), "table": torch.ones(2, 3)})
    {'drift': {4: 0.5, 7: 1.0}}
    """
    scalars = {name: leaf for name, leaf in stacked.items() if isinstance(leaf, Tensor) and leaf.ndim == 1}
    return {name: dict(zip(clients, leaf.tolist(), strict=True)) for name, leaf in scalars.items()}


def merge_disjoint(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return both dicts merged; raise an error if they share a name."""
    if shared := sorted(values.keys() & more.keys()):
        raise RunError(f"The record already has a metric '{shared[0]}'; rename the metric that the method returns.")
    return values | more


def to_plain(value: Tensor | float) -> Any:
    """Return a number or nested lists; large arrays remain tensors, which need a tenth of the memory."""
    value = torch.as_tensor(value)
    return value.tolist() if value.numel() <= MAX_INLINE_VALUES else value.cpu()


def update_values(values: dict[str, Values], more: dict[str, Values]) -> None:
    """Add the values of more clients, in place."""
    for name, new in more.items():
        values.setdefault(name, {}).update(new)
