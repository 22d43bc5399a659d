"""Rankings and verdicts: which method scores best, by how much, and whether that is more than chance."""

import re
from dataclasses import replace

import pytest
from scipy.stats import ttest_rel

import fedtailor as ft
from conftest import error_message
from fedtailor.analysis.client_gains import client_gains, gains_over_local
from fedtailor.analysis.comparability import is_local_baseline
from fedtailor.analysis.comparison import compare_with_best, rank
from fedtailor.analysis.comparison_tables import score_table
from fedtailor.analysis.gain_sentences import gain_sentences
from fedtailor.analysis.run_summary import compare_runs, make_comparisons
from fedtailor.reporting.figures import clients, curves, gains, ranking
from fedtailor.reporting.page import render_page
from fedtailor.reporting.report import build_page, report
from support.example_runs import run_with_scores, runs_with_clear_winner, verdict_text

NAN = float("nan")


def seeded_runs(scores: dict[str, list[float]], **options: object) -> list[ft.Run]:
    """Return runs of methods with these scores per seed, the same for two clients."""
    return [
        run_with_scores(method, {0: score, 1: score}, seed, **options)  # type: ignore[arg-type]
        for method, own in scores.items()
        for seed, score in enumerate(own)
    ]


# numbers


def test_compare_with_best_matches_paired_t_test_with_holm() -> None:
    best = [0.80, 0.83, 0.81, 0.79]
    others = {"b": [0.80, 0.82, 0.80, 0.78], "c": [0.5, 0.56, 0.52, 0.49], "d": [0.775, 0.815, 0.79, 0.785]}
    pairs = {name: list(zip(best, own, strict=True)) for name, own in others.items()}
    found = {one.other: one for one in compare_with_best(dict.fromkeys(others, 0.0), pairs, higher_is_better=True)}
    ps = sorted((float(ttest_rel(best, own).pvalue), name) for name, own in others.items())
    highest = 0.0
    for place, (p, name) in enumerate(ps):
        highest = max(highest, min(1.0, p * (len(ps) - place)))
        assert found[name].test.p == pytest.approx(p) and found[name].p == pytest.approx(highest)
    assert found["c"].direction == 1 and found["d"].direction == 0
    assert ps[1][0] < 0.05 < found[ps[1][1]].p  # type: ignore[operator]  # the correction matters


def test_compare_with_best_lower_scores_are_better() -> None:
    pairs = {"b": [(0.1, 0.3), (0.2, 0.45), (0.1, 0.33)]}
    (found,) = compare_with_best({"b": 0.36}, pairs, higher_is_better=False)
    assert found.test.mean > 0 and found.direction == 1 and found.seeds_won == 3
    assert rank({"b": [0.3], "a": [0.1], "lost": [NAN], "none": []}, higher_is_better=False)[:2] == ["a", "b"]


def test_paired_scores_weighted_means_are_the_scores_of_the_ranking() -> None:
    """Client 3 has no test samples, so its score counts nowhere."""
    sizes = [1, 5, 2, 0]
    runs = [
        run_with_scores("fedper", {0: 0.2, 1: 0.9, 2: 0.4, 3: 1.0}, test_sizes=sizes),
        run_with_scores("local", {0: 0.8, 1: 0.5, 2: 0.1, 3: 0.0}, test_sizes=sizes),
    ]
    group = compare_runs(runs)
    ((weighted, unweighted),) = group.paired_scores("FedPer", "Local training")
    assert weighted == pytest.approx((group.score("FedPer"), group.score("Local training")))
    assert weighted == pytest.approx((5.5 / 8, 3.5 / 8)) and unweighted == pytest.approx((0.5, 1.4 / 3))


# the verdict


def test_verdict_clients_of_one_seed_are_not_replications() -> None:
    """All 20 clients are better with FedPer, but there is only one training run of each method."""
    text = verdict_text(runs_with_clear_winner(seeds=1))
    assert text.startswith(
        "FedPer scores highest (64.9 %), but there are not enough seeds to tell whether its 10.4-point lead over "
        "local training is more than chance. "
    )
    assert "need at least 3 seeds" in text and "interval of" not in text and "statistically significant" not in text


def test_verdict_states_interval_p_value_and_dependence_of_seeds() -> None:
    text = verdict_text(seeded_runs({"local": [0.70, 0.55, 0.60], "fedper": [0.80, 0.75, 0.90]}))
    assert "but its 20.0-point lead over local training is not statistically significant over 3 seeds." in text
    assert "Scores are accuracy over all test samples after the last round, mean of 3 seeds, as trained." in text
    interval = "95 % interval of the lead, for this pair only: −4.8 to +44.8"
    pair = f"20.0 points lower ({interval}): not statistically significant"
    assert f"Local training scores 61.7 %, {pair} over 3 seeds (p = 0.074)." in text
    assert "FedPer scores higher than local training in 3 of 3 seeds." in text
    assert "Seeds that re-split the same data are not fully independent, so intervals may be too narrow" in text
    one_split = verdict_text(seeded_runs({"local": [0.7, 0.55, 0.6], "fedper": [0.8, 0.75, 0.9]}, split_seed=7))
    assert "All seeds use the same split" in one_split and "re-split" not in one_split


def test_verdict_names_methods_that_are_worse_and_indistinguishable() -> None:
    scores = {"local": [0.70, 0.72, 0.71], "fedper": [0.80, 0.83, 0.82], "ditto": [0.79, 0.84, 0.80]}
    text = verdict_text(seeded_runs(scores))
    assert "FedPer scores significantly higher than local training; it is not distinguishable from Ditto." in text
    assert "after correction for 2 comparisons" in text and "Local training scores 71.0 %" in text


def test_verdict_lower_score_can_be_better() -> None:
    """For errors, the smallest is best, a gain is a decrease, and the worst client has the largest error."""
    options = {"score": "mse", "higher": False}
    runs = seeded_runs({"local": [0.5, 0.6, 0.55], "ditto": [0.3, 0.41, 0.36]}, **options)
    text = verdict_text(runs)
    assert text.startswith("Ditto scores lowest (0.3567), and its lead of 0.1933 over local training is statistically")
    assert "Scores are MSE (lower is better) over" in text and "Local training scores 0.55, 0.1933 higher" in text
    sentences = gain_sentences(compare_runs(runs))
    assert "6 of 6 clients (from 3 splits) gain over local training" in sentences[0]
    assert sentences[0].endswith("the median gain is +0.19 in MSE, a lower value.")
    assert sentences[1].startswith("The uncertainty of one client's MSE is unknown")
    uneven = run_with_scores("ditto", {c: 0.3 + c / 100 for c in range(8)}, score="mse", higher=False)
    figure = clients.score_distribution(compare_runs([uneven]))
    assert figure is not None and "client 7" in figure.summary and "0.37" in figure.summary


def test_verdict_equal_scores_are_not_a_lead() -> None:
    text = verdict_text(seeded_runs({"fedavg": [0.5, 0.6, 0.7], "fedbn": [0.5, 0.6, 0.7]}))
    assert text.startswith("FedAvg scores highest (60.0 %), but FedBN has the same score in all 3 seeds, for which no")
    assert "Every client has identical scores with FedAvg and FedBN." in text


def test_verdict_of_one_method_has_no_ranking() -> None:
    runs = [run_with_scores("fedper", {0: 0.5, 1: 0.7})]
    text = verdict_text(runs)
    assert text.startswith("FedPer scores 60.0 %; no other method or setting has a score to compare it with.")
    assert "add runs of other methods" in text and "cannot be answered" in gains.gain_answer(compare_runs(runs))[0]
    assert report(runs).count("<figure") >= 4


def test_verdict_diverged_method_is_last_and_named() -> None:
    diverged = run_with_scores("fedavg", {0: NAN, 1: 0.99})
    diverged.records[-1]["diverged"] = [0]
    assert "Clients diverged with FedAvg: try a smaller lr." in verdict_text([diverged])
    runs = [diverged, run_with_scores("local", {0: 0.5, 1: 0.5}), run_with_scores("ditto", {0: 0.4, 1: 0.4})]
    assert list(compare_runs(runs).methods) == ["Local training", "Ditto", "FedAvg"]
    assert "Clients diverged with FedAvg" in verdict_text(runs) and "Ranked last" in verdict_text(runs)
    assert "NaN" not in report(runs).partition("<script>/**")[0]
    assert verdict_text(seeded_runs({"fedavg": [NAN]})).startswith("No method has a final score")


def test_verdict_one_diverged_seed_leaves_method_unranked() -> None:
    """FedAvg is better in two seeds, but its mean over seeds does not exist."""
    text = verdict_text(seeded_runs({"local": [0.5, 0.6, 0.7], "fedavg": [0.9, 0.8, NAN]}))
    assert text.startswith("Local training scores 60.0 %; no other method or setting has a score to compare it with.")
    assert "Ranked last, because a run diverged or was not evaluated: FedAvg." in text


def test_verdict_names_methods_with_failed_clients() -> None:
    runs = [
        run_with_scores("local", {0: 0.5, 1: 0.5}),
        run_with_scores("fedavg", {0: 0.6}, failed={1: "no disk"}, num_clients=2),
    ]
    assert "Clients failed and were excluded with FedAvg: see these runs." in verdict_text(runs)


def test_comparison_excludes_seeds_that_not_all_methods_have() -> None:
    """FedPer would look better only because it lacks the hard seed."""
    runs = [run_with_scores("local", {0: 0.9}, 0), run_with_scores("local", {0: 0.1}, 1)]
    runs.append(run_with_scores("fedper", {0: 0.8}, 0))
    group = compare_runs(runs)
    assert next(iter(group.methods)) == "Local training" and group.score("Local training") == pytest.approx(0.9)
    assert "Excluded because not all methods have the seed: local training with seed 1." in verdict_text(runs)


def test_paired_scores_need_the_same_split() -> None:
    """Client 0 has other data in the other split, so the difference of the two runs means nothing."""
    runs = [run_with_scores("local", {0: 0.9}, 0, split_seed=1), run_with_scores("fedper", {0: 0.7}, 0, split_seed=2)]
    assert compare_runs(runs).paired_scores("Local training", "FedPer") == []


def test_verdict_without_common_seed_pairs_nothing() -> None:
    runs = [run_with_scores("local", {0: 0.9, 1: 0.8}, 0), run_with_scores("fedper", {0: 0.7, 1: 0.6}, 1)]
    text = verdict_text(runs)
    assert text.startswith(
        "Local training scores highest (85.0 %), but there are not enough seeds to tell whether its lead over FedPer "
    )
    assert "No seed is common to all" in text and "of 0 seeds" not in text and "mean of 2 seeds" not in text
    assert "the two methods have no seed, or no client, in common" in text
    assert "cannot be answered" in gains.gain_answer(compare_runs(runs))[0]
    assert report(runs)


@pytest.mark.parametrize(
    ("seeds", "clause"), [(3, ": statistically significant over 3 seeds."), (1, "; there are not enough seeds to tell")]
)
def test_verdict_score_without_hard_clients_is_not_a_lead(seeds: int, clause: str) -> None:
    """FedAvg has no scores for the hard clients, so its score is higher, but it is worse on all clients it has."""
    runs = []
    for seed in range(seeds):
        runs.append(run_with_scores("local", {c: 0.9 + seed / 1000 if c < 12 else 0.1 for c in range(20)}, seed))
        runs.append(run_with_scores("fedavg", dict.fromkeys(range(12), 0.7 + seed / 200), seed, num_clients=20))
    group, text = compare_runs(runs), verdict_text(runs)
    assert group.scored[0] == "FedAvg" and group.ranking is not None
    assert group.ranking.differences[0].direction == (-1 if seeds == 3 else 0)
    assert re.match(
        r"FedAvg scores highest \(70.\d %\), but on the clients and seeds that both have, local training is "
        rf"(19.6|20.0) points higher{re.escape(clause)}",
        text,
    )
    assert f"FedAvg's score covers {12 * seeds} of {20 * seeds} clients" in text
    assert "higher on the clients and seeds that both have" in text
    assert ranking.pairwise_figure(group) is not None
    assert "Scores cover different clients" not in verdict_text(runs_with_clear_winner())


def test_verdict_says_if_equal_weights_would_change_the_ranking() -> None:
    sizes = [1000, 10, 10]
    runs = [run_with_scores("local", {0: 0.9, 1: 0.1, 2: 0.1}, test_sizes=sizes)]
    runs.append(run_with_scores("fedper", {0: 0.8, 1: 0.9, 2: 0.9}, test_sizes=sizes))
    assert "With equal weight for all clients, whatever their number of test samples, FedPer would" in verdict_text(
        runs
    )
    assert "equal weight" not in verdict_text(runs_with_clear_winner())


def test_verdict_names_the_clients_that_a_score_covers() -> None:
    """With evaluate="participants", scores cover few clients: the same ones for all methods, or different ones."""
    runs = []
    for method, base in (("local", 0.5), ("fedavg", 0.6)):
        scores = {2: base, 5: base + 0.1}
        runs.append(run_with_scores(method, scores, before=dict.fromkeys(range(8), 0.3), num_clients=8))
        runs[-1].experiment["evaluate"] = "participants"
    text = verdict_text(runs)
    assert "over the test samples of the 2 of 8 clients that have a score after the last round, as trained" in text
    assert "all test samples" not in text and "Scores cover different clients" not in text
    distribution, lines = clients.score_distribution(compare_runs(runs)), curves.curves(compare_runs(runs))
    assert distribution is not None and "median of 2 clients scores 65.0 %" in distribution.summary
    assert "of these clients; 6 clients have no score" in distribution.summary
    assert lines is not None and "each score covers the clients evaluated in that round" in lines.summary
    runs[1].records[-1]["per_client"]["accuracy_trained"] = {0: 0.5}
    assert "over the test samples of the clients that have a score after" in verdict_text(runs)
    seeds = [run_with_scores(m, {c: 0.5, 3: 0.6}, c, num_clients=8) for c in (0, 1) for m in ("local", "fedavg")]
    assert "2 of 8 clients that have a score in each seed" in verdict_text(seeds)


def test_comparison_ranks_common_model_by_received_scores() -> None:
    """FedAvg's clients score 60 % before averaging, but its common model scores 50 %, less than local training."""
    runs = [run_with_scores("local", {0: 0.55}), run_with_scores("fedavg", {0: 0.6}, ranked_by="received")]
    group = compare_runs(runs)
    assert list(group.methods) == ["Local training", "FedAvg"]
    assert group.score("FedAvg") == pytest.approx(0.5) and group.score("FedAvg", "trained") == pytest.approx(0.6)
    assert [one.gain for one in gains_over_local(group)["FedAvg"].values()] == [pytest.approx(-0.05)]
    assert "after the last round, FedAvg as received, the others as trained." in verdict_text(runs)
    table = score_table(group)
    shown = {str(column.header): list(column.cells) for column in table.columns}
    assert (shown["trained"], shown["received"]) == (["55.0*", "60.0 "], ["45.0 ", "50.0*"])
    assert shown["worst 10 %"] == ["55.0", "50.0"]


def test_baseline_is_local_training_in_every_round() -> None:
    sampled = run_with_scores("local", {0: 0.9}, fields={"sampled": True})
    both = compare_runs([sampled, run_with_scores("local", {0: 0.5}, fields={"sampled": False})])
    assert both.baseline is not None and both.score(both.baseline) == 0.5
    assert compare_runs([sampled]).baseline == "Local training"
    fedper, local = run_with_scores("fedper", {0: 0.6}), run_with_scores("local", {0: 0.5})
    assert is_local_baseline(local, fedper) and not is_local_baseline(sampled, fedper)


@pytest.mark.parametrize("initial_weights", ["fixed", "seed"])
def test_verdict_and_table_say_if_seeds_share_initial_weights(initial_weights: str) -> None:
    runs = [
        run_with_scores(method, {0: 0.5 + 0.1 * seed}, seed, initial_weights=initial_weights)
        for method in ("local", "fedper")
        for seed in (0, 1, 2)
    ]
    for text in (verdict_text(runs), str(score_table(compare_runs(runs)).caption)):
        assert ("All seeds start from the same initial weights" in text) == (initial_weights == "fixed")
    assert "initial weights" not in verdict_text([run for run in runs if run.experiment["seed"] == 0])


def test_figures_of_complete_scores_cover_all_clients() -> None:
    group = compare_runs(runs_with_clear_winner())
    distribution, lines = clients.score_distribution(group), curves.curves(group)
    assert distribution is not None and "90 % of all clients)" in distribution.summary
    assert lines is not None and "last score" not in lines.summary


def test_verdict_of_simulated_run_counts_evaluated_clients() -> None:
    fed = ft.load("digits", clients=6, seed=0)
    method, network = ft.methods.FedPer(), ft.network("mlp", fed)
    for evaluate, count in (("participants", 2), (4, 4)):
        run = ft.simulate(method, network, fed, rounds=2, participation=0.3, evaluate=evaluate, batch_size=64)
        assert f"the {count} of 6 clients that have a score" in verdict_text([run])


def test_report_uses_singular_for_one() -> None:
    runs = [run_with_scores("local", {0: 0.5}, rounds=1), run_with_scores("fedavg", {0: 0.6}, rounds=1)]
    page = build_page(runs)
    assert page.subtitle.startswith("1 client · 1 round · ")
    sections = page.chapters[0].sections
    sentences = [s for section in sections for s in [*section.answer, *(figure.summary for figure in section.figures)]]
    assert not re.search(r"\b1 (clients|rounds|pairs|samples|do|gain|lose|are)\b", " ".join(sentences))


# the clients' gains


def test_client_gains_count_only_beyond_uncertainty_of_test_samples() -> None:
    """The same gain of ten points is clear on 1,000 test samples and not on ten."""
    sizes = [1000, 10, 1000, 10]
    runs = [run_with_scores("local", dict.fromkeys(range(4), 0.5), test_sizes=sizes)]
    runs.append(run_with_scores("fedper", {0: 0.6, 1: 0.6, 2: 0.4, 3: 0.4}, test_sizes=sizes))
    found = client_gains(compare_runs(runs), "FedPer", "Local training")
    assert [one.direction for one in found.values()] == [1, 0, -1, 0]
    assert [one.gain for one in found.values()] == pytest.approx([0.1, 0.1, -0.1, -0.1])
    counts = "1 of 4 clients gains over local training, 1 loses, and 2 are within the uncertainty of their test samples"
    assert counts in gain_sentences(compare_runs(runs))[0]


@pytest.mark.parametrize(("split_seed", "count"), [(None, 12), (7, 4)])
def test_client_gains_of_the_same_split_are_averaged_over_seeds(split_seed: int | None, count: int) -> None:
    """Three seeds with different splits have twelve clients; with one split they have four, averaged over seeds. Seeds
    do not make a difference of three points on 1,000 test samples clear, because they test on the same samples."""
    runs = [
        run_with_scores(method, dict.fromkeys(range(4), base + seed / 10), seed, split_seed=split_seed)
        for seed in range(3)
        for method, base in (("local", 0.5), ("fedper", 0.53))
    ]
    found = client_gains(compare_runs(runs), "FedPer", "Local training")
    assert len(found) == count and all(one.gain == pytest.approx(0.03) for one in found.values())
    assert not any(one.direction for one in found.values())


# groups of comparable runs


def test_labels_equal_after_truncation_are_numbered() -> None:
    """Settings that differ only beyond the end of a truncated label stay separate."""
    long = "a" * 70

    def make_run(rho: float, score: float) -> ft.Run:
        return run_with_scores("fedapa", {0: score, 1: score}, fields={"kind": f"{long}{rho}"})

    runs = [make_run(rho, rho) for rho in (0.3, 0.6, 0.9)]
    found = list(compare_runs(runs).methods)
    assert len(set(found)) == 3 and all(label.startswith("FedAPA kind=aaa") for label in found)
    assert [compare_runs(runs).score(label) for label in found] == pytest.approx([0.9, 0.6, 0.3])
    assert "has two runs with seed 0" in error_message(lambda: make_comparisons([*runs, make_run(0.3, 1.0)]))
    assert all(label in report(runs) for label in found)


def test_different_experiments_get_separate_chapters_and_no_common_table() -> None:
    runs = runs_with_clear_winner()
    runs += [replace(run, experiment=run.experiment | {"batch_size": 8}) for run in runs_with_clear_winner()]
    page = build_page(runs)
    assert [chapter.title for chapter in page.chapters] == ["batch_size = none", "batch_size = 8"]
    found = re.findall(r'\sid="([^"]+)"', render_page(page))
    assert len(found) == len(set(found))
    message = error_message(lambda: compare_runs(runs))
    assert "differ in more than method and seed: (batch_size = none) and (batch_size = 8)" in message


def test_settings_of_one_method_are_separate_rows() -> None:
    def make_run(rho: float, score: float) -> ft.Run:
        return run_with_scores("fedapa", {0: score, 1: score}, fields={"rho": rho, "lr": 0.1})

    runs = [make_run(rho, rho) for rho in (0.3, 0.6)]
    assert list(compare_runs(runs).methods) == ["FedAPA rho=0.6", "FedAPA rho=0.3"]
    assert "so the best score is optimistic" in verdict_text(runs)
    assert "optimistic" not in verdict_text(runs_with_clear_winner())
    assert "has two runs with seed 0" in error_message(lambda: make_comparisons([runs[0], make_run(0.3, 1.0)]))


def test_c_index_is_shown_as_a_number_with_an_interval_up_to_1() -> None:
    runs = seeded_runs({"local": [0.7, 0.72, 0.71], "ditto": [0.9, 0.99, 1.0]}, score="c_index")
    text, group = verdict_text(runs), compare_runs(runs)
    assert "Ditto scores highest (0.963)" in text and "Scores are C-index over" in text
    assert (group.interval("Ditto") or (0, 0))[1] == 1.0
