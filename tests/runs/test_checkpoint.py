"""Checkpoints: a run that is stopped at any time resumes and ends with the same bits."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import nn

import fedtailor as ft
from conftest import (
    MEASURED,
    REPRESENTATIVE_METHODS,
    DivergingNet,
    TinyNet,
    all_same,
    error_message,
    models,
    same,
    tiny_federation,
    wait_until,
)
from fedtailor.methods import METHODS
from fedtailor.runs import checkpoint, files
from fedtailor.runs.checkpoint import latest
from fedtailor.runs.records import Record
from fedtailor.runs.run import FORMAT
from fedtailor.runs.writer import unused_folder

pytestmark = pytest.mark.usefixtures("default_sigint")
ROUNDS = 4
Settings = dict[str, Any]  # arguments of simulate


class Killed(BaseException):
    """Stands for SIGKILL: `except Exception` does not catch it."""


def simulate(folder: Path | None, method: ft.Method | None = None, **settings: Any) -> ft.Run:
    """Run a small simulation."""
    defaults: Settings = {
        "rounds": ROUNDS, "batch_size": 2, "participation": 0.6, "dtype": torch.float64, "engine": "sequential",
        "evaluate_every": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    net = TinyNet().double()
    return ft.simulate(method or ft.methods.FedPer(), net, tiny_federation(), folder=folder, **defaults | settings)


def resume(
    folder: Path, method: ft.Method | None = None, on_round_end: Callable[[Record], None] | None = None
) -> ft.Run:
    """Resume a run of `simulate`."""
    net, fed = TinyNet().double(), tiny_federation()
    return ft.resume(folder, method=method, model=net, fed=fed, on_round_end=on_round_end)


def stop_after(number: int) -> Callable[[Record], None]:
    """Return a callback that raises `Killed` after this round."""

    def stop(record: Record) -> None:
        if record["round"] == number:
            raise Killed

    return stop


def stopped_run(folder: Path, after: int = 3, method: ft.Method | None = None, **settings: Any) -> Path:
    """Return the folder of a run that was killed after round `after` was recorded and before it was saved."""
    with pytest.raises(Killed):
        simulate(folder, method, checkpoint_every=1, on_round_end=stop_after(after), **settings)
    return folder


def file_contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_times(run: ft.Run) -> list[Record]:
    """Return the records without measured times and memory."""
    return [{name: value for name, value in record.items() if not name.startswith(MEASURED)} for record in run.records]


def same_run(run: ft.Run, expected: ft.Run) -> bool:
    """Return whether two runs have equal states, models, and records, bit by bit."""
    clients = [[each.client(client) for client in range(each.num_clients)] for each in (run, expected)]
    return (
        same(run.server, expected.server)
        and all_same(clients[0], clients[1])
        and all(all_same(models(run, moment), models(expected, moment)) for moment in ("received", "trained"))
        and without_times(run) == without_times(expected)
    )


FULLY_TESTED = ["fedapa", "fedapm", "fedlag", "selffl"]


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *(
            pytest.param(name, "vectorized", marks=() if name in REPRESENTATIVE_METHODS else pytest.mark.slow)
            for name in METHODS
        ),
        *((name, engine) for name in FULLY_TESTED for engine in ("sequential", "pool")),
    ],
)
def test_resume_stopped_run_gives_same_bits(name: str, engine: str, tmp_path: Path) -> None:
    method = METHODS[name]()
    expected = simulate(tmp_path / "uninterrupted", method, engine=engine)
    run = resume(stopped_run(tmp_path / "run", 3, method, engine=engine), method)
    assert same_run(run, expected)
    assert same_run(ft.load_run(tmp_path / "run"), ft.load_run(tmp_path / "uninterrupted"))


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedpac", "dbe"])
def test_resume_with_kept_optimizer_state_and_schedule_gives_same_bits(name: str, tmp_path: Path) -> None:
    adam: Settings = {"optimizer": "adam", "momentum": 0.0, "lr": 0.01, "lr_schedule": "cosine"}
    method = METHODS[name](**adam | {"keep_optimizer_state": True})
    expected = simulate(tmp_path / "uninterrupted", method)
    assert same_run(resume(stopped_run(tmp_path / "run", 3, method)), expected)  # the folder contains the settings
    reset = simulate(None, METHODS[name](**adam))
    assert not same(reset.server, expected.server)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FULLY_TESTED)
def test_resume_stopped_run_on_gpu_gives_same_bits(name: str, tmp_path: Path) -> None:
    method = METHODS[name]()
    expected = simulate(None, method, engine="vectorized", device="cuda")
    assert same_run(resume(stopped_run(tmp_path, 3, method, engine="vectorized", device="cuda"), method), expected)


def test_resume_finished_run_loads_it(tmp_path: Path) -> None:
    expected = simulate(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert same_run(ft.resume(tmp_path), expected)  # no argument is needed
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_resume_built_in_parts_need_no_arguments(tmp_path: Path) -> None:
    fed = ft.load("digits", clients=3, seed=4)
    method = ft.methods.LAG(ft.methods.FedProx(mu=1))  # the file contains 1.0
    settings: Settings = {"rounds": 3, "participation": (0.5, 1.0), "evaluate": 2, "validation": 0.2, "seed": 7}
    model = ft.network("mlp", fed, hidden=(8,))
    expected = ft.simulate(method, model, fed, **settings)
    with pytest.raises(Killed):
        ft.simulate(method, model, fed, folder=tmp_path, checkpoint_every=1, on_round_end=stop_after(2), **settings)
    assert same_run(ft.resume(tmp_path), expected)


def test_resume_custom_parts_must_be_passed_again_unchanged(tmp_path: Path) -> None:
    stopped_run(tmp_path)
    net, fed = TinyNet().double(), tiny_federation()
    wide = ft.wrap(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), head="1")
    cases: dict[str, Settings] = {
        "network 'conftest:TinyNet' is code that importing would execute; if you trust it, run: fedtailor resume": {
            "fed": fed
        },
        "data 'own data' is not built in": {"model": net},
        "data differs from the one this run was started with": {"model": net, "fed": tiny_federation(seed=1)},
        "model differs from the one this run was started with": {"model": wide, "fed": fed},
        "method differs from the one this": {"method": ft.methods.FedPer(lr=0.2), "model": net, "fed": fed},
    }
    for message, parts in cases.items():
        assert message in error_message(partial(ft.resume, tmp_path, **parts))
    assert len(resume(tmp_path, ft.methods.FedPer()).records) == ROUNDS


def test_resume_uses_initial_weights_from_folder(tmp_path: Path) -> None:
    """A module that is passed again may have other weights; clients that never trained have the initial weights."""
    expected = simulate(tmp_path / "uninterrupted", schedule=[[0]] * ROUNDS, participation=1.0, rounds=None)
    settings: Settings = {"schedule": [[0]] * ROUNDS, "participation": 1.0, "rounds": None}
    torch.manual_seed(99)
    assert same_run(resume(stopped_run(tmp_path / "run", **settings)), expected)


@pytest.mark.parametrize("size", [1, 100, 700])
def test_checkpoint_of_many_clients_has_several_files(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if one client's state is larger than a file should be."""
    monkeypatch.setattr("fedtailor.runs.checkpoint._SHARD_BYTES", size)
    method, expected = ft.methods.Ditto(), simulate(None, ft.methods.Ditto())
    folder = stopped_run(tmp_path, 3, method)
    assert len(list((folder / "checkpoints" / "000002").glob("states-*"))) > 1
    assert same_run(resume(folder, method), expected)


def test_resume_method_with_unserializable_fields_matches(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Unusual(ft.methods.FedPer):
        function: Any = field(default_factory=lambda: partial(max, 1))
        names: Any = frozenset({"a", "b", "c"})
        bounds: Any = (math.inf, None)
        table: Any = field(default_factory=lambda: {"a key": [{"x": 1}]})
        array: Any = field(default_factory=lambda: torch.ones(3))

    stopped_run(tmp_path, 3, Unusual())
    assert len(resume(tmp_path, Unusual()).records) == ROUNDS


def test_resume_diverged_run_gives_same_records(tmp_path: Path) -> None:
    def diverge(folder: Path | None, record: Callable[[Record], None] | None = None) -> ft.Run:
        torch.manual_seed(0)
        settings: Settings = {"rounds": 3, "dtype": torch.float64, "checkpoint_every": 1, "max_failures": 1.0}
        method = ft.methods.Local(lr=1.0, epochs=1)
        return ft.simulate(
            method, DivergingNet().double(), tiny_federation(), folder=folder, on_round_end=record, **settings
        )

    with pytest.raises(Killed):
        diverge(tmp_path, stop_after(2))
    run, expected = ft.resume(tmp_path, model=DivergingNet().double(), fed=tiny_federation()), diverge(None)
    assert math.isnan(run.records[0]["loss_trained"]) and str(without_times(run)) == str(without_times(expected))


def test_resume_with_other_torch_version_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is killed again before the next checkpoint, and the next checkpoint is damaged."""
    folder, expected = stopped_run(tmp_path, after=2), simulate(None)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("torch.__version__", "9.9")
        for number in (2, 4):
            with pytest.raises(Killed):
                resume(folder, on_round_end=stop_after(number))
        damage(folder / "checkpoints" / "000003" / "server.safetensors", "truncated")
        assert same_run(resume(folder), expected)
    changes = ft.load_run(folder).info["environment_changes"]
    assert changes == [[1, "9.9", "cpu"], [2, "9.9", "cpu"]] and same_run(ft.load_run(folder), expected)


def test_checkpoint_every_keeps_last_two_checkpoints(tmp_path: Path) -> None:
    def checkpoints() -> list[str]:
        return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())

    seen: list[list[str]] = []
    simulate(
        tmp_path,
        rounds=7,
        checkpoint_every=2,
        on_round_end=lambda line: seen.append(checkpoints() if line["round"] > 2 else []),
    )
    assert seen[2:] == [["000002"], ["000002"], ["000002", "000004"], ["000002", "000004"], ["000004", "000006"]]
    assert checkpoints() == ["000006", "000007"]  # also at the end


def test_run_killed_before_first_checkpoint_starts_again(tmp_path: Path) -> None:
    expected = simulate(None)
    for again in (resume, simulate):
        folder = tmp_path / again.__name__
        with pytest.raises(Killed):
            simulate(folder, checkpoint_every=3, on_round_end=stop_after(2))
        run = again(folder) if again is resume else simulate(folder, checkpoint_every=3)
        assert same_run(run, expected)


def test_simulate_into_used_folder_raises_and_changes_nothing(tmp_path: Path) -> None:
    folder = stopped_run(tmp_path / "run")
    before = file_contents(tmp_path)
    hint = "contains this run, unfinished; resume it with: fedtailor resume"
    assert hint in error_message(lambda: simulate(folder, checkpoint_every=1))
    assert "contains another run" in error_message(lambda: simulate(folder, seed=1))
    assert before == file_contents(tmp_path) and unused_folder(tmp_path, "run").name == "run-2"
    resume(folder)
    assert "contains this run, finished" in error_message(lambda: simulate(folder, checkpoint_every=1))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    assert "is not empty" in error_message(lambda: simulate(tmp_path / "other"))
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]


# faults at file operations


class FaultInjector:
    """Counts file operations in a folder and raises an error from one operation on, as if the process were killed.

    Python's audit events report when files are opened, renamed, or removed, and folders created; writes fail halfway.
    """

    def __init__(self) -> None:
        self.folder, self.count, self.fatal = "", 0, sys.maxsize
        self.error: Callable[[], BaseException] = Killed
        sys.addaudithook(self._on_event)  # hooks cannot be removed, so all tests share one

    @contextmanager
    def at(self, folder: Path, fatal: int, error: Callable[[], BaseException] = Killed) -> Iterator[None]:
        self.folder, self.count, self.fatal, self.error = str(folder), 0, fatal, error
        try:
            yield
        finally:
            self.folder = ""

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.folder or event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            return
        if event == "open" and args[1] in ("r", "rb", None):  # reading is harmless; None: a folder that is flushed
            return
        inside = event in ("os.remove", "os.rmdir") and args[1] != -1  # relative to a folder that is being removed
        if inside or (isinstance(args[0], (str, os.PathLike)) and str(args[0]).startswith(self.folder)):
            self.step()

    def step(self) -> bool:
        self.count += 1
        if self.count >= self.fatal:
            raise self.error()
        return True

    def write(self, file: BinaryIO, data: bytes) -> None:
        file.write(data[: len(data) // 2])
        file.flush()
        if self.folder:
            self.step()
        file.write(data[len(data) // 2 :])
        file.flush()


FAULTS = FaultInjector()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> FaultInjector:
    for module in ("runs.files", "runs.checkpoint", "runs.writer"):
        monkeypatch.setattr(f"fedtailor.{module}.write_and_sync", FAULTS.write)
    return FAULTS


def disk_full() -> BaseException:
    return OSError(28, os.strerror(28))


STEPS = pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 9])  # every n-th operation


@STEPS
@pytest.mark.parametrize("error", [Killed, disk_full], ids=["killed", "disk full"])
def test_resume_after_fault_at_any_file_operation_gives_same_bits(
    error: Callable[[], BaseException], every: int, faults: FaultInjector, tmp_path: Path
) -> None:
    """Test faults from the first to the last file operation of a run."""
    settings: Settings = {"checkpoint_every": 1, "rounds": 3}
    expected = simulate(None, rounds=3)
    with faults.at(tmp_path / "counted", sys.maxsize):
        simulate(tmp_path / "counted", **settings)
    steps = faults.count
    assert steps > 60  # otherwise the hook does not work
    for fatal in range(1, steps + 1, every):
        folder = tmp_path / f"{fatal:03d}"
        with faults.at(folder, fatal, error), pytest.raises((Killed, ft.FedTailorError)) as caught:
            simulate(folder, **settings)
        if error is disk_full:
            assert "No space left on device" in str(caught.value)
        run = resume(folder) if (folder / "experiment.toml").is_file() else simulate(folder, **settings)
        assert same_run(run, expected), f"operation {fatal}"
        shutil.rmtree(folder)


@STEPS
def test_resume_after_fault_while_resuming_gives_same_bits(every: int, faults: FaultInjector, tmp_path: Path) -> None:
    expected, partial_run = simulate(tmp_path / "uninterrupted"), stopped_run(tmp_path / "partial", after=2)
    fatal, done = 1 - every, False
    while not done:
        fatal += every
        folder = shutil.copytree(partial_run, tmp_path / f"{fatal:03d}")
        with faults.at(folder, fatal):
            try:
                resume(folder)
                done = True
            except Killed:
                pass
        assert same_run(resume(folder), expected), f"operation {fatal}"
        shutil.rmtree(folder)
    assert fatal > 50


def test_full_disk_raises_and_keeps_valid_checkpoint(faults: FaultInjector, tmp_path: Path) -> None:
    folder = stopped_run(tmp_path / "run", after=3)
    before = {path: path.read_bytes() for path in (folder / "checkpoints" / "000002").iterdir()}
    with faults.at(folder / "checkpoints", 6, disk_full):
        message = error_message(lambda: resume(folder))
    assert "The checkpoint of round 3 cannot be written" in message and "No space left on device" in message
    assert f"rounds up to 2 are saved. Fix the problem and resume it with: fedtailor resume {folder}" in message
    assert before == {path: path.read_bytes() for path in before}


# damage


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        path.write_bytes({"truncated": data[:-7], "flipped": flipped, "empty": b""}[how])


@pytest.mark.parametrize("how", ["truncated", "flipped", "missing", "empty"])
@pytest.mark.parametrize(
    "name", ["checkpoint.json", "server.safetensors", "states-000.safetensors", "trained-000.safetensors"]
)
def test_resume_damaged_checkpoint_uses_previous_one(
    name: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, folder = simulate(None), stopped_run(tmp_path / "run", after=4)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["000002", "000003"]
    damage(folder / "checkpoints" / "000003" / name, how)
    assert same_run(resume(folder), expected)
    assert f"000003' cannot be used: '{name}'" in caplog.text
    both = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert both == ["000003", "000004"] and same_run(ft.load_run(folder), expected)


SERVERS = [f"checkpoints/{number:06d}/server.safetensors" for number in (2, 3)]


@pytest.mark.parametrize(
    "names", [["experiment.toml"], ["run.json"], ["start.safetensors"], SERVERS], ids=lambda names: names[0]
)
def test_resume_without_valid_files_raises_and_changes_nothing(names: list[str], tmp_path: Path) -> None:
    folder = stopped_run(tmp_path / "run", after=4)
    for name in names:
        damage(folder / name, "flipped")
    before = file_contents(folder)
    message = error_message(lambda: resume(folder))
    assert str(folder) in message and ("No checkpoint in" in message or names is not SERVERS)
    assert before == file_contents(folder)


def test_resume_truncated_records_uses_previous_checkpoint(tmp_path: Path) -> None:
    """If round 3 in rounds.jsonl is damaged, checkpoint 3 does not match it, but checkpoint 2 does."""
    folder, expected = stopped_run(tmp_path / "run", after=4), simulate(None)
    lines = (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_bytes(b"".join(lines[:2]) + b'{"round": 3')
    assert same_run(resume(folder), expected)


def test_resume_repairs_damaged_finished_run(tmp_path: Path) -> None:
    expected = simulate(tmp_path, checkpoint_every=1)
    for name in ("checkpoints/000004/server.safetensors", "personal/trained/001.safetensors"):
        for how in ("flipped", "truncated", "missing"):
            damage(tmp_path / name, how)
            message = error_message(lambda: ft.load_run(tmp_path).personal(1))
            assert str(tmp_path) in message
            assert how == "missing" or "to repair the run, resume it with: fedtailor resume" in message
            assert same_run(resume(tmp_path), expected) and same_run(ft.load_run(tmp_path), expected)


def test_load_run_of_another_format_raises(tmp_path: Path) -> None:
    simulate(tmp_path)
    path = tmp_path / "run.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps(info | {"format": FORMAT + 1, "fedtailor": "3.1"}))
    messages = [error_message(lambda: ft.load_run(tmp_path)), error_message(lambda: ft.resume(tmp_path))]
    expected = f"written by FedTailor 3.1 in format {FORMAT + 1}, and this version reads format {FORMAT}"
    assert all(expected in each for each in messages)
    path.write_text(json.dumps({name: value for name, value in info.items() if name not in ("format", "fedtailor")}))
    assert "by FedTailor (an earlier version)" in error_message(lambda: ft.load_run(tmp_path))
    for invalid in ({"format": list(range(2000))}, {"format": FORMAT, "fedtailor": ["3.1"]}):
        path.write_text(json.dumps(info | invalid))
        assert "does not name the format" in error_message(lambda: ft.load_run(tmp_path))
    path.write_text(json.dumps(info | {"format": 10**4000, "fedtailor": "\x1b[2J" + "9" * 4000}))
    assert len(error_message(lambda: ft.load_run(tmp_path))) < 400


def test_simulate_settings_too_long_to_save_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtailor.runs.writer.MAX_SETTINGS_BYTES", 1000)
    assert "too long to be saved" in error_message(lambda: simulate(tmp_path, schedule=[[0, 1]] * 400, rounds=None))


# other processes and signals

SCRIPT = """
import sys, pathlib, torch
sys.path[:0] = [sys.argv[1], str(pathlib.Path(sys.argv[1]).parent)]
from test_checkpoint import simulate
report = lambda line: print(line["round"], flush=True)
simulate(pathlib.Path(sys.argv[2]), checkpoint_every=1, rounds=int(sys.argv[3]), on_round_end=report)
"""


def start_process(folder: Path, rounds: int) -> "subprocess.Popen[str]":
    """Start a run in another process, and wait until it has finished two rounds."""
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(folder), str(rounds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["1\n", "2\n"]
    return process


def test_resume_while_another_process_runs_raises(tmp_path: Path) -> None:
    process = start_process(tmp_path, rounds=100_000)
    assert "Another process is using the folder" in error_message(lambda: resume(tmp_path))
    process.kill()
    process.wait()
    with pytest.raises(Killed):  # allowed now
        resume(tmp_path, on_round_end=lambda record: stop_after(record["round"])(record))


def test_resume_in_the_same_process_raises(tmp_path: Path) -> None:
    """A failed attempt, or copying the folder, does not release the lock."""
    script = f"import fedtailor as ft; ft.resume({str(tmp_path / 'run')!r})"
    messages: list[str] = []

    def record(line: Record) -> None:
        messages.append(error_message(lambda: resume(tmp_path / "run")))
        shutil.copytree(tmp_path / "run", tmp_path / f"copy{line['round']}")
        if line["round"] == 2:
            other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
            messages.append(other.stderr)

    simulate(tmp_path / "run", checkpoint_every=1, on_round_end=record)
    assert all("Another process is using the folder" in each for each in messages) and len(messages) == ROUNDS + 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_finishes_round_and_saves(number: signal.Signals, tmp_path: Path) -> None:
    def interrupt(line: Record) -> None:
        if line["round"] == 2:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt) as caught:
        simulate(tmp_path, checkpoint_every=100, on_round_end=interrupt)
    assert f"Stopped after round 2 of 4; resume it with: fedtailor resume {tmp_path}" in str(caught.value)
    assert signal.getsignal(number) is before
    found, problems = latest(tmp_path, lambda found: None)
    assert found is not None and found.round == 2 and not problems
    assert same_run(resume(tmp_path), simulate(None))


def test_interrupt_while_saving_last_round_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = checkpoint.save

    def interrupted(folder: Path, number: int, *rest: Any) -> None:
        save(folder, number, *rest)
        if number == ROUNDS:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("fedtailor.runs.checkpoint.save", interrupted)
    with pytest.raises(KeyboardInterrupt, match="Stopped after round 4 of 4"):
        simulate(tmp_path)
    assert same_run(resume(tmp_path), simulate(None))


def test_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = simulate(tmp_path, on_round_end=lambda line: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(run.records) == ROUNDS


def test_second_interrupt_stops_immediately(tmp_path: Path) -> None:
    def interrupt(line: Record) -> None:
        if line["round"] == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the run continued")

    with pytest.raises(KeyboardInterrupt):
        simulate(tmp_path, checkpoint_every=1, on_round_end=interrupt)
    assert latest(tmp_path, lambda found: None)[0].round == 2  # type: ignore[union-attr]
    assert same_run(resume(tmp_path), simulate(None))


def test_error_in_callback_saves_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        simulate(tmp_path, checkpoint_every=100, on_round_end=lambda line: 1 / (line["round"] - 2) and None)
    assert latest(tmp_path, lambda found: None)[0].round == 2  # type: ignore[union-attr]
    assert same_run(resume(tmp_path), simulate(None))


def test_write_atomic_error_keeps_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_atomic(path, b"old")
    with pytest.raises(TypeError):
        files.write_atomic(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"


# the command


@pytest.mark.slow
@pytest.mark.parametrize(("method", "engine", "kills"), [("fedapa", "vectorized", 4), ("fedapm", "pool", 3)])
def test_command_killed_repeatedly_gives_same_bits(method: str, engine: str, kills: int, tmp_path: Path) -> None:
    """Send SIGKILL to the command after different rounds."""
    words = ["--method", method, "--engine", engine, "--data.clients", "6", "--rounds", "12", "--checkpoint-every", "1"]
    command = [sys.executable, "-m", "fedtailor.cli.main"]
    expected = subprocess.run(
        [*command, "run", *words, "--out", str(tmp_path / "uninterrupted")], capture_output=True, text=True
    )
    assert expected.returncode == 0, expected.stderr
    folder = tmp_path / "killed" / f"{method}-seed0-digits"
    verb = ["run", *words, "--out", str(tmp_path / "killed")]
    for kill in range(kills):
        process = subprocess.Popen([*command, *verb], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wait_until(process, partial(has_lines, folder, 3 * kill + 2))
        process.kill()
        process.wait()
        assert not (folder / "personal").is_dir()
        verb = ["resume", str(folder)]
    done = subprocess.run([*command, *verb], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert same_run(ft.load_run(folder), ft.load_run(tmp_path / "uninterrupted" / folder.name))


def has_lines(folder: Path, count: int) -> bool:
    path = folder / "rounds.jsonl"
    return path.is_file() and path.read_bytes().count(b"\n") >= count
