"""State in sentences which method scores best, and what limits this conclusion."""

from statistics import fmean

from fedtailor.analysis.comparison import (
    DEPENDENT_SEEDS,
    MORE_SEEDS,
    NO_COMMON_SEED,
    OVERLAPPING_SPLITS,
    SAME_START,
    Ranking,
    headline,
    other_methods,
    pair_sentence,
)
from fedtailor.analysis.formatting import count_of, join_names, method_in_text
from fedtailor.analysis.run_length import early_stopping_note
from fedtailor.analysis.run_summary import Comparison
from fedtailor.analysis.statistics import MIN_SEEDS
from fedtailor.runs.run import MOMENTS


def verdict_sentences(group: Comparison) -> list[str]:
    """Return the verdict with its caveats; the first sentence is the headline."""
    ranking = group.ranking
    if ranking is None:
        none = "No method has a final score: all runs diverged or were not evaluated."
        return [none, *_caveats(group)]
    name = group.fmt.name if group.sign > 0 else f"{group.fmt.name} (lower is better)"
    scores = f"Scores are {name} over {_coverage(group)} after the last round{_averaging(group)}, {moments(group)}."
    shown = [f for place, f in enumerate(ranking.differences) if place == 0 or f.other == group.baseline]
    pairs = [pair_sentence(ranking, found) for found in shown]
    more = [*other_methods(ranking), *_reference_sentences(group, ranking), *_seed_notes(group), *_caveats(group)]
    return [headline(ranking), scores, *pairs, *more]


def _reference_sentences(group: Comparison, ranking: Ranking) -> list[str]:
    """Return how far each reference, which is not ranked, is from the best method."""
    found = []
    for label in group.references:
        pairs = [pair for pair, _ in group.paired_scores(ranking.best, label)]
        score = group.score(label)
        if score is not None and pairs:
            gap = fmean(group.sign * (theirs - ours) for ours, theirs in pairs)
            best = method_in_text(ranking.best)
            than = f"{group.fmt.gap(gap)} {ranking.comparative(gap > 0)} than {best}" if gap else f"the same as {best}"
            found.append(f"As a reference, {method_in_text(label)} scores {group.fmt.text(score)}, {than}.")
    return found


def moments(group: Comparison) -> str:
    """Return at which moment the methods are compared, such as "as trained", or "FedAvg as received, the others as
    trained"."""
    received = [method_in_text(label) for label in group.methods if group.ranked_by(label) == "received"]
    if len(received) in (0, len(group.methods)):
        return "as received" if received else "as trained"
    return f"{join_names(received)} as received, the others as trained"


def _coverage(group: Comparison) -> str:
    """Return which test samples the scores cover; clients without a score are not included."""
    counts = {summary.num_scored for label in group.scored for summary in group.methods[label]}
    if all(scored == tested for scored, tested in counts):
        return "all test samples"
    (scored, tested), each = min(counts), f" in each {group.unit}" if len(group.seeds) > 1 else ""
    number = f"{scored} of {tested} " if len(counts) == 1 else ""
    return f"the test samples of the {number}clients that have a score{each}"


def _averaging(group: Comparison) -> str:
    if len(group.seeds) < 2:
        return ""
    number = f"{len(group.seeds)} {group.unit}s"
    return f", mean of {number}" if group.shares_seeds else f", mean over the {group.unit}s of each method"


def _seed_notes(group: Comparison) -> list[str]:
    """Return in how many seeds the best method leads, and how far the seeds allow conclusions."""
    ranking = group.ranking
    if len(group.methods) == 1:
        return ["To rank methods, add runs of other methods on the same data, for example with fedtailor compare."]
    if ranking is None or not ranking.differences:
        return []
    first, notes = ranking.differences[0], []
    if not group.shares_seeds:
        notes.append(NO_COMMON_SEED)
    if first.test.seeds > 1:
        up, other = ranking.comparative(True), method_in_text(first.other)
        notes.append(
            f"{ranking.best} scores {up} than {other} in {first.seeds_won} of {first.test.seeds} {group.unit}s."
        )
    if first.test.seeds < MIN_SEEDS:
        notes.append(MORE_SEEDS)
    elif group.is_repeated:
        notes.append(OVERLAPPING_SPLITS)
    elif len({summary.split for summary in group.summaries}) > 1:
        notes.append(DEPENDENT_SEEDS)
    else:
        notes.append("All seeds use the same split, so intervals do not include the variation between splits.")
    return notes + ([SAME_START] if seeds_share_start(group) else [])


def seeds_share_start(group: Comparison) -> bool:
    """Return whether several seeds start from the same initial weights: those of a module, or given ones."""
    fixed = any(summary.run.info["initial_weights"] == "fixed" for summary in group.summaries)
    return fixed and len(group.seeds) > 1


def _caveats(group: Comparison) -> list[str]:
    """Return what else limits the conclusions."""
    notes = []
    if len({group.methods[label][0].run.method for label in group.ranked}) < len(group.ranked):
        notes.append("Several settings of one method are ranked by test data, so the best score is optimistic.")
    if reversed_ := _better_with_equal_weights(group):
        notes.append(
            "With equal weight for all clients, whatever their number of test samples, "
            f"{join_names(reversed_)} would score {'highest' if group.sign > 0 else 'lowest'}."
        )
    notes += _different_clients(group)
    if diverged := [label for label, runs in group.methods.items() if any(run.diverged for run in runs)]:
        notes.append(f"Clients diverged with {join_names(diverged)}: try a smaller lr.")
    if group.scored and (unranked := [label for label in group.methods if label not in group.scored]):
        notes.append(f"Ranked last, because a run diverged or was not evaluated: {join_names(unranked)}.")
    if failed := [label for label, runs in group.methods.items() if any(run.failed for run in runs)]:
        notes.append(f"Clients failed and were excluded with {join_names(failed)}: see these runs.")
    if note := early_stopping_note([summary.run for summary in group.summaries]):
        notes.append(note)
    notes += [f"Every client has identical scores with {join_names(same)}." for same in _identical_methods(group)]
    if group.excluded:
        missing = sorted({f"{run.label} with seed {run.seed}" for run in group.excluded})
        notes.append(f"Excluded because not all methods have the seed: {join_names(missing)}.")
    return notes


def _better_with_equal_weights(group: Comparison) -> list[str]:
    """Return the methods that are better than the best one when all clients have equal weight, and only then."""
    ranking = group.ranking
    if ranking is None:
        return []
    leads = {found.other: found.test.mean for found in ranking.differences}
    pairs = {other: [pair for _, pair in group.paired_scores(ranking.best, other)] for other in leads}
    sums = {other: group.sign * sum(ours - theirs for ours, theirs in own) for other, own in pairs.items()}
    return [other for other in leads if sums[other] < 0 <= leads[other]]


def _different_clients(group: Comparison) -> list[str]:
    """Return a sentence if methods have scores over different clients."""
    covered = {
        label: {(summary.pair_key, client) for summary in group.methods[label] for client in summary.ranked_scores}
        for label in group.scored
    }
    if not group.shares_seeds or all(clients == covered[group.scored[0]] for clients in covered.values()):
        return []
    total = sum(summary.num_scored[1] for summary in group.methods[group.scored[0]])
    fewer = [
        f"{method_in_text(label)}'s score covers {len(clients)} of {count_of(total, 'client')}"
        for label, clients in covered.items()
        if len(clients) < total
    ]
    if not fewer:
        return []
    return [f"Scores cover different clients: {join_names(fewer)}; differences use the clients that both methods have."]


def _identical_methods(group: Comparison) -> list[list[str]]:
    """Return groups of methods with equal scores, such as FedBN and FedAvg for a model without batch normalization."""
    found: dict[str, list[str]] = {}
    for label in group.scored:
        scores = [(s.pair_key, sorted(s.last[moment].items())) for s in group.methods[label] for moment in MOMENTS]
        found.setdefault(str(scores), []).append(label)
    return [labels for labels in found.values() if len(labels) > 1]
