"""Tests of a run's summary: the mean over clients, the worst tenth, and the best round, compared by hand."""

from typing import Any

import pytest

import fedtailor as ft


def make_run(accuracies: list[dict[int, float]], moment: str = "received", **info: Any) -> ft.Run:
    """Return a run with these accuracies and nothing else."""
    clients = [{"name": str(i), "train": size, "test": size, "validation": 0} for i, size in enumerate((1, 3, 1))]
    values = [{f"accuracy_{moment}": a, f"loss_{moment}": a} for a in accuracies]
    records = [{"round": number, "per_client": value} for number, value in enumerate(values, start=1)]
    found = {"score": "accuracy", "higher_is_better": True, "clients": clients} | info
    return ft.Run({}, found, records, {}, lambda client: {}, lambda client, moment: {})


def test_summary_matches_manual_values() -> None:
    run = make_run([{0: 1.0, 1: 0.8}, {0: 0.9, 1: 0.1}])
    local = make_run([{0: 1.0, 1: 0.0}, {0: 0.9, 1: 0.0}])
    found = run.summary(local)["received"]
    assert found["last"]["weighted"] == pytest.approx((0.9 + 3 * 0.1) / 4)
    assert found["last"]["mean"] == pytest.approx(0.5)
    assert found["last"]["worst_tenth"] == pytest.approx(0.1)
    assert found["last"]["better_than_local"] == 0.5 and found["last"]["worse_than_local"] == 0
    assert found["best_test"]["round"] == 1
    assert found["best_test"]["weighted"] == pytest.approx((1 + 3 * 0.8) / 4)
    assert run.summary()["trained"]["last"] is None  # not evaluated at that moment


def test_summary_with_lower_is_better_score() -> None:
    run = make_run([{0: 0.2, 1: 0.2}, {0: 0.9, 1: 0.3}], higher_is_better=False)
    found = run.summary(make_run([{0: 0.5, 1: 0.5}] * 2, higher_is_better=False))["received"]
    assert found["best_test"]["round"] == 1
    assert found["last"]["worst_tenth"] == 0.9
    assert found["last"]["better_than_local"] == 0.5


def test_summary_received_uses_only_last_round() -> None:
    """Scores of earlier server models do not count."""
    run = make_run([{0: 1.0, 1: 1.0}, {1: 0.2}])
    assert run.summary()["received"]["last"]["clients"] == 1
    assert run.summary()["received"]["last"]["mean"] == pytest.approx(0.2)


def test_best_round_requires_scores_of_all_clients() -> None:
    """A round in which only some clients have scores is never the best, unless it is the last one."""
    run = make_run([{0: 1.0}, {0: 0.4, 1: 0.4}, {0: 0.2, 1: 0.2}])
    assert run.summary()["received"]["best_test"]["round"] == 2
