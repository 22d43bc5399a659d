"""Which method is best, by how much, and whether that is more than chance: the answer in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedtailor.chance import LIMIT, Paired, holm, paired, too_few
from fedtailor.scale import counted
from fedtailor.see.digest import Group
from fedtailor.see.drawing import capital, listed, p_text, said


@dataclass(frozen=True)
class Lead:
    """How far the best method is ahead of another one, on the clients that both have."""

    other: str
    over_clients: Paired | None  # weighted by test samples; None where a run diverged or nothing is paired
    alike: Paired | None  # every client counts alike
    p: float  # of over_clients, after Holm's correction for all others
    p_alike: float  # of alike, after the same
    seeds_ahead: int
    seeds: int  # that both have
    comparisons: int  # in all

    @property
    def is_more_than_chance(self) -> bool:
        return _side(self.over_clients, self.p) > 0

    @property
    def few(self) -> str:
        """Whether clients are so few that nothing could be told from chance, and how that is said."""
        if self.over_clients is None or self.p < LIMIT or not too_few(self.over_clients.clients, self.comparisons):
            return ""
        count = self.over_clients.clients
        return f"{counted(count, 'client')} {'is' if count == 1 else 'are'} too few to tell chance apart"

    @property
    def is_behind(self) -> bool:
        """Whether the best is worse by more than chance: then its score is over other clients."""
        return _side(self.over_clients, self.p) < 0


def _side(pair: Paired | None, p: float) -> int:
    """1: ahead by more than chance; −1: behind by more than chance; 0: neither."""
    return 0 if pair is None or p >= LIMIT else 1 if pair.mean > 0 else -1


def leads(group: Group) -> list[Lead]:
    """The best method against every other that has a score, in their order."""
    best, *others = group.scored or [""]
    gaps = {other: list(group.gaps(best, other).values()) for other in others}
    weighted = {other: paired([gap for gap, _ in some], [weight for _, weight in some]) for other, some in gaps.items()}
    alike = {other: paired([gap for gap, _ in some]) for other, some in gaps.items()}
    p, p_alike = _adjusted(weighted), _adjusted(alike)
    tested = sum(pair is not None for pair in weighted.values())
    return [
        Lead(other, weighted[other], alike[other], p[other], p_alike[other], *_seeds_ahead(group, best, other), tested)
        for other in others
    ]


def _adjusted(found: Mapping[str, Paired | None]) -> dict[str, float]:
    """p of every comparison that could be made, corrected for how many these are; 1 of the others."""
    tested = {other: pair.p for other, pair in found.items() if pair is not None}
    return dict.fromkeys(found, 1.0) | dict(zip(tested, holm(list(tested.values())), strict=True))


def _seeds_ahead(group: Group, best: str, other: str) -> tuple[int, int]:
    by_seed = [sum(gap * weight for gap, weight in some.values()) for some in group.gaps_by_seed(best, other) if some]
    return sum(gap > 0 for gap in by_seed), len(by_seed)


def which_is_best(group: Group, found: Sequence[Lead]) -> list[str]:
    """The answer in words; it never says more than the numbers do."""
    if not group.scored:
        nobody = "No method ended with a score: all runs diverged or were not evaluated as trained."
        return [nobody, *_caveats(group, found)]
    best, shown = group.scored[0], group.scale.text(group.score(group.scored[0]))
    what = f"{group.scale.name} over {_whose(group)}, as trained in the last round{_mean_of(group)}"
    if not found:
        none = "there is no other here" if len(group.methods) == 1 else "no other has a score as trained"
        answer = [
            f"{capital(said(best))} gets {shown}; which method is best cannot be answered, for {none}.",
            f"The number is {what}.",
        ]
        more = "Give this report runs of other methods on the same data too, as fedtailor compare leaves them."
        return [*answer, *_caveats(group, found), *[more] * (len(group.methods) == 1)]
    first, *rest = found
    answer = [_headline(group, best, first), f"These numbers are {what}."]
    answer += [_lead(group, lead) for lead in (first, *(lead for lead in rest if lead.other == group.alone))]
    return answer + _others(found) + _caveats(group, found)


def _whose(group: Group) -> str:
    """Over which samples scores are: who was not evaluated, or has no defined score, is not in them."""
    counts = {found.judged for label in group.scored for found in group.methods[label]}
    if all(known == tested for known, tested in counts):
        return "all test samples"
    (known, tested), each = min(counts), " in each seed" if len(group.seeds) > 1 else ""
    return (
        f"the test samples of the {f'{known} of {tested} ' if len(counts) == 1 else ''}clients that have a score{each}"
    )


def _mean_of(group: Group) -> str:
    if len(group.seeds) < 2:
        return ""
    return (
        f", the mean of {len(group.seeds)} seeds" if group.shares_seeds else ", each method's mean over its own seeds"
    )


def _headline(group: Group, best: str, next_best: Lead) -> str:
    """Who is best, and how sure that is, in one sentence."""
    shown, other = group.scale.text(group.score(best)), said(next_best.other)
    pair, alone = next_best.over_clients, best == group.alone
    if pair is None:
        return f"{capital(said(best))} ends best here with {shown}; whether by chance cannot be said."
    gap = group.scale.gap(pair.mean)
    if pair.mean < 0:  # its score is over other clients
        both = f"on the {counted(pair.clients, 'client')} that both have, {other} is {gap} ahead"
        return f"{capital(said(best))} comes first here with {shown}, but {both}."
    begins = f"Training alone is best here with {shown}: no federated method beats it" if alone else ""
    if not pair.better and not pair.worse:
        return f"{begins or f'{best} is best here with {shown}'}, but {other} ends the same for every client."
    if next_best.is_more_than_chance:
        ahead = f"{gap} ahead of {other}, which is more than chance"
        return f"{begins}; it is {ahead}." if alone else f"{best} is best here with {shown}, {ahead}."
    if next_best.few:
        ahead = f"{gap} ahead of {other}, but {next_best.few}"
        return f"{begins}; it is {ahead}." if alone else f"{best} ends best here with {shown}, {ahead}."
    if alone:
        return f"{begins}, though its lead of {gap} over {other} is within chance."
    return f"{best} ends best here with {shown}, but its lead of {gap} over {other} is within chance."


def _lead(group: Group, lead: Lead) -> str:
    """The lead over one method, with its numbers."""
    score, pair = group.scale.text(group.score(lead.other)), lead.over_clients
    begins = f"{capital(said(lead.other))} gets {score}"
    if pair is None:
        return f"{begins}; no client has both scores, or one diverged, so the two cannot be compared client by client."
    if not pair.better and not pair.worse:
        return f"{begins}, the same for every client."
    begins += f", {group.scale.gap(pair.mean)} {'less good' if pair.mean >= 0 else 'better where both are known'}"
    if lead.few:  # then an interval would say more than is known
        return f"{begins}: {lead.few}."
    verdict = "more than chance" if lead.p < LIMIT else "within chance"
    return (
        f"{begins}{_interval(group, pair)}: {verdict} ({p_text(lead.p)} after correction for several comparisons, "
        f"paired over {pair.clients} clients).{_counted_alike(group, lead)}"
    )


def _counted_alike(group: Group, lead: Lead) -> str:
    """A further sentence where the answer is another one if clients with few test samples count as much as others."""
    if lead.alike is None or _side(lead.alike, lead.p_alike) == _side(lead.over_clients, lead.p):
        return ""
    where = "ahead" if lead.alike.mean >= 0 else "behind"
    return (
        " With every client counted alike, however few its test samples, the best is "
        f"{group.scale.gap(lead.alike.mean)} {where}: "
        f"{'more than' if lead.p_alike < LIMIT else 'within'} chance ({p_text(lead.p_alike)})."
    )


def _interval(group: Group, found: Paired) -> str:
    if found.low is None or found.high is None:
        return ""
    return f" (95 % interval of this pair alone: {group.scale.signed(found.low)} to {group.scale.signed(found.high)})"


def _others(found: Sequence[Lead]) -> list[str]:
    """All other methods in one sentence, where there are several."""
    if len(found) < 2:
        return []
    behind = [lead.other for lead in found if lead.is_more_than_chance]
    ahead = [lead.other for lead in found if lead.is_behind]
    level = [lead.other for lead in found if not lead.is_more_than_chance and not lead.is_behind]
    if len(level) == len(found):
        return [f"None of the {len(found)} others can be told apart from it by these clients."]
    if len(behind) == len(found):
        return [f"All {len(found)} others are behind it by more than chance."]
    parts = [f"by more than chance it is ahead of {listed(behind, 8)}"] if behind else []
    parts += [f"on clients that both have, {listed(ahead, 8)} did better by more than chance"] if ahead else []
    parts += [f"not to be told apart from it by these clients: {listed(level, 8)}"] if level else []
    return [f"{parts[0][0].upper()}{'; '.join(parts)[1:]}."]


def _caveats(group: Group, found: Sequence[Lead]) -> list[str]:
    """What the numbers do not say."""
    notes = []
    if len(group.seeds) < 2:
        notes.append("One seed: differences between seeds are not in it.")
    elif not group.shares_seeds:
        notes.append(
            "No seed is common to all methods: their scores are of other splits or other beginnings, and two methods "
            "are compared client by client only where they share a seed."
        )
    elif found and found[0].seeds:
        first = found[0]
        sure = (
            "" if first.few else "; clients of one seed share a training run, so that p is a little too sure of itself"
        )
        notes.append(f"It is ahead of {said(first.other)} in {first.seeds_ahead} of {first.seeds} seeds{sure}.")
    if len({digest.run.method for digest in group.digests}) < len(group.methods):
        notes.append("Several settings of one method are ranked here by test data: the best of many flatters itself.")
    turned = [lead.other for lead in found if lead.alike and lead.over_clients and _turns(lead)]
    if turned:
        notes.append(f"Were every client counted alike, however few its test samples, {listed(turned)} would lead.")
    notes += _other_clients(group)
    lost = [label for label, some in group.methods.items() if any(run.diverged for run in some)]
    if lost:
        notes.append(f"Clients diverged with {listed(lost)}: try a smaller lr.")
    if group.left_out:
        missing = sorted({f"{run.label} with seed {run.seed}" for run in group.left_out})
        notes.append(f"Not counted, for not all methods have that seed: {listed(missing)}.")
    return notes


def _other_clients(group: Group) -> list[str]:
    """Whose score leaves out clients that others count."""
    whom = {
        label: {(found.cell, client) for found in group.methods[label] for client in found.last["trained"]}
        for label in group.scored
    }
    if not group.shares_seeds or all(own == whom[group.scored[0]] for own in whom.values()):
        return []
    everyone = sum(found.judged[1] for found in group.methods[group.scored[0]])
    fewer = [f"{said(label)}'s score is over {len(own)} of {everyone}" for label, own in whom.items()
             if len(own) < everyone]  # fmt: skip
    if not fewer:
        return []
    return [f"Scores are not over the same clients: {listed(fewer)}; leads are of the clients that both methods have."]


def _turns(lead: Lead) -> bool:
    assert lead.alike is not None and lead.over_clients is not None
    return lead.alike.mean < 0 <= lead.over_clients.mean
