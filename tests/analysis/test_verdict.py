"""The verdict in words: which method scores best, by how much, and whether the difference is significant."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import fedtailor as ft
from conftest import error_message
from fedtailor.analysis import verdict
from fedtailor.analysis.run_summary import make_comparisons
from fedtailor.reporting.figures import clients, curves, gains, ranking
from fedtailor.reporting.page import render_page
from fedtailor.reporting.report import build_page, report
from support.example_runs import run_with_scores, runs_with_clear_winner, single_comparison, verdict_text


def test_verdict_consistent_lead_is_significant() -> None:
    text = verdict_text(runs_with_clear_winner())
    assert text.startswith("FedPer scores highest (64.9 %), and its 10.4-point lead over ")
    assert " is statistically significant. Scores are accuracy over all test samples, " in text
    assert "There is only one seed, so variation between seeds is not included." in text
    assert "All 2 other methods score significantly lower." in text


def test_verdict_inconsistent_lead_is_not_significant() -> None:
    runs = [
        run_with_scores("local", dict.fromkeys(range(10), 0.5)),
        run_with_scores("selffl", {c: 0.9 if c < 4 else 0.3 for c in range(10)}),
    ]
    assert verdict_text(runs).startswith(
        "Self-FL scores highest (54.0 %), but its 4.0-point lead over local training is not statistically significant."
    )


def test_verdict_local_training_can_score_highest() -> None:
    runs = [
        run_with_scores("local", dict.fromkeys(range(12), 0.9)),
        run_with_scores("fedavg", {c: 0.7 + c / 100 for c in range(12)}),
    ]
    text = verdict_text(runs)
    assert text.startswith("Local training scores highest (90.0 %): no federated method beats it, and its ")
    assert "14.5-point lead over FedAvg is statistically significant" in text


def test_verdict_lower_score_can_be_better() -> None:
    """For errors, the smallest is best, a gain is a decrease, and the worst client has the largest error."""
    runs = [run_with_scores("local", dict.fromkeys(range(8), 0.5), score="mse", higher=False)]
    runs.append(run_with_scores("ditto", {c: 0.3 + c / 100 for c in range(8)}, score="mse", higher=False))
    text = verdict_text(runs)
    assert text.startswith("Ditto scores lowest (0.335), and its lead of 0.165 over local training is statistically")
    assert "Scores are mse (lower is better) over" in text and "Local training scores 0.5, 0.165 higher" in text
    group = single_comparison(runs)
    assert "8 of 8 clients" in gains.gain_sentences(group)[0]
    figure = clients.score_distribution(group)
    assert figure is not None and "client 7" in figure.summary and "0.37" in figure.summary


def test_verdict_of_one_run_has_no_ranking() -> None:
    runs = [run_with_scores("fedper", {0: 0.5, 1: 0.7})]
    assert "methods cannot be ranked because there is no other method" in verdict_text(runs)
    assert "cannot be answered" in gains.gain_sentences(single_comparison(runs))[0]
    assert verdict_text(runs).startswith("FedPer scores 60.0 %")
    assert report(runs).count("<figure") >= 4


def test_comparison_diverged_method_is_last() -> None:
    diverged = run_with_scores("fedavg", {0: float("nan"), 1: 0.99})
    runs = [diverged, run_with_scores("local", {0: 0.5, 1: 0.5}), run_with_scores("ditto", {0: 0.4, 1: 0.4})]
    assert list(single_comparison(runs).methods) == ["Local training", "Ditto", "FedAvg"]
    assert "NaN" not in report(runs).partition("<script>/**")[0]


def test_gaps_weighted_mean_is_difference_of_scores() -> None:
    """The significance test therefore applies to the scores in the ranking."""
    random = np.random.default_rng(0)
    runs = []
    for seed, method in product(range(3), ("local", "fedper")):
        values = {c: float(random.random()) for c in range(6)}
        runs.append(run_with_scores(method, values, seed, test_sizes=[1, 5, 2, 9, 3, 1]))
    group = single_comparison(runs)
    gaps = group.gaps("FedPer", "Local training").values()
    mean = sum(gap * weight for gap, weight in gaps) / sum(weight for _, weight in gaps)
    ours, theirs = group.score("FedPer"), group.score("Local training")
    assert ours is not None and theirs is not None and mean == pytest.approx(ours - theirs)


@pytest.mark.parametrize(("split_seed", "num_gaps"), [(None, 12), (7, 4)])
def test_gaps_clients_of_the_same_split_are_averaged_over_seeds(split_seed: int | None, num_gaps: int) -> None:
    """Three seeds with different splits have twelve clients; with one split they have four, averaged over seeds."""
    runs = [
        run_with_scores(method, dict.fromkeys(range(4), base + seed / 10), seed, split_seed=split_seed)
        for seed in range(3)
        for method, base in (("local", 0.5), ("fedper", 0.6))
    ]
    found = single_comparison(runs).gaps("FedPer", "Local training")
    assert len(found) == num_gaps and all(gap == pytest.approx(0.1) for gap, _ in found.values())


def test_comparison_excludes_seeds_that_not_all_methods_have() -> None:
    """FedPer would look better only because it lacks the hard seed."""
    runs = [run_with_scores("local", {0: 0.9}, 0), run_with_scores("local", {0: 0.1}, 1)]
    runs.append(run_with_scores("fedper", {0: 0.8}, 0))
    group = single_comparison(runs)
    assert next(iter(group.methods)) == "Local training" and group.score("Local training") == pytest.approx(0.9)
    assert "Excluded because not all methods have the seed: local training with seed 1." in verdict_text(runs)


def test_verdict_score_without_hard_clients_is_not_a_lead() -> None:
    """FedAvg has no scores for the hard clients, so its score is higher, but it is worse on all clients it has."""
    hard = {c: 0.9 if c < 12 else 0.1 for c in range(20)}
    easy = run_with_scores("fedavg", {c: 0.7 + c / 1000 for c in range(12)}, num_clients=20)
    runs = [run_with_scores("local", hard), easy]
    group = single_comparison(runs)
    assert group.scored[0] == "FedAvg"
    (pair,) = verdict.pairwise_differences(group)
    assert pair.is_significantly_worse and not pair.is_significant and pair.seeds_won == 0
    text = verdict_text(runs)
    both = "on the 12 clients that both methods have, local training is 19.5 points higher."
    assert text.startswith(f"FedAvg scores highest (70.5 %), but {both}")
    assert "FedAvg's score covers 12 of 20" in text
    assert "19.5 points higher on the clients that both methods have" in text
    assert ranking.pairwise_figure(group, [pair]) is not None
    assert "Scores cover different clients" not in verdict_text(runs_with_clear_winner())


def test_verdict_without_common_seed_pairs_nothing() -> None:
    runs = [run_with_scores("local", {0: 0.9, 1: 0.8}, 0), run_with_scores("fedper", {0: 0.7, 1: 0.6}, 1)]
    text = verdict_text(runs)
    assert "No seed is common to all methods" in text and "of 0 seeds" not in text and "mean of 2 seeds" not in text
    assert "its lead cannot be tested for significance" in text and "statistically significant" not in text
    assert "cannot be answered" in gains.gain_sentences(single_comparison(runs))[0]
    assert report(runs)


def test_verdict_of_one_method_includes_caveats() -> None:
    diverged = run_with_scores("fedavg", {0: float("nan"), 1: 0.9})
    diverged.records[-1]["diverged"] = [0]
    assert "Clients diverged with FedAvg: try a smaller lr." in verdict_text([diverged])
    runs = [diverged, run_with_scores("local", {0: 0.5, 1: 0.5})]
    assert "Clients diverged with FedAvg" in verdict_text(runs)


def test_verdict_names_the_clients_that_a_score_covers() -> None:
    """With evaluate="participants", scores cover few clients: the same ones for all methods, or different ones."""
    runs = []
    for method, base in (("local", 0.5), ("fedavg", 0.6)):
        scores = {2: base, 5: base + 0.1}
        runs.append(run_with_scores(method, scores, before=dict.fromkeys(range(8), 0.3), num_clients=8))
        runs[-1].records[-1]["last_trained"] = {"accuracy": scores}
        runs[-1].experiment["evaluate"] = "participants"
    text = verdict_text(runs)
    assert "over the test samples of the 2 of 8 clients that have a score, as trained" in text
    assert "all test samples" not in text and "Scores cover different clients" not in text
    distribution, lines = clients.score_distribution(single_comparison(runs)), curves.curves(single_comparison(runs))
    assert distribution is not None and "median of 2 clients scores 65.0 %" in distribution.summary
    assert "of these clients; 6 clients have no score" in distribution.summary
    assert lines is not None and "its last score covers the clients evaluated at the end" in lines.summary
    runs[1].records[-1]["last_trained"] = {"accuracy": {0: 0.5}}
    assert "over the test samples of the clients that have a score, as" in verdict_text(runs)
    seeds = [run_with_scores(m, {c: 0.5, 3: 0.6}, c, num_clients=8) for c in (0, 1) for m in ("local", "fedavg")]
    assert "2 of 8 clients that have a score in each seed" in verdict_text(seeds)


def test_verdict_of_complete_scores_covers_all_test_samples() -> None:
    runs = runs_with_clear_winner()
    distribution, lines = clients.score_distribution(single_comparison(runs)), curves.curves(single_comparison(runs))
    assert "over all test samples" in verdict_text(runs)
    assert distribution is not None and "90 % of all clients)" in distribution.summary
    assert lines is not None and "last score" not in lines.summary


def test_verdict_of_simulated_run_counts_evaluated_clients() -> None:
    fed = ft.load("digits", clients=6, seed=0)
    method, network = ft.methods.FedPer(), ft.network("mlp", fed)
    for evaluate, count in (("participants", 2), (4, 4)):
        run = ft.simulate(method, network, fed, rounds=2, participation=0.3, evaluate=evaluate, batch_size=64)
        assert f"the {count} of 6 clients that have a score" in verdict_text([run])


@pytest.mark.parametrize(("count", "others", "few"), [(3, 1, True), (5, 1, True), (6, 1, False), (6, 2, True)])
def test_verdict_few_clients_are_not_tested(count: int, others: int, few: bool) -> None:
    """All clients agree: with 5 clients, that happens by chance once in 16 cases, so no lead could be significant."""
    runs = [run_with_scores(f"m{k}", {c: 0.5 + c / 100 for c in range(count)}) for k in range(others)]
    runs.append(run_with_scores("fedper", {c: 0.7 + c / 50 for c in range(count)}))
    text, pairs = verdict_text(runs), verdict.pairwise_differences(single_comparison(runs))
    figure = ranking.pairwise_figure(single_comparison(runs), pairs)
    clause = f"{count} clients are too few for a significance test"
    assert (pairs[0].p >= 0.05) == few and "not statistically significant" not in text and figure is not None
    assert (text.count(clause) >= 2 and "interval" not in text and clause in figure.summary) == few
    assert ("is statistically significant" in text and "95 % interval" in text) != few


def test_verdict_local_training_leads_with_too_few_clients() -> None:
    text = verdict_text([run_with_scores("local", {0: 0.9}), run_with_scores("fedavg", {0: 0.7})])
    lead = "its 20.0-point lead over FedAvg cannot be tested because 1 client is too few for a significance test."
    assert text.startswith(f"Local training scores highest (90.0 %): no federated method beats it; {lead}")


def test_report_uses_singular_for_one() -> None:
    runs = [run_with_scores("local", {0: 0.5}, rounds=1), run_with_scores("fedavg", {0: 0.6}, rounds=1)]
    page = build_page(runs)
    assert page.subtitle.startswith("1 client · 1 round · ")
    sections = page.chapters[0].sections
    sentences = [s for section in sections for s in [*section.answer, *(figure.summary for figure in section.figures)]]
    assert not re.search(r"\b1 (clients|rounds|pairs|samples|do)\b", " ".join(sentences))


def test_verdict_interval_is_of_one_pair() -> None:
    """p is corrected for multiple comparisons, the interval is not."""
    assert "(95 % interval of this pair only: +" in verdict_text(runs_with_clear_winner())


# groups of comparable runs


def test_labels_equal_after_truncation_are_numbered() -> None:
    """Settings that differ only beyond the end of a truncated label stay separate."""
    long = "a" * 70

    def make_run(rho: float, score: float) -> ft.Run:
        return run_with_scores("fedapa", {0: score, 1: score}, fields={"kind": f"{long}{rho}"})

    runs = [make_run(rho, rho) for rho in (0.3, 0.6, 0.9)]
    found = list(single_comparison(runs).methods)
    assert len(set(found)) == 3 and all(label.startswith("FedAPA kind=aaa") for label in found)
    assert [single_comparison(runs).score(label) for label in found] == pytest.approx([0.9, 0.6, 0.3])
    assert "has two runs with seed 0" in error_message(lambda: make_comparisons([*runs, make_run(0.3, 1.0)]))
    assert all(label in report(runs) for label in found)


def test_different_experiments_get_separate_chapters() -> None:
    runs = runs_with_clear_winner()
    runs += [replace(run, experiment=run.experiment | {"batch_size": 8}) for run in runs_with_clear_winner()]
    page = build_page(runs)
    assert [chapter.title for chapter in page.chapters] == ["batch_size = none", "batch_size = 8"]
    found = re.findall(r'\sid="([^"]+)"', render_page(page))
    assert len(found) == len(set(found))


def test_settings_of_one_method_are_separate_rows() -> None:
    def make_run(rho: float, score: float) -> ft.Run:
        return run_with_scores("fedapa", {0: score, 1: score}, fields={"rho": rho, "lr": 0.1})

    runs = [make_run(rho, rho) for rho in (0.3, 0.6)]
    assert list(single_comparison(runs).methods) == ["FedAPA rho=0.6", "FedAPA rho=0.3"]
    assert "so the best score is optimistic" in verdict_text(runs)
    assert "optimistic" not in verdict_text(runs_with_clear_winner())
    assert "has two runs with seed 0" in error_message(lambda: make_comparisons([runs[0], make_run(0.3, 1.0)]))
