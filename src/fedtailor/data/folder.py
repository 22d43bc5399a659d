"""A user's own clients in a folder: one .npz file or one folder of pictures each.

    my_clients/
      hospital-a.npz        x_train, y_train, x_test, y_test; or x, y, of which a share is held out for testing
      hospital-b/           one folder a class, pictures inside; a share is held out for testing
        benign/001.png
        malignant/002.png

All clients are of one kind, and all pictures of one size.
"""

import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from fedtailor.data.partition import hold_out
from fedtailor.errors import Refused
from fedtailor.federation import Federation

PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp"}
_NAMES = ("x_train", "y_train", "x_test", "y_test")
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def read_folder(folder: Path, *, test: float, seed: int) -> Federation:
    """Every client of a folder, named as its file or folder is."""
    if not folder.is_dir():
        raise Refused(f"There is no folder '{folder}'.")
    if not 0 < test < 1:
        raise Refused(f"test must be a share between 0 and 1, not {test}.")
    archives = sorted(folder.glob("*.npz"))
    folders = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if bool(archives) == bool(folders):
        raise Refused(f"'{folder}' must hold one .npz a client, or one folder of pictures a client, and not both.")
    settings = {"name": "folder", "folder": str(folder), "test": test, "seed": seed}
    if archives:
        clients = [_read_npz(path, test, (seed, client)) for client, path in enumerate(archives)]
        names = [path.stem for path in archives]
        return Federation.from_arrays(clients, names=names, settings=settings)
    classes = sorted({p.name for client in folders for p in client.iterdir() if p.is_dir()})
    if not classes:
        raise Refused(f"The folders in '{folder}' must hold one folder a class with pictures inside.")
    pictures = [_read_pictures(path, classes) for path in folders]
    clients = [_hold_out(*pair, test, (seed, client)) for client, pair in enumerate(pictures)]
    names = [path.name for path in folders]
    return Federation.from_arrays(clients, names=names, classes=len(classes), settings=settings)


def _read_npz(path: Path, test: float, seed: tuple[int, int]) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if name in (*_NAMES, "x", "y")}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise Refused(f"'{path.name}' cannot be read as a .npz of plain arrays: {error}.") from error
    if set(_NAMES) <= arrays.keys():
        x_train, y_train, x_test, y_test = (arrays[name] for name in _NAMES)
        return x_train, y_train, x_test, y_test
    if {"x", "y"} <= arrays.keys():
        return _hold_out(arrays["x"], arrays["y"], test, seed)
    raise Refused(f"'{path.name}' must hold x_train, y_train, x_test and y_test, or x and y; it has {sorted(arrays)}.")


def _hold_out(x: np.ndarray, y: np.ndarray, test: float, seed: tuple[int, int]) -> Arrays:
    kept, held = hold_out(y, np.arange(len(y)), test, seed)
    return x[kept], y[kept], x[held], y[held]


def _read_pictures(folder: Path, classes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    files = [p for p in sorted(folder.rglob("*")) if p.suffix.lower() in PICTURES and p.parent.name in classes]
    if not files:
        raise Refused(f"Client {folder.name} has no training data; put pictures into '{folder.name}/CLASS/'.")
    pictures = [_read_picture(path) for path in files]
    odd = next((p for p, picture in zip(files, pictures, strict=True) if picture.shape != pictures[0].shape), None)
    if odd is not None:
        raise Refused(f"Client {folder.name}: '{odd.name}' has another size or other channels than '{files[0].name}'.")
    labels = np.array([classes.index(path.parent.name) for path in files])
    return np.stack(pictures), labels


def _read_picture(path: Path) -> np.ndarray:
    """Bytes, [channels, height, width]."""
    try:
        with Image.open(path) as picture:
            if picture.mode.startswith("I;16"):  # sixteen bits of grey, as scanners write: keep the upper eight
                pixels = (np.asarray(picture) >> 8).astype(np.uint8)
            else:
                pixels = np.asarray(picture.convert("L" if picture.mode in ("1", "L") else "RGB"))
    except (OSError, Image.DecompressionBombError) as error:
        raise Refused(f"'{path.name}' in '{path.parent}' is not a picture that can be read.") from error
    return np.moveaxis(np.atleast_3d(pixels), 2, 0)
