"""State in sentences which clients gain over local training, and which lose."""

from collections.abc import Iterable, Mapping
from math import isfinite
from statistics import median

from fedtailor.analysis.client_gains import (
    ClientGain,
    count_direction,
    gain_text,
    gains_over_local,
    has_known_uncertainty,
)
from fedtailor.analysis.client_intervals import client_names, mean_gain, num_splits
from fedtailor.analysis.formatting import capitalize, count_of, join_names
from fedtailor.analysis.run_summary import Client, Comparison
from fedtailor.analysis.statistics import MIN_SEEDS

Gains = Mapping[Client, ClientGain]
_MAX_OTHERS = 6  # methods with a sentence of their own
_MAX_CLIENTS = 10  # with their gains in a sentence


def gain_sentences(group: Comparison) -> list[str]:
    """Return how many clients gain over local training, and how many lose, with the best federated method, or which
    clients if their samples were split repeatedly; nothing if no client has scores with both."""
    others = gains_over_local(group)
    if not others:
        return []
    best, found = next(iter(others.items()))
    start = f"With {best}, the {'best' if len(others) > 1 else 'only'} federated method here, "
    return _repeated(group, start, others) if group.is_repeated else _counted(group, start, found)


def _counted(group: Comparison, start: str, found: Gains) -> list[str]:
    better, worse, rest = (count_direction(found, direction) for direction in (1, -1, 0))
    diverged = sum(not isfinite(one.gain) for one in found.values())
    splits, middle = len({split for split, _ in found}), median(one.gain for one in found.values())
    known = has_known_uncertainty(group)
    within = f"within the uncertainty of {'its' if rest == 1 else 'their'} test samples" if known else "the same"
    return [
        f"{start}{better} of {count_of(len(found), 'client')}"
        f"{f' (from {splits} splits)' if splits > 1 else ''} {'gains' if better == 1 else 'gain'} over local training, "
        f"{worse} {'loses' if worse == 1 else 'lose'}{f' ({diverged} diverged)' if diverged else ''}, and {rest} "
        f"{'is' if rest == 1 else 'are'} {within}; "
        + (f"the median gain is {gain_text(group, middle)}." if isfinite(middle) else "the median client diverged."),
        "A gain or loss exceeds the 95 % uncertainty of the client's own test samples; by chance, up to one client in "
        "twenty does."
        if known
        else f"The uncertainty of one client's {group.fmt.name} is unknown, so all differences are counted.",
    ]


def _repeated(group: Comparison, start: str, others: Mapping[str, Gains]) -> list[str]:
    """Return which clients gain and lose over redrawn splits of their samples, and by how much."""
    (best, found), *rest = others.items()
    names = client_names(group)
    amounts = [f"{names[key]} {_with_interval(group, one)}" for key, one in found.items()]
    chosen = [f"{best} was chosen as the best on these test samples, so its gains are optimistic."] if rest else []
    return [
        f"{start}{_who(found, names)}.",
        f"Gains over local training: {join_names(amounts, _MAX_CLIENTS)}.",
        *_mean_sentence(group, best),
        *(f"With {other}, {_who(gains, names)}." for other, gains in rest[:_MAX_OTHERS]),
        *_undefined(group, found, names),
        *chosen,
        "Each interval holds for one client alone; without any difference, one in twenty excludes 0 by chance.",
    ]


def _who(gains: Gains, names: Mapping[Client, str]) -> str:
    """Return which clients a method helps and harms, as the rest of a sentence."""
    better, worse, rest = ([names[key] for key, one in gains.items() if one.direction == sign] for sign in (1, -1, 0))
    if not better and not worse:
        return f"federation makes no clear difference for any of the {count_of(len(gains), 'client')}"
    parts = [f"{verb} {join_names(some)}" for verb, some in (("helps", better), ("harms", worse)) if some]
    unclear = f", without a clear difference for {join_names(rest)}" if rest else ""
    return f"federation {' and '.join(parts)}{unclear}"


def _with_interval(group: Comparison, one: ClientGain) -> str:
    if one.test is None:
        return "diverged"
    gain, splits = gain_text(group, one.gain), count_of(one.test.seeds, "split")
    if one.test.interval is None:
        return f"{gain} in {'all' if one.test.seeds >= MIN_SEEDS else 'only'} {splits}"
    return f"{gain} (95 % interval {' to '.join(map(group.fmt.signed, one.test.interval))})"


def _mean_sentence(group: Comparison, label: str) -> list[str]:
    found = mean_gain(group, label)
    if found is None:
        return []
    whose = f"the {count_of(found.clients, 'client')} with a score in every split"
    return [f"The mean gain of {whose}, with equal weight, is {_with_interval(group, found.gain)}."]


def _undefined(group: Comparison, gains: Gains, names: Mapping[Client, str]) -> list[str]:
    """Return in how many splits a client has a score, where these are not all."""
    total = num_splits(group)
    known = {key: one.test.seeds for key, one in gains.items() if one.test is not None}
    found = [f"{count} of {total} splits for {_names_with(count, known, names)}" for count in _fewer(known, total)]
    missing = [name for key, name in names.items() if key not in gains]
    name = capitalize(group.fmt.title)
    return [
        *([f"{name} is defined in only {join_names(found)}; the other splits do not count."] if found else []),
        *([f"{name} is defined in no split for {join_names(missing)}."] if missing else []),
    ]


def _fewer(known: Mapping[Client, int], total: int) -> Iterable[int]:
    return sorted({count for count in known.values() if count < total})


def _names_with(count: int, known: Mapping[Client, int], names: Mapping[Client, str]) -> str:
    return join_names([names[key] for key, own in known.items() if own == count])
