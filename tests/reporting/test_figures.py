"""Figures draw the recorded values, and their summaries state them."""

import numpy as np
import pytest
from scipy.stats import t as student_t

import fedtailor as ft
from fedtailor.analysis.run_summary import compare_runs, make_comparisons
from fedtailor.reporting.figures import clients, cost, curves, data_split, gains, ranking
from fedtailor.reporting.figures.drawing import space_out
from fedtailor.reporting.report import report
from support.example_runs import run_with_scores, runs_with_clear_winner


def test_ranking_draws_weighted_scores() -> None:
    group = compare_runs(runs_with_clear_winner(seeds=3))
    figure = ranking.ranking(group)
    (drawn,) = [trace for trace in figure.data if trace.get("name") == "trained"]
    for label, x in zip(drawn["y"], drawn["x"], strict=True):
        ends = [run.summarize("trained") for run in runs_with_clear_winner(seeds=3) if run.method_title == label]
        assert x == pytest.approx(100 * np.mean([end["weighted"] for end in ends if end]), abs=1e-2)
    assert "FedPer ranks first with" in figure.summary and "local training ranks number 2 of 3" in figure.summary


def test_ranking_error_bars_are_intervals_over_seeds_at_both_moments() -> None:
    scores = {"local": [0.50, 0.54, 0.49], "fedper": [0.70, 0.66, 0.71]}
    group = compare_runs(
        [run_with_scores(m, {0: score, 1: score}, seed) for m, own in scores.items() for seed, score in enumerate(own)]
    )
    by_label = {"Local training": scores["local"], "FedPer": scores["fedper"]}
    figure = ranking.ranking(group)
    for moment, less in (("trained", 0.0), ("received", 0.1)):
        (drawn,) = [trace for trace in figure.data if trace.get("name") == moment]
        bars = drawn["error_x"]
        for place, label in enumerate(drawn["y"]):
            own = 100 * (np.array(by_label[label]) - less)
            low, high = student_t.interval(0.95, 2, own.mean(), own.std(ddof=1) / 3**0.5)
            assert drawn["x"][place] + bars["array"][place] == pytest.approx(high, abs=0.01)
            assert drawn["x"][place] - bars["arrayminus"][place] == pytest.approx(low, abs=0.01)
            assert figure.layout["xaxis"]["range"][0] < low < high < figure.layout["xaxis"]["range"][1]
    assert "95 % intervals of the mean over 3 seeds" in figure.summary


def test_interval_of_accuracy_is_clipped_to_one() -> None:
    """The standard deviation is 0.045, and the 97.5 % quantile of t with two degrees of freedom is 4.303."""
    runs = [run_with_scores("local", {0: 0.90 + 0.045 * seed}, seed) for seed in range(3)]
    ends = compare_runs(runs).interval("Local training")
    assert ends is not None and ends[0] == pytest.approx(0.945 - 4.303 * 0.045 / 3**0.5, rel=1e-3) and ends[1] == 1.0


@pytest.mark.parametrize("seeds", [1, 2])
def test_ranking_with_fewer_than_three_seeds_has_no_interval(seeds: int) -> None:
    group = compare_runs(runs_with_clear_winner(seeds))
    figure, leads = ranking.ranking(group), ranking.pairwise_figure(group)
    assert "fewer than 3 seeds, so there are no intervals over seeds" in figure.summary
    assert leads is not None and "There are not enough seeds to tell whether the lead of FedPer" in leads.summary
    assert not any("error_x" in trace for trace in [*figure.data, *leads.data])


def test_pairwise_figure_draws_leads_with_intervals_over_seeds() -> None:
    """The lead over local training is 0.1, 0.2, and 0.3; see the tests of the statistics for its interval."""
    scores = {"fedper": [0.80, 0.75, 0.90], "local": [0.70, 0.55, 0.60], "ditto": [0.40, 0.36, 0.51]}
    runs = [run_with_scores(m, {0: own[s], 1: own[s]}, s) for m, own in scores.items() for s in range(3)]
    figure = ranking.pairwise_figure(compare_runs(runs))
    assert figure is not None and "1 of the 2 other methods is significantly worse than FedPer" in figure.summary
    clear, unclear = figure.data
    assert clear["y"] == ["Ditto"] and unclear["y"] == ["Local training"]
    assert unclear["x"] == pytest.approx([20]) and unclear["error_x"]["array"] == pytest.approx([24.84], abs=0.01)
    rows = {row[0]: row[1:] for row in figure.table.rows}
    assert rows["Local training"] == ["+20.0", "−4.8", "+44.8", "0.074", "0.074", "3 of 3", "+20.0", "6 of 6", 0]


def test_curves_match_records_over_rounds_bytes_and_seconds() -> None:
    start = dict.fromkeys(range(3), 0.2)
    runs = [run_with_scores("local", dict.fromkeys(range(3), 0.5), before=start, rounds=4)]
    runs.append(run_with_scores("fedper", dict.fromkeys(range(3), 0.8), before=start, rounds=4))
    figure = curves.curves(compare_runs(runs))
    assert figure is not None
    place = [trace["name"] for trace in figure.data].index("FedPer")
    assert figure.data[place]["y"] == [20, 20, 20, 80]
    over, moments = figure.choices
    assert [option.traces["x"][place] for option in over.options] == [[1, 2, 3, 4], [3, 6, 9, 12], [1.5, 3, 4.5, 6]]
    assert moments.options[1].traces["y"][place] == pytest.approx([10, 10, 10, 70])
    changing = (
        "FedPer was still changing when training ended: from 20.0 % in round 3 to 80.0 % in round 4 of 4 (trained)"
    )
    assert changing in figure.summary


def test_curves_have_bands_from_lowest_to_highest_seed() -> None:
    runs = [run_with_scores("fedper", {0: end}, seed, before={0: 0.2}) for seed, end in enumerate((0.7, 0.8, 0.9))]
    figure = curves.curves(compare_runs(runs))
    assert figure is not None
    band, line = figure.data
    assert band["fill"] == "toself" and band["x"] == [1, 2, 2, 1] and band["y"] == [20, 90, 70, 20]
    assert line["y"] == [20, 80]


def test_curves_show_each_method_as_ranked_first() -> None:
    runs = [
        run_with_scores("local", {0: 0.5}, before={0: 0.3}),
        run_with_scores("fedavg", {0: 0.6}, before={0: 0.3}, ranked_by="received"),
    ]
    figure = curves.curves(compare_runs(runs))
    assert figure is not None
    ends = {trace["name"]: trace["y"][-1] for trace in figure.data}
    assert ends == {"Local training": 50, "FedAvg": 50}
    assert [option.name.split()[0] for option in figure.choices[1].options] == ["as", "trained", "received"]


def test_curves_with_partial_participation_end_at_final_score() -> None:
    """Absent clients count with their last trained scores, in curves as in the summary of the run."""
    fed = ft.load("digits", clients=6, seed=0)
    run = ft.simulate(ft.methods.FedPer(), ft.network("mlp", fed), fed, rounds=5, participation=0.4, batch_size=64)
    (group,) = make_comparisons([run])
    for moment in ("received", "trained"):
        numbers = run.summarize(moment)
        assert numbers is not None
        assert curves.mean_curve(group, "FedPer", moment)[1][-1] == pytest.approx(numbers["weighted"])
        assert group.score("FedPer", moment) == pytest.approx(numbers["weighted"])


@pytest.mark.parametrize(
    ("by_round", "words"),
    [([0.2, 0.3, float("nan")], "diverged after round 2 of 3, where it scored 30.0 %"),
     ([float("nan")] * 3, "diverged: its score is not finite in any round")],
    ids=["after two rounds", "in all rounds"],
)  # fmt: skip
def test_curves_summary_of_diverged_run_states_divergence(by_round: list[float], words: str) -> None:
    run = run_with_scores("fedavg", {0: 0.5, 1: 0.5}, rounds=3)
    for record, score in zip(run.records, by_round, strict=True):
        record["per_client"] |= {f"accuracy_{m}": {0: score, 1: score} for m in ("trained", "received")}
    summary = curves.curves_summary(compare_runs([run]))
    assert words in summary and "final score" not in summary and "not evaluated" not in summary


def test_gains_of_diverged_clients_count_as_losses() -> None:
    nan = float("nan")
    runs = [
        run_with_scores("local", {0: 0.5, 1: 0.5, 2: 0.5, 3: nan, 4: 0.5}),
        run_with_scores("fedavg", {0: 0.6, 1: nan, 2: nan, 3: 0.9, 4: 0.4}),
    ]
    sentences = gains.gain_answer(compare_runs(runs))  # client 3 is left out, because its local training diverged
    expected = "1 of 4 clients gains over local training, 3 lose (2 diverged), and 0 are within"
    assert expected in sentences[0] and sentences[0].endswith("the median client diverged.")
    assert sentences[2] == "Client 0 gains the most (10.0 points); client 4 loses the most (10.0 points)."
    bars = gains.gain_fractions(compare_runs(runs))
    assert bars is not None and [trace["x"] for trace in bars.data] == [[-75], [25]]
    assert bars.table.rows[0][1:6] == [4, 1, 0, 3, 2]
    dots = gains.gain_by_size(compare_runs(runs))
    assert dots is not None and sorted(dots.data[0]["text"]) == ["client 0", "client 4"]
    assert "2 clients diverged and are not drawn" in dots.summary
    assert "NaN" not in report(runs).partition("<script>/**")[0]


def test_gain_sentences_count_and_name_clients() -> None:
    runs = [run_with_scores("local", {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5}, names=["a", "b", "c", "7"])]
    runs.append(run_with_scores("fedavg", {0: 0.9, 1: 0.6, 2: 0.5, 3: 0.2}, names=["a", "b", "c", "7"]))
    sentences = gains.gain_answer(compare_runs(runs))
    counts = "2 of 4 clients gain over local training, 1 loses, and 1 is within the uncertainty of its test samples"
    assert f"{counts}; the median gain is +5.0 points." in sentences[0]
    assert sentences[2] == "a gains the most (40.0 points); client 7 loses the most (30.0 points)."
    figure = gains.gain_by_size(compare_runs(runs))
    assert figure is not None
    drawn = dict(zip(figure.data[0]["text"], zip(figure.data[0]["x"], figure.data[0]["y"], strict=True), strict=True))
    assert drawn["a"] == (10, pytest.approx(40)) and drawn["client 7"] == (40, pytest.approx(-30))
    halves = (
        "+25.0 points for the half of the clients with fewer samples and −15.0 points for the half with more samples"
    )
    assert halves in figure.summary
    bars = gains.gain_fractions(compare_runs(runs))
    assert bars is not None and [trace["x"] for trace in bars.data] == [[-25], [50]]


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (
            {"ditto": 0.4, "fedper": 0.3},
            "No client gains with any method; the fraction that lose is largest with Ditto and",
        ),
        ({"ditto": 0.6, "fedper": 0.5}, "is largest with Ditto (100 %); no client loses with any method (beyond"),
        ({"ditto": 0.5, "fedper": 0.5}, "No client gains with any method; none loses (beyond the uncertainty"),
        ({"ditto": 0.4}, "No client gains with Ditto; the fraction that lose is 100 % (beyond"),
        ({"ditto": 0.6, "fedper": 0.6}, "is largest with Ditto and FedPer (100 %)"),
    ],
    ids=["no gain", "no loss", "neither", "one method", "equal"],
)
def test_gain_fractions_without_gains_or_losses_name_no_method(scores: dict[str, float], words: str) -> None:
    runs = [
        run_with_scores("local", {0: 0.5, 1: 0.5}),
        *(run_with_scores(m, {0: score, 1: score}) for m, score in scores.items()),
    ]
    bars = gains.gain_fractions(compare_runs(runs))
    assert bars is not None and words in bars.summary and " 0 %" not in bars.summary


def test_costs_are_totals_per_run_and_equal_ones_name_no_single_method() -> None:
    group = compare_runs(runs_with_clear_winner(seeds=2))
    assert cost.total_cost(group, "FedPer") == {"up": 2e6, "down": 4e6, "bytes": 6e6, "seconds": 3.0}
    assert cost.bytes_to_match_local(group, "FedPer") == pytest.approx(3e6)  # already in the first round
    sentence = cost.cost_sentences(group)[0]
    assert sentence.startswith(
        "FedPer transfers 6 MB in total (2 MB up, 4 MB down), 150 kB per selected client and round"
    )
    figure, times = cost.score_by_bytes(group), cost.training_time(group)
    assert figure is not None and {trace["name"] for trace in figure.data} == {"FedPer", "Ditto"}
    assert "FedPer ranks first and no other method transfers less (6 MB)" in figure.summary
    assert times is not None and "times as long" not in times.summary and "hardly longer than" in times.summary


def test_bytes_per_client_include_failed_clients() -> None:
    """Two clients answered and one failed: all three were selected and received a message."""
    run = run_with_scores("fedavg", {0: 0.5, 1: 0.5}, failed={2: "its loss is not finite"}, num_clients=3)
    assert "1 MB per selected client and round" in cost.cost_sentences(compare_runs([run]))[0]


def test_bytes_figure_has_one_dot_per_method() -> None:
    figure = cost.score_by_bytes(compare_runs(runs_with_clear_winner()))
    assert figure is not None and sorted(trace["name"] for trace in figure.data) == ["Ditto", "FedPer"]
    assert not any("●" in annotation["text"] for annotation in figure.layout["annotations"])


def test_bytes_figure_labels_do_not_overlap() -> None:
    runs = [
        run_with_scores("local", dict.fromkeys(range(4), 0.50)),
        run_with_scores("ditto", dict.fromkeys(range(4), 0.502)),
    ]
    runs.append(run_with_scores("fedper", dict.fromkeys(range(4), 0.9)))
    figure = cost.score_by_bytes(compare_runs(runs))
    assert figure is not None
    notes = {note["text"]: note for note in figure.layout["annotations"]}
    (nothing,) = [note for text, note in notes.items() if "transfers no data" in text]
    assert (nothing["x"], nothing["xanchor"]) == (0, "left")  # both points are on the right
    places = sorted(note["y"] for note in notes.values() if note.get("yref") != "paper")
    assert np.diff(places).min() >= 0.999 * (90 - 50) / 330 * 16


@pytest.mark.parametrize(("clients", "labeled"), [(20, True), (90, False)])
def test_split_figure_labels_clients_unless_names_would_overlap(clients: int, labeled: bool) -> None:
    figure = data_split.split_figure(compare_runs(runs_with_clear_winner(clients=clients)))
    assert figure is not None and figure.layout["xaxis"]["showticklabels"] == labeled
    assert figure.data[0]["colorbar"]["title"]["side"] == "right"  # a title above the bar would be cut off


def test_split_figure_draws_percentages_in_one_column_per_client() -> None:
    figure = data_split.split_figure(compare_runs([run_with_scores("local", {0: 0.5, 1: 0.5})]))
    assert figure is not None
    columns = dict(zip(figure.data[0]["x"], zip(*figure.data[0]["z"], strict=True), strict=True))
    assert columns["client 1"] == (pytest.approx(66.7), pytest.approx(33.3), 0)
    assert "median client has 2 of 3 classes" in figure.summary
    assert "between 10 and 20 training samples" in figure.summary
    names = [f"{'ward ' * 20}{number}" for number in range(2)]  # equal after truncation
    figure = data_split.split_figure(compare_runs([run_with_scores("local", {0: 0.5, 1: 0.5}, names=names)]))
    assert figure is not None and len(set(figure.data[0]["x"])) == 2


def test_split_figure_names_the_classes() -> None:
    arrays = (np.eye(4, dtype=np.float32), np.array(["ill", "well"] * 2))
    fed = ft.Federation.from_arrays([(*arrays, *arrays)] * 2)
    run = ft.simulate(ft.methods.Local(), ft.network("logistic", fed), fed, rounds=1)
    assert data_split.split_figure(compare_runs([run])).data[0]["y"] == ["ill", "well"]


def test_failures_figure_exists_only_with_failures() -> None:
    assert clients.failures(compare_runs(runs_with_clear_winner())) is None
    figure = clients.failures(
        compare_runs([run_with_scores("fedavg", {0: 0.5, 1: 0.5}, failed={1: "its loss is not finite"})])
    )
    assert figure is not None and "Clients failed 2 times with FedAvg;" in figure.summary
    assert figure.table.rows[0] == ["FedAvg", 0, "1", 1, "failed", "its loss is not finite"]


def test_space_out_keeps_order_and_minimum_gap() -> None:
    random = np.random.default_rng(0)
    values = random.random(12).tolist()
    moved = space_out(values, 0.2)
    assert np.diff(sorted(moved)).min() == pytest.approx(0.2)
    assert np.argsort(moved).tolist() == np.argsort(values).tolist()
    assert space_out([0.0, 5.0], 1.0) == [0.0, 5.0]
