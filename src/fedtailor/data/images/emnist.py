"""Reader of EMNIST: handwritten characters in IDX files, in six splits of the same images."""

from pathlib import Path

import numpy as np

from fedtailor.data.http_download import RemoteFile
from fedtailor.data.image_formats import parse_idx
from fedtailor.data.images.image_table import Images, make_image_table
from fedtailor.data.publisher_files import Publication, PublisherFiles, open_publication
from fedtailor.data.sample_table import SampleTable
from fedtailor.errors import DataError, unknown_name

EMNIST = Publication(
    RemoteFile(
        ("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",),
        "sha256:fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
        bytes=561_753_746,
    ),
    top="gzip",
)
SPLITS = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}  # number of classes


def read_emnist(folder: Path, split: str = "byclass", publication: Publication = EMNIST) -> SampleTable:
    """Return a split of EMNIST from gzip.zip, or from the IDX files in it, gzipped or not.

    >>> read_emnist(Path("nowhere"), "letter")
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: There is no split of EMNIST 'letter'; did you mean 'letters'?
    """
    if split not in SPLITS:
        raise unknown_name("split of EMNIST", split, SPLITS)
    with open_publication(folder, publication, f"emnist-{split}-train-images-idx3-ubyte") as files:
        names = _class_names(files, split)
        train, test = (_read_part(files, f"emnist-{split}-{part}", split) for part in ("train", "test"))
        return make_image_table([train], test, SPLITS[split], files.where, names)


def _first_label(split: str) -> int:
    return 1 if split == "letters" else 0


def _read_part(files: PublisherFiles, start: str, split: str) -> Images:
    x, y = (
        parse_idx(files[name], f"{files.where} has a file {name} that")
        for name in (f"{start}-images-idx3-ubyte", f"{start}-labels-idx1-ubyte")
    )
    if x.ndim != 3 or y.ndim != 1:
        raise DataError(f"{files.where} has {start} files that are not images and labels; use the publisher's files.")
    upright = x.transpose(0, 2, 1)  # the publisher stores the columns of each image
    return upright[:, None], y.astype(np.int64) - _first_label(split)


def _class_names(files: PublisherFiles, split: str) -> tuple[str, ...]:
    """Return the characters of each class; letters are upper and lower case together."""
    name = f"emnist-{split}-mapping.txt"
    rows = [line.split() for line in files.lines(name)]
    labels = [str(label + _first_label(split)) for label in range(SPLITS[split])]
    valid = [row[0] for row in rows] == labels and all(
        len(row) > 1 and all(code.isdecimal() and 32 < int(code[:4]) < 127 for code in row[1:]) for row in rows
    )
    if not valid:
        raise DataError(f"{files.where} has a file {name} that does not list the characters of {len(labels)} classes.")
    return tuple("".join(chr(int(code)) for code in row[1:]) for row in rows)
