"""The user's own split: a file of sample indices."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.untrusted_input import parse_json, read_text
from fedtailor.data.splits.class_fractions import Indices
from fedtailor.data.splits.owners import check_owned, client_names
from fedtailor.errors import DataError, reason

_MAX_BYTES = 2**30  # of a file of indices; 100 million samples


@dataclass(frozen=True, eq=False)
class ClientIndices:
    """The samples of each client, and whether a sample is for testing, if the file says so."""

    names: tuple[str, ...]
    samples: list[Indices]
    is_test: NDArray[np.bool_] | None = None


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
    has_parts = isinstance(content, dict) and content.keys() == {"train", "test"}
    contents = [content["train"], content["test"]] if has_parts else [content]
    parts = [_clients(part, where, samples) for part in contents]
    names = parts[0][0]
    if any(others != names for others, _ in parts):
        raise DataError(f"{where} must contain the same clients, in the same order, in 'train' and in 'test'.")
    owned = [np.concatenate(own) for own in zip(*(rows for _, rows in parts), strict=True)]
    check_owned(owned, names, samples)
    is_test = np.isin(np.arange(samples), np.concatenate(parts[1][1])) if has_parts else None
    return ClientIndices(names, owned, is_test)


def _clients(content: Any, where: str, samples: int) -> tuple[tuple[str, ...], list[Indices]]:
    if not isinstance(content, list | Mapping):
        raise DataError(f"{where} must contain one list of sample indices per client, got {type(content).__name__}.")
    names = client_names(list(content) if isinstance(content, Mapping) else None, len(content))
    rows = list(content.values()) if isinstance(content, Mapping) else content
    for name, row in zip(names, rows, strict=True):
        if not isinstance(row, list) or not all(type(index) is int and 0 <= index < samples for index in row):
            expected = f"a list of sample indices from 0 to {samples - 1}"
            raise DataError(f"{where} must contain {expected} for client {name}.")
    return names, [np.array(row, dtype=np.int64) for row in rows]
