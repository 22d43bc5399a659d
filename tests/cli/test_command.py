"""End-to-end tests of the `fedtailor` command."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fedtailor as ft
from conftest import error_message, wait_until
from fedtailor.cli.compare import method_settings
from fedtailor.cli.main import main
from fedtailor.core.trees import Tree
from fedtailor.experiments.experiment import make_experiment
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.methods import METHODS
from fedtailor.reporting.reproduce import run_commands
from fedtailor.version import VERSION

QUICK = ["--rounds", "2", "--data.clients", "4", "--batch-size", "32"]


def fedtailor(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder."""
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "fedtailor.cli.main", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)


def test_run_saves_the_run_and_prints_its_folder(tmp_path: Path) -> None:
    done = fedtailor("run", "--method", "fedper", "--data", "digits", "--method.lr", "0.05", *QUICK, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    progress = done.stderr.splitlines()  # redirected, so lines instead of a bar
    assert [line.split(",")[1] for line in progress] == [" seed 0: round 1 of 2", " seed 0: round 2 of 2"]
    match = re.search(r"Run saved in (\S+)", done.stdout)
    assert match
    run = ft.load_run(tmp_path / match[1])
    assert run.experiment["method"]["lr"] == 0.05 and len(run.records) == 2
    accuracy = 100 * run.summary()["trained"]["last"]["weighted"]
    assert f"{accuracy:.1f}" in done.stdout
    assert f"accuracy {accuracy / 100:.3f} trained" in progress[-1]
    again = fedtailor("show", match[1], folder=tmp_path)
    assert again.stdout.strip() == done.stdout.split("Run saved in")[0].strip()


def test_converted_data_train_with_the_same_numbers_and_resume(tmp_path: Path) -> None:
    done = fedtailor("data", "convert", "a.safetensors", "--data", "digits", "--data.clients", "4", folder=tmp_path)
    assert done.returncode == 0 and "4 clients" in done.stdout and "saved in a.safetensors" in done.stdout, done.stderr
    words = ("run", "--method", "fedper", "--rounds", "2", "--batch-size", "32")
    for flags in (("--data", "digits", "--data.clients", "4"), ("--data", "file", "--data.file", "a.safetensors")):
        assert fedtailor(*words, *flags, folder=tmp_path).returncode == 0
    runs = [ft.load_run(tmp_path / "runs" / f"fedper-seed0-{name}") for name in ("digits", "file")]
    assert runs[0].records[-1]["per_client"] == runs[1].records[-1]["per_client"]
    assert runs[0].info["fingerprint"]["data"] == runs[1].info["fingerprint"]["data"]
    (tmp_path / "runs" / "fedper-seed0-file" / "personal" / "models.json").unlink()  # resume trains again
    assert fedtailor("resume", "runs/fedper-seed0-file", folder=tmp_path).returncode == 0


def test_run_with_a_file_twice_writes_two_folders(tmp_path: Path) -> None:
    (tmp_path / "exp.toml").write_text('rounds = 1\n[method]\nname = "local"\n[data]\nclients = 3\n')
    for _ in range(2):
        assert fedtailor("run", "exp.toml", folder=tmp_path).returncode == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_compare_flag_that_a_named_method_does_not_allow_says_why() -> None:
    """With --all, the flag applies to the methods that allow it."""
    flags, names = parse_overrides(["--method.momentum", "0.9"]), ["fedavg", "scaffold", "selffl"]
    for name, reason in (("scaffold", "control variates assume plain SGD"), ("selffl", "plain gradient descent")):
        settings = method_settings(name, names, flags)
        assert reason in error_message(lambda given=settings: make_experiment(given))  # type: ignore[misc]
        assert method_settings(name, names, flags, skip_fixed=True)["method"] == {"name": name}
    assert make_experiment(method_settings("fedavg", names, flags)).method.momentum == 0.9  # type: ignore[attr-defined]


def test_compare_ranks_methods_with_local_and_writes_one_folder_per_run(tmp_path: Path) -> None:
    words = ["compare", "fedavg", "fedper", "--data", "digits", "--seeds", "0,1", "--out", "all", *QUICK]
    done = fedtailor(*words, "--method.momentum", "0.5", "--fedper.lr", "0.3", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    names = {f"{method}-seed{seed}" for method in ("local", "fedavg", "fedper") for seed in (0, 1)}
    assert {path.name for path in (tmp_path / "all").iterdir()} == names
    runs = {name: ft.load_run(tmp_path / "all" / name) for name in names}
    assert runs["fedavg-seed1"].experiment["method"]["momentum"] == 0.5
    assert [runs[f"{name}-seed0"].experiment["method"]["lr"] for name in ("fedper", "local")] == [0.3, 0.1]
    assert runs["fedavg-seed0"].experiment["seed"] == 0
    table = done.stdout.split("Last round")[0]
    rows = re.findall(r"^ *(Local training|FedAvg|FedPer) +(\d+\.\d) ±", table, re.MULTILINE)
    assert len(rows) == 3
    assert [float(score) for _, score in rows] == sorted((float(score) for _, score in rows), reverse=True)
    assert re.search(r"scores highest .* not enough seeds to tell", " ".join(done.stdout.split()))
    assert "Runs saved in all" in done.stdout
    other = fedtailor(*words, "--method.lr", "0.7", folder=tmp_path)
    assert other.returncode == 2 and "contains another run" in other.stderr
    (tmp_path / "all" / "notes.txt").touch()
    assert "contains other files" in fedtailor(*words, folder=tmp_path).stderr
    (tmp_path / "all" / "notes.txt").unlink()
    again = fedtailor("show", "all", folder=tmp_path)
    assert again.stdout.strip() == done.stdout.split("Runs saved in")[0].strip()


def test_compare_with_references_and_target_is_shown_and_reproduced_by_its_command(tmp_path: Path) -> None:
    words = ["compare", "fedavg", "--centralized", "--sampled-local", "--target", "0.05", "--participation", "0.5"]
    done = fedtailor(*words, "--out", "all", *QUICK, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Not ranked, as references: centralized training and local training (sampled)" in " ".join(
        done.stdout.split()
    )
    assert "first evaluated round with accuracy 5.0 %" in " ".join(done.stdout.split())
    result = ft.load_comparison(tmp_path / "all", target=0.05)
    shown = fedtailor("show", "all", "--format", "json", "--target", "0.05", folder=tmp_path)
    assert json.loads(shown.stdout) == json.loads(result.to_json())
    [command] = run_commands(result.runs)
    again = fedtailor(*shlex.split(command)[1:], "--out", "again", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert ft.load_comparison(tmp_path / "again").rows("client") == result.rows("client")


def test_run_with_repeats_points_to_compare(tmp_path: Path) -> None:
    done = fedtailor("run", "--data", "heart", "--repeats", "10", folder=tmp_path)
    assert done.returncode == 2 and "does not take --repeats; use fedtailor compare for several" in done.stderr


def test_compare_repeats_shows_clients_with_intervals_and_is_reproduced(tmp_path: Path) -> None:
    words = ["compare", "fedavg", "--data", "heart", "--folds", "2", "--repeats", "2", "--seeds", "3", "--rounds", "1"]
    done = fedtailor(*words, "--out", "all", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert (
        re.search(r"Cleveland (FedAvg|Local training) \d+\.\d \d+\.\d to \d+\.\d", text) and "Mean of 4 clients" in text
    )
    result = ft.load_comparison(tmp_path / "all")
    assert [run.experiment["data"]["repeat"] for run in result.runs if run.method == "local"] == [6, 7, 8, 9]
    shown = fedtailor("show", "all", "--format", "csv", "--per", "client_mean", folder=tmp_path)
    assert shown.stdout.strip() == result.to_csv(per="client_mean").strip()
    [command] = run_commands(result.runs)
    assert command.endswith("--repeats 2 --folds 2 --seeds 3")
    again = fedtailor(*shlex.split(command)[1:], "--out", "again", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert ft.load_comparison(tmp_path / "again").rows("client") == result.rows("client")


@pytest.mark.parametrize(("format", "start"), [("latex", "% "), ("markdown", "FedAvg on"), ("csv", "moment,choice")])
def test_show_prints_a_run_in_a_format_to_paste(
    format: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fed = ft.load("digits", clients=4)
    run = ft.simulate(ft.methods.FedAvg(), ft.network("logistic", fed), fed, rounds=1, folder=tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["fedtailor", "show", str(tmp_path / "run"), "--format", format])
    with pytest.raises(SystemExit) as stop:
        main()
    shown = capsys.readouterr().out
    assert stop.value.code == 0 and shown.startswith(start)
    score = (run.summarize("received") or {})["weighted"]
    assert (str(score) if format == "csv" else f"{100 * score:.1f}") in shown


def test_compare_after_an_interruption_continues_with_the_same_command(tmp_path: Path) -> None:
    words = ["compare", "fedavg", "fedper", "--out", "all", "--checkpoint-every", "1", "--method.lr", "0.2", *QUICK]
    whole = fedtailor(*words, folder=tmp_path)
    # as if stopped before the models of fedper were written, and before fedavg started
    (tmp_path / "all" / "fedper-seed0" / "personal").rename(tmp_path / "moved")
    (tmp_path / "all" / "fedavg-seed0").rename(tmp_path / "never-started")
    before = (tmp_path / "all" / "local-seed0" / "rounds.jsonl").stat().st_mtime_ns
    again = fedtailor(*words, folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "Runs saved in all" in again.stdout
    assert (tmp_path / "all" / "local-seed0" / "rounds.jsonl").stat().st_mtime_ns == before  # not run again
    rows = re.compile(r"^ *(Local training|FedAvg|FedPer) +(\d+\.\d)", re.MULTILINE)
    assert len(rows.findall(whole.stdout)) > 2 and rows.findall(whole.stdout) == rows.findall(again.stdout)


@pytest.mark.usefixtures("default_sigint")  # inherited by child processes
@pytest.mark.parametrize("presses", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_saves_the_run_and_exits_with_130(presses: int, tmp_path: Path) -> None:
    words = ["--method", "fedper", "--rounds", "100000", "--data.clients", "4", "--checkpoint-every", "1"]
    command = [sys.executable, "-m", "fedtailor.cli.main", "run", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    folder = tmp_path / "runs" / "fedper-seed0-digits"
    checkpoints = folder / "checkpoints"  # only the last two are kept
    wait_until(process, lambda: any(path.name >= "000002" for path in checkpoints.glob("[0-9]" * 6)))
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert "Finishing the round and saving; interrupt again to stop immediately.\n" in lines  # after the progress
    if presses == 2:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130 and out == "" and "Traceback" not in err
    hint = "resume it with: fedtailor resume runs/fedper-seed0-digits"
    assert err.strip().endswith(hint) or presses == 2  # the second one may interrupt the message itself


def test_resume_finishes_an_interrupted_run_and_shows_it(tmp_path: Path) -> None:
    done = fedtailor("run", "--method", "fedper", "--checkpoint-every", "1", *QUICK, folder=tmp_path)
    folder = tmp_path / "runs" / "fedper-seed0-digits"
    shutil.rmtree(folder / "personal")
    shutil.rmtree(folder / "checkpoints" / "000002")
    named = "resume it with: fedtailor resume runs/fedper-seed0-digits"
    assert named in fedtailor("resume", "runs", folder=tmp_path).stderr
    again = fedtailor("resume", "runs/fedper-seed0-digits", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    for text in ("all samples", "worst 10 %", "loss"):
        lines = [[line.split() for line in out.splitlines() if text in line] for out in (done.stdout, again.stdout)]
        assert lines[0] and lines[0] == lines[1]
    assert "There is no run in 'nowhere'" in fedtailor("resume", "nowhere", folder=tmp_path).stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("methods", ["scaffold", "SCAFFOLD", "Self-FL", "ICML 2020", "client state: control variate; personal: no"]),
        ("methods fedprox", ["mu = 0.1 μ"]),
        ("data", ["cifar10", "folder", "pfllib"]),
        ("data hapt", ["window = 128", "10,929", "License:"]),
        ("networks", ["lenet5", "hidden"]),
    ],
)
def test_list_shows_all_names_or_the_fields_of_a_method(words: str, expected: list[str], tmp_path: Path) -> None:
    done = fedtailor("list", *words.split(), folder=tmp_path)
    shown = " ".join(done.stdout.split())
    assert done.returncode == 0 and all(text in shown for text in expected)
    assert ("scaffold" in shown) == (words == "methods")


@dataclass(frozen=True)
class Broken(ft.Method):
    """A method that fails in its second round."""

    def train(self, ctx: ft.ClientContext, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        if ctx.round == 2:
            raise RuntimeError("out of order")
        return state, message


@dataclass(frozen=True)
class Unfit(ft.Method):
    """A method that supports no model."""

    def init_server(self, setup: ft.Setup) -> Tree:
        raise ft.FedTailorError("Unfit needs a model of another kind.")


def test_compare_all_continues_after_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in METHODS.keys() - {"local", "fedavg", "fedper", "fedbn"}:
        monkeypatch.delitem(METHODS, name)
    for method in (Broken, Unfit):
        monkeypatch.setitem(METHODS, method.__name__.lower(), method)
    monkeypatch.setattr(sys, "argv", ["fedtailor", "compare", "--all", "--out", str(tmp_path / "all"), *QUICK])
    with pytest.raises(SystemExit) as stop:
        main()
    captured = capsys.readouterr()
    assert stop.value.code == 1
    assert "Broken-seed0 failed: RuntimeError: out of order" in captured.err
    assert "Unfit failed: Unfit needs a model of another kind." in captured.err
    assert {path.name for path in (tmp_path / "all").iterdir()} >= {f"{n}-seed0" for n in ("local", "fedavg", "fedper")}
    scores = captured.out.split("Last round")[0]
    rows = re.findall(r"^ *(Local training|FedAvg|FedPer|FedBN|Broken|Unfit) +\d+\.\d", scores, re.MULTILINE)
    assert sorted(rows) == ["FedAvg", "FedBN", "FedPer", "Local training"]
    assert re.search(r"identical scores with (FedAvg and FedBN|FedBN and FedAvg)", " ".join(captured.out.split()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compare fedavg --all", "either method names or --all, not both"),
        ("list methods fedproxx", "did you mean 'fedprox'?"),
        ("run --method fedavgg", "There is no method 'fedavgg'; did you mean 'fedavg'?"),
        ("run --method nowhere:Mine", "There is no module 'nowhere' in the current folder"),
        ("compare fedavg nowhere:Mine", "There is no module 'nowhere' in the current folder"),
        ("list methods nowhere:Mine", "There is no module 'nowhere' in the current folder"),
        ("run --method fedavg --method.rl 1", "There is no field of fedavg 'rl'; did you mean 'lr'?"),
        ("run --network lenett5", "did you mean 'lenet5'?"),
        ("run --network lenet5", "lenet5 needs images of at least 28×28"),
        ("run --data digitss", "did you mean 'digits'?"),
        ("run --rounds 0", "rounds must be at least 1"),
        ("run --data.clients 1000", "1797 samples are too few for 1000 clients with 10 samples each"),
        ("run --data.alpha -1", "alpha must be above 0"),
        ("run --data.partition by_owner", "digits has no owners to split by"),
        ("run missing.toml", "The experiment 'missing.toml' cannot be read"),
        ("compare fedavg fedpr", "did you mean 'fedper'?"),
        ("compare fedavg --method.mu 1", "There is no field of these methods 'mu'"),
        ("compare fedavg --seeds one", "--seeds must have values such as 0,1,2"),
        ("compare fedavg --seeds []", "--seeds must have values such as 0,1,2"),
        ("compare fedavg --seeds 1.5", "--seeds must have values such as 0,1,2"),
        ("compare fedavg --seed 5", "compare takes --seeds"),
        ("compare fedper --network logistic --out o", "inside and outside of 'head'"),
        ("run --rounds 1 --rounds.x 3", "rounds is a value without fields"),
        ("run --method [/x]", "There is no method '[/x]'"),
        ("run --method.lr [bold]x", "method.lr cannot be '[bold]x'"),
        ("run --data folder", "needs data.folder, the folder of your clients"),
        ("show nowhere", "'nowhere' contains no finished run"),
        ("show nowhere --format excel", "There is no format 'excel'"),
        ("compare fedavg --target high", "--target must be a score such as 0.9"),
        ("list method", "did you mean 'methods'?"),
        ("data get cifar", "did you mean 'cifar10'?"),
        ("data convert a.safetensors --rounds 3", "takes one file name and the flags --data and --data.FIELD"),
        ("run --data file", "needs data.file"),
        ("report runs -o t.csv", "its file must end in .html, got 't.csv'"),
    ],
)
def test_invalid_command_prints_one_line_exits_with_2_and_writes_nothing(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedtailor", *words.split()])
    with pytest.raises(SystemExit) as stop:
        main()
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert message in captured.err and captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_env_prints_versions_for_a_bug_report(tmp_path: Path) -> None:
    done = fedtailor("env", folder=tmp_path)
    found = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert (found["fedtailor"], found["torch"]) == (VERSION, torch.__version__) and "flwr" in found["[flower]"]
    assert done.stderr == "" and str(tmp_path) not in done.stdout


def test_help_lists_the_flags_and_the_file(tmp_path: Path) -> None:
    assert fedtailor("--version", folder=tmp_path).stdout == f"fedtailor {VERSION}\n"
    done = fedtailor("run", "--help", folder=tmp_path)
    for flag in ("[EXPERIMENT.toml]", "--batch-size", "--participation", "--data.alpha", "--method.FIELD", "--out"):
        assert flag in done.stdout
