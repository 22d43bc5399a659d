"""What a run records about its environment."""

import getpass
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor as ft
from conftest import TinyNet, tiny_federation
from fedtailor.runs.environment import commit_text, describe_environment, optional_packages

GIT = ["git", "-c", "user.name=Someone", "-c", "user.email=someone@example.org", "-c", "commit.gpgsign=false"]


def git(*words: str) -> str:
    return subprocess.run([*GIT, *words], check=True, capture_output=True, text=True).stdout.strip()


def run_environment(folder: Path) -> dict[str, object]:
    """Run one round in a folder, and return the environment in its run.json."""
    fed, net = tiny_federation(), TinyNet().double()
    ft.simulate(ft.methods.FedAvg(), net, fed, rounds=1, dtype="float64", engine="sequential", folder=folder)
    return dict(json.loads((folder / "run.json").read_text())["environment"])


def test_run_records_versions_and_the_commit_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work := tmp_path / "work").mkdir()
    monkeypatch.chdir(work)
    (work / "script.py").write_text("print(1)")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    found = run_environment(tmp_path / "clean")
    assert (found["torch"], found["python"]) == (torch.__version__, platform.python_version())
    assert found["git"] == {"commit": git("rev-parse", "HEAD"), "modified": False}
    (work / "notes.txt").touch()  # an untracked file, such as the run itself, changes no code
    assert run_environment(tmp_path / "untracked")["git"] == found["git"]
    (work / "script.py").write_text("print(2)")
    changed = run_environment(tmp_path / "changed")
    assert changed == found | {"git": {"commit": git("rev-parse", "HEAD"), "modified": True}}
    loaded = ft.load_run(tmp_path / "changed")
    assert commit_text(loaded.info) == f"{git('rev-parse', 'HEAD')[:10]}, modified"


@pytest.mark.parametrize("has_git", [True, False])
def test_run_outside_of_a_repository_or_without_git_has_no_commit(
    has_git: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path if has_git else Path(__file__).parent)
    if not has_git:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert "git" not in run_environment(tmp_path / "run")


def test_environment_names_no_path_user_or_computer() -> None:
    text = json.dumps(describe_environment())
    private = [str(Path.cwd()), str(Path.home()), platform.node(), getpass.getuser()]
    assert not [word for word in private if len(word) > 1 and f"{word}" in text]


def test_malformed_environment_of_a_foreign_run_has_no_commit() -> None:
    malformed: list[Any] = [None, [], {"git": "x"}, {"git": {"commit": 3}}]
    for environment in malformed:
        assert commit_text({"environment": environment}) == "–"


def test_optional_packages_are_listed_by_extra() -> None:
    packages = optional_packages()
    assert packages["flower"].keys() >= {"flwr", "cryptography"} and "dev" not in packages
