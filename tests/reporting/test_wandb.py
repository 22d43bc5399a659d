"""W&B has the values of the records, each once, and nothing else about the machine."""

import math
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor as ft
from conftest import DivergingNet, error_message, tiny_federation
from fedtailor.reporting.trackers.track import track
from fedtailor.runs.files import folder_lock
from support.dashboard_client import make_run
from support.wandb_runs import WandbRun, read_offline_run, serve_wandb

ROUNDS = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local training and FedAPA on the same clients, evaluated in every second round."""
    folder = tmp_path_factory.mktemp("runs")
    for name, method in {"local": ft.methods.Local(), "apa": ft.methods.FedAPA(lr=0.3)}.items():
        make_run(folder / name, ROUNDS, method, evaluate_every=2)
    return folder


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of W&B's offline files."""
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "store"))
    return tmp_path / "store" / "wandb"


def files(store: Path) -> list[Path]:
    return sorted(store.glob("offline-run-*/run-*.wandb"))


def read(store: Path) -> WandbRun:
    """Read the only run; W&B's upload keeps only the last folder of a run, so there must not be several."""
    (path,) = files(store)
    return read_offline_run(path)


def first_rounds(run: Path, folder: Path, count: int) -> Path:
    """Copy a run as if it had been copied after some rounds."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "personal")
    lines = (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_bytes(b"".join(lines[:count]))
    return folder


def expected_scalars(run: ft.Run) -> dict[str, list[tuple[int, float]]]:
    names = {"cost/bytes_up": "bytes_up", "cost/seconds": "seconds", "loss/training": "loss"}
    names |= {f"accuracy/{moment}": f"accuracy_{moment}" for moment in ("trained", "received")}
    return {
        name: [(record["round"], record[key]) for record in run.records if record.get(key) is not None]
        for name, key in names.items()
    }


def offline(folder: Path, **others: Any) -> list[str]:
    messages: list[str] = []
    track([folder], wandb="project", wandb_mode="offline", echo=messages.append, **others)
    return messages


def test_offline_run_matches_records_settings_and_summary(runs: Path, store: Path) -> None:
    assert "sent all rounds up to 4 to W&B's project 'project'" in offline(runs / "apa")[0]
    found, run = read(store), ft.load_run(runs / "apa")
    expected, values = expected_scalars(run), found.scalars()
    assert len(expected["accuracy/trained"]) == ROUNDS // 2 and len(expected["cost/seconds"]) == ROUNDS
    assert {name: values[name] for name in expected} == expected
    assert found.name == "apa" and found.tags == ["fedapa", "own data", "TinyNet"]
    assert found.config["method"]["lr"] == 0.3 and found.config["rounds"] == ROUNDS
    assert found.config["fedtailor"]["version"] == ft.__version__
    end = run.summarize("trained")
    assert end is not None and found.summary["final/trained/last/accuracy/weighted"] == end["weighted"]
    assert found.summary["final/bytes_up"] == run.total("bytes_up")
    assert "final/bytes_up" not in values  # not a metric of a round
    counts = found.history[1]["per_client/accuracy_trained.values"]
    assert sum(counts) == run.num_clients
    took = [record["seconds"] + record.get("seconds_evaluating", 0.0) for record in run.records]
    began = (runs / "apa" / "experiment.toml").stat().st_mtime
    assert [row["_timestamp"] - began for row in found.history] == pytest.approx(
        [sum(took[: n + 1]) for n in range(ROUNDS)], abs=1e-3
    )


def test_offline_run_contains_nothing_about_the_machine(runs: Path, store: Path) -> None:
    """Neither its name, nor the user's folders, nor the program."""
    offline(runs / "apa")
    content = files(store)[0].read_bytes()
    for text in (socket.gethostname(), str(Path.home()), str(Path.cwd()), str(runs)):
        assert len(text) < 3 or text.encode() not in content
    assert not list((files(store)[0].parent / "files").rglob("*"))  # no metadata, requirements, or console output


def test_second_call_adds_nothing_and_baseline_is_added_later(runs: Path, store: Path) -> None:
    offline(runs / "apa")
    before = {path: path.read_bytes() for path in files(store)}
    assert "nothing new" in offline(runs / "apa")[0]
    assert {path: path.read_bytes() for path in files(store)} == before
    assert "final/trained/last/better_than_local" not in read(store).summary
    assert len(offline(runs)) == 2 and len(files(store)) == 2
    both = {found.name: found for found in map(read_offline_run, files(store))}
    assert 0 <= both["apa"].summary["final/trained/last/better_than_local"] <= 1
    assert [row["_step"] for row in both["apa"].history] == [1, 2, 3, 4]
    track([runs / "apa"], wandb="other", wandb_mode="offline")  # another project does not have the run
    assert len(files(store)) == 3


def test_offline_run_that_grew_is_complete_in_one_folder(runs: Path, store: Path, tmp_path: Path) -> None:
    """A call was killed: its file ends within a record, and the folder that it should have replaced is still there."""
    partial = first_rounds(runs / "apa", tmp_path / "partial", 2)
    offline(partial)
    assert [row["_step"] for row in read(store).history] == [1, 2] and "final/bytes_up" not in read(store).summary
    (path,) = files(store)
    shutil.copytree(path.parent, path.parent.with_name(path.parent.name.replace("-run-2", "-run-1")))
    path.write_bytes(path.read_bytes()[:-500])
    assert "sent all rounds" in offline(runs / "apa")[0]
    values, expected = read(store).scalars(), expected_scalars(ft.load_run(runs / "apa"))
    assert {name: values[name] for name in expected} == expected
    assert "nothing new" in offline(runs / "apa")[0]


def test_follow_writes_growing_run_to_one_folder(runs: Path, store: Path, tmp_path: Path) -> None:
    folder = first_rounds(runs / "apa", tmp_path / "run", 2)
    steps: Iterator[Callable[[], Any]] = iter([
        lambda: shutil.copy(runs / "apa" / "rounds.jsonl", folder / "rounds.jsonl"),
        lambda: shutil.copytree(runs / "apa" / "personal", folder / "personal"),
    ])  # fmt: skip
    offline(folder, follow=True, wait=lambda: next(steps)())
    found = read(store)
    assert [row["_step"] for row in found.history] == [1, 2, 3, 4] and "final/bytes_up" in found.summary


def test_diverged_values_are_nan(store: Path, tmp_path: Path) -> None:
    method, model = ft.methods.FedAvg(lr=1.0, epochs=1), DivergingNet().double()
    ft.simulate(method, model, tiny_federation(), rounds=1, dtype=torch.float64, folder=tmp_path / "run")
    offline(tmp_path / "run")
    assert math.isnan(read(store).history[0]["loss/trained"])


@pytest.mark.slow
def test_online_run_is_resumed_after_its_last_round(runs: Path, tmp_path: Path) -> None:
    """The server counts the rounds that it receives: the second call sends two, and the third one none.

    Each call has its own process, because W&B reads the server's address only once.
    """
    partial, messages = first_rounds(runs / "apa", tmp_path / "partial", 2), list[str]()
    with serve_wandb() as server:
        settings = {"WANDB_DIR": str(tmp_path), "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": server.address}
        for folder, sent in ((partial, 2), (runs / "apa", 4), (runs / "apa", 4)):
            command = [sys.executable, "-m", "fedtailor.cli.main", "track", str(folder), "--wandb", "me/project"]
            options = ["--wandb-mode", "online"]
            done = subprocess.run([*command, *options], env=os.environ | settings, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert server.sent == sent
            messages.append(done.stdout)
        (found,) = server.runs.values()
    assert ["nothing new" in message for message in messages] == [False, False, True]
    values, expected = found.scalars(), expected_scalars(ft.load_run(runs / "apa"))
    assert {name: values[name] for name in expected} == expected
    assert found.summary["final/bytes_up"] == ft.load_run(runs / "apa").total("bytes_up")
    assert found.config["method"]["name"] == "fedapa" and found.tags[0] == "fedapa"


def test_track_with_invalid_wandb_arguments_raises_error(
    runs: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = [runs / "apa"]
    assert "--wandb PROJECT" in error_message(lambda: track(one))
    assert error_message(lambda: track(one, tensorboard=tmp_path, wandb_mode="offline")).endswith("--wandb PROJECT.")
    assert "online or offline, got 'disabled'" in error_message(lambda: track(one, wandb="p", wandb_mode="disabled"))
    offline(runs / "apa")
    (lock,) = store.glob("fedtailor-*")
    with folder_lock(lock):
        assert "Another process is using" in error_message(lambda: offline(runs / "apa"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "file"))
    assert "cannot be written" in error_message(lambda: offline(runs / "apa"))
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
