"""What is called more than chance: tests against independent formulas, and by hand."""

from itertools import permutations, product
from math import factorial
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr, ttest_1samp

from fedtailor.chance import EXACT, LIMIT, half_width, holm, paired, rank_correlation, sign_flip, student, too_few
from fedtailor.sweeps.tuning import Outcome, contests
from fedtailor.table import verdict
from seen import made_run


def test_sign_flip_tries_all_signs() -> None:
    """Written out for five parts: how many of the 32 sums are as far from zero as the one that was found."""
    parts = [0.3, -0.1, 0.25, 0.4, 0.05]
    sums = [abs(sum(s * p for s, p in zip(signs, parts, strict=True))) for signs in product((1, -1), repeat=5)]
    assert sign_flip(parts) == sum(found >= abs(sum(parts)) - 1e-12 for found in sums) / 32
    assert sign_flip([*parts, 0.0, 0.0]) == sign_flip(parts)  # who is not moved says nothing


def test_many_parts_are_drawn_and_agree_with_a_t_test() -> None:
    """Normal differences, where Student's test is right as well; twice the same, for draws are seeded."""
    differences = np.random.default_rng(1).normal(0.25, 1.0, 80)
    assert len(differences) > EXACT
    found = paired(differences.tolist())
    wanted = ttest_1samp(differences, 0.0)
    assert found is not None and found == paired(differences.tolist())
    assert found.p == pytest.approx(wanted.pvalue, abs=0.02)
    low, high = wanted.confidence_interval(0.95)
    assert found.low == pytest.approx(low, abs=0.05) and found.high == pytest.approx(high, abs=0.05)


def test_nothing_but_chance_is_seldom_called_more() -> None:
    """Under the null p is below 5 % in about 5 of 100 cases, also when a few clients have most of the weight."""
    random = np.random.default_rng(3)
    weights = random.pareto(1.5, 10) + 0.1
    ps = [found.p for _ in range(400) if (found := paired(random.normal(size=10).tolist(), weights.tolist()))]
    assert 0.02 < np.mean(np.array(ps) < 0.05) < 0.08


def test_weights_are_how_often_a_client_counts() -> None:
    found = paired([1.0, -0.5], [3, 1])
    assert found is not None and found.mean == pytest.approx(0.625)
    assert (found.better, found.worse) == (1, 1)
    assert found.p == 1.0  # 3/4 and 1/8 apart are 5/8; no other signs bring them nearer to zero


def test_few_or_broken_clients_prove_nothing() -> None:
    alone = paired([0.5])
    assert alone is not None and alone.p == 1.0 and alone.low is None
    assert paired([]) is None and paired([0.5, float("nan")]) is None


@pytest.mark.parametrize(("clients", "comparisons"), [*product(range(1, 10), (1, 2, 7))])
def test_too_few_clients_are_those_whose_agreement_is_no_proof(clients: int, comparisons: int) -> None:
    found = paired([1.0] * clients)
    assert found is not None and too_few(clients, comparisons) == (min(holm([found.p] * comparisons)) >= LIMIT)


def test_holm_by_hand() -> None:
    assert holm([0.02, 0.01, 0.5]) == pytest.approx([0.04, 0.03, 0.5])
    assert holm([0.4, 0.6]) == pytest.approx([0.8, 0.8])  # never falls, never beyond 1
    assert holm([]) == []


# ---- over seeds


def test_over_seeds_it_is_students_test() -> None:
    gaps = [0.3, 0.1, 0.4, 0.15]
    wanted = ttest_1samp(gaps, 0.0)
    assert student(gaps) == pytest.approx(wanted.pvalue)
    reach = half_width(gaps)
    assert reach is not None and np.mean(gaps) + reach == pytest.approx(wanted.confidence_interval(0.95).high)
    assert half_width([0.5]) is None


@pytest.mark.parametrize("seeds", [2, 3, 6])
def test_the_same_gap_in_every_seed_is_no_certainty(seeds: int) -> None:
    """Without a spread Student's test would be sure of two seeds; but their signs agree by chance half of the time."""
    assert student([0.6 - 0.35 + 1e-17 * k for k in range(seeds)]) == 2.0 ** (1 - seeds)
    assert student([0.0] * seeds) == 1.0


@pytest.mark.parametrize(("seeds", "told"), [(2, False), (6, True)])
def test_equal_gaps_in_comparisons_and_sweeps(seeds: int, told: bool) -> None:
    runs = [made_run(m, [{0: s, 1: s}], seed=k) for k in range(seeds) for m, s in (("local", 0.5), ("fedper", 0.75))]
    assert verdict(runs).endswith(f"the difference is {'more than' if told else 'within'} chance.")
    outcomes = []
    for seed, (rho, score) in product(range(seeds), ((1.0, 0.5), (2.0, 0.75))):
        both: dict[str, Any] = dict.fromkeys(("received", "trained"), score)
        outcomes.append(
            Outcome({"method.rho": rho, "seed": seed}, "accuracy", True, (), both, dict.fromkeys(both)),
        )
    (contest,) = contests(["method.rho", "seed"], outcomes, "trained")
    assert (contest.not_told_apart() == []) is told


# ---- ranks


def test_rank_correlation_is_spearmans_with_all_orders_tried() -> None:
    x, y = np.array([0.1, 0.5, 0.3, 0.9, 0.2]), np.array([1.0, 2.0, 2.0, 7.0, 0.0])
    found = rank_correlation(x, y)
    wanted = float(spearmanr(x, y).statistic)
    reached = sum(abs(spearmanr(x, order).statistic) >= abs(wanted) - 1e-9 for order in permutations(y.tolist()))
    assert found is not None and list(found) == pytest.approx([wanted, reached / factorial(5)])
    assert rank_correlation(x, np.ones(5)) is None


def test_pairs_of_clients_are_not_counted_as_if_each_were_one() -> None:
    """Numbers of clients themselves, said once for every pair, correlate as little as the clients do: the p of pairs
    that are taken for independent is far too sure, that of clients who change places is not."""
    random, wrong, right = np.random.default_rng(0), 0, 0
    away = ~np.eye(12, dtype=bool)
    for _ in range(60):
        a, b = (np.add.outer(own, own) for own in random.normal(size=(2, 12)))
        wrong += spearmanr(a[away], b[away]).pvalue < 0.05
        found = rank_correlation(a, b)
        assert found is not None and found[0] == pytest.approx(spearmanr(a[away], b[away]).statistic)
        right += found[1] < 0.05
    assert right <= 8 < 20 <= wrong


def test_kinds_of_clients_are_found() -> None:
    kinds = np.arange(10) % 2
    same = (kinds[:, None] == kinds).astype(float)
    found = rank_correlation(same + np.random.default_rng(0).random((10, 10)) / 10, same)
    assert found is not None and found[0] > 0.8 and found[1] < 0.05
