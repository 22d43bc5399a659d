"""Statistics: compared with values computed by hand from the formulas, and with independent implementations."""

from itertools import permutations
from math import factorial, sqrt

import numpy as np
import pytest
from scipy.stats import binom, spearmanr, ttest_rel

from fedtailor.analysis.statistics import (
    Numbers,
    accuracies_differ,
    holm,
    mean_interval,
    paired_t_test,
    rank_correlation,
)
from fedtailor.data.splits.class_fractions import Indices
from fedtailor.data.splits.resampling import draw_split

OURS, THEIRS = [0.80, 0.75, 0.90], [0.70, 0.55, 0.60]  # the differences are 0.1, 0.2, and 0.3


def test_paired_t_test_three_seeds_matches_hand_computation() -> None:
    """The mean is 0.2 and s = 0.1, so t = 0.2 / (0.1 / √3) = 2 √3 with 2 degrees of freedom. For these, the cumulative
    distribution is 1/2 + t / (2 √(2 + t²)), so p = 1 − √(12 / 14), and the 97.5 % quantile is 4.303."""
    found = paired_t_test(OURS, THEIRS)
    assert found.seeds == 3 and found.mean == pytest.approx(0.2)
    assert found.p == pytest.approx(1 - sqrt(12 / 14))
    quantile = 0.95 * sqrt(2 / (1 - 0.95**2))  # the distribution above, solved for t
    assert quantile == pytest.approx(4.303, abs=1e-3)
    assert found.interval == pytest.approx((0.2 - quantile * 0.1 / sqrt(3), 0.2 + quantile * 0.1 / sqrt(3)))


def test_paired_t_test_more_seeds_matches_scipy() -> None:
    random = np.random.default_rng(0)
    ours, theirs = random.normal(0.7, 0.1, 8).tolist(), random.normal(0.6, 0.1, 8).tolist()
    found, wanted = paired_t_test(ours, theirs), ttest_rel(ours, theirs)
    assert found.p == pytest.approx(wanted.pvalue)
    assert found.interval == pytest.approx(tuple(wanted.confidence_interval(0.95)))


@pytest.mark.parametrize("seeds", [0, 1, 2])
def test_paired_t_test_fewer_than_three_seeds_is_undefined(seeds: int) -> None:
    found = paired_t_test(OURS[:seeds], THEIRS[:seeds])
    assert (found.seeds, found.interval, found.p) == (seeds, None, None)
    assert found.mean == pytest.approx(sum([0.1, 0.2][:seeds]) / seeds if seeds else 0.0)


@pytest.mark.parametrize("lead", [0.25, 0.0])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_paired_t_test_equal_differences_has_no_p_value(lead: float, dtype: type) -> None:
    """The standard deviation is zero up to rounding, so t is not defined. The dashboard keeps scores in 32 bits."""
    theirs = [0.35, 0.1, 0.6, 0.7]
    found = paired_t_test([float(dtype(score + lead)) for score in theirs], [float(dtype(score)) for score in theirs])
    assert found.mean == pytest.approx(lead, abs=1e-6) and found.p is None and found.interval is None


def test_paired_t_test_redrawn_splits_matches_hand_computation() -> None:
    """With half as many test as training samples, the variance of the mean is s² (1/3 + 1/2) instead of s² / 3. With 2
    degrees of freedom, p = 1 − t / √(2 + t²), as above."""
    found = paired_t_test(OURS, THEIRS, test_to_train=0.5)
    error = 0.1 * sqrt(1 / 3 + 1 / 2)
    assert found.mean == pytest.approx(0.2)
    assert found.interval == pytest.approx((0.2 - 4.3027 * error, 0.2 + 4.3027 * error), abs=1e-4)
    t = 0.2 / error
    assert found.p == pytest.approx(1 - t / sqrt(2 + t**2))


@pytest.mark.parametrize(("samples", "num_test", "splits", "folds"), [(100, 34, 10, None), (45, 9, 20, 5)])
def test_paired_t_test_redrawn_splits_without_difference_covers_zero(
    samples: int, num_test: int, splits: int, folds: int | None
) -> None:
    """Two classifiers with the same rule have one feature each, both equally informative, so that neither
    is better on average over data sets. Splits of one data set agree with each other more than with other data sets:
    without the correction, far fewer than 95 % of the intervals contain 0."""
    random, y, inside = np.random.default_rng(0), np.arange(samples) % 2, {"corrected": 0, "naive": 0}

    def accuracy(feature: Numbers, train: Indices, test: Indices) -> float:
        middle = (feature[train][y[train] == 0].mean() + feature[train][y[train] == 1].mean()) / 2
        return float(np.mean((feature[test] > middle) == y[test]))

    for number in range(500):
        features = random.normal(size=(2, samples)) + y
        parts = [draw_split(y, num_test, number * splits + split, 0, folds) for split in range(splits)]
        ours, theirs = ([accuracy(feature, *part) for part in parts] for feature in features)
        for kind, ratio in (("corrected", num_test / (samples - num_test)), ("naive", 0.0)):
            low, high = paired_t_test(ours, theirs, ratio).interval or (0.0, 0.0)
            inside[kind] += low <= 0 <= high
    assert 0.92 < inside["corrected"] / 500 < 0.985 and inside["naive"] / 500 < 0.75, inside


def test_mean_interval_matches_hand_computation() -> None:
    """Two degrees of freedom, s = 0.1, and the quantile 4.303 from above."""
    found = mean_interval([0.1, 0.2, 0.3])
    assert found == pytest.approx((0.2 - 4.3027 * 0.1 / sqrt(3), 0.2 + 4.3027 * 0.1 / sqrt(3)), abs=1e-4)
    assert mean_interval([0.1, 0.2]) is None and mean_interval([0.5, 0.5, 0.5]) is None


def test_mean_interval_four_values_covers_true_mean_in_95_percent() -> None:
    samples = np.random.default_rng(1).normal(3.0, 2.0, (2000, 4))
    covered = [ends[0] <= 3.0 <= ends[1] for own in samples if (ends := mean_interval(own.tolist()))]
    assert len(covered) == 2000 and 0.935 < np.mean(covered) < 0.965


def test_holm_matches_hand_computed_values() -> None:
    assert holm([0.02, 0.01, 0.5]) == pytest.approx([0.04, 0.03, 0.5])
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # monotone in p
    assert holm([0.4, 0.6]) == pytest.approx([0.8, 0.8])  # at most 1, and monotone
    assert holm([]) == []


# the test samples of one client


def test_accuracies_differ_matches_hand_computation() -> None:
    """On 10 samples with 9 and 5 correct, the adjusted proportions are 10/12 and 6/12: the difference of 0.333 is less
    than 1.96 √((0.139 + 0.25) / 12) = 0.353. With 10 and 5 correct, 0.417 is more than 1.96 √((0.076 + 0.25) / 12)."""
    assert not accuracies_differ(0.9, 0.5, 10) and not accuracies_differ(0.5, 0.9, 10)
    assert accuracies_differ(1.0, 0.5, 10) and accuracies_differ(0.5, 1.0, 10)
    assert accuracies_differ(0.9, 0.5, 100) and not accuracies_differ(0.9, 0.9, 10**6)
    assert not accuracies_differ(1.0, 0.0, 1)  # one sample shows nothing


@pytest.mark.parametrize("samples", [5, 20, 80])
@pytest.mark.parametrize("accuracy", [0.3, 0.6, 0.9, 0.98])
def test_accuracies_differ_equal_models_is_true_in_at_most_5_percent(samples: int, accuracy: float) -> None:
    """The exact probability, over all numbers of correct samples of two equally good models."""
    counts = range(samples + 1)
    probability = [float(binom.pmf(k, samples, accuracy)) for k in counts]
    false = sum(
        probability[a] * probability[b]
        for a in counts
        for b in counts
        if accuracies_differ(a / samples, b / samples, samples)
    )
    assert false <= 0.06


# rank correlation


def test_rank_correlation_matches_spearman_with_all_permutations() -> None:
    x, y = np.array([0.1, 0.5, 0.3, 0.9, 0.2]), np.array([1.0, 2.0, 2.0, 7.0, 0.0])
    found = rank_correlation(x, y)
    wanted = float(spearmanr(x, y).statistic)
    reached = sum(abs(spearmanr(x, order).statistic) >= abs(wanted) - 1e-9 for order in permutations(y.tolist()))
    assert found is not None and list(found) == pytest.approx([wanted, reached / factorial(5)])
    assert rank_correlation(x, np.ones(5)) is None


def test_rank_correlation_of_pairs_permutes_clients() -> None:
    """Values per pair that depend only on single clients are not independent: a test that treats pairs as independent
    rejects far too often, and a test that permutes clients does not."""
    random, wrong, right = np.random.default_rng(0), 0, 0
    away = ~np.eye(12, dtype=bool)
    for _ in range(60):
        a, b = (np.add.outer(own, own) for own in random.normal(size=(2, 12)))
        wrong += spearmanr(a[away], b[away]).pvalue < 0.05
        found = rank_correlation(a, b)
        assert found is not None and found[0] == pytest.approx(spearmanr(a[away], b[away]).statistic)
        right += found[1] < 0.05
    assert right <= 8 < 20 <= wrong


def test_rank_correlation_groups_of_clients_is_significant() -> None:
    groups = np.arange(10) % 2
    same = (groups[:, None] == groups).astype(float)
    found = rank_correlation(same + np.random.default_rng(0).random((10, 10)) / 10, same)
    assert found is not None and found[0] > 0.8 and found[1] < 0.05
