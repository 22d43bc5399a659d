"""Fed-TCGA-BRCA: survival of breast cancer patients of six regions, in the two files of FLamby:

    brca.csv               pid, 39 covariates, E (1: died, 0: censored), T (days); one row per patient
    train_test_split.csv   pid, fold, fold2 (train_0 to train_5, test_0 to test_5: part and region)

Patients without a region, who are in the first file only, are left out.
"""

import csv
from collections.abc import Mapping
from math import isfinite
from pathlib import Path

import numpy as np

from fedtailor.core.memory_limits import check_memory
from fedtailor.data.formats.folder_entries import check_entry
from fedtailor.data.sample_table import SampleTable
from fedtailor.errors import DataError

PATIENTS, SPLIT = "brca.csv", "train_test_split.csv"
REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")
NUM_FEATURES = 39
_EXPANSION = 64  # bytes in memory per character of a file
_FOLDS = {f"{part}_{number}": (part == "test", number) for part in ("train", "test") for number in range(len(REGIONS))}
Rows = list[dict[str, str]]


def read_tcga_brca(folder: Path) -> SampleTable:
    """Return the patients of the six regions in FLamby's files, in the order of the first file, and its test set.

    >>> read_tcga_brca(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.DataError: 'nowhere' lacks brca.csv; expected FLamby's brca.csv and train_test_split.csv.
    """
    patients, split = _read(folder, PATIENTS), _read(folder, SPLIT)
    columns = list(patients[0])
    if columns[:1] != ["pid"] or columns[-2:] != ["E", "T"] or len(columns) != NUM_FEATURES + 3:
        expected = f"pid, {NUM_FEATURES} covariates, E, and T"
        raise DataError(f"'{folder / PATIENTS}' must have the columns {expected}; download the file again.")
    folds = _folds(split, folder / SPLIT)
    known = {patient["pid"] for patient in patients}
    if missing := [pid for pid in folds if pid not in known]:
        raise DataError(f"'{folder / PATIENTS}' lacks the patient {missing[0]} of {SPLIT}; download both files again.")
    rows = [(number, patient) for number, patient in enumerate(patients, 2) if patient["pid"] in folds]
    if len(rows) != len(folds):
        raise DataError(f"'{folder / PATIENTS}' has the same patient in two rows; download the file again.")
    values = np.array([_numbers(row, columns[1:], folder / PATIENTS, number) for number, row in rows])
    is_test, owner = zip(*(folds[row["pid"]] for _, row in rows), strict=True)
    return SampleTable(
        x=values[:, :-2].astype(np.float32),
        y=values[:, -2:].astype(np.float32),
        classes=None,
        owner=np.array(owner),
        owner_names=REGIONS,
        is_test=np.array(is_test),
        survival=True,
    )


def _read(folder: Path, name: str) -> Rows:
    """Return the rows of a CSV file with a header, as text."""
    path = folder / name
    if not path.is_file():
        raise DataError(f"'{folder}' lacks {name}; expected FLamby's {PATIENTS} and {SPLIT}.")
    check_entry(path, folder)
    try:
        check_memory(_EXPANSION * path.stat().st_size, f"'{path}'")
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, restval=""))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"'{path}' cannot be read: {error}.") from error
    if not rows:
        raise DataError(f"'{path}' has no rows; download the file again.")
    return rows


def _folds(split: Rows, path: Path) -> dict[str, tuple[bool, int]]:
    """Return patient -> (whether for testing, region)."""
    found: dict[str, tuple[bool, int]] = {}
    for number, row in enumerate(split, 2):
        fold = row.get("fold2", "")
        if not row.get("pid") or fold not in _FOLDS:
            expected = f"a pid and a fold2 from train_0 to test_{len(REGIONS) - 1}"
            raise DataError(f"Row {number} of '{path}' must have {expected}, got fold2 {fold!r}; download it again.")
        found[row["pid"]] = _FOLDS[fold]
    return found


def _numbers(row: Mapping[str, str], columns: list[str], path: Path, number: int) -> list[float]:
    """Return the covariates, the event, and the time of a patient."""
    found = []
    for column in columns:
        try:
            value = float(row[column])
        except (ValueError, TypeError):
            value = float("nan")
        if not isfinite(value) or (column == "E" and value not in (0, 1)) or (column == "T" and value < 0):
            expected = {"E": "0 or 1", "T": "a number of days"}.get(column, "a number")
            got = f"got {row[column]!r}; download the file again"
            raise DataError(f"Row {number} of '{path}' must have {expected} in the column '{column}', {got}.")
        found.append(value)
    return found
