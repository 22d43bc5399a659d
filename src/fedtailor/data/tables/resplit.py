"""Tables whose rows are split anew into training and test rows: statistics are fitted on the new training rows.

Columns, categories, and classes stay those on which the sites agreed, so that a model fits all splits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedtailor.data.tables.agreement import refit
from fedtailor.data.tables.encoding import join_sites
from fedtailor.data.tables.schema import Schema
from fedtailor.data.tables.settings import SiteSettings
from fedtailor.data.tables.site import Site
from fedtailor.data.tables.summary import summarize


@dataclass(frozen=True, eq=False)
class TableRefit:
    """What `Federation.resplit` calls: given a federation with a new split, it returns one with the features of it."""

    sites: Sequence[Site]
    schema: Schema
    settings: SiteSettings

    def __call__(self, new: Any) -> Any:
        split, start = list[Site](), 0
        for site in self.sites:
            if site.name in new.names:
                client = new.names.index(site.name)
                train, test = (part[client].numpy() - start for part in (new.train, new.test))
                split.append(replace(site, train=train, test=test))
            else:
                split.append(site)
            start += len(site.raw.rows)
        summaries = [summarize(site, self.settings, self.schema.seed) for site in split]
        found = join_sites(split, refit(self.schema, summaries))
        return replace(new, x=torch.from_numpy(found["x"]), table=found["table"], refit=self)
