"""Figures of method metrics: data and summaries match the recorded values."""

import json
from typing import Any

import numpy as np
import pytest

from fedtailor.analysis.formatting import ScoreFormat
from fedtailor.reporting.figures.figure import Figure
from fedtailor.reporting.figures.method_metric_figures import draw_method_metrics
from fedtailor.reporting.figures.similarity import cluster_order, mixing_figures
from support.example_runs import run_with_metrics

FOUR = [{0: 0.5, 1: 0.6, 2: 0.7, 3: 0.8}] * 2
# Clients 0 and 2 learn only from each other, and so do clients 1 and 3.
PAIRED = [[0.6, 0.0, 0.4, 0.0], [0.0, 0.7, 0.0, 0.3], [0.2, 0.0, 0.8, 0.0], [0.0, 0.1, 0.0, 0.9]]
EVEN = [[0.25] * 4] * 4


def find_figure(figures: list[Figure], key: str) -> Figure:
    (found,) = [figure for figure in figures if figure.key == key]
    return found


def test_mixing_figure_places_similar_clients_side_by_side() -> None:
    classes = [[9, 0], [0, 9], [9, 0], [0, 9]]
    run = run_with_metrics("fedapa", FOUR, [{"weights": EVEN}, {"weights": PAIRED}], classes=classes)
    figure = find_figure(mixing_figures([run]), "mixing-fedapa")
    # the weights of other clients are 0.4, 0.3, 0.2, and 0.1
    assert "With FedAPA, clients receive 25 % of their models from other clients" in figure.summary
    assert "client 0 receives the most from a single client, client 2 (40.0 %)" in figure.summary
    places = list(figure.data[0]["x"])
    assert abs(places.index("client 0") - places.index("client 2")) == 1
    assert abs(places.index("client 1") - places.index("client 3")) == 1
    assert [frame["name"] for frame in figure.frames] == ["1", "2"]
    zero, two = places.index("client 0"), places.index("client 2")
    assert figure.data[0]["z"][zero][two] == 0.4 and figure.data[0]["z"][zero][zero] is None
    assert figure.frames[0]["data"][0]["z"][zero][two] == 0.25
    assert list(figure.table.rows[0]) == ["client 0", "client 2", "40.0 %"]
    doubled = [[2 * weight for weight in row] for row in PAIRED]  # weights are normalized per client
    (again,) = mixing_figures([run_with_metrics("fedapa", FOUR, [{"weights": EVEN}, {"weights": doubled}])])
    assert again.data[0]["z"] == figure.data[0]["z"]
    assert mixing_figures([run_with_metrics("fedavg", FOUR)]) == []


def test_mixing_figure_of_many_clients_groups_similar_clients() -> None:
    count = 300
    kinds = np.arange(count) % 2
    weights = (kinds[:, None] == kinds[None]) / (count / 2)
    run = run_with_metrics("fedapa", [dict.fromkeys(range(count), 0.5)], [{"weights": weights.tolist()}])
    figure = mixing_figures([run])[0]
    cells = np.array(figure.data[0]["z"], dtype=float)
    assert len(cells) <= 120
    inside = cells[cells > 0]
    assert inside == pytest.approx(2 / count, rel=0.01)  # groups contain only one kind
    assert len(cluster_order(weights)) == count


def test_conflicts_are_fractions_of_client_pairs() -> None:
    metrics = [{"conflicts": [0, 3], "personal": [0, 1]}, {"conflicts": [6, 0], "personal": [1, 0]}]
    figure = find_figure(draw_method_metrics([run_with_metrics("fedlag", FOUR, metrics)]), "conflicts-fedlag")
    # four clients form six pairs
    assert [list(trace["y"]) for trace in figure.data] == [[0.0, 1.0], [0.5, 0.0]]
    assert "In round 2, the clients of FedLAG conflict most in body (100 % of client pairs)" in figure.summary
    assert figure.summary.endswith("personal layers: body.")
    assert list(figure.table.rows[0]) == [1, "0 %", "50 %", "head"]
    single = draw_method_metrics([run_with_metrics("fedlag", [{0: 0.5}] * 2, metrics)])  # there are no pairs
    assert not any(figure.key.startswith("conflicts-") for figure in single)


@pytest.mark.parametrize(
    ("values", "words"), [((5.0, 4.0), "increases in no step"), ((4.0, 5.0), "increases in 1 of 1 steps")]
)
def test_residual_summary_counts_increases_of_lyapunov_value(values: tuple[float, float], words: str) -> None:
    metrics = [{"residual": 2.0, "lyapunov": values[0]}, {"residual": 1.0, "lyapunov": values[1]}]
    figure = find_figure(draw_method_metrics([run_with_metrics("fedapm", FOUR, metrics)]), "residual-fedapm")
    assert words in figure.summary and "from 2 to 1" in figure.summary


def test_selffl_figures_summarize_gains_variances_and_steps() -> None:
    local = run_with_metrics("local", [{0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5}])
    metrics = [{"between": 0.5, "variances": [0.1, 0.2, 0.3, -1.0], "gains": [1.0, 2.0, 3.0, 4.0]}]
    steps = [{"steps": {0: 10, 1: 20, 2: 30, 3: 40}}]
    run = run_with_metrics("selffl", FOUR[:1], metrics, per_client=steps)
    found = draw_method_metrics([local, run])
    gains = find_figure(found, "gains-selffl")
    assert "Self-FL predicts the largest gain for client 3 (GAIN 4)" in gains.summary
    # p = 2/24: two of the 24 orders of four clients have a rank correlation of ±1
    assert "gains are not significantly correlated (rank correlation 1.00, p = 0.083)" in gains.summary
    assert list(gains.data[0]["y"]) == pytest.approx([0, 10, 20, 30])
    # the unknown variance (-1) is left out: the median of 0.1, 0.2, 0.3
    assert "(σ₀² = 0.5) is larger than" in find_figure(found, "uncertainties-selffl").summary
    assert "(σₘ² = 0.2), so Self-FL relies more on local data" in find_figure(found, "uncertainties-selffl").summary
    assert "takes 25 steps in the last round" in find_figure(found, "steps-selffl").summary


def test_selffl_with_unknown_variances_draws_no_variances() -> None:
    """Before the first upload of a client, its variance is −1, and all gains are equal."""
    metrics = [{"between": 0.5, "variances": [-1.0] * 4, "gains": [1.0] * 4}] * 2
    found = draw_method_metrics([run_with_metrics("selffl", FOUR, metrics)])
    assert "Self-FL predicts the same gain for all clients (GAIN 1)" in find_figure(found, "gains-selffl").summary
    text = " ".join(figure.summary for figure in found)
    assert "variances" not in text and "-1" not in text and "between (from 0.5 to 0.5)" in text
    custom = draw_method_metrics(
        [run_with_metrics("mine", FOUR, [{"variances": [-1.0] * 4}] * 2)]
    )  # −1 may be a value of a custom method
    assert "variances (from -1 to -1)" in custom[0].summary


EIGHT = {client: 0.5 + client / 100 for client in range(8)}


@pytest.mark.parametrize(
    ("sign", "words"), [(1, "gains are positively correlated"), (-1, "gains are negatively correlated")]
)
def test_selffl_gains_with_enough_clients_are_significantly_correlated(sign: int, words: str) -> None:
    metrics = [{"between": 0.5, "variances": [0.1] * 8, "gains": [float(sign * client) for client in range(8)]}]
    run = run_with_metrics("selffl", [EIGHT], metrics)
    figure = find_figure(
        draw_method_metrics([run], [run_with_metrics("local", [dict.fromkeys(range(8), 0.5)])]), "gains-selffl"
    )
    assert words in figure.summary and "p < 0.001" in figure.summary


def test_selffl_gains_without_local_run_of_same_seed_are_unknown() -> None:
    """Clients with the same name in another split are other clients."""
    metrics = [{"between": 0.5, "variances": [0.1] * 8, "gains": [float(client) for client in range(8)]}]
    run = run_with_metrics("selffl", [EIGHT], metrics, seed=1)
    figure = find_figure(draw_method_metrics([run], [run_with_metrics("local", [EIGHT], seed=0)]), "gains-selffl")
    assert "local training with this seed is not among these runs" in figure.summary
    assert "correlation" not in figure.summary


@pytest.mark.parametrize(
    ("fits", "words"),
    [(True, "clients learn more from clients with similar classes"), (False, "are not significantly correlated")],
)
def test_mixing_summary_tests_correlation_with_class_overlap(fits: bool, words: str) -> None:
    kinds = np.arange(8) % 2
    weights = 0.01 + (kinds[:, None] == kinds) if fits else 1 + np.random.default_rng(1).random((8, 8))
    classes = [[9, 0] if kind else [0, 9] for kind in kinds]
    (figure,) = mixing_figures([run_with_metrics("fedapa", [EIGHT], [{"weights": weights.tolist()}], classes=classes)])
    assert words in figure.summary


# ---- custom methods


UNUSUAL_VALUES: dict[str, Any] = {
    "a number": 1.5, "four": [1.0, 2.0, 3.0, 4.0], "two": [1.0, 2.0], "table": [[1.0, 2.0], [3.0, 4.0]],
    "strings": ["a", "b"], "empty": [], "nan": float("nan"), "ragged": [[1.0], [2.0, 3.0]],
}  # fmt: skip
NAMES = ("conflicts", "personal", "residual", "lyapunov", "variances", "between", "gains", "weights")


@pytest.mark.parametrize("kind", UNUSUAL_VALUES)
def test_custom_metrics_with_known_names_are_drawn_or_skipped(kind: str) -> None:
    """Custom methods may record anything under the names of built-in metrics."""
    metrics = [dict.fromkeys(NAMES, UNUSUAL_VALUES[kind])] * 2
    per_client = [{"drift": {0: 1.0}, "steps": {0: float("nan"), 1: 2.0}}] * 2
    run = run_with_metrics("mine", FOUR, metrics, per_client=per_client)
    for figure in [*draw_method_metrics([run]), *mixing_figures([run])]:
        assert figure.summary and "NaN" not in json.dumps([figure.data, figure.layout])
    for name in NAMES:  # each name by itself
        single = run_with_metrics("mine", FOUR, [{name: UNUSUAL_VALUES[kind]}] * 2)
        assert len(draw_method_metrics([single])) <= 1


def test_custom_metrics_are_drawn_over_rounds() -> None:
    metrics = [{"mass <b>": 2.0, "spread": [1.0, 2.0, 3.0, 4.0]}, {"mass <b>": 0.5, "spread": [2.0, 4.0, 6.0, 9.0]}]
    run = run_with_metrics("mine", FOUR, metrics, per_client=[{"size": {0: 1.0, 2: 3.0}}, {"size": {1: 8.0}}])
    (figure,) = draw_method_metrics([run])
    ((mass, spread, size),) = (choice.options for choice in figure.choices)
    assert mass.traces["y"] == [[2.0, 0.5]] * 3 and list(figure.data[-1]["y"]) == [2.0, 0.5]
    assert mass.traces["showlegend"] == [False] * 3  # no band, so no legend
    assert spread.traces["y"][-1] == [2.5, 5.0] and spread.layout == {"yaxis.title.text": "spread"}  # the median client
    assert size.traces["x"][-1] == [1, 2] and size.traces["y"][-1] == [2.0, 8.0]
    assert "spread (from 2.5 to 5)" in figure.summary and "size (from 2 to 8)" in figure.summary
    assert "<b>" not in json.dumps(figure.to_dict())
    assert [list(row) for row in figure.table.rows] == [[1, "2", "2.5", "2"], [2, "0.5", "5", "8"]]


def test_markup_in_names_of_layers_and_scores_is_escaped() -> None:
    run = run_with_metrics("fedlag", FOUR[:1], [{"conflicts": [0, 3], "personal": [0, 1]}])
    run.info["layers"] = ["<img src=x>", "<b>%{y}"]
    figure = find_figure(draw_method_metrics([run]), "conflicts-fedlag")
    assert "<" not in json.dumps([figure.data, figure.layout]) and "%{" not in json.dumps(figure.data)
    assert ScoreFormat("<b>mine").heading == "‹b›mine"
