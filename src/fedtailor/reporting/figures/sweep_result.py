"""The results of a sweep in the form that figures need: settings by method, ordered values, and summary sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedtailor.analysis.formatting import count_of, format_value, round_digits
from fedtailor.analysis.run_summary import Comparison
from fedtailor.experiments.grid import REPEATS, value_label
from fedtailor.experiments.sweep import Plan, read_plan
from fedtailor.experiments.tuning import (
    Setting,
    SweepComparison,
    compare_settings,
    make_outcome,
    sweep_headlines,
    sweep_sentences,
)
from fedtailor.reporting.figures.figure import Table
from fedtailor.runs.run import MOMENTS, Run

_MAX_COMPARISONS = 4  # per summary
AxisValues = Mapping[str, Sequence[Any]]  # axis -> its values


@dataclass(frozen=True)
class Series:
    """The settings of one method under one condition."""

    name: str
    method: str
    comparison: SweepComparison
    settings: Sequence[Setting]
    axes: Sequence[str]  # fields with several values


@dataclass(frozen=True, eq=False)
class SweepResult:
    """A sweep and those of its runs that are given."""

    plan: Plan
    runs: Sequence[Run]

    @cached_property
    def comparisons(self) -> list[SweepComparison]:
        outcomes = [make_outcome(run, self.plan.runs[run_name(run)]) for run in self.runs]
        return compare_settings(self.plan.axes, outcomes, self.plan.moment)

    def answer(self) -> list[str]:
        """Return the answer to "Which settings are best?"."""
        more = len(self.comparisons) - _MAX_COMPARISONS
        rest = [f"The figures show {count_of(more, 'more comparison')}."] if more > 0 else []
        return [*sweep_sentences(self.comparisons[:_MAX_COMPARISONS]), *rest, *self.missing()]

    def missing(self) -> list[str]:
        """Return a sentence if runs of the sweep are missing."""
        missing, planned = len(self.plan.runs) - len(self.runs), len(self.plan.runs)
        verb = "is" if missing == 1 else "are"
        return [f"{missing} of the sweep's {planned} runs {verb} missing."] if missing else []

    def ranked(self, group: Comparison) -> Comparison:
        """Return the group in the order of the sweep, which ranks by validation data and puts incomplete settings
        last."""
        settings = [setting.values for comparison in self.comparisons for setting in comparison.settings]

        def rank(label: str) -> int:
            values = self.plan.runs[run_name(group.methods[label][0].run)]
            return settings.index({axis: value for axis, value in values.items() if axis not in REPEATS})

        return replace(group, methods={label: group.methods[label] for label in sorted(group.methods, key=rank)})


def find_sweeps(runs: Sequence[Run]) -> list[SweepResult]:
    """Return the sweeps to which some of these runs belong."""
    folders = dict[Path, list[Run]]()
    for run in runs:
        if run.folder is not None:
            folders.setdefault(run.folder.resolve().parent, []).append(run)
    plans = {folder: plan for folder in folders if (plan := read_plan(folder)) is not None}
    sweeps = [
        SweepResult(plan, [run for run in folders[folder] if run_name(run) in plan.runs])
        for folder, plan in plans.items()
    ]
    return [sweep for sweep in sweeps if sweep.runs]


def sweep_names(sweeps: Sequence[SweepResult]) -> list[str]:
    """Return the sweeps' folder names, or full paths if names repeat; a single sweep needs no name."""
    folders = [run.folder.resolve().parent for sweep in sweeps for run in sweep.runs[:1] if run.folder is not None]
    short = [folder.name for folder in folders]
    names = short if len(set(short)) == len(folders) else [str(folder) for folder in folders]
    return names if len(sweeps) > 1 else [""] * len(sweeps)


def run_name(run: Run) -> str:
    """Return the run's name in its sweep, which is its folder's name."""
    return run.folder.resolve().name if run.folder is not None else ""


def axis_values(plan: Plan) -> dict[str, list[Any]]:
    """Return axis -> its values; numbers are sorted, other values keep their order."""
    order: dict[str, list[Any]] = {axis: [] for axis in plan.axes}
    for values in plan.runs.values():
        for axis, value in values.items():
            if value not in order[axis]:
                order[axis].append(value)
    return {axis: sorted(values) if all_numeric(values) else values for axis, values in order.items()}


def all_numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def split_by_method(comparison: SweepComparison, several: bool) -> list[Series]:
    """Split the settings by method; names include the condition if there are several comparisons."""
    groups = dict[str, list[Setting]]()
    for setting in comparison.settings:
        groups.setdefault(value_label("method", setting.values.get("method", "")), []).append(setting)
    series = []
    for method, settings in groups.items():
        values = {
            axis: {format_value(one.values[axis]) for one in settings if axis in one.values} for axis in comparison.axes
        }
        axes = [axis for axis, texts in values.items() if axis != "method" and len(texts) > 1]
        condition = [comparison.describe(comparison.conditions)] * (several and bool(comparison.conditions))
        name = ", ".join([method] * bool(method) + condition)
        series.append(Series(name, method, comparison, settings, axes))
    return series


def mean_score(comparison: SweepComparison, setting: Setting) -> float | None:
    """Return the setting's mean over seeds in display units; None if it diverged."""
    return round_digits(comparison.fmt.factor * mean(setting.scores.values())) if setting.is_finite else None


def seed_std(comparison: SweepComparison, setting: Setting) -> float | None:
    """Return the setting's standard deviation over seeds in display units; None for one seed."""
    several = setting.is_finite and len(setting.scores) > 1
    return round_digits(comparison.fmt.factor * stdev(setting.scores.values())) if several else None


def as_own_comparison(series: Series) -> Series:
    """Return the series with a comparison of its settings only."""
    return replace(series, comparison=replace(series.comparison, settings=series.settings))


def settings_summary(comparisons: Sequence[SweepComparison]) -> str:
    """Return the verdict on each comparison, for the caption of a figure."""
    sentences = sweep_headlines(comparisons[:_MAX_COMPARISONS])
    more = len(comparisons) - _MAX_COMPARISONS
    sentences += [f"The table shows {count_of(more, 'more comparison')}."] if more > 0 else []
    return " ".join(sentences)


def settings_table(comparisons: Sequence[SweepComparison]) -> Table:
    """Return all settings with their scores, the best first."""
    first = comparisons[0]
    axes = [*first.conditions, *first.axes]
    validation = [f"validation ({first.moment})"] if first.validated else []
    tests = [f"test ({moment})" for moment in MOMENTS]
    rows = []
    for comparison in comparisons:
        for one in comparison.settings:
            scores = [list(one.scores.values())] * comparison.validated + [one.test[moment] for moment in MOMENTS]
            values = [value_label(axis, one.values[axis]) if axis in one.values else "" for axis in axes]
            rows.append([*values, *(comparison.format_scores(part) for part in scores), len(one.scores)])
    return Table([*(first.names[axis] for axis in axes), *validation, *tests, "seeds"], rows)
