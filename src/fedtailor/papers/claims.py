"""Whether what a paper claims holds in its printed numbers, and in our results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import mean

from fedtailor.errors import ConfigError
from fedtailor.papers.cells import make_cells, parse_overrides
from fedtailor.papers.definition import Claim, Paper, PaperTable
from fedtailor.papers.running import CellResult, Results, compare

CLAIM_HEADINGS = ("claim", "in the paper's numbers", "in ours", "in ours, with the baselines that the paper leaves out")
_STATES = {True: "holds", False: "does not hold", None: "open"}
_Scores = Callable[[CellResult], Mapping[int, float]]  # by seed


@dataclass(frozen=True)
class Contest:
    """One comparison of a claim: a cell that should be ahead of others, with scores by seed; {} if not known."""

    name: str
    favorite: Mapping[int, float]
    others: Mapping[str, Mapping[int, float]]
    margin: float = 0
    lower_is_better: bool = False

    @property
    def leader(self) -> str:
        """The other that the favorite is not ahead of, or the first of several; empty if there is none."""
        leads = {name: mean(found) for name, found in self._leads.items() if found}
        last = min(leads, key=lambda name: leads[name], default="")
        return "" if not last or leads[last] > self.margin else last

    @property
    def lead(self) -> float | None:
        """The favorite's lead over the closest of the others that are known; None if none is."""
        return min((mean(found) for found in self._leads.values() if found), default=None)

    @property
    def is_won(self) -> bool | None:
        """Whether the favorite's mean is ahead of all others; None if that is not known yet."""
        if self.leader:
            return False
        return True if all(self._leads.values()) else None

    @property
    def is_won_in_every_seed(self) -> bool:
        """Whether the favorite is ahead of all others in each of at least two seeds."""
        return bool(self.is_won) and all(len(one) > 1 and min(one) > self.margin for one in self._leads.values())

    @property
    def num_seeds(self) -> int:
        """The number of seeds behind the comparison: the smallest that the favorite and one of the others share."""
        return min((len(found) for found in self._leads.values() if found), default=0)

    def means_of_common_seeds(self, other: str) -> tuple[float, float]:
        """Return the mean of another and that of the favorite, over the seeds that both have."""
        common = self.favorite.keys() & self.others[other].keys()
        return mean(self.others[other][seed] for seed in common), mean(self.favorite[seed] for seed in common)

    @property
    def _leads(self) -> dict[str, list[float]]:
        """The favorite's lead over each other in the seeds that both have."""
        sign = -1 if self.lower_is_better else 1
        return {
            name: [sign * (self.favorite[seed] - scores[seed]) for seed in self.favorite if seed in scores]
            for name, scores in self.others.items()
        }


@dataclass(frozen=True)
class Verdict:
    """How many comparisons of a claim are as claimed."""

    contests: tuple[Contest, ...]
    needed: int
    is_ours: bool  # printed numbers have no seeds

    @property
    def won(self) -> int:
        return sum(one.is_won is True for one in self.contests)

    @property
    def lost(self) -> list[Contest]:
        return [one for one in self.contests if one.is_won is False]

    @property
    def holds(self) -> bool | None:
        """Whether the claim holds; None if that depends on cells that have not been run."""
        if self.contests and self.won >= self.needed:
            return True
        return False if self.contests and len(self.contests) - len(self.lost) < self.needed else None

    def describe(self) -> str:
        """Return the verdict in words, such as 'does not hold: 3 of 5 comparisons; lead -0.2 to +1.3; 1 to 3 seeds'."""
        if not self.contests:
            return "cannot be run"
        known = self.won + len(self.lost)
        count = f"{self.won} of {known} comparisons" if self.holds is not None or known else "nothing run yet"
        rest = f", {len(self.contests) - known} not run yet" if known and known < len(self.contests) else ""
        seeds = sum(one.is_won_in_every_seed for one in self.contests)
        leads = [one.lead for one in self.contests if one.is_won is not None and one.lead is not None]
        ends = " to ".join(dict.fromkeys(f"{lead:+.3g}" for lead in (min(leads), max(leads)))) if leads else ""
        return (
            f"{_STATES[self.holds]}: {count}{f', {seeds} in every seed' if seeds else ''}{rest}"
            f"{f'; lead {ends}' if ends else ''}{self._describe_seeds() if self.is_ours else ''}"
        )

    def _describe_seeds(self) -> str:
        counts = sorted({one.num_seeds for one in self.contests if one.is_won is not None})
        if not counts:
            return ""
        return f"; {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seed{'s' * (counts[-1] > 1)}"


@dataclass(frozen=True)
class JudgedClaim:
    """A claim beside its verdicts; None where a verdict does not exist."""

    claim: Claim
    printed: Verdict | None = None
    ours: Verdict | None = None
    with_baselines: Verdict | None = None

    def row(self) -> tuple[str, ...]:
        """Return the texts for `CLAIM_HEADINGS`."""
        where = f" ({self.claim.where})" if self.claim.where else ""
        if not self.claim.has_rule:
            printed = f"not checked: {self.claim.missing}" if self.claim.missing else "no printed numbers"
            return f"{self.claim.text}{where}", printed, self.claim.found, ""
        verdicts = (self.printed, self.ours, self.with_baselines)
        return f"{self.claim.text}{where}", *("" if one is None else one.describe() for one in verdicts)


def judge(
    paper: Paper, done: Results, tables: Sequence[PaperTable] | None = None, override: Sequence[str] = ()
) -> list[JudgedClaim]:
    """Return the claims of a paper with their verdicts, or only those about some tables.

    >>> from fedtailor.papers.definition import load_paper
    >>> judge(load_paper("fedapa"), {})[0].printed.describe()
    'holds: 10 of 12 comparisons; lead -0.51 to +1.3'
    """
    overrides, judged = parse_overrides(override), []
    for claim in paper.claims:
        about = [table for name in claim.tables for table in paper.select(name)]
        if tables is not None and not any(table in tables for table in about):
            continue
        if claim.has_rule:
            cells = [cell for table in about for cell in make_cells(paper, table, overrides=overrides)]
            judged.append(_judge(paper, claim, compare(cells, done)))
        else:
            judged.append(JudgedClaim(claim))
    return judged


def claim_lines(judged: Sequence[JudgedClaim]) -> list[str]:
    """Return one line per claim and verdict."""
    return [
        line for one in judged for line in [f"Claim: {one.row()[0]}.", *(
            f"  {heading}: {text}" for heading, text in zip(CLAIM_HEADINGS[1:], one.row()[1:], strict=True) if text
        )]
    ]  # fmt: skip


def failure_texts(one: JudgedClaim) -> list[str]:
    """Return who is ahead where, for each comparison in which the claim does not hold."""
    verdicts = {"paper": one.printed, "ours": one.ours, "ours, with all baselines": one.with_baselines}
    return [
        "{}, {}: {} {:.4g} against {:.4g}".format(
            source, lost.name, lost.leader, *lost.means_of_common_seeds(lost.leader)
        )
        for source, verdict in verdicts.items()
        for lost in (verdict.lost if verdict else ())
    ]


def _judge(paper: Paper, claim: Claim, cells: Sequence[CellResult]) -> JudgedClaim:
    own = [one for one in cells if not one.cell.row.ours]
    able = [one for one in cells if not one.cell.missing]
    total = len([*_contests(claim, own, _our_scores)])
    _check(paper, claim, own, total)
    printed = [one for one in own if one.cell.printed is not None]
    return JudgedClaim(
        claim,
        _verdict(claim, printed, _printed_score, total) if printed else None,
        _verdict(claim, [one for one in own if not one.cell.missing], _our_scores, total),
        _verdict(claim, able, _our_scores, total) if claim.row is not None and not claim.over else None,
    )


def _check(paper: Paper, claim: Claim, cells: Sequence[CellResult], total: int) -> None:
    known = {name for one in cells for name in (one.cell.row.label, one.cell.column.key)}
    unknown = {*claim.over, *claim.columns} - known
    if not total or unknown:
        what = ", ".join(sorted(unknown)) or claim.row or claim.column
        raise ConfigError(f"The claim '{claim.text}' of {paper.name} names '{what}', which is not in its tables.")


def _verdict(claim: Claim, cells: Sequence[CellResult], scores: _Scores, total: int) -> Verdict:
    """Return a verdict; of the comparisons that are possible, the same fraction must be as claimed as of all."""
    contests = tuple(_contests(claim, cells, scores))
    needed = total if claim.at_least is None else claim.at_least
    return Verdict(contests, ceil(needed * len(contests) / max(1, total)), scores is _our_scores)


def _contests(claim: Claim, cells: Sequence[CellResult], scores: _Scores) -> Iterator[Contest]:
    """Yield a comparison per column of each table, or per row for a claim about a column."""
    groups: dict[str, dict[str, Mapping[int, float]]] = {}
    for one in cells:
        row, column = one.cell.row.label, one.cell.column.key
        line, name = (column, row) if claim.row is not None else (row, column)
        if not claim.columns or column in claim.columns:
            groups.setdefault(f"{one.cell.table.id}, {line}", {})[name] = scores(one)
    favorite = claim.row or claim.column
    for line, group in groups.items():
        others = {name: found for name, found in group.items() if name != favorite and name in (claim.over or group)}
        if favorite in group and others:
            yield Contest(line, group[favorite], others, claim.margin, claim.lower_is_better)


def _printed_score(one: CellResult) -> Mapping[int, float]:
    return {} if one.cell.printed is None else {0: one.cell.printed}


def _our_scores(one: CellResult) -> Mapping[int, float]:
    return dict(zip(one.seeds, one.scores, strict=True))
