"""What a method needs to reach a target score: rounds, bytes, and seconds."""

from dataclasses import dataclass
from statistics import mean

from fedtailor.analysis.run_summary import Comparison, RunSummary


@dataclass(frozen=True)
class TargetCost:
    """The means over the seeds that reach the target; None if no seed does, or for bytes of centralized training."""

    seeds: int
    seeds_reaching: int
    rounds: float | None
    bytes: float | None  # sent in both directions
    seconds: float | None  # of training


def first_reaching(summary: RunSummary, target: float) -> int | None:
    """Return the position of the first evaluated round whose score, over all test samples and at the moment that ranks
    the method, is at least as good as the target; None if there is none."""
    sign = 1 if summary.run.info["higher_is_better"] else -1
    curve = summary.curves[summary.ranked_by]
    reached = (p for p, score in zip(curve.positions, curve.scores, strict=True) if sign * (score - target) >= 0)
    return next(reached, None)


def target_cost(group: Comparison, label: str, target: float) -> TargetCost:
    """Return what a method needs to reach the target, averaged over the seeds that reach it."""
    summaries, has_bytes = group.methods[label], not group.is_centralized(label)
    found = [(one, position) for one in summaries if (position := first_reaching(one, target)) is not None]
    if not found:
        return TargetCost(len(summaries), 0, None, None, None)
    return TargetCost(
        len(summaries),
        len(found),
        mean(position + 1 for _, position in found),
        mean(one.bytes[position] for one, position in found) if has_bytes else None,
        mean(one.seconds[position] for one, position in found),
    )
