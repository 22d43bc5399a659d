"""Clients with redrawn splits of their samples: means, corrected intervals, tables, rows, and the verdict in words."""

from itertools import product
from math import sqrt
from statistics import fmean, stdev
from typing import Any

import pytest
from scipy.stats import t

import fedtailor as ft
from fedtailor.analysis.client_gains import client_gains
from fedtailor.analysis.client_intervals import client_means, mean_gain
from fedtailor.analysis.comparison_tables import client_table
from fedtailor.analysis.gain_sentences import gain_sentences
from fedtailor.analysis.run_summary import compare_runs, make_comparisons
from fedtailor.analysis.table_formats import to_text
from fedtailor.reporting.figures.gains import gain_by_size
from fedtailor.reporting.report import report
from support.example_runs import run_with_scores, verdict_text

LOCAL = [0.70, 0.64, 0.72, 0.66, 0.68]
# Differences from local training in each split: a clear gain, an unclear one, a clear loss, and none at all.
DIFFERENCES = [
    [0.10, 0.11, 0.09, 0.10, 0.12],
    [0.1, -0.06, 0.02, 0.01, 0.03],
    [-0.2, -0.19, -0.21, -0.2, -0.18],
    [0.0] * 5,
]
NAMES = ["Hungary", "Cleveland", "Switzerland", "Long Beach VA"]
SIZES = [30, 60, 90, 120]  # test samples; training samples are 10, 20, 30, 40 in `run_with_scores`


def repeated_runs(undefined: dict[int, list[int]] | None = None, **options: Any) -> list[ft.Run]:
    """Return runs of local training and FedPer in five redrawn splits; `undefined` has the splits without a score."""
    runs = []
    for method, split in product(("local", "fedper"), range(5)):
        scores = {
            client: LOCAL[split] + (own[split] if method == "fedper" else 0.0)
            for client, own in enumerate(DIFFERENCES)
            if split not in (undefined or {}).get(client, [])
        }
        split_options: dict[str, Any] = {"test_sizes": SIZES, "names": NAMES, "num_clients": 4, "repeat": split}
        runs.append(run_with_scores(method, scores, split, **split_options, **options))
    return runs


def test_client_gains_over_redrawn_splits_match_hand_computation() -> None:
    """Client 0 has 30 test and 10 training samples, so the standard error of its mean is s √(1/5 + 3)."""
    group = compare_runs(repeated_runs())
    found = list(client_gains(group, "FedPer", "Local training").values())
    assert len(found) == 4, "one entry per client, not per split"
    differences = DIFFERENCES[0]
    half = float(t.ppf(0.975, 4)) * stdev(differences) * sqrt(1 / 5 + 30 / 10)
    assert found[0].gain == pytest.approx(fmean(differences)) and found[0].test is not None
    assert found[0].test.interval == pytest.approx((fmean(differences) - half, fmean(differences) + half))
    assert [one.direction for one in found] == [1, 0, -1, 0]
    assert found[3].test is not None and found[3].test.interval is None and found[3].gain == 0


def test_client_gains_over_redrawn_splits_of_errors_are_decreases() -> None:
    found = client_gains(compare_runs(repeated_runs(score="mse", higher=False)), "FedPer", "Local training")
    assert [one.direction for one in found.values()] == [-1, 0, 1, 0]
    assert next(iter(found.values())).gain == pytest.approx(-fmean(DIFFERENCES[0]))


def test_intervals_end_at_the_smallest_and_the_largest_possible_score() -> None:
    groups = {
        score: compare_runs(repeated_runs(score=score, higher=score == "r2")) for score in ("c_index", "mae", "r2")
    }
    scores = {score: group.clip((-2.5, 1.5)) for score, group in groups.items()}
    assert scores == {"c_index": (0, 1), "mae": (0, 1.5), "r2": (-2.5, 1)}
    gains = {score: group.clip((-2.5, 1.5), of_gain=True) for score, group in groups.items()}
    assert gains == {"c_index": (-1, 1), "mae": (-2.5, 1.5), "r2": (-2.5, 1.5)}


def test_client_gains_splits_without_a_score_do_not_count() -> None:
    found = list(
        client_gains(compare_runs(repeated_runs({0: [1, 3], 2: [0, 1, 2]})), "FedPer", "Local training").values()
    )
    assert [one.test.seeds if one.test else None for one in found] == [3, 5, 2, 5]
    assert found[0].gain == pytest.approx(fmean([0.10, 0.09, 0.12]))
    assert found[2].test is not None and found[2].test.interval is None and found[2].direction == 0


def test_mean_gain_covers_clients_with_a_score_in_every_split() -> None:
    group = compare_runs(repeated_runs({0: [1]}))
    found = mean_gain(group, "FedPer")
    means = [fmean(column) for column in zip(*DIFFERENCES[1:], strict=True)]
    half = float(t.ppf(0.975, 4)) * stdev(means) * sqrt(1 / 5 + (60 + 90 + 120) / (20 + 30 + 40))
    assert found is not None and found.clients == 3 and found.gain.test is not None
    assert found.gain.test.interval == pytest.approx((fmean(means) - half, fmean(means) + half))


def test_verdict_names_clients_that_gain_and_lose_with_intervals() -> None:
    sentences = gain_sentences(compare_runs(repeated_runs()))
    assert sentences[0] == (
        "With FedPer, the only federated method here, federation helps Hungary and harms Switzerland, without a clear "
        "difference for Cleveland and Long Beach VA."
    )
    assert sentences[1].startswith("Gains over local training: Hungary +10.4 points (95 % interval +4.7 to +16.1), ")
    assert sentences[1].endswith(" and Long Beach VA 0.0 points in all 5 splits.")
    text = " ".join(gain_sentences(compare_runs(repeated_runs({0: [1, 3], 2: [0, 1, 2]}, score="auc"))))
    assert "AUC is defined in only 2 of 5 splits for Switzerland and 3 of 5 splits for Hungary" in text
    assert "Switzerland −19.0 points in only 2 splits" in text


def test_ranking_over_redrawn_splits_is_corrected() -> None:
    """The same scores are significantly different over seeds that are independent, but not over splits that overlap."""
    scores = {"local": [0.70, 0.71, 0.72, 0.70], "fedper": [0.74, 0.73, 0.75, 0.75]}
    seeds, splits = (
        [
            run_with_scores(method, {0: s, 1: s}, n, split_seed=7, repeat=n if redrawn else None, test_sizes=[20, 40])
            for method, own in scores.items()
            for n, s in enumerate(own)
        ]
        for redrawn in (False, True)
    )
    assert "lead over local training is statistically significant over 4 seeds" in verdict_text(seeds)
    text = verdict_text(splits)
    assert "lead over local training is not statistically significant over 4 splits" in text
    assert "corrected resampled t test (Nadeau and Bengio 2003)" in text and "seed" not in text


def test_make_comparisons_separates_redrawn_splits_from_others() -> None:
    """The original split and other folds are other experiments."""
    runs = repeated_runs()
    other = run_with_scores("local", dict.fromkeys(range(4), 0.5), test_sizes=SIZES, names=NAMES)
    assert len(make_comparisons([*runs, other])) == 2
    for run in runs[5:]:
        run.experiment["data"]["folds"] = 5
    assert len(make_comparisons(runs)) == 2


def test_client_table_and_rows_show_intervals() -> None:
    group = compare_runs(repeated_runs({0: [1]}))
    text = to_text(client_table(group), 80)  # type: ignore[arg-type]
    assert "…" not in text and "Nadeau and Bengio" in text
    assert text.index("Hungary") < text.index("Cleveland") < text.index("Mean of 3 clients")
    for one in client_means(group):
        assert one.score.interval is not None and one.score.interval[0] <= one.score.mean <= one.score.interval[1]
    result = ft.ComparisonResult(repeated_runs({0: [1]}))
    rows = {(row["name"], row["method"]): row for row in result.rows("client_mean")}
    assert len(rows) == 8 and rows["Hungary", "FedPer"]["splits"] == 4
    row = rows["Switzerland", "FedPer"]
    assert row["verdict"] == "loses" and row["gain_low"] < row["gain"] < row["gain_high"] < 0
    assert rows["Cleveland", "FedPer"]["verdict"] == "no clear difference"
    assert rows["Cleveland", "Local training"]["gain"] is None
    assert "gain_low" in result.to_csv(per="client_mean") and '"gain_low"' in result.to_json()
    assert "Hungary" in result.to_markdown()


def test_figure_of_gains_draws_one_point_with_an_interval_per_client() -> None:
    group = compare_runs(repeated_runs())
    figure = gain_by_size(group)
    assert figure is not None
    [trace], gains = figure.data, client_gains(group, "FedPer", "Local training")
    assert sorted(trace["text"]) == sorted(NAMES)
    place = trace["text"].index("Hungary")
    low, high = next(iter(gains.values())).test.interval  # type: ignore[misc,union-attr]
    assert trace["y"][place] + trace["error_y"]["array"][place] == pytest.approx(100 * high, rel=1e-3)
    assert trace["y"][place] - trace["error_y"]["arrayminus"][place] == pytest.approx(100 * low, rel=1e-3)
    assert report(repeated_runs()).count("Hungary (seed") == 0


def test_client_table_without_redrawn_splits_is_absent() -> None:
    assert client_table(compare_runs([run_with_scores("local", {0: 0.5}), run_with_scores("fedper", {0: 0.6})])) is None
