"""Who owns which sample. Every partition is a pure function of labels, settings and seed.

Each one draws a table of shares [classes, clients]; one function cuts the samples of every class by its row, so every
sample belongs to exactly one client.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.errors import Refused, unknown

Indices = NDArray[np.int64]
Shares = NDArray[np.float64]  # [classes, clients], rows sum to 1


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
    `pathological`: every client has `classes_per_client` (2) classes, in unequal amounts. `power_law`: the k-th client
    is k^-exponent as large as the first, with `classes_per_client` classes or all of them.
    A client that would end with fewer than `min_size` samples gets the rest from the largest.

    >>> [len(own) for own in divide(np.zeros(40, int), 4, "iid")]
    [10, 10, 10, 10]
    """
    if partition not in PARTITIONS:
        raise unknown("partition", partition, [*PARTITIONS, "by_owner"])
    _check_counts(len(labels), clients, min_size)
    if partition != "iid" and not np.issubdtype(labels.dtype, np.integer):
        raise Refused(f"The partition '{partition}' needs classes as labels; use 'iid' for other targets.")
    random = np.random.default_rng([seed, 1])
    kinds = np.zeros(len(labels), np.int64) if partition == "iid" else labels
    groups = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
    settings = {"alpha": alpha, "classes_per_client": classes_per_client, "exponent": exponent}
    totals = np.array([len(group) for group in groups])
    shares = PARTITIONS[partition](random, totals, clients, settings)
    cuts = np.round(np.cumsum(shares, axis=1) * totals[:, None]).astype(np.int64)
    counts = np.diff(cuts, axis=1, prepend=0)  # [classes, clients]
    allowed = shares > 0 if partition != "dirichlet" else np.ones(shares.shape, dtype=bool)
    return _cut(random, groups, _feed_the_poor(counts, allowed, min_size))


def by_owner(owners: Sequence[Any]) -> tuple[list[str], list[Indices]]:
    """One client for every distinct owner, with its samples.

    >>> by_owner(["b", "a", "b"])[0]
    ['a', 'b']
    """
    names, inverse = np.unique(np.asarray(owners), return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    return [str(name) for name in names], np.split(order, np.cumsum(np.bincount(inverse))[:-1])


def hold_out(labels: NDArray[Any], samples: Indices, share: float, seed: Sequence[int]) -> tuple[Indices, Indices]:
    """Cut a client's samples into (kept, held out) with the same proportions of classes in both.

    Whoever has two samples or more keeps at least one and holds out at least one.
    """
    if share <= 0 or len(samples) < 2:
        return samples, samples[:0]
    random = np.random.default_rng([*seed, 2])
    shuffled = random.permutation(samples)
    if np.issubdtype(labels.dtype, np.integer):  # walking through the classes in turn spreads the cut over all of them
        shuffled = shuffled[np.argsort(labels[shuffled], kind="stable")]
    total = int(np.clip(round(len(samples) * share), 1, len(samples) - 1))
    places = ((np.arange(total) + random.random()) * len(samples) / total).astype(np.int64)
    held = np.zeros(len(samples), dtype=bool)
    held[places] = True
    return np.sort(shuffled[~held]), np.sort(shuffled[held])


def _check_counts(samples: int, clients: int, min_size: int) -> None:
    if clients < 1:
        raise Refused(f"A federation needs at least one client, not {clients}.")
    if min_size < 2:
        raise Refused(f"min_size must be at least 2, one sample to train on and one to test on, not {min_size}.")
    if clients * min_size > samples:
        most = f"ask for at most {samples // min_size} clients or a smaller min_size"
        raise Refused(f"{samples} samples cannot give {clients} clients {min_size} each; {most}.")


def _iid(random: np.random.Generator, counts: Indices, clients: int, settings: dict[str, Any]) -> Shares:
    return np.full((len(counts), clients), 1 / clients)


def _dirichlet(random: np.random.Generator, counts: Indices, clients: int, settings: dict[str, Any]) -> Shares:
    alpha = settings["alpha"]
    if not alpha > 0:
        raise Refused(f"alpha must be above 0 (small: every client its own classes; large: all alike), not {alpha}.")
    fair, size, shares = counts.sum() / clients, np.zeros(clients), []
    for count in counts:
        # gamma draws in logarithms, for at a small alpha all of them may underflow to 0
        logs = np.log(random.gamma(alpha + 1, size=clients)) + np.log(random.random(clients)) / alpha
        logs = np.where(size < fair, logs, -np.inf)
        row = np.exp(logs - logs.max())
        shares.append(row / row.sum())
        size += count * shares[-1]
    return np.array(shares)


def _pathological(random: np.random.Generator, counts: Indices, clients: int, settings: dict[str, Any]) -> Shares:
    owns = _deal_classes(random, len(counts), clients, settings["classes_per_client"] or 2)
    return _rows_to_one(owns * random.uniform(0.1, 1, owns.shape))


def _power_law(random: np.random.Generator, counts: Indices, clients: int, settings: dict[str, Any]) -> Shares:
    if settings["exponent"] < 0:
        raise Refused(f"exponent must be at least 0 (0: all clients alike), not {settings['exponent']}.")
    owns = _deal_classes(random, len(counts), clients, settings["classes_per_client"] or len(counts))
    return _rows_to_one(owns * (random.permutation(clients) + 1.0) ** -settings["exponent"])


PARTITIONS: dict[str, Callable[[np.random.Generator, Indices, int, dict[str, Any]], Shares]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "pathological": _pathological,
    "power_law": _power_law,
}


def _deal_classes(random: np.random.Generator, classes: int, clients: int, each: int) -> NDArray[np.bool_]:
    """Give every client `each` classes, always the ones that have fewest owners so far."""
    if not 1 <= each <= classes:
        raise Refused(f"classes_per_client must be from 1 to {classes}, the number of classes, not {each}.")
    if clients * each < classes:
        raise Refused(f"{clients} clients of {each} classes leave some of the {classes} classes without an owner.")
    owns = np.zeros((classes, clients), dtype=bool)
    for client in range(clients):
        owns[np.argsort(owns.sum(1) + random.random(classes))[:each], client] = True
    return owns


def _rows_to_one(shares: Shares) -> Shares:
    result: Shares = shares / shares.sum(1, keepdims=True)
    return result


def _feed_the_poor(counts: Indices, allowed: NDArray[np.bool_], min_size: int) -> Indices:
    """Move samples from the largest client to whoever has too few, of classes he may have."""
    counts = counts.copy()
    for client in range(counts.shape[1]):
        while (missing := min_size - counts[:, client].sum()) > 0:
            spare = np.minimum(counts, counts.sum(0) - min_size) * allowed[:, [client]]
            spare[:, client] = 0
            kind, giver = np.unravel_index(np.argmax((spare > 0) * counts.sum(0) + spare * 1e-9), spare.shape)
            moved = min(missing, spare[kind, giver])
            if moved <= 0:
                raise Refused(f"Not every client can have {min_size} samples of its classes; ask for fewer clients.")
            counts[kind, client] += moved
            counts[kind, giver] -= moved
    return counts


def _cut(random: np.random.Generator, groups: list[Indices], counts: Indices) -> list[Indices]:
    """Hand out the samples of every class, shuffled, by the table of counts."""
    parts = [np.split(random.permutation(g), np.cumsum(row)[:-1]) for g, row in zip(groups, counts, strict=True)]
    return [np.sort(np.concatenate(own)) for own in zip(*parts, strict=True)]
