"""UCI Heart Disease: patients of four hospitals, of whom 740 have all values that are used.

The publisher's folder has four files without a header, one row per patient, in which ? is a missing value:

    processed.cleveland.data  processed.hungarian.data  processed.switzerland.data  processed.va.data

The preprocessing is that of FLamby's Fed-Heart-Disease: slope, ca, and thal are left out, because most patients outside
Cleveland lack them, and then every patient with a missing value. Chest pain and resting ECG are one-hot encoded without
their first level, and the target is whether there is any disease (num > 0).
"""

import csv
from collections.abc import Iterable, Sequence
from math import isfinite, nan
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.memory_limits import check_memory
from fedtailor.data.formats.folder_entries import list_entries
from fedtailor.data.sample_table import SampleTable
from fedtailor.data.tables.table_format import ALL_SITES, Feature, Statistics, TableColumn, TableFormat
from fedtailor.errors import DataError

SHIPPED = Path(__file__).parent.parent / "files" / "heart.csv"
HOSPITALS = {"cleveland": "Cleveland", "hungarian": "Hungary", "switzerland": "Switzerland", "va": "Long Beach VA"}
PUBLISHED_COLUMNS = (
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal",
    "num",
)  # fmt: skip
COLUMNS = tuple(name for name in PUBLISHED_COLUMNS if name not in ("slope", "ca", "thal"))
CODES = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2)}  # chest pain and resting ECG
TABLE = TableFormat(  # the features before they are standardized
    columns=tuple(
        TableColumn(name, "category", tuple(map(str, CODES[name]))) if name in CODES else TableColumn(name, "number")
        for name in COLUMNS[:-1]
    ),
    features=(
        *(Feature(column) for column, name in enumerate(COLUMNS[:-1]) if name not in CODES),
        *(Feature(COLUMNS.index(name), code) for name, codes in CODES.items() for code in range(1, len(codes))),
    ),
    statistics={ALL_SITES: Statistics((0.0,) * 10, (0.0,) * 13, (1.0,) * 13)},
)
_EXPANSION = 64  # bytes in memory per character of a file
_EXPECTED = f"expected {', '.join(f'processed.{name}.data' for name in HOSPITALS)}, as UCI publishes them"
Rows = NDArray[np.float64]


def read_shipped(path: Path = SHIPPED) -> SampleTable:
    """Return the 740 patients in the package, with FLamby's test set.

    >>> read_shipped().num_samples
    740
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    values = np.array([[float(row[name]) for name in COLUMNS] for row in rows])
    owner = np.array([list(HOSPITALS.values()).index(row["hospital"]) for row in rows])
    return make_table(values, owner, np.array([row["flamby"] == "test" for row in rows]))


def read_uci_heart(folder: Path) -> SampleTable:
    """Return the patients without missing values in the publisher's files, which do not contain FLamby's test set.

    >>> read_uci_heart(Path("nowhere"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedtailor.errors.DataError: 'nowhere' lacks processed.cleveland.data; expected processed.cleveland.data, ...
    """
    files = {path.name: path for path in list_entries(folder, "processed.*.data", Path.is_file, root=folder)}
    found = []
    for hospital in HOSPITALS:
        name = f"processed.{hospital}.data"
        if name not in files:
            raise DataError(f"'{folder}' lacks {name}; {_EXPECTED}.")
        found.append(read_complete_cases(files[name]))
    owner = np.repeat(np.arange(len(found)), [len(rows) for rows in found])
    return make_table(np.concatenate(found), owner)


def read_complete_cases(path: Path) -> Rows:
    """Return the columns `COLUMNS` of the patients in one of the publisher's files who have all of these values."""
    try:
        check_memory(_EXPANSION * path.stat().st_size, f"'{path}'")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}' cannot be read: {error}.") from error
    used = [PUBLISHED_COLUMNS.index(name) for name in COLUMNS]
    rows = [[row[column] for column in used] for row in _parse(lines, path)]
    values = np.array(rows, dtype=np.float64).reshape(-1, len(COLUMNS))
    complete = values[~np.isnan(values).any(1)]
    if not len(complete):
        raise DataError(f"'{path}' has no patient with all values; {_EXPECTED}.")
    return complete


def make_table(values: Rows, owner: NDArray[np.int64], is_test: NDArray[np.bool_] | None = None) -> SampleTable:
    """Return the table of samples with the features of `TABLE`, given rows with the columns `COLUMNS`."""
    rows = values[:, :-1].copy()
    for name, codes in CODES.items():
        column = rows[:, COLUMNS.index(name)]
        if not np.isin(column, codes).all():
            raise DataError(f"The column {name} must contain the codes {codes}; download the files again.")
        column -= codes[0]  # the codes are consecutive
    return SampleTable(
        x=TABLE.encode(rows),
        y=(values[:, -1] > 0).astype(np.int64),
        classes=2,
        owner=owner,
        owner_names=tuple(HOSPITALS.values()),
        is_test=is_test,
        class_names=("no disease", "disease"),
    )


def _parse(lines: Sequence[str], path: Path) -> Iterable[list[float]]:
    """Yield the numbers of each row; a missing value is NaN."""
    for number, row in enumerate(csv.reader(lines), 1):
        try:
            values = [nan if cell.strip() == "?" else float(cell) for cell in row]
        except ValueError:
            values = []
        present = [value for cell, value in zip(row, values, strict=False) if cell.strip() != "?"]
        if len(values) != len(PUBLISHED_COLUMNS) or not all(map(isfinite, present)):
            expected = f"{len(PUBLISHED_COLUMNS)} numbers, or ? for a missing value"
            raise DataError(f"Row {number} of '{path}' must have {expected}; download the file again.")
        yield values
