"""Agree on the targets: classes and their names, or numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedtailor.data.tables.conflicts import (
    BySite,
    Conflict,
    category_conflicts,
    common_kinds,
    has_numbers,
    kind_conflicts,
    unit_conflicts,
)
from fedtailor.data.tables.settings import TableSettings
from fedtailor.data.tables.site import sorted_labels
from fedtailor.data.tables.summary import Moments
from fedtailor.data.tables.table_format import BOOLEAN, CATEGORY, DATE, NUMBER
from fedtailor.errors import DataError

_MAX_CLASSES = 20  # more different integers than these could be numbers to predict
_MAX_NUMBER = 10.0  # mean or deviation of numbers to predict with which the default learning rates work
_WORDS = ("false", "true")  # of booleans that sites write differently


@dataclass(frozen=True)
class Targets:
    """The names of the classes, if the targets are classes, and what does not fit."""

    classes: tuple[str, ...] | None = None
    words: tuple[str, str] | None = None  # if the classes are booleans
    conflicts: tuple[Conflict, ...] = ()


def agree_on_targets(by_target: Mapping[str, BySite], settings: TableSettings) -> Targets:
    """Return the classes of a single target, or none if the targets are numbers."""
    (name, by_site), *others = by_target.items()
    kind = common_kinds(by_site)[0]
    if others or settings.regression:
        return _numbers(by_target, settings)
    if kind == BOOLEAN:
        words = {summary.words for summary in by_site.values()}
        pair = (words.pop() if len(words) == 1 else None) or _WORDS
        return Targets(pair, pair)
    if kind == DATE:
        raise DataError(f"The target '{name}' is a date; use a class or a number.")
    if kind == CATEGORY and has_numbers(by_site):
        fix = f"correct the values of the target, or add '{name}' to categories at all sites"
        return Targets(conflicts=tuple(kind_conflicts(name, by_site, fix)))
    if kind == NUMBER and not all(summary.integers for summary in by_site.values()):
        if settings.regression is False:
            raise DataError(f"The target '{name}' has fractions, which are no classes; remove regression=False.")
        return _numbers(by_target, settings)
    return _classes(name, by_site, settings, kind == NUMBER)


def _numbers(by_target: Mapping[str, BySite], settings: TableSettings) -> Targets:
    conflicts = list[Conflict]()
    for name, by_site in by_target.items():
        if not {BOOLEAN, NUMBER} & set(common_kinds(by_site)):
            conflicts += kind_conflicts(name, by_site, "correct the values of the target")
            continue
        conflicts += unit_conflicts(name, by_site) + ([] if settings.survival else _far_from_one(name, by_site))
    return Targets(conflicts=tuple(conflicts))


def _far_from_one(name: str, by_site: BySite) -> list[Conflict]:
    """Return a warning for numbers with which training diverges, because a network starts with outputs near 0."""
    total = Moments.merge([summary.moments for summary in by_site.values()])
    if max(abs(total.mean), total.std) <= _MAX_NUMBER:
        return []
    fix = "shift and scale the target, so that training does not diverge"
    return [Conflict("", name, f"its mean is {total.mean:.4g}, its standard deviation {total.std:.4g}; {fix}")]


def _classes(name: str, by_site: BySite, settings: TableSettings, are_integers: bool) -> Targets:
    labels = sorted_labels(list({label for summary in by_site.values() for label in summary.categories}))
    different = max([len(labels), *(summary.distinct for summary in by_site.values())])
    if are_integers and settings.regression is None and different > _MAX_CLASSES:
        choice = "set regression to true to predict them as numbers, or to false for classes"
        raise DataError(f"The target '{name}' has {different} different integers or more; {choice}.")
    if different < 2:
        raise DataError(f"The target '{name}' has the same class in all training rows of all sites; it needs two.")
    if len(labels) < 2:
        fix = "set a smaller min_count, or regression to true if it is a number"
        raise DataError(f"The target '{name}' has fewer than two classes with min_count rows or more at a site; {fix}.")
    text = "it has classes with fewer than min_count rows; rows whose class no site reports are left out"
    rare = (site for site, summary in by_site.items() if summary.has_other)
    conflicts = [*category_conflicts(name, by_site, "classes"), *(Conflict(site, name, text) for site in rare)]
    return Targets(tuple(labels), None, tuple(conflicts))
