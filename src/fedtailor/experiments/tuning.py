"""Results of a sweep: which settings score best, on which data, and whether the difference is significant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from statistics import mean

from rich.table import Table

from fedtailor.analysis.formatting import ScoreFormat, count_of
from fedtailor.analysis.statistics import SIGNIFICANCE_LEVEL, holm, paired_t_test
from fedtailor.analysis.tables import new_table, spread
from fedtailor.experiments.grid import REPEATS, Values, format_value, short_names, value_label
from fedtailor.runs.run import MOMENTS, Run
from fedtailor.runs.summaries import weighted_mean

_MAX_NAMES, _MAX_ROWS = 3, 50


@dataclass(frozen=True)
class Outcome:
    """The scores of one run in its last round, over all samples."""

    values: Values
    score: str
    higher_is_better: bool
    description: tuple[str, ...]  # data set, number of clients, number of rounds
    test: Mapping[str, float | None]  # moment -> score
    validation: Mapping[str, float | None]  # moment -> score; None without validation data


def make_outcome(run: Run, values: Values) -> Outcome:
    """Return the outcome of a run with these values."""
    sizes = [client["validation"] for client in run.info["clients"]]
    test = {moment: (run.summarize(moment) or {}).get("weighted") for moment in MOMENTS}
    validation = {m: weighted_mean(run.scores(m, score="validation"), sizes) for m in MOMENTS}
    data = run.experiment["data"].get("name", "own data")
    description = (data, count_of(run.num_clients, "client"), count_of(len(run.records), "round"))
    return Outcome(values, run.info["score"], run.info["higher_is_better"], description, test, validation)


@dataclass(frozen=True)
class Setting:
    """One setting with the scores of all its seeds."""

    values: Values  # without seeds
    scores: Mapping[str, float]  # seed -> score by which settings are ranked; NaN if the run diverged
    test: Mapping[str, Sequence[float]]  # moment -> test scores, one per seed

    @property
    def is_finite(self) -> bool:
        return bool(self.scores) and all(map(isfinite, self.scores.values()))


@dataclass(frozen=True)
class SweepComparison:
    """Settings that are compared under the same conditions: the same data and the same unreliable clients."""

    conditions: Values  # axis -> value
    axes: tuple[str, ...]  # that are tuned
    settings: Sequence[Setting]  # the best first; settings that lack a seed or diverged are last
    moment: str
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
        """The number of seeds of complete settings."""
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

    def indistinguishable(self) -> list[Setting]:
        """Return the complete settings that are not significantly worse than the best: a t test paired over seeds, at
        the 5 % level with Holm's correction for the number of comparisons."""
        best = self.best
        if best is None:
            return []
        others = [one for one in self.settings[1:] if len(one.scores) == self.seeds and one.is_finite]
        gaps = [[best.scores[seed] - one.scores[seed] for seed in best.scores if seed in one.scores] for one in others]
        ps = holm([paired_t_test(gap) for gap in gaps])
        return [one for one, p in zip(others, ps, strict=True) if p > SIGNIFICANCE_LEVEL]

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
        """Return clauses about the result: first the best setting and its significance, then remarks."""
        best, complete = self.best, [one for one in self.settings if len(one.scores) == self.seeds]
        if best is None:
            return ["no setting has a finite score"]
        significance = f"; {self._significance(len(complete) - 1)}" if len(complete) > 1 else ""
        clauses = [self._winner(best, len(self.settings) == 1) + significance]
        if edges := self.edges():
            clauses.append(f"it is at the edge of the grid: also try {' and '.join(edges)}")
        if missing := len(self.settings) - len(complete):
            clauses.append(f"{missing} {'setting lacks' if missing == 1 else 'settings lack'} seeds and cannot be best")
        return clauses

    def caveats(self) -> list[str]:
        """Return clauses about what limits the result."""
        if self.validated or len(self.settings) == 1:
            return []
        optimistic = "without validation data, the best setting is chosen on test data and its score is optimistic"
        return [f"{optimistic}: hold out data with --validation 0.2"]

    def _winner(self, best: Setting, only: bool) -> str:
        conditions = f"with {self.describe(self.conditions)}, " if self.conditions else ""
        test = self.format_scores(best.test[self.moment])
        if only:
            setting = self.describe({**self.conditions, **self.tuned_values(best)})
            return f"{f'with {setting}, ' if setting else ''}the score is {test} ({self.moment})"
        ranked_by = f"{self.format_scores(list(best.scores.values()))} on validation data and {test} on test data"
        winner = self.describe(self.tuned_values(best))
        return f"{conditions}the best setting is {winner}: {ranked_by if self.validated else test} ({self.moment})"

    def _significance(self, others: int) -> str:
        if self.seeds < 2:
            return "there is only one seed, so differences may be chance"
        alike = self.indistinguishable()
        finite = sum(one.is_finite for one in self.settings[1:] if len(one.scores) == self.seeds)
        worse = others - len(alike)
        diverged = f" ({others - finite} diverged)" if finite < others else ""
        names = " or ".join(self.describe(self.tuned_values(one)) for one in alike[:_MAX_NAMES])
        names += f" or {len(alike) - _MAX_NAMES} more" if len(alike) > _MAX_NAMES else ""
        over = f"over {self.seeds} seeds, it is"
        if not alike:
            return f"{over} significantly better than {_all(others)}{diverged}"
        if not worse:
            return f"{over} not significantly better than {names}"
        return f"{over} significantly better than {worse} of {others} others{diverged}, but not than {names}"


def compare_settings(axes: Sequence[str], outcomes: Sequence[Outcome], moment: str) -> list[SweepComparison]:
    """Group the outcomes of a sweep by condition and setting. Settings are ranked by validation data if all runs have
    them, otherwise by test data."""
    names = short_names(axes)
    conditions = [axis for axis in axes if is_condition(axis)]
    tuned = tuple(axis for axis in axes if axis not in (*conditions, *REPEATS))
    validated = all(one.validation[moment] is not None for one in outcomes)
    groups = dict[str, list[Outcome]]()
    for one in outcomes:
        groups.setdefault(str([one.values.get(axis) for axis in conditions]), []).append(one)
    found = []
    for group in groups.values():
        first = group[0]
        condition = {axis: first.values[axis] for axis in conditions if axis in first.values}
        ranked = _ranked(_settings(group, moment, validated), first.higher_is_better)
        common = ", ".join(part for part in first.description if all(part in one.description for one in outcomes))
        found.append(
            SweepComparison(
                condition, tuned, ranked, moment, validated, first.score, first.higher_is_better, common, names
            )
        )
    return found


def is_condition(axis: str) -> bool:
    """Return whether an axis describes the problem (data, unreliable clients) and therefore cannot be tuned.

    >>> is_condition("data.alpha"), is_condition("method.lr")
    (True, False)
    """
    return axis not in REPEATS and axis.partition(".")[0] in ("data", "unreliable")


def sweep_table(found: Sequence[SweepComparison]) -> Table:
    """Return the table of all settings, the best first."""
    first = found[0]
    axes = [axis for axis in first.names if axis not in REPEATS]
    seeds = max(comparison.seeds for comparison in found)
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed: differences may be chance"
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


def sweep_verdict(found: Sequence[SweepComparison]) -> str:
    """Return the result of a sweep in words."""
    return " ".join(sweep_sentences(found))


def sweep_sentences(found: Sequence[SweepComparison]) -> list[str]:
    """Return the findings as sentences, followed by their caveats."""
    findings = found[0].findings() if len(found) == 1 else ["; ".join(comparison.findings()) for comparison in found]
    caveats = dict.fromkeys(clause for comparison in found for clause in comparison.caveats())  # each once
    return [f"{clause[0].upper()}{clause[1:]}." for clause in (*findings, *caveats)]


def _settings(group: Sequence[Outcome], moment: str, validated: bool) -> list[Setting]:
    points = dict[str, list[Outcome]]()
    for one in group:
        points.setdefault(str({a: v for a, v in one.values.items() if a not in REPEATS}), []).append(one)
    found = []
    for repeats in points.values():
        values = {axis: value for axis, value in repeats[0].values.items() if axis not in REPEATS}
        scores = dict[str, float]()
        for one in repeats:
            score = (one.validation if validated else one.test)[moment]
            if score is not None:
                scores[str([one.values.get(axis) for axis in REPEATS])] = score
        test = {m: [score for one in repeats if (score := one.test[m]) is not None] for m in MOMENTS}
        found.append(Setting(values, scores, test))
    return found


def _ranked(settings: Sequence[Setting], higher_is_better: bool) -> list[Setting]:
    seeds, sign = max(len(one.scores) for one in settings), 1 if higher_is_better else -1

    def sort_key(one: Setting) -> tuple[bool, float]:
        return len(one.scores) == seeds, sign * mean(one.scores.values()) if one.is_finite else -inf

    return sorted(settings, key=sort_key, reverse=True)


def _all(others: int) -> str:
    return "the other" if others == 1 else f"all {others} others"
