"""What figures need of a run, small enough that many runs of a thousand clients fit in memory; and runs in groups that
can be compared."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isfinite, nan
from statistics import fmean, mean

from fedtailor.chance import half_width
from fedtailor.errors import Refused
from fedtailor.evaluation import weighted_mean
from fedtailor.lines import Record, Values
from fedtailor.reading import HOW, experiment_of, split_of
from fedtailor.run import MOMENTS, Run
from fedtailor.scale import Scale, distinct, tidy
from fedtailor.toml import flat

Client = tuple[str, int]  # the split it belongs to and its number: two seeds may split the data into other clients
Gaps = dict[Client, tuple[float, float]]  # by how much a client is better off; what it counts


@dataclass(frozen=True)
class Curve:
    """The score over all test samples after the rounds that were evaluated."""

    positions: Sequence[int]  # of the rounds, from 0 on
    scores: Sequence[float]


@dataclass(frozen=True, eq=False)
class Digest:
    """One run."""

    run: Run
    label: str  # its method's name; with the fields that tell it apart where a method ran with several settings
    split: str  # by which its clients are known again in other runs
    tests: Sequence[int]  # everyone's test samples
    last: Mapping[str, Values]  # moment -> client -> score after the last round
    curves: Mapping[str, Curve]  # by moment
    bytes: Sequence[int]  # up and down, all that has crossed after every round
    up: int  # of these, bytes from clients, in all
    asked: int  # clients that were sent something, over all rounds, whether they answered or not
    seconds: Sequence[float]
    failed: Sequence[tuple[int, int, str]]  # client, round, why
    missed: Sequence[tuple[int, int, str]]
    diverged: bool
    epsilon: float | None

    @property
    def seed(self) -> int:
        return int(self.run.experiment["seed"])

    @property
    def cell(self) -> tuple[int, str]:
        """By which runs of other methods are its partners."""
        return self.seed, self.split

    @property
    def judged(self) -> tuple[int, int]:
        """How many clients have a score as trained, of how many that have test samples."""
        return sum(self.tests[c] > 0 for c in self.last["trained"]), sum(count > 0 for count in self.tests)

    def score(self, moment: str) -> float | None:
        """Over all test samples of the clients that have a score after the last round."""
        return weighted_mean(self.last[moment], self.tests)

    def name(self, client: int) -> str:
        return tidy(str(self.run.info["clients"][client]["name"]))


def digest(run: Run, label: str) -> Digest:
    """A run without its record, read line by line so that it is never in memory as a whole twice."""
    whole = replace(run, records=[run.records[position] for position in range(len(run.records))])
    tests = [client["test"] for client in run.info["clients"]]
    crossed, spent, total, time = [], [], 0, 0.0
    for record in whole.records:
        total, time = total + int(record["bytes_up"] + record["bytes_down"]), time + record["seconds"]
        crossed.append(total)
        spent.append(time)
    return Digest(
        run=run,
        label=label,
        split=split_of(run),
        tests=tests,
        last={moment: whole.scores(moment) for moment in MOMENTS},
        curves={moment: _curve(whole, moment, tests) for moment in MOMENTS},
        bytes=crossed,
        up=int(sum(record["bytes_up"] for record in whole.records)),
        asked=sum(len(r.get(kind, ())) for r in whole.records for kind in ("clients", "failed", "missed")),
        seconds=spent,
        failed=tuple(_events(whole.records, "failed")),
        missed=tuple(_events(whole.records, "missed")),
        diverged=bool(whole.records and whole.records[-1].get("diverged")),
        epsilon=whole.records[-1].get("epsilon") if whole.records else None,
    )


def _curve(run: Run, moment: str, tests: Sequence[int]) -> Curve:
    positions, scores = [], []
    known = run.trajectory(moment, run.info["score"])
    for position, (record, values) in enumerate(zip(run.records, known, strict=True)):
        value = weighted_mean(values, tests) if run.is_evaluated(record, moment) else None
        if value is not None:
            positions.append(position)
            scores.append(value)
    return Curve(positions, scores)


def _events(records: Sequence[Record], kind: str) -> Iterator[tuple[int, int, str]]:
    for record in records:
        for client, why in record.get(kind, {}).items():
            yield int(client), int(record["round"]), str(why)


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ in method and seed alone."""

    methods: Mapping[str, Sequence[Digest]]  # the best first; only seeds that all have, if there are such
    left_out: Sequence[Digest]  # of seeds that not all have
    apart: str = ""  # by what the group differs from others in the report
    _gaps: dict[tuple[str, str, str], Gaps] = field(default_factory=dict, init=False)  # what was asked

    @property
    def first(self) -> Run:
        return next(iter(self.methods.values()))[0].run

    @property
    def scale(self) -> Scale:
        return Scale(self.first.info["score"])

    @property
    def sign(self) -> int:
        return 1 if self.first.info["higher_is_better"] else -1

    @property
    def alone(self) -> str | None:
        """The label of training alone, if it is there."""
        return next((label for label, some in self.methods.items() if some[0].run.method == "local"), None)

    @property
    def digests(self) -> list[Digest]:
        return [found for some in self.methods.values() for found in some]

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({found.seed for found in self.digests})

    @cached_property
    def shares_seeds(self) -> bool:
        """Whether all methods have the same seeds; they have not where no seed is common to all."""
        return len({frozenset(found.cell for found in some) for some in self.methods.values()}) == 1

    @cached_property
    def scored(self) -> list[str]:
        """The methods that have a score as trained, the best first."""
        return [label for label in self.methods if self.score(label) is not None]

    def scores(self, label: str, moment: str = "trained") -> list[float]:
        """One for every seed."""
        found = (digest.score(moment) for digest in self.methods[label])
        return [score for score in found if score is not None]

    def score(self, label: str, moment: str = "trained") -> float | None:
        """The mean over seeds; None where a run diverged or was not evaluated."""
        found = self.scores(label, moment)
        return mean(found) if found and all(map(isfinite, found)) else None

    def interval(self, label: str, moment: str = "trained") -> tuple[float, float] | None:
        """The 95 % interval of that mean over seeds, by Student's t; None for one seed. A share ends at 0 and at 1."""
        found, middle = self.scores(label, moment), self.score(label, moment)
        if middle is None or (reach := half_width(found)) is None:
            return None
        low, high = (0.0, 1.0) if self.scale.unit else (-inf, inf)
        return max(low, middle - reach), min(high, middle + reach)

    def gaps(self, label: str, other: str, moment: str = "trained") -> Gaps:
        """Client -> by how much it is better off with one method than with another, averaged over the seeds in which
        both have it; and what it counts: its share of the test samples, so that the weighted mean of all is the
        difference of the two scores. Positive is better, also for scores of which less is better; −∞ is who diverged
        with the one alone, NaN who did with the other."""
        if (label, other, moment) not in self._gaps:
            found: dict[Client, list[tuple[float, float]]] = {}
            for some in self.gaps_by_seed(label, other, moment):
                for client, pair in some.items():
                    found.setdefault(client, []).append(pair)
            means = {client: (fmean(g for g, _ in some), sum(w for _, w in some)) for client, some in found.items()}
            self._gaps[label, other, moment] = means
        return self._gaps[label, other, moment]

    def gaps_by_seed(self, label: str, other: str, moment: str = "trained") -> list[Gaps]:
        """The same for every seed that both methods have."""
        partners, found = {digest.cell: digest for digest in self.methods[other]}, []
        for ours in self.methods[label]:
            if (theirs := partners.get(ours.cell)) is None:
                continue
            mine, their = ours.last[moment], theirs.last[moment]
            both = [client for client in mine if client in their]
            total = sum(ours.tests[client] for client in both) or 1
            found.append({(ours.split, c): (self._gap(mine[c], their[c]), ours.tests[c] / total) for c in both})
        return found

    def _gap(self, ours: float, theirs: float) -> float:
        if not isfinite(theirs):
            return nan
        return self.sign * (ours - theirs) if isfinite(ours) else -inf


def groups(runs: Sequence[Run]) -> list[Group]:
    """Runs in groups that can be compared, in the order in which they came; every group's best method first."""
    apart: dict[str, list[Run]] = {}
    for run in runs:
        apart.setdefault(experiment_of(run), []).append(run)
    words = _differences([some[0] for some in apart.values()])
    return [_group(some, word) for some, word in zip(apart.values(), words, strict=True)]


def _differences(firsts: Sequence[Run]) -> list[str]:
    """What tells groups apart, in words, such as data.alpha = 0.1."""
    named = [flat({k: v for k, v in run.experiment.items() if k not in ("method", "seed", *HOW)}) for run in firsts]
    named = [{**found, "clients": run.num_clients} for found, run in zip(named, firsts, strict=True)]
    names = [n for n in dict.fromkeys(name for found in named for name in found) if n != "data.seed"]
    differ = [name for name in names if len({str(found.get(name)) for found in named}) > 1]
    differ = [name for name in differ if name != "clients" or "data.clients" not in differ]
    return [", ".join(f"{name} = {found.get(name, 'none')}" for name in differ) for found in named]


def _group(runs: Sequence[Run], apart: str) -> Group:
    labels = _labels(runs)
    seen: dict[tuple[str, int, str], Run] = {}
    for run, label in zip(runs, labels, strict=True):
        twin = seen.setdefault((label, run.experiment["seed"], split_of(run)), run)
        if twin is not run:
            where = f": '{twin.folder}' and '{run.folder}'" if run.folder and twin.folder else ""
            raise Refused(f"{label} ran twice with seed {run.experiment['seed']}{where}; leave one of them out.")
    methods: dict[str, list[Digest]] = {}
    for run, label in zip(runs, labels, strict=True):
        methods.setdefault(label, []).append(digest(run, label))
    cells = [{found.cell for found in some} for some in methods.values()]
    common = set.intersection(*cells) or set.union(*cells)
    kept = {label: [f for f in some if f.cell in common] for label, some in methods.items()}
    left_out = [f for some in methods.values() for f in some if f.cell not in common]
    kept = {label: sorted(some, key=lambda found: found.seed) for label, some in kept.items()}
    return ranked(Group(kept, left_out, apart))


def ranked(group: Group) -> Group:
    """The same with the best first; who diverged or was not evaluated, last."""

    def height(label: str) -> float:
        score = group.score(label)
        score = group.score(label, "received") if score is None and not group.scores(label) else score
        return -inf if score is None else group.sign * score

    best_first = sorted(group.methods, key=height, reverse=True)
    return replace(group, methods={label: group.methods[label] for label in best_first})


def _labels(runs: Sequence[Run]) -> list[str]:
    """Methods' names; with the fields that differ where one ran with several settings. Long ones are cut, and those
    that are the same then are numbered, for other settings are another label."""
    asked = [json.dumps(run.experiment["method"], sort_keys=True, default=str) for run in runs]
    settings = dict(zip(asked, runs, strict=True))
    fields = {key: {n: str(v) for n, v in flat(run.experiment["method"]).items()} for key, run in settings.items()}
    by_method: dict[str, list[dict[str, str]]] = {}
    for key, run in settings.items():
        by_method.setdefault(run.method, []).append(fields[key])
    differ = {
        method: [n for n in dict.fromkeys(n for own in some for n in own) if len({own.get(n) for own in some}) > 1]
        for method, some in by_method.items()
    }
    long = {
        key: [run.method, *(f"{n}={value}" for n, value in fields[key].items() if n in differ[run.method])]
        for key, run in settings.items()
    }
    labels = dict(zip(long, distinct([tidy(" ".join(words)) for words in long.values()]), strict=True))
    return [labels[key] for key in asked]
