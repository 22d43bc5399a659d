"""Plots of runs, comparisons, and federations show the recorded values and need no page around them."""

from typing import Any

import numpy as np
import pytest

import fedtailor as ft
from conftest import error_message
from fedtailor.analysis.run_summary import compare_runs
from fedtailor.reporting.figures.catalog import FIGURES, draw
from fedtailor.reporting.figures.figure import Figure, Table
from fedtailor.reporting.page import read_static
from fedtailor.reporting.plotting import THEME, plot_comparison, to_plotly
from support.example_runs import run_with_metrics, run_with_scores, runs_with_clear_winner


def traces(plot: Any) -> dict[str, Any]:
    return {trace.name: trace for trace in plot.data}


def test_plot_of_run_draws_both_moments_over_the_chosen_axis() -> None:
    """FedPer sends 3 MB per round; its received scores are 0.1 lower."""
    run = run_with_scores("fedper", {0: 0.8, 1: 0.8}, before={0: 0.2, 1: 0.2}, rounds=3)
    drawn = traces(run.plot())
    assert list(drawn) == ["trained", "received"]
    assert drawn["trained"].y == pytest.approx((20, 20, 80)) and drawn["received"].y == pytest.approx((10, 10, 70))
    assert drawn["trained"].x == (1, 2, 3)
    over_bytes = run.plot(axis="bytes")
    assert traces(over_bytes)["received"].x == (3, 6, 9)
    assert over_bytes.layout.xaxis.title.text == "megabytes transferred (up and down)"
    assert "trained" in str(over_bytes.layout.annotations) and over_bytes.layout.title.text.startswith("<b>Accuracy of")


def test_plot_of_comparison_selects_options_by_name() -> None:
    group = compare_runs(runs_with_clear_winner(seeds=1))
    plain, received = plot_comparison(group), plot_comparison(group, "curves", model="received")
    assert np.subtract(traces(plain)["FedPer"].y, traces(received)["FedPer"].y) == pytest.approx([10, 10])
    assert traces(plot_comparison(group, "gains", method="Ditto")) != {}
    message = error_message(lambda: plot_comparison(group, "curves", moment="received"))
    assert message == "This figure has no choice 'moment'; its choices are axis, model."
    message = error_message(lambda: plot_comparison(group, "curves", axis="days"))
    assert message == "There is no axis 'days' in this figure; there are rounds, bytes, seconds."


def test_plot_with_unknown_name_lists_the_figures_of_these_runs() -> None:
    """One run without local training has no gains and no costs to compare."""
    run = run_with_metrics("own", [{0: 0.5}, {0: 0.6}], [{"drift": 1.0}, {"drift": 2.0}])
    assert traces(run.plot("metrics-own"))
    for what in ("gains", "nonsense"):
        expected = (
            f"These runs have no figure '{what}'; their figures are ranking, curves, clients, split, metrics-own."
        )
        assert error_message(lambda what=what: run.plot(what)) == expected  # type: ignore[misc]


def test_figures_have_the_names_of_the_catalog() -> None:
    runs = [
        run_with_scores(m, {0: 0.5, 1: 0.6}, s, failed={1: "memory"}) for m in ("local", "fedper") for s in range(3)
    ]
    assert [figure.key for figure in draw(compare_runs(runs), *FIGURES)] == list(FIGURES)


def test_symbols_are_explained_in_a_legend() -> None:
    """The page explains them in the summary, which a plot does not contain."""
    plot = plot_comparison(compare_runs(runs_with_clear_winner(seeds=3)), "ranking")
    shown = [trace for trace in plot.data if trace.showlegend is not False]
    assert [(trace.name, trace.marker.symbol) for trace in shown] == [
        ("trained", "circle"),
        ("received", "circle-open"),
    ]
    assert plot.layout.showlegend and all(trace.x == (None,) for trace in shown)


def test_figure_with_slider_shows_last_frame() -> None:
    frames = [{"name": "1", "data": [{"z": [[1]]}]}, {"name": "2", "data": [{"z": [[2]]}]}]
    figure = Figure("f", "Title", "", [{"type": "heatmap", "z": [[1]]}], {}, Table([], []), frames)
    assert np.asarray(to_plotly(figure).data[0].z).tolist() == [[2]]


def test_title_is_escaped_and_wrapped_with_space_above_the_plot() -> None:
    short, long = (to_plotly(Figure("f", title, "", [], {}, Table([], []))) for title in ("<i>a", "word " * 40))
    assert short.layout.title.text == "<b>‹i›a</b>" and long.layout.title.text.count("<br>") == 2
    assert long.layout.margin.t - short.layout.margin.t == long.layout.height - short.layout.height > 0


def test_plot_of_federation_draws_the_clients_classes() -> None:
    """Ann has three cats and one dog for training, and Bob has dogs only."""
    x = np.zeros((4, 2))
    fed = ft.Federation.from_arrays(
        [(x, ["cat", "dog", "cat", "cat"], x[:1], ["cat"]), (x[:2], ["dog", "dog"], x[:1], ["dog"])],
        names=["ann", "bob"],
    )
    (drawn,) = fed.plot().data
    assert list(drawn.y) == ["cat", "dog"] and list(drawn.x) == ["ann", "bob"]
    assert np.asarray(drawn.z).tolist() == [[75, 0], [25, 100]] and np.asarray(drawn.text).tolist() == [[3, 0], [1, 2]]


def test_plot_of_federation_without_classes_draws_sizes() -> None:
    x = np.zeros((5, 2))
    clients = [(x[:n], np.linspace(0, 1, n), x[:1], np.array([0.5])) for n in (2, 5)]
    plot = ft.Federation.from_arrays(clients, regression=True).plot()
    assert plot.layout.title.text == "<b>Training samples per client</b>" and plot.data[0].y == (5, 2)


def test_theme_has_the_colors_of_the_page() -> None:
    light = read_static("page.css").split("}")[0]
    colors = {THEME["font"]["color"]: "--ink", THEME["xaxis"]["zerolinecolor"]: "--quiet"}
    for color, variable in (colors | {THEME["xaxis"]["gridcolor"]: "--faint"}).items():
        assert f"{variable}: {color};" in light
    assert f"--sans: {THEME['font']['family']};" in light
