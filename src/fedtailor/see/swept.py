"""A sweep's settings as figures need them: method by method, in the order of their values, with their sentence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedtailor.run import MOMENTS, Run
from fedtailor.see.digest import Group
from fedtailor.see.drawing import short
from fedtailor.see.figure import Table
from fedtailor.sweeps.grid import REPEATS, text_of
from fedtailor.sweeps.sweep import Plan, read_plan
from fedtailor.sweeps.tuning import Contest, Setting, contests, outcome, sentences

_MOST_SAID = 4  # contests in a sentence
Order = Mapping[str, Sequence[Any]]  # axis -> its values


@dataclass(frozen=True)
class Series:
    """The settings of one method under one condition."""

    name: str
    method: str
    contest: Contest
    settings: Sequence[Setting]
    axes: Sequence[str]  # fields of which several values were tried


@dataclass(frozen=True, eq=False)
class Swept:
    """A sweep, as far as its runs are here."""

    plan: Plan
    runs: Sequence[Run]

    @cached_property
    def contests(self) -> list[Contest]:
        outcomes = [outcome(run, self.plan.runs[name_in(run)]) for run in self.runs]
        return contests(self.plan.axes, outcomes, self.plan.moment)

    def answer(self) -> list[str]:
        """What was found, in sentences."""
        more = len(self.contests) - _MOST_SAID
        rest = [f"And so on for {more} more."] if more > 0 else []
        return [*sentences(self.contests[:_MOST_SAID]), *rest, *self.missing()]

    def missing(self) -> list[str]:
        """A sentence where settings have no run yet, or none that is given."""
        lost, planned = len(self.plan.runs) - len(self.runs), len(self.plan.runs)
        return [f"{lost} of the sweep's {planned} runs {'is' if lost == 1 else 'are'} missing here."] if lost else []

    def ranked(self, group: Group) -> Group:
        """The group with its settings as the sweep ranks them: validation data may choose another best than test data
        do, or some may lack seeds."""
        settings = [setting.values for contest in self.contests for setting in contest.settings]

        def place(label: str) -> int:
            values = self.plan.runs[name_in(group.methods[label][0].run)]
            return settings.index({axis: value for axis, value in values.items() if axis not in REPEATS})

        return replace(group, methods={label: group.methods[label] for label in sorted(group.methods, key=place)})


def sweeps(runs: Sequence[Run]) -> list[Swept]:
    """The sweeps to which some of these runs belong."""
    folders = dict[Path, list[Run]]()
    for run in runs:
        if run.folder is not None:
            folders.setdefault(run.folder.resolve().parent, []).append(run)
    plans = {folder: plan for folder in folders if (plan := read_plan(folder)) is not None}
    found = [
        Swept(plan, [run for run in folders[folder] if name_in(run) in plan.runs]) for folder, plan in plans.items()
    ]
    return [one for one in found if one.runs]


def names(found: Sequence[Swept]) -> list[str]:
    """How several sweeps are told apart: by their folders' names, or whole paths where these are the same. One alone
    needs no name."""
    folders = [run.folder.resolve().parent for one in found for run in one.runs[:1] if run.folder is not None]
    short_ones = [folder.name for folder in folders]
    told = short_ones if len(set(short_ones)) == len(folders) else [str(folder) for folder in folders]
    return told if len(found) > 1 else [""] * len(found)


def name_in(run: Run) -> str:
    """By what a run is called in its sweep: its folder's name."""
    return run.folder.resolve().name if run.folder is not None else ""


def order_of(plan: Plan) -> dict[str, list[Any]]:
    """Axis -> its values: numbers by their size, others as they were given."""
    order: dict[str, list[Any]] = {axis: [] for axis in plan.axes}
    for values in plan.runs.values():
        for axis, value in values.items():
            if value not in order[axis]:
                order[axis].append(value)
    return {axis: sorted(values) if are_numbers(values) else values for axis, values in order.items()}


def are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def split(contest: Contest, several: bool) -> list[Series]:
    """A contest's settings, method by method."""
    groups = dict[str, list[Setting]]()
    for setting in contest.settings:
        groups.setdefault(str(setting.values.get("method", "")), []).append(setting)
    found = []
    for method, settings in groups.items():
        tried = {axis: {text_of(one.values[axis]) for one in settings if axis in one.values} for axis in contest.axes}
        axes = [axis for axis, values in tried.items() if axis != "method" and len(values) > 1]
        words = [method] * bool(method) + [contest.shown(contest.given)] * (several and bool(contest.given))
        found.append(Series(", ".join(words), method, contest, settings, axes))
    return found


def height(contest: Contest, setting: Setting) -> float | None:
    """A setting's mean, as it is shown."""
    return short(contest.scale.factor * mean(setting.judged.values())) if setting.is_finite else None


def spread(contest: Contest, setting: Setting) -> float | None:
    """Its deviation over seeds."""
    several = setting.is_finite and len(setting.judged) > 1
    return short(contest.scale.factor * stdev(setting.judged.values())) if several else None


def apart(series: Series) -> Series:
    """A series as a contest of its own: what is said of it is said of this method alone."""
    return replace(series, contest=replace(series.contest, settings=series.settings))


def says(found: Sequence[Contest]) -> str:
    """One sentence: what is best, whether by more than chance, and what is to be doubted."""
    clauses = found[0].findings() if len(found) == 1 else [one.findings()[0] for one in found[:_MOST_SAID]]
    clauses += [f"and so on for {len(found) - _MOST_SAID} more"] if len(found) > _MOST_SAID else []
    clauses += list(dict.fromkeys(clause for one in found for clause in one.caveat()))
    text = "; ".join(clauses)
    return f"{text[0].upper()}{text[1:]}."


def table(found: Sequence[Contest]) -> Table:
    """Every setting with its numbers, the best first."""
    first = found[0]
    axes = [*first.given, *first.axes]
    judged = [f"validation, {first.moment}"] if first.validated else []
    heads = [*(first.names[axis] for axis in axes), *judged, *(f"test, {moment}" for moment in MOMENTS), "seeds"]
    rows = []
    for contest in found:
        for one in contest.settings:
            scores = [list(one.judged.values())] * contest.validated + [one.test[moment] for moment in MOMENTS]
            values = [text_of(one.values[axis]) if axis in one.values else "" for axis in axes]
            rows.append([*values, *(contest.number(part) for part in scores), len(one.judged)])
    return Table(heads, rows)
