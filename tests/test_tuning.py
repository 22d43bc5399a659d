"""What a sweep found: an honest best, and figures that show its numbers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from scipy.stats import ttest_rel

import fedtailor as ft
from fedtailor.see.figure import Figure
from fedtailor.see.surface import draw
from fedtailor.sweeps.sweep import Plan
from fedtailor.sweeps.tuning import Contest, Outcome, contests, outcome, sweep_table, sweep_verdict


def made(own: Mapping[str, Any], test: float, validation: float | None = None, better: bool = True) -> Outcome:
    """A run that ended with these scores at both moments."""
    both = dict.fromkeys(("received", "trained"), test)
    return Outcome(own, "accuracy" if better else "mse", better, ("made up",), both, dict.fromkeys(both, validation))


def grid(scores: Mapping[float, Sequence[float]], **more: Any) -> Contest:
    """One field, rho, with these scores of every seed."""
    runs = [made({"method.rho": rho, "seed": s}, v, **more) for rho, own in scores.items() for s, v in enumerate(own)]
    return contests(["method.rho", "seed"], runs, "trained")[0]


def test_validation_data_choose_where_there_are_some() -> None:
    runs = [made({"method.rho": 1.0, "seed": 0}, 0.9, 0.5), made({"method.rho": 2.0, "seed": 0}, 0.6, 0.8)]
    said = sweep_verdict(contests(["method.rho", "seed"], runs, "trained"))
    assert said.startswith("The best is rho = 2: 80.0 % on validation data and 60.0 % on test data (trained); this is")
    assert "flatters" not in said
    half = [runs[0], made({"method.rho": 2.0, "seed": 0}, 0.6)]  # one run without: none is judged by it
    said = sweep_verdict(contests(["method.rho", "seed"], half, "trained"))
    assert said.startswith("The best is rho = 1: 90.0 %") and "chosen on the test set and its score flatters" in said


@pytest.mark.parametrize(("better", "best"), [(True, 2.0), (False, 1.0)])
def test_the_best_knows_which_way_is_up(better: bool, best: float) -> None:
    found = grid({1.0: [0.3, 0.4], 2.0: [0.6, 0.7]}, better=better)
    assert found.best is not None and found.best.values["method.rho"] == best


def test_more_than_chance_is_a_paired_test_corrected_for_its_number() -> None:
    scores = {1.0: [0.80, 0.83, 0.81, 0.79], 2.0: [0.80, 0.82, 0.80, 0.78], 3.0: [0.5, 0.56, 0.52, 0.49],
              4.0: [0.775, 0.815, 0.79, 0.785], 5.0: [0.1, 0.9, 0.7, 0.8]}  # fmt: skip
    found = grid(scores)
    ps = {rho: float(ttest_rel(scores[1.0], own).pvalue) for rho, own in scores.items() if rho != 1.0}
    told, left = set[float](), len(ps)
    for rho in sorted(ps, key=lambda rho: ps[rho]):  # Holm: the first that fails ends it
        if ps[rho] * left > 0.05:
            break
        told.add(rho)
        left -= 1
    assert told and any(ps[rho] < 0.05 for rho in ps.keys() - told)  # the correction matters
    assert {one.values["method.rho"] for one in found.not_told_apart()} == ps.keys() - told
    assert f"ahead of {len(told)} of 4 others by more than chance, but not of" in sweep_verdict([found])


def test_one_seed_says_nothing_of_chance_and_equals_are_not_told_apart() -> None:
    assert "one seed, so differences may be chance" in sweep_verdict([grid({1.0: [0.1], 2.0: [0.9]})])
    assert len(grid({1.0: [0.5, 0.6], 2.0: [0.5, 0.6]}).not_told_apart()) == 1
    for seeds, sure in ((2, False), (6, True)):  # the same distance in each: by chance once in 2^(seeds - 1)
        found = grid({1.0: [0.5, 0.6] * (seeds // 2), 2.0: [0.25, 0.35] * (seeds // 2)})
        assert ("ahead of the other by more than chance" in sweep_verdict([found])) == sure


@pytest.mark.parametrize(
    ("best", "edge"),
    [(0.1, "try rho below 0.1 too"), (1.0, None), (10.0, "try rho above 10 too"), (0.0, None)],
    ids=["low", "within", "high", "nought"],
)
def test_a_best_at_the_edge_is_told(best: float, edge: str | None) -> None:
    tried = sorted({0.1, 1.0, 10.0, best})
    found = grid({rho: [0.9, 0.8] if rho == best else [0.1, 0.3] for rho in tried})
    assert (edge in sweep_verdict([found])) if edge else ("edge" not in sweep_verdict([found]))


def test_who_lacks_a_seed_or_diverged_is_not_best() -> None:
    found = grid({1.0: [0.5, 0.5], 2.0: [0.99], 3.0: [0.9, float("nan")]})
    assert found.best is not None and found.best.values["method.rho"] == 1.0
    assert "1 setting lacks seeds and could not be best" in sweep_verdict([found])
    assert found.settings[-1].values["method.rho"] == 2.0
    assert "no setting has a score" in sweep_verdict([grid({1.0: [float("nan")]})]).lower()


def test_data_are_given_and_not_chosen() -> None:
    """Of easy and hard data none is 'best': each has its own."""
    axes = ["data.alpha", "method.rho", "data.seed", "seed"]
    runs = [
        made({"data.alpha": alpha, "method.rho": rho, "data.seed": split, "seed": 0}, alpha / 10 + rho * (1 - alpha))
        for alpha in (0.5, 2.0)
        for rho in (0.1, 0.2)
        for split in (3, 4)
    ]
    found = contests(axes, runs, "trained")
    assert [(one.given["data.alpha"], one.best.values["method.rho"]) for one in found if one.best] == [
        (0.5, 0.2),
        (2.0, 0.1),
    ]
    assert [one.seeds for one in found] == [2, 2]  # splits repeat an experiment as seeds do
    assert [list(column.cells) for column in sweep_table(found).columns][:2] == [
        ["0.5"] * 2 + ["2"] * 2,
        ["0.2", "0.1"] * 1 + ["0.1", "0.2"],
    ]


def test_the_validation_that_chooses_is_that_of_the_record() -> None:
    run = ft.simulate(
        ft.methods.FedAvg(), ft.network("mlp", fed := ft.load("digits", clients=3)), fed, rounds=1, validation=0.3
    )
    record, found = run.records[-1], outcome(run, {"seed": 0})
    for moment in ("received", "trained"):
        assert found.validation[moment] == pytest.approx(record[f"validation_{moment}"])
        assert found.test[moment] == pytest.approx(record[f"accuracy_{moment}"])


# ---- its figures


def drawn(axes: Sequence[str], runs: Sequence[Outcome]) -> list[Figure]:
    plan = Plan(tuple(axes), "trained", {}, {str(number): one.values for number, one in enumerate(runs)})
    found = draw(plan, contests(axes, runs, "trained"))
    for figure in found:
        json.dumps(figure.plain(), allow_nan=False)
        assert figure.says.count(". ") == 0 and figure.says.endswith(".")
    assert len({figure.key for figure in found}) == len(found)
    return found


def test_one_field_is_a_curve_of_means_with_the_best_marked() -> None:
    scores = {10.0: [0.5, 0.7], 0.1: [0.2, 0.4], 1.0: [0.8, 0.9], 100.0: [0.1, float("nan")]}
    runs = [made({"method.rho": rho, "seed": s}, v) for rho, own in scores.items() for s, v in enumerate(own)]
    (figure,) = drawn(["method.rho", "seed"], runs)
    trace = figure.data[0]
    assert trace["x"] == [0.1, 1.0, 10.0, 100.0] and trace["y"] == pytest.approx([30, 85, 60, None])
    assert trace["error_y"]["array"][:3] == pytest.approx(
        [100 * 0.02**0.5, 100 * 0.005**0.5, 100 * 0.02**0.5], rel=1e-4
    )
    assert trace["marker"]["symbol"] == ["circle", "star", "circle", "circle"]
    assert figure.layout["xaxis"]["type"] == "log"
    assert "The best is rho = 1" in figure.says and "flatters" in figure.says
    assert sorted(figure.data[1]["y"], key=lambda y: -1 if y is None else y)[1:] == pytest.approx(
        [10, 20, 40, 50, 70, 80, 90]
    )


def test_two_fields_are_a_map_and_more_are_the_best_of_every_two() -> None:
    def score(a: float, b: float, c: float) -> float:
        return (a * b + c) / 100

    two = [made({"method.a": a, "method.b": b, "seed": 0}, score(a, b, 0)) for a in (1.0, 2.0) for b in (3.0, 4.0, 5.0)]
    (figure,) = drawn(["method.a", "method.b", "seed"], two)
    assert figure.data[0]["x"] == ["1", "2"] and figure.data[0]["y"] == ["3", "4", "5"]
    assert figure.data[0]["z"] == [[pytest.approx(a * b) for a in (1, 2)] for b in (3, 4, 5)]
    best = [shape for shape in figure.layout["shapes"] if "dash" not in shape["line"]]
    assert [(round(box["x0"] + box["x1"]) / 2, round(box["y0"] + box["y1"]) / 2) for box in best] == [(1, 2)]
    three = [
        made({"method.a": a, "method.b": b, "method.c": c, "seed": 0}, score(a, b, c))
        for a in (1.0, 2.0) for b in (3.0, 4.0) for c in (0.0, 9.0)
    ]  # fmt: skip
    pairs, beside = drawn(["method.a", "method.b", "method.c", "seed"], three)
    options = {option.name: option.traces["z"][0] for option in pairs.choices[0].options}
    assert options["a and b"] == [[pytest.approx(a * b + 9) for a in (1, 2)] for b in (3, 4)]
    assert options["a and c"] == [[pytest.approx(a * 4 + c) for a in (1, 2)] for c in (0, 9)]
    assert [dimension["label"] for dimension in beside.data[0]["dimensions"]] == ["a", "b", "c", "score"]
    assert len(beside.table.rows) == 8 and beside.table.rows[0][:3] == ["2", "4", "9"]


def test_methods_have_lines_of_their_own_and_a_figure_of_their_best() -> None:
    runs = [
        made({"method": name, "method.lr": lr, "seed": 0}, lr / k)
        for k, name in ((2, "fedavg"), (3, "local"))
        for lr in (0.1, 0.9)
    ]
    (figure,) = drawn(["method", "method.lr", "seed"], runs)
    assert {trace["name"]: trace["y"] for trace in figure.data if "error_y" in trace} == {
        "fedavg": pytest.approx([5, 45]),
        "local": pytest.approx([10 / 3, 30], rel=1e-4),
    }
    runs += [
        made({"method": "fedprox", "method.lr": lr, "method.mu": mu, "seed": 0}, lr * mu)
        for lr in (0.1, 0.9)
        for mu in (0.1, 0.2)
    ]
    best, *others = drawn(["method", "method.lr", "method.mu", "seed"], runs)
    assert dict(zip(best.data[0]["x"], best.data[0]["y"], strict=True)) == pytest.approx(
        {"fedavg": 45, "local": 30, "fedprox": 18}
    )
    assert len(others) == 3 and "The best is fedprox, lr = 0.9, mu = 0.2" in others[-1].says


def test_texts_from_a_file_are_no_markup() -> None:
    runs = [
        made({"data.name<b>": f"<a href='x'>{n}", "method.lr": lr, "seed": 0}, lr) for n in (1, 2) for lr in (0.1, 0.2)
    ]
    text = json.dumps([[list(f.data), f.layout] for f in drawn(["data.name<b>", "method.lr", "seed"], runs)])
    assert "href" in text and "<a" not in text and "<b" not in text
