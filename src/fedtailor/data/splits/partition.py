"""Partitions of samples into clients, as pure functions of labels, settings, and seed.

Each partition draws a table of fractions [classes, clients]; see `fedtailor.data.splits.class_fractions`. The samples
of each class are then divided according to its row, so that every sample belongs to at most one client.
"""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.splits.class_fractions import PARTITIONS, Indices, SplitSettings
from fedtailor.errors import DataError, unknown_name

_MAX_ATTEMPTS = 20  # of assigning classes to clients
_MAX_REDRAWS = 10_000  # Dir(0.1) of CIFAR-10 over 50 clients with 129 samples or more needs 500 on average


def partition_samples(
    labels: NDArray[Any], clients: int, partition: str = "dirichlet", *, seed: int = 0, **settings: Any
) -> list[Indices]:
    """Return the indices of each client's samples; the settings are the fields of `SplitSettings`.

    - `iid`: all clients have the same number of samples, drawn at random.
    - `dirichlet`: the samples of each class are distributed over the clients by Dir(alpha). With `cap`, as in PFLlib, a
      client that already has 1/clients of all samples gets no more.
    - `pathological`: each client has at most `classes_per_client` (default 2) classes, in unequal amounts. Classes are
      assigned at random, larger classes to more clients.
    - `blocks`: as in FedAPA's code, each class in turn goes to the first clients that have fewer than
      `classes_per_client` (default 2) classes, so that groups of clients have the same ones, in unequal amounts.
    - `power_law`: the k-th largest client has k^-exponent times the samples of the largest. With `classes_per_client`
      classes per client instead of all, this holds approximately.
    - `lognormal`: client u has the classes u, u + 1, ... (`classes_per_client`, default 2), modulo the number of
      classes. It gets `min_size` samples, equally from its classes, and a share of what remains of each class; the
      logarithm of a share has the standard deviation `log_std`. With `log_mean`, a client has `min_size` samples more
      than a log-normal number, equally from its classes, and the other samples belong to no client.
    - `pfedme`: as in pFedMe's code for CIFAR-10. It needs classes of thousands of samples and does not use all of them.

    A client with fewer than `min_size` samples gets more from the largest clients, of the classes that it may have.
    With `redraw`, the whole split is drawn again instead. If after 20 attempts, or 10,000 with `redraw`, a client still
    has too few samples, `DataError` is raised.

    >>> [len(own) for own in partition_samples(np.zeros(40, int), 4, "iid")]
    [10, 10, 10, 10]
    """
    if partition == "by_owner":
        raise DataError("The partition 'by_owner' needs owners; use Federation.from_dataset(dataset, owners).")
    if partition not in PARTITIONS:
        raise unknown_name("partition", partition, PARTITIONS)
    chosen = SplitSettings(**settings)
    _check_counts(len(labels), clients, chosen.min_size)
    if partition != "iid" and not are_classes(labels):
        raise DataError(f"The partition '{partition}' needs classes as labels; use 'iid' for other targets.")
    random = make_generator([seed], 1)
    class_of = np.zeros(len(labels), np.int64) if partition == "iid" else np.unique(labels, return_inverse=True)[1]
    for _ in range(_MAX_REDRAWS if chosen.redraw else _MAX_ATTEMPTS):
        counts = _draw_counts(random, np.bincount(class_of), clients, partition, chosen)
        if counts is not None:
            return _assign_samples(random, class_of, counts)
    raise _too_small(chosen)


def divide_like(labels: NDArray[Any], owned: Sequence[Indices], others: Indices, seed: int) -> list[Indices]:
    """Divide other samples, such as a test set, in the proportions in which the clients have each class, or all samples
    if the labels are not classes.

    >>> labels = np.array([0, 0, 0, 0, 1, 0, 0, 1])
    >>> [len(own) for own in divide_like(labels, [np.arange(2), np.arange(2, 5)], np.arange(5, 8), seed=0)]
    [1, 2]
    """
    random = make_generator([seed], 4)
    labels = labels if are_classes(labels) else np.zeros(len(labels), np.int64)
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


def hold_out(labels: NDArray[Any], samples: Indices, fraction: float, seed: Sequence[int]) -> tuple[Indices, Indices]:
    """Split a client's samples into (kept, held out) with the same proportions of classes in both.

    Of n samples of a class, and of all samples, n · fraction are held out, rounded up or down. If there are two samples
    or more, at least one is kept and at least one is held out.
    """
    if fraction <= 0 or len(samples) < 2:
        return samples, samples[:0]
    random = make_generator(seed, 2)
    shuffled = random.permutation(samples)
    if are_classes(labels):
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


def are_classes(labels: NDArray[Any]) -> bool:
    """Return whether targets are the numbers of classes.

    >>> are_classes(np.array([0, 1])), are_classes(np.array([0.5, 1.5]))
    (True, False)
    """
    return labels.ndim == 1 and labels.dtype.kind in "iub"


def make_generator(seed: Sequence[int], salt: int) -> np.random.Generator:
    """Return the generator of one use, the salt, of a seed."""
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


def _too_small(settings: SplitSettings) -> DataError:
    if settings.redraw:
        problem = f"None of {_MAX_REDRAWS:,} splits gives every client {settings.min_size} samples"
        return DataError(f"{problem}; use fewer clients, a smaller min_size, or redraw=false.")
    problem = f"Not all clients can have {settings.min_size} samples of {settings.classes_per_client or 2} classes"
    return DataError(f"{problem}; use fewer clients, more classes_per_client, or a smaller min_size.")


def _draw_counts(
    random: np.random.Generator, totals: Indices, clients: int, partition: str, settings: SplitSettings
) -> Indices | None:
    """Draw the numbers of samples [classes, clients]; return None if a client has too few samples."""
    fractions = PARTITIONS[partition](random, totals, clients, settings)
    cuts = np.round(np.cumsum(fractions, axis=1) * totals[:, None]).astype(np.int64)
    counts = np.diff(cuts, axis=1, prepend=0)
    if settings.redraw:
        return counts if counts.sum(0).min() >= settings.min_size else None
    allowed = fractions > 0 if partition != "dirichlet" else np.ones(fractions.shape, dtype=bool)
    return counts if _fill_small_clients(counts, allowed, settings.min_size) else None


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


def group_samples(group: Indices, groups: int = 0) -> list[Indices]:
    """Return the sorted members of group 0, group 1, and so on.

    >>> [members.tolist() for members in group_samples(np.array([1, 0, 1]))]
    [[1], [0, 2]]
    """
    ends = np.cumsum(np.bincount(group, minlength=groups))
    return np.split(np.argsort(group, kind="stable"), ends[:-1])


def _assign_samples(random: np.random.Generator, class_of: Indices, counts: Indices) -> list[Indices]:
    """Assign the shuffled samples of each class to clients according to the table of counts."""
    clients = np.arange(counts.shape[1])
    group = np.zeros_like(class_of)  # 0: no client
    for samples, row in zip(group_samples(class_of), counts, strict=True):
        group[random.permutation(samples)[: row.sum()]] = np.repeat(clients + 1, row)
    return group_samples(group, len(clients) + 1)[1:]
