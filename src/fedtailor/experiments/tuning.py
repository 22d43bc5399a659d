"""Results of a sweep: which settings score best, on which data, and whether the difference is more than chance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite, nan
from statistics import mean
from typing import Any

from rich.table import Table

from fedtailor.analysis.comparison import (
    DEPENDENT_SEEDS,
    MORE_SEEDS,
    NO_COMMON_SEED,
    Ranking,
    common_seeds,
    compare_with_best,
    headline,
    other_methods,
    rank,
)
from fedtailor.analysis.formatting import ScoreFormat, count_of, format_value, join_names, setting_labels
from fedtailor.analysis.rows import mean_and_std
from fedtailor.analysis.statistics import MIN_SEEDS
from fedtailor.analysis.tables import new_table, spread
from fedtailor.experiments.grid import REPEATS, Values, short_names, value_label
from fedtailor.runs.run import MOMENTS, Run
from fedtailor.runs.summaries import weighted_mean

_MAX_ROWS = 50


@dataclass(frozen=True)
class Outcome:
    """The scores of one run in its last round, over all samples."""

    values: Values
    method: str  # its proper name
    score: str
    higher_is_better: bool
    description: tuple[str, ...]  # data set, number of clients, number of rounds
    ranked_by: str  # the moment that ranks the method
    test: Mapping[str, float | None]  # moment -> score
    validation: Mapping[str, float | None]  # moment -> score; None without validation data


def make_outcome(run: Run, values: Values) -> Outcome:
    """Return the outcome of a run with these values."""
    sizes = [client["validation"] for client in run.info["clients"]]
    test = {moment: (run.summarize(moment) or {}).get("weighted") for moment in MOMENTS}
    validation = {m: weighted_mean(run.scores(m, score="validation"), sizes) for m in MOMENTS}
    data = run.experiment["data"].get("name", "own data")
    held_out = f" and {len(run.held_out_clients)} held out" if run.held_out_clients else ""
    description = (data, f"{count_of(run.num_clients, 'client')}{held_out}", count_of(len(run.records), "round"))
    return Outcome(
        values,
        run.method_title,
        run.info["score"],
        run.info["higher_is_better"],
        description,
        run.info["ranked_by"],
        test,
        validation,
    )


@dataclass(frozen=True)
class Setting:
    """One setting with the scores of all its seeds."""

    label: str  # the method's proper name and the fields that differ, as in comparisons of methods
    values: Values  # without seeds
    scores: Mapping[str, float]  # seed -> score by which settings are ranked; NaN if the run diverged
    test: Mapping[str, Sequence[float]]  # moment -> test scores, one per seed
    ranked_test: Sequence[float]  # test scores at the moment by which settings are ranked, one per seed

    @property
    def is_finite(self) -> bool:
        return bool(self.scores) and all(map(isfinite, self.scores.values()))


@dataclass(frozen=True)
class SweepComparison:
    """Settings that are compared under the same conditions: the same data and unreliable or malicious clients."""

    conditions: Values  # axis -> value
    axes: tuple[str, ...]  # that are tuned
    settings: Sequence[Setting]  # the best first; settings that diverged are last; only common seeds, if any
    excluded: int  # runs with seeds that not all settings have
    moment: str  # trained, received, or "as ranked" if methods differ
    validated: bool  # whether settings are ranked by validation data; otherwise by test data
    score: str
    higher_is_better: bool
    description: str
    names: Mapping[str, str]  # axis -> short name

    @property
    def fmt(self) -> ScoreFormat:
        """The format of scores."""
        return ScoreFormat(self.score)

    @property
    def criterion(self) -> str:
        """The score by which settings are ranked."""
        return f"{self.fmt.in_words} on {'validation' if self.validated else 'test'} data ({self.moment})"

    @cached_property
    def seeds(self) -> int:
        """The number of seeds."""
        return max(len(setting.scores) for setting in self.settings)

    @cached_property
    def best(self) -> Setting | None:
        """The best setting; None if no setting has a score."""
        first = self.settings[0]
        return first if first.is_finite else None

    def describe(self, values: Values) -> str:
        """Return values in words: FedProx, mu = 0.01, lr = 0.1."""
        names = {axis: "" if axis in ("method", "network", "data") else f"{self.names[axis]} = " for axis in values}
        return ", ".join(f"{names[axis]}{value_label(axis, value)}" for axis, value in values.items())

    def tuned_values(self, setting: Setting) -> Values:
        """Return a setting's values on the axes that are tuned."""
        return {axis: value for axis, value in setting.values.items() if axis in self.axes}

    def format_scores(self, scores: Sequence[float]) -> str:
        """Return the mean and the standard deviation of scores with their unit."""
        return spread(self.score, scores) + self.fmt.unit * bool(scores)

    @cached_property
    def ranking(self) -> Ranking | None:
        """The best setting and its differences to the others; None if no setting has a score."""
        finite = [one for one in self.settings if one.is_finite]
        if not finite:
            return None
        best, *others = finite
        pairs = {
            one.label: [(best.scores[seed], one.scores[seed]) for seed in best.scores if seed in one.scores]
            for one in others
        }
        scores = {one.label: mean(one.scores.values()) for one in finite}
        differences = compare_with_best(scores, pairs, self.higher_is_better)
        data = "on validation data" if self.validated else ""
        return Ranking(self.fmt, self.higher_is_better, best.label, scores[best.label], differences, data)

    def indistinguishable(self) -> list[Setting]:
        """Return the settings that are not significantly worse than the best."""
        similar = {found.other for found in self.ranking.differences if found.direction <= 0} if self.ranking else set()
        return [one for one in self.settings if one.label in similar]

    def edges(self) -> list[str]:
        """Return the axes on which the best value is the smallest or largest of the grid, with the direction to extend
        it. Zero is not an edge, because most fields cannot be negative."""
        found = []
        for axis, value in self.tuned_values(self.best).items() if self.best else ():
            tried = [one.values[axis] for one in self.settings if axis in one.values]
            if all(isinstance(other, int | float) and not isinstance(other, bool) for other in tried):
                low, high = min(tried), max(tried)
                if low < high and value in (low, high) and value != 0:
                    found.append(f"{self.names[axis]} {'below' if value == low else 'above'} {format_value(value)}")
        return found

    def findings(self) -> list[str]:
        """Return sentences about the result: first the verdict, then remarks."""
        best, ranking = self.best, self.ranking
        if best is None or ranking is None:
            return ["No setting has a finite score."]
        test = f"{self.format_scores(best.ranked_test)} ({self.moment})"
        if len(self.settings) == 1:
            score = mean(best.ranked_test) if best.ranked_test else nan
            return [headline(replace(ranking, score=score, data="")), f"It scores {test}."]
        ranked_by = f"{self.format_scores(list(best.scores.values()))} on validation data and "
        sentences = [headline(ranking), f"It scores {ranked_by if self.validated else ''}{test} on test data."]
        sentences += other_methods(ranking)
        if diverged := [one.label for one in self.settings if not one.is_finite]:
            sentences.append(f"Ranked last, because a run diverged or was not evaluated: {join_names(diverged)}.")
        if edges := self.edges():
            sentences.append(f"It is at the edge of the grid: also try {' and '.join(edges)}.")
        if self.excluded:
            sentences.append(f"{count_of(self.excluded, 'run')} with seeds that not all settings have are excluded.")
        return sentences

    def caveats(self) -> list[str]:
        """Return sentences about what limits the result."""
        if len(self.settings) == 1:
            return []
        notes = [MORE_SEEDS if self.seeds < MIN_SEEDS else DEPENDENT_SEEDS]
        if len({frozenset(one.scores) for one in self.settings}) > 1:
            notes.append(NO_COMMON_SEED)
        if not self.validated:
            optimistic = "Without validation data, the best setting is chosen on test data and its score is optimistic"
            notes.append(f"{optimistic}: hold out data with --validation 0.2.")
        return notes


def compare_settings(axes: Sequence[str], outcomes: Sequence[Outcome], moment: str) -> list[SweepComparison]:
    """Group the outcomes of a sweep by condition and setting. Settings are ranked by validation data if all runs have
    them, otherwise by test data, at a `moment`, or each method at its own if that is not received or trained."""
    names = short_names(axes)
    conditions = [axis for axis in axes if is_condition(axis)]
    tuned = tuple(axis for axis in axes if axis not in (*conditions, *REPEATS))
    validated = all(one.validation[_moment(one, moment)] is not None for one in outcomes)
    used = {_moment(one, moment) for one in outcomes}
    groups = dict[str, list[Outcome]]()
    for one in outcomes:
        groups.setdefault(str([one.values.get(axis) for axis in conditions]), []).append(one)
    found = []
    for group in groups.values():
        first = group[0]
        condition = {axis: first.values[axis] for axis in conditions if axis in first.values}
        settings, excluded = _settings(group, moment, validated)
        order = rank({s: list(one.scores.values()) for s, one in settings.items()}, first.higher_is_better)
        ranked = [settings[label] for label in order]
        common = ", ".join(part for part in first.description if all(part in one.description for one in outcomes))
        found.append(
            SweepComparison(
                condition,
                tuned,
                ranked,
                excluded,
                next(iter(used)) if len(used) == 1 else "as ranked",
                validated,
                first.score,
                first.higher_is_better,
                common,
                names,
            )
        )
    return found


def is_condition(axis: str) -> bool:
    """Return whether an axis describes the problem (data, unreliable or malicious clients) and so cannot be tuned.

    >>> is_condition("data.alpha"), is_condition("method.lr")
    (True, False)
    """
    return axis not in REPEATS and axis.partition(".")[0] in ("data", "unreliable", "attack")


def sweep_table(found: Sequence[SweepComparison]) -> Table:
    """Return the table of all settings, the best first."""
    first = found[0]
    axes = [axis for axis in first.names if axis not in REPEATS]
    seeds = max(comparison.seeds for comparison in found)
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    title = "; ".join(part for part in (first.description, first.fmt.in_words, over) if part)
    columns = [*(first.names[axis] for axis in axes), *["validation"] * first.validated, "trained", "received", "seeds"]
    table, hidden = new_table(title, columns, left=len(axes)), 0
    for comparison in found:
        hidden += len(comparison.settings[_MAX_ROWS:])
        for one in comparison.settings[:_MAX_ROWS]:
            scores = [list(one.scores.values())] * comparison.validated + [one.test["trained"], one.test["received"]]
            shown = [value_label(axis, one.values[axis]) if axis in one.values else "" for axis in axes]
            table.add_row(*shown, *(spread(comparison.score, part) for part in scores), str(len(one.scores)))
        table.add_section()
    criterion = f"validation data ({first.moment})" if first.validated else f"test data ({first.moment})"
    table.caption = f"Last round, all samples; ranked by {criterion}. "
    table.caption += "trained: after local training, before averaging; received: after averaging."
    table.caption += f" {hidden} more settings are not shown." if hidden else ""
    return table


def sweep_rows(found: Sequence[SweepComparison]) -> list[dict[str, Any]]:
    """Return one row per setting: its values, and the means and standard deviations of its scores over seeds."""
    rows = []
    for comparison in found:
        for one in comparison.settings:
            row: dict[str, Any] = dict(one.values) | {"seeds": len(one.scores)}
            if comparison.validated:
                row |= mean_and_std("validation", list(one.scores.values()))
            for moment in ("trained", "received"):
                row |= mean_and_std(moment, one.test[moment])
            rows.append(row)
    return rows


def sweep_verdict(found: Sequence[SweepComparison]) -> str:
    """Return the result of a sweep in words."""
    return " ".join(sweep_sentences(found))


def sweep_headlines(found: Sequence[SweepComparison]) -> list[str]:
    """Return the verdict of each condition."""
    conditions = [comparison.describe(comparison.conditions) if len(found) > 1 else "" for comparison in found]
    headlines = [comparison.findings()[0] for comparison in found]
    return [
        f"With {condition}: {line}" if condition else line
        for condition, line in zip(conditions, headlines, strict=True)
    ]


def sweep_sentences(found: Sequence[SweepComparison]) -> list[str]:
    """Return the findings, each condition with its own verdict, followed by their caveats."""
    pairs = zip(sweep_headlines(found), found, strict=True)
    sentences = [text for line, comparison in pairs for text in (line, *comparison.findings()[1:])]
    return [*sentences, *dict.fromkeys(note for comparison in found for note in comparison.caveats())]  # each once


def _settings(group: Sequence[Outcome], moment: str, validated: bool) -> tuple[dict[str, Setting], int]:
    """Return the settings by label, with the seeds that all of them have, and the number of other runs."""
    points = dict[str, dict[str, Outcome]]()
    for one in group:
        setting, seed = ({a: v for a, v in one.values.items() if (a in REPEATS) == repeat} for repeat in (False, True))
        points.setdefault(str(setting), {})[str(seed)] = one
    common = common_seeds(points.values())
    kept = [{seed: one for seed, one in own.items() if seed in common} for own in points.values()]
    found = {}
    for label, own in zip(_labels([next(iter(own.values())) for own in kept]), kept, strict=True):
        first = next(iter(own.values()))
        values = {axis: value for axis, value in first.values.items() if axis not in REPEATS}
        moments = {seed: _moment(one, moment) for seed, one in own.items()}
        ranked_by = {seed: (one.validation if validated else one.test)[moments[seed]] for seed, one in own.items()}
        scores = {seed: nan if score is None else score for seed, score in ranked_by.items()}
        test = {m: [score for one in own.values() if (score := one.test[m]) is not None] for m in MOMENTS}
        ranked_test = [score for seed, one in own.items() if (score := one.test[moments[seed]]) is not None]
        found[label] = Setting(label, values, scores, test, ranked_test)
    return found, len(group) - sum(map(len, kept))


def _moment(one: Outcome, moment: str) -> str:
    return moment if moment in MOMENTS else one.ranked_by


def _labels(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the labels that comparisons of methods use, too."""
    unlabeled = (*REPEATS, "method", "method.inner")
    return setting_labels([
        (one.method, {axis.removeprefix("method."): value_label(axis, v) if isinstance(v, str) else v
                      for axis, v in one.values.items() if axis not in unlabeled and not is_condition(axis)})
        for one in outcomes
    ])  # fmt: skip
