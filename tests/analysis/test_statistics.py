"""Statistics: compared with independent formulas and with values computed by hand."""

from itertools import permutations, product
from math import factorial
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr, ttest_1samp

from fedtailor.analysis.statistics import (
    EXACT,
    SIGNIFICANCE_LEVEL,
    holm,
    interval_half_width,
    paired_difference,
    paired_t_test,
    rank_correlation,
    sign_flip,
    too_few,
)
from fedtailor.analysis.tables import verdict
from fedtailor.experiments.tuning import Outcome, compare_settings
from support.example_runs import example_run


def test_sign_flip_few_parts_enumerates_all_signs() -> None:
    """Compare with the 32 sums of five parts, written out."""
    parts = [0.3, -0.1, 0.25, 0.4, 0.05]
    sums = [abs(sum(s * p for s, p in zip(signs, parts, strict=True))) for signs in product((1, -1), repeat=5)]
    assert sign_flip(parts) == sum(found >= abs(sum(parts)) - 1e-12 for found in sums) / 32
    assert sign_flip([*parts, 0.0, 0.0]) == sign_flip(parts)  # zeros do not change the result


def test_paired_difference_normal_differences_agrees_with_t_test() -> None:
    """For normal differences, Student's t test is valid too. Draws are seeded, so results are reproducible."""
    differences = np.random.default_rng(1).normal(0.25, 1.0, 80)
    assert len(differences) > EXACT
    found = paired_difference(differences.tolist())
    wanted = ttest_1samp(differences, 0.0)
    assert found is not None and found == paired_difference(differences.tolist())
    assert found.p == pytest.approx(wanted.pvalue, abs=0.02)
    low, high = wanted.confidence_interval(0.95)
    assert found.low == pytest.approx(low, abs=0.05) and found.high == pytest.approx(high, abs=0.05)


def test_paired_difference_under_null_is_seldom_significant() -> None:
    """Under the null hypothesis, p is below 5 % in about 5 of 100 cases, also with very unequal weights."""
    random = np.random.default_rng(3)
    weights = random.pareto(1.5, 10) + 0.1
    ps = [
        found.p for _ in range(400) if (found := paired_difference(random.normal(size=10).tolist(), weights.tolist()))
    ]
    assert 0.02 < np.mean(np.array(ps) < 0.05) < 0.08


def test_paired_difference_with_weights_gives_weighted_mean() -> None:
    found = paired_difference([1.0, -0.5], [3, 1])
    assert found is not None and found.mean == pytest.approx(0.625)
    assert (found.better, found.worse) == (1, 1)
    assert found.p == 1.0  # 3/4 − 1/8 = 5/8; no other signs give a sum nearer to zero


def test_paired_difference_one_or_no_client_is_not_significant() -> None:
    single = paired_difference([0.5])
    assert single is not None and single.p == 1.0 and single.low is None
    assert paired_difference([]) is None and paired_difference([0.5, float("nan")]) is None


@pytest.mark.parametrize(("clients", "comparisons"), [*product(range(1, 10), (1, 2, 7))])
def test_too_few_is_true_when_unanimous_clients_are_not_significant(clients: int, comparisons: int) -> None:
    found = paired_difference([1.0] * clients)
    assert found is not None and too_few(clients, comparisons) == (
        min(holm([found.p] * comparisons)) >= SIGNIFICANCE_LEVEL
    )


def test_holm_matches_hand_computed_values() -> None:
    assert holm([0.02, 0.01, 0.5]) == pytest.approx([0.04, 0.03, 0.5])
    assert holm([0.4, 0.6]) == pytest.approx([0.8, 0.8])  # monotone and at most 1
    assert holm([]) == []


# over seeds


def test_paired_t_test_matches_scipy() -> None:
    gaps = [0.3, 0.1, 0.4, 0.15]
    wanted = ttest_1samp(gaps, 0.0)
    assert paired_t_test(gaps) == pytest.approx(wanted.pvalue)
    reach = interval_half_width(gaps)
    assert reach is not None and np.mean(gaps) + reach == pytest.approx(wanted.confidence_interval(0.95).high)
    assert interval_half_width([0.5]) is None


@pytest.mark.parametrize("seeds", [2, 3, 6])
def test_paired_t_test_equal_gaps_uses_sign_flip(seeds: int) -> None:
    """With zero variance, the t test would give p = 0 for two seeds, whose signs agree by chance half of the time."""
    assert paired_t_test([0.6 - 0.35 + 1e-17 * k for k in range(seeds)]) == 2.0 ** (1 - seeds)
    assert paired_t_test([0.0] * seeds) == 1.0


@pytest.mark.parametrize(("seeds", "significant"), [(2, False), (6, True)])
def test_verdicts_equal_gaps_need_six_seeds(seeds: int, significant: bool) -> None:
    runs = [example_run(m, [{0: s, 1: s}], seed=k) for k in range(seeds) for m, s in (("local", 0.5), ("fedper", 0.75))]
    assert verdict(runs).endswith(f"is {'' if significant else 'not '}statistically significant over {seeds} seeds.")
    outcomes = []
    for seed, (rho, score) in product(range(seeds), ((1.0, 0.5), (2.0, 0.75))):
        both: dict[str, Any] = dict.fromkeys(("received", "trained"), score)
        outcomes.append(
            Outcome({"method.rho": rho, "seed": seed}, "accuracy", True, (), both, dict.fromkeys(both)),
        )
    (comparison,) = compare_settings(["method.rho", "seed"], outcomes, "trained")
    assert (comparison.indistinguishable() == []) is significant


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
