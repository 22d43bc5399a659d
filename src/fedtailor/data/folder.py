"""A user's own clients in a folder: one .npz file or one folder of pictures each.

    my_clients/
      hospital-a.npz        x_train, y_train, x_test, y_test; or x, y, of which a share is held out for testing
      hospital-b/           one folder a class, pictures inside; a share is held out for testing
        benign/001.png
        malignant/002.png

All clients are of one kind, and all pictures of one size. The folder may come from anybody: links that lead out of it
are refused, pickles never opened, and sizes that are merely claimed compared with this machine's memory first.
"""

import reprlib
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.arrays import npz_bytes, read_npz
from fedtailor.data.entries import inside
from fedtailor.data.partition import hold_out
from fedtailor.data.pictures import is_picture, read_picture, read_size
from fedtailor.errors import Refused
from fedtailor.federation import Federation
from fedtailor.room import check_room

_CLASSES = 10**6  # a label is the number of a class, and every client's classes are counted
_NAMES = ("x_train", "y_train", "x_test", "y_test")
Array = NDArray[Any]
Arrays = tuple[Array, Array, Array, Array]


def read_folder(folder: Path, *, test: float, seed: int) -> Federation:
    """Every client of a folder, named as its file or folder is."""
    if not 0 < test < 1:
        raise Refused(f"test must be a share between 0 and 1, not {test}.")
    try:
        return _read(folder, test, seed)
    except OSError as error:
        raise Refused(f"The folder '{folder}' cannot be read: {error.strerror}.") from error


def read_client(path: Path, name: str, *, test: float, seed: int, **extra: Any) -> Federation:
    """One client's own .npz alone; what it holds out for testing depends on its name and the seed."""
    if not path.is_file():
        raise Refused(f"There is no file '{path}'; a client's data are a .npz.")
    try:
        arrays = _read_npz(path, test, (seed, crc32(name.encode())))
    except OSError as error:
        raise Refused(f"'{path}' cannot be read: {error.strerror}.") from error
    return Federation.from_arrays([arrays], names=[name], **extra)


def _read(folder: Path, test: float, seed: int) -> Federation:
    if not folder.is_dir():
        raise Refused(f"There is no folder '{folder}'.")
    archives = inside(folder, "*.npz", Path.is_file, folder)
    folders = inside(folder, "*", Path.is_dir, folder)
    if bool(archives) == bool(folders):
        raise Refused(f"'{folder}' must hold one .npz a client, or one folder of pictures a client, and not both.")
    settings = {"name": "folder", "folder": str(folder), "test": test, "seed": seed}
    if archives:
        check_room(sum(npz_bytes(path, (*_NAMES, "x", "y")) for path in archives), f"The data in '{folder}'")
        clients = [_read_npz(path, test, (seed, client)) for client, path in enumerate(archives)]
        return Federation.from_arrays(clients, names=[path.stem for path in archives], settings=settings)
    classes = sorted({path.name for client in folders for path in inside(client, "*", Path.is_dir, folder)})
    if not classes:
        raise Refused(f"The folders in '{folder}' must hold one folder a class with pictures inside.")
    files = [_list_pictures(client, folder) for client in folders]
    check_room(sum(len(own) * 3 * prod(read_size(own[0])) for own in files), f"The pictures in '{folder}'")
    pictures = [_read_pictures(client.name, own, classes) for client, own in zip(folders, files, strict=True)]
    clients = [_hold_out(*pair, test, (seed, client)) for client, pair in enumerate(pictures)]
    names = [path.name for path in folders]
    return Federation.from_arrays(clients, names=names, classes=len(classes), settings=settings)


def _read_npz(path: Path, test: float, seed: tuple[int, int]) -> Arrays:
    arrays, found = read_npz(path, (*_NAMES, "x", "y"))
    for name, labels in arrays.items():
        if name.startswith("y"):
            _check_labels(labels, path.stem)
    if set(_NAMES) <= arrays.keys():
        x_train, y_train, x_test, y_test = (arrays[name] for name in _NAMES)
        return x_train, y_train, x_test, y_test
    if {"x", "y"} <= arrays.keys():
        x, y = arrays["x"], arrays["y"]
        if not x.ndim or not y.ndim or len(x) != len(y):
            raise Refused(f"Client {path.stem}'s x {x.shape} and y {y.shape} must have one row for every sample.")
        return _hold_out(x, y, test, seed)
    has = f"it has {reprlib.repr(found)}"
    raise Refused(f"'{path.name}' must hold x_train, y_train, x_test and y_test, or x and y; {has}.")


def _check_labels(labels: Array, client: str) -> None:
    if labels.ndim == 1 and labels.dtype.kind in "iu" and labels.max(initial=0) >= _CLASSES:
        hint = "number the classes from 0 on, and save targets that are no classes as floats"
        raise Refused(f"Client {client} has the label {labels.max()}; {hint}.")


def _hold_out(x: Array, y: Array, test: float, seed: tuple[int, int]) -> Arrays:
    kept, held = hold_out(y, np.arange(len(y)), test, seed)
    return x[kept], y[kept], x[held], y[held]


def _list_pictures(client: Path, root: Path) -> list[Path]:
    files = inside(client, "**/*", is_picture, root)
    stray = next((path for path in files if path.parent.parent != client), None)
    if stray is not None:
        raise Refused(f"Client {client.name}: '{stray.relative_to(client)}' must lie in a folder that is its class.")
    if not files:
        raise Refused(f"Client {client.name} has no training data; put pictures into '{client.name}/CLASS/'.")
    return files


def _read_pictures(client: str, files: list[Path], classes: list[str]) -> tuple[Array, Array]:
    first, pictures = read_size(files[0]), list[Array]()
    for path in files:
        picture = read_picture(path, first)
        if picture is None or (pictures and picture.shape != pictures[0].shape):
            raise Refused(f"Client {client}: '{path.name}' has another size or other channels than '{files[0].name}'.")
        pictures.append(picture)
    return np.stack(pictures), np.array([classes.index(path.parent.name) for path in files])
