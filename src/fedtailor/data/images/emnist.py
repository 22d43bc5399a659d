"""Reader of EMNIST: handwritten characters in IDX files, in six splits of the same images."""

from pathlib import Path

from fedtailor.data.http_download import RemoteFile
from fedtailor.data.images.idx import read_idx_part
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
    x, y = read_idx_part(files, start)
    return x.transpose(0, 1, 3, 2), y - _first_label(split)  # the publisher stores the columns of each image


def _class_names(files: PublisherFiles, split: str) -> tuple[str, ...]:
    """Return the characters of each class; letters are upper and lower case together."""
    name = f"emnist-{split}-mapping.txt"
    rows = [line.split() for line in files.lines(name)]
    labels = [str(label + _first_label(split)) for label in range(SPLITS[split])]
    valid = [row[0] for row in rows] == labels and all(
        len(row) > 1 and all(code.isdecimal() and 32 < int(code[:4]) < 127 for code in row[1:]) for row in rows
    )
    if not valid:
        raise DataError(f"{files.describe(name)} does not list the characters of {len(labels)} classes.")
    return tuple("".join(chr(int(code)) for code in row[1:]) for row in rows)
