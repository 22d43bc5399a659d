"""Partitions give a complete split that follows the rules, or raise an error of one sentence."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from conftest import error_message
from fedtailor.data.splits.class_fractions import PARTITIONS, Indices
from fedtailor.data.splits.partition import divide_like, hold_out, partition_samples
from fedtailor.errors import FedTailorError
from support.model_checks import is_one_sentence

Labels = NDArray[np.int64]
RANDOM_CLASSES = ["dirichlet", "iid", "pathological", "power_law"]  # partitions that divide all samples of any classes
RNG = np.random.default_rng(5)


def shuffled_labels(sizes: list[int], seed: int = 0) -> Labels:
    """Return labels with the given number of samples per class, in random order."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


def sizes_of(owned: list[Indices]) -> NDArray[np.int64]:
    return np.array([len(own) for own in owned])


def table_of(labels: Labels, owned: list[Indices]) -> NDArray[np.int64]:
    """Return the number of samples per client and class, [clients, classes]."""
    return np.array([np.bincount(labels[own], minlength=labels.max() + 1) for own in owned])


def same_split(a: list[Indices], b: list[Indices]) -> bool:
    return len(a) == len(b) and all(np.array_equal(one, other) for one, other in zip(a, b, strict=True))


@dataclass(frozen=True)
class Request:
    clients: int
    partition: str
    alpha: float
    classes_per_client: int | None
    exponent: float
    min_size: int
    seed: int

    def split(self, labels: NDArray[Any]) -> list[Indices]:
        return partition_samples(labels, **asdict(self))

    def each(self, classes: int) -> int:
        """Return the maximum number of classes per client."""
        if self.partition in ("iid", "dirichlet"):
            return classes
        default = 2 if self.partition == "pathological" else classes
        return default if self.classes_per_client is None else self.classes_per_client

    def is_impossible(self, sizes: list[int]) -> bool | None:
        """Return whether no valid split exists; None if that is hard to decide (2 scarce classes per client)."""
        each = self.each(len(sizes))
        if self.clients * self.min_size > sum(sizes) or each > len(sizes) or self.clients * each < len(sizes):
            return True
        if each == len(sizes):
            return False
        if each == 1:
            return min(sizes) < self.min_size or sum(size // self.min_size for size in sizes) < self.clients
        return False if min(sizes) >= self.clients * self.min_size else None


requests = st.builds(
    Request,
    clients=st.integers(1, 25),
    partition=st.sampled_from(RANDOM_CLASSES),
    alpha=st.floats(-3, 3).map(lambda power: 10.0**power),
    classes_per_client=st.none() | st.integers(1, 6),
    exponent=st.floats(0, 4) | st.just(1e6),
    min_size=st.integers(2, 12),
    seed=st.integers(0, 2**32 - 1),
)
class_sizes = st.lists(st.integers(1, 30) | st.integers(100, 300), min_size=1, max_size=6)


@settings(max_examples=300)
@given(requests, class_sizes)
def test_partition_is_valid_or_impossible(request: Request, sizes: list[int]) -> None:
    labels = shuffled_labels(sizes)
    impossible = request.is_impossible(sizes)
    try:
        owned = request.split(labels)
    except FedTailorError as error:
        assert is_one_sentence(str(error)) and impossible in (True, None), error
        return
    assert not impossible
    assert len(owned) == request.clients
    assert sorted(np.concatenate(owned).tolist()) == list(range(len(labels))), "each sample belongs to one client"
    assert sizes_of(owned).min() >= request.min_size
    assert (table_of(labels, owned) > 0).sum(1).max() <= request.each(len(sizes))
    assert same_split(owned, request.split(labels.copy())), "equal requests give equal splits"


@settings(max_examples=60)
@given(st.integers(2, 12), st.integers(1, 4), st.integers(2, 9), st.integers(1, 12), st.integers(0, 1000))
@example(20, 5, 7, 2, 0)
@example(10, 5, 10, 2, 0)
def test_partition_with_enough_samples_always_succeeds(
    classes: int, times: int, least: int, each: int, seed: int
) -> None:
    """With twice as many samples as clients × `least`, every client gets enough samples of its classes."""
    each, clients = min(each, classes), classes * times
    labels = shuffled_labels([2 * times * least] * classes)
    for partition in ("pathological", "power_law"):
        owned = partition_samples(labels, clients, partition, classes_per_client=each, min_size=least, seed=seed)
        assert sizes_of(owned).min() >= least
        assert (table_of(labels, owned) > 0).sum(1).max() <= each


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 8)), min_size=2, max_size=8), st.integers(0, 1000))
@example([(1, 8), (1, 8), (1, 8), (4, 0), (4, 0), (2, 8), (2, 8)], 0)
def test_pathological_with_one_class_finds_only_assignment(owners: list[tuple[int, int]], seed: int) -> None:
    """A class of 9k to 9k + 8 samples is enough for k clients, so that exactly one assignment is possible."""
    labels = shuffled_labels([9 * count + rest for count, rest in owners])
    clients = sum(count for count, _ in owners)
    table = table_of(
        labels, partition_samples(labels, clients, "pathological", classes_per_client=1, min_size=9, seed=seed)
    )
    assert (table > 0).sum(0).tolist() == [count for count, _ in owners]


@pytest.mark.parametrize("partition", sorted(PARTITIONS))
def test_partition_ignores_global_generators(partition: str) -> None:
    labels = shuffled_labels([60] * 5)
    first = partition_samples(labels, 6, partition)
    np.random.seed(9)
    torch.manual_seed(9)
    before, torch_before = np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    again = partition_samples(labels, 6, partition)
    hold_out(labels, again[0], 0.3, (0, 0))
    assert same_split(first, again)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), torch_before)


@pytest.mark.parametrize("partition", sorted(PARTITIONS))
def test_partition_ignores_label_values_and_dtype(partition: str) -> None:
    labels = shuffled_labels([60, 70, 80])
    plain = partition_samples(labels, 5, partition)
    for renamed in (labels * 70 - 30, labels.astype(np.uint8), labels.astype(">i2")):
        assert same_split(partition_samples(renamed, 5, partition), plain)
    two = shuffled_labels([70, 80])
    assert same_split(partition_samples(two.astype(bool), 5, partition), partition_samples(two, 5, partition))


@pytest.mark.parametrize(
    ("partition", "changes"),
    [
        ("iid", [{"seed": 1}, {"clients": 7}]),
        ("dirichlet", [{"seed": 1}, {"clients": 7}, {"alpha": 0.2}, {"min_size": 45}]),
        ("pathological", [{"seed": 1}, {"clients": 7}, {"classes_per_client": 3}, {"min_size": 45}]),
        ("power_law", [{"seed": 1}, {"clients": 7}, {"classes_per_client": 3}, {"exponent": 2.0}, {"min_size": 45}]),
        ("dirichlet", [{"cap": False}, {"min_size": 20, "redraw": True}]),
        ("blocks", [{"seed": 1}, {"clients": 5}, {"classes_per_client": 3}]),
        ("lognormal", [{"seed": 1}, {"clients": 7}, {"classes_per_client": 3}, {"log_std": 1.0}, {"log_mean": 1.0}]),
        ("pfedme", [{"seed": 1}, {"clients": 7}, {"classes_per_client": 2}]),
    ],
)
def test_partition_depends_on_all_settings(partition: str, changes: list[dict[str, Any]]) -> None:
    labels = shuffled_labels([60] * 5)
    kinds: list[dict[str, Any]] = [{"clients": 6, "partition": partition} | change for change in ({}, *changes)]
    splits = [partition_samples(labels, **kind) for kind in kinds]
    for i, split in enumerate(splits):
        assert not any(same_split(split, other) for other in splits[:i]), kinds[i]


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(0, 60), st.integers(0, 1000))
def test_iid_gives_equal_sizes_and_mixes_classes(clients: int, extra: int, seed: int) -> None:
    labels = shuffled_labels([2 * clients, extra + 1])
    sizes = sizes_of(partition_samples(labels, clients, "iid", min_size=2, seed=seed))
    assert sizes.max() - sizes.min() <= 1
    labels = np.repeat(np.arange(4), 1000)  # sorted, so that contiguous parts would have one class
    fractions = table_of(labels, partition_samples(labels, 8, "iid", seed=seed)) / 500
    assert abs(fractions - 0.25).max() < 0.13, "six standard deviations"


@pytest.mark.parametrize("seed", range(5))
def test_dirichlet_is_even_with_large_alpha_and_gives_class_to_one_client_with_small(seed: int) -> None:
    labels = shuffled_labels([1000] * 10)
    table = table_of(labels, partition_samples(labels, 10, "dirichlet", alpha=1e3, seed=seed))
    assert abs(table - 100).max() < 25  # the relative standard deviation of Dir(1000) is about 3 %
    table = table_of(labels, partition_samples(labels, 10, "dirichlet", alpha=1e-3, min_size=2, seed=seed))
    assert (table.max(0) / 1000).mean() > 0.8
    sizes = sizes_of(partition_samples(labels, 10, "dirichlet", alpha=0.05, seed=seed))
    assert sizes.max() <= 1000 + 1000, "just below the equal size, plus one whole class"


def test_dirichlet_heterogeneity_decreases_with_alpha() -> None:
    labels = shuffled_labels([500] * 10)

    def dominance(alpha: float) -> float:
        """Return the mean fraction of a client's most frequent class, over clients and seeds."""
        splits = [partition_samples(labels, 10, "dirichlet", alpha=alpha, seed=seed) for seed in range(5)]
        tables = [table_of(labels, split) for split in splits]
        return float(np.mean([table.max(1) / table.sum(1) for table in tables]))

    values = [dominance(alpha) for alpha in (1e-3, 0.1, 1.0, 10.0, 1e3)]
    assert values == sorted(values, reverse=True) and values[0] > 2 * values[-1]


@pytest.mark.parametrize("alpha", [5e-324, 1e-200, 1e200, 1e308])
def test_dirichlet_with_extreme_alpha_reaches_limit(alpha: float) -> None:
    labels = shuffled_labels([100] * 4)
    table = table_of(labels, partition_samples(labels, 4, "dirichlet", alpha=alpha, min_size=2))
    assert table.sum() == 400
    assert (table == 25).all() if alpha > 1 else (table.max(0) > 90).all()


@settings(max_examples=40)
@given(st.integers(2, 6), st.integers(2, 20), st.floats(0, 2), st.integers(0, 1000))
def test_power_law_sizes_follow_power_law(classes: int, clients: int, exponent: float, seed: int) -> None:
    labels = shuffled_labels([4000 // classes] * classes)
    owned = partition_samples(labels, clients, "power_law", exponent=exponent, min_size=2, seed=seed)
    law = np.arange(1, clients + 1) ** -exponent
    sizes = np.sort(sizes_of(owned))[::-1]
    assert abs(sizes - len(labels) * law / law.sum()).max() <= classes  # rounding to whole samples per class


def test_power_law_does_not_sort_clients() -> None:
    labels = shuffled_labels([500] * 4)
    largest = {int(sizes_of(partition_samples(labels, 10, "power_law", seed=seed)).argmax()) for seed in range(10)}
    assert len(largest) > 2


@pytest.mark.parametrize("each", [1, 2, 3, 10])
def test_pathological_gives_classes_in_unequal_amounts(each: int) -> None:
    labels = shuffled_labels([400] * 10)
    table = table_of(labels, partition_samples(labels, 20, "pathological", classes_per_client=each))
    assert ((table > 0).sum(1) == each).all()
    assert ((table > 0).sum(0) == 2 * each).all(), "classes of equal size have equally many owners"
    assert table[table > 0].max() > 1.5 * table[table > 0].min()


def test_pathological_gives_rare_class_to_few_clients() -> None:
    labels = shuffled_labels([20, 2000])
    table = table_of(labels, partition_samples(labels, 40, "pathological", classes_per_client=1))
    assert (table[:, 0] > 0).sum() <= 2 and table.sum(1).min() >= 10


@pytest.mark.parametrize(("exponent", "least"), [(1.0, 40), (1.0, 80), (2.0, 15), (2.0, 80)])
def test_min_size_takes_samples_from_largest_clients(exponent: float, least: int) -> None:
    labels = shuffled_labels([500] * 4)
    before, after = (
        sizes_of(partition_samples(labels, 20, "power_law", exponent=exponent, min_size=size)) for size in (2, least)
    )
    gave = after < before
    assert gave.any() and (after[before < least] == least).all()
    np.testing.assert_array_equal(after[~gave & (before >= least)], before[~gave & (before >= least)])
    assert after[gave].min() >= after.max() - least, "only the largest clients gave, at most `least` at a time"


def test_redraw_takes_first_split_with_large_enough_clients() -> None:
    labels, sizes = shuffled_labels([200] * 5), (2, 15, 30)
    for seed in range(5):
        kind: dict[str, Any] = {"clients": 8, "alpha": 0.3, "cap": False, "seed": seed}
        splits = [partition_samples(labels, **kind, redraw=True, min_size=least) for least in sizes]
        for before, after, least in zip(splits, splits[1:], sizes[1:], strict=False):
            assert sizes_of(after).min() >= least
            assert same_split(before, after) or sizes_of(before).min() < least, "it is not drawn again without need"
        first = partition_samples(labels, **kind, min_size=2)
        assert same_split(first, splits[0]) or sizes_of(first).min() == 2, "no sample is moved"


def test_redraw_without_success_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtailor.data.splits.partition._MAX_REDRAWS", 30)
    labels = shuffled_labels([100] * 2)
    message = error_message(lambda: partition_samples(labels, 8, alpha=1e-3, cap=False, redraw=True))
    assert "None of 30 splits" in message and "redraw" in message


# the publisher's test samples


@pytest.mark.parametrize("partition", sorted(PARTITIONS))
def test_divide_like_keeps_proportions_of_classes(partition: str) -> None:
    labels = shuffled_labels([600, 700, 800, 900])
    is_test = np.random.default_rng(1).random(len(labels)) < 0.2
    train = [np.flatnonzero(~is_test)[own] for own in partition_samples(labels[~is_test], 6, partition)]
    test = divide_like(labels, train, np.flatnonzero(is_test), seed=0)
    assert sorted(np.concatenate(test).tolist()) == np.flatnonzero(is_test).tolist(), (
        "each sample belongs to one client"
    )
    kept, held = table_of(labels, train), table_of(labels, test)
    assert abs(held - kept / kept.sum(0) * held.sum(0)).max() <= 1 + 1e-9
    assert same_split(test, divide_like(labels, train, np.flatnonzero(is_test), seed=0))


def test_divide_like_leaves_out_classes_that_no_client_has() -> None:
    labels = np.array([0, 0, 2, 2, 0, 1, 2])
    test = divide_like(labels, [np.array([0, 1]), np.array([2, 3])], np.array([4, 5, 6]), seed=0)
    assert [own.tolist() for own in test] == [[4], [6]]


def test_divide_like_with_regression_targets_keeps_sizes() -> None:
    test = divide_like(RNG.normal(size=60), [np.arange(10), np.arange(10, 40)], np.arange(40, 60), seed=0)
    assert sizes_of(test).tolist() == [5, 15]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"partition": "dirichlet", "alpha": 0}, "alpha"),
        ({"partition": "dirichlet", "alpha": -0.5}, "alpha"),
        ({"partition": "dirichlet", "alpha": float("nan")}, "alpha"),
        ({"partition": "dirichlet", "alpha": float("inf")}, "alpha"),
        ({"partition": "power_law", "exponent": -1}, "exponent"),
        ({"partition": "power_law", "exponent": float("nan")}, "exponent"),
        ({"partition": "power_law", "exponent": float("inf")}, "exponent"),
        ({"partition": "pathological", "classes_per_client": 0}, "classes_per_client"),
        ({"partition": "pathological", "classes_per_client": 5}, "classes_per_client"),
        ({"partition": "power_law", "classes_per_client": 0}, "classes_per_client"),
        (
            {"partition": "pathological", "classes_per_client": 1, "clients": 3},
            "3 clients with 1 classes each cannot cover",
        ),
        ({"partition": "iid", "clients": 0}, "client"),
        ({"partition": "iid", "clients": -3}, "client"),
        ({"partition": "iid", "clients": 121}, "at most 12 clients"),
        ({"partition": "iid", "clients": 10**9}, "at most 12 clients"),
        ({"partition": "dirichlet", "clients": 13}, "at most 12 clients"),
        ({"partition": "iid", "min_size": 1}, "min_size"),
        ({"partition": "iid", "clients": 1, "min_size": 200}, "min_size"),
        ({"partition": "iid", "seed": -1}, "seed"),
        ({"partition": "dirichlett"}, "did you mean 'dirichlet'"),
        ({"partition": "by_owner"}, "from_dataset"),
    ],
)
def test_partition_with_invalid_setting_names_it(changes: dict[str, Any], named: str) -> None:
    kind: dict[str, Any] = {"clients": 4} | changes
    assert named in error_message(lambda: partition_samples(shuffled_labels([30] * 4), **kind))


def test_pathological_with_too_small_class_raises() -> None:
    labels = shuffled_labels([130, 5])
    assert "classes_per_client" in error_message(
        lambda: partition_samples(labels, 4, "pathological", classes_per_client=1)
    )
    assert sizes_of(partition_samples(labels, 4, "pathological", classes_per_client=2)).min() >= 10


@pytest.mark.parametrize("targets", [RNG.normal(size=40), RNG.integers(0, 9, (40, 2)), np.array(["a"] * 40)])
def test_partition_without_classes_raises_except_iid(targets: NDArray[Any]) -> None:
    for partition in PARTITIONS.keys() - {"iid"}:
        assert partition in error_message(lambda partition=partition: partition_samples(targets, 2, partition))  # type: ignore[misc]
    assert sizes_of(partition_samples(targets, 4, "iid")).tolist() == [10] * 4


fractions = st.floats(0.01, 0.99)


@settings(max_examples=150)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), fractions, st.integers(0, 1000), st.integers(0, 1000))
def test_hold_out_keeps_class_proportions(sizes: list[int], fraction: float, seed: int, client: int) -> None:
    labels = shuffled_labels([*sizes, 50])
    own = np.flatnonzero(labels < len(sizes))  # the last class belongs to another client
    kept, held = hold_out(labels, own, fraction, (seed, client))
    assert sorted([*kept, *held]) == own.tolist()
    if len(own) == 1:
        assert len(held) == 0
        return
    assert len(kept) > 0 and len(held) > 0
    expected = fraction * np.array(sizes)
    assert abs(len(held) - expected.sum()) < 1 + 1e-9
    assert abs(np.bincount(labels[held], minlength=len(sizes)) - expected).max() < 1 + 1e-9
    again = hold_out(labels, own, fraction, (seed, client))
    assert same_split([kept, held], list(again))


def test_hold_out_selects_samples_equally_often() -> None:
    """Over many seeds, each sample is held out equally often, even the only one of its class."""
    labels = shuffled_labels([1, 3, 16])
    held = np.concatenate([hold_out(labels, np.arange(20), 0.3, (seed, 0))[1] for seed in range(2000)])
    assert abs(np.bincount(held) / 2000 - 0.3).max() < 0.06, "about six standard deviations"


def test_hold_out_depends_on_seed_client_and_fraction() -> None:
    labels = shuffled_labels([30, 30])
    held = [tuple(hold_out(labels, np.arange(60), 0.5, key)[1]) for key in ((0, 0), (1, 0), (0, 1), (1, 1))]
    assert len(set(held)) == 4
    kept, none = hold_out(labels, np.arange(60), 0.0, (0, 0))
    assert kept.tolist() == list(range(60)) and len(none) == 0


@pytest.mark.parametrize("targets", [RNG.normal(size=20), RNG.normal(size=(20, 3)), RNG.integers(0, 9, (20, 7))])
def test_hold_out_with_regression_targets(targets: NDArray[Any]) -> None:
    kept, held = hold_out(targets, np.arange(20), 0.25, (0, 0))
    assert sorted([*kept, *held]) == list(range(20)) and len(held) == 5
