"""Tables of fractions: how the samples of each class are divided among the clients.

Each function draws a table [classes, clients] for the given numbers of samples per class. A row sums to 1, or to less
if some samples of the class belong to no client.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedtailor.errors import DataError

Indices = NDArray[np.int64]
Fractions = NDArray[np.float64]  # [classes, clients]
Owns = NDArray[np.bool_]  # [classes, clients]: whether a client may have samples of a class
_MAX_ATTEMPTS = 20  # of drawing sizes that fit


@dataclass(frozen=True)
class SplitSettings:
    """Settings of partitions; each partition uses some of them, and all use `min_size` and `redraw`."""

    alpha: float = 0.1
    cap: bool = True
    classes_per_client: int | None = None
    exponent: float = 1.0
    log_mean: float | None = None
    log_std: float = 2.0
    min_size: int = 10
    redraw: bool = False


def _iid(random: np.random.Generator, totals: Indices, clients: int, settings: SplitSettings) -> Fractions:
    return np.full((len(totals), clients), 1 / clients)


def _dirichlet(random: np.random.Generator, totals: Indices, clients: int, settings: SplitSettings) -> Fractions:
    alpha = settings.alpha
    if not 0 < alpha < np.inf:
        raise DataError(f"alpha must be above 0 (small: few classes per client, large: similar clients), got {alpha}.")
    alpha = max(alpha, 1e-9)  # below this, one client gets the whole class anyway, and the logarithms overflow
    if not settings.cap:
        return _normalize_logs(_log_gamma(random, alpha, (len(totals), clients)))
    target_size, sizes, rows = totals.sum() / clients, np.zeros(clients), list[Fractions]()
    for total in totals:
        logs = _log_gamma(random, alpha, (clients,))
        rows.append(_normalize_logs(np.where(sizes < target_size, logs, -np.inf)))
        sizes += total * rows[-1]
    return np.array(rows)


def _pathological(random: np.random.Generator, totals: Indices, clients: int, settings: SplitSettings) -> Fractions:
    each = _classes_each(settings, 2, len(totals))
    owns = _assign_classes(random, totals, clients, each, settings.min_size)
    return _normalize_rows(owns * random.uniform(0.1, 1, owns.shape))


def _blocks(random: np.random.Generator, totals: Indices, clients: int, settings: SplitSettings) -> Fractions:
    """FedAPA's pathological split: each class goes to the first clients that still need classes."""
    each = _classes_each(settings, 2, len(totals))
    per_class = clients * each // len(totals)
    owns, missing = np.zeros((len(totals), clients), dtype=bool), np.full(clients, each)
    for row in owns:
        row[np.flatnonzero(missing)[:per_class]] = True
        missing -= row
    if not owns.any(0).all():
        problem = f"{clients} clients with {each} of {len(totals)} classes each cannot be dealt in blocks"
        raise DataError(f"{problem}; choose clients × classes_per_client as a multiple of the number of classes.")
    return _normalize_rows(owns * random.uniform(0.3, 0.7, owns.shape))


def _power_law(random: np.random.Generator, totals: Indices, clients: int, settings: SplitSettings) -> Fractions:
    exponent = settings.exponent
    if not 0 <= exponent < np.inf:
        raise DataError(f"exponent must be at least 0 (0: clients of equal size), got {exponent}.")
    each = _classes_each(settings, len(totals), len(totals))
    owns = _assign_classes(random, totals, clients, each, settings.min_size)
    sizes = (random.permutation(clients) + 1.0) ** -exponent
    return _normalize_rows(owns * np.maximum(sizes, 1e-100))  # above 0, so that a tiny client keeps its classes


def _lognormal(random: np.random.Generator, totals: Indices, clients: int, settings: SplitSettings) -> Fractions:
    """Log-normal amounts of consecutive classes, as in the data of FedProx that Self-FL uses."""
    _check_log_settings(settings)
    each = _classes_each(settings, 2, len(totals))
    owns, first = _consecutive_classes(len(totals), clients, each), -(-settings.min_size // each)
    if (first * owns.sum(1) > totals).any():
        label = int((first * owns.sum(1) - totals).argmax())
        problem = f"{totals[label]} samples of a class are too few for {owns[label].sum()} clients with {first} each"
        raise DataError(f"{problem}; use fewer clients or a smaller min_size.")
    if settings.log_mean is not None:
        return _draw_sizes(random, totals, owns, settings, settings.log_mean)
    shares = _normalize_logs(np.where(owns, random.normal(0, settings.log_std, owns.shape), -np.inf))
    rest = totals - first * owns.sum(1)
    fractions: Fractions = (first * owns + rest[:, None] * shares) / totals[:, None]
    return fractions


def _draw_sizes(
    random: np.random.Generator, totals: Indices, owns: Owns, settings: SplitSettings, log_mean: float
) -> Fractions:
    """Draw absolute sizes of clients, of which all classes of a client have an equal part."""
    each = int(owns[:, 0].sum())
    for _ in range(_MAX_ATTEMPTS):
        logs = np.minimum(random.normal(log_mean, settings.log_std, owns.shape[1]), np.log(totals.sum()))
        parts = np.maximum((np.exp(logs) + settings.min_size) // each, -(-settings.min_size // each))
        counts: Fractions = owns * parts
        if (counts.sum(1) <= totals).all():
            return counts / totals[:, None]
    problem = f"Clients of log-normal sizes with log_mean={log_mean} need more samples of a class than there are"
    raise DataError(f"{problem}; use fewer clients or a smaller log_mean.")


def _pfedme(random: np.random.Generator, totals: Indices, clients: int, settings: SplitSettings) -> Fractions:
    """The split of CIFAR-10 in pFedMe's code: 10 samples of each of the client's consecutive classes, and then, if the
    class still has so many, the share plus 300 to 600 samples; twice as many for up to 20 clients."""
    _check_log_settings(settings)
    owns = _consecutive_classes(len(totals), clients, each := _classes_each(settings, min(3, len(totals)), len(totals)))
    shares = _normalize_logs(random.normal(0, settings.log_std, (len(totals), clients * each)))[:, :clients]
    more = np.floor((totals - clients)[:, None] * shares) + random.integers(300, 601, shares.shape)
    more = owns * more * (2 if clients <= 20 else 1)
    counts = 10.0 * owns
    if (counts.sum(1) > totals).any():
        raise DataError(f"The partition 'pfedme' needs 10 samples for each of {clients} clients; use fewer clients.")
    for client in range(clients):
        fits = counts.sum(1) + more[:, client] < totals
        counts[:, client] += np.where(fits, more[:, client], 0)
    return counts / totals[:, None]


PARTITIONS: dict[str, Callable[[np.random.Generator, Indices, int, SplitSettings], Fractions]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "pathological": _pathological,
    "blocks": _blocks,
    "power_law": _power_law,
    "lognormal": _lognormal,
    "pfedme": _pfedme,
}


def _classes_each(settings: SplitSettings, default: int, classes: int) -> int:
    each = default if settings.classes_per_client is None else settings.classes_per_client
    if not 1 <= each <= classes:
        raise DataError(f"classes_per_client must be from 1 to {classes} (the number of classes), got {each}.")
    return each


def _check_log_settings(settings: SplitSettings) -> None:
    if not 0 <= settings.log_std < np.inf:
        raise DataError(f"log_std must be at least 0 (0: equal amounts), got {settings.log_std}.")
    if settings.log_mean is not None and not np.isfinite(settings.log_mean):
        raise DataError(f"log_mean must be a finite number, got {settings.log_mean}.")


def _assign_classes(random: np.random.Generator, totals: Indices, clients: int, each: int, min_size: int) -> Owns:
    """Assign `each` classes to every client at random.

    Classes without an owner come first, then those with the most samples per owner, and last those with too few samples
    for another owner.
    """
    classes = len(totals)
    _check_coverage(clients * each >= classes, clients, each, classes)
    if each == 1 and (totals.min() < min_size or (totals // min_size).sum() < clients):
        raise DataError(
            f"{clients} clients cannot have {min_size} samples of one class each; use classes_per_client=2."
        )
    if each == classes:
        return np.ones((classes, clients), dtype=bool)
    owns, owners = np.zeros((classes, clients), dtype=bool), np.zeros(classes)
    for client in range(clients):
        rank = (owners + random.random(classes)) / totals  # at most `clients`
        rank[owners >= totals // min_size] += clients
        rank[owners == 0] = random.random(np.count_nonzero(owners == 0)) - 1
        assigned = np.argsort(rank)[:each]
        owns[assigned, client] = True
        owners[assigned] += 1
    return owns


def _consecutive_classes(classes: int, clients: int, each: int) -> Owns:
    """Assign the classes u, u + 1, ..., modulo the number of classes, to client u."""
    owns = (np.arange(classes)[:, None] - np.arange(clients)) % classes < each
    _check_coverage(bool(owns.any(1).all()), clients, each, classes)
    return owns


def _check_coverage(is_covered: bool, clients: int, each: int, classes: int) -> None:
    if not is_covered:
        raise DataError(
            f"{clients} clients with {each} classes each cannot cover {classes} classes; use more of either."
        )


def _log_gamma(random: np.random.Generator, alpha: float, shape: tuple[int, ...]) -> Fractions:
    """Draw logarithms of gamma variates, because with a small alpha all variates of a row may underflow to 0."""
    logs: Fractions = np.log(random.gamma(alpha + 1, size=shape)) + np.log1p(-random.random(shape)) / alpha
    return logs


def _normalize_logs(logs: Fractions) -> Fractions:
    return _normalize_rows(np.exp(logs - logs.max(-1, keepdims=True)))


def _normalize_rows(fractions: Fractions) -> Fractions:
    result: Fractions = fractions / fractions.sum(-1, keepdims=True)
    return result
