"""Reader of Tiny-ImageNet: 64×64 JPEG files of 200 classes. The test set is the publisher's validation set.

The publisher's own test set has no labels and is not read.
"""

import re

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.memory_limits import check_memory
from fedtailor.data.formats.image_files import decode_image
from fedtailor.data.images.publisher_files import PublisherFiles
from fedtailor.data.sample_table import SampleTable
from fedtailor.errors import DataError

_SIDE = 64  # pixels
Labeled = list[tuple[str, int]]  # names of files and their labels


def read_tiny_imagenet(files: PublisherFiles) -> SampleTable:
    """Return Tiny-ImageNet; labels are positions in wnids.txt, and gray images get three equal channels."""
    wnids = files.lines("wnids.txt")
    if not all(re.fullmatch(r"n\d{8}", wnid) for wnid in wnids) or not 2 <= len(set(wnids)) == len(wnids):
        raise DataError(f"{files.describe('wnids.txt')} is not a list of different WordNet numbers.")
    train, test = _train_files(files, wnids), _validation_files(files, wnids)
    if not train or not test:
        raise DataError(f"{files.where} has no images for {'testing' if train else 'training'}; {files.hint}.")
    y = np.array([label for _, label in train + test], np.int64)
    is_test = np.arange(len(y)) >= len(train)
    names = _class_names(files, wnids)
    return SampleTable(_decode(files, train + test), y, len(wnids), is_test=is_test, class_names=names)


def _train_files(files: PublisherFiles, wnids: list[str]) -> Labeled:
    folders = [f"train/{wnid}/images" for wnid in wnids]
    return [(f"{folder}/{name}", y) for y, folder in enumerate(folders) for name in files.names(folder)]


def _validation_files(files: PublisherFiles, wnids: list[str]) -> Labeled:
    labels, found = {wnid: label for label, wnid in enumerate(wnids)}, Labeled()
    for line in files.lines("val/val_annotations.txt"):
        name, wnid, *_ = [*line.split("\t"), ""]
        if wnid not in labels or "/" in name or "\\" in name:
            raise DataError(f"{files.where} has a file val/val_annotations.txt with the invalid line {line[:80]!r}.")
        found.append((f"val/images/{name}", labels[wnid]))
    return found


def _decode(files: PublisherFiles, part: Labeled) -> NDArray[np.uint8]:
    check_memory(len(part) * 3 * _SIDE**2, f"The images in {files.where[0].lower()}{files.where[1:]}")
    x = np.empty((len(part), 3, _SIDE, _SIDE), np.uint8)
    for row, (name, _) in enumerate(part):
        image = decode_image(files[name], files.describe(name), (_SIDE, _SIDE))
        if image is None:
            raise DataError(f"{files.describe(name)} is not an image of {_SIDE}×{_SIDE} pixels.")
        x[row] = image
    return x


def _class_names(files: PublisherFiles, wnids: list[str]) -> tuple[str, ...]:
    words = dict(line.partition("\t")[::2] for line in files.lines("words.txt"))
    missing = [wnid for wnid in wnids if not words.get(wnid)]
    if missing:
        raise DataError(f"{files.where} has a file words.txt without the name of {missing[0]}.")
    return tuple(words[wnid].strip() for wnid in wnids)
