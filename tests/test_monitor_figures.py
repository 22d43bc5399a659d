"""Figures of what methods record of themselves: the sentence says what the numbers say."""

import json
from typing import Any

import numpy as np
import pytest

from fedtailor.scale import Scale
from fedtailor.see.figure import Figure
from fedtailor.see.monitors import monitors
from fedtailor.see.neighbours import neighbours, order
from seen import made_run

FOUR = [{0: 0.5, 1: 0.6, 2: 0.7, 3: 0.8}] * 2
# two pairs that learn from each other alone: 0 with 2, 1 with 3
PAIRED = [[0.6, 0.0, 0.4, 0.0], [0.0, 0.7, 0.0, 0.3], [0.2, 0.0, 0.8, 0.0], [0.0, 0.1, 0.0, 0.9]]
EVEN = [[0.25] * 4] * 4


def only(figures: list[Figure], key: str) -> Figure:
    (found,) = [figure for figure in figures if figure.key == key]
    return found


def test_who_learns_from_whom_is_said_and_drawn_side_by_side() -> None:
    classes = [[9, 0], [0, 9], [9, 0], [0, 9]]
    run = made_run("fedapa", FOUR, monitor=[{"weights": EVEN}, {"weights": PAIRED}], classes=classes)
    figure = only(neighbours([run]), "neighbours-fedapa")
    # others' shares are 0.4, 0.3, 0.2, 0.1
    assert "take 25 % of what they get from others" in figure.says
    assert "most of all client 0 from client 2 (40.0 %)" in figure.says
    places = list(figure.data[0]["x"])
    assert abs(places.index("client 0") - places.index("client 2")) == 1
    assert abs(places.index("client 1") - places.index("client 3")) == 1
    assert [frame["name"] for frame in figure.frames] == ["1", "2"]
    zero, two = places.index("client 0"), places.index("client 2")
    assert figure.data[0]["z"][zero][two] == 0.4 and figure.data[0]["z"][zero][zero] is None
    assert figure.frames[0]["data"][0]["z"][zero][two] == 0.25
    assert list(figure.table.rows[0]) == ["client 0", "client 2", "40.0 %"]


def test_weights_are_shares_whatever_they_sum_to() -> None:
    doubled = [[2 * weight for weight in row] for row in PAIRED]
    figures = [neighbours([made_run("fedapa", FOUR, monitor=[{"weights": w}] * 2)])[0] for w in (PAIRED, doubled)]
    assert figures[0].data[0]["z"] == figures[1].data[0]["z"]


def test_many_clients_are_drawn_in_groups_of_their_kind() -> None:
    count = 300
    kinds = np.arange(count) % 2
    weights = (kinds[:, None] == kinds[None]) / (count / 2)
    run = made_run("fedapa", [dict.fromkeys(range(count), 0.5)], monitor=[{"weights": weights.tolist()}])
    figure = neighbours([run])[0]
    cells = np.array(figure.data[0]["z"], dtype=float)
    assert len(cells) <= 120
    inside = cells[cells > 0]
    assert inside == pytest.approx(2 / count, rel=0.01)  # nobody is in a group with the other kind
    assert len(order(weights)) == count


def test_methods_that_mix_nobody_have_no_such_figure() -> None:
    assert neighbours([made_run("fedavg", FOUR)]) == []


def test_conflicts_of_layers_are_shares_of_pairs() -> None:
    monitor = [{"conflicts": [0, 3], "personal": [0, 1]}, {"conflicts": [6, 0], "personal": [1, 0]}]
    figure = only(monitors([made_run("fedlag", FOUR, monitor=monitor)]), "conflicts-fedlag")
    # four clients are six pairs
    assert [list(trace["y"]) for trace in figure.data] == [[0.0, 1.0], [0.5, 0.0]]
    assert "In round 2 fedlag's clients disagree most about body: 100 % of all pairs" in figure.says
    assert "body is personal then" in figure.says
    assert list(figure.table.rows[0]) == [1, "0 %", "50 %", "head"]


@pytest.mark.parametrize(("values", "words"), [((5.0, 4.0), "rises in no step"), ((4.0, 5.0), "rises in 1 of 1 steps")])
def test_the_lyapunov_value_rises_or_not(values: tuple[float, float], words: str) -> None:
    monitor = [{"residual": 2.0, "lyapunov": values[0]}, {"residual": 1.0, "lyapunov": values[1]}]
    figure = only(monitors([made_run("fedapm", FOUR, monitor=monitor)]), "residual-fedapm")
    assert words in figure.says and "from 2 to 1" in figure.says


def test_self_fl_expects_and_gets() -> None:
    alone = made_run("local", [{0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5}])
    monitor = [{"between": 0.5, "variances": [0.1, 0.2, 0.3, -1.0], "gains": [1.0, 2.0, 3.0, 4.0]}]
    steps = [{"steps": {0: 10, 1: 20, 2: 30, 3: 40}}]
    run = made_run("selffl", FOUR[:1], monitor=monitor, per_client=steps)
    found = monitors([alone, run])
    gains = only(found, "gains-selffl")
    assert "client 3 to gain most" in gains.says
    # of the 24 orders of four clients two are as far from nought
    assert "cannot be told from chance (rank correlation 1.00, p = 0.083)" in gains.says
    assert list(gains.data[0]["y"]) == pytest.approx([0, 10, 20, 30])
    # who is unknown (-1) is not among them: the median of 0.1, 0.2, 0.3
    assert "σ₀² = 0.5, more than" in only(found, "uncertainties-selffl").says
    assert "median σₘ² = 0.2" in only(found, "uncertainties-selffl").says
    assert "take 25 steps or more" in only(found, "steps-selffl").says


def test_self_fl_that_knows_nothing_yet_says_nothing_of_it() -> None:
    """Before clients are known their variances are −1 and all gains the same: nobody gains most."""
    monitor = [{"between": 0.5, "variances": [-1.0] * 4, "gains": [1.0] * 4}] * 2
    found = monitors([made_run("selffl", FOUR, monitor=monitor)])
    assert "selffl expects all clients to gain alike from others (GAIN 1)" in only(found, "gains-selffl").says
    said = " ".join(figure.says for figure in found)
    assert "variances" not in said and "-1" not in said and "between (from 0.5 to 0.5)" in said
    mine = monitors([made_run("mine", FOUR, monitor=[{"variances": [-1.0] * 4}] * 2)])  # one's own may well be −1
    assert "variances (from -1 to -1)" in mine[0].says


EIGHT = {client: 0.5 + client / 100 for client in range(8)}


@pytest.mark.parametrize(
    ("order", "words"), [(1, "who should gain more did gain more over"), (-1, "did not gain more")]
)
def test_self_fl_is_believed_where_enough_clients_agree(order: int, words: str) -> None:
    monitor = [{"between": 0.5, "variances": [0.1] * 8, "gains": [float(order * client) for client in range(8)]}]
    run = made_run("selffl", [EIGHT], monitor=monitor)
    figure = only(monitors([run], [made_run("local", [dict.fromkeys(range(8), 0.5)])]), "gains-selffl")
    assert words in figure.says and "p < 0.001" in figure.says


def test_gains_are_over_training_alone_with_the_same_seed() -> None:
    """Clients of another split are others, though they are called the same."""
    monitor = [{"between": 0.5, "variances": [0.1] * 8, "gains": [float(client) for client in range(8)]}]
    run = made_run("selffl", [EIGHT], monitor=monitor, seed=1)
    figure = only(monitors([run], [made_run("local", [EIGHT], seed=0)]), "gains-selffl")
    assert "training alone with this seed is not among these runs" in figure.says and "correlation" not in figure.says


@pytest.mark.parametrize(("fits", "words"), [(True, "the more, the more alike"), (False, "cannot be told from chance")])
def test_likeness_of_classes_counts_where_clients_in_another_order_fit_less(fits: bool, words: str) -> None:
    kinds = np.arange(8) % 2
    weights = 0.01 + (kinds[:, None] == kinds) if fits else 1 + np.random.default_rng(1).random((8, 8))
    classes = [[9, 0] if kind else [0, 9] for kind in kinds]
    (figure,) = neighbours([made_run("fedapa", [EIGHT], monitor=[{"weights": weights.tolist()}], classes=classes)])
    assert words in figure.says


# ---- methods of one's own


ODD: dict[str, Any] = {
    "a number": 1.5, "four": [1.0, 2.0, 3.0, 4.0], "two": [1.0, 2.0], "table": [[1.0, 2.0], [3.0, 4.0]],
    "texts": ["a", "b"], "nothing": [], "none": float("nan"), "ragged": [[1.0], [2.0, 3.0]],
}  # fmt: skip
NAMES = ("conflicts", "personal", "residual", "lyapunov", "variances", "between", "gains", "weights")


@pytest.mark.parametrize("kind", ODD)
def test_numbers_called_as_ours_are_drawn_as_what_they_are(kind: str) -> None:
    """Whatever lies under the names that our figures look for, they are left out or drawn, and nothing breaks."""
    monitor = [dict.fromkeys(NAMES, ODD[kind])] * 2
    notes = [{"drift": {0: 1.0}, "steps": {0: float("nan"), 1: 2.0}}] * 2
    run = made_run("mine", FOUR, monitor=monitor, per_client=notes)
    for figure in [*monitors([run]), *neighbours([run])]:
        assert figure.says and "NaN" not in json.dumps([figure.data, figure.layout])
    for name in NAMES:  # each alone
        alone = made_run("mine", FOUR, monitor=[{name: ODD[kind]}] * 2)
        assert len(monitors([alone])) <= 1


def test_what_one_records_oneself_is_drawn_over_rounds() -> None:
    monitor = [{"mass <b>": 2.0, "spread": [1.0, 2.0, 3.0, 4.0]}, {"mass <b>": 0.5, "spread": [2.0, 4.0, 6.0, 9.0]}]
    run = made_run("mine", FOUR, monitor=monitor, per_client=[{"size": {0: 1.0, 2: 3.0}}, {"size": {1: 8.0}}])
    (figure,) = monitors([run])
    ((mass, spread, size),) = (choice.options for choice in figure.choices)
    assert mass.traces["y"] == [[2.0, 0.5]] * 3 and list(figure.data[-1]["y"]) == [2.0, 0.5]
    assert mass.traces["showlegend"] == [False] * 3  # there is no band to explain
    assert spread.traces["y"][-1] == [2.5, 5.0] and spread.layout == {"yaxis.title.text": "spread"}  # the median client
    assert size.traces["x"][-1] == [1, 2] and size.traces["y"][-1] == [2.0, 8.0]
    assert "spread (from 2.5 to 5)" in figure.says and "size (from 2 to 8)" in figure.says
    assert "<b>" not in json.dumps(figure.plain())
    assert [list(row) for row in figure.table.rows] == [[1, "2", "2.5", "2"], [2, "0.5", "5", "8"]]


def test_a_client_at_a_time_has_no_conflicts() -> None:
    monitor = [{"conflicts": [0, 0], "personal": [0, 0]}] * 2
    run = made_run("fedlag", [{0: 0.5}] * 2, monitor=monitor)
    assert [figure.key for figure in monitors([run]) if figure.key.startswith("conflicts-")] == []


def test_layers_and_scores_called_by_markup_are_only_called_so() -> None:
    run = made_run("fedlag", FOUR[:1], monitor=[{"conflicts": [0, 3], "personal": [0, 1]}])
    run.info["layers"] = ["<img src=x>", "<b>%{y}"]
    figure = only(monitors([run]), "conflicts-fedlag")
    assert "<" not in json.dumps([figure.data, figure.layout]) and "%{" not in json.dumps(figure.data)
    assert Scale("<b>mine").heading == "‹b›mine"
