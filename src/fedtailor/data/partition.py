"""Who owns which sample. Every partition is a pure function of labels, settings and seed.

Each one draws a table of shares [classes, clients]; one function cuts the samples of every class by its row, so every
sample belongs to exactly one client.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.errors import Refused, unknown

Indices = NDArray[np.int64]
Shares = NDArray[np.float64]  # [classes, clients], rows sum to 1
_DEALS = 20  # of classes to clients, before the request is refused


def divide(
    labels: NDArray[Any],
    clients: int,
    partition: str = "dirichlet",
    *,
    alpha: float = 0.1,
    classes_per_client: int | None = None,
    exponent: float = 1.0,
    min_size: int = 10,
    seed: int = 0,
) -> list[Indices]:
    """The samples of every client.

    `iid`: everyone the same number, drawn at random. `dirichlet`: every class is spread over the clients by
    Dir(alpha); as in the splits the papers use, who already has his share of all samples gets no more.
    `pathological`: every client has at most `classes_per_client` (2) classes, in unequal amounts. `power_law`: the k-th
    client is k^-exponent as large as the first, with all classes; with `classes_per_client` of them, about so.
    A client that would end with fewer than `min_size` samples gets the rest from the largest, of classes it may have.
    Classes are dealt out at random, the larger to more clients; if after 20 deals someone still lacks samples of its
    classes, the request is refused.

    >>> [len(own) for own in divide(np.zeros(40, int), 4, "iid")]
    [10, 10, 10, 10]
    """
    if partition == "by_owner":
        raise Refused("The partition 'by_owner' needs owners; use Federation.from_dataset(dataset, owners).")
    if partition not in PARTITIONS:
        raise unknown("partition", partition, PARTITIONS)
    _check_counts(len(labels), clients, min_size)
    if partition != "iid" and not _are_classes(labels):
        raise Refused(f"The partition '{partition}' needs classes as labels; use 'iid' for other targets.")
    random = _generator([seed], 1)
    kinds = np.zeros(len(labels), np.int64) if partition == "iid" else np.unique(labels, return_inverse=True)[1]
    totals = np.bincount(kinds)
    settings = {"alpha": alpha, "each": classes_per_client, "exponent": exponent, "min_size": min_size}
    for _ in range(_DEALS):
        shares = PARTITIONS[partition](random, totals, clients, settings)
        cuts = np.round(np.cumsum(shares, axis=1) * totals[:, None]).astype(np.int64)
        counts = np.diff(cuts, axis=1, prepend=0)  # [classes, clients]
        allowed = shares > 0 if partition != "dirichlet" else np.ones(shares.shape, dtype=bool)
        if _feed_the_poor(counts, allowed, min_size):
            return _cut(random, kinds, counts)
    lack = f"Not every client can have {min_size} samples of {classes_per_client or 2} classes"
    raise Refused(f"{lack}; ask for fewer clients, more classes_per_client or a smaller min_size.")


def by_owner(owners: Sequence[Any]) -> tuple[list[str], list[Indices]]:
    """One client for every distinct owner, with its samples.

    >>> by_owner(["b", "a", "b"])[0]
    ['a', 'b']
    """
    plain = owners.tolist() if hasattr(owners, "tolist") else list(owners)  # arrays, tensors and columns of tables too
    for sample, owner in enumerate(plain):
        if not isinstance(owner, str | int | float | np.generic) or owner != owner:  # NaN is how tables write "missing"
            raise Refused(f"The owner of sample {sample} must be a name or a number, not {owner!r}.")
    if not plain:
        raise Refused("There are no samples, so there is no client.")
    try:
        known = sorted(set(plain))
    except TypeError as error:
        raise Refused("Owners must be all names or all numbers, not some of both.") from error
    number = {owner: client for client, owner in enumerate(known)}
    return [str(owner) for owner in known], _members(np.array([number[owner] for owner in plain]))


def hold_out(labels: NDArray[Any], samples: Indices, share: float, seed: Sequence[int]) -> tuple[Indices, Indices]:
    """Cut a client's samples into (kept, held out) with the same proportions of classes in both: of n samples of a
    class, and of all, the whole number just below or above n · share is held out.

    Whoever has two samples or more keeps at least one and holds out at least one.
    """
    if share <= 0 or len(samples) < 2:
        return samples, samples[:0]
    random = _generator(seed, 2)
    shuffled = random.permutation(samples)
    if _are_classes(labels):
        shuffled = shuffled[np.argsort(labels[shuffled], kind="stable")]
    # walking through the classes in turn, a sample is held out whenever another whole one is due
    due = np.floor(np.arange(len(samples) + 1) * share + random.random())
    held = np.diff(due) > 0
    if held.all() or not held.any():
        held[random.integers(len(samples))] ^= True
    return np.sort(shuffled[~held]), np.sort(shuffled[held])


def _are_classes(labels: NDArray[Any]) -> bool:
    return labels.ndim == 1 and labels.dtype.kind in "iub"


def _generator(seed: Sequence[int], use: int) -> np.random.Generator:
    if min(seed) < 0:
        raise Refused(f"seed must be a whole number from 0 on, not {min(seed)}.")
    return np.random.default_rng([*seed, use])


def _check_counts(samples: int, clients: int, min_size: int) -> None:
    if clients < 1:
        raise Refused(f"A federation needs at least one client, not {clients}.")
    if min_size < 2:
        raise Refused(f"min_size must be at least 2, one sample to train on and one to test on, not {min_size}.")
    if clients * min_size > samples:
        most = f"at most {samples // min_size} clients or " if samples >= min_size else ""
        hint = f"ask for {most}a smaller min_size"
        raise Refused(f"{samples} samples cannot give {clients} clients {min_size} each; {hint}.")


def _iid(random: np.random.Generator, totals: Indices, clients: int, settings: dict[str, Any]) -> Shares:
    return np.full((len(totals), clients), 1 / clients)


def _dirichlet(random: np.random.Generator, totals: Indices, clients: int, settings: dict[str, Any]) -> Shares:
    alpha = settings["alpha"]
    if not 0 < alpha < np.inf:
        raise Refused(f"alpha must be above 0 (small: every client its own classes; large: all alike), not {alpha}.")
    alpha = max(alpha, 1e-9)  # below it one client takes the whole class anyway, and the logarithms overflow
    fair, size, shares = totals.sum() / clients, np.zeros(clients), []
    for total in totals:
        # gamma draws in logarithms, for at a small alpha all of them may underflow to 0
        logs = np.log(random.gamma(alpha + 1, size=clients)) + np.log1p(-random.random(clients)) / alpha
        logs = np.where(size < fair, logs, -np.inf)
        row = np.exp(logs - logs.max())
        shares.append(row / row.sum())
        size += total * shares[-1]
    return np.array(shares)


def _pathological(random: np.random.Generator, totals: Indices, clients: int, settings: dict[str, Any]) -> Shares:
    owns = _deal_classes(random, totals, clients, 2 if settings["each"] is None else settings["each"], settings)
    return _rows_to_one(owns * random.uniform(0.1, 1, owns.shape))


def _power_law(random: np.random.Generator, totals: Indices, clients: int, settings: dict[str, Any]) -> Shares:
    exponent = settings["exponent"]
    if not 0 <= exponent < np.inf:
        raise Refused(f"exponent must be at least 0 (0: all clients alike), not {exponent}.")
    each = len(totals) if settings["each"] is None else settings["each"]
    owns = _deal_classes(random, totals, clients, each, settings)
    sizes = (random.permutation(clients) + 1.0) ** -exponent
    return _rows_to_one(owns * np.maximum(sizes, 1e-100))  # above 0, so that a tiny client still has its classes


PARTITIONS: dict[str, Callable[[np.random.Generator, Indices, int, dict[str, Any]], Shares]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "pathological": _pathological,
    "power_law": _power_law,
}


def _deal_classes(
    random: np.random.Generator, totals: Indices, clients: int, each: int, settings: dict[str, Any]
) -> NDArray[np.bool_]:
    """Give every client `each` classes: those that have no owner yet, then those with most samples for an owner; last
    those that cannot feed one owner more."""
    classes = len(totals)
    if not 1 <= each <= classes:
        raise Refused(f"classes_per_client must be from 1 to {classes}, the number of classes, not {each}.")
    if clients * each < classes:
        raise Refused(f"{clients} clients of {each} classes leave some of the {classes} classes without an owner.")
    least = settings["min_size"]
    if each == 1 and (totals.min() < least or (totals // least).sum() < clients):
        raise Refused(
            f"Of one class each, {clients} clients cannot have {least} samples; ask for classes_per_client 2."
        )
    if each == classes:
        return np.ones((classes, clients), dtype=bool)
    owns, owners = np.zeros((classes, clients), dtype=bool), np.zeros(classes)
    for client in range(clients):
        rank = (owners + random.random(classes)) / totals  # at most `clients`
        rank[owners >= totals // least] += clients
        rank[owners == 0] = random.random(np.count_nonzero(owners == 0)) - 1
        dealt = np.argsort(rank)[:each]
        owns[dealt, client] = True
        owners[dealt] += 1
    return owns


def _rows_to_one(shares: Shares) -> Shares:
    result: Shares = shares / shares.sum(1, keepdims=True)
    return result


def _feed_the_poor(counts: Indices, allowed: NDArray[np.bool_], min_size: int) -> bool:
    """Move samples from the largest client to whoever has too few, of classes he may have; False if that cannot be."""
    sizes = counts.sum(0)
    everything = bool(allowed.all())
    rows = sizes[None] if everything else counts  # one heap a class, or one for all: then any class will do
    rich = [[(-int(sizes[c]), int(c)) for c in np.flatnonzero((row > 0) & (sizes > min_size))] for row in rows]
    for heap in rich:
        heapq.heapify(heap)
    for client in np.flatnonzero(sizes < min_size).tolist():
        kinds = [0] if everything else np.flatnonzero(allowed[:, client]).tolist()
        while (missing := min_size - sizes[client]) > 0:
            _, giver = min(_largest(rich[kind], rows[kind], sizes, min_size) for kind in kinds)
            if giver < 0:
                return False
            kind = int((counts[:, giver] * allowed[:, client]).argmax())
            moved = min(missing, sizes[giver] - min_size, counts[kind, giver])
            for taker, amount in ((client, moved), (giver, -moved)):
                counts[kind, taker] += amount
                sizes[taker] += amount
    return True


def _largest(heap: list[tuple[int, int]], row: Indices, sizes: Indices, min_size: int) -> tuple[int, int]:
    """(-size, client) of the largest client that has samples of a class to give, (0, -1) if none has. What the heap
    says of a client may be out of date, but it only ever says too much: givers never grow."""
    while heap:
        size, giver = heap[0]
        if not row[giver] or sizes[giver] <= min_size:
            heapq.heappop(heap)
        elif -size != sizes[giver]:
            heapq.heapreplace(heap, (-int(sizes[giver]), giver))
        else:
            return heap[0]
    return 0, -1


def _members(group: Indices, groups: int = 0) -> list[Indices]:
    """Who is in group 0, in group 1, ..., each in order."""
    ends = np.cumsum(np.bincount(group, minlength=groups))
    return np.split(np.argsort(group, kind="stable"), ends[:-1])


def _cut(random: np.random.Generator, kinds: Indices, counts: Indices) -> list[Indices]:
    """Hand out the samples of every class, shuffled, by the table of counts."""
    clients = np.arange(counts.shape[1])
    owner = np.empty_like(kinds)
    for samples, row in zip(_members(kinds), counts, strict=True):
        owner[random.permutation(samples)] = np.repeat(clients, row)
    return _members(owner, len(clients))
