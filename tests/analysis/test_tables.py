"""Tables and verdicts for the terminal."""

from typing import Any

import pytest
from rich.table import Table

import fedtailor as ft
from fedtailor.analysis.tables import comparison, other_metrics, run_table, verdict
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
    found = {"score": "accuracy", "higher_is_better": True, "clients": clients, "engine": "pool"} | info
    found["method_title"] = method_title(method)
    experiment = {"seed": seed, "method": {"name": method}, "data": {"name": "example data"}}
    return ft.Run(experiment, found, [record], {}, lambda client: {}, lambda client, moment: {})


def test_verdict_consistent_lead_is_significant() -> None:
    """The leads are 0.20, 0.21, and 0.22 in three seeds."""
    runs = [make_run("local", seed, {0: 0.5, 1: 0.5}) for seed in range(3)]
    runs += [make_run("fedper", seed, {0: 0.5, 1: 0.9 + seed / 50}) for seed in range(3)]
    text = verdict(runs)
    assert text.startswith("FedPer scores highest (71.0 ± 1.0 %); local training scores 50.0 ± 0.0 %. ")
    assert "50 % of the clients score better with FedPer than with local training, 0 % worse." in text
    assert text.endswith("The difference is statistically significant over 3 seeds.")


def test_verdict_inconsistent_lead_is_not_significant() -> None:
    runs = [make_run("local", seed, {0: 0.5}) for seed in range(3)]
    runs += [make_run("fedper", seed, {0: score}) for seed, score in enumerate((0.4, 0.9, 0.6))]
    assert verdict(runs).endswith("The difference is not statistically significant over 3 seeds.")
    assert verdict([runs[0], runs[4]]).endswith("There is only one seed, so the difference may be chance.")


def test_verdict_local_training_can_score_highest() -> None:
    runs = [
        make_run("local", 0, {0: 0.9, 1: 0.8}),
        make_run("fedavg", 0, {0: 0.3, 1: 0.85}),
        make_run("ditto", 0, {0: 0.8, 1: 0.8}),
    ]
    text = verdict(runs)
    assert text.startswith("Local training scores highest (85.0 %); the best federated method is Ditto (80.0 %). ")
    assert "0 % of the clients score better with Ditto than with local training, 50 % worse." in text


@pytest.mark.parametrize(
    ("better", "order"), [(True, ["FedPer", "Local training"]), (False, ["Local training", "FedPer"])]
)
def test_comparison_ranks_by_direction_of_score(better: bool, order: list[str]) -> None:
    info: dict[str, Any] = {"higher_is_better": better, "score": "accuracy"}
    table = comparison([make_run("local", 0, {0: 0.5}, **info), make_run("fedper", 0, {0: 0.7}, **info)])
    assert list(table.columns[0].cells) == order


def test_comparison_costs_are_means_per_run() -> None:
    table = comparison([make_run("local", seed, {0: 0.5}) for seed in (0, 1)])
    assert [next(iter(column.cells)) for column in table.columns][-3:] == ["2.0", "4.0", "1.5"]
    assert "2.0 MB up and 4.0 MB down" in str(run_table(make_run("local", 0, {0: 0.5})).caption)


def test_comparison_of_different_experiments_raises() -> None:
    short, long = make_run("local", 0, {0: 0.5}), make_run("local", 1, {0: 0.9})
    short.experiment["rounds"], long.experiment["rounds"] = 1, 2
    with pytest.raises(ft.FedTailorError, match="rounds is 1 and 2; show them one by one"):
        comparison([short, long])
    with pytest.raises(ft.FedTailorError, match="local has two runs with seed 0"):
        comparison([make_run("local", 0, {0: 0.5}), make_run("local", 0, {0: 0.9})])


def test_comparison_diverged_method_is_last_and_named() -> None:
    lost = make_run("fedavg", 0, {0: float("nan")})
    lost.records[-1]["diverged"] = [0]
    runs = [lost, make_run("local", 0, {0: 0.5}), make_run("ditto", 0, {0: 0.4})]
    assert list(comparison(runs).columns[0].cells) == ["Local training", "Ditto", "FedAvg"]
    assert verdict(runs).endswith("Clients diverged with FedAvg: try a smaller lr.")


def rows(table: Table) -> dict[str, list[str]]:
    """Return the first cell of each row -> the other cells."""
    return {first: others for first, *others in zip(*(column.cells for column in table.columns), strict=True)}


def test_tables_show_other_metrics() -> None:
    runs = [
        make_run("local", 0, {0: 0.5, 1: 0.7}, auc={1: 0.9}),
        make_run("fedper", 0, {0: 0.9, 1: 0.8}, auc={1: 0.6}),
        make_run("fedper", 1, {0: 0.9, 1: 0.8}, auc={0: 0.5, 1: 0.5}),
    ]
    table = run_table(runs[0])
    assert rows(table)["AUC"][0] == "90.0" and rows(table)["loss"][0] == "0.6"
    assert rows(table)["largest 10 %"][0] == "50.0" and rows(table)["all samples"][0] == "60.0"
    assert str(table.caption).endswith("AUC is undefined for 1 client.")
    table = other_metrics(runs)
    assert [column.header for column in table.columns] == ["method", "largest 10 %", "AUC", "loss"]
    assert list(rows(table)) == ["FedPer", "Local training"]  # in the order of the comparison
    assert rows(table)["Local training"][:2] == ["50.0", "90.0"] and rows(table)["FedPer"][1].startswith("55.0 ± ")
    assert str(table.caption).endswith("AUC is undefined for 0 to 1 clients.")
    assert "undefined" not in str(run_table(runs[2]).caption)


def test_comparison_diverged_seed_gives_nan() -> None:
    nan = float("nan")
    info: dict[str, Any] = {"score": "loss", "higher_is_better": False}
    runs = [make_run("local", seed, {0: 0.5 + seed}, **info) for seed in (0, 1)]
    runs += [make_run("fedavg", seed, {0: score}, **info) for seed, score in enumerate((0.4, nan))]
    assert rows(comparison(runs))["FedAvg"][0] == "nan"
    assert "A run diverged, so the difference is undefined." in verdict(runs)
