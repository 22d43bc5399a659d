"""Results of a sweep: the best setting, its significance, and the figures."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

import fedtailor as ft
from fedtailor.experiments.grid import value_label
from fedtailor.experiments.sweep import Plan
from fedtailor.experiments.tuning import (
    Outcome,
    SweepComparison,
    compare_settings,
    make_outcome,
    sweep_table,
    sweep_verdict,
)
from fedtailor.reporting.figures.figure import Figure
from fedtailor.reporting.figures.sweep_figures import draw_sweep


def outcome(values: Mapping[str, Any], test: float, validation: float | None = None, better: bool = True) -> Outcome:
    """Return the outcome of a run with these scores at both moments."""
    method, score = value_label("method", values.get("method", "FedX")), "accuracy" if better else "mse"
    scores = [dict.fromkeys(("received", "trained"), value) for value in (test, validation)]
    return Outcome(values, method, score, better, ("example data",), "trained", *scores)


def outcomes(scores: Mapping[float, Sequence[float]], **more: Any) -> list[Outcome]:
    """Return the outcomes of one field, rho, with these scores per seed."""
    return [
        outcome({"method.rho": rho, "seed": s}, v, **more) for rho, own in scores.items() for s, v in enumerate(own)
    ]


def grid(scores: Mapping[float, Sequence[float]], **more: Any) -> SweepComparison:
    return compare_settings(["method.rho", "seed"], outcomes(scores, **more), "trained")[0]


def test_settings_are_ranked_at_the_moment_of_each_method() -> None:
    """FedAvg is ranked by its received model (50 %), FedPer by its trained one (60 %)."""
    runs = [
        replace(outcome({"method": method, "seed": 0}, 0.0), ranked_by=moment, test={"received": 0.5, "trained": score})
        for method, moment, score in (("fedavg", "received", 0.9), ("fedper", "trained", 0.6))
    ]
    (found,) = compare_settings(["method", "seed"], runs, "ranked")
    assert [one.scores["{'seed': 0}"] for one in found.settings] == [0.6, 0.5] and found.moment == "as ranked"
    (trained,) = compare_settings(["method", "seed"], runs, "trained")
    assert [one.scores["{'seed': 0}"] for one in trained.settings] == [0.9, 0.6]


def test_verdict_uses_validation_data_if_all_runs_have_them() -> None:
    runs = [outcome({"method.rho": 1.0, "seed": 0}, 0.9, 0.5), outcome({"method.rho": 2.0, "seed": 0}, 0.6, 0.8)]
    text = sweep_verdict(compare_settings(["method.rho", "seed"], runs, "trained"))
    assert text.startswith(
        "FedX rho=2 scores highest (80.0 % on validation data), but there are not enough seeds to tell"
    )
    assert "It scores 80.0 % on validation data and 60.0 % (trained) on test data." in text
    assert "optimistic" not in text
    half = [runs[0], outcome({"method.rho": 2.0, "seed": 0}, 0.6)]  # one run has no validation data
    text = sweep_verdict(compare_settings(["method.rho", "seed"], half, "trained"))
    assert text.startswith("FedX rho=1 scores highest (90.0 %), ")
    assert "chosen on test data and its score is optimistic" in text


@pytest.mark.parametrize(("better", "best"), [(True, 2.0), (False, 1.0)])
def test_best_setting_follows_direction_of_score(better: bool, best: float) -> None:
    found = grid({1.0: [0.3, 0.4], 2.0: [0.6, 0.7]}, better=better)
    assert found.best is not None and found.best.values["method.rho"] == best


def test_indistinguishable_settings_are_those_not_significantly_worse() -> None:
    found = grid({1.0: [0.80, 0.83, 0.81], 2.0: [0.79, 0.84, 0.79], 3.0: [0.5, 0.54, 0.50]})
    assert [one.values["method.rho"] for one in found.indistinguishable()] == [2.0]
    text = sweep_verdict([found])
    assert "but its 0.7-point lead over FedX rho=2 is not statistically significant over 3 seeds." in text
    assert "FedX rho=1 scores significantly higher than FedX rho=3; it is not distinguishable from FedX rho=2." in text
    assert "Seeds that re-split the same data are not fully independent" in text


def test_verdict_of_one_setting_is_its_test_score() -> None:
    (found,) = compare_settings(["seed"], [outcome({"seed": 0}, 0.6, 0.9), outcome({"seed": 1}, 0.7, 0.9)], "trained")
    assert sweep_verdict([found]).startswith("FedX scores 65.0 %; no other method or setting has a score")


@pytest.mark.parametrize(
    ("best", "edge"),
    [(0.1, "also try rho below 0.1"), (1.0, None), (10.0, "also try rho above 10"), (0.0, None)],
    ids=["low", "within", "high", "zero"],
)
def test_verdict_best_value_at_edge_suggests_direction(best: float, edge: str | None) -> None:
    tried = sorted({0.1, 1.0, 10.0, best})
    found = grid({rho: [0.9, 0.8] if rho == best else [0.1, 0.3] for rho in tried})
    assert (edge in sweep_verdict([found])) if edge else ("edge" not in sweep_verdict([found]))


def test_settings_are_ranked_on_common_seeds_and_diverged_ones_last() -> None:
    """Seed 1 is hard, and rho = 2 lacks it; rho = 3 diverged on another seed."""
    found = grid({1.0: [0.8, 0.1], 2.0: [0.7], 3.0: [float("nan"), 0.9]})
    assert [one.values["method.rho"] for one in found.settings] == [1.0, 2.0, 3.0] and found.excluded == 2
    text = sweep_verdict([found])
    assert text.startswith("FedX rho=1 scores highest (80.0 %), ") and "2 runs with seeds that not all settings" in text
    assert "Ranked last, because a run diverged or was not evaluated: FedX rho=3." in text
    apart = [outcome({"method.rho": rho, "seed": seed}, rho / 10) for seed, rho in enumerate((1.0, 2.0))]
    text = sweep_verdict(compare_settings(["method.rho", "seed"], apart, "trained"))
    assert "No seed is common to all" in text and "not enough seeds to tell whether its lead over FedX rho=1" in text
    assert "No setting has a finite score." in sweep_verdict([grid({1.0: [float("nan")], 2.0: [float("nan")]})])


def test_data_axes_are_conditions_and_not_tuned() -> None:
    """Each data setting has its own best setting."""
    axes = ["data.alpha", "method.rho", "data.seed", "seed"]
    runs = [
        outcome({"data.alpha": alpha, "method.rho": rho, "data.seed": split, "seed": 0}, alpha / 10 + rho * (1 - alpha))
        for alpha in (0.5, 2.0)
        for rho in (0.1, 0.2)
        for split in (3, 4)
    ]
    found = compare_settings(axes, runs, "trained")
    best = {one.conditions["data.alpha"]: one.best.values["method.rho"] for one in found if one.best}
    assert best == {0.5: 0.2, 2.0: 0.1}
    assert [one.seeds for one in found] == [2, 2]  # different splits are repetitions, like seeds
    alphas, rhos, *_ = (list(column.cells) for column in sweep_table(found).columns)
    assert alphas == ["0.5", "0.5", "2", "2"] and rhos == ["0.2", "0.1", "0.1", "0.2"]


def test_make_outcome_matches_records() -> None:
    run = ft.simulate(
        ft.methods.FedAvg(), ft.network("mlp", fed := ft.load("digits", clients=3)), fed, rounds=1, validation=0.3
    )
    record, found = run.records[-1], make_outcome(run, {"seed": 0})
    for moment in ("received", "trained"):
        assert found.validation[moment] == pytest.approx(record[f"validation_{moment}"])
        assert found.test[moment] == pytest.approx(record[f"accuracy_{moment}"])


# figures


def draw_figures(axes: Sequence[str], runs: Sequence[Outcome]) -> list[Figure]:
    plan = Plan(tuple(axes), "trained", {}, {str(number): one.values for number, one in enumerate(runs)})
    found = draw_sweep(plan, compare_settings(axes, runs, "trained"))
    for figure in found:
        json.dumps(figure.to_dict(), allow_nan=False)
        assert figure.summary.endswith(".")
    assert len({figure.key for figure in found}) == len(found)
    return found


def test_figure_of_one_field_is_a_curve_with_the_best_marked() -> None:
    scores = {10.0: [0.5, 0.7], 0.1: [0.2, 0.4], 1.0: [0.8, 0.9], 100.0: [0.1, float("nan")]}
    (figure,) = draw_figures(["method.rho", "seed"], outcomes(scores))
    trace = figure.data[0]
    assert trace["x"] == [0.1, 1.0, 10.0, 100.0] and trace["y"] == pytest.approx([30, 85, 60, None])
    assert trace["error_y"]["array"][:3] == pytest.approx(
        [100 * 0.02**0.5, 100 * 0.005**0.5, 100 * 0.02**0.5], rel=1e-4
    )
    assert trace["marker"]["symbol"] == ["circle", "star", "circle", "circle"]
    assert figure.layout["xaxis"]["type"] == "log"
    assert "FedX rho=1 scores highest" in figure.summary
    assert sorted(figure.data[1]["y"], key=lambda y: -1 if y is None else y)[1:] == pytest.approx(
        [10, 20, 40, 50, 70, 80, 90]
    )


def test_figure_of_two_fields_is_a_heatmap_and_more_are_pairs() -> None:
    def score(a: float, b: float, c: float) -> float:
        return (a * b + c) / 100

    two = [
        outcome({"method.a": a, "method.b": b, "seed": 0}, score(a, b, 0)) for a in (1.0, 2.0) for b in (3.0, 4.0, 5.0)
    ]
    (figure,) = draw_figures(["method.a", "method.b", "seed"], two)
    assert figure.data[0]["x"] == ["1", "2"] and figure.data[0]["y"] == ["3", "4", "5"]
    assert figure.data[0]["z"] == [[pytest.approx(a * b) for a in (1, 2)] for b in (3, 4, 5)]
    best = [shape for shape in figure.layout["shapes"] if "dash" not in shape["line"]]
    assert [(round(box["x0"] + box["x1"]) / 2, round(box["y0"] + box["y1"]) / 2) for box in best] == [(1, 2)]
    three = [
        outcome({"method.a": a, "method.b": b, "method.c": c, "seed": 0}, score(a, b, c))
        for a in (1.0, 2.0) for b in (3.0, 4.0) for c in (0.0, 9.0)
    ]  # fmt: skip
    pairs, beside = draw_figures(["method.a", "method.b", "method.c", "seed"], three)
    options = {option.name: option.traces["z"][0] for option in pairs.choices[0].options}
    assert options["a and b"] == [[pytest.approx(a * b + 9) for a in (1, 2)] for b in (3, 4)]
    assert options["a and c"] == [[pytest.approx(a * 4 + c) for a in (1, 2)] for c in (0, 9)]
    assert [dimension["label"] for dimension in beside.data[0]["dimensions"]] == ["a", "b", "c", "score"]
    assert len(beside.table.rows) == 8 and beside.table.rows[0][:3] == ["2", "4", "9"]


def test_figure_of_methods_has_one_line_per_method() -> None:
    runs = [
        outcome({"method": name, "method.lr": lr, "seed": 0}, lr / k)
        for k, name in ((2, "fedavg"), (3, "local"))
        for lr in (0.1, 0.9)
    ]
    (figure,) = draw_figures(["method", "method.lr", "seed"], runs)
    assert {trace["name"]: trace["y"] for trace in figure.data if "error_y" in trace} == {
        "FedAvg": pytest.approx([5, 45]),
        "Local training": pytest.approx([10 / 3, 30], rel=1e-4),
    }
    runs += [
        outcome({"method": "fedprox", "method.lr": lr, "method.mu": mu, "seed": 0}, lr * mu)
        for lr in (0.1, 0.9)
        for mu in (0.1, 0.2)
    ]
    best, *others = draw_figures(["method", "method.lr", "method.mu", "seed"], runs)
    assert dict(zip(best.data[0]["x"], best.data[0]["y"], strict=True)) == pytest.approx(
        {"FedAvg": 45, "Local training": 30, "FedProx": 18}
    )
    assert len(others) == 3 and "FedProx lr=0.9 mu=0.2 scores highest" in others[-1].summary


def test_figures_escape_markup_in_values() -> None:
    runs = [
        outcome({"data.name<b>": f"<a href='x'>{n}", "method.lr": lr, "seed": 0}, lr)
        for n in (1, 2)
        for lr in (0.1, 0.2)
    ]
    text = json.dumps([[list(f.data), f.layout] for f in draw_figures(["data.name<b>", "method.lr", "seed"], runs)])
    assert "href" in text and "<a" not in text and "<b" not in text
