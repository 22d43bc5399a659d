"""Tables whose rows are split anew into training and test rows: statistics are fitted on the new training rows.

Columns, categories, and classes stay those on which the sites agreed, so that a model fits all splits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedtailor.data.splits.class_fractions import Indices
from fedtailor.data.tables.agreement import refit
from fedtailor.data.tables.encoding import join_sites
from fedtailor.data.tables.schema import Schema, target_numbers
from fedtailor.data.tables.settings import TableSettings
from fedtailor.data.tables.site import Site
from fedtailor.data.tables.summary import summarize
from fedtailor.errors import DataError


@dataclass(frozen=True, eq=False)
class TableRefit:
    """What `Federation.resplit` calls: given a federation with a new split, it returns one with the features of it."""

    sites: Sequence[Site]
    schema: Schema
    settings: TableSettings
    seed: int

    def __call__(self, new: Any) -> Any:
        split, start = list[Site](), 0
        for site in self.sites:
            rows = _known_rows(site, self.schema)
            if site.name in new.names:
                client = new.names.index(site.name)
                train, test = (rows[part[client].numpy() - start] for part in (new.train, new.test))
                site = replace(site, train=train, test=test)
            split.append(site)
            start += len(rows)
        summaries = [summarize(site, self.settings, self.seed) for site in split]
        found = join_sites(split, refit(self.schema, summaries))
        return replace(new, x=torch.from_numpy(found["x"]), table=found["table"], refit=self)


def reject_resplit(new: Any) -> Any:
    """Raise an error: an agreed schema has statistics of its own training rows."""
    fix = "leave out data.schema, so that the sites agree anew"
    raise DataError(f"The schema contains statistics of the training rows of its own split; {fix}.")


def _known_rows(site: Site, schema: Schema) -> Indices:
    """Return the positions of a site's rows in the federation: those without an unknown class."""
    y = target_numbers(schema, site)
    return np.flatnonzero(y >= 0) if schema.classes is not None else np.arange(len(y))
