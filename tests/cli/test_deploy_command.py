"""`fedtailor deploy` without a running server."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedtailor as ft
from conftest import error_message
from fedtailor.cli import deploy
from fedtailor.deploy.client import supernode
from fedtailor.deploy.server import run_control, superlink
from fedtailor.deploy.server.operator_folder import enrolled_clients, write_status
from fedtailor.experiments.deployment import read_deployment
from fedtailor.runs.files import folder_lock

INPUTS = ["--inputs.shape", "1,8,8", "--inputs.classes", "10"]


def run(*args: str | Path) -> str:
    """Run `fedtailor deploy` and return its output; errors are raised."""
    result = CliRunner().invoke(deploy.deploy, [str(arg) for arg in args], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def error(*args: str | Path) -> str:
    return error_message(lambda: run(*args))


@pytest.fixture
def operator(tmp_path: Path) -> Path:
    run("init", tmp_path / "dir", "--method", "fedapa", "--network", "lenet5", "--rounds", "7", *INPUTS[2:])
    return tmp_path / "dir"


def test_init_writes_settings_and_readme(operator: Path) -> None:
    deployment = read_deployment(operator)
    assert deployment.method == ft.methods.FedAPA() and deployment.num_rounds == 7
    text = (operator / "README.md").read_text()
    for word in ("deploy keys", "deploy server", "deploy start", "deploy client --name hospital-a"):
        assert word in text
    assert "not empty" in error("init", operator)


def test_init_shows_payload_and_rejects_invalid_settings(tmp_path: Path) -> None:
    output = run("init", tmp_path / "a", "--method", "fedper", *INPUTS)
    assert "A client sends to the server in every round: 24,960 bytes" in output and "head" not in output
    assert "grow with the number of clients" in run("init", tmp_path / "b", "--method", "apple", *INPUTS)
    assert "lenet5" in error("init", tmp_path / "c", "--network", "lenet5", "--inputs.shape", "7")
    assert "nosuch" in error("init", tmp_path / "d", "--method.nosuch", "1")
    assert not (tmp_path / "c").exists() and not (tmp_path / "d").exists()


def test_keys_enrolls_clients_and_leave_removes_them(operator: Path) -> None:
    output = run("keys", operator, "--clients", "a,b")
    assert "a.tar" in output and "b.tar" in output
    assert list(enrolled_clients(operator)) == ["a", "b"]
    run("keys", operator, "--clients", "c")
    assert list(enrolled_clients(operator)) == ["a", "b", "c"]
    assert "a" in error("keys", operator, "--clients", "a")
    assert "clients to enroll" in error("keys", operator)
    run("leave", operator, "b")
    assert enrolled_clients(operator)["b"].left and not enrolled_clients(operator)["a"].left
    assert "nobody" in error("leave", operator, "nobody")


def test_commands_without_server_name_the_command_that_starts_it(operator: Path) -> None:
    assert "No clients are enrolled" in error("start", operator)
    assert f"fedtailor deploy keys {operator}" in error("server", operator)
    run("keys", operator, "--clients", "a,b")
    assert f"fedtailor deploy server {operator}" in error("start", operator)
    output = run("status", operator)
    assert "Not started" in output and "fedtailor deploy server" in output and "not yet" in output
    write_status(operator, {"state": "stopped", "reason": "bob: late", "round": 3, "rounds": 7, "members": ["a"]})
    assert "Stopped, 3 of 7 rounds done: bob: late" in run("status", operator)
    write_status(operator, {"state": "running", "round": 3, "rounds": 7, "last_round": {"a": "late"}})
    output = run("status", operator)
    assert "Stopped, 3 of 7 rounds done: its server is not running" in output and "late" in output
    assert "There is no deployment" in error("server", operator.parent)


def save(path: Path, shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> Path:
    random = np.random.default_rng(0)
    np.savez(path, x=random.uniform(size=(40, *shape)).astype(np.float32), y=np.arange(40) % classes)
    return path


def test_client_before_it_connects_shows_what_it_will_send(
    operator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("keys", operator, "--clients", "a,b")
    connected: list[Path] = []
    monkeypatch.setattr(supernode, "keep_connected", lambda folder, say: connected.append(folder))
    args: list[str | Path] = ["--bundle", operator / "bundles" / "a.tar", "--folder", tmp_path / "client"]
    output = run("client", "--name", "a", *args, "--data", save(tmp_path / "own.npz"))
    assert "a has 30 training, 10 test samples. They stay on this machine." in output
    assert "A client sends to the server" in output and "conv1.weight" in output and "head" not in output
    assert connected == [tmp_path / "client"]
    assert "is for client a, not b" in error("client", "--name", "b", *args, "--data", tmp_path / "own.npz")
    other: list[str | Path] = ["--bundle", operator / "bundles" / "b.tar", "--folder", tmp_path / "client"]
    error("client", "--name", "b", *other, "--data", tmp_path / "own.npz")  # a folder belongs to one client
    wrong_shape = save(tmp_path / "wrong_shape.npz", (1, 8, 8))
    message = error("client", "--name", "a", *args, "--data", wrong_shape)
    assert "shape (1, 8, 8), but this federation requires (1, 28, 28)" in message
    many = save(tmp_path / "many.npz", classes=12)
    assert "label 1" in error("client", "--name", "a", *args, "--data", many)
    assert "There is no file" in error("client", "--name", "a", *args, "--data", tmp_path / "nothing.npz")
    assert connected == [tmp_path / "client"]


def test_client_called_with_wrong_arguments_changes_nothing(
    operator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("keys", operator, "--clients", "a,b")
    folder, data, other = tmp_path / "client", save(tmp_path / "own.npz"), save(tmp_path / "other.npz")

    def arguments(name: str, bundle: str, data: Path) -> list[str | Path]:
        tar = operator / "bundles" / f"{bundle}.tar"
        return ["client", "--name", name, "--bundle", tar, "--folder", folder, "--data", data]

    def run_twice(path: Path, say: object) -> None:
        """Run the command with other data while the client is connected."""
        before = (path / "client.json").read_bytes()
        assert "already running" in error(*arguments("a", "a", other))
        assert (path / "client.json").read_bytes() == before

    monkeypatch.setattr(supernode, "keep_connected", run_twice)
    assert "is for client b, not a" in error(*arguments("a", "b", data))
    run(*arguments("a", "a", data))  # the folder does not belong to b after the error


def test_follow_prints_every_change_until_the_run_ends(operator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("keys", operator, "--clients", "a")
    for name in ("home", "run"):
        (operator / name).mkdir()
    running: list[dict[str, Any]] = [{"state": "running", "round": n // 50, "rounds": 7} for n in range(100)]
    statuses = iter([*running, {"state": "finished"}])
    monkeypatch.setattr(superlink, "submit", lambda folder: 17)
    monkeypatch.setattr(superlink, "stop_orphaned_runs", lambda folder: None)
    monkeypatch.setattr(run_control, "_wait_for_end", lambda folder: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: write_status(operator, next(statuses)))
    with folder_lock(operator / "home"), folder_lock(operator / "run"):  # the server and the run
        output = run("start", operator, "--follow")
    lines = [line for line in output.splitlines() if line.startswith(("Starting", "Running", "Finished"))]
    assert lines == ["Starting", "Running, 0 of 7 rounds done", "Running, 1 of 7 rounds done", "Finished"]


def test_second_start_is_rejected(operator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("keys", operator, "--clients", "a")
    for name in ("home", "run"):
        (operator / name).mkdir()
    monkeypatch.setattr(superlink, "submit", lambda folder: 17)
    monkeypatch.setattr(superlink, "stop_orphaned_runs", lambda folder: None)
    with folder_lock(operator / "home"):
        run("start", operator)
        assert "is active" in error("start", operator)  # also before the first round
        write_status(operator, {"state": "running", "round": 1, "rounds": 7})
        with folder_lock(operator / "run"):
            assert "is active" in error("resume", operator)
        run("resume", operator)  # at once, because its process has died
        write_status(operator, {"state": "stopped"})
        run("stop", operator)  # although its process has ended, because the server would start it again
        assert "No run" in error("stop", operator)
    (operator / "run" / "experiment.toml").touch()
    assert "already started; use resume" in error("start", operator)


def test_renew_creates_certificate_or_key(operator: Path) -> None:
    run("keys", operator, "--clients", "a,b")
    certificate = (operator / "keys" / "server.crt").read_bytes()
    output = run("renew", operator)
    assert "has a new certificate" in output and "Send" not in output
    assert (operator / "keys" / "server.crt").read_bytes() != certificate
    output = run("renew", operator, "--client", "a")
    assert "bundles/a.tar" in output.replace("\n", "") and "valid until the new one is first used" in output
    assert "has not used its new key" in run("status", operator)
    assert "no longer valid" in run("renew", operator, "--client", "a", "--now")
    assert "has not used its new key" not in run("status", operator)
    assert "--client NAME" in error("renew", operator, "--now")
