"""Agree on the targets: classes and their names, or numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedtailor.data.tables.conflicts import BySite, Conflict, common_kinds, has_numbers, kind_conflicts, unit_conflicts
from fedtailor.data.tables.settings import TableSettings
from fedtailor.data.tables.site import sorted_labels
from fedtailor.data.tables.table_format import BOOLEAN, CATEGORY, DATE, NUMBER
from fedtailor.errors import DataError

_MAX_CLASSES = 20  # more different integers than these could be numbers to predict
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
        return _numbers(by_target)
    if kind == BOOLEAN:
        words = {summary.words for summary in by_site.values()}
        pair = (words.pop() if len(words) == 1 else None) or _WORDS
        return Targets(pair, pair)
    if kind == DATE:
        raise DataError(f"The target '{name}' is a date; use a class or a number.")
    if kind == CATEGORY and has_numbers(by_site):
        return Targets(conflicts=tuple(kind_conflicts(name, by_site)))
    if kind == NUMBER and not all(summary.integers for summary in by_site.values()):
        if settings.regression is False:
            raise DataError(f"The target '{name}' has fractions, which are no classes; remove regression=False.")
        return _numbers(by_target)
    return _classes(name, by_site, settings, kind == NUMBER)


def _numbers(by_target: Mapping[str, BySite]) -> Targets:
    conflicts = list[Conflict]()
    for name, by_site in by_target.items():
        is_number = {BOOLEAN, NUMBER} & set(common_kinds(by_site))
        conflicts += (unit_conflicts if is_number else kind_conflicts)(name, by_site)
    return Targets(conflicts=tuple(conflicts))


def _classes(name: str, by_site: BySite, settings: TableSettings, are_integers: bool) -> Targets:
    labels = sorted_labels(list({label for summary in by_site.values() for label in summary.categories}))
    different = max([len(labels), *(summary.distinct for summary in by_site.values())])
    if are_integers and settings.regression is None and different > _MAX_CLASSES:
        choice = "set regression to true to predict them as numbers, or to false for classes"
        raise DataError(f"The target '{name}' has {different} different integers or more; {choice}.")
    if len(labels) < 2:
        fix = "set a smaller min_count, or regression to true if it is a number"
        raise DataError(f"The target '{name}' has fewer than two classes with min_count rows or more at a site; {fix}.")
    text = "it has classes with fewer than min_count rows; rows whose class no site reports are left out"
    rare = (site for site, summary in by_site.items() if summary.has_other)
    return Targets(tuple(labels), None, tuple(Conflict(site, name, text) for site in rare))
