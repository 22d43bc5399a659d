"""Runs in several processes: the same numbers as one after another, killed processes, and interruptions."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Event

import pytest

import fedtailor as ft
from conftest import TinyNet, error_message, tiny_federation, wait_until
from fedtailor.core.system import machine_cores
from fedtailor.runs.files import folder_lock
from fedtailor.runs.reader import latest_checkpoint
from fedtailor.tasks import child
from fedtailor.tasks.processes import Processes, Slot
from fedtailor.training import signals
from support.killed_runs import SETTINGS, compare, killed, numbers


def test_parallel_runs_with_a_killed_one_equal_sequential_runs(tmp_path: Path) -> None:
    """The run whose process is killed in round 3 continues from its checkpoint of round 2. Data that another command
    has left are removed, unless that command still runs."""
    method, log = killed(tmp_path)
    methods = [ft.methods.FedPer(lr=0.3), method]
    in_use, abandoned = (tmp_path / "parallel" / name for name in (".data-in-use", ".data-abandoned"))
    for folder in (in_use, abandoned):
        folder.mkdir(parents=True)
    with folder_lock(in_use):
        parallel = compare(tmp_path / "parallel", methods, parallel=2)
    assert sorted(log.read_text().split()) == sorted("12334" + "1234")  # of two seeds
    names = {f"{name}-seed{seed}" for name in ("local", "fedper", "Killed") for seed in (0, 1)}
    assert {path.name for path in (tmp_path / "parallel").iterdir()} == names | {in_use.name}
    log.write_text("3 3")  # never again
    assert numbers(parallel) == numbers(compare(tmp_path / "sequential", methods))


def test_run_that_is_always_killed_is_reported_and_the_others_finish(tmp_path: Path) -> None:
    method, log = killed(tmp_path, times=99)
    result = compare(tmp_path / "all", [method], parallel=2)
    assert [run.method for run in result.runs] == ["local", "local"]
    assert sorted(result.failures) == ["Killed-seed0", "Killed-seed1"]
    assert "died in 3 attempts" in result.failures["Killed-seed0"] and "SIGKILL" in result.failures["Killed-seed0"]
    assert sorted(log.read_text().split()) == sorted("12333" * 2)  # two attempts start at the checkpoint


def test_what_cannot_be_sent_to_another_process_is_reported(tmp_path: Path) -> None:
    class Inner(TinyNet):
        pass

    message = error_message(
        lambda: ft.compare(["fedavg"], Inner, tiny_federation(), folder=tmp_path / "a", parallel=2, **SETTINGS)
    )
    assert "cannot be sent to another process" in message and "define classes and functions in a module" in message
    assert "pass a folder" in error_message(lambda: ft.compare(["fedavg"], TinyNet, tiny_federation(), parallel=2))


def is_alive(group: int) -> bool:
    """Return whether a group of processes has one that runs."""
    with suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


@pytest.mark.usefixtures("default_sigint")  # inherited by child processes
@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGKILL))]
)
def test_stopped_command_leaves_runs_that_can_be_resumed(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of a terminal, and SIGTERM all of a batch job; SIGKILL only the command, whose runs
    stop by themselves."""
    words = ["compare", "fedavg", "--rounds", "100000", "--data.clients", "4", "--out", "all", "--parallel", "2"]
    command = [sys.executable, "-m", "fedtailor.cli.main", *words]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    folders = [tmp_path / "all" / name for name in ("local-seed0", "fedavg-seed0")]
    records = [folder / "rounds.jsonl" for folder in folders]
    wait_until(process, lambda: all(path.is_file() and path.read_text().count("\n") > 2 for path in records))
    (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
    _, err = process.communicate()
    while is_alive(process.pid):
        Event().wait(0.02)
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    assert process.returncode == codes[number] and "Traceback" not in err
    if number != signal.SIGKILL:
        assert err.splitlines()[-2:] == [
            "Stopped; 0 of 2 runs are finished.",
            "To continue the comparison, run the same command with --out all",
        ]
    for folder, path in zip(folders, records, strict=True):
        checkpoint, problems = latest_checkpoint(folder)
        assert checkpoint is not None and not problems and checkpoint.round == path.read_text().count("\n") > 2


def test_second_signal_of_stopping_task_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system sends SIGTERM to the command and to its tasks, and the command then stops the tasks too."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        monkeypatch.setattr(signals, "_deferred", Event())
        signal.signal(signal.SIGTERM, child._stop)
        with pytest.raises(KeyboardInterrupt):  # before round 1, nothing has to be finished
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, child._stop)
        with signals.deferred_signals() as pending_signal:
            signal.raise_signal(signal.SIGTERM)
        assert pending_signal() == signal.SIGTERM
        signal.raise_signal(signal.SIGTERM)  # while the process ends, after its checkpoint
    finally:
        signal.signal(signal.SIGTERM, before)


def test_cores_and_gpus_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5")
    cores = max(1, machine_cores() // 3)
    assert Processes(3).slots() == [Slot(cores, "2"), Slot(cores, "GPU-5"), Slot(cores, "2")]
    half = [Slot(1, "2"), Slot(1, "GPU-5"), Slot(1, "2"), Slot(1, "GPU-5")]
    assert Processes(9, cpus_per_run=1, gpus_per_run=0.5).slots() == half
    assert Processes(1, cpus_per_run=1, gpus_per_run=0).slots() == [Slot(1, "")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Processes(1, cpus_per_run=2).slots() == [Slot(2, None)]
    assert "gpus_per_run needs a GPU" in error_message(Processes(1, gpus_per_run=1).slots)
