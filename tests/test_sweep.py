"""A sweep: the grid that is asked for, a folder that goes on, runs that are kept."""

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
from conftest import models, refusal, same, wait_until
from fedtailor.cli import main
from fedtailor.experiment import Experiment
from fedtailor.federation import Federation
from fedtailor.methods import METHODS
from fedtailor.sweeps.sweep import FILE, begun, check_goes_on, read_plan, read_sweep
from fedtailor.trees import Tree

QUICK = ["--rounds", "1", "--data.clients", "3", "--batch-size", "64", "--engine", "sequential"]


def values(words: str) -> list[dict[str, Any]]:
    """The grid of a command, without seeds."""
    return [{a: v for a, v in p.values.items() if a != "seed"} for p in read_sweep(words.split()).points]


# ---- the grid


def test_a_grid_is_every_combination_once() -> None:
    found = read_sweep(["--method", "fedprox", "--method.mu", "0.1,1,1.0", "--method.lr", "0.1,0.2", "--seed", "0,1"])
    wanted = {(mu, lr, seed) for mu in (0.1, 1.0) for lr in (0.1, 0.2) for seed in (0, 1)}
    made = [(p.experiment.method.mu, p.experiment.method.lr, p.experiment.seed) for p in found.points]  # type: ignore[attr-defined]
    assert len(made) == len(wanted) and set(made) == wanted
    assert len({point.label for point in found.points}) == len(wanted)
    assert [point.experiment.seed for point in found.points] == sorted(point.experiment.seed for point in found.points)


def test_lists_are_swept_by_repeating_their_flag() -> None:
    """As in `run`, a comma in such a field is inside its value."""
    assert values("--network mlp --network.hidden 64,32 --network.hidden 8") == [
        {"network.hidden": [64, 32]},
        {"network.hidden": [8]},
    ]
    assert values("--network mlp --network.hidden 64,32 --rounds 1,2") == [{"rounds": 1}, {"rounds": 2}]
    assert values("--participation 0.5,1.0 --rounds 1,2") == [{"rounds": 1}, {"rounds": 2}]
    assert values("--participation 0.5 --participation 1.0") == [{"participation": 0.5}, {"participation": 1.0}]
    assert values("--method.lr [0.1]") == [{"method.lr": 0.1}]  # an axis to which values will be added


def test_every_method_gets_the_fields_that_it_has(tmp_path: Path) -> None:
    found = values("--method fedavg,fedprox --method.mu 0.1,1 --method.lr 0.3")
    assert found == [
        {"method": "fedavg"},
        {"method": "fedprox", "method.mu": 0.1},
        {"method": "fedprox", "method.mu": 1.0},
    ]
    (tmp_path / "exp.toml").write_text('[method]\nname = "ditto"\nlam = 0.5\nlr = 0.3\n')
    points = read_sweep([str(tmp_path / "exp.toml"), "--method", "ditto,fedavg"]).points
    assert [point.experiment.method for point in points] == [
        ft.methods.Ditto(lam=0.5, lr=0.3),
        ft.methods.FedAvg(lr=0.3),
    ]


def test_one_methods_own_values_overrule_those_of_all() -> None:
    words = "--method fedavg,fedprox --method.lr 0.1,0.2 --fedprox.lr"
    points = read_sweep(f"{words} 0.5".split()).points
    avg = [ft.methods.FedAvg(lr=0.1), ft.methods.FedAvg(lr=0.2)]
    assert [point.experiment.method for point in points] == [*avg, ft.methods.FedProx(lr=0.5)]
    assert points[-1].values == {"method": "fedprox", "method.lr": 0.5, "seed": 0}
    points = read_sweep(f"{words} 0.5,0.6".split()).points
    assert [p.experiment.method for p in points] == [*avg, ft.methods.FedProx(lr=0.5), ft.methods.FedProx(lr=0.6)]
    assert points[-1].values == {"method": "fedprox", "fedprox.lr": 0.6, "seed": 0}


def test_a_method_within_a_method_is_swept_too() -> None:
    points = read_sweep(["--method", "lag", "--method.inner", "fedavg,fedprox", "--method.inner.mu", "0.1,1"]).points
    inner = [ft.methods.FedAvg(), ft.methods.FedProx(mu=0.1), ft.methods.FedProx(mu=1.0)]
    assert [point.experiment.method for point in points] == [ft.methods.LAG(one) for one in inner]
    assert len({point.label for point in points}) == 3


def test_odd_texts_give_names_of_their_own() -> None:
    words = ["--data", "folder", "--data.folder", "a/b", "--data.folder", "a_b", "--data.folder", "../" + "x" * 300]
    labels = [point.label for point in read_sweep(words).points]
    assert len(set(labels)) == 3
    assert all(Path(label).name == label and len(label) < 200 for label in labels)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--method.rhoo 1,2", "There is no field of fedavg 'rhoo'"),
        ("--method fedavg,fedprox --method.nu 1,2", "There is no field of fedavg 'nu'"),
        ("--method fedavg --fedprox.mu 1,2", "fedprox is not swept"),
        ("--fedprox 1,2", "has fields, such as --fedprox.lr"),
        ("--method.lr []", "takes values such as"),
        ("--method.lr 0.1,", "takes values such as"),
        ("--seed one", "seed cannot be 'one'"),
        ("--seeds 0,1", "did you mean 'seed'?"),
        ("--moment later", "--moment is 'received' or 'trained'"),
        ("fedavg --method.lr 1,2", "methods by a flag"),
        ("a.toml b.toml", "one experiment file"),
        ("--method.lr", "--method.lr needs a value"),
        ("", "Nothing is swept"),
        ("--method fedprox --method.mu 0.1 --seed 3", "Nothing is swept"),
        (f"--seed {','.join(map(str, range(200)))} --rounds {','.join(map(str, range(1, 61)))}", "12,000 runs"),
    ],
    ids=range(15),
)
def test_what_cannot_be_swept_is_refused(words: str, sentence: str) -> None:
    assert sentence in refusal(lambda: read_sweep(words.split()))


# ---- its folder


def test_a_sweep_goes_on_with_more_values_and_with_nothing_else(tmp_path: Path) -> None:
    plan = read_sweep(["--method.lr", "0.1,0.2", "--rounds", "3", "--seed", "0,1"]).plan
    folder = tmp_path / "sweep"
    with begun(folder, plan):
        assert read_plan(folder) == plan
        assert "Somebody is at work" in refusal(lambda: begun(folder, plan).__enter__())
    check_goes_on(folder, read_sweep(["--method.lr", "0.1,0.2,0.4", "--rounds", "3", "--seed", "0,1,2"]).plan)
    for words, sentence in {
        "--method.mu 0.1,0.2 --method fedprox --rounds 3": "is over method.lr, seed, not method.mu, seed",
        "--method.lr 0.1,0.2 --rounds 4": "has rounds 3, not 4",
        "--method.lr 0.1,0.2": "has rounds 3, not as by default",
    }.items():
        other = read_sweep(words.split()).plan
        assert sentence in refusal(lambda other=other: check_goes_on(folder, other))  # type: ignore[misc]
    fewer = read_sweep(["--method.lr", "0.2", "--method.lr", "0.1", "--rounds", "3", "--seed", "1"]).plan
    check_goes_on(folder, fewer)  # nothing was run yet
    (folder / "fedavg-lr0.1-seed0").mkdir()
    (folder / "fedavg-lr0.1-seed0" / "experiment.toml").touch()
    assert "has run fedavg-lr0.1-seed0 too" in refusal(lambda: check_goes_on(folder, fewer))


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    plan = read_sweep(["--method.lr", "0.1,0.2"]).plan
    (tmp_path / "sweep.toml.writing").touch()  # what a loss of power leaves
    (tmp_path / "lock").touch()
    check_goes_on(tmp_path, plan)
    (tmp_path / "thesis.tex").touch()
    assert "holds other things" in refusal(lambda: check_goes_on(tmp_path, plan))


def test_without_a_folder_the_same_command_finds_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, other = (read_sweep(words.split()) for words in ("--method.lr 0.1,0.2", "--method.lr 0.1,0.2 --rounds 3"))
    with begun(place := first.place(), first.plan):
        pass
    assert read_sweep(["--method.lr", "0.1,0.2,0.4"]).place() == place
    assert other.place() != place and not other.place().exists()


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
def test_a_file_from_whoevers_hands_is_refused_in_words(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    assert "The sweep" in refusal(lambda: read_plan(tmp_path))


# ---- the command


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`fedtailor` in a folder of its own: its exit code and what it says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*words: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedtailor", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        said = capsys.readouterr()
        return stop.value.code, " ".join(said.out.split()), said.err

    return call


def test_the_command_keeps_every_run_repeats_none_and_takes_more_values(
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
    assert listed[0] == 0 and listed[1].count("to do") == 4 and not (tmp_path / "all").exists() and not loaded
    code, out, err = command(*words, "--method.mu", "0.1,5")
    assert (code, err) == (0, "")
    assert loaded == [0, 1]  # once a seed
    names = [f"fedprox-mu{mu}-seed{seed}" for mu in ("0.1", "5") for seed in (0, 1)]
    runs = {name: ft.open(tmp_path / "all" / name) for name in names}
    assert "on validation data" in out and "The runs lie in all" in out
    for mu in ("0.1", "5"):
        scores = [runs[f"fedprox-mu{mu}-seed{s}"].summary()["trained"]["last"]["weighted"] for s in (0, 1)]
        assert f"{100 * mean(scores):.1f} ±" in out
    assert command("show", "all")[1] == out.split(" The runs lie")[0]
    before = {name: (tmp_path / "all" / name / "rounds.jsonl").stat().st_mtime_ns for name in names}
    code, _, err = command(*words, "--method.mu", "0.1,1,5")
    assert (code, err) == (0, "") and (tmp_path / "all" / "fedprox-mu1-seed1").is_dir()
    assert before == {name: (tmp_path / "all" / name / "rounds.jsonl").stat().st_mtime_ns for name in names}
    code, _, err = command(*words, "--method.mu", "1,5")
    assert code == 2 and "has run fedprox-mu0.1-seed0 too" in err
    single = ["run", "--method", "fedprox", "--method.mu", "5", "--seed", "1", "--validation", "0.3", *QUICK]
    assert command(*single, "--out", "one")[0] == 0
    (alone,) = (tmp_path / "one").iterdir()
    assert all(map(same, models(ft.open(alone)), models(runs["fedprox-mu5-seed1"])))


@dataclass(frozen=True)
class Fragile(ft.Method):
    """A method that fails, or is interrupted, with some of its settings."""

    lr: float = 0.1

    def train(self, local: ft.LocalView, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        if self.lr == 2:
            raise RuntimeError("out of order")
        if self.lr == 3 and not Path("calm").exists():
            signal.raise_signal(signal.SIGINT)
        return state, message

    def init_server(self, setup: ft.Setup) -> Tree:
        if self.lr == 4:
            raise ft.Refused("A lr of 4 does not fit.")
        return super().init_server(setup)


def test_what_fails_is_named_and_stops_nobody_else(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "fragile", Fragile)
    words = ["sweep", "--method", "fragile", "--out", "all", *QUICK]
    code, out, err = command(*words, "--method.lr", "4,2,1,x,0.5")
    assert code == 1
    assert "fragile-lr2-seed0 failed: RuntimeError: out of order" in err
    assert "fragile-lr4-seed0 is left out: A lr of 4 does not fit." in err and "method.lr cannot be 'x'" in err
    kept = {path.parent.parent.name for path in Path("all").glob("*/personal/models.json")}
    assert kept == {"fragile-lr1-seed0", "fragile-lr0.5-seed0"} and "The runs lie in all" in out
    code, out, err = command(*words[:-2], "--method.lr", "4", "--method.lr", "4.0", "--out", "none")
    assert code == 2 and out == "" and not Path("none").exists()


@pytest.mark.usefixtures("hears_interrupts")
def test_ctrl_c_ends_the_sweep_and_the_same_command_goes_on(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "fragile", Fragile)
    words = ["sweep", "--method", "fragile", "--method.lr", "1,3,5", *QUICK]
    code, out, err = command(*words)
    assert code == 130 and out == "" and err.strip().endswith("The whole sweep goes on with the same command.")
    folder = Path("runs/sweep-fragile-digits")
    first = (folder / "fragile-lr1-seed0" / "rounds.jsonl").stat().st_mtime_ns
    assert not (folder / "fragile-lr5-seed0").exists()
    Path("calm").touch()
    code, out, err = command(*words)
    assert (code, err) == (0, "") and f"The runs lie in {folder}" in out
    assert (folder / "fragile-lr1-seed0" / "rounds.jsonl").stat().st_mtime_ns == first
    assert sorted(path.parent.name for path in folder.glob("*/personal")) == [f"fragile-lr{n}-seed0" for n in (1, 3, 5)]


@pytest.mark.slow
def test_killed_at_any_moment_a_sweep_ends_with_the_same_bits(tmp_path: Path) -> None:
    words = ["sweep", "--method", "fedper", "--method.lr", "0.1,0.2", "--seed", "0,1", "--rounds", "12"]
    words += ["--data.clients", "4", "--checkpoint-every", "2", "--engine", "sequential", "--out", "all"]
    call = [sys.executable, "-m", "fedtailor.cli", *words]
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
        assert all(map(same, models(ft.open(cut / "all" / name)), models(ft.open(whole / "all" / name))))
