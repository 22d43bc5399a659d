"""What a sweep found: which settings are best, on which data that was judged, and whether it is more than chance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from statistics import mean

from rich.table import Table

from fedtailor.chance import LIMIT, holm, student
from fedtailor.evaluation import weighted_mean
from fedtailor.run import MOMENTS, Run
from fedtailor.scale import Scale, counted
from fedtailor.sweeps.grid import REPEATS, Values, short_names, text_of
from fedtailor.table import new_table, spread

_MOST_NAMES, _MOST_ROWS = 3, 50


@dataclass(frozen=True)
class Outcome:
    """The scores of one run in its last round, over all samples."""

    values: Values
    score: str
    higher_is_better: bool
    where: tuple[str, ...]
    test: Mapping[str, float | None]  # moment -> score
    validation: Mapping[str, float | None]  # None: no data were held out


def outcome(run: Run, values: Values) -> Outcome:
    """What of a run counts in a sweep."""
    held = [client["validation"] for client in run.info["clients"]]
    test = {moment: (run.numbers(moment) or {}).get("weighted") for moment in MOMENTS}
    validation = {m: weighted_mean(run.scores(m, score="validation"), held) for m in MOMENTS}
    data = run.experiment["data"].get("name", "own data")
    where = (data, counted(run.num_clients, "client"), counted(len(run.records), "round"))
    return Outcome(values, run.info["score"], run.info["higher_is_better"], where, test, validation)


@dataclass(frozen=True)
class Setting:
    """A point of the grid over its seeds."""

    values: Values  # without seeds
    judged: Mapping[str, float]  # seed -> the score by which settings are compared; NaN: it diverged
    test: Mapping[str, Sequence[float]]  # moment -> scores, one a seed

    @property
    def is_finite(self) -> bool:
        return bool(self.judged) and all(map(isfinite, self.judged.values()))


@dataclass(frozen=True)
class Contest:
    """Settings that compete: with the same data and the same unreliable clients, for these are not chosen but given."""

    given: Values  # axis -> value, of conditions
    axes: tuple[str, ...]  # that are chosen
    settings: Sequence[Setting]  # the best first; those that lack a seed, or diverged, last
    moment: str
    validated: bool  # whether validation data judge; else test data do
    score: str
    higher_is_better: bool
    where: str
    names: Mapping[str, str]  # axis -> its short name

    @property
    def scale(self) -> Scale:
        """How scores are written."""
        return Scale(self.score)

    @property
    def judge(self) -> str:
        """By what settings are compared."""
        return f"{self.scale.in_words} on {'validation' if self.validated else 'test'} data ({self.moment})"

    @cached_property
    def seeds(self) -> int:
        """Of settings that are whole."""
        return max(len(setting.judged) for setting in self.settings)

    @cached_property
    def best(self) -> Setting | None:
        """None if there is none with a score."""
        first = self.settings[0]
        return first if first.is_finite else None

    def shown(self, values: Values) -> str:
        """Settings in words: fedprox, mu = 0.01, lr = 0.1."""
        names = {axis: "" if axis in ("method", "network", "data") else f"{self.names[axis]} = " for axis in values}
        return ", ".join(f"{names[axis]}{text_of(value)}" for axis, value in values.items())

    def own(self, setting: Setting) -> Values:
        """A setting's values on the axes that are chosen."""
        return {axis: value for axis, value in setting.values.items() if axis in self.axes}

    def number(self, scores: Sequence[float]) -> str:
        return spread(self.score, scores) + self.scale.unit * bool(scores)

    def not_told_apart(self) -> list[Setting]:
        """The whole settings that are not worse than the best by more than chance: a t-test paired over seeds, at
        95 % after Holm's correction for as many comparisons as there are."""
        best = self.best
        if best is None:
            return []
        others = [one for one in self.settings[1:] if len(one.judged) == self.seeds and one.is_finite]
        gaps = [[best.judged[seed] - one.judged[seed] for seed in best.judged if seed in one.judged] for one in others]
        chances = holm([student(gap) for gap in gaps])
        return [one for one, chance in zip(others, chances, strict=True) if chance > LIMIT]

    def edges(self) -> list[str]:
        """Axes on which the best value is the smallest or the largest that was tried, each with where to go on. Nought
        is no edge, for below it there is nothing for most fields."""
        found = []
        for axis, value in self.own(self.best).items() if self.best else ():
            tried = [one.values[axis] for one in self.settings if axis in one.values]
            if all(isinstance(other, int | float) and not isinstance(other, bool) for other in tried):
                low, high = min(tried), max(tried)
                if low < high and value in (low, high) and value != 0:
                    found.append(f"{self.names[axis]} {'below' if value == low else 'above'} {text_of(value)}")
        return found

    def findings(self) -> list[str]:
        """What was found: first the best and whether it is more than chance, then what to know of it."""
        best, whole = self.best, [one for one in self.settings if len(one.judged) == self.seeds]
        if best is None:
            return ["no setting has a score that is a number"]
        chance = f"; {self._chances(len(whole) - 1)}" if len(whole) > 1 else ""
        words = [self._winner(best, len(self.settings) == 1) + chance]
        if edges := self.edges():
            words.append(f"it lies at the edge of the grid: try {' and '.join(edges)} too")
        if lost := len(self.settings) - len(whole):
            words.append(f"{lost} {'setting lacks' if lost == 1 else 'settings lack'} seeds and could not be best")
        return words

    def caveat(self) -> list[str]:
        """What must be known of every best: a clause, or nothing."""
        flatters = "there are no validation data, so the best is chosen on the test set and its score flatters"
        return [] if self.validated or len(self.settings) == 1 else [f"{flatters}: hold some out with --validation 0.2"]

    def _winner(self, best: Setting, alone: bool) -> str:
        given = f"with {self.shown(self.given)} " if self.given else ""
        test = self.number(best.test[self.moment])
        if alone:
            setting = self.shown({**self.given, **self.own(best)})
            return f"{f'with {setting} ' if setting else ''}the score is {test} ({self.moment})"
        judged = f"{self.number(list(best.judged.values()))} on validation data and {test} on test data"
        return f"{given}the best is {self.shown(self.own(best))}: {judged if self.validated else test} ({self.moment})"

    def _chances(self, others: int) -> str:
        if self.seeds < 2:
            return "this is one seed, so differences may be chance"
        alike = self.not_told_apart()
        finite = sum(one.is_finite for one in self.settings[1:] if len(one.judged) == self.seeds)
        ahead = others - len(alike)
        diverged = f" ({others - finite} diverged)" if finite < others else ""
        names = " or ".join(self.shown(self.own(one)) for one in alike[:_MOST_NAMES])
        names += f" or {len(alike) - _MOST_NAMES} more" if len(alike) > _MOST_NAMES else ""
        if not alike:
            return f"over {self.seeds} seeds it is ahead of {_all(others)} by more than chance{diverged}"
        if not ahead:
            return f"over {self.seeds} seeds it is not ahead of {names} by more than chance"
        of = f"{ahead} of {others} others by more than chance{diverged}"
        return f"over {self.seeds} seeds it is ahead of {of}, but not of {names}"


def contests(axes: Sequence[str], outcomes: Sequence[Outcome], moment: str) -> list[Contest]:
    """The outcomes of a sweep as settings over seeds, under each condition. Validation data judge where all runs have
    them."""
    names = short_names(axes)
    given = [axis for axis in axes if is_condition(axis)]
    chosen = tuple(axis for axis in axes if axis not in (*given, *REPEATS))
    validated = all(one.validation[moment] is not None for one in outcomes)
    groups = dict[str, list[Outcome]]()
    for one in outcomes:
        groups.setdefault(str([one.values.get(axis) for axis in given]), []).append(one)
    found = []
    for group in groups.values():
        first = group[0]
        condition = {axis: first.values[axis] for axis in given if axis in first.values}
        ranked = _ranked(_settings(group, moment, validated), first.higher_is_better)
        where = ", ".join(part for part in first.where if all(part in one.where for one in outcomes))
        found.append(
            Contest(condition, chosen, ranked, moment, validated, first.score, first.higher_is_better, where, names)
        )
    return found


def is_condition(axis: str) -> bool:
    """Whether an axis is of the world and not of what one does in it: no value of it is better than another.

    >>> is_condition("data.alpha"), is_condition("method.lr")
    (True, False)
    """
    return axis not in REPEATS and axis.partition(".")[0] in ("data", "unreliable")


def sweep_table(found: Sequence[Contest]) -> Table:
    """All settings, the best first."""
    first = found[0]
    axes = [axis for axis in first.names if axis not in REPEATS]
    seeds = max(contest.seeds for contest in found)
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed: differences may be chance"
    title = "; ".join(part for part in (first.where, first.scale.in_words, over) if part)
    columns = [*(first.names[axis] for axis in axes), *["validation"] * first.validated, "trained", "received", "seeds"]
    table, left_out = new_table(title, columns, left=len(axes)), 0
    for contest in found:
        left_out += len(contest.settings[_MOST_ROWS:])
        for one in contest.settings[:_MOST_ROWS]:
            scores = [list(one.judged.values())] * contest.validated + [one.test["trained"], one.test["received"]]
            shown = [text_of(one.values[axis]) if axis in one.values else "" for axis in axes]
            table.add_row(*shown, *(spread(contest.score, part) for part in scores), str(len(one.judged)))
        table.add_section()
    judge = f"validation data ({first.moment})" if first.validated else f"test data ({first.moment})"
    table.caption = f"Last round, all samples; ranked by {judge}. "
    table.caption += "trained: after local training, before averaging; received: after it."
    table.caption += f" {left_out} more settings are not shown." if left_out else ""
    return table


def sweep_verdict(found: Sequence[Contest]) -> str:
    """What was found, in words."""
    return " ".join(sentences(found))


def sentences(found: Sequence[Contest]) -> list[str]:
    """What was found, and after it what must be known of it."""
    words = found[0].findings() if len(found) == 1 else ["; ".join(contest.findings()) for contest in found]
    caveats = {clause: None for contest in found for clause in contest.caveat()}  # once
    return [f"{clause[0].upper()}{clause[1:]}." for clause in (*words, *caveats)]


def _settings(group: Sequence[Outcome], moment: str, validated: bool) -> list[Setting]:
    points = dict[str, list[Outcome]]()
    for one in group:
        points.setdefault(str({a: v for a, v in one.values.items() if a not in REPEATS}), []).append(one)
    found = []
    for own in points.values():
        values = {axis: value for axis, value in own[0].values.items() if axis not in REPEATS}
        judged = dict[str, float]()
        for one in own:
            score = (one.validation if validated else one.test)[moment]
            if score is not None:
                judged[str([one.values.get(axis) for axis in REPEATS])] = score
        test = {m: [score for one in own if (score := one.test[m]) is not None] for m in MOMENTS}
        found.append(Setting(values, judged, test))
    return found


def _ranked(settings: Sequence[Setting], higher_is_better: bool) -> list[Setting]:
    seeds, sign = max(len(one.judged) for one in settings), 1 if higher_is_better else -1

    def height(one: Setting) -> tuple[bool, float]:
        return len(one.judged) == seeds, sign * mean(one.judged.values()) if one.is_finite else -inf

    return sorted(settings, key=height, reverse=True)


def _all(others: int) -> str:
    return "the other" if others == 1 else f"all {others} others"
