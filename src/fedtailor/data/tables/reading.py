"""Read CSV and Parquet files with pandas. Files are untrusted: sizes are checked before anything is allocated."""

import csv
import io
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtailor.core.memory_limits import check_memory
from fedtailor.core.untrusted_input import is_printable
from fedtailor.errors import ConfigError, DataError, FedTailorError, reason

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("fedtailor")
SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")
_INDEX = re.compile(r"__index_level_\d+__")  # the index of a data frame, which pandas adds to a Parquet file
_DELIMITERS = ",;\t|"
_EXPANSION = 16  # bytes in memory per byte of a file
_MAX_COLUMNS, _MAX_NAME = 10_000, 300  # columns, and characters of a column's name
_MAX_CELL = 2**17  # characters
_SAMPLE_ROWS = 50  # rows by which the delimiter is found
NEEDS_PANDAS = "Tables need pandas and pyarrow: pip install 'fedtailor[tables]'."


@dataclass(frozen=True, eq=False)
class RawTable:
    """A table as it was read: cells of text, or of the types of a Parquet file or a data frame."""

    source: str  # such as 'a.csv', for messages
    frame: "pd.DataFrame"
    rows: Sequence[Any]  # name of each row: as a spreadsheet numbers it, or the label of a data frame

    @property
    def subject(self) -> str:
        """The source as the subject of a sentence, with a capital letter."""
        return _subject(self.source)

    def take(self, rows: Any, source: str | None = None) -> "RawTable":
        """Return some of the rows, by their positions."""
        return RawTable(source or self.source, self.frame.iloc[rows], [self.rows[row] for row in rows])


def _subject(source: str) -> str:
    return source[0].upper() + source[1:]


def import_pandas() -> Any:
    """Return pandas, or raise `ConfigError` that names the extra."""
    try:
        import pandas as pd
    except ImportError as error:
        raise ConfigError(NEEDS_PANDAS) from error
    return pd


def read_table(path: Path) -> RawTable:
    """Read a file of a site: .csv, .tsv, .txt, or .parquet.

    >>> read_table(Path("nowhere.csv"))
    Traceback (most recent call last):
    fedtailor.errors.DataError: 'nowhere.csv' cannot be read: No such file or directory.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"'{path}' has an unsupported format; use a .csv or a .parquet file.")
    import_pandas()
    try:
        size = path.stat().st_size
        if not path.is_file():  # reading a pipe may never end
            raise DataError(f"'{path}' is not a file.")
        check_memory(_EXPANSION * size, f"'{path}'")
        table = _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_csv(path)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or reason(error)}.") from error
    return from_frame(table.frame, table.source, table.rows)


def first_row(path: Path) -> int:
    """Return the number of the first row after the header, which is row 1; a Parquet file has no header.

    >>> first_row(Path("a.csv")), first_row(Path("a.parquet"))
    (2, 1)
    """
    return 1 if path.suffix.lower() == ".parquet" else 2


def from_frame(frame: Any, source: str, rows: Sequence[Any] | None = None) -> RawTable:
    """Return a data frame as a table after checking its columns; rows without any value are left out."""
    pd = import_pandas()
    subject = _subject(source)
    if not isinstance(frame, pd.DataFrame):
        raise DataError(f"{subject} must be a pandas DataFrame, got {type(frame).__name__}.")
    names = [str(name).strip() for name in frame.columns]
    _check_columns(names, subject)
    frame = frame.set_axis(names, axis=1)
    frame = frame.loc[:, [name != "" for name in names]]
    blank = (frame.isna() | (frame == "")).all(axis=1).to_numpy()
    labels = list(frame.index) if rows is None else list(rows)
    kept = [position for position, is_blank in enumerate(blank) if not is_blank]
    if not kept:
        raise DataError(f"{subject} has no rows; a table needs a header and at least one row per sample.")
    return RawTable(source, frame.reset_index(drop=True), labels).take(kept)


def _check_columns(names: Sequence[str], subject: str) -> None:
    if len(names) > _MAX_COLUMNS:
        raise DataError(f"{subject} has {len(names):,} columns; the limit is {_MAX_COLUMNS:,}.")
    for name, times in Counter(names).items():
        if times > 1 and name:
            raise DataError(f"{subject} has {times} columns with the name '{name}'; rename them.")
        if not is_printable(name) or len(name) > _MAX_NAME:
            raise DataError(f"{subject} has a column {name[:40]!r} whose name is too long or not printable; rename it.")
    if "" in names:
        log.warning("%s has a column without a name (column %d), which is ignored.", subject, names.index("") + 1)


def _read_csv(path: Path) -> RawTable:
    pd, source = import_pandas(), f"'{path}'"
    text = _decode(path)
    delimiter = _find_delimiter(text, source)
    rows = _count_rows(text, delimiter, source)
    header = next(_records(text, delimiter, source), [])
    if not rows:
        return RawTable(source, pd.DataFrame(columns=header), ())
    try:
        frame = pd.read_csv(
            io.StringIO(text), sep=delimiter, dtype=str, header=0, names=range(len(header)), index_col=False,
            keep_default_na=False, na_filter=False, skip_blank_lines=False, skipinitialspace=True,
        )  # fmt: skip
    except pd.errors.ParserError as error:  # rows have the right lengths, so the end of a text is missing
        raise DataError(
            f"{source} cannot be read: {reason(error)}; close the quote that is open at its end."
        ) from error
    return RawTable(source, frame.set_axis(header, axis=1), range(first_row(path), len(frame) + first_row(path)))


def _decode(path: Path) -> str:
    content = path.read_bytes()
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"  # also without its mark
    if encoding == "utf-8-sig" and b"\0" in content:  # UTF-16 without its mark, or no text at all
        raise DataError(f"'{path}' cannot be read: byte {content.index(0)} is 0, which is not text; save it as UTF-8.")
    try:
        return _join_lines(content.decode(encoding))
    except UnicodeDecodeError as error:
        if encoding == "utf-8-sig":
            try:
                text = content.decode("cp1252")
            except UnicodeDecodeError:
                pass
            else:
                log.warning("'%s' is not UTF-8; it is read as Windows-1252.", path)
                return _join_lines(text)
        raise DataError(f"'{path}' cannot be read: byte {error.start} is not text; save it as UTF-8.") from error


def _join_lines(text: str) -> str:
    """Return the text with the line ends of this program; csv rejects those of old Mac programs.

    >>> _join_lines("a\\r\\nb\\rc")
    'a\\nb\\nc'
    """
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _find_delimiter(text: str, source: str) -> str:
    """Return the delimiter that gives the most columns, the same number in all of the first rows if there is one."""
    lines = [line for _, line in zip(range(_SAMPLE_ROWS), io.StringIO(text), strict=False)]

    def columns(delimiter: str) -> tuple[bool, int]:
        rows = [len(row) for row in _records("".join(lines[:-1] or lines), delimiter, source) if row]
        return len(set(rows)) == 1 and rows[0] > 1, min(rows, default=0)

    found = {delimiter: columns(delimiter) for delimiter in _DELIMITERS if delimiter in (lines or [""])[0]}
    return max(found, key=lambda delimiter: found[delimiter], default=",")


def _records(text: str, delimiter: str, source: str) -> Iterator[list[str]]:
    previous = csv.field_size_limit(_MAX_CELL)
    row = 0
    try:
        for cells in csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True):
            row += 1
            yield cells
    except csv.Error as error:
        raise DataError(f"Row {row + 1} of {source} cannot be read: {reason(error)}; correct it.") from error
    finally:
        csv.field_size_limit(previous)


def _count_rows(text: str, delimiter: str, source: str) -> int:
    """Return the number of rows after the header; raise `DataError` for a row that is too short or too long."""
    columns = rows = 0
    for row, cells in enumerate(_records(text, delimiter, source), 1):
        columns = columns or len(cells)
        if len(cells) != columns and any(cells):
            raise DataError(
                f"Row {row} of {source} has {len(cells)} values, but the header, row 1, has {columns}; correct it, or "
                f"quote values that contain '{delimiter}'."
            )
        rows = row
    return max(0, rows - 1)


def _read_parquet(path: Path) -> RawTable:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(NEEDS_PANDAS) from error
    source = f"'{path}'"
    try:
        with parquet.ParquetFile(path) as file:
            facts = file.metadata
            groups = (facts.row_group(group) for group in range(facts.num_row_groups))
            cells = facts.num_rows * facts.num_columns  # repeated values take no space in the file
            check_memory(_EXPANSION * (cells + sum(group.total_byte_size for group in groups)), source)
            for field in file.schema_arrow:
                if pa.types.is_nested(field.type) or pa.types.is_binary(field.type):
                    raise DataError(
                        f"{source} has a column '{field.name}' of {field.type}; use numbers, text, or dates."
                    )
            table = file.read()
            table.validate(full=True)  # for example, that its text is UTF-8
            frame = table.to_pandas(ignore_metadata=True)
    except Exception as error:  # damaged files make pyarrow raise any exception
        if isinstance(error, FedTailorError | OSError):
            raise
        raise DataError(f"{source} cannot be read as a Parquet file: {reason(error)}.") from error
    frame = frame.drop(columns=[name for name in frame.columns if _INDEX.fullmatch(str(name))])
    return RawTable(source, frame, range(first_row(path), len(frame) + first_row(path)))
