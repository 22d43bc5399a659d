"""A user's own clients in a folder: one .npz file or one folder of pictures each.

    my_clients/
      hospital-a.npz        x_train, y_train, x_test, y_test; or x, y, of which a share is held out for testing
      hospital-b/           one folder a class, pictures inside; a share is held out for testing
        benign/001.png
        malignant/002.png

All clients are of one kind, and all pictures of one size.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedtailor.data.partition import hold_out
from fedtailor.errors import Refused
from fedtailor.federation import Federation

PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp"}
_NAMES = ("x_train", "y_train", "x_test", "y_test")
Array = NDArray[Any]
Arrays = tuple[Array, Array, Array, Array]


def read_folder(folder: Path, *, test: float, seed: int) -> Federation:
    """Every client of a folder, named as its file or folder is."""
    if not folder.is_dir():
        raise Refused(f"There is no folder '{folder}'.")
    if not 0 < test < 1:
        raise Refused(f"test must be a share between 0 and 1, not {test}.")
    archives = [path for path in _visible(folder, "*.npz") if path.is_file()]
    folders = [path for path in _visible(folder, "*") if path.is_dir()]
    if bool(archives) == bool(folders):
        raise Refused(f"'{folder}' must hold one .npz a client, or one folder of pictures a client, and not both.")
    settings = {"name": "folder", "folder": str(folder), "test": test, "seed": seed}
    if archives:
        clients = [_read_npz(path, test, (seed, client)) for client, path in enumerate(archives)]
        return Federation.from_arrays(clients, names=[path.stem for path in archives], settings=settings)
    classes = sorted({path.name for client in folders for path in _visible(client, "*") if path.is_dir()})
    if not classes:
        raise Refused(f"The folders in '{folder}' must hold one folder a class with pictures inside.")
    pictures = [_read_pictures(path, classes) for path in folders]
    clients = [_hold_out(*pair, test, (seed, client)) for client, pair in enumerate(pictures)]
    names = [path.name for path in folders]
    return Federation.from_arrays(clients, names=names, classes=len(classes), settings=settings)


def _visible(folder: Path, pattern: str) -> list[Path]:
    """What is in a folder, in order, without what editors and systems leave behind (.ipynb_checkpoints/, ._x.png)."""
    found = sorted(folder.glob(pattern))
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def _read_npz(path: Path, test: float, seed: tuple[int, int]) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = archive.files
            arrays = {name: np.asarray(archive[name]) for name in found if name in (*_NAMES, "x", "y")}
    except Exception as error:  # zipfile, zlib and numpy have many ways to say that a file is broken
        hint = "write it with numpy.savez, without objects inside"
        raise Refused(f"'{path.name}' cannot be read as a .npz of plain arrays; {hint}.") from error
    if set(_NAMES) <= arrays.keys():
        x_train, y_train, x_test, y_test = (arrays[name] for name in _NAMES)
        return x_train, y_train, x_test, y_test
    if {"x", "y"} <= arrays.keys():
        x, y = arrays["x"], arrays["y"]
        if not x.ndim or not y.ndim or len(x) != len(y):
            raise Refused(f"Client {path.stem}'s x {x.shape} and y {y.shape} must have one row for every sample.")
        return _hold_out(x, y, test, seed)
    raise Refused(f"'{path.name}' must hold x_train, y_train, x_test and y_test, or x and y; it has {found}.")


def _hold_out(x: Array, y: Array, test: float, seed: tuple[int, int]) -> Arrays:
    kept, held = hold_out(y, np.arange(len(y)), test, seed)
    return x[kept], y[kept], x[held], y[held]


def _read_pictures(folder: Path, classes: list[str]) -> tuple[Array, Array]:
    files = [path for path in _visible(folder, "**/*") if path.suffix.lower() in PICTURES and path.is_file()]
    stray = next((path for path in files if path.parent.parent != folder), None)
    if stray is not None:
        raise Refused(f"Client {folder.name}: '{stray.relative_to(folder)}' must lie in a folder that is its class.")
    if not files:
        raise Refused(f"Client {folder.name} has no training data; put pictures into '{folder.name}/CLASS/'.")
    pictures = [_read_picture(path) for path in files]
    odd = next((p for p, picture in zip(files, pictures, strict=True) if picture.shape != pictures[0].shape), None)
    if odd is not None:
        raise Refused(f"Client {folder.name}: '{odd.name}' has another size or other channels than '{files[0].name}'.")
    return np.stack(pictures), np.array([classes.index(path.parent.name) for path in files])


def _read_picture(path: Path) -> Array:
    """Bytes, [channels, height, width]."""
    try:
        with Image.open(path) as picture:
            mode = picture.mode
            if mode.startswith("I;16"):  # sixteen bits of grey, as scanners write: keep the upper eight
                pixels = (np.asarray(picture) >> 8).astype(np.uint8)
            else:
                pixels = np.asarray(picture.convert("L" if mode in ("1", "L", "LA") else "RGB"))
    except Exception as error:  # whatever a decoder raises on a broken file
        raise Refused(f"'{path.name}' in '{path.parent}' is not a picture that can be read.") from error
    if mode in ("I", "F"):  # no known range, so no way to make bytes of them
        raise Refused(f"'{path.name}' in '{path.parent}' has 32-bit pixels; save it with 8 or 16 bits, or as .npz.")
    return np.moveaxis(np.atleast_3d(pixels), 2, 0)
