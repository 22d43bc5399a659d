"""Tables for the terminal."""

from typing import Any

import pytest
from rich.table import Table

import fedtailor as ft
from fedtailor.analysis.comparison_tables import cost_table, generalization_table, metric_table, score_table
from fedtailor.analysis.run_summary import compare_runs
from fedtailor.analysis.table_formats import to_text
from fedtailor.analysis.tables import run_table
from support.example_runs import method_title


def make_run(
    method: str, seed: int, scores: dict[int, float], auc: dict[int, float] | None = None, **info: Any
) -> ft.Run:
    """Return a run of one round in which each client has one test sample and these accuracies (and AUCs)."""
    known = {"accuracy": scores, "loss": scores} | ({"auc": auc} if auc is not None else {})
    values = {f"{name}_{moment}": found for name, found in known.items() for moment in ("received", "trained")}
    record: dict[str, Any] = {"round": 1, "per_client": values}
    record |= {"bytes_up": 2_000_000, "bytes_down": 4_000_000, "seconds": 1.5}
    clients = [{"name": str(client), "train": 1, "test": 1, "validation": 0} for client in scores]
    found = {"score": "accuracy", "higher_is_better": True, "clients": clients, "engine": "pool"}
    found |= {"ranked_by": "trained", "initial_weights": "seed"} | info
    found["method_title"] = method_title(method)
    experiment = {"seed": seed, "method": {"name": method}, "data": {"name": "example data"}}
    return ft.Run(experiment, found, [record], {}, lambda client: {}, lambda client, moment: {})


@pytest.mark.parametrize(
    ("better", "order"), [(True, ["FedPer", "Local training"]), (False, ["Local training", "FedPer"])]
)
def test_comparison_ranks_by_direction_of_score(better: bool, order: list[str]) -> None:
    info: dict[str, Any] = {"higher_is_better": better, "score": "accuracy"}
    table = score_table(compare_runs([make_run("local", 0, {0: 0.5}, **info), make_run("fedper", 0, {0: 0.7}, **info)]))
    assert list(table.columns[0].cells) == order


def test_comparison_costs_are_means_per_run() -> None:
    table = cost_table(compare_runs([make_run("local", seed, {0: 0.5}) for seed in (0, 1)]))
    assert [next(iter(column.cells)) for column in table.columns][-3:] == ["2.0", "4.0", "1.5"]
    assert rows(cost_table(compare_runs([make_run("centralized", 0, {0: 0.5})]))) == {
        "Centralized training": ["–", "–", "1.5"]
    }
    assert "2.0 MB up and 4.0 MB down" in str(run_table(make_run("local", 0, {0: 0.5})).caption)


def rows(table: Table) -> dict[str, list[str]]:
    """Return the first cell of each row -> the other cells."""
    return {first: others for first, *others in zip(*(column.cells for column in table.columns), strict=True)}


def test_tables_show_metric_table() -> None:
    runs = [
        make_run("local", 0, {0: 0.5, 1: 0.7}, auc={1: 0.9}),
        make_run("local", 1, {0: 0.5, 1: 0.7}, auc={1: 0.9}),
        make_run("fedper", 0, {0: 0.9, 1: 0.8}, auc={1: 0.6}),
        make_run("fedper", 1, {0: 0.9, 1: 0.8}, auc={0: 0.5, 1: 0.5}),
    ]
    table = run_table(runs[0])
    assert rows(table)["AUC"][0] == "90.0" and rows(table)["loss"][0] == "0.6"
    assert rows(table)["largest 10 %"][0] == "50.0" and rows(table)["all samples"][0] == "60.0"
    assert str(table.caption).endswith("AUC is undefined for 1 client.")
    table = metric_table(compare_runs(runs))
    assert [column.header for column in table.columns] == ["method", "largest\n10 %", "AUC", "loss"]
    assert list(rows(table)) == ["FedPer", "Local training"]  # in the order of the comparison
    assert rows(table)["Local training"][:2] == ["50.0 ± 0.0", "90.0 ± 0.0"] and rows(table)["FedPer"][1].startswith(
        "55.0 ± "
    )
    assert str(table.caption).endswith("AUC is undefined for 0 to 1 clients.")
    assert "undefined" not in str(run_table(runs[3]).caption)


def test_tables_explain_common_and_held_out_metrics() -> None:
    """Held-out clients and clients without test samples do not count as clients with an undefined metric."""
    runs = [make_run("local", 0, {0: 0.5, 1: 0.7}), make_run("fedper", 0, {0: 0.9, 1: 0.8})]
    for run in runs:
        new = [{"name": f"new {test}", "train": 5, "test": test, "validation": 0} for test in (5, 15)]
        run.info["clients"].append({"name": "untested", "train": 1, "test": 0, "validation": 0})
        run.info |= {"common_test": 30, "held_out_clients": new}
        for moment in ("received", "trained"):
            run.records[0]["per_client"] |= {
                f"common_accuracy_{moment}": {0: 0.2, 1: 0.4, 2: 0.9},
                f"common_loss_{moment}": {0: 1.0, 1: 1.0, 2: 1.0},
                f"held_out_accuracy_{moment}": {3: 0.6, 4: 0.2},
                f"held_out_loss_{moment}": {3: 2.0, 4: 2.0},
            }
    table = run_table(runs[0])
    assert "3 clients and 2 held out, 1 round;" in str(table.title)
    shown = {name: cells[0] for name, cells in rows(table).items()}
    assert (shown["common accuracy"], shown["held-out accuracy"], shown["held-out loss"]) == ("50.0", "30.0", "2")
    assert [column.header for column in metric_table(compare_runs(runs)).columns] == ["method", "largest\n10 %", "loss"]
    beyond = generalization_table(compare_runs(runs))
    assert beyond is not None and "undefined" not in str(beyond.caption)
    assert "30 test samples that belong to no client" in str(beyond.caption)
    assert "2 clients that never trained" in str(beyond.caption)
    headers = [str(column.header).replace("\n", " ") for column in beyond.columns]
    assert headers == ["method", "common trained", "common received", "held-out trained", "held-out received"]
    assert set(map(tuple, rows(beyond).values())) == {("50.0", "50.0", "30.0", "30.0")}
    assert "1 client without test samples" in str(score_table(compare_runs(runs)).caption)


def test_tables_of_a_comparison_fit_into_80_columns_without_cutting_words() -> None:
    """Also with long labels and two digits before and after ±."""
    values = {0: 0.123, 1: 0.987}
    runs = [
        make_run(method, seed, {c: v / (1 + seed) for c, v in values.items()}, auc=values, common_test=9)
        for method in ("local", "fedavg", "fedapa", "centralized") for seed in (0, 1)
    ]  # fmt: skip
    for run in runs:
        for moment in ("received", "trained"):
            run.records[0]["per_client"] |= {f"common_accuracy_{moment}": values, f"macro_f1_{moment}": values}
            run.records[0]["per_client"] |= {f"held_out_accuracy_{moment}": {2: values[run.experiment["seed"]]}}
        run.info["held_out_clients"] = [{"name": "new", "train": 1, "test": 1, "validation": 0}]
    for table in ft.ComparisonResult(runs, target=0.5).tables():
        lines = to_text(table, 80).splitlines()
        words = " ".join(lines).split()
        assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
        assert {"FedAvg", "FedAPA", "Local", "Centralized"} <= set(words)
        last = [word for cell in table.columns[-1].cells for word in str(cell).split()]
        assert all(word in words for word in last)


def test_tables_say_which_runs_stopped_early() -> None:
    runs = [make_run("local", 0, {0: 0.5}), make_run("fedper", 0, {0: 0.7})]
    for run in runs:
        run.experiment |= {"rounds": 9, "patience": 1}
    runs[1].records = [*runs[1].records, runs[1].records[0] | {"round": 2, "stopped_early": True}]
    note = "The run stopped early, after 2 of 9 rounds: the validation score had not improved for 1 evaluation."
    assert note in str(run_table(runs[1]).caption) and "stopped" not in str(run_table(runs[0]).caption)
    table = score_table(compare_runs(runs))
    assert "1 clients, 1 to 2 rounds" in str(table.title)
    assert "1 of 2 runs stopped early, after 2 of 9 rounds" in str(table.caption)


def test_comparison_diverged_seed_has_no_mean() -> None:
    runs = [make_run("local", seed, {0: 0.5 + seed}, score="loss", higher_is_better=False) for seed in (0, 1)]
    runs += [
        make_run("fedavg", seed, {0: score}, score="loss", higher_is_better=False)
        for seed, score in enumerate((0.4, float("nan")))
    ]
    found = rows(score_table(compare_runs(runs)))
    assert list(found) == ["Local training", "FedAvg"] and found["FedAvg"][0] == "–*"


def test_comparison_counts_clients_that_gain_beyond_their_test_samples() -> None:
    """With 100 test samples, client 1 gains forty points, and client 0 two points, which is within the uncertainty."""
    runs = [make_run("local", 0, {0: 0.5, 1: 0.5}), make_run("fedper", 0, {0: 0.52, 1: 0.9})]
    for run in runs:
        run.info["clients"] = [{**client, "test": 100} for client in run.info["clients"]]
    found = rows(score_table(compare_runs(runs)))
    assert found["FedPer"][3] == "50 %" and found["Local training"][3] == ""


def test_text_of_a_table_displays_nothing_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[object] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *parts: displayed.append(parts))
    assert "method" in to_text(Table("method")) and not displayed
