"""Who owns which sample: every request gives a whole, lawful split or one sentence that says why not."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedtailor.data.partition import PARTITIONS, Indices, by_owner, divide, hold_out
from fedtailor.errors import Refused

Labels = NDArray[np.int64]
RNG = np.random.default_rng(5)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(Refused) as caught:
        call()
    return one_sentence(str(caught.value))


def one_sentence(text: str) -> str:
    assert "\n" not in text and ". " not in text and text[-1] in ".?" and len(text) > 20
    return text


def shuffled_labels(sizes: list[int], seed: int = 0) -> Labels:
    """So many samples of class 0, 1, ..., in random order."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


def sizes_of(owned: list[Indices]) -> NDArray[np.int64]:
    return np.array([len(own) for own in owned])


def table_of(labels: Labels, owned: list[Indices]) -> NDArray[np.int64]:
    """How many samples of each class every client has, [clients, classes]."""
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
        return divide(labels, **asdict(self))

    def each(self, classes: int) -> int:
        """How many classes a client may have."""
        if self.partition in ("iid", "dirichlet"):
            return classes
        default = 2 if self.partition == "pathological" else classes
        return default if self.classes_per_client is None else self.classes_per_client

    def is_impossible(self, sizes: list[int]) -> bool | None:
        """Whether no split at all can serve this; None where finding out is a puzzle (2 classes each, scarce ones)."""
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
    partition=st.sampled_from(sorted(PARTITIONS)),
    alpha=st.floats(-3, 3).map(lambda power: 10.0**power),
    classes_per_client=st.none() | st.integers(1, 6),
    exponent=st.floats(0, 4) | st.just(1e6),
    min_size=st.integers(2, 12),
    seed=st.integers(0, 2**32 - 1),
)
class_sizes = st.lists(st.integers(1, 30) | st.integers(100, 300), min_size=1, max_size=6)


@settings(max_examples=600)
@given(requests, class_sizes)
def test_a_request_gives_a_lawful_split_or_is_impossible(request: Request, sizes: list[int]) -> None:
    labels = shuffled_labels(sizes)
    impossible = request.is_impossible(sizes)
    try:
        owned = request.split(labels)
    except Refused as error:
        one_sentence(str(error))
        assert impossible in (True, None), error
        return
    assert not impossible
    assert len(owned) == request.clients
    assert sorted(np.concatenate(owned).tolist()) == list(range(len(labels))), "every sample, each to one client"
    assert sizes_of(owned).min() >= request.min_size
    assert (table_of(labels, owned) > 0).sum(1).max() <= request.each(len(sizes))
    assert same_split(owned, request.split(labels.copy())), "the same request, the same split"


@settings(max_examples=60)
@given(st.integers(2, 12), st.integers(1, 4), st.integers(2, 9), st.integers(1, 12), st.integers(0, 1000))
@example(20, 5, 7, 2, 0)
@example(10, 5, 10, 2, 0)
def test_with_samples_to_spare_nobody_is_refused(classes: int, times: int, least: int, each: int, seed: int) -> None:
    """Where there are twice the samples that `least` for everyone takes, everyone gets them, of its own classes."""
    each, clients = min(each, classes), classes * times
    labels = shuffled_labels([2 * times * least] * classes)
    for partition in ("pathological", "power_law"):
        owned = divide(labels, clients, partition, classes_per_client=each, min_size=least, seed=seed)
        assert sizes_of(owned).min() >= least
        assert (table_of(labels, owned) > 0).sum(1).max() <= each


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 8)), min_size=2, max_size=8), st.integers(0, 1000))
@example([(1, 8), (1, 8), (1, 8), (4, 0), (4, 0), (2, 8), (2, 8)], 0)
def test_the_only_way_to_deal_single_classes_is_found(owners: list[tuple[int, int]], seed: int) -> None:
    """A class of 9 k to 9 k + 8 samples feeds k clients; if there are just so many, no class may go to one more."""
    labels = shuffled_labels([9 * fed + rest for fed, rest in owners])
    clients = sum(fed for fed, _ in owners)
    table = table_of(labels, divide(labels, clients, "pathological", classes_per_client=1, min_size=9, seed=seed))
    assert (table > 0).sum(0).tolist() == [fed for fed, _ in owners]


@pytest.mark.parametrize("partition", sorted(PARTITIONS))
def test_global_generators_neither_matter_nor_change(partition: str) -> None:
    labels = shuffled_labels([60] * 5)
    first = divide(labels, 6, partition)
    np.random.seed(9)
    torch.manual_seed(9)
    before, torch_before = np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    again = divide(labels, 6, partition)
    hold_out(labels, again[0], 0.3, (0, 0))
    assert same_split(first, again)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), torch_before)


@pytest.mark.parametrize("partition", sorted(PARTITIONS))
def test_classes_may_have_any_numbers_and_any_integer_dtype(partition: str) -> None:
    labels = shuffled_labels([40, 50, 60])
    plain = divide(labels, 5, partition)
    for renamed in (labels * 70 - 30, labels.astype(np.uint8), labels.astype(">i2")):
        assert same_split(divide(renamed, 5, partition), plain)
    two = shuffled_labels([70, 80])
    assert same_split(divide(two.astype(bool), 5, partition), divide(two, 5, partition))


@pytest.mark.parametrize(
    ("partition", "changes"),
    [
        ("iid", [{"seed": 1}, {"clients": 7}]),
        ("dirichlet", [{"seed": 1}, {"clients": 7}, {"alpha": 0.2}, {"min_size": 45}]),
        ("pathological", [{"seed": 1}, {"clients": 7}, {"classes_per_client": 3}, {"min_size": 45}]),
        ("power_law", [{"seed": 1}, {"clients": 7}, {"classes_per_client": 3}, {"exponent": 2.0}, {"min_size": 45}]),
    ],
)
def test_another_setting_is_another_split(partition: str, changes: list[dict[str, Any]]) -> None:
    labels = shuffled_labels([60] * 5)
    kinds: list[dict[str, Any]] = [{"clients": 6, "partition": partition} | change for change in ({}, *changes)]
    splits = [divide(labels, **kind) for kind in kinds]
    for i, split in enumerate(splits):
        assert not any(same_split(split, other) for other in splits[:i]), kinds[i]


def test_every_partition_is_another_split() -> None:
    labels = shuffled_labels([60] * 5)
    splits = [divide(labels, 6, partition) for partition in PARTITIONS]
    assert not any(same_split(a, b) for i, a in enumerate(splits) for b in splits[:i])


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(0, 60), st.integers(0, 1000))
def test_iid_gives_everyone_the_same_number(clients: int, extra: int, seed: int) -> None:
    labels = shuffled_labels([2 * clients, extra + 1])
    sizes = sizes_of(divide(labels, clients, "iid", min_size=2, seed=seed))
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("seed", range(3))
def test_iid_mixes_the_classes(seed: int) -> None:
    labels = np.repeat(np.arange(4), 1000)  # sorted: whoever takes neighbours has one class
    shares = table_of(labels, divide(labels, 8, "iid", seed=seed)) / 500
    assert abs(shares - 0.25).max() < 0.1, "five standard deviations"


def test_iid_takes_targets_of_any_kind() -> None:
    for targets in (RNG.normal(size=40), RNG.normal(size=(40, 3)), RNG.integers(0, 9, (40, 7))):
        assert sizes_of(divide(targets, 4, "iid")).tolist() == [10] * 4


@pytest.mark.parametrize("seed", range(5))
def test_a_large_alpha_spreads_every_class_evenly(seed: int) -> None:
    labels = shuffled_labels([1000] * 5)
    table = table_of(labels, divide(labels, 10, "dirichlet", alpha=1e3, seed=seed))
    assert abs(table - 100).max() < 25  # a share of Dir(1000) deviates by about 3 % of itself


@pytest.mark.parametrize("seed", range(5))
def test_a_small_alpha_gives_a_class_to_one_client(seed: int) -> None:
    labels = shuffled_labels([1000] * 10)
    table = table_of(labels, divide(labels, 10, "dirichlet", alpha=1e-3, min_size=2, seed=seed))
    assert (table.max(0) / 1000).mean() > 0.8


def test_the_smaller_alpha_the_more_unequal() -> None:
    labels = shuffled_labels([500] * 10)

    def dominance(alpha: float) -> float:
        """The share of a client's most frequent class, over clients and seeds."""
        tables = [table_of(labels, divide(labels, 10, "dirichlet", alpha=alpha, seed=seed)) for seed in range(5)]
        return float(np.mean([table.max(1) / table.sum(1) for table in tables]))

    values = [dominance(alpha) for alpha in (1e-3, 0.1, 1.0, 10.0, 1e3)]
    assert values == sorted(values, reverse=True) and values[0] > 2 * values[-1]


@pytest.mark.parametrize("alpha", [5e-324, 1e-200, 1e200, 1e308])
def test_an_extreme_alpha_is_a_limit_not_an_error(alpha: float) -> None:
    labels = shuffled_labels([100] * 4)
    table = table_of(labels, divide(labels, 4, "dirichlet", alpha=alpha, min_size=2))
    assert table.sum() == 400
    assert (table == 25).all() if alpha > 1 else (table.max(0) > 90).all()


def test_who_has_his_share_gets_no_more_classes() -> None:
    """Else, at a small alpha, one client may end with almost all samples of all classes."""
    labels = shuffled_labels([1000] * 10)
    for seed in range(10):
        sizes = sizes_of(divide(labels, 10, "dirichlet", alpha=0.05, seed=seed))
        assert sizes.max() <= 1000 + 1000  # just below a fair share, then one whole class


@settings(max_examples=40)
@given(st.integers(2, 6), st.integers(2, 20), st.floats(0, 2), st.integers(0, 1000))
def test_power_law_sizes_follow_the_law(classes: int, clients: int, exponent: float, seed: int) -> None:
    labels = shuffled_labels([4000 // classes] * classes)
    owned = divide(labels, clients, "power_law", exponent=exponent, min_size=2, seed=seed)
    law = np.arange(1, clients + 1) ** -exponent
    sizes = np.sort(sizes_of(owned))[::-1]
    assert abs(sizes - len(labels) * law / law.sum()).max() <= classes  # a class is cut to whole samples


def test_power_law_does_not_sort_the_clients() -> None:
    labels = shuffled_labels([500] * 4)
    largest = {int(sizes_of(divide(labels, 10, "power_law", seed=seed)).argmax()) for seed in range(10)}
    assert len(largest) > 2


@pytest.mark.parametrize("each", [1, 2, 3, 10])
def test_pathological_clients_have_their_classes_in_unequal_amounts(each: int) -> None:
    labels = shuffled_labels([400] * 10)
    table = table_of(labels, divide(labels, 20, "pathological", classes_per_client=each))
    assert ((table > 0).sum(1) == each).all()
    assert ((table > 0).sum(0) == 2 * each).all(), "equal classes have equally many owners"
    assert table[table > 0].max() > 1.5 * table[table > 0].min()


def test_a_rare_class_goes_to_few_clients() -> None:
    labels = shuffled_labels([20, 2000])
    table = table_of(labels, divide(labels, 40, "pathological", classes_per_client=1))
    assert (table[:, 0] > 0).sum() <= 2 and table.sum(1).min() >= 10


@pytest.mark.parametrize(("exponent", "least"), [(1.0, 40), (1.0, 80), (2.0, 15), (2.0, 80)])
def test_min_size_is_paid_by_the_largest(exponent: float, least: int) -> None:
    labels = shuffled_labels([500] * 4)
    before, after = (sizes_of(divide(labels, 20, "power_law", exponent=exponent, min_size=size)) for size in (2, least))
    paid = after < before
    assert paid.any() and (after[before < least] == least).all()
    np.testing.assert_array_equal(after[~paid & (before >= least)], before[~paid & (before >= least)])
    assert after[paid].min() >= after.max() - least, "who gave was the largest then, and gave at most `least` at once"


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
        ({"partition": "pathological", "classes_per_client": 1, "clients": 3}, "3 clients of 1 classes"),
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
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    kind: dict[str, Any] = {"clients": 4} | changes
    assert named in refusal(lambda: divide(shuffled_labels([30] * 4), **kind))


def test_a_class_too_small_for_its_owner_is_refused() -> None:
    labels = shuffled_labels([130, 5])
    assert "classes_per_client" in refusal(lambda: divide(labels, 4, "pathological", classes_per_client=1))
    assert sizes_of(divide(labels, 4, "pathological", classes_per_client=2)).min() >= 10


@pytest.mark.parametrize("targets", [np.zeros(50), np.zeros((50, 2), int), np.array(["a"] * 50)])
def test_only_iid_does_without_classes(targets: NDArray[Any]) -> None:
    for partition in PARTITIONS.keys() - {"iid"}:
        assert partition in refusal(lambda partition=partition: divide(targets, 2, partition))  # type: ignore[misc]


shares = st.floats(0.01, 0.99)


@settings(max_examples=300)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), shares, st.integers(0, 1000), st.integers(0, 1000))
def test_what_is_held_out_has_the_same_proportions(sizes: list[int], share: float, seed: int, client: int) -> None:
    labels = shuffled_labels([*sizes, 50])
    own = np.flatnonzero(labels < len(sizes))  # the last class is somebody else's
    kept, held = hold_out(labels, own, share, (seed, client))
    assert sorted([*kept, *held]) == own.tolist()
    if len(own) == 1:
        assert len(held) == 0
        return
    assert len(kept) > 0 and len(held) > 0
    wanted = share * np.array(sizes)
    assert abs(len(held) - wanted.sum()) < 1 + 1e-9
    assert abs(np.bincount(labels[held], minlength=len(sizes)) - wanted).max() < 1 + 1e-9
    again = hold_out(labels, own, share, (seed, client))
    assert same_split([kept, held], list(again))


def test_holding_out_is_fair_to_every_sample() -> None:
    """Over many seeds each sample is held out equally often, also the only one of its class."""
    labels = shuffled_labels([1, 3, 16])
    held = np.concatenate([hold_out(labels, np.arange(20), 0.3, (seed, 0))[1] for seed in range(2000)])
    assert abs(np.bincount(held) / 2000 - 0.3).max() < 0.06, "about six standard deviations"


def test_seed_and_client_change_what_is_held_out() -> None:
    labels = shuffled_labels([30, 30])
    held = [tuple(hold_out(labels, np.arange(60), 0.5, key)[1]) for key in ((0, 0), (1, 0), (0, 1), (1, 1))]
    assert len(set(held)) == 4


@pytest.mark.parametrize("targets", [RNG.normal(size=20), RNG.normal(size=(20, 3)), RNG.integers(0, 9, (20, 7))])
def test_targets_that_are_no_classes_are_held_out_too(targets: NDArray[Any]) -> None:
    kept, held = hold_out(targets, np.arange(20), 0.25, (0, 0))
    assert sorted([*kept, *held]) == list(range(20)) and len(held) == 5


def test_a_share_of_nothing_holds_out_nothing() -> None:
    kept, held = hold_out(shuffled_labels([5]), np.arange(5), 0.0, (0, 0))
    assert kept.tolist() == [0, 1, 2, 3, 4] and len(held) == 0


@settings(max_examples=100)
@given(st.lists(st.integers(-20, 20), min_size=1) | st.lists(st.text(max_size=3), min_size=1))
def test_every_owner_has_its_own_samples(owners: list[Any]) -> None:
    names, owned = by_owner(owners)
    assert names == [str(owner) for owner in sorted(set(owners))]
    assert sorted(np.concatenate(owned).tolist()) == list(range(len(owners)))
    assert all(str(owners[i]) == name for name, own in zip(names, owned, strict=True) for i in own)


def test_owners_come_as_list_array_or_tensor() -> None:
    numbers = [10, 9, 10, 2]
    for owners in (numbers, np.array(numbers), torch.tensor(numbers), list(np.array(numbers)), tuple(numbers)):
        names, owned = by_owner(owners)  # type: ignore[arg-type]
        assert names == ["2", "9", "10"], "numbers are in the order of numbers"
        assert [own.tolist() for own in owned] == [[3], [1], [0, 2]]


@pytest.mark.parametrize(
    ("owners", "named"),
    [
        (["ann", None], "sample 1"),
        (["ann", float("nan")], "sample 1"),
        ([float("nan"), 1.0], "sample 0"),
        ([("ann", 1), ("ann", 2)], "sample 0"),
        (np.zeros((3, 2)), "sample 0"),
        (["ann", 3], "names or all numbers"),
        ([], "no samples"),
    ],
)
def test_a_sample_without_a_clear_owner_is_refused(owners: Any, named: str) -> None:
    assert named in refusal(lambda: by_owner(owners))
