"""Nothing lost: whatever stops a run, and whenever, it goes on to the same end, to the last bit."""

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
from conftest import SOME, Loud, TinyNet, alike, models, refusal, same, tiny_federation, wait_until
from fedtailor import checkpoint, files
from fedtailor.checkpoint import latest
from fedtailor.lines import Record
from fedtailor.methods import METHODS

pytestmark = pytest.mark.usefixtures("hears_interrupts")
ROUNDS = 4
Kept = dict[str, Any]  # of simulate's settings


class Killed(BaseException):
    """Stands for SIGKILL: no `except Exception` holds it up."""


def go(folder: Path | None, method: ft.Method | None = None, **settings: Any) -> ft.Run:
    usual: Kept = {
        "rounds": ROUNDS,
        "batch_size": 2,
        "participation": 0.6,
        "dtype": torch.float64,
        "engine": "sequential",
        "evaluate_every": 2,
    }
    torch.manual_seed(0)
    net = TinyNet().double()
    return ft.simulate(method or ft.methods.FedPer(), net, tiny_federation(), folder=folder, **usual | settings)


def go_on(folder: Path, method: ft.Method | None = None) -> ft.Run:
    return ft.resume(folder, method=method, model=TinyNet().double(), fed=tiny_federation())


def stop_after(number: int) -> Callable[[Record], None]:
    def record(line: Record) -> None:
        if line["round"] == number:
            raise Killed

    return record


def stopped(folder: Path, after: int = 3, method: ft.Method | None = None, **settings: Any) -> Path:
    """A run that was killed when round `after` was recorded and not yet saved."""
    with pytest.raises(Killed):
        go(folder, method, checkpoint_every=1, record=stop_after(after), **settings)
    return folder


def told(run: ft.Run) -> list[Record]:
    """The record without what the clock says."""
    return [{name: value for name, value in line.items() if not name.startswith("seconds")} for line in run.records]


def ends_alike(run: ft.Run, whole: ft.Run) -> bool:
    clients = [[each.client(client) for client in range(each.num_clients)] for each in (run, whole)]
    return (
        same(run.server, whole.server)
        and alike(clients[0], clients[1])
        and all(alike(models(run, moment), models(whole, moment)) for moment in ("received", "trained"))
        and told(run) == told(whole)
    )


FOUR = ["fedapa", "fedapm", "fedlag", "selffl"]


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *(pytest.param(name, "vectorized", marks=() if name in SOME else pytest.mark.slow) for name in METHODS),
        *((name, way) for name in FOUR for way in ("sequential", "pool")),
    ],
)
def test_a_stopped_run_ends_with_the_same_bits(name: str, engine: str, tmp_path: Path) -> None:
    method = METHODS[name]()
    whole = go(tmp_path / "whole", method, engine=engine)
    run = go_on(stopped(tmp_path / "run", 3, method, engine=engine), method)
    assert ends_alike(run, whole)
    assert ends_alike(ft.open(tmp_path / "run"), ft.open(tmp_path / "whole"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FOUR)
def test_so_it_does_on_a_gpu(name: str, tmp_path: Path) -> None:
    method = METHODS[name]()
    whole = go(None, method, engine="vectorized", device="cuda")
    assert ends_alike(go_on(stopped(tmp_path, 3, method, engine="vectorized", device="cuda"), method), whole)


def test_a_finished_run_is_loaded(tmp_path: Path) -> None:
    whole = go(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert ends_alike(ft.resume(tmp_path), whole)  # nothing has to be given again
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_what_the_folder_describes_need_not_be_given(tmp_path: Path) -> None:
    fed = ft.load("digits", clients=3, seed=4)
    method = ft.methods.LAG(ft.methods.FedProx(mu=0.3))
    settings: Kept = {"rounds": 3, "participation": (0.5, 1.0), "evaluate": 2, "validation": 0.2, "seed": 7}
    model = ft.network("mlp", fed, hidden=(8,))
    whole = ft.simulate(method, model, fed, **settings)
    with pytest.raises(Killed):
        ft.simulate(method, model, fed, folder=tmp_path, checkpoint_every=1, record=stop_after(2), **settings)
    assert ends_alike(ft.resume(tmp_path), whole)


def test_what_it_cannot_describe_must_be_given_and_be_the_same(tmp_path: Path) -> None:
    stopped(tmp_path)
    net, fed = TinyNet().double(), tiny_federation()
    assert "network 'TinyNet' is your own" in refusal(lambda: ft.resume(tmp_path, fed=fed))
    assert "data 'own data' is your own" in refusal(lambda: ft.resume(tmp_path, model=net))
    other = tiny_federation(seed=1)
    assert "data are not what this run was begun with" in refusal(lambda: ft.resume(tmp_path, model=net, fed=other))
    wide = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    model = ft.wrap(wide, head="1")
    assert "model is not what this run was begun with" in refusal(lambda: ft.resume(tmp_path, model=model, fed=fed))
    changed = ft.methods.FedPer(lr=0.2)
    assert "method is not what this run" in refusal(lambda: ft.resume(tmp_path, method=changed, model=net, fed=fed))
    assert len(ft.resume(tmp_path, method=ft.methods.FedPer(), model=net, fed=fed).records) == ROUNDS


def test_the_start_comes_from_the_folder(tmp_path: Path) -> None:
    """A module given again need not have the weights it had: those are kept, and strangers to the run have them."""
    whole = go(tmp_path / "whole", schedule=[[0]] * ROUNDS, participation=1.0, rounds=None)
    settings: Kept = {"schedule": [[0]] * ROUNDS, "participation": 1.0, "rounds": None}
    torch.manual_seed(99)
    assert ends_alike(go_on(stopped(tmp_path / "run", **settings)), whole)


@pytest.mark.parametrize("size", [1, 100, 700])
def test_states_of_many_clients_lie_in_several_files(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one client's takes more than a file should have."""
    monkeypatch.setattr("fedtailor.checkpoint._SHARD", size)
    method, whole = ft.methods.Ditto(), go(None, ft.methods.Ditto())
    folder = stopped(tmp_path, 3, method)
    assert len(list((folder / "checkpoints" / "000002").glob("states-*"))) > 1
    assert ends_alike(go_on(folder, method), whole)


def test_whole_numbers_for_fields_that_are_not_do_not_confuse(tmp_path: Path) -> None:
    """A file says 1.0 where a user said 1."""
    fed = ft.load("digits", clients=3)
    model, method = ft.network("logistic", fed), ft.methods.FedProx(lr=1, mu=1)
    with pytest.raises(Killed):
        ft.simulate(method, model, fed, rounds=3, folder=tmp_path, checkpoint_every=1, record=stop_after(2))
    assert len(ft.resume(tmp_path).records) == 3


def test_fields_that_have_no_words_are_known_again(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Odd(ft.methods.FedPer):
        function: Any = field(default_factory=lambda: partial(max, 1))
        names: Any = frozenset({"a", "b", "c"})
        bounds: Any = (math.inf, None)
        table: Any = field(default_factory=lambda: {"a key": [{"x": 1}]})
        array: Any = field(default_factory=lambda: torch.ones(3))

    stopped(tmp_path, 3, Odd())
    assert len(go_on(tmp_path, Odd()).records) == ROUNDS


def test_a_run_that_diverged_says_the_same_after_it_was_stopped(tmp_path: Path) -> None:
    def loud(folder: Path | None, record: Callable[[Record], None] | None = None) -> ft.Run:
        torch.manual_seed(0)
        settings: Kept = {"rounds": 3, "dtype": torch.float64, "checkpoint_every": 1, "max_failures": 1.0}
        method = ft.methods.Local(lr=1.0, epochs=1)
        return ft.simulate(method, Loud().double(), tiny_federation(), folder=folder, record=record, **settings)

    with pytest.raises(Killed):
        loud(tmp_path, stop_after(2))
    run, whole = ft.resume(tmp_path, model=Loud().double(), fed=tiny_federation()), loud(None)
    assert math.isnan(run.records[0]["loss_trained"]) and str(told(run)) == str(told(whole))


def test_going_on_elsewhere_is_told_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed again before the next checkpoint, and with the next one damaged."""
    folder, whole = stopped(tmp_path, after=2), go(None)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("torch.__version__", "9.9")
        with pytest.raises(Killed):
            ft.resume(folder, model=TinyNet().double(), fed=tiny_federation(), record=stop_after(2))
        with pytest.raises(Killed):
            ft.resume(folder, model=TinyNet().double(), fed=tiny_federation(), record=stop_after(4))
    harm(folder / "checkpoints" / "000003" / "server.safetensors", "cut")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("torch.__version__", "9.9")
        assert ends_alike(go_on(folder), whole)
    continued = ft.open(folder).info["continued"]
    assert continued == [[1, "9.9", "cpu"], [2, "9.9", "cpu"]] and ends_alike(ft.open(folder), whole)


def test_two_checkpoints_are_kept_and_as_many_as_asked_for_written(tmp_path: Path) -> None:
    def kept() -> list[str]:
        return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())

    seen: list[list[str]] = []
    go(tmp_path, rounds=7, checkpoint_every=2, record=lambda line: seen.append(kept() if line["round"] > 2 else []))
    assert seen[2:] == [["000002"], ["000002"], ["000002", "000004"], ["000002", "000004"], ["000004", "000006"]]
    assert kept() == ["000006", "000007"]  # on leaving, too


def test_killed_before_the_first_checkpoint_it_starts_anew(tmp_path: Path) -> None:
    whole = go(None)
    for again in (go_on, go):
        folder = tmp_path / again.__name__
        with pytest.raises(Killed):
            go(folder, checkpoint_every=3, record=stop_after(2))
        run = again(folder) if again is go_on else go(folder, checkpoint_every=3)
        assert ends_alike(run, whole)


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path)
    assert "holds this run, unfinished; go on with: fedtailor resume" in refusal(
        lambda: go(tmp_path, checkpoint_every=1)
    )
    assert "holds another run" in refusal(lambda: go(tmp_path, seed=1))
    go_on(tmp_path)
    assert "holds this run, finished" in refusal(lambda: go(tmp_path, checkpoint_every=1))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    assert "is not empty" in refusal(lambda: go(tmp_path / "other"))
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]


# a fault at every file operation


class Faulty:
    """Counts what is done to files in a folder and fails from one operation on, as if the process were killed there:
    opening, renaming, removing and making folders by Python's audit events; writing by half."""

    def __init__(self) -> None:
        self.folder, self.count, self.fatal = "", 0, sys.maxsize
        self.error: Callable[[], BaseException] = Killed
        sys.addaudithook(self._hear)  # cannot be taken away again, so it is one for all tests

    @contextmanager
    def at(self, folder: Path, fatal: int, error: Callable[[], BaseException] = Killed) -> Iterator[None]:
        self.folder, self.count, self.fatal, self.error = str(folder), 0, fatal, error
        try:
            yield
        finally:
            self.folder = ""

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.folder or event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            return
        if event == "open" and args[1] in ("r", "rb", None):  # reading breaks nothing; None: a folder's, to be flushed
            return
        inside = event in ("os.remove", "os.rmdir") and args[1] != -1  # by a name within a folder that is being removed
        if inside or (isinstance(args[0], (str, os.PathLike)) and str(args[0]).startswith(self.folder)):
            self.step()

    def step(self) -> bool:
        self.count += 1
        if self.count >= self.fatal:
            raise self.error()
        return True

    def put(self, file: BinaryIO, data: bytes) -> None:
        file.write(data[: len(data) // 2])
        file.flush()
        if self.folder:
            self.step()
        file.write(data[len(data) // 2 :])
        file.flush()


FAULTY = Faulty()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Faulty:
    for module in ("files", "checkpoint", "record"):
        monkeypatch.setattr(f"fedtailor.{module}.put", FAULTY.put)
    return FAULTY


def disk_full() -> BaseException:
    return OSError(28, os.strerror(28))


TRIED = pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 9])  # file operations


@TRIED
@pytest.mark.parametrize("error", [Killed, disk_full], ids=["killed", "disk full"])
def test_a_fault_at_any_file_operation_loses_nothing(
    error: Callable[[], BaseException], every: int, faulty: Faulty, tmp_path: Path
) -> None:
    """From the first to the last thing that a whole run does to files."""
    settings: Kept = {"checkpoint_every": 1, "rounds": 3}
    whole = go(None, rounds=3)
    with faulty.at(tmp_path / "counted", sys.maxsize):
        go(tmp_path / "counted", **settings)
    steps = faulty.count
    assert steps > 60  # else the hook is deaf
    for fatal in range(1, steps + 1, every):
        folder = tmp_path / f"{fatal:03d}"
        with faulty.at(folder, fatal, error), pytest.raises((Killed, ft.Refused)) as caught:
            go(folder, **settings)
        if error is disk_full:
            assert "No space left on device" in str(caught.value)
        run = go_on(folder) if (folder / "experiment.toml").is_file() else go(folder, **settings)
        assert ends_alike(run, whole), f"operation {fatal}"
        shutil.rmtree(folder)


@TRIED
def test_a_fault_while_it_goes_on_loses_nothing_either(every: int, faulty: Faulty, tmp_path: Path) -> None:
    whole, begun = go(tmp_path / "whole"), stopped(tmp_path / "begun", after=2)
    fatal, done = 1 - every, False
    while not done:
        fatal += every
        folder = shutil.copytree(begun, tmp_path / f"{fatal:03d}")
        with faulty.at(folder, fatal):
            try:
                go_on(folder)
                done = True
            except Killed:
                pass
        assert ends_alike(go_on(folder), whole), f"operation {fatal}"
        shutil.rmtree(folder)
    assert fatal > 50


def test_a_full_disk_is_named_and_what_was_good_stays(faulty: Faulty, tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run", after=3)
    good = {path: path.read_bytes() for path in (folder / "checkpoints" / "000002").iterdir()}
    with faulty.at(folder / "checkpoints", 6, disk_full):
        words = refusal(lambda: go_on(folder))
    assert "The checkpoint of round 3 cannot be written" in words and "No space left on device" in words
    assert f"all up to round 2 is kept, mend it and go on with: fedtailor resume {folder}" in words
    assert good == {path: path.read_bytes() for path in good}


# damage


def damages() -> list[Any]:
    """Every file of a checkpoint, cut off, flipped, gone or empty."""
    names = ["checkpoint.json", "server.safetensors", "states-000.safetensors", "trained-000.safetensors"]
    return [
        pytest.param(name, how, id=f"{name} {how}") for name in names for how in ("cut", "flipped", "gone", "empty")
    ]


def harm(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        path.write_bytes({"cut": data[:-7], "flipped": flipped, "empty": b""}[how])


@pytest.mark.parametrize(("name", "how"), damages())
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    name: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, folder = go(None), stopped(tmp_path / "run", after=4)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["000002", "000003"]
    harm(folder / "checkpoints" / "000003" / name, how)
    assert ends_alike(go_on(folder), whole)
    assert f"000003' cannot be used: '{name}'" in caplog.text
    both = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert both == ["000003", "000004"] and ends_alike(ft.open(folder), whole)


@pytest.mark.parametrize("name", ["experiment.toml", "run.json", "start.safetensors"])
def test_a_flipped_bit_elsewhere_is_named(name: str, tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run")
    harm(folder / name, "flipped")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert str(folder) in refusal(lambda: go_on(folder))
    (folder / "lock").touch()
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_record_that_lost_its_last_lines_costs_only_those(tmp_path: Path) -> None:
    """rounds.jsonl of round 3 damaged: checkpoint 3 no longer fits it, checkpoint 2 does."""
    folder, whole = stopped(tmp_path / "run", after=4), go(None)
    lines = (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_bytes(b"".join(lines[:2]) + b'{"round": 3')
    assert ends_alike(go_on(folder), whole)


def test_a_damaged_finished_run_is_named_and_mended(tmp_path: Path) -> None:
    whole = go(tmp_path, checkpoint_every=1)
    harm(tmp_path / "checkpoints" / "000004" / "server.safetensors", "flipped")
    assert "mend the run, go on with: fedtailor resume" in refusal(lambda: ft.open(tmp_path))
    assert ends_alike(go_on(tmp_path), whole) and ends_alike(ft.open(tmp_path), whole)


def test_a_damaged_model_of_a_finished_run_is_named_and_mended(tmp_path: Path) -> None:
    whole = go(tmp_path, checkpoint_every=1)
    for how in ("flipped", "cut", "gone"):
        harm(tmp_path / "personal" / "trained" / "001.safetensors", how)
        assert str(tmp_path) in refusal(lambda: ft.open(tmp_path).personal(1))
        assert ends_alike(go_on(tmp_path), whole) and ends_alike(ft.open(tmp_path), whole)


def test_where_no_checkpoint_is_good_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run", after=4)
    for number in (2, 3):
        harm(folder / "checkpoints" / f"{number:06d}" / "server.safetensors", "cut")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert "No checkpoint in" in refusal(lambda: go_on(folder))
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_of_another_version_is_refused_in_words(tmp_path: Path) -> None:
    go(tmp_path)
    path = tmp_path / "run.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps(info | {"format": 2, "fedtailor": "3.1"}))
    words = [refusal(lambda: ft.open(tmp_path)), refusal(lambda: ft.resume(tmp_path))]
    assert all("written by FedTailor 3.1 in format 2, and this version reads format 1" in each for each in words)
    path.write_text(json.dumps({name: value for name, value in info.items() if name not in ("format", "fedtailor")}))
    assert "by FedTailor an earlier version" in refusal(lambda: ft.open(tmp_path))
    for odd in ({"format": list(range(2000))}, {"format": 2, "fedtailor": ["3.1"]}):
        path.write_text(json.dumps(info | odd))
        assert "does not say in which format" in refusal(lambda: ft.open(tmp_path))
    path.write_text(json.dumps(info | {"format": 10**4000, "fedtailor": "\x1b[2J" + "9" * 4000}))
    assert len(refusal(lambda: ft.open(tmp_path))) < 400


@pytest.mark.parametrize("threads", [0, 2**16, 2**63])
def test_threads_that_no_machine_has_are_refused(threads: int, tmp_path: Path) -> None:
    """To ask torch for them would end the process."""
    go(tmp_path)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"threads": threads}))
    assert "threads that no machine has" in refusal(lambda: ft.open(tmp_path))


def test_what_could_not_be_read_again_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtailor.record.LARGEST", 1000)
    assert "too long to be kept" in refusal(lambda: go(tmp_path, schedule=[[0, 1]] * 400, rounds=None))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written: Not a directory" in refusal(lambda: go(tmp_path / "file" / "run"))


# other processes and signals

SCRIPT = """
import sys, pathlib, torch
sys.path.insert(0, sys.argv[1])
from test_checkpoint import go
tell = lambda line: print(line["round"], flush=True)
go(pathlib.Path(sys.argv[2]), checkpoint_every=1, rounds=int(sys.argv[3]), record=tell)
"""


def started(folder: Path, rounds: int) -> "subprocess.Popen[str]":
    """A run in a process of its own that has finished its second round."""
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(folder), str(rounds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["1\n", "2\n"]
    return process


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    process = started(tmp_path, rounds=100_000)
    assert "Somebody is at work on the run" in refusal(lambda: go_on(tmp_path))
    process.kill()
    process.wait()
    with pytest.raises(Killed):  # allowed now
        ft.resume(tmp_path, model=TinyNet().double(), fed=tiny_federation(), record=lambda line: throw(Killed()))


def throw(error: BaseException) -> None:
    raise error


def test_one_process_does_not_work_on_a_run_twice(tmp_path: Path) -> None:
    """And who tries, or copies the folder, does not let others in."""
    script = f"import fedtailor as ft; ft.resume({str(tmp_path / 'run')!r})"
    words: list[str] = []

    def record(line: Record) -> None:
        words.append(refusal(lambda: go_on(tmp_path / "run")))
        shutil.copytree(tmp_path / "run", tmp_path / f"copy{line['round']}")
        if line["round"] == 2:
            other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
            words.append(other.stderr)

    go(tmp_path / "run", checkpoint_every=1, record=record)
    assert all("Somebody is at work on the run" in each for each in words) and len(words) == ROUNDS + 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_finishes_the_round_and_saves(number: signal.Signals, tmp_path: Path) -> None:
    def interrupt(line: Record) -> None:
        if line["round"] == 2:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt) as caught:
        go(tmp_path, checkpoint_every=100, record=interrupt)
    assert f"Stopped after round 2 of 4; go on with: fedtailor resume {tmp_path}" in str(caught.value)
    assert signal.getsignal(number) is before
    found, complaints = latest(tmp_path, lambda found: None)
    assert found is not None and found.round == 2 and not complaints
    assert ends_alike(go_on(tmp_path), go(None))


def test_an_interrupt_while_the_last_round_is_saved_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = checkpoint.save

    def interrupted(folder: Path, number: int, *rest: Any) -> None:
        save(folder, number, *rest)
        if number == ROUNDS:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("fedtailor.checkpoint.save", interrupted)
    with pytest.raises(KeyboardInterrupt, match="Stopped after round 4 of 4"):
        go(tmp_path)
    assert ends_alike(go_on(tmp_path), go(None))


def test_who_ignores_a_signal_goes_on_ignoring_it(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = go(tmp_path, record=lambda line: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(run.records) == ROUNDS


def test_a_second_interrupt_leaves_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    def interrupt(line: Record) -> None:
        if line["round"] == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("it went on")

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, checkpoint_every=1, record=interrupt)
    assert latest(tmp_path, lambda found: None)[0].round == 2  # type: ignore[union-attr]
    assert ends_alike(go_on(tmp_path), go(None))


def test_a_run_in_memory_is_left_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(None, record=lambda line: signal.raise_signal(signal.SIGINT))


def test_an_error_in_a_callback_leaves_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        go(tmp_path, checkpoint_every=100, record=lambda line: 1 / (line["round"] - 2) and None)
    assert latest(tmp_path, lambda found: None)[0].round == 2  # type: ignore[union-attr]
    assert ends_alike(go_on(tmp_path), go(None))


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write(path, b"old")
    with pytest.raises(TypeError):
        files.write(path, "text is no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"


# the real thing


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vectorized", "pool"])
@pytest.mark.parametrize(("method", "kills"), [("fedapa", 4), ("fedapm", 3), ("selffl", 3)])
def test_killed_again_and_again_it_ends_with_the_same_bits(
    method: str, kills: int, engine: str, tmp_path: Path
) -> None:
    """SIGKILL to the command, after some output at first, then at moments that nobody chose; twenty in all."""
    words = ["--method", method, "--engine", engine, "--data.clients", "6", "--rounds", "12", "--checkpoint-every", "1"]
    command = [sys.executable, "-m", "fedtailor.cli"]
    whole = subprocess.run([*command, "run", *words, "--out", str(tmp_path / "whole")], capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
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
    assert ends_alike(ft.open(folder), ft.open(tmp_path / "whole" / folder.name))


def has_lines(folder: Path, count: int) -> bool:
    path = folder / "rounds.jsonl"
    return path.is_file() and path.read_bytes().count(b"\n") >= count
