"""Splits that are given: by the natural owners of samples, or by a user's file of sample indices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.core.untrusted_input import parse_json, read_text
from fedtailor.data.partition import Indices, group_samples
from fedtailor.data.samples import check_owned, client_names
from fedtailor.errors import DataError, reason

_MAX_BYTES = 2**30  # of a file of indices; 100 million samples


@dataclass(frozen=True, eq=False)
class ClientIndices:
    """The samples of each client: for training, and for testing if these are given as well."""

    names: tuple[str, ...]
    train: tuple[Indices, ...]  # all samples of each client if `test` is None
    test: tuple[Indices, ...] | None = None


def group_owners(
    owner: Indices,
    names: Sequence[str],
    *,
    owners_per_client: int = 1,
    clients: int | None = None,
    min_size: int = 2,
    seed: int = 0,
) -> ClientIndices:
    """Return clients that each have the samples of one owner, or of several consecutive ones.

    `owner` has the number of each sample's owner in `names`. Clients with fewer than `min_size` samples are left out,
    and of the others, `clients` are drawn at random; by default, all remain.

    >>> group_owners(np.array([0, 0, 1, 2, 2, 3]), ["ann", "bob", "cem", "dan"], owners_per_client=2).names
    ('ann to bob', 'cem to dan')
    """
    if owners_per_client < 1:
        raise DataError(f"owners_per_client must be at least 1, got {owners_per_client}.")
    groups = group_samples(owner // owners_per_client, -(-len(names) // owners_per_client))
    large = np.array([number for number, own in enumerate(groups) if len(own) >= min_size], dtype=np.int64)
    if not len(large):
        raise DataError(f"No owner has {min_size} samples; use a smaller min_size or more owners_per_client.")
    if clients is not None:
        if not 1 <= clients <= len(large):
            raise DataError(f"There are owners for 1 to {len(large)} clients with {min_size} samples, got {clients}.")
        large = np.sort(np.random.default_rng([seed, 3]).permutation(large)[:clients])
    chosen = [names[number * owners_per_client :][:owners_per_client] for number in large.tolist()]
    labels = tuple(group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in chosen)
    return ClientIndices(labels, tuple(groups[number] for number in large.tolist()))


def read_indices(path: Path, samples: int) -> ClientIndices:
    """Read a JSON file of sample indices, numbered from 0.

    The file contains one list of indices per client, in a list or by the client's name; or the object {"train": ...,
    "test": ...} of two such collections for the same clients.
    """
    text, where = read_text(path, "The file of indices", _MAX_BYTES), f"The file of indices '{path}'"
    try:
        content = parse_json(text)
    except ValueError as error:
        raise DataError(f"{where} is not valid JSON: {reason(error)}.") from error
    if not (isinstance(content, dict) and content.keys() == {"train", "test"}):
        names, train = _clients(content, where, samples)
        check_owned(train, names, samples)
        return ClientIndices(names, train)
    names, train = _clients(content["train"], where, samples)
    test_names, test = _clients(content["test"], where, samples)
    if names != test_names:
        raise DataError(f"{where} must contain the same clients, in the same order, in 'train' and in 'test'.")
    check_owned([np.concatenate(pair) for pair in zip(train, test, strict=True)], names, samples)
    return ClientIndices(names, train, test)


def _clients(content: Any, where: str, samples: int) -> tuple[tuple[str, ...], tuple[Indices, ...]]:
    if not isinstance(content, list | Mapping):
        raise DataError(f"{where} must contain one list of sample indices per client, got {type(content).__name__}.")
    names = client_names(list(content) if isinstance(content, Mapping) else None, len(content))
    rows = list(content.values()) if isinstance(content, Mapping) else content
    for name, row in zip(names, rows, strict=True):
        if not isinstance(row, list) or not all(type(index) is int and 0 <= index < samples for index in row):
            expected = f"a list of sample indices from 0 to {samples - 1}"
            raise DataError(f"{where} must contain {expected} for client {name}.")
    return names, tuple(np.array(row, dtype=np.int64) for row in rows)
