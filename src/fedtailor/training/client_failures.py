"""Detect clients that fail in a round. Their results are discarded, and the round continues without them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from statistics import median

import torch
from torch import Tensor

from fedtailor.core.system import to_float64
from fedtailor.core.trees import Tree, flatten
from fedtailor.core.updates import UPDATE_NORM
from fedtailor.errors import RunError, reason
from fedtailor.runs.records import Record

_PARTS = {  # parts of a client's results, as messages name them, in the order in which they are checked
    "upload": "upload",
    "state": "state",
    "trained": "model",
    "client_metrics": "metric",
}
_OUTLIER = 10.0  # norm of an update, in median norms of the round, above which it may have spoiled the model
_ROUNDS_BACK = 5  # rounds in which a spoiled model may have been trained before it diverged
_MAX_LISTED = 5  # names in a message
Signature = tuple[tuple[str, str], ...]  # structure of a tree: (path, dtype and shape) of every tensor


@dataclass(frozen=True)
class ClientFailure:
    """Why the results of a client are discarded."""

    reason: str
    error: Exception | None = None  # the exception that the client raised
    diverged: bool = False  # whether its results have NaN or infinity


class FailedRoundError(RunError):
    """A round does not count because its clients failed or the server state diverged."""


class TooFewClientsError(FailedRoundError):
    """A round does not count because too few clients delivered an upload."""


def find_failures(
    train: Callable[[int], Tree], find_mismatch: Callable[[int, Tree], str | None], clients: Sequence[int]
) -> dict[int, ClientFailure]:
    """Train each client separately and return those that fail.

    A client fails if it raises an exception, if `find_mismatch` finds a problem in its results, or if the structure of
    its results differs from that of the majority.
    """
    failures: dict[int, ClientFailure] = {}
    signatures: dict[int, Signature] = {}
    for client in clients:
        try:
            result = train(client)
        except Exception as error:  # methods and models may raise anything
            failures[client] = ClientFailure(f"it raised {reason(error, with_type=True)}", error)
            continue
        if (mismatch := find_mismatch(client, result)) is not None:
            failures[client] = ClientFailure(mismatch)
        else:
            signatures[client] = tree_signature(result)
    expected = Counter(signatures.values()).most_common(1)[0][0] if signatures else ()
    deviating = {client: signature for client, signature in signatures.items() if signature != expected}
    return failures | {
        client: ClientFailure(describe_difference(signature, expected)) for client, signature in deviating.items()
    }


def upload_mismatch(upload: Tree, sent: Tree) -> str | None:
    """Return why stacked uploads are invalid: a tensor that was also sent must keep its shape and dtype.

    >>> upload_mismatch({"w": torch.ones(1, 2)}, {"w": torch.ones(1, 3)})
    "its upload 'w' is float32 (2,), but it was sent float32 (3,)"
    """
    before = flatten(sent)
    for path, leaf in flatten(upload).items():
        if path in before and _tensor_type(leaf) != _tensor_type(before[path]):
            return f"its upload '{path}' is {_tensor_type(leaf)}, but it was sent {_tensor_type(before[path])}"
    return None


def find_non_finite(clients: Sequence[int], parts: Mapping[str, Tree]) -> dict[int, ClientFailure]:
    """Return the clients with a NaN or infinity in one of these stacked trees.

    >>> find_non_finite([3, 8], {"upload": {"w": torch.tensor([[1.0], [torch.nan]])}})[8].reason
    "its upload 'w' has NaN or infinity"
    """
    floats = [
        (part, path, leaf) for part, tree in parts.items() for path, leaf in flatten(tree).items() if _can_be_nan(leaf)
    ]
    sums = {id(leaf): to_float64(leaf.reshape(len(clients), leaf[0].numel()).sum(1).abs()) for _, _, leaf in floats}
    if not sums or bool(torch.stack(list(sums.values())).isfinite().all()):  # one synchronization with the device
        return {}
    failures: dict[int, ClientFailure] = {}
    for part, path, leaf in floats:  # a sum of finite values may overflow, so check the values
        finite = leaf.isfinite().reshape(len(clients), leaf[0].numel()).all(1)
        for position in (~finite).nonzero().flatten().tolist():
            reason = f"its {_PARTS[part]} '{path}' has NaN or infinity"
            failures.setdefault(clients[position], ClientFailure(reason, diverged=True))
    return failures


def check_finite(tree: Tree, number: int, advise: Callable[[], str]) -> None:
    """Raise `FailedRoundError` with advice if the server state has NaN or infinity after round `number`."""
    floats = {path: leaf for path, leaf in flatten(tree).items() if _can_be_nan(leaf)}
    if not floats or bool(torch.stack([to_float64(leaf.sum().abs()) for leaf in floats.values()]).isfinite().all()):
        return  # one synchronization with the device
    for path, leaf in floats.items():
        if not bool(leaf.isfinite().all()):
            raise FailedRoundError(
                f"In round {number}, '{path}' of the server state became NaN or infinite although all uploads are "
                f"finite; {advise()}."
            )


def check_failure_rate(
    failures: Mapping[int, ClientFailure],
    num_clients: int,
    max_failures: float,
    number: int,
    advice: str | None = None,
) -> None:
    """Raise `FailedRoundError` if more than the fraction `max_failures` of a round's clients failed.

    If all clients raised an exception, the first exception is raised again instead.
    """
    if not failures or len(failures) / num_clients <= max_failures:
        return
    client, first = next(iter(failures.items()))
    if first.error is not None and len(failures) == num_clients:
        raise first.error
    hint = "" if first.error else f"; {advice or 'try a smaller lr'}"
    raise FailedRoundError(
        f"In round {number}, {len(failures)} of {num_clients} clients failed, more than max_failures={max_failures:g} "
        f"allows. Client {client} failed because {first.reason}{hint}."
    ) from first.error


def divergence_advice(records: Sequence[Record], names: Sequence[str]) -> str:
    """Return what to do after clients diverged in the round after these records, as the end of a message: one upload
    of an earlier round may have spoiled the model that all of them received.

    >>> norms = {"update_norm": {0: 1.0, 1: 2e6, 2: 3.0}}
    >>> divergence_advice([{"round": 7, "per_client": norms}], ["ann", "bob", "cleo"])[:60]
    'in round 7, the update of bob was 7e+05 times as long as the'
    """
    for record in records[: -_ROUNDS_BACK - 1 : -1]:
        norms = {c: inf if isnan(norm) else norm for c, norm in record["per_client"].get(UPDATE_NORM, {}).items()}
        usual = median(norms.values()) if norms else 0.0
        outliers = [client for client in norms if norms[client] > _OUTLIER * usual]
        if outliers and len(norms) > 2:
            outliers.sort(key=lambda client: -norms[client])
            listed = ", ".join(names[client] for client in outliers[:_MAX_LISTED])
            times = f"{norms[outliers[0]] / usual:.0e}" if usual > 0 else "many"
            return (
                f"in round {record['round']}, the update of {listed} was {times} times as long as the median, so train "
                "again from before that round without it, or with robust.kind"
            )
    return "no update of the last rounds was much longer than the others, so try a smaller lr"


def tree_signature(tree: Tree) -> Signature:
    """Return the names, shapes, and dtypes of stacked trees."""
    return tuple(sorted((path, _tensor_type(leaf)) for path, leaf in flatten(tree).items()))


def describe_difference(signature: Signature, expected: Signature, reference: str = "others' is") -> str:
    """Return a sentence about the first difference between two structures."""
    paths = [path for path, _ in set(signature) ^ set(expected)]
    path = min(paths, key=lambda path: (list(_PARTS).index(path.partition("/")[0]), path))
    actual, usual = (dict(each).get(path, "missing") for each in (signature, expected))
    part, _, name = path.partition("/")
    return f"its {_PARTS[part]} '{name}' is {actual}, {reference} {usual}"


def _can_be_nan(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _tensor_type(leaf: Tensor) -> str:
    """Return the dtype and shape of one client's part of a stacked tensor."""
    return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape[1:])}"
