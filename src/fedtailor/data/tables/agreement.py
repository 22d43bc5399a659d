"""Agree on a schema from the summaries of all sites, and report what does not fit, with the site's name."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from fedtailor.data.tables.columns import BOOLEAN, CATEGORY, DATE, KINDS, NUMBER
from fedtailor.data.tables.schema import ColumnSchema, Schema, with_moments
from fedtailor.data.tables.settings import TableSettings
from fedtailor.data.tables.site import sorted_labels
from fedtailor.data.tables.summary import ColumnSummary, Moments, SiteSummary
from fedtailor.data.tables.units import suspect_factors
from fedtailor.errors import DataError

_MAX_CLASSES = 20  # more integers than these could be numbers to predict
_MAX_CATEGORIES = 100  # of a column; rarer ones are merged
_MAX_LISTED = 5  # categories in a message
_BOOLEAN_WORDS = ("false", "true")
BySite = Mapping[str, ColumnSummary]  # site -> what it reports about a column


@dataclass(frozen=True)
class Conflict:
    """What does not fit at a site. An error leaves no sensible schema; the others are decided as the text says."""

    site: str  # empty: all sites
    column: str
    text: str
    is_error: bool = False

    def __str__(self) -> str:
        return f"{self.site or 'All sites'}, column '{self.column}': {self.text}"


def agree(summaries: Sequence[SiteSummary], settings: TableSettings) -> tuple[Schema, list[Conflict]]:
    """Return the schema of all sites and what does not fit; raise `DataError` if no schema is possible.

    The result does not depend on the order of the summaries.
    """
    sites = sorted(summaries, key=lambda summary: summary.site)
    _check_settings(sites)
    targets = tuple(sites[0].targets)
    by_target = {name: {s.site: s.targets[name] for s in sites} for name in targets}
    classes, words, conflicts = _agree_on_classes(by_target, settings)
    columns = dict[str, ColumnSchema]()
    for name in dict.fromkeys(column for summary in sites for column in summary.columns):
        by_site = {summary.site: summary.columns[name] for summary in sites if name in summary.columns}
        column, found = _agree_on_column(name, by_site, sites, settings)
        conflicts += found
        columns |= {} if column is None else {name: column}
    errors = [conflict for conflict in conflicts if conflict.is_error]
    if errors:
        raise DataError(" ".join(map(str, errors)))
    if not columns:
        raise DataError("No column is left as an input of the model; the tables have only the target.")
    seed, shared = sites[0].seed, sites[0].settings
    names = tuple(summary.site for summary in sites)
    return Schema(targets, classes, words, columns, settings.fit, settings.standardize, names, seed, shared), conflicts


def _check_settings(sites: Sequence[SiteSummary]) -> None:
    if not sites:
        raise DataError("A schema needs the summary of at least one site.")
    for name, times in Counter(summary.site for summary in sites).items():
        if times > 1:
            raise DataError(f"{times} summaries are of a site with the name '{name}'; give each site its own --site.")
    first = sites[0]
    for summary in sites[1:]:
        for name, value in {**first.settings, "seed": first.seed}.items():
            own = {**summary.settings, "seed": summary.seed}[name]
            if own != value:
                raise DataError(
                    f"{summary.site} used {name} {own!r}, but {first.site} {value!r}; use the same for all."
                )


def _common_kinds(by_site: BySite) -> list[str]:
    return [kind for kind in KINDS if all(kind in summary.kinds for summary in by_site.values())]


def _agree_on_classes(
    by_target: Mapping[str, BySite], settings: TableSettings
) -> tuple[tuple[str, ...] | None, tuple[str, str] | None, list[Conflict]]:
    """Return the names of the classes, or None for numbers, and the two words if they are booleans."""
    for name, by_site in by_target.items():
        kinds = _common_kinds(by_site)
        if len(by_target) > 1 or settings.regression:
            if not {BOOLEAN, NUMBER} & set(kinds):
                return None, None, _kind_conflicts(name, by_site, NUMBER)
            continue
        if kinds[0] == BOOLEAN:
            words = {summary.words for summary in by_site.values()}
            pair = words.pop() if len(words) == 1 else None
            return pair or _BOOLEAN_WORDS, pair or _BOOLEAN_WORDS, []
        if kinds[0] == DATE:
            raise DataError(f"The target '{name}' is a date; use a class or a number.")
        if kinds[0] == CATEGORY and (found := _kind_conflicts(name, by_site, CATEGORY)):
            return None, None, found
        if kinds[0] == NUMBER and not all(summary.integers for summary in by_site.values()):
            if settings.regression is False:
                raise DataError(f"The target '{name}' has fractions, which are no classes; remove regression=False.")
            return None, None, []
        labels = sorted_labels(list({label for summary in by_site.values() for label in summary.categories}))
        if kinds[0] == NUMBER and settings.regression is None and len(labels) > _MAX_CLASSES:
            raise DataError(
                f"The target '{name}' has {len(labels)} different integers; set regression to true to predict them as "
                "numbers, or to false for classes."
            )
        if len(labels) < 2:
            raise DataError(
                f"The target '{name}' has fewer than two classes with {settings.min_count} rows or more at a site; "
                "set a smaller min_count, or regression to true if it is a number."
            )
        rare = [site for site, summary in by_site.items() if summary.has_other]
        text = (
            f"it has classes with fewer than {settings.min_count} rows; rows whose class no site reports are left out"
        )
        return tuple(labels), None, [Conflict(site, name, text) for site in rare]
    return None, None, []


def _kind_conflicts(name: str, by_site: BySite, kind: str) -> list[Conflict]:
    """Return an error for each site with text in a column that has numbers or dates at another site."""
    sites = {site: next(k for k in (DATE, NUMBER, BOOLEAN, CATEGORY) if k in s.kinds) for site, s in by_site.items()}
    used = [found for found in sites.values() if found in (DATE, NUMBER)]
    if not used and kind == CATEGORY:
        return []  # yes and no at one site, and more words at another
    usual = Counter(used).most_common(1)[0][0] if used else NUMBER
    at = ", ".join(site for site, found in sites.items() if found == usual) or "no site"
    fix = f"correct the values, or add '{name}' to categories or ignore at all sites"
    return [
        Conflict(site, name, f"it is a {'text' if found == CATEGORY else found}, but a {usual} at {at}; {fix}", True)
        for site, found in sites.items()
        if found != usual
    ]


def _agree_on_column(
    name: str, by_site: BySite, sites: Sequence[SiteSummary], settings: TableSettings
) -> tuple[ColumnSchema | None, list[Conflict]]:
    lacking = [summary for summary in sites if name not in summary.columns]
    conflicts = [_lacking(name, summary, settings) for summary in lacking]
    if lacking and settings.columns == "common":
        return None, conflicts
    kind = _common_kinds(by_site)[0]
    if kind == CATEGORY and (errors := _kind_conflicts(name, by_site, CATEGORY)):
        return None, conflicts + errors
    has_missing = bool(lacking) or any(summary.missing for summary in by_site.values())
    column = ColumnSchema(kind, indicator=settings.missing_indicator and has_missing)
    fitted, found = (_categories if kind == CATEGORY else _numbers)(name, column, by_site)
    if fitted is None or settings.fit == "federation":
        return fitted, conflicts + found
    return replace(fitted, fill=None, mean=None, std=None), conflicts + found


def _lacking(name: str, summary: SiteSummary, settings: TableSettings) -> Conflict:
    near = get_close_matches(name.lower(), [column.lower() for column in summary.columns], n=1, cutoff=0.8)
    similar = [column for column in summary.columns if near and column.lower() == near[0]]
    hint = f" (rename '{similar[0]}' if it is the same)" if similar else ""
    result = "it is not used at any site" if settings.columns == "common" else "its values are imputed there"
    return Conflict(summary.site, name, f"the site lacks it{hint}; {result}")


def _numbers(name: str, column: ColumnSchema, by_site: BySite) -> tuple[ColumnSchema | None, list[Conflict]]:
    moments = {site: summary.moments for site, summary in by_site.items()}
    total = Moments.merge(list(moments.values()))
    if (not total.count or total.is_constant) and not column.indicator:
        text = "has no values" if not total.count else "has the same value in all rows"
        return None, [Conflict("", name, f"it {text}, so it is not used")]
    conflicts = [
        Conflict(site, name, f"it {'has no values' if not own.count else 'is constant'} at this site")
        for site, own in moments.items()
        if column.kind != BOOLEAN and own.is_constant
    ]
    if column.kind == NUMBER:
        for site, found in suspect_factors(moments).items():
            factor = f"{found.factor:g}" if found.factor > 1 else f"1/{1 / found.factor:g}"
            means = f"its mean is {found.mean:.4g}, but {found.others:.4g} at other sites"
            text = f"{means}, about {factor} times ({found.units}); check the unit, and convert the column"
            conflicts.append(Conflict(site, name, text))
    return with_moments(column, total), conflicts


def _categories(name: str, column: ColumnSchema, by_site: BySite) -> tuple[ColumnSchema | None, list[Conflict]]:
    totals: Counter[str] = Counter()
    for summary in by_site.values():
        totals.update(summary.categories)
    has_other = any(summary.has_other for summary in by_site.values()) or len(totals) > _MAX_CATEGORIES
    if not totals and not column.indicator:
        return None, [Conflict("", name, "no category is frequent enough to be reported, so it is not used")]
    frequent = sorted(totals, key=lambda text: (-totals[text], text))[:_MAX_CATEGORIES]
    if len(frequent) + has_other < 2 and not column.indicator:
        return None, [Conflict("", name, "it has the same value in all rows, so it is not used")]
    conflicts = []
    for site, summary in by_site.items():
        others = {text for other, s in by_site.items() if other != site for text in s.categories}
        own = sorted(text for text in summary.categories if text not in others)
        if own and len(by_site) > 1:
            shown = ", ".join(f"'{text}'" for text in own[:_MAX_LISTED]) + (", ..." if len(own) > _MAX_LISTED else "")
            conflicts.append(Conflict(site, name, f"no other site reports its categories {shown}"))
    fill = frequent[0] if frequent else ""
    return replace(column, categories=tuple(sorted(frequent)), has_other=has_other, fill=fill), conflicts
