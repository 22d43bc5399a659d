"""Runs on a Ray cluster with real processes: the same numbers as one after another, a killed process, and Ctrl-C."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import fedtailor as ft
from conftest import wait_until
from fedtailor.runs.reader import latest_checkpoint
from support.killed_runs import compare, killed, numbers

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[str]:
    """Return a folder with a short path, because Ray's sockets are in it."""
    with TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(ray_folder: str) -> Iterator[None]:
    """Start Ray once on this machine."""
    options = {"num_cpus": 2, "object_store_memory": 200 * 2**20, "include_dashboard": False, "log_to_driver": False}
    ray.init(address="local", _temp_dir=ray_folder, **options)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_runs_on_ray_with_a_killed_one_equal_sequential_runs(tmp_path: Path) -> None:
    """The run whose process is killed in round 3 continues from its checkpoint of round 2."""
    method, log = killed(tmp_path)
    methods = [ft.methods.FedPer(lr=0.3), method]
    found = compare(tmp_path / "ray", methods, ray=True)
    assert sorted(log.read_text().split()) == sorted("12334" + "1234")  # of two seeds
    log.write_text("3 3")  # never again
    assert numbers(found) == numbers(compare(tmp_path / "sequential", methods))


@pytest.mark.usefixtures("cluster")
def test_run_that_is_always_killed_is_reported_and_the_others_finish(tmp_path: Path) -> None:
    method, _ = killed(tmp_path, times=99)
    result = compare(tmp_path / "all", [method], ray=True)
    assert [run.method for run in result.runs] == ["local", "local"]
    assert "died in 3 attempts" in result.failures["Killed-seed0"]


@pytest.mark.usefixtures("default_sigint")  # inherited by child processes
def test_interrupted_command_leaves_runs_that_can_be_resumed(tmp_path: Path, ray_folder: str) -> None:
    """Two runs are interrupted, and a third one has not started."""
    words = [
        "sweep",
        "--method.lr",
        "0.1,0.2,0.3",
        "--rounds",
        "100000",
        "--data.clients",
        "4",
        "--out",
        "all",
        "--ray",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedtailor.cli.main", *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=os.environ | {"RAY_TMPDIR": ray_folder},
    )  # fmt: skip
    found = (tmp_path / "all").glob
    wait_until(process, lambda: sum(path.read_text().count("\n") > 2 for path in found("*/rounds.jsonl")) == 2)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130 and "Traceback" not in err
    assert err.splitlines()[-2:] == [
        "Stopped; 0 of 3 runs are finished.",
        "To continue the sweep, run the same command again.",
    ]
    folders = [path.parent for path in found("*/rounds.jsonl")]
    assert len(folders) == 2
    for folder in folders:
        checkpoint, problems = latest_checkpoint(folder)
        rounds = (folder / "rounds.jsonl").read_text().count("\n")
        assert checkpoint is not None and not problems and checkpoint.round == rounds > 2
