"""The command `fedtailor paper` on a tiny grid."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtailor.cli.main import app

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
    assert "83.27" in shown and "Our choice: best round" in shown
    assert "| w/o Clipping | accuracy | 83.27 |" in paper("show", *words, "--format", "markdown")
    (cell, *_) = json.loads(paper("show", *words, "--format", "json"))
    assert cell["printed"] == 83.27 and cell["difference"] == pytest.approx(cell["mean"] - 83.27)
