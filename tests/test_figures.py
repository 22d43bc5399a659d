"""Figures show the numbers of the record, and their sentences say them."""

import numpy as np
import pytest
from scipy.stats import t as student_t

import fedtailor as ft
from fedtailor.see import clients, cost, curves, gains, ranking, split
from fedtailor.see.digest import groups
from fedtailor.see.drawing import apart
from fedtailor.see.report import report
from seen import clear, made, one


def test_the_ranking_draws_the_scores() -> None:
    group = one(clear(seeds=3))
    figure = ranking.ranking(group)
    (drawn,) = [trace for trace in figure.data if trace.get("name") == "trained"]
    for label, x in zip(drawn["y"], drawn["x"], strict=True):
        ends = [run.numbers("trained") for run in clear(seeds=3) if run.method == label]
        assert x == pytest.approx(100 * np.mean([end["weighted"] for end in ends if end]), abs=1e-2)
    assert "fedper ends with" in figure.says and "training alone is number" in figure.says


def test_bars_are_intervals_over_seeds_at_both_moments() -> None:
    seeds = {"local": [0.50, 0.54, 0.49], "fedper": [0.70, 0.66, 0.71]}
    group = one([made(m, {0: score, 1: score}, seed) for m, own in seeds.items() for seed, score in enumerate(own)])
    figure = ranking.ranking(group)
    for moment, less in (("trained", 0.0), ("received", 0.1)):
        (drawn,) = [trace for trace in figure.data if trace.get("name") == moment]
        bars = drawn["error_x"]
        for place, label in enumerate(drawn["y"]):
            own = 100 * (np.array(seeds[label]) - less)
            low, high = student_t.interval(0.95, 2, own.mean(), own.std(ddof=1) / 3**0.5)
            assert drawn["x"][place] + bars["array"][place] == pytest.approx(high, abs=0.01)
            assert drawn["x"][place] - bars["arrayminus"][place] == pytest.approx(low, abs=0.01)
            assert figure.layout["xaxis"]["range"][0] < low < high < figure.layout["xaxis"]["range"][1]
    assert "95 % intervals of the mean over 3 seeds" in figure.says


def test_a_share_has_no_interval_beyond_all() -> None:
    group = one([made("local", {0: 0.90 + 0.09 * seed}, seed) for seed in range(2)])
    ends = group.interval("local")
    assert ends is not None and ends[0] == pytest.approx(0.945 - 12.706 * 0.045, rel=1e-3) and ends[1] == 1.0


def test_one_seed_has_no_interval_and_says_so() -> None:
    figure = ranking.ranking(one(clear()))
    assert "one seed, so there is no interval over seeds" in figure.says
    assert not any("error_x" in trace for trace in figure.data)


def test_curves_are_the_record_over_rounds_bytes_and_seconds() -> None:
    start = dict.fromkeys(range(3), 0.2)
    runs = [made("local", dict.fromkeys(range(3), 0.5), before=start, rounds=4)]
    runs.append(made("fedper", dict.fromkeys(range(3), 0.8), before=start, rounds=4))
    figure = curves.curves(one(runs))
    assert figure is not None
    place = [trace["name"] for trace in figure.data].index("fedper")
    assert figure.data[place]["y"] == [20, 20, 20, 80]
    over, moments = figure.choices
    assert [option.traces["x"][place] for option in over.options] == [[1, 2, 3, 4], [3, 6, 9, 12], [1.5, 3, 4.5, 6]]
    assert moments.options[1].traces["y"][place] == pytest.approx([10, 10, 10, 70])
    assert "it ends with 80.0 % (trained), and had 20.0 % when it was evaluated before, in round 3 of 4" in figure.says


def test_curves_end_where_the_run_ends_when_few_take_part() -> None:
    """Clients that are absent count as they last trained, in the curve as in the run's own numbers."""
    fed = ft.load("digits", clients=6, seed=0)
    run = ft.simulate(ft.methods.FedPer(), ft.network("mlp", fed), fed, rounds=5, participation=0.4, batch_size=64)
    (group,) = groups([run])
    for moment in ("received", "trained"):
        numbers = run.numbers(moment)
        assert numbers is not None
        assert curves.mean_curve(group, "fedper", moment)[1][-1] == pytest.approx(numbers["weighted"])
        assert group.score("fedper", moment) == pytest.approx(numbers["weighted"])


@pytest.mark.parametrize(
    ("by_round", "words"),
    [([0.2, 0.3, float("nan")], "diverged after round 2 of 3, where it had 30.0 %"),
     ([float("nan")] * 3, "diverged: in no round is its score a number")],
    ids=["later", "at once"],
)  # fmt: skip
def test_a_run_that_diverged_does_not_end_where_it_was_last_seen(by_round: list[float], words: str) -> None:
    run = made("fedavg", {0: 0.5, 1: 0.5}, rounds=3)
    for record, score in zip(run.records, by_round, strict=True):
        record["per_client"] |= {f"accuracy_{m}": {0: score, 1: score} for m in ("trained", "received")}
    said = curves._says(one([run]))
    assert words in said and "ends with" not in said and "not evaluated" not in said


def test_who_diverged_lost_and_who_diverged_alone_is_unknown() -> None:
    nan = float("nan")
    runs = [
        made("local", {0: 0.5, 1: 0.5, 2: 0.5, 3: nan, 4: 0.5}),
        made("fedavg", {0: 0.6, 1: nan, 2: nan, 3: 0.9, 4: 0.4}),
    ]
    said = gains.who_gains(one(runs))
    assert "1 of 4 clients does better than alone, 3 do worse (2 diverged) and 0 as well" in said[0]
    assert said[1] == "Client 0 gains most (10.0 points); client 4 loses most (10.0 points)."
    bars = gains.shares(one(runs))
    assert bars is not None and [trace["x"] for trace in bars.data] == [[-75], [25]]
    assert bars.table.rows[0][1:6] == [4, 1, 0, 3, 2]
    dots = gains.gain_by_size(one(runs))
    assert dots is not None and sorted(dots.data[0]["text"]) == ["client 0", "client 4"]
    assert "2 diverged and are not drawn" in dots.says
    assert "NaN" not in report(runs).partition("<script>/**")[0]


def test_gains_are_counted_and_named() -> None:
    runs = [made("local", {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5}, names=["a", "b", "c", "7"])]
    runs.append(made("fedavg", {0: 0.9, 1: 0.6, 2: 0.5, 3: 0.2}, names=["a", "b", "c", "7"]))
    said = gains.who_gains(one(runs))
    assert (
        "2 of 4 clients do better than alone, 1 does worse and 1 as well; the median client gains +5.0 points"
        in said[0]
    )
    assert said[1] == "a gains most (40.0 points); client 7 loses most (30.0 points)."  # names are as they are
    figure = gains.gain_by_size(one(runs))
    assert figure is not None
    drawn = dict(zip(figure.data[0]["text"], zip(figure.data[0]["x"], figure.data[0]["y"], strict=True), strict=True))
    assert drawn["a"] == (10, pytest.approx(40)) and drawn["client 7"] == (40, pytest.approx(-30))
    assert "fewer samples gains +25.0 points on average, the half with more −15.0 points" in figure.says
    bars = gains.shares(one(runs))
    assert bars is not None and [trace["x"] for trace in bars.data] == [[-25], [50]]


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ({"ditto": 0.4, "fedper": 0.3}, "No client does better than alone with any method; ditto and fedper let the"),
        ({"ditto": 0.6, "fedper": 0.5}, "alone, 100 %; none does worse with any method."),
        ({"ditto": 0.5, "fedper": 0.5}, "No client does better than alone with any method; none does worse."),
        ({"ditto": 0.4}, "No client does better than alone with ditto."),
    ],
    ids=["no gain", "no loss", "neither", "one"],
)
def test_nobody_is_no_largest_share(scores: dict[str, float], words: str) -> None:
    runs = [made("local", {0: 0.5, 1: 0.5}), *(made(m, {0: score, 1: score}) for m, score in scores.items())]
    bars = gains.shares(one(runs))
    assert bars is not None and words in bars.says and " 0 %" not in bars.says


def test_costs_are_those_of_a_run() -> None:
    group = one(clear(seeds=2))
    assert cost.totals(group, "fedper") == {"up": 2e6, "down": 4e6, "bytes": 6e6, "seconds": 3.0}
    assert cost.as_good_as_alone(group, "fedper") == pytest.approx(3e6)  # from its first round on
    said = cost.what_it_cost(group)[0]
    assert said.startswith("fedper takes 6 MB in all (2 MB up, 4 MB down), 150 kB for every client and round")
    figure = cost.score_by_bytes(group)
    assert figure is not None and {trace["name"] for trace in figure.data} == {"fedper", "ditto"}


def test_who_fails_was_sent_something_too() -> None:
    """Bytes for every client and round are over all that were asked: two that answered and one that failed."""
    run = made("fedavg", {0: 0.5, 1: 0.5}, failed={2: "its loss is no number"}, people=3)
    assert "500 kB for every client and round in which it is asked" not in cost.what_it_cost(one([run]))[0]
    assert "1 MB for every client and round in which it is asked" in cost.what_it_cost(one([run]))[0]


def test_equals_are_no_winners() -> None:
    """Methods that cost the same: none is cheapest, and none takes 1.0 times as long as another."""
    group = one(clear())
    figure, times = cost.score_by_bytes(group), cost.seconds(group)
    assert figure is not None and "fedper is the best and none sends less (6 MB)" in figure.says
    assert times is not None and "times as long" not in times.says and "hardly longer than any other" in times.says
    alike = one([made("local", {0: 0.5}), made("ditto", {0: 0.6}), made("fedper", {0: 0.6})])
    bars = gains.shares(alike)
    assert bars is not None and "ditto and fedper let the largest share of clients do better" in bars.says


def test_a_note_of_who_sends_nothing_covers_no_name() -> None:
    runs = [made("local", dict.fromkeys(range(4), 0.50)), made("ditto", dict.fromkeys(range(4), 0.502))]
    runs.append(made("fedper", dict.fromkeys(range(4), 0.9)))
    figure = cost.score_by_bytes(one(runs))
    assert figure is not None
    notes = {note["text"]: note for note in figure.layout["annotations"]}
    (nothing,) = [note for text, note in notes.items() if "sends nothing" in text]
    assert (nothing["x"], nothing["xanchor"]) == (0, "left")  # both dots are on the right
    places = sorted(note["y"] for note in notes.values() if note.get("yref") != "paper")
    assert np.diff(places).min() >= 0.999 * (90 - 50) / 330 * 16


def test_clients_with_long_names_alike_have_a_column_each() -> None:
    names = [f"{'ward ' * 20}{number}" for number in range(2)]
    figure = split.split(one([made("local", {0: 0.5, 1: 0.5}, names=names)]))
    assert figure is not None and len(set(figure.data[0]["x"])) == 2


def test_the_split_is_drawn_in_shares() -> None:
    figure = split.split(one([made("local", {0: 0.5, 1: 0.5})]))
    assert figure is not None
    columns = dict(zip(figure.data[0]["x"], zip(*figure.data[0]["z"], strict=True), strict=True))
    assert columns["client 1"] == (pytest.approx(66.7), pytest.approx(33.3), 0)
    assert "median client has 2 of 3 classes" in figure.says and "from 10 to 20 training samples" in figure.says


def test_failures_are_shown_only_where_there_are_some() -> None:
    assert clients.absent(one(clear())) is None
    figure = clients.absent(one([made("fedavg", {0: 0.5, 1: 0.5}, failed={1: "its loss is no number"})]))
    assert figure is not None and "Clients failed 2 times" in figure.says
    assert figure.table.rows[0] == ["fedavg", 0, "1", 1, "failed", "its loss is no number"]


def test_labels_move_apart_and_keep_their_order() -> None:
    random = np.random.default_rng(0)
    values = random.random(12).tolist()
    moved = apart(values, 0.2)
    assert np.diff(sorted(moved)).min() == pytest.approx(0.2)
    assert np.argsort(moved).tolist() == np.argsort(values).tolist()
    assert apart([0.0, 5.0], 1.0) == [0.0, 5.0]
