"""Reader of the data sets that PFLlib generates: one .npz file per client in each of the folders train and test.

    MNIST/
      config.json           num_clients, num_classes, and how the data was split
      train/0.npz ...       data: a pickled dict with the arrays x and y; plain arrays x and y are read as well
      test/0.npz ...

As in PFLlib, x becomes float32 and y int64. The folder is untrusted; see `fedtailor.data.formats.numpy_pickle`.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.memory_limits import check_memory
from fedtailor.core.untrusted_input import parse_json, read_text
from fedtailor.data.client_arrays import ClientArrays
from fedtailor.data.formats.folder_entries import check_entry
from fedtailor.data.formats.npz import npz_bytes, read_npz, read_object_array
from fedtailor.data.formats.numpy_pickle import unpickle_arrays
from fedtailor.errors import DataError

_MAX_CONFIG = 10**8  # bytes of config.json, which lists the classes of every client
_MAX_COUNT = 10**6  # clients or classes


def read_pfllib(folder: Path) -> tuple[ClientArrays, int | None]:
    """Return the clients in a folder of PFLlib and the number of classes, if config.json names it."""
    for name in ("config.json", "train", "test"):
        check_entry(folder / name, folder)
    clients, classes = _read_config(folder)
    files = [[folder / part / f"{client}.npz" for part in ("train", "test")] for client in range(clients)]
    for path in (path for pair in files for path in pair):
        if not path.is_file():
            where = f"config.json names {clients} clients"
            raise DataError(f"There is no file '{path}', but {where}; generate the data set again.")
        check_entry(path, folder)
    check_memory(sum(npz_bytes(path, ("data", "x", "y")) for pair in files for path in pair), f"The data in '{folder}'")
    arrays = [(*_read_samples(train), *_read_samples(test)) for train, test in files]
    return ClientArrays(arrays, [str(client) for client in range(clients)]), classes


def _read_config(folder: Path) -> tuple[int, int | None]:
    """Return the numbers of clients and classes; the files of more clients may be left from an earlier split."""
    path = folder / "config.json"
    if not path.is_file():
        raise DataError(f"There is no file '{path}'; give the folder of a data set that PFLlib generated.")
    try:
        config = parse_json(read_text(path, "The file", _MAX_CONFIG))
        clients, classes = config["num_clients"], config.get("num_classes")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"'{path}' is not a configuration of PFLlib; it must contain num_clients.") from error
    for name, count in (("num_clients", clients), ("num_classes", classes)):
        if count is not None and (type(count) is not int or not 1 <= count <= _MAX_COUNT):
            raise DataError(f"{name} in '{path}' must be an integer from 1 to {_MAX_COUNT}.")
    return clients, classes


def _read_samples(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    pickled = read_object_array(path, "data")
    try:
        arrays, found = read_npz(path, ("x", "y")) if pickled is None else (unpickle_arrays(pickled), [])
    except DataError as error:
        raise DataError(f"'{path}' cannot be read. {error}") from error
    if not {"x", "y"} <= arrays.keys():
        raise DataError(f"'{path}' must contain x and y, or data with both; it contains {[*arrays, *found][:5]}.")
    for name in ("x", "y"):
        if arrays[name].dtype.kind not in "biuf":
            raise DataError(f"{name} in '{path}' must be numbers, got {arrays[name].dtype}.")
    return np.asarray(arrays["x"], np.float32), np.asarray(arrays["y"], np.int64)
