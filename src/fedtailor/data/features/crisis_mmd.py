"""Arrays of CrisisMMD's humanitarian task from the publisher's files.

    CrisisMMD_v2.0/crisismmd_datasplit_all/
      task_humanitarian_text_img_train.tsv   image_id, label_image, and others; also _dev.tsv and _test.tsv

The features of images and texts need pretrained networks, so the user supplies them.
"""

import csv
from pathlib import Path

import numpy as np

from fedtailor.core.untrusted_input import read_text
from fedtailor.data.features.files import DAMAGES, SPLITS, Arrays, join_features
from fedtailor.data.formats.folder_entries import check_entry
from fedtailor.errors import DataError

_MAX_TABLE = 10**8  # bytes of a .tsv file


def make_crisis_mmd(folder: Path, image: Path, text: Path) -> Arrays:
    """Return the arrays of crisis-mmd.npz.

    `image` is a file with id (the publisher's image_id) and image; `text` is one with id, text, and text_length. As in
    FedMultimodal, the label is that of the image.

    >>> make_crisis_mmd(Path("nowhere"), Path("image.npz"), Path("text.npz"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.DataError: There is no file 'nowhere/task_humanitarian_text_img_train.tsv'; give the folder of ...
    """
    root = next((path for path in (folder / "crisismmd_datasplit_all", folder) if path.is_dir()), folder)
    check_entry(root, folder)
    parts = [_read_part(root / f"task_humanitarian_text_img_{split}.tsv") for split in SPLITS]
    ids = [name for part in parts for name, _ in part]
    label = np.array([DAMAGES.index(kind) for part in parts for _, kind in part])
    split = np.repeat(np.arange(len(SPLITS)), [len(part) for part in parts])
    features = join_features(image, "image", ids, sequence=False) | join_features(text, "text", ids, sequence=True)
    return {**features, "label": label, "split": split}


def _read_part(path: Path) -> list[tuple[str, str]]:
    """Return the id and the label of each image."""
    if not path.is_file():
        raise DataError(f"There is no file '{path}'; give the folder of CrisisMMD_v2.0.")
    check_entry(path, path.parent)
    lines = read_text(path, "The file", _MAX_TABLE).split("\n")
    try:
        rows = list(csv.DictReader(filter(None, lines), delimiter="\t", quoting=csv.QUOTE_NONE))
        found = [(row["image_id"], row["label_image"]) for row in rows]
    except (KeyError, csv.Error) as error:
        raise DataError(f"'{path}' must have the columns image_id and label_image; download it again.") from error
    unknown = [kind for _, kind in found if kind not in DAMAGES]
    if unknown or not found:
        problem = f"has the unknown label {unknown[0]!r}" if unknown else "has no rows"
        raise DataError(f"'{path}' {problem}; download it again.")
    return found
