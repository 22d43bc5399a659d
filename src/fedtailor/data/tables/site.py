"""A site's table: rows with a target, split into training and test rows by the site alone."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.splits.class_fractions import Indices
from fedtailor.data.splits.partition import hold_out
from fedtailor.data.tables.columns import Column, read_columns
from fedtailor.data.tables.reading import RawTable, import_pandas
from fedtailor.data.tables.settings import SiteSettings
from fedtailor.data.tables.table_format import BOOLEAN, CATEGORY, NUMBER
from fedtailor.errors import DataError, unknown_name

log = logging.getLogger("fedtailor")
_PARTS = {"train": False, "training": False, "test": True, "testing": True}
_MIN_ROWS = 20  # with fewer rows, distinct values are no evidence that a column identifies rows


@dataclass(frozen=True, eq=False)
class Site:
    """The rows of a site that have a target."""

    name: str
    raw: RawTable  # only these rows
    columns: dict[str, Column]  # inputs
    targets: dict[str, Column]
    train: Indices
    test: Indices

    def take(self, rows: Indices) -> "Site":
        """Return some of the rows, by their positions in increasing order; the split stays the same."""
        columns, targets = ({n: c.take(rows) for n, c in part.items()} for part in (self.columns, self.targets))
        train, test = (np.flatnonzero(np.isin(rows, part)) for part in (self.train, self.test))
        return Site(self.name, self.raw.take(rows), columns, targets, train, test)


def open_site(name: str, raw: RawTable, settings: SiteSettings, seed: int) -> Site:
    """Read the columns of a site's table and split its rows; warn of what looks wrong.

    The split depends on the site's name, its rows, and the seed only, so that the site can make it alone.
    """
    names = list(raw.frame.columns)
    for column in (*settings.targets, *([settings.test] if isinstance(settings.test, str) else [])):
        if column not in names:
            raise unknown_column(raw, column)
    columns = read_columns(raw, settings)
    kept = _rows_with_target(raw, columns, settings)
    raw, columns = raw.take(kept), {name: column.take(kept) for name, column in columns.items()}
    targets = {target: columns.pop(target) for target in settings.targets}
    is_test = _read_parts(raw, columns.pop(settings.test)) if isinstance(settings.test, str) else None
    if is_test is None:
        labels = _strata(targets, settings)
        train, test = hold_out(labels, np.arange(len(labels)), float(settings.test), (seed, crc32(name.encode())))
    else:
        train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    if not len(train):
        raise DataError(f"{raw.subject} has no training rows; a site needs some.")
    site = Site(name, raw, columns, targets, train, test)
    _warn_of_duplicates(site)
    _warn_of_identifiers(site)
    return site


def unknown_column(raw: RawTable, name: str) -> DataError:
    """Return the error for a column that a table needs but lacks, with the closest one."""
    hint = str(unknown_name("column", name, list(raw.frame.columns))).partition("; ")[2]
    return DataError(f"{raw.subject} has no column '{name}'; {hint}")


def _rows_with_target(raw: RawTable, columns: dict[str, Column], settings: SiteSettings) -> Indices:
    for target in settings.targets:
        if target not in columns:
            raise DataError(f"The target '{target}' is also in ignore; remove it there.")
    present = ~np.any([columns[target].missing for target in settings.targets], axis=0)
    dropped = int((~present).sum())
    if dropped == len(present):
        raise DataError(f"{raw.subject} has no row with a value in the target '{settings.targets[0]}'.")
    if dropped:
        log.warning("%s: rows without a target are left out: %d of %d.", raw.subject, dropped, len(present))
    return np.flatnonzero(present)


def _read_parts(raw: RawTable, column: Column) -> NDArray[np.bool_]:
    parts = [_PARTS.get(text.lower()) for text in column.texts]
    wrong = [row for row, code in enumerate(column.codes) if code < 0 or parts[code] is None]
    if wrong:
        raise DataError(f"Row {raw.rows[wrong[0]]} of {raw.source} must have train or test in the column of data.test.")
    return np.array([bool(parts[code]) for code in column.codes])


def _strata(targets: dict[str, Column], settings: SiteSettings) -> NDArray[Any]:
    """Return the classes of the rows, or whether there was an event; floats, which are not stratified, otherwise."""
    column = next(iter(targets.values()))
    is_class = column.numbers is None or column.are_integers
    if len(targets) > 1:
        is_class = BOOLEAN in column.kinds  # whether there was an event
    if settings.regression or not is_class:
        return np.zeros(len(column.codes))
    number = {label: number for number, label in enumerate(sorted_labels(column.texts))}
    return np.array([number[text] for text in column.texts])[column.codes]


def sorted_labels(labels: Sequence[str]) -> list[str]:
    """Return the names of classes in the order of their numbers: numeric if all are integers, else alphabetical.

    >>> sorted_labels(["10", "9"]), sorted_labels(["b", "a10", "a9"])
    (['9', '10'], ['a10', 'a9', 'b'])
    """
    are_integers = all(re.fullmatch("-?[0-9]{1,18}", label) for label in labels)
    return sorted(labels, key=int) if are_integers else sorted(labels)


def _warn_of_duplicates(site: Site) -> None:
    """Warn of equal rows; one in both training and test data makes the test too easy."""
    columns = [*site.columns.values(), *site.targets.values()]
    codes = import_pandas().DataFrame({number: column.codes for number, column in enumerate(columns)})
    duplicates = int(codes.duplicated().sum())
    if not duplicates:
        return
    group = codes.groupby(list(codes.columns)).ngroup().to_numpy()
    leaked = len(np.intersect1d(group[site.train], group[site.test]))
    leak = ", also across the training and the test data, which makes the test too easy" if leaked else ""
    text = "%s: duplicate rows (%d)%s. Remove them if they are no separate samples."
    log.warning(text, site.raw.subject, duplicates, leak)


def _warn_of_identifiers(site: Site) -> None:
    for name, column in site.columns.items():
        present = int((~column.missing).sum())
        is_code = column.kinds == (CATEGORY,) or (NUMBER in column.kinds and column.are_integers)
        if present >= _MIN_ROWS and len(column.counts()) == present and is_code:
            log.warning(
                "%s: every row has another value in the column '%s'; if it identifies rows, add it to ignore.",
                site.raw.subject, name,
            )  # fmt: skip
