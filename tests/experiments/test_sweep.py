"""Sweeps: the grid, the folder that can be resumed, and the command."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

import fedtailor as ft
from conftest import error_message, models, same, wait_until
from fedtailor.cli.main import main
from fedtailor.core.trees import Tree
from fedtailor.data.federation import Federation
from fedtailor.experiments.experiment import Experiment
from fedtailor.experiments.sweep import SWEEP_FILE, check_can_resume, open_sweep_folder, parse_sweep, read_plan
from fedtailor.methods import METHODS

QUICK = ["--rounds", "1", "--data.clients", "3", "--batch-size", "64", "--engine", "sequential"]


def values(words: str) -> list[dict[str, Any]]:
    """Return the values of all points of a command, without seeds."""
    return [{a: v for a, v in p.values.items() if a != "seed"} for p in parse_sweep(words.split()).points]


# the grid


def test_grid_contains_each_combination_once() -> None:
    found = parse_sweep(["--method", "fedprox", "--method.mu", "0.1,1,1.0", "--method.lr", "0.1,0.2", "--seed", "0,1"])
    wanted = {(mu, lr, seed) for mu in (0.1, 1.0) for lr in (0.1, 0.2) for seed in (0, 1)}
    found_values = [(p.experiment.method.mu, p.experiment.method.lr, p.experiment.seed) for p in found.points]  # type: ignore[attr-defined]
    assert len(found_values) == len(wanted) and set(found_values) == wanted
    assert len({point.label for point in found.points}) == len(wanted)
    assert [point.experiment.seed for point in found.points] == sorted(point.experiment.seed for point in found.points)


def test_grid_list_field_is_swept_by_repeating_its_flag() -> None:
    """As in `run`, commas separate the elements of one value."""
    swept = values("--network mlp --network.hidden 64,32 --network.hidden 8")
    assert swept == [{"network.hidden": [64, 32]}, {"network.hidden": [8]}]
    assert values("--network mlp --network.hidden 64,32 --rounds 1,2") == [{"rounds": 1}, {"rounds": 2}]
    assert values("--participation 0.5,1.0 --rounds 1,2") == [{"rounds": 1}, {"rounds": 2}]
    assert values("--participation 0.5 --participation 1.0") == [{"participation": 0.5}, {"participation": 1.0}]
    assert values("--method.lr [0.1]") == [{"method.lr": 0.1}]  # an axis with one value, which can be extended later


def test_grid_each_method_gets_only_its_fields(tmp_path: Path) -> None:
    found = values("--method fedavg,fedprox --method.mu 0.1,1 --method.lr 0.3")
    prox = [{"method": "fedprox", "method.mu": mu} for mu in (0.1, 1.0)]
    assert found == [{"method": "fedavg"}, *prox]
    (tmp_path / "exp.toml").write_text('[method]\nname = "ditto"\nlam = 0.5\nlr = 0.3\n')
    points = parse_sweep([str(tmp_path / "exp.toml"), "--method", "ditto,fedavg"]).points
    ditto = ft.methods.Ditto(lam=0.5, lr=0.3)
    assert [point.experiment.method for point in points] == [ditto, ft.methods.FedAvg(lr=0.3)]
    points = parse_sweep(["--method", "lag", "--method.inner", "fedavg,fedprox", "--method.inner.mu", "0.1,1"]).points
    inner = [ft.methods.FedAvg(), ft.methods.FedProx(mu=0.1), ft.methods.FedProx(mu=1.0)]
    assert [point.experiment.method for point in points] == [ft.methods.LAG(one) for one in inner]
    assert len({point.label for point in points}) == 3


def test_grid_values_of_one_method_override_common_values() -> None:
    words = "--method fedavg,fedprox --method.lr 0.1,0.2 --fedprox.lr"
    points = parse_sweep(f"{words} 0.5".split()).points
    avg = [ft.methods.FedAvg(lr=0.1), ft.methods.FedAvg(lr=0.2)]
    assert [point.experiment.method for point in points] == [*avg, ft.methods.FedProx(lr=0.5)]
    assert points[-1].values == {"method": "fedprox", "method.lr": 0.5, "seed": 0}
    points = parse_sweep(f"{words} 0.5,0.6".split()).points
    assert [p.experiment.method for p in points] == [*avg, ft.methods.FedProx(lr=0.5), ft.methods.FedProx(lr=0.6)]
    assert points[-1].values == {"method": "fedprox", "fedprox.lr": 0.6, "seed": 0}


def test_grid_unusual_strings_give_unique_folder_names() -> None:
    words = ["--data", "folder", "--data.folder", "a/b", "--data.folder", "a_b", "--data.folder", "../" + "x" * 300]
    labels = [point.label for point in parse_sweep(words).points]
    assert len(set(labels)) == 3
    assert all(Path(label).name == label and len(label) < 200 for label in labels)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--method.rhoo 1,2", "There is no field of fedavg 'rhoo'"),
        ("--method fedavg,fedprox --method.nu 1,2", "There is no field of fedavg 'nu'"),
        ("--method fedavg --fedprox.mu 1,2", "fedprox is not in the sweep"),
        ("--fedprox 1,2", "needs a field, such as --fedprox.lr"),
        ("--method.lr []", "must have values such as"),
        ("--method.lr 0.1,", "must have values such as"),
        ("--seed one", "seed cannot be 'one'"),
        ("--seeds 0,1", "did you mean 'seed'?"),
        ("--moment later", "--moment must be 'received', 'trained', or 'ranked'"),
        ("fedavg --method.lr 1,2", "name methods with a flag"),
        ("a.toml b.toml", "one experiment file"),
        ("--method.lr", "--method.lr needs a value"),
        ("", "The sweep has only one run"),
        ("--method fedprox --method.mu 0.1 --seed 3", "The sweep has only one run"),
        (f"--seed {','.join(map(str, range(200)))} --rounds {','.join(map(str, range(1, 61)))}", "12,000 runs"),
    ],
    ids=range(15),
)
def test_parse_sweep_invalid_arguments_raise(words: str, message: str) -> None:
    assert message in error_message(lambda: parse_sweep(words.split()))


# the folder


def test_sweep_folder_accepts_more_values_and_rejects_other_sweeps(tmp_path: Path) -> None:
    plan = parse_sweep(["--method.lr", "0.1,0.2", "--rounds", "3", "--seed", "0,1"]).plan
    folder = tmp_path / "sweep"
    with open_sweep_folder(folder, plan):
        assert read_plan(folder) == plan
        assert "Another process is using" in error_message(lambda: open_sweep_folder(folder, plan).__enter__())
    check_can_resume(folder, parse_sweep(["--method.lr", "0.1,0.2,0.4", "--rounds", "3", "--seed", "0,1,2"]).plan)
    for words, message in {
        "--method.mu 0.1,0.2 --method fedprox --rounds 3": "is over method.lr, seed, not method.mu, seed",
        "--method.lr 0.1,0.2 --rounds 4": "has rounds = 3, not 4",
        "--method.lr 0.1,0.2": "has rounds = 3, not (the default)",
    }.items():
        other = parse_sweep(words.split()).plan
        assert message in error_message(lambda other=other: check_can_resume(folder, other))  # type: ignore[misc]
    fewer = parse_sweep(["--method.lr", "0.2", "--method.lr", "0.1", "--rounds", "3", "--seed", "1"]).plan
    check_can_resume(folder, fewer)  # no run was started yet
    (folder / "fedavg-lr0.1-seed0").mkdir()
    (folder / "fedavg-lr0.1-seed0" / "experiment.toml").touch()
    assert "also contains the run fedavg-lr0.1-seed0" in error_message(lambda: check_can_resume(folder, fewer))


def test_choose_folder_same_sweep_finds_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, other = (parse_sweep(words.split()) for words in ("--method.lr 0.1,0.2", "--method.lr 0.1,0.2 --rounds 3"))
    with open_sweep_folder(folder := first.choose_folder(), first.plan):
        pass
    assert parse_sweep(["--method.lr", "0.1,0.2,0.4"]).choose_folder() == folder
    assert other.choose_folder() != folder and not other.choose_folder().exists()
    for name in ("sweep.toml.writing", "lock"):  # left by a power failure
        (tmp_path / "new" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "new" / name).touch()
    check_can_resume(tmp_path / "new", first.plan)
    (tmp_path / "new" / "thesis.tex").touch()
    assert "contains other files" in error_message(lambda: check_can_resume(tmp_path / "new", first.plan))


@pytest.mark.parametrize(
    "text",
    [
        "format = 2",
        'format = 1\naxes = "seed"\nmoment = "trained"\n[fixed]\n[runs]',
        'format = 1\naxes = ["seed"]\nmoment = "later"\n[fixed]\n[runs]',
        'format = 1\naxes = ["seed"]\nmoment = "trained"\n[fixed]\n[runs."../x"]\nseed = 0',
        'format = 1\naxes = ["seed"]\nmoment = "trained"\n[fixed]\n[runs.x]\nother = 0',
        'format = 1\naxes = ["seed"]\nmoment = "trained"\n[fixed]\n[runs.x]\nseed = {a = 1}',
        'format = 1\naxes = ["seed"]\nmoment = "trained"\n[fixed]\n[runs]\nx = 3',
    ],
    ids=range(7),
)
def test_read_plan_invalid_file_raises(text: str, tmp_path: Path) -> None:
    (tmp_path / SWEEP_FILE).write_text(text)
    assert "The sweep" in error_message(lambda: read_plan(tmp_path))


# the command


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return a function that runs `fedtailor` in an empty folder and returns its exit code and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*words: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedtailor", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        output = capsys.readouterr()
        return stop.value.code, " ".join(output.out.split()), output.err

    return call


def test_command_repeated_with_more_values_keeps_finished_runs(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["sweep", "--method", "fedprox", "--seed", "0,1", "--validation", "0.3", "--out", "all", *QUICK]
    loaded: list[int] = []
    load = Experiment.load

    def counted(self: Experiment) -> Federation:
        loaded.append(self.seed)
        return load(self)

    monkeypatch.setattr(Experiment, "load", counted)
    listed = command(*words, "--method.mu", "0.1,5", "--dry-run")
    assert listed[0] == 0 and listed[1].count("pending") == 4 and not (tmp_path / "all").exists() and not loaded
    code, out, err = command(*words, "--method.mu", "0.1,5")
    assert code == 0 and [line.split(":")[0] for line in err.splitlines()][::3] == [
        "[1/4] fedprox-mu0.1-seed0",
        "[4/4] fedprox-mu5-seed1",
    ]
    assert loaded == [0, 1]  # once a seed
    names = [f"fedprox-mu{mu}-seed{seed}" for mu in ("0.1", "5") for seed in (0, 1)]
    runs = {name: ft.load_run(tmp_path / "all" / name) for name in names}
    assert "on validation data" in out and "Runs saved in all" in out
    for mu in ("0.1", "5"):
        scores = [runs[f"fedprox-mu{mu}-seed{s}"].summary()["trained"]["last"]["weighted"] for s in (0, 1)]
        assert f"{100 * mean(scores):.1f} ±" in out
    assert command("show", "all")[1] == out.split(" Runs saved in")[0]
    before = {name: (tmp_path / "all" / name / "rounds.jsonl").stat().st_mtime_ns for name in names}
    code, _, err = command(*words, "--method.mu", "0.1,1,5")
    assert code == 0 and len(err.splitlines()) == 2 and (tmp_path / "all" / "fedprox-mu1-seed1").is_dir()
    assert before == {name: (tmp_path / "all" / name / "rounds.jsonl").stat().st_mtime_ns for name in names}
    code, _, err = command(*words, "--method.mu", "1,5")
    assert code == 2 and "also contains the run fedprox-mu0.1-seed0" in err
    single = ["run", "--method", "fedprox", "--method.mu", "5", "--seed", "1", "--validation", "0.3", *QUICK]
    assert command(*single, "--out", "one")[0] == 0
    (single_run,) = (tmp_path / "one").iterdir()
    assert all(map(same, models(ft.load_run(single_run)), models(runs["fedprox-mu5-seed1"])))


@dataclass(frozen=True)
class Fragile(ft.Method):
    """A method that fails, or is interrupted, with some settings."""

    lr: float = 0.1

    def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        if self.lr == 2:
            raise RuntimeError("out of order")
        if self.lr == 3 and not Path("calm").exists():
            signal.raise_signal(signal.SIGINT)
        return state, message

    def init_server(self, setup: ft.Setup) -> Tree:
        if self.lr == 4:
            raise ft.FedTailorError("A lr of 4 does not fit.")
        return super().init_server(setup)


def test_command_failing_run_is_named_and_others_finish(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "fragile", Fragile)
    words = ["sweep", "--method", "fragile", "--out", "all", *QUICK]
    code, out, err = command(*words, "--method.lr", "4,2,1,x,0.5")
    assert code == 1
    assert "fragile-lr2-seed0 failed: RuntimeError: out of order" in err
    assert "fragile-lr4-seed0 is skipped: A lr of 4 does not fit." in err and "method.lr cannot be 'x'" in err
    kept = {path.parent.parent.name for path in Path("all").glob("*/personal/models.json")}
    assert kept == {"fragile-lr1-seed0", "fragile-lr0.5-seed0"} and "Runs saved in all" in out
    code, out, err = command(*words[:-2], "--method.lr", "4", "--method.lr", "4.0", "--out", "none")
    assert code == 2 and out == "" and not Path("none").exists()


@pytest.mark.usefixtures("default_sigint")
def test_command_interrupted_resumes_with_same_command(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "fragile", Fragile)
    words = ["sweep", "--method", "fragile", "--method.lr", "1,3,5", *QUICK]
    code, out, err = command(*words)
    assert code == 130 and out == "" and err.strip().endswith("To continue the sweep, run the same command again.")
    folder = Path("runs/sweep-fragile-digits")
    first = (folder / "fragile-lr1-seed0" / "rounds.jsonl").stat().st_mtime_ns
    assert not (folder / "fragile-lr5-seed0").exists()
    Path("calm").touch()
    code, out, err = command(*words)
    assert code == 0 and f"Runs saved in {folder}" in out
    assert [line.split(":")[0] for line in err.splitlines()] == ["[2/3] fragile-lr3-seed0", "[3/3] fragile-lr5-seed0"]
    assert (folder / "fragile-lr1-seed0" / "rounds.jsonl").stat().st_mtime_ns == first
    assert sorted(path.parent.name for path in folder.glob("*/personal")) == [f"fragile-lr{n}-seed0" for n in (1, 3, 5)]


@pytest.mark.slow
def test_command_killed_repeatedly_gives_same_bits(tmp_path: Path) -> None:
    words = ["sweep", "--method", "fedper", "--method.lr", "0.1,0.2", "--seed", "0,1", "--rounds", "12"]
    words += ["--data.clients", "4", "--checkpoint-every", "2", "--engine", "sequential", "--out", "all"]
    call = [sys.executable, "-m", "fedtailor.cli.main", *words]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    subprocess.run(call, cwd=whole, check=True, capture_output=True)
    for wanted in ("fedper-lr0.1-seed0/checkpoints", "fedper-lr0.2-seed0/run.json", "fedper-lr0.2-seed1/checkpoints"):
        process = subprocess.Popen(call, cwd=cut, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_until(process, (cut / "all" / wanted).exists)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    subprocess.run(call, cwd=cut, check=True, capture_output=True)
    names = sorted(path.parent.name for path in (whole / "all").glob("*/experiment.toml"))
    assert len(names) == 4 and names == sorted(path.parent.name for path in (cut / "all").glob("*/experiment.toml"))
    for name in names:
        assert all(map(same, models(ft.load_run(cut / "all" / name)), models(ft.load_run(whole / "all" / name))))
