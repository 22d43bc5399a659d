"""Reader of EMNIST: handwritten characters in IDX files, in six splits of the same images."""

from fedtailor.data.images.idx import read_idx_part
from fedtailor.data.images.image_table import Images, make_image_table
from fedtailor.data.images.publisher_files import PublisherFiles
from fedtailor.data.sample_table import SampleTable
from fedtailor.errors import DataError

SPLITS = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}  # number of classes


def read_emnist(files: PublisherFiles, split: str) -> SampleTable:
    """Return a split of EMNIST."""
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
    valid = [row[0] for row in rows] == labels and all(len(row) > 1 and all(map(_is_code, row[1:])) for row in rows)
    if not valid:
        raise DataError(f"{files.describe(name)} does not list the characters of {len(labels)} classes.")
    return tuple("".join(chr(int(code)) for code in row[1:]) for row in rows)


def _is_code(text: str) -> bool:
    """Return whether a text is the number of a printable ASCII character."""
    return len(text) < 4 and text.isdecimal() and 32 < int(text) < 127
