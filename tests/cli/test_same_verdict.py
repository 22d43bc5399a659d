"""The terminal, sweeps, the report, and the dashboard print the same verdict on the same folder."""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fedtailor.cli.show import show
from fedtailor.experiments.sweep import SWEEP_FILE, open_sweep_folder, parse_sweep
from fedtailor.reporting.dashboard.views import comparison
from fedtailor.reporting.report import report
from fedtailor.runs.files import checksum
from fedtailor.runs.reader import load_runs
from support.dashboard_client import read_runs

LOCAL = [0.50, 0.52, 0.54]


def set_scores(folder: Path, score: float) -> None:
    """Change the record of a finished run of one round: all clients have this accuracy."""
    record = json.loads((folder / "rounds.jsonl").read_text())
    tables = [record["per_client"][f"accuracy_{moment}"] for moment in ("received", "trained")]
    for table in tables:
        table.update(dict.fromkeys(table, score))
    content = f"{json.dumps(record)}\n".encode()
    (folder / "rounds.jsonl").write_bytes(content)
    path = folder / "checkpoints" / "000001" / "checkpoint.json"
    index = json.loads(path.read_text().rpartition("}")[0] + "}")
    index["metadata"]["records"] = {"bytes": len(content), "sha256": checksum(content)}
    text = json.dumps(index).encode()
    path.write_bytes(text + f"\n{checksum(text)}\n".encode())


def verdicts(
    folder: Path, words: str, scores: Mapping[str, Sequence[float]], capsys: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """Run a sweep with these scores per seed, and return reader -> the text that it prints on the folder."""
    requested = parse_sweep(f"{words} --data digits --data.clients 3 --rounds 1 --batch-size 64".split())
    with open_sweep_folder(folder, requested.plan):
        for point in requested.points:
            point.experiment.run(folder=folder / point.label)
            set_scores(folder / point.label, scores[point.label.rpartition("-")[0]][point.experiment.seed])
    texts = {
        "report": html.unescape(report(*load_runs([folder]))),
        "dashboard": " ".join(comparison(list(read_runs(folder)[1].values()))["summary"]),
    }
    for reader in ("sweep", "terminal"):  # a folder without a plan is a comparison of methods
        show(folder)
        texts[reader] = " ".join(capsys.readouterr().out.split())
        (folder / SWEEP_FILE).unlink(missing_ok=True)
    return texts


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (
            [0.60, 0.63, 0.65],
            "FedPer scores highest (62.7 %), and its 10.7-point lead over local training is statistically significant "
            "over 3 seeds.",
        ),
        (
            [0.50, 0.63, 0.65],
            "FedPer scores highest (59.3 %), but its 7.3-point lead over local training is not statistically "
            "significant over 3 seeds.",
        ),
        (
            [0.60, 0.63],
            "FedPer scores highest (61.5 %), but there are not enough seeds to tell whether its 10.5-point lead over "
            "local training is more than chance.",
        ),
        (
            [0.60, 0.62, 0.64],
            "FedPer scores highest (62.0 %), but its 10.0-point lead over local training is the same in all 3 seeds, "
            "for which no significance test is defined.",
        ),
    ],
    ids=["significant", "not significant", "two seeds", "no variation"],
)
def test_readers_of_one_folder_print_the_same_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], others: list[float], expected: str
) -> None:
    seeds = ",".join(map(str, range(len(others))))
    scores = {"local": LOCAL, "fedper": others}
    texts = verdicts(tmp_path, f"--method local,fedper --seed {seeds}", scores, capsys)
    assert {reader: expected in text for reader, text in texts.items()} == dict.fromkeys(texts, True)


def test_readers_of_a_sweep_over_a_field_print_the_same_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {"fedprox-mu0.1": LOCAL, "fedprox-mu1": [0.60, 0.63, 0.65]}
    texts = verdicts(tmp_path, "--method fedprox --method.mu 0.1,1 --seed 0,1,2", scores, capsys)
    expected = (
        "FedProx mu=1 scores highest (62.7 %), and its 10.7-point lead over FedProx mu=0.1 is statistically "
        "significant over 3 seeds."
    )
    assert {reader: expected in text for reader, text in texts.items()} == dict.fromkeys(texts, True)
