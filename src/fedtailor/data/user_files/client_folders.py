"""Reader of a folder with a user's clients: one .npz file or one folder of images per client.

    my_clients/
      hospital-a.npz        x_train, y_train, x_test, y_test; or x, y, of which a fraction is held out for testing
      hospital-b/           one folder per class with images; a fraction is held out for testing
        benign/001.png
        malignant/002.png

All clients have the same format, and all images have the same size. The folder is untrusted: links that leave it raise
`DataError`, pickles are never opened, and declared sizes are compared with this machine's memory before reading.
"""

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.core.memory_limits import check_memory
from fedtailor.data.client_arrays import ClientArrays
from fedtailor.data.formats.folder_entries import list_entries
from fedtailor.data.formats.image_files import is_image, read_image, read_image_size
from fedtailor.data.formats.npz import npz_bytes, read_npz
from fedtailor.data.splits.partition import hold_out
from fedtailor.data.survival_targets import strata_of
from fedtailor.errors import DataError, unknown_name

_MAX_CLASSES = 10**6  # limits the memory for counts of each client's classes
_NAMES = ("x_train", "y_train", "x_test", "y_test")
Array = NDArray[Any]
Arrays = tuple[Array, Array, Array, Array]


@dataclass(frozen=True)
class ClientFolder:
    """The clients that a folder contains, before their samples are read."""

    files: dict[str, list[Path]]  # client -> its .npz file, or its images
    size: int  # bytes of all samples
    class_names: tuple[str, ...] | None  # None: .npz files, which contain the labels
    test: float  # fraction of samples that is held out
    seed: int
    survival: bool = False  # whether targets are (event, time)

    def read(self) -> Iterator[tuple[str, Arrays]]:
        """Yield the name and the samples of one client after another."""
        for client, (name, files) in enumerate(self.files.items()):
            if self.class_names is None:
                yield name, _read_npz(files[0], self.test, (self.seed, client), self.survival)
            else:
                pair = _read_images(name, files, self.class_names)
                yield name, _hold_out(*pair, self.test, (self.seed, client), False, name)


def read_folder(folder: Path, *, test: float, seed: int, survival: bool = False) -> ClientArrays:
    """Read all clients in a folder; `test` is the fraction of samples that is held out."""
    found = list_clients(folder, test=test, seed=seed, survival=survival)
    check_memory(found.size, f"The {'data' if found.class_names is None else 'images'} in '{folder}'")
    try:
        return ClientArrays([arrays for _, arrays in found.read()], list(found.files), found.class_names)
    except OSError as error:
        raise DataError(f"The folder '{folder}' cannot be read: {error.strerror}.") from error


def list_clients(folder: Path, *, test: float, seed: int, survival: bool = False) -> ClientFolder:
    """Return the clients in a folder without reading their samples, so that they can be read one after another."""
    if not 0 < test < 1:
        raise DataError(f"test must be a fraction between 0 and 1, got {test}.")
    try:
        return replace(_list_clients(folder, test, seed), survival=survival)
    except OSError as error:
        raise DataError(f"The folder '{folder}' cannot be read: {error.strerror}.") from error


def read_client(path: Path, name: str, *, test: float, seed: int, survival: bool = False) -> Arrays:
    """Read one client's .npz file; its test split depends on its name and the seed."""
    if not path.is_file():
        known = "an .npz file, a table, a folder of images, or a file of Federation.save"
        raise DataError(f"There is no file '{path}'; a client's data must be {known}.")
    try:
        return _read_npz(path, test, (seed, crc32(name.encode())), survival)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}.") from error


def read_image_client(folder: Path, name: str, classes: tuple[str, ...], *, test: float, seed: int) -> Arrays:
    """Read one client's folder of images, with one folder per class; classes may be missing.

    >>> read_image_client(Path("nowhere"), "hospital-a", ("benign", "malignant"), test=0.25, seed=0)
    Traceback (most recent call last):
    fedtailor.errors.DataError: Client nowhere has no training data; put images into 'nowhere/CLASS/'.
    """
    try:
        for found in list_entries(folder, "*", Path.is_dir, folder):
            if found.name not in classes:
                raise unknown_name(f"class in '{folder}' named", found.name, classes)
        images = _read_images(name, _list_images(folder, folder), classes)
    except OSError as error:
        raise DataError(f"The folder '{folder}' cannot be read: {error.strerror}.") from error
    return hold_out_client(*images, name, test=test, seed=seed)


def hold_out_client(x: Array, y: Array, name: str, *, test: float, seed: int, survival: bool = False) -> Arrays:
    """Hold out test samples of one client; they depend on its name and the seed.

    >>> [len(part) for part in hold_out_client(np.zeros((8, 3)), np.arange(8) % 2, "a", test=0.25, seed=0)]
    [6, 6, 2, 2]
    """
    return _hold_out(x, y, test, (seed, crc32(name.encode())), survival, name)


def _list_clients(folder: Path, test: float, seed: int) -> ClientFolder:
    if not folder.is_dir():
        raise DataError(f"There is no folder '{folder}'.")
    archives = list_entries(folder, "*.npz", Path.is_file, folder)
    folders = list_entries(folder, "*", Path.is_dir, folder)
    if bool(archives) == bool(folders):
        raise DataError(f"'{folder}' must contain either one .npz file per client or one folder of images per client.")
    if archives:
        size = sum(npz_bytes(path, (*_NAMES, "x", "y")) for path in archives)
        return ClientFolder({path.stem: [path] for path in archives}, size, None, test, seed)
    classes = sorted({path.name for client in folders for path in list_entries(client, "*", Path.is_dir, folder)})
    if not classes:
        raise DataError(f"Each client folder in '{folder}' must contain one folder of images per class.")
    files = {client.name: _list_images(client, folder) for client in folders}
    size = sum(len(own) * 3 * prod(read_image_size(own[0])) for own in files.values())
    return ClientFolder(files, size, tuple(classes), test, seed)


def _read_npz(path: Path, test: float, seed: tuple[int, int], survival: bool) -> Arrays:
    arrays, found = read_npz(path, (*_NAMES, "x", "y"))
    for name, labels in arrays.items():
        if name.startswith("y"):
            _check_labels(labels, path.stem)
    if set(_NAMES) <= arrays.keys():
        x_train, y_train, x_test, y_test = (arrays[name] for name in _NAMES)
        return x_train, y_train, x_test, y_test
    if {"x", "y"} <= arrays.keys():
        return _hold_out(arrays["x"], arrays["y"], test, seed, survival, path.stem)
    required = "x_train, y_train, x_test, and y_test, or x and y"
    raise DataError(f"'{path.name}' must contain {required}; it contains {reprlib.repr(found)}.")


def _check_labels(labels: Array, client: str) -> None:
    if labels.ndim == 1 and labels.dtype.kind in "iu" and labels.max(initial=0) >= _MAX_CLASSES:
        hint = "number the classes from 0, and save targets that are not classes as floats"
        raise DataError(f"Client {client} has the label {labels.max()}; {hint}.")


def _hold_out(x: Array, y: Array, test: float, seed: tuple[int, int], survival: bool, client: str) -> Arrays:
    if not x.ndim or not y.ndim or len(x) != len(y):
        raise DataError(f"Client {client}'s x {x.shape} and y {y.shape} must have one row per sample.")
    strata = strata_of(torch.from_numpy(y), survival=True) if survival else None
    kept, held = hold_out(y if strata is None else strata, np.arange(len(y)), test, seed)
    return x[kept], y[kept], x[held], y[held]


def _list_images(client: Path, root: Path) -> list[Path]:
    files = list_entries(client, "**/*", is_image, root)
    stray = next((path for path in files if path.parent.parent != client), None)
    if stray is not None:
        raise DataError(
            f"Client {client.name}: '{stray.relative_to(client)}' must be in a folder named after its class."
        )
    if not files:
        raise DataError(f"Client {client.name} has no training data; put images into '{client.name}/CLASS/'.")
    return files


def _read_images(client: str, files: list[Path], classes: tuple[str, ...]) -> tuple[Array, Array]:
    size, images = read_image_size(files[0]), list[Array]()
    check_memory(len(files) * 3 * prod(size), f"Client {client}'s images")
    for path in files:
        image = read_image(path, size)
        if image is None or (images and image.shape != images[0].shape):
            first = files[0].name
            raise DataError(f"Client {client}: '{path.name}' differs from '{first}' in size or number of channels.")
        images.append(image)
    return np.stack(images), np.array([classes.index(path.parent.name) for path in files])
