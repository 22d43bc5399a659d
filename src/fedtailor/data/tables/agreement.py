"""Agree on a schema from the summaries of all sites, and report what does not fit, with the site's name."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

from fedtailor.data.tables.conflicts import (
    BySite,
    Conflict,
    category_conflicts,
    common_kinds,
    has_numbers,
    kind_conflicts,
    unit_conflicts,
)
from fedtailor.data.tables.schema import ColumnSchema, Schema, with_moments
from fedtailor.data.tables.settings import TableSettings
from fedtailor.data.tables.summary import Moments, SiteSummary, by_frequency
from fedtailor.data.tables.table_format import BOOLEAN, CATEGORY, NUMBER
from fedtailor.data.tables.targets import agree_on_targets
from fedtailor.errors import DataError

_MAX_CATEGORIES = 100  # of a column; rarer ones are merged


def agree(summaries: Sequence[SiteSummary], settings: TableSettings) -> tuple[Schema, list[Conflict]]:
    """Return the schema of all sites and what does not fit; raise `DataError` if no schema is possible.

    The result does not depend on the order of the summaries.
    """
    sites = sorted(summaries, key=lambda summary: summary.site)
    _check_settings(sites)
    targets = tuple(sites[0].targets)
    by_target = {name: {s.site: s.targets[name] for s in sites} for name in targets}
    agreed = agree_on_targets(by_target, settings)
    conflicts = list(agreed.conflicts)
    columns = dict[str, ColumnSchema]()
    for name in dict.fromkeys(column for summary in sites for column in summary.columns):
        by_site = {summary.site: summary.columns[name] for summary in sites if name in summary.columns}
        column, found = _agree_on_column(name, by_site, sites, settings)
        conflicts += found
        columns |= {} if column is None else {name: column}
    errors = [conflict for conflict in conflicts if conflict.is_error]
    if errors:
        raise DataError(" ".join(f"{error}." for error in errors))
    if not columns:
        raise DataError("No column is left as an input of the model; the tables have only the target.")
    seed, shared = sites[0].seed, sites[0].settings
    names = tuple(summary.site for summary in sites)
    schema = Schema(
        targets, agreed.classes, agreed.words, columns, settings.fit, settings.standardize, names, seed, shared
    )
    return schema, conflicts


def refit(schema: Schema, summaries: Sequence[SiteSummary]) -> Schema:
    """Return the schema with statistics of other training rows; its columns, categories, and classes stay the same."""
    if schema.fit == "site":  # it has no statistics
        return schema
    columns = dict[str, ColumnSchema]()
    for name, column in schema.columns.items():
        found = [summary.columns[name] for summary in summaries if name in summary.columns]
        counts = Counter[str]()
        for own in found:
            counts.update({text: count for text, count in own.categories.items() if text in column.categories})
        total = Moments.merge([own.moments for own in found])
        if column.kind == CATEGORY:
            columns[name] = replace(column, fill=by_frequency(counts)[0]) if counts else column
        else:
            columns[name] = with_moments(column, total) if total.count else column
    return replace(schema, columns=columns)


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


def _agree_on_column(
    name: str, by_site: BySite, sites: Sequence[SiteSummary], settings: TableSettings
) -> tuple[ColumnSchema | None, list[Conflict]]:
    lacking = [summary for summary in sites if name not in summary.columns]
    conflicts = [_lacking(name, summary, settings) for summary in lacking]
    if lacking and settings.columns == "common":
        return None, conflicts
    kind = common_kinds(by_site)[0]
    if kind == CATEGORY and has_numbers(by_site):
        fix = f"correct the values, or add '{name}' to categories or ignore at all sites"
        return None, conflicts + kind_conflicts(name, by_site, fix)
    has_missing = bool(lacking) or any(summary.missing for summary in by_site.values())
    column = ColumnSchema(kind, indicator=settings.missing_indicator and has_missing)
    fitted, found = (_categories if kind == CATEGORY else _numbers)(name, column, by_site)
    if fitted is not None and kind == CATEGORY:
        found += _mostly_rare(name, fitted, [summary for summary in sites if name in summary.columns])
    if fitted is None or settings.fit == "federation":
        return fitted, conflicts + found
    return replace(fitted, fill=None, mean=None, std=None), conflicts + found


def _mostly_rare(name: str, column: ColumnSchema, sites: Sequence[SiteSummary]) -> list[Conflict]:
    """Return a warning if most values are lost as rare categories, as those of numbers with a unit are."""
    present = sum(summary.rows - summary.columns[name].missing for summary in sites)
    known = sum(n for s in sites for text, n in s.columns[name].categories.items() if text in column.categories)
    if 2 * known >= present:
        return []
    lost = f"{present - known} of {present} values are rare texts, which become one category"
    return [Conflict("", name, f"{lost}; remove text from numbers, or add the column to ignore")]


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
        Conflict(site, name, "it is constant" if own.count else "the site reports no values, or too few")
        for site, own in moments.items()
        if column.kind != BOOLEAN and own.is_constant
    ]
    return with_moments(column, total), conflicts + (unit_conflicts(name, by_site) if column.kind == NUMBER else [])


def _categories(name: str, column: ColumnSchema, by_site: BySite) -> tuple[ColumnSchema | None, list[Conflict]]:
    totals: Counter[str] = Counter()
    for summary in by_site.values():
        totals.update(summary.categories)
    has_other = any(summary.has_other for summary in by_site.values()) or len(totals) > _MAX_CATEGORIES
    if not totals and not column.indicator:
        return None, [Conflict("", name, "no category is frequent enough to be reported, so it is not used")]
    frequent = by_frequency(totals)[:_MAX_CATEGORIES]
    if len(frequent) + has_other < 2 and not column.indicator:
        return None, [Conflict("", name, "it has the same value in all rows, so it is not used")]
    fill = frequent[0] if frequent else ""
    fitted = replace(column, categories=tuple(sorted(frequent)), has_other=has_other, fill=fill)
    return fitted, category_conflicts(name, by_site)
