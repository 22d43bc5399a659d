"""Data sets of features that others computed: CREMA-D and CrisisMMD, each in one .npz file.

    crema-d.npz      audio [n, T, 80] and audio_length, video [n, T, 1280] and video_length, label, speaker
    crisis-mmd.npz   image [n, 1280], text [n, T, 512] and text_length, label, split (0 train, 1 dev, 2 test)

Features are float32. A length is the number of valid steps of a sequence; the steps after it are padding. Other widths
than the ones above, which FedMultimodal uses, are possible. All other arrays are integers [n].
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.formats.folder_entries import check_entry
from fedtailor.data.formats.npz import read_npz
from fedtailor.data.sample_table import SampleTable
from fedtailor.errors import DataError

Arrays = dict[str, NDArray[Any]]

CREMA_D, CRISIS_MMD = "crema-d.npz", "crisis-mmd.npz"  # names of the files
EMOTIONS = ("anger", "sadness", "happiness", "neutral")  # of CREMA-D, those that FedMultimodal uses
DAMAGES = (
    "not_humanitarian", "infrastructure_and_utility_damage", "vehicle_damage", "rescue_volunteering_or_donation_effort",
    "other_relevant_information", "affected_individuals", "injured_or_dead_people", "missing_or_found_people",
)  # of CrisisMMD, in FedMultimodal's order  # fmt: skip
SPLITS = ("train", "dev", "test")  # of CrisisMMD
_HINT = "docs/data.md describes its arrays, and examples/feature_files.py writes it"


def read_crema_d(folder: Path) -> SampleTable:
    """Return the samples of crema-d.npz, owned by the speakers.

    >>> read_crema_d(Path("nowhere"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.DataError: There is no file 'nowhere/crema-d.npz'; docs/data.md describes its arrays, and ...
    """
    path = _find(folder, CREMA_D)
    arrays = _read_arrays(path, {"audio": 3, "video": 3, "label": 1, "speaker": 1})
    speakers, owner = np.unique(arrays.pop("speaker"), return_inverse=True)
    label = _take_codes(arrays, "label", EMOTIONS, path)
    names = tuple(str(speaker) for speaker in speakers.tolist())
    return SampleTable(arrays, label, len(EMOTIONS), owner.astype(np.int64), names, class_names=EMOTIONS)


def read_crisis_mmd(folder: Path, dev: bool = False) -> SampleTable:
    """Return the training and test samples of crisis-mmd.npz; with `dev`, the development part is training data.

    >>> read_crisis_mmd(Path("nowhere"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.DataError: There is no file 'nowhere/crisis-mmd.npz'; docs/data.md describes its arrays, and ...
    """
    path = _find(folder, CRISIS_MMD)
    arrays = _read_arrays(path, {"image": 2, "text": 3, "label": 1, "split": 1})
    split = _take_codes(arrays, "split", SPLITS, path)
    label = _take_codes(arrays, "label", DAMAGES, path)
    kept = slice(None) if dev or not (split == 1).any() else split != 1  # a slice copies nothing
    x = {name: array[kept] for name, array in arrays.items()}
    return SampleTable(x, label[kept], len(DAMAGES), is_test=split[kept] == 2, class_names=DAMAGES)


def join_features(path: Path, part: str, ids: Sequence[str], sequence: bool) -> Arrays:
    """Return the features of samples from an .npz file with `id` (text), the part, and, of a sequence, its length.

    >>> join_features(Path("nowhere.npz"), "video", ["1001_DFA_ANG_XX"], sequence=True)
    Traceback (most recent call last):
    fedtailor.errors.DataError: There is no file 'nowhere.npz', which must contain id and video.
    """
    if not path.is_file():
        raise DataError(f"There is no file '{path}', which must contain id and {part}.")
    found = _read_arrays(path, {part: 3 if sequence else 2, "id": 1})
    row = {str(name): index for index, name in enumerate(found.pop("id").tolist())}
    missing = [name for name in ids if name not in row]
    if missing:
        raise DataError(f"'{path}' has no {part} for {len(missing):,} of {len(ids):,} samples, such as {missing[0]!r}.")
    rows = [row[name] for name in ids]
    return {name: array[rows] for name, array in found.items()}


def _find(folder: Path, name: str) -> Path:
    path = folder if folder.is_file() else folder / name
    if not path.is_file():
        raise DataError(f"There is no file '{path}'; {_HINT}.")
    if path != folder:
        check_entry(path, folder)
    return path


def _read_arrays(path: Path, dimensions: Mapping[str, int]) -> Arrays:
    """Return the named arrays with these numbers of dimensions, and the lengths of those with three."""
    sequences = [name for name, count in dimensions.items() if count == 3]
    names = [*dimensions, *(f"{name}_length" for name in sequences)]
    arrays, found = read_npz(path, names)
    if missing := [name for name in names if name not in arrays]:
        raise DataError(f"'{path}' has no array {missing[0]}, it has {', '.join(found[:9])}; {_HINT}.")
    size = len(arrays[names[0]])
    for name, array in arrays.items():
        _check_array(array, name, dimensions.get(name, 1), size, path)
    for name in sequences:
        length, steps = arrays[f"{name}_length"], arrays[name].shape[1]
        if length.min() < 1 or length.max() > steps:
            raise DataError(f"{name}_length in '{path}' must be from 1 to {steps}, the number of steps of {name}.")
        arrays[f"{name}_length"] = length.astype(np.int64)
    return {
        n: array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array for n, array in arrays.items()
    }


def _check_array(array: NDArray[Any], name: str, dimensions: int, size: int, path: Path) -> None:
    kinds = "U" if name == "id" else "f" if dimensions > 1 else "iu"
    if array.ndim != dimensions or len(array) != size or array.dtype.kind not in kinds or not array.size:
        wanted = f"{dimensions} dimensions and {size:,} rows of {'text' if kinds == 'U' else 'numbers'}"
        raise DataError(f"{name} in '{path}' must have {wanted}, got {array.dtype} {array.shape}; {_HINT}.")
    if kinds == "f" and not np.isfinite(array).all():
        raise DataError(f"{name} in '{path}' contains values that are not finite.")


def _take_codes(arrays: Arrays, name: str, meanings: Sequence[str], path: Path) -> NDArray[np.int64]:
    codes = arrays.pop(name).astype(np.int64)
    if codes.min() < 0 or codes.max() >= len(meanings):
        raise DataError(f"{name} in '{path}' must be from 0 to {len(meanings) - 1}: {', '.join(meanings)}.")
    return codes
