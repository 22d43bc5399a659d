"""The natural owners of samples, such as writers or patients, as clients."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedtailor.data.splits.class_fractions import Indices
from fedtailor.data.splits.partition import group_samples, make_generator
from fedtailor.errors import DataError


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
    return [str(owner) for owner in known], group_samples(np.array([number[owner] for owner in plain]))


def choose_owners(
    owner: Indices, names: Sequence[str], clients: int | None, owners_per_client: int, min_size: int, seed: int
) -> tuple[list[str], list[Indices]]:
    """Return the names of clients that each have the samples of one owner, or of several consecutive ones, and the
    indices of these samples.

    `owner` has the number of each sample's owner. Clients with fewer than `min_size` samples are left out, and of the
    others, `clients` are drawn at random; None keeps all.

    >>> choose_owners(np.array([0, 0, 1, 2, 2, 3]), ["ann", "bob", "cem", "dan"], None, 2, min_size=2, seed=0)[0]
    ['ann to bob', 'cem to dan']
    """
    if owners_per_client < 1:
        raise DataError(f"owners_per_client must be at least 1, got {owners_per_client}.")
    members = group_samples(owner // owners_per_client)
    large = [number for number, own in enumerate(members) if len(own) >= min_size]
    if not large or (clients is not None and not 1 <= clients <= len(large)):
        what = "owners" if owners_per_client == 1 else "groups of owners"
        found = f"{len(large):,} {what} have {min_size} samples or more"
        raise DataError(f"{found}; set data.clients from 1 to that number, or a smaller data.min_size.")
    if clients is not None:
        large = sorted(make_generator([seed], 3).choice(large, clients, replace=False).tolist())
    groups = [names[number * owners_per_client :][:owners_per_client] for number in large]
    labels = [group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in groups]
    return labels, [members[number] for number in large]


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


def client_names(names: Sequence[str] | None, clients: int) -> tuple[str, ...]:
    """Return the names of the clients, by default their numbers; they must be unique."""
    if not clients:
        raise DataError("A federation needs at least one client.")
    labels = tuple(str(name) for name in (range(clients) if names is None else names))
    if len(labels) != clients:
        raise DataError(f"There are {clients} clients but {len(labels)} names; give one name per client.")
    name, times = Counter(labels).most_common(1)[0]
    if times > 1:
        raise DataError(f"{times} clients have the name {name}; names must be unique.")
    return labels


def check_owned(owned: Sequence[Indices], names: Sequence[str], samples: int) -> None:
    """Raise an error if clients own samples that do not exist, or the same sample."""
    for name, own in zip(names, owned, strict=True):
        if len(own) and (own.min() < 0 or own.max() >= samples):
            raise DataError(f"Client {name} owns samples that do not exist; indices must be from 0 to {samples - 1}.")
    owners = np.bincount(np.concatenate(owned), minlength=1)
    if owners.max() > 1:
        raise DataError(f"Sample {owners.argmax()} is owned twice; each sample must belong to one client.")
