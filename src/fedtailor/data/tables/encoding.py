"""Features and targets of sites that use a schema."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedtailor.data.splits.class_fractions import Indices
from fedtailor.data.tables.schema import Schema, row_numbers, target_numbers
from fedtailor.data.tables.site import Site
from fedtailor.data.tables.table_format import Array, Statistics, TableFormat

log = logging.getLogger("fedtailor")


def join_sites(sites: Sequence[Site], schema: Schema) -> dict[str, Any]:
    """Return the fields of a federation of sites that use a schema."""
    statistics = dict[str, Statistics]()
    for site in sites:
        statistics |= schema.fit_site(site)
    table = schema.table_format(statistics)
    encoded = [encode_site(site, schema, table) for site in sites]
    starts = np.cumsum([0, *(len(y) for _, y, _, _ in encoded)])
    return {
        "x": np.concatenate([x for x, _, _, _ in encoded]),
        "y": np.concatenate([y for _, y, _, _ in encoded]),
        "train": [train + start for (_, _, train, _), start in zip(encoded, starts, strict=False)],
        "test": [test + start for (_, _, _, test), start in zip(encoded, starts, strict=False)],
        "names": tuple(site.name for site in sites),
        "classes": None if schema.classes is None else len(schema.classes),
        "class_names": schema.classes,
        "survival": bool(schema.settings.get("survival")),
        "table": table,
    }


def encode_site(site: Site, schema: Schema, table: TableFormat) -> tuple[Array, Array, Indices, Indices]:
    """Return features, targets, and the positions of training and test rows; rows of an unknown class are left out."""
    x = table.encode(row_numbers(site.columns, table.columns, site.raw), site.name)
    y = target_numbers(schema, site)
    if schema.classes is None or bool((y >= 0).all()):
        return x, y, site.train, site.test
    known = y >= 0
    text = "%s: rows of a class that no site reports, because it is rare, are left out: %d; see min_count."
    log.warning(text, site.raw.subject, int((~known).sum()))
    position = np.cumsum(known) - 1
    train, test = (position[part[known[part]]] for part in (site.train, site.test))
    return x[known], y[known], train, test
