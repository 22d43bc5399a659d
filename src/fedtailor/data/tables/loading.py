"""Tables of several sites as the fields of a federation."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtailor.core.untrusted_input import parse_json, read_text
from fedtailor.data.formats.folder_entries import list_entries
from fedtailor.data.splits.owners import client_names
from fedtailor.data.tables.agreement import agree
from fedtailor.data.tables.columns import Column, read_columns
from fedtailor.data.tables.encoding import join_sites, with_known_classes
from fedtailor.data.tables.reading import SUFFIXES, RawTable, from_frame, read_table
from fedtailor.data.tables.resplit import TableRefit
from fedtailor.data.tables.schema import Schema, row_numbers
from fedtailor.data.tables.settings import SiteSettings, TableSettings
from fedtailor.data.tables.site import Site, open_site, sorted_labels, unknown_column
from fedtailor.data.tables.summary import SiteSummary, summarize
from fedtailor.data.tables.table_format import CATEGORY, Array, TableFormat
from fedtailor.errors import ConfigError, DataError, unknown_name

log = logging.getLogger("fedtailor")
_MAX_JSON = 2**24  # bytes of a summary or a schema


def make_settings(**values: Any) -> TableSettings:
    """Return the settings of tables; raise `ConfigError` for an unknown one.

    >>> make_settings(target="outcome", fit="sites")
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: data.fit must be 'federation' or 'site', got 'sites'.
    """
    known = [field.name for field in fields(TableSettings)]
    for name in values:
        if name not in known:
            raise unknown_name("setting of tables", name, known)
    return TableSettings(**values)


def read_sites(source: Mapping[str, Any] | str | Path, client: str | None) -> dict[str, RawTable]:
    """Return the table of each client: one file each, the files of a folder, or the rows of one file by a column."""
    if isinstance(source, Mapping):
        if not source:
            raise DataError("from_tables needs at least one file.")
        return {str(name): read_table(Path(file).expanduser()) for name, file in source.items()}
    path = Path(source).expanduser()
    if path.is_dir():
        if client is not None:
            raise ConfigError("data.client names a column of one file; in a folder, each file is a client.")
        files = list_entries(path, "*", lambda entry: entry.is_file() and entry.suffix.lower() in SUFFIXES, path)
        if not files:
            raise DataError(f"'{path}' must contain one .csv or .parquet file per client.")
        names = client_names([file.stem for file in files], len(files))
        return dict(zip(names, map(read_table, files), strict=True))
    if not path.exists():
        raise DataError(f"There is no file or folder '{path}'.")
    if client is None:
        raise ConfigError(f"'{path}' is one file; set client to the column that names the client of each row.")
    return split_by_client(read_table(path), client)


def describe_source(
    source: Mapping[str, Any] | str | Path, client: str | None, schema: str | Path | None
) -> dict[str, Any]:
    """Return where tables were read from, as settings of the data set `tables`.

    >>> describe_source({"a": Path("a.csv")}, None, None)
    {'files': {'a': 'a.csv'}, 'client': None, 'schema': None}
    """
    rest = {"client": client, "schema": None if schema is None else str(schema)}
    if isinstance(source, Mapping):
        return {"files": {str(name): str(file) for name, file in source.items()}, **rest}
    return {"folder" if Path(source).expanduser().is_dir() else "file": str(source), **rest}


def split_by_client(raw: RawTable, client: str) -> dict[str, RawTable]:
    """Return the rows of each client, without the column that names it."""
    if client not in raw.frame.columns:
        raise unknown_column(raw, client)
    column = read_columns(raw, SiteSettings(categories=(client,)), [client])[client]
    if column.missing.any():
        row = raw.rows[int(np.flatnonzero(column.missing)[0])]
        raise DataError(f"Row {row} of {raw.source} has no client in the column '{client}'; fill it in.")
    rest = RawTable(raw.source, raw.frame.drop(columns=client), raw.rows)
    return {
        name: rest.take(np.flatnonzero(column.codes == column.texts.index(name)), f"{raw.source} ({name})")
        for name in sorted_labels(column.texts)
    }


def load_tables(
    tables: Mapping[str, RawTable], settings: TableSettings, seed: int, schema: str | Path | None = None
) -> dict[str, Any]:
    """Return the fields of a federation: sites summarize their training rows, agree, and encode their rows.

    With a schema on which the sites agreed before, they only encode their rows.
    """
    if schema is not None:
        return _use_schema(tables, settings, read_schema(Path(schema).expanduser()))
    _check_names(tables, settings)
    if not settings.targets or not all(settings.targets):
        raise ConfigError("Tables need a target, the name of the column to predict.")
    sites = [open_site(name, raw, settings, seed) for name, raw in tables.items()]
    agreed, conflicts = agree([summarize(site, settings, seed) for site in sites], settings)
    for conflict in conflicts:
        log.warning("%s.", conflict)
    return _make_fields(sites, agreed, settings)


def _use_schema(tables: Mapping[str, RawTable], settings: TableSettings, schema: Schema) -> dict[str, Any]:
    """Return the fields of a federation of sites that agreed before; only their ways of writing may differ."""
    own = {"decimal": settings.decimal, "date_format": settings.date_format}
    for name, value in vars(replace(settings, **dict.fromkeys(own))).items():  # type: ignore[arg-type]
        if value != getattr(TableSettings(), name):
            raise ConfigError(f"The schema sets {name} for all sites; remove it, or agree on a new schema.")
    of_sites = schema.site_settings(**own)
    sites = [open_site(name, raw, of_sites, schema.seed) for name, raw in tables.items()]
    found = _make_fields(sites, schema, of_sites)
    for site in sites:
        _warn_of_unknown_categories(site.columns, found["table"], site.raw)
    return found


def _make_fields(sites: Sequence[Site], schema: Schema, settings: SiteSettings) -> dict[str, Any]:
    known = [with_known_classes(site, schema) for site in sites]
    found = join_sites(known, schema) | {"refit": TableRefit(known, schema, settings)}
    samples = {name: torch.from_numpy(found[name]) for name in ("x", "y")}
    return found | samples | {name: tuple(map(torch.from_numpy, found[name])) for name in ("train", "test")}


def _check_names(tables: Mapping[str, RawTable], settings: TableSettings) -> None:
    """Raise an error if a column that is to be ignored, or to be read as categories, is in no table."""
    known = dict.fromkeys(column for raw in tables.values() for column in raw.frame.columns)
    for name in (*settings.ignore, *settings.categories):
        if name not in known:
            raise unknown_name("column", name, known)


def load_frame(frame: Any, client: str, settings: TableSettings, seed: int) -> dict[str, Any]:
    """Return the fields of a federation from a data frame with a column of clients."""
    return load_tables(split_by_client(from_frame(frame, "the data frame"), client), settings, seed)


def model_rows(raw: RawTable, table: TableFormat, **writing: str | None) -> Array:
    """Return the rows of a table in the format of a model: one number per column, NaN where a value is missing.

    `writing` is the decimal separator and the date format of the file, where its values can be read in two ways.
    """
    kinds = {column.name: column.kind for column in table.columns}
    lacking = [name for name in kinds if name not in raw.frame.columns]
    if lacking:
        names = ", ".join(f"'{name}'" for name in lacking[:5]) + (", ..." if len(lacking) > 5 else "")
        fix = "add it, with empty cells if the values are unknown"
        what = f"the column{'s' * (len(lacking) > 1)} {names} of the model's table"
        raise DataError(f"{raw.subject} lacks {what}; {fix}.")
    columns = read_columns(raw, SiteSettings(missing=table.missing, **writing), list(kinds), kinds)  # type: ignore[arg-type]
    _warn_of_unknown_categories(columns, table, raw)
    return row_numbers(columns, table.columns, raw)


def _warn_of_unknown_categories(columns: Mapping[str, Column], table: TableFormat, raw: RawTable) -> None:
    for column in table.columns:
        if column.kind != CATEGORY or column.name not in columns:
            continue
        unknown = {t: n for t, n in columns[column.name].counts().items() if t not in column.categories}
        if unknown:
            text = "%s: the column '%s' has categories that the model does not know, such as '%s', in %d rows."
            log.warning(text, raw.subject, column.name, next(iter(unknown)), sum(unknown.values()))


def read_summary(path: Path) -> SiteSummary:
    """Return the summary in a JSON file."""
    return SiteSummary.from_json(_read_json(path, "The summary"), f"'{path}'")


def read_schema(path: Path) -> Schema:
    """Return the schema in a JSON file."""
    return Schema.from_json(_read_json(path, "The schema"), f"'{path}'")


def _read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        return dict(parse_json(read_text(path, what, _MAX_JSON)))
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise DataError(f"'{path}' is not a JSON file.") from error


def to_json(found: SiteSummary | Schema) -> str:
    """Return a summary or a schema as the text of a file that people can read."""
    return json.dumps(found.to_json(), indent=1, ensure_ascii=False) + "\n"
