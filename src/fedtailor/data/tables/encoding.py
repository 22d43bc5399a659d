"""Features and targets of sites that use a schema."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedtailor.data.tables.schema import Schema, row_numbers, target_numbers
from fedtailor.data.tables.site import Site
from fedtailor.data.tables.table_format import Statistics

log = logging.getLogger("fedtailor")


def with_known_classes(site: Site, schema: Schema) -> Site:
    """Return a site without rows of a class that is not agreed; warn of them."""
    rows = np.flatnonzero(target_numbers(schema, site) >= 0) if schema.classes is not None else None
    if rows is None or len(rows) == len(site.raw.rows):
        return site
    text = "%s: rows of a class that no site reports, because it is rare, are left out: %d; see min_count."
    log.warning(text, site.raw.subject, len(site.raw.rows) - len(rows))
    return site.take(rows)


def join_sites(sites: Sequence[Site], schema: Schema) -> dict[str, Any]:
    """Return the fields of a federation of sites that use a schema; all their classes are agreed."""
    statistics = dict[str, Statistics]()
    for site in sites:
        statistics |= schema.fit_site(site)
    table = schema.table_format(statistics)
    starts = np.cumsum([0, *(len(site.raw.rows) for site in sites)])
    numbers = [row_numbers(site.columns, table.columns, site.raw) for site in sites]
    return {
        "x": np.concatenate([table.encode(rows, site.name) for rows, site in zip(numbers, sites, strict=True)]),
        "y": np.concatenate([target_numbers(schema, site) for site in sites]),
        "train": [site.train + start for site, start in zip(sites, starts, strict=False)],
        "test": [site.test + start for site, start in zip(sites, starts, strict=False)],
        "names": tuple(site.name for site in sites),
        "classes": None if schema.classes is None else len(schema.classes),
        "class_names": schema.classes,
        "survival": bool(schema.settings.get("survival")),
        "table": table,
    }
