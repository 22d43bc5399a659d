"""Tables and sentences say what the numbers say, no more."""

from typing import Any

import pytest
from rich.table import Table

import fedtailor as ft
from fedtailor.table import comparison, other_metrics, run_table, verdict


def made(method: str, seed: int, scores: dict[int, float], auc: dict[int, float] | None = None, **info: Any) -> ft.Run:
    """A run of one round in which these clients, of one test sample each, have these accuracies (and areas)."""
    known = {"accuracy": scores, "loss": scores} | ({"auc": auc} if auc is not None else {})
    values = {f"{name}_{moment}": found for name, found in known.items() for moment in ("received", "trained")}
    record: dict[str, Any] = {"round": 1, "per_client": values}
    record |= {"bytes_up": 2_000_000, "bytes_down": 4_000_000, "seconds": 1.5}
    clients = [{"name": str(client), "train": 1, "test": 1, "validation": 0} for client in scores]
    found = {"score": "accuracy", "higher_is_better": True, "clients": clients, "engine": "pool"} | info
    experiment = {"seed": seed, "method": {"name": method}, "data": {"name": "made up"}}
    return ft.Run(experiment, found, [record], {}, lambda client: {}, lambda client, moment: {})


def test_a_sure_winner_is_called_one() -> None:
    """Ahead by 0.20, 0.21 and 0.22 over three seeds: more than chance."""
    runs = [made("local", seed, {0: 0.5, 1: 0.5}) for seed in range(3)]
    runs += [made("fedper", seed, {0: 0.5, 1: 0.9 + seed / 50}) for seed in range(3)]
    said = verdict(runs)
    assert said.startswith("Training alone gets 50.0 ± 0.0 % here; fedper is best with 71.0 ± 1.0 %")
    assert "50 % of the clients do better with it than alone, 0 % worse" in said
    assert said.endswith("Over 3 seeds the difference is more than chance.")


def test_a_lead_that_comes_and_goes_is_chance() -> None:
    runs = [made("local", seed, {0: 0.5}) for seed in range(3)]
    runs += [made("fedper", seed, {0: score}) for seed, score in enumerate((0.4, 0.9, 0.6))]
    assert verdict(runs).endswith("Over 3 seeds the difference is within chance.")
    assert verdict([runs[0], runs[4]]).endswith("one seed: the difference may be chance.")


def test_training_alone_may_win() -> None:
    runs = [
        made("local", 0, {0: 0.9, 1: 0.8}),
        made("fedavg", 0, {0: 0.3, 1: 0.85}),
        made("ditto", 0, {0: 0.8, 1: 0.8}),
    ]
    said = verdict(runs)
    assert said.startswith("Training alone is best here with 85.0 %; of the federated methods ditto comes nearest")
    assert "0 % of the clients do better with it than alone, 50 % worse" in said


@pytest.mark.parametrize(("better", "order"), [(True, ["fedper", "local"]), (False, ["local", "fedper"])])
def test_the_ranking_knows_which_way_is_up(better: bool, order: list[str]) -> None:
    info: dict[str, Any] = {"higher_is_better": better, "score": "accuracy"}
    table = comparison([made("local", 0, {0: 0.5}, **info), made("fedper", 0, {0: 0.7}, **info)])
    assert list(table.columns[0].cells) == order


def test_costs_are_those_of_a_run() -> None:
    table = comparison([made("local", seed, {0: 0.5}) for seed in (0, 1)])
    assert [next(iter(column.cells)) for column in table.columns][-3:] == ["2.0", "4.0", "1.5"]
    assert "2.0 MB up and 4.0 MB down" in str(run_table(made("local", 0, {0: 0.5})).caption)


def test_runs_of_different_experiments_are_not_averaged() -> None:
    short, long = made("local", 0, {0: 0.5}), made("local", 1, {0: 0.9})
    short.experiment["rounds"], long.experiment["rounds"] = 1, 2
    with pytest.raises(ft.Refused, match="rounds is 1 and 2; show them one by one"):
        comparison([short, long])
    with pytest.raises(ft.Refused, match="local ran twice with seed 0"):
        comparison([made("local", 0, {0: 0.5}), made("local", 0, {0: 0.9})])


def test_who_diverged_is_last_and_named() -> None:
    lost = made("fedavg", 0, {0: float("nan")})
    lost.records[-1]["diverged"] = [0]
    runs = [lost, made("local", 0, {0: 0.5}), made("ditto", 0, {0: 0.4})]
    assert list(comparison(runs).columns[0].cells) == ["local", "ditto", "fedavg"]
    assert verdict(runs).endswith("Diverged, so try a smaller lr: fedavg.")


def rows(table: Table) -> dict[str, list[str]]:
    """The first cell of every row -> the others."""
    return {first: others for first, *others in zip(*(column.cells for column in table.columns), strict=True)}


def test_other_metrics_are_shown_beside_the_score() -> None:
    runs = [
        made("local", 0, {0: 0.5, 1: 0.7}, auc={1: 0.9}),
        made("fedper", 0, {0: 0.9, 1: 0.8}, auc={1: 0.6}),
        made("fedper", 1, {0: 0.9, 1: 0.8}, auc={0: 0.5, 1: 0.5}),
    ]
    table = run_table(runs[0])
    assert rows(table)["AUC"][0] == "90.0" and rows(table)["loss"][0] == "0.6"
    assert rows(table)["largest 10 %"][0] == "50.0" and rows(table)["all samples"][0] == "60.0"
    assert str(table.caption).endswith("AUC is undefined for 1 client.")
    table = other_metrics(runs)
    assert [column.header for column in table.columns] == ["method", "largest 10 %", "AUC", "loss"]
    assert list(rows(table)) == ["fedper", "local"]  # as the comparison ranks them
    assert rows(table)["local"][:2] == ["50.0", "90.0"] and rows(table)["fedper"][1].startswith("55.0 ± ")
    assert str(table.caption).endswith("AUC is undefined for 0 to 1 clients.")
    assert "undefined" not in str(run_table(runs[2]).caption)


def test_a_diverged_seed_spoils_the_number_and_not_the_table() -> None:
    nan = float("nan")
    info: dict[str, Any] = {"score": "loss", "higher_is_better": False}
    runs = [made("local", seed, {0: 0.5 + seed}, **info) for seed in (0, 1)]
    runs += [made("fedavg", seed, {0: score}, **info) for seed, score in enumerate((0.4, nan))]
    assert rows(comparison(runs))["fedavg"][0] == "nan"
    assert "says nothing" in verdict(runs)
