"""Partitions of samples into clients, as pure functions of labels, settings, and seed.

Each partition draws a table of fractions [classes, clients]. The samples of each class are then divided according to
its row, so that every sample belongs to exactly one client.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.errors import DataError, unknown_name

Indices = NDArray[np.int64]
Fractions = NDArray[np.float64]  # [classes, clients], rows sum to 1
_MAX_ATTEMPTS = 20  # of assigning classes to clients


def partition_samples(
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
    """Return the indices of each client's samples.

    - `iid`: all clients have the same number of samples, drawn at random.
    - `dirichlet`: the samples of each class are distributed over the clients by Dir(alpha). As in the splits of the
      papers, a client that already has 1/clients of all samples gets no more.
    - `pathological`: each client has at most `classes_per_client` (default 2) classes, in unequal amounts.
    - `power_law`: the k-th largest client has k^-exponent times the samples of the largest. With `classes_per_client`
      classes per client instead of all, this holds approximately.

    A client with fewer than `min_size` samples gets more from the largest clients, of the classes that it may have.
    Classes are assigned to clients at random, larger classes to more clients. If after 20 attempts a client still has
    too few samples of its classes, `DataError` is raised.

    >>> [len(own) for own in partition_samples(np.zeros(40, int), 4, "iid")]
    [10, 10, 10, 10]
    """
    if partition == "by_owner":
        raise DataError("The partition 'by_owner' needs owners; use Federation.from_dataset(dataset, owners).")
    if partition not in PARTITIONS:
        raise unknown_name("partition", partition, PARTITIONS)
    _check_counts(len(labels), clients, min_size)
    if partition != "iid" and not _are_classes(labels):
        raise DataError(f"The partition '{partition}' needs classes as labels; use 'iid' for other targets.")
    random = _generator([seed], 1)
    class_of = np.zeros(len(labels), np.int64) if partition == "iid" else np.unique(labels, return_inverse=True)[1]
    totals = np.bincount(class_of)
    settings = {"alpha": alpha, "each": classes_per_client, "exponent": exponent, "min_size": min_size}
    for _ in range(_MAX_ATTEMPTS):
        fractions = PARTITIONS[partition](random, totals, clients, settings)
        cuts = np.round(np.cumsum(fractions, axis=1) * totals[:, None]).astype(np.int64)
        counts = np.diff(cuts, axis=1, prepend=0)  # [classes, clients]
        allowed = fractions > 0 if partition != "dirichlet" else np.ones(fractions.shape, dtype=bool)
        if _fill_small_clients(counts, allowed, min_size):
            return _assign_samples(random, class_of, counts)
    problem = f"Not all clients can have {min_size} samples of {classes_per_client or 2} classes"
    raise DataError(f"{problem}; use fewer clients, more classes_per_client, or a smaller min_size.")


def group_by_owner(owners: Sequence[Any]) -> tuple[list[str], list[Indices]]:
    """Return the sorted distinct owners as names, and the indices of each owner's samples.

    >>> group_by_owner(["b", "a", "b"])[0]
    ['a', 'b']
    """
    # arrays, tensors, and columns of data frames have `tolist`
    plain = owners.tolist() if hasattr(owners, "tolist") else list(owners)
    for sample, owner in enumerate(plain):
        if not isinstance(owner, str | int | float | np.generic) or owner != owner:  # NaN: missing in a data frame
            raise DataError(f"The owner of sample {sample} must be a string or a number, got {owner!r}.")
    if not plain:
        raise DataError("There are no samples, so there are no clients.")
    try:
        known = sorted(set(plain))
    except TypeError as error:
        raise DataError("Owners must be all strings or all numbers, not a mix of both.") from error
    number = {owner: client for client, owner in enumerate(known)}
    return [str(owner) for owner in known], _members(np.array([number[owner] for owner in plain]))


def divide_like(labels: NDArray[Any], owned: Sequence[Indices], others: Indices, seed: int) -> list[Indices]:
    """Divide other samples, such as a test set, in the proportions in which the clients have each class.

    >>> labels = np.array([0, 0, 0, 0, 1, 0, 0, 1])
    >>> [len(own) for own in divide_like(labels, [np.arange(2), np.arange(2, 5)], np.arange(5, 8), seed=0)]
    [1, 2]
    """
    random = _generator([seed], 4)
    classes = int(labels.max()) + 1
    counts = np.array([np.bincount(labels[own], minlength=classes) for own in owned])  # [clients, classes]
    parts: list[list[Indices]] = [[] for _ in owned]
    for label in np.unique(labels[others]):
        ends = np.cumsum(counts[:, label])
        if not ends[-1]:
            continue  # no client has this class
        members = random.permutation(others[labels[others] == label])
        cuts = np.round(ends / ends[-1] * len(members)).astype(np.int64)
        for part, own in zip(parts, np.split(members, cuts[:-1]), strict=True):
            part.append(own)
    return [np.sort(np.concatenate([np.empty(0, np.int64), *part])) for part in parts]


def choose_owners(
    owner: NDArray[np.int64], clients: int | None, min_size: int, seed: int
) -> tuple[list[int], list[Indices]]:
    """Return the owners with at least `min_size` samples, or `clients` of them drawn at random, and the indices of each
    one's samples.

    >>> choose_owners(np.array([0, 1, 1, 2, 2, 2]), None, 2, seed=0)[0]
    [1, 2]
    """
    members = _members(owner)
    large = [number for number, own in enumerate(members) if len(own) >= min_size]
    if not large or (clients is not None and not 1 <= clients <= len(large)):
        found = f"{len(large):,} owners have {min_size} samples or more"
        raise DataError(f"{found}; set data.clients from 1 to that number, or a smaller data.min_size.")
    if clients is not None:
        large = sorted(_generator([seed], 3).choice(large, clients, replace=False).tolist())
    return large, [members[number] for number in large]


def samples_by_client(owners: Sequence[Any], samples: int) -> tuple[list[str], list[Indices]]:
    """Return the clients' names and the indices of their samples, given one owner per sample, or one list of sample
    indices per client.

    >>> samples_by_client(["b", "a", "b"], 3)[0], samples_by_client([[0, 2], [1]], 3)[0]
    (['a', 'b'], ['0', '1'])
    """
    if len(owners) and all(not isinstance(own, str) and np.ndim(own) == 1 for own in owners):
        return [str(client) for client in range(len(owners))], [np.asarray(own, dtype=np.int64) for own in owners]
    if len(owners) != samples:
        raise DataError(
            f"There are {samples} samples but {len(owners)} owners; give one owner per sample, or one list of sample "
            "indices per client."
        )
    return group_by_owner(owners)


def hold_out(labels: NDArray[Any], samples: Indices, fraction: float, seed: Sequence[int]) -> tuple[Indices, Indices]:
    """Split a client's samples into (kept, held out) with the same proportions of classes in both.

    Of n samples of a class, and of all samples, n · fraction are held out, rounded up or down. If there are two samples
    or more, at least one is kept and at least one is held out.
    """
    if fraction <= 0 or len(samples) < 2:
        return samples, samples[:0]
    random = _generator(seed, 2)
    shuffled = random.permutation(samples)
    if _are_classes(labels):
        shuffled = shuffled[np.argsort(labels[shuffled], kind="stable")]
    # With the samples sorted by class, a sample is held out wherever the cumulative quota reaches the next integer.
    quota = np.floor(np.arange(len(samples) + 1) * fraction + random.random())
    held = np.diff(quota) > 0
    if held.all() or not held.any():
        held[random.integers(len(samples))] ^= True
    return np.sort(shuffled[~held]), np.sort(shuffled[held])


def hold_out_common(labels: NDArray[Any], samples: Indices, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Split all samples into (kept for clients, common test set) with the same proportions of classes in both.

    >>> kept, common = hold_out_common(np.arange(100) % 2, np.arange(100), 0.1, seed=0)
    >>> len(kept), np.bincount(common % 2).tolist()
    (90, [5, 5])
    """
    if not 0 < fraction < 1:
        raise DataError(f"common_test must be a fraction between 0 and 1, got {fraction}.")
    return hold_out(labels, samples, fraction, (seed, 0, 1))  # no client draws with this seed


def _are_classes(labels: NDArray[Any]) -> bool:
    return labels.ndim == 1 and labels.dtype.kind in "iub"


def _generator(seed: Sequence[int], salt: int) -> np.random.Generator:
    if min(seed) < 0:
        raise DataError(f"seed must be an integer of at least 0, got {min(seed)}.")
    return np.random.default_rng([*seed, salt])


def _check_counts(samples: int, clients: int, min_size: int) -> None:
    if clients < 1:
        raise DataError(f"A federation needs at least one client, got {clients}.")
    if min_size < 2:
        raise DataError(f"min_size must be at least 2 (one sample for training and one for testing), got {min_size}.")
    if clients * min_size > samples:
        fewer = f"at most {samples // min_size} clients or " if samples >= min_size else ""
        hint = f"use {fewer}a smaller min_size"
        raise DataError(f"{samples} samples are too few for {clients} clients with {min_size} samples each; {hint}.")


def _iid(random: np.random.Generator, totals: Indices, clients: int, settings: dict[str, Any]) -> Fractions:
    return np.full((len(totals), clients), 1 / clients)


def _dirichlet(random: np.random.Generator, totals: Indices, clients: int, settings: dict[str, Any]) -> Fractions:
    alpha = settings["alpha"]
    if not 0 < alpha < np.inf:
        raise DataError(f"alpha must be above 0 (small: few classes per client, large: similar clients), got {alpha}.")
    alpha = max(alpha, 1e-9)  # below this, one client gets the whole class anyway, and the logarithms overflow
    target_size, sizes, rows = totals.sum() / clients, np.zeros(clients), list[Fractions]()
    for total in totals:
        # logarithms of gamma variates, because with a small alpha all of them may underflow to 0
        logs = np.log(random.gamma(alpha + 1, size=clients)) + np.log1p(-random.random(clients)) / alpha
        logs = np.where(sizes < target_size, logs, -np.inf)
        row = np.exp(logs - logs.max())
        rows.append(row / row.sum())
        sizes += total * rows[-1]
    return np.array(rows)


def _pathological(random: np.random.Generator, totals: Indices, clients: int, settings: dict[str, Any]) -> Fractions:
    owns = _assign_classes(random, totals, clients, 2 if settings["each"] is None else settings["each"], settings)
    return _normalize_rows(owns * random.uniform(0.1, 1, owns.shape))


def _power_law(random: np.random.Generator, totals: Indices, clients: int, settings: dict[str, Any]) -> Fractions:
    exponent = settings["exponent"]
    if not 0 <= exponent < np.inf:
        raise DataError(f"exponent must be at least 0 (0: clients of equal size), got {exponent}.")
    each = len(totals) if settings["each"] is None else settings["each"]
    owns = _assign_classes(random, totals, clients, each, settings)
    sizes = (random.permutation(clients) + 1.0) ** -exponent
    return _normalize_rows(owns * np.maximum(sizes, 1e-100))  # above 0, so that a tiny client keeps its classes


PARTITIONS: dict[str, Callable[[np.random.Generator, Indices, int, dict[str, Any]], Fractions]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "pathological": _pathological,
    "power_law": _power_law,
}


def _assign_classes(
    random: np.random.Generator, totals: Indices, clients: int, each: int, settings: dict[str, Any]
) -> NDArray[np.bool_]:
    """Assign `each` classes to every client and return the table [classes, clients].

    Classes without an owner come first, then those with the most samples per owner, and last those with too few samples
    for another owner.
    """
    classes = len(totals)
    if not 1 <= each <= classes:
        raise DataError(f"classes_per_client must be from 1 to {classes} (the number of classes), got {each}.")
    if clients * each < classes:
        raise DataError(
            f"{clients} clients with {each} classes each cannot cover {classes} classes; use more of either."
        )
    least = settings["min_size"]
    if each == 1 and (totals.min() < least or (totals // least).sum() < clients):
        raise DataError(f"{clients} clients cannot have {least} samples of one class each; use classes_per_client=2.")
    if each == classes:
        return np.ones((classes, clients), dtype=bool)
    owns, owners = np.zeros((classes, clients), dtype=bool), np.zeros(classes)
    for client in range(clients):
        rank = (owners + random.random(classes)) / totals  # at most `clients`
        rank[owners >= totals // least] += clients
        rank[owners == 0] = random.random(np.count_nonzero(owners == 0)) - 1
        assigned = np.argsort(rank)[:each]
        owns[assigned, client] = True
        owners[assigned] += 1
    return owns


def _normalize_rows(fractions: Fractions) -> Fractions:
    result: Fractions = fractions / fractions.sum(1, keepdims=True)
    return result


def _fill_small_clients(counts: Indices, allowed: NDArray[np.bool_], min_size: int) -> bool:
    """Move samples from the largest clients to those with too few, of allowed classes; return False if impossible."""
    sizes = counts.sum(0)
    all_allowed = bool(allowed.all())
    rows = sizes[None] if all_allowed else counts  # one heap per class, or one for all classes if any class is allowed
    donors = [[(-int(sizes[c]), int(c)) for c in np.flatnonzero((row > 0) & (sizes > min_size))] for row in rows]
    for heap in donors:
        heapq.heapify(heap)
    for client in np.flatnonzero(sizes < min_size).tolist():
        heaps = [0] if all_allowed else np.flatnonzero(allowed[:, client]).tolist()
        while (missing := min_size - sizes[client]) > 0:
            _, donor = min(_largest_donor(donors[heap], rows[heap], sizes, min_size) for heap in heaps)
            if donor < 0:
                return False
            label = int((counts[:, donor] * allowed[:, client]).argmax())
            moved = min(missing, sizes[donor] - min_size, counts[label, donor])
            for changed, amount in ((client, moved), (donor, -moved)):
                counts[label, changed] += amount
                sizes[changed] += amount
    return True


def _largest_donor(heap: list[tuple[int, int]], row: Indices, sizes: Indices, min_size: int) -> tuple[int, int]:
    """Return (-size, client) of the largest client that can give samples of a class, or (0, -1) if there is none.

    Sizes in the heap may be outdated, but only too large, because donors never grow.
    """
    while heap:
        size, donor = heap[0]
        if not row[donor] or sizes[donor] <= min_size:
            heapq.heappop(heap)
        elif -size != sizes[donor]:
            heapq.heapreplace(heap, (-int(sizes[donor]), donor))
        else:
            return heap[0]
    return 0, -1


def _members(group: Indices, groups: int = 0) -> list[Indices]:
    """Return the sorted members of group 0, group 1, and so on."""
    ends = np.cumsum(np.bincount(group, minlength=groups))
    return np.split(np.argsort(group, kind="stable"), ends[:-1])


def _assign_samples(random: np.random.Generator, class_of: Indices, counts: Indices) -> list[Indices]:
    """Assign the shuffled samples of each class to clients according to the table of counts."""
    clients = np.arange(counts.shape[1])
    owner = np.empty_like(class_of)
    for samples, row in zip(_members(class_of), counts, strict=True):
        owner[random.permutation(samples)] = np.repeat(clients, row)
    return _members(owner, len(clients))
