"""Reader of CIFAR-100 in the publisher's binary version; the Python version is a pickle, which is never opened."""

from pathlib import Path

import numpy as np

from fedtailor.data.http_download import RemoteFile
from fedtailor.data.images.image_table import Images, make_image_table
from fedtailor.data.publisher_files import Publication, open_publication
from fedtailor.data.sample_table import SampleTable
from fedtailor.errors import DataError, unknown_name

CIFAR100 = Publication(
    RemoteFile(
        ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
        "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        bytes=168_513_733,
    ),
    top="cifar-100-binary",
)
_LABELS = {"coarse": 20, "fine": 100}  # number of classes, in the order of the label bytes of a record
_PIXELS = 3 * 32 * 32


def read_cifar100(folder: Path, labels: str = "fine", publication: Publication = CIFAR100) -> SampleTable:
    """Return CIFAR-100 from cifar-100-binary.tar.gz or from the files in it, with fine or coarse labels.

    >>> read_cifar100(Path("nowhere"), "corse")
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: There is no kind of labels 'corse'; did you mean 'coarse'?
    """
    if labels not in _LABELS:
        raise unknown_name("kind of labels", labels, _LABELS)
    with open_publication(folder, publication, "train.bin") as files:
        file, classes = f"{labels}_label_names.txt", _LABELS[labels]
        names = tuple(line.strip() for line in files.lines(file))
        if len(names) != classes:
            raise DataError(f"{files.where} has a file {file} with {len(names):,} names instead of {classes}.")
        train, test = (
            parse_records(files[name], list(_LABELS), f"{files.where} has a file {name} that", labels)
            for name in ("train.bin", "test.bin")
        )
        return make_image_table([train], test, classes, files.where, names)


def parse_records(data: bytes, kinds: list[str], what: str, kind: str) -> Images:
    """Return the images of records that consist of one label byte per kind, and of three planes of color.

    >>> parse_records(bytes([7, 9]) + bytes(3072), ["coarse", "fine"], "The file", "fine")[1].tolist()
    [9]
    """
    size = len(kinds) + _PIXELS
    if not data or len(data) % size:
        raise DataError(f"{what} does not consist of records of {size:,} bytes; download it again.")
    table = np.frombuffer(data, np.uint8).reshape(-1, size)
    return table[:, len(kinds) :].reshape(-1, 3, 32, 32), table[:, kinds.index(kind)].astype(np.int64)
