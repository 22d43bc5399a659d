"""macOS and Windows, as far as they can be simulated: without fork, and without what else Windows lacks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fedtailor as ft
from conftest import error_message, tiny_federation
from fedtailor.cli.app import app
from fedtailor.cli.deploy import check_system
from fedtailor.reporting.dashboard import launcher
from support import other_system

SYSTEMS = ("win32", "darwin")


@pytest.fixture(params=SYSTEMS)
def without_fork(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if anything forks."""
    monkeypatch.delattr(os, "fork")
    if request.param == "darwin":
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"), raising=False)


@pytest.mark.usefixtures("without_fork")
def test_pool_without_fork_has_the_same_bits_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fedtailor.training.engines.auto.available_cores", lambda: 2)
    fed = tiny_federation()

    def train(engine: str) -> ft.Run:
        return ft.simulate(ft.methods.FedPer(), ft.network("mlp", fed), fed, rounds=2, engine=engine, device="cpu")

    pool, sequential, vectorized = train("pool"), train("sequential"), train("vectorized")
    assert [r["accuracy_trained"] for r in pool.records] == [r["accuracy_trained"] for r in sequential.records]
    assert all(
        bool((pool.personal(client)[name] == value).all())
        for client in range(fed.num_clients)
        for name, value in sequential.personal(client).items()
    )
    (message,) = [record.getMessage() for record in caplog.records if record.name == "fedtailor"]
    assert message.startswith("The engine 'pool' trains all clients in one process, because ") and "fork" in message
    for run in (pool, vectorized):
        assert "All clients train in one process, because " in run.info["engine_reason"]
    assert sequential.info["engine_reason"] == "The engine was requested."


def test_deployment_on_windows_names_what_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert "use Linux, macOS, or WSL" in error_message(check_system)


def test_dashboard_without_proc_and_ps_finds_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_PROC", Path("nowhere"))
    monkeypatch.setenv("PATH", "")
    assert launcher._command_line(os.getpid()) == ""


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="the engine pool needs a machine without a GPU")
@pytest.mark.parametrize("system", SYSTEMS)
def test_command_on_another_system_trains_in_spawned_processes(system: str, tmp_path: Path) -> None:
    """The numbers are those of this system; the runs are locked, trained, saved, and compared."""
    words = ["compare", "fedavg", "--data", "digits", "--data.clients", "4", "--rounds", "2", "--engine", "pool"]
    words += ["--parallel", "2", "--out"]
    script = [sys.executable, other_system.__file__, *words, "other"]
    environ = os.environ | {"FEDTAILOR_TEST_SYSTEM": system}
    done = subprocess.run(script, capture_output=True, text=True, check=False, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    CliRunner().invoke(app, [*words, str(tmp_path / "here")], catch_exceptions=False)
    for name in ("local-seed0", "fedavg-seed0"):
        other, here = (_accuracies(tmp_path / folder / name) for folder in ("other", "here"))
        assert other == here and len(other) == 2


def _accuracies(run: Path) -> list[float]:
    return [json.loads(line)["accuracy_trained"] for line in (run / "rounds.jsonl").read_text().splitlines()]
