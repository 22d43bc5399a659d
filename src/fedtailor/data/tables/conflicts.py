"""What does not fit between sites, with the site's name."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from fedtailor.data.tables.summary import ColumnSummary
from fedtailor.data.tables.table_format import BOOLEAN, CATEGORY, DATE, KINDS, NUMBER
from fedtailor.data.tables.units import suspect_factors

_MAX_LISTED = 5  # categories in a message
BySite = Mapping[str, ColumnSummary]  # site -> what it reports about a column


@dataclass(frozen=True)
class Conflict:
    """What does not fit at a site. An error leaves no sensible schema; the others are decided as the text says.

    >>> str(Conflict("site-b", "sex", "the site lacks it; its values are imputed there"))
    "site-b, column 'sex': the site lacks it; its values are imputed there"
    """

    site: str  # empty: all sites
    column: str
    text: str
    is_error: bool = False

    def __str__(self) -> str:
        return f"{self.site or 'All sites'}, column '{self.column}': {self.text}"


def common_kinds(by_site: BySite) -> list[str]:
    """Return what the values of all sites can be read as, best first; each text is at least a category."""
    return [kind for kind in KINDS if all(kind in summary.kinds for summary in by_site.values())] or [CATEGORY]


def kind_conflicts(name: str, by_site: BySite, fix: str) -> list[Conflict]:
    """Return an error for each site with another kind of values than most sites that have numbers or dates."""
    kinds = {site: summary.kinds for site, summary in by_site.items() if summary.kinds != KINDS}  # with values
    sites = {site: next(k for k in (DATE, NUMBER, BOOLEAN, CATEGORY) if k in own) for site, own in kinds.items()}
    used = [found for found in sites.values() if found in (DATE, NUMBER)]
    usual = Counter(used).most_common(1)[0][0] if used else NUMBER
    at = ", ".join(site for site, found in sites.items() if found == usual)
    expected = f"but a {usual} at {at}" if at else f"but must be a {usual}"
    return [
        Conflict(site, name, f"it is a {'text' if found == CATEGORY else found}, {expected}; {fix}", True)
        for site, found in sites.items()
        if found != usual
    ]


def has_numbers(by_site: BySite) -> bool:
    """Return whether a site has numbers or dates, which text at another site contradicts; yes and no do not."""
    return any({NUMBER, DATE} & set(summary.kinds) for summary in by_site.values() if summary.kinds != KINDS)


def category_conflicts(name: str, by_site: BySite, what: str = "categories") -> list[Conflict]:
    """Return a warning for each site with categories, or classes, that no other site reports."""
    conflicts = []
    for site, summary in by_site.items():
        others = {text for other, s in by_site.items() if other != site for text in s.categories}
        own = sorted(text for text in summary.categories if text not in others)
        if own and others:
            shown = ", ".join(f"'{text}'" for text in own[:_MAX_LISTED]) + (", ..." if len(own) > _MAX_LISTED else "")
            conflicts.append(Conflict(site, name, f"no other site reports its {what} {shown}"))
    return conflicts


def unit_conflicts(name: str, by_site: BySite) -> list[Conflict]:
    """Return a warning for each site whose numbers are off by the factor of another unit."""
    conflicts = []
    for site, found in suspect_factors({site: summary.moments for site, summary in by_site.items()}).items():
        factor = f"{found.factor:g}" if found.factor > 1 else f"1/{1 / found.factor:g}"
        means = f"its mean is {found.mean:.4g}, but {found.others:.4g} at other sites"
        text = f"{means}, about {factor} times ({found.units}); check the unit, and convert the column"
        conflicts.append(Conflict(site, name, text))
    return conflicts
