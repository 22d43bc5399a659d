"""Clients that fail in a round: who, and why. Their uploads are refused, and the round goes on without them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtailor.errors import Refused
from fedtailor.trees import Tree, flatten

_PARTS = {"upload": "upload", "state": "state", "trained": "model", "notes": "note"}  # of a client's work, in words
Kinds = tuple[tuple[str, str], ...]  # of a tree's tensors: name, and dtype and shape


@dataclass(frozen=True)
class Failure:
    """Why a client's work of a round is refused."""

    why: str
    error: Exception | None = None  # what it raised


def find_failures(
    work: Callable[[int], Tree], misfit: Callable[[int, Tree], str | None], clients: Sequence[int]
) -> dict[int, Failure]:
    """Let every client work alone: who raises, whose results do not fit what is known, and of those that do, who
    returns other names or shapes than most."""
    failures: dict[int, Failure] = {}
    kinds: dict[int, Kinds] = {}
    for client in clients:
        try:
            result = work(client)
        except Exception as error:  # whatever a method or a model raises is the reason to keep
            failures[client] = Failure(_words(error), error)
            continue
        if (why := misfit(client, result)) is not None:
            failures[client] = Failure(why)
        else:
            kinds[client] = kinds_of(result)
    usual = Counter(kinds.values()).most_common(1)[0][0] if kinds else ()
    odd = {client: own for client, own in kinds.items() if own != usual}
    return failures | {client: Failure(difference(own, usual)) for client, own in odd.items()}


def unlike_sent(upload: Tree, sent: Tree) -> str | None:
    """Why a stacked upload cannot be read: under a name that was sent it must be the same thing after training.

    >>> unlike_sent({"w": torch.ones(1, 2)}, {"w": torch.ones(1, 3)})
    "its upload 'w' is float32 (2,), and it was sent float32 (3,)"
    """
    before = flatten(sent)
    for path, leaf in flatten(upload).items():
        if path in before and _kind(leaf) != _kind(before[path]):
            return f"its upload '{path}' is {_kind(leaf)}, and it was sent {_kind(before[path])}"
    return None


def not_finite(clients: Sequence[int], parts: Mapping[str, Tree]) -> dict[int, Failure]:
    """Who of these stacked clients has a NaN or infinity, in which part.

    >>> not_finite([3, 8], {"upload": {"w": torch.tensor([[1.0], [torch.nan]])}})[8].why
    "its upload 'w' has NaN or infinity"
    """
    floats = [
        (part, path, leaf) for part, tree in parts.items() for path, leaf in flatten(tree).items() if _can_be_nan(leaf)
    ]
    sums = {id(leaf): leaf.reshape(len(clients), leaf[0].numel()).sum(1).abs().double() for _, _, leaf in floats}
    if not sums or bool(torch.stack(list(sums.values())).isfinite().all()):  # one look at the device
        return {}
    failures: dict[int, Failure] = {}
    for part, path, leaf in floats:  # a sum may also overflow: now number by number
        good = leaf.isfinite().reshape(len(clients), leaf[0].numel()).all(1)
        for position in (~good).nonzero().flatten().tolist():
            failures.setdefault(clients[position], Failure(f"its {_PARTS[part]} '{path}' has NaN or infinity"))
    return failures


def check_finite(tree: Tree, number: int) -> None:
    """Refuse a server with a NaN or infinity in it: nothing could be computed from it any more."""
    floats = {path: leaf for path, leaf in flatten(tree).items() if _can_be_nan(leaf)}
    if not floats or bool(torch.stack([leaf.sum().abs().double() for leaf in floats.values()]).isfinite().all()):
        return  # one look at the device
    for path, leaf in floats.items():
        if not bool(leaf.isfinite().all()):
            raise Refused(
                f"In round {number} the server's '{path}' became NaN or infinite, but no upload is; try a smaller lr."
            )


def check_share(failures: Mapping[int, Failure], asked: int, most: float, number: int) -> None:
    """Refuse a round in which more than a share of its clients failed; where all raised, with what the first did."""
    if not failures or len(failures) / asked <= most:
        return
    client, first = next(iter(failures.items()))
    if first.error is not None and len(failures) == asked:
        raise first.error
    smaller = "" if first.error else "; try a smaller lr"
    raise Refused(
        f"In round {number} {len(failures)} of {asked} clients failed, more than max_failures={most:g} allows, client "
        f"{client} because {first.why}{smaller}."
    ) from first.error


def _can_be_nan(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _kind(leaf: Tensor) -> str:
    """Of one client of those stacked."""
    return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape[1:])}"


def kinds_of(tree: Tree) -> Kinds:
    """Names, shapes and dtypes of stacked trees."""
    return tuple(sorted((path, _kind(leaf)) for path, leaf in flatten(tree).items()))


def difference(own: Kinds, usual: Kinds) -> str:
    """In which part of a client's work it differs from that of most."""
    odd = [path for path, _ in set(own) ^ set(usual)]
    path = min(odd, key=lambda path: (list(_PARTS).index(path.partition("/")[0]), path))
    found, wanted = (dict(kinds).get(path, "not there") for kinds in (own, usual))
    part, _, name = path.partition("/")
    return f"its {_PARTS[part]} '{name}' is {found}, others' is {wanted}"


def _words(error: Exception) -> str:
    said = str(error).splitlines()[0].rstrip(".")[:300] if str(error) else ""
    return f"it raised {type(error).__name__}{': ' if said else ''}{said}"
