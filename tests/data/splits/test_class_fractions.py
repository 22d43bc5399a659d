"""Tables of fractions follow the rules of the papers' code; known random numbers give counts computed by hand."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conftest import error_message
from fedtailor.data.splits.class_fractions import PARTITIONS, Fractions, SplitSettings

RNG = np.random.default_rng


@dataclass
class KnownRandom:
    """A generator whose normal and integer random numbers are known."""

    normals: Any
    integer: int = 0

    def normal(self, mean: float, std: float, shape: Any) -> Fractions:
        return np.broadcast_to(np.asarray(self.normals, dtype=float), shape)

    def integers(self, low: int, high: int, shape: Any) -> NDArray[np.int64]:
        assert low <= self.integer < high
        return np.full(shape, self.integer)


def draw_counts(partition: str, random: Any, totals: list[int], clients: int, **settings: Any) -> Fractions:
    fractions = PARTITIONS[partition](random, np.array(totals), clients, SplitSettings(**settings))
    assert fractions.shape == (len(totals), clients) and (fractions.sum(1) <= 1 + 1e-12).all()
    counts: Fractions = fractions * np.array(totals)[:, None]
    return counts


def test_dirichlet_without_cap_has_moments_of_dirichlet_distribution() -> None:
    clients, alpha = 5, 0.3
    rows = PARTITIONS["dirichlet"](RNG(0), np.full(20_000, 100), clients, SplitSettings(alpha=alpha, cap=False))
    assert np.allclose(rows.mean(0), 1 / clients, atol=0.01)
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert np.allclose(rows.var(0), variance, atol=0.004), "about six standard errors"


def test_dirichlet_only_with_cap_limits_sizes() -> None:
    def largest(cap: bool) -> float:
        draws = [draw_counts("dirichlet", RNG(s), [100] * 10, 10, alpha=0.1, cap=cap) for s in range(50)]
        return max(float(draw.sum(0).max()) for draw in draws)

    assert largest(cap=True) <= 100 + 100 < 250 < largest(cap=False)


def test_blocks_gives_groups_of_clients_the_same_classes() -> None:
    """FedAPA with 20 clients and 2 of 10 classes: each class has ⌊20 · 2 / 10⌋ = 4 clients, dealt in order."""
    counts = draw_counts("blocks", RNG(0), [700] * 10, 20)
    for client in range(20):
        assert np.flatnonzero(counts[:, client]).tolist() == [client // 4 * 2, client // 4 * 2 + 1]
    positive = counts[counts > 0]
    assert np.allclose(counts.sum(1), 700) and 1.5 < positive.max() / positive.min() < (0.7 / 0.3) ** 2


def test_blocks_rounds_clients_per_class_down() -> None:
    """5 clients with 4 of 9 classes: each class has ⌊20 / 9⌋ = 2 clients, and the last class the only client left."""
    owns = draw_counts("blocks", RNG(0), [60] * 9, 5, classes_per_client=4) > 0
    assert [np.flatnonzero(row).tolist() for row in owns] == [[0, 1]] * 4 + [[2, 3]] * 4 + [[4]]


def test_lognormal_gives_min_size_and_shares_of_rest() -> None:
    """Each of 2 clients first has 5 samples of both classes; what remains, 20 and 30, is shared 1 : 3 and 2 : 1."""
    random = KnownRandom(np.log([[1, 3], [2, 1]]))
    counts = draw_counts("lognormal", random, [30, 40], 2, min_size=10)
    assert np.allclose(counts, [[5 + 5, 5 + 15], [5 + 20, 5 + 10]])


def test_lognormal_gives_consecutive_classes() -> None:
    owns = draw_counts("lognormal", RNG(0), [500] * 4, 6, classes_per_client=2) > 0
    assert [np.flatnonzero(owns[:, client]).tolist() for client in range(6)] == [
        [0, 1], [1, 2], [2, 3], [0, 3], [0, 1], [1, 2]
    ]  # fmt: skip


def test_lognormal_with_log_mean_gives_absolute_sizes() -> None:
    """Sizes of 20 + 5 and 40 + 5 are ⌊25 / 2⌋ and ⌊45 / 2⌋ samples of each class."""
    counts = draw_counts("lognormal", KnownRandom(np.log([20, 40])), [100, 200], 2, min_size=5, log_mean=4.0)
    assert np.allclose(counts, [[12, 22], [12, 22]])
    counts = draw_counts("lognormal", KnownRandom([-50, -50]), [100, 200], 2, min_size=5, log_mean=4.0)
    assert np.allclose(counts, 3), "at least min_size samples in total"


def test_lognormal_has_given_mean_and_standard_deviation() -> None:
    one: dict[str, Any] = {"classes_per_client": 1, "min_size": 2, "log_std": 0.5}
    counts = draw_counts("lognormal", RNG(0), [10**7], 5000, log_mean=6.0, **one)
    logs = np.log(counts[0] - 2 + 0.5)
    assert abs(logs.mean() - 6) < 0.05 and abs(logs.std() - 0.5) < 0.03
    shares = draw_counts("lognormal", RNG(0), [10**9], 5000, **one)
    assert abs(np.log(shares[0] - 2).std() - 0.5) < 0.03 and np.isclose(shares.sum(), 10**9)


def test_pfedme_gives_samples_while_they_last() -> None:
    """CIFAR-10, 20 clients, 3 classes each: a class has 6 owners and 3 · 20 shares, here of ⌊5980 / 60⌋ = 99 each."""
    counts = draw_counts("pfedme", KnownRandom(0.0, integer=300), [6000] * 10, 20)
    assert np.allclose(counts[counts > 0], 10 + 2 * (99 + 300)) and ((counts > 0).sum(1) == 6).all()
    counts = draw_counts("pfedme", KnownRandom(0.0, integer=600), [6000] * 10, 20)
    for label, row in enumerate(counts):  # 60 + 5 · 1398 > 6000, so that only four owners get more than 10
        owners = [client for client in range(20) if (label - client) % 10 < 3]
        assert np.allclose(row[owners], [10 + 2 * (99 + 600)] * 4 + [10] * 2)
    counts = draw_counts("pfedme", KnownRandom(0.0, integer=300), [6000] * 10, 40)
    assert np.allclose(counts[counts > 0], 10 + ((6000 - 40) // 120 + 300)), "not doubled for more than 20 clients"


@pytest.mark.parametrize(
    ("partition", "totals", "clients", "settings", "named"),
    [
        ("blocks", [60] * 10, 12, {}, "multiple of the number of classes"),
        ("blocks", [60] * 10, 4, {}, "multiple of the number of classes"),
        ("blocks", [60] * 3, 3, {"classes_per_client": 4}, "classes_per_client"),
        ("lognormal", [60] * 9, 4, {}, "cannot cover 9 classes"),
        ("lognormal", [60] * 3, 3, {"classes_per_client": 0}, "classes_per_client"),
        ("lognormal", [60, 9, 60], 3, {}, "9 samples of a class are too few for 2 clients with 5 each"),
        ("lognormal", [60] * 3, 3, {"log_std": -1.0}, "log_std"),
        ("lognormal", [60] * 3, 3, {"log_std": float("nan")}, "log_std"),
        ("lognormal", [60] * 3, 3, {"log_mean": float("inf")}, "log_mean"),
        ("lognormal", [60] * 3, 3, {"log_mean": 1e300}, "smaller log_mean"),
        ("pfedme", [60] * 3, 20, {}, "fewer clients"),
    ],
)
def test_fractions_with_impossible_settings_name_them(
    partition: str, totals: list[int], clients: int, settings: dict[str, Any], named: str
) -> None:
    assert named in error_message(lambda: draw_counts(partition, RNG(0), totals, clients, **settings))
