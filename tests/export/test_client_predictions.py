"""The predictions of all clients in one file agree with the run's record, on exactly the run's test samples."""

import csv
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedtailor as ft
from conftest import error_message
from fedtailor.cli.app import app
from fedtailor.export import client_predictions
from fedtailor.export.client_predictions import predict_clients, save_predictions
from support.exported_models import image_federation, train

Rows = list[dict[str, Any]]


def read(path: Path) -> Rows:
    """Read a file with its own library, without FedTailor."""
    if path.suffix == ".csv":
        return list(csv.DictReader(path.open(newline="")))
    rows: Rows = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    return rows


def accuracies(rows: Rows) -> dict[int, float]:
    correct = defaultdict(list)
    for row in rows:
        correct[int(row["client"])].append(row["prediction"] == row["target"])
    return {client: sum(found) / len(found) for client, found in correct.items()}


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run `fedtailor` in a temporary folder and return its output."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output.replace("\n", " ")

    return run


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_accuracy_of_saved_predictions_is_that_of_the_run(
    call: Callable[..., str], suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_predictions, "_GROUP_ROWS", 50)  # several groups of rows, each of several clients
    fed: Any = ft.load("digits", clients=6, alpha=0.5, seed=4)
    run = train("ditto", fed, Path("run"), model=ft.network("logistic", fed), rounds=2)
    for moment in ("trained", "received"):
        shown = call("predict", "run", "--all", "--moment", moment, "--out", f"{moment}.{suffix}")
        rows = read(Path(f"{moment}.{suffix}"))
        assert f"Saved {len(rows)} predictions" in shown
        assert accuracies(rows) == pytest.approx(run.scores(moment))
        assert [int(row["sample"]) for row in rows] == torch.cat(fed.test).tolist()
        assert [int(row["target"]) for row in rows] == fed.y[torch.cat(fed.test)].tolist()
        assert [row["name"] for row in rows] == [
            name for name, own in zip(fed.names, fed.test, strict=True) for _ in own
        ]
        for row in rows:
            each = [float(row[f"probability_{label}"]) for label in range(10)]
            assert sum(each) == pytest.approx(1, abs=1e-5)
            assert float(row["probability"]) == max(each) == each[int(row["prediction"])]
    assert [path.name for path in Path().glob("*.writing")] == []


def test_run_in_memory_with_own_method_model_and_data(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Mine(ft.methods.Ditto):
        pass

    fed = image_federation()
    model = ft.wrap(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)), head="1")
    run = ft.simulate(Mine(), model, fed, rounds=1, folder=tmp_path / "run")
    in_memory = ft.simulate(Mine(), model, fed, rounds=1)
    for source in (run, in_memory, tmp_path / "run"):
        found = list(predict_clients(source, method=Mine(), model=model, fed=fed))
        save_predictions(found, tmp_path / "p.csv")
        assert accuracies(read(tmp_path / "p.csv")) == pytest.approx(run.scores("trained"))
    assert "not built in" in error_message(lambda: predict_clients(tmp_path / "run"))


def test_predictions_of_names_are_names_and_formulas_are_escaped(tmp_path: Path) -> None:
    x, y = np.tile(np.eye(3), (4, 1)), np.array(["cat", "=dog", "ant"] * 4)
    fed = ft.Federation.from_arrays([(x, y, x, y)], names=["@clinic"])
    run = ft.simulate(ft.methods.Local(lr=1.0, epochs=50), ft.network("logistic", fed), fed, rounds=1)
    save_predictions(predict_clients(run, fed=fed), tmp_path / "p.csv")
    first, second = read(tmp_path / "p.csv")[:2]
    assert (first["name"], first["target"], first["prediction"]) == ("'@clinic", "cat", "cat")
    assert (second["target"], second["prediction"]) == ("'=dog", "'=dog")
    save_predictions(predict_clients(run, fed=fed), tmp_path / "p.parquet")
    assert read(tmp_path / "p.parquet")[1]["target"] == "=dog"  # a table has no formulas


def test_predictions_of_regression_are_numbers(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(12, 3))
    y = x[:, :2] * 2
    fed = ft.Federation.from_arrays([(x[:8], y[:8], x[8:], y[8:]), (x[:8], y[:8], x[:0], y[:0])])
    run = ft.simulate(ft.methods.Local(), ft.network("logistic", fed), fed, rounds=1)
    assert save_predictions(predict_clients(run, fed=fed), tmp_path / "p.parquet") == 4  # one client has no test data
    rows = read(tmp_path / "p.parquet")
    errors = [(row[f"target_{i}"] - row[f"prediction_{i}"]) ** 2 for row in rows for i in range(2)]
    assert np.mean(errors) == pytest.approx(run.scores("trained")[0], rel=1e-5)
    assert not any("probability" in name for name in rows[0])


def test_file_is_predicted_by_every_client(call: Callable[..., str]) -> None:
    fed: Any = ft.load("digits", clients=3)
    train("local", fed, Path("run"), model=ft.network("logistic", fed))
    np.savez("samples.npz", x=fed.x[:5].numpy())
    call("predict", "run", "samples.npz", "--all", "--out", "all.csv")
    rows = read(Path("all.csv"))
    assert next(iter(rows[0])) == "client" and "target" not in rows[0]
    assert [(row["client"], row["sample"]) for row in rows] == [(str(c), str(s)) for c in range(3) for s in range(5)]
    for client in range(3):
        call("predict", "run", "samples.npz", "--client", str(client), "--out", "one.csv")
        assert [row["prediction"] for row in rows if row["client"] == str(client)] == [
            row["class"] for row in read(Path("one.csv"))
        ]


def test_other_data_than_the_run_s_raises(call: Callable[..., str]) -> None:
    Path("data").mkdir()
    for client in ("a", "b"):
        np.savez(f"data/{client}.npz", x=np.eye(8), y=np.arange(8) % 2)
    fed = ft.Federation.from_folder("data")
    train("local", fed, Path("run"), model=ft.network("logistic", fed))
    call("predict", "run", "--all", "--out", "p.csv")
    before = Path("p.csv").read_bytes()
    np.savez("data/b.npz", x=np.eye(8), y=(np.arange(8) + 1) % 2)  # same shapes, other labels
    assert "differs from the data of the run" in error_message(
        lambda: call("predict", "run", "--all", "--out", "p.csv")
    )
    assert Path("p.csv").read_bytes() == before
    run = ft.simulate(ft.methods.Local(), ft.network("logistic", fed), fed, rounds=1)
    assert "differs" in error_message(lambda: predict_clients(run, fed=ft.load("digits", clients=2)))


def test_contradictory_options_raise_and_leave_no_file(
    call: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: Any = ft.load("digits", clients=2)
    train("local", fed, Path("run"), model=ft.network("logistic", fed))
    for words, expected in {
        "run": "--all for all clients",
        "run --all": "add --out",
        "run --all --client 1 --out p.csv": "not both",
        "run --all --out p.npz": "must end with .csv or .parquet",
        "run --all --moment later --out p.csv": "moment must be",
        "nowhere --all --out p.csv": "There is no run",
    }.items():
        assert expected in error_message(lambda words=words: call("predict", *words.split())), words  # type: ignore[misc]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "fedtailor[parquet]" in error_message(lambda: call("predict", "run", "--all", "--out", "p.parquet"))
    assert [path.name for path in Path().iterdir()] == ["run"]
