"""The command `fedtailor paper` on a tiny grid."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtailor.cli.app import app
from fedtailor.papers.running import select_cells
from support.paper_results import write_results

TINY = ["rounds=1", "data.name=digits", "data.clients=4", "data.min_size=2", "data.test=0.25", "network.name=mlp"]


def paper(*words: str) -> str:
    done = CliRunner().invoke(app, ["paper", *words], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    return done.output


def test_list_run_and_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    override = [word for setting in TINY for word in ("--override", setting)]
    words = ["fedapa", "table-3", "--only", "Clipping,Local", *override]
    assert "table-7-100" in paper("list")
    assert "3 runs were added" in paper("run", *words, "--seeds", "0")
    assert "0 runs were added" in paper("run", *words, "--seeds", "0")
    assert (tmp_path / "results/papers/fedapa.jsonl").is_file()
    shown = paper("show", *words)
    assert "83.27" in shown and "Our choice: best round" in shown and "Local training †" in shown
    assert "Claim: Each of the three steps" in shown
    assert "| w/o Clipping | 83.27 / " in paper("show", *words, "--format", "markdown")
    assert r"w/o Clipping & 83.27 / " in paper("show", *words, "--format", "latex")
    (cell, *_) = json.loads(paper("show", *words, "--format", "json"))["rows"]
    assert cell["printed"] == 83.27 and cell["difference"] == pytest.approx(cell["mean"] - 83.27)
    (row, *_) = csv.DictReader(paper("show", *words, "--format", "csv").splitlines())
    assert (row["row"], row["paper"], row["seeds"]) == ("w/o Clipping", "83.27", "1")
    assert float(row["ours"]) == cell["mean"]


def test_a_label_with_a_comma_selects_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    only = ("--only", "FedAvg, as in the code,FedProx, as described")
    shown = paper("show", "fedapm", "table-3-cifar10", *only, "--format", "markdown")
    rows = [line.split("|")[1].strip() for line in shown.splitlines() if line.startswith("| Fed") and " ± " in line]
    assert rows == ["FedAvg, as in the code", "FedProx, as described"]


def test_show_of_a_whole_paper_without_results_prints_all_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = paper("show", "selffl", "--format", "markdown")
    assert "| Self-FL | 76.24 ± 0.07 / – |" in shown and shown.count("|---|") >= 10
    assert "fewest false accepts on all device types (Section 4.3) | does not hold: 4 of 5" in shown


def test_report_on_results_of_a_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_results(tmp_path / "fedapa.jsonl", select_cells("fedapa", "table-4", ["mu=0.5"]), lambda cell, seed: 80.0)
    done = CliRunner().invoke(app, ["report", "fedapa.jsonl", "-o", "fedapa.html"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("Of 8 claims: 6 open until more is run, 1 answered in words, 1 not checked.")
    assert "A self-weight of 0.5 is best" in (tmp_path / "fedapa.html").read_text(encoding="utf-8")
