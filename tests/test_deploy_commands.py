"""`fedtailor deploy`, as far as it goes without a server."""

import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.deploy import commands, link, node
from fedtailor.deploy.folder import enrolled, write_status
from fedtailor.deploy.settings import read_deployment

INPUTS = ["--inputs.shape", "1,8,8", "--inputs.classes", "10"]


def call(*words: str | Path) -> str:
    """What a command prints; a refusal is raised as it is."""
    result = CliRunner().invoke(commands.deploy, [str(word) for word in words], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def refused(*words: str | Path) -> str:
    with pytest.raises(ft.Refused) as caught:
        call(*words)
    return str(caught.value)


@pytest.fixture
def operator(tmp_path: Path) -> Path:
    call("init", tmp_path / "dir", "--method", "fedapa", "--network", "lenet5", "--rounds", "7", *INPUTS[2:])
    return tmp_path / "dir"


def test_init_writes_a_folder_that_says_how_to_go_on(operator: Path) -> None:
    deployment = read_deployment(operator)
    assert deployment.method == ft.methods.FedAPA() and deployment.length == 7
    text = (operator / "README.md").read_text()
    for word in ("deploy keys", "deploy server", "deploy start", "deploy client --name hospital-a"):
        assert word in text
    app = (operator / "app" / "federation" / "client_app.py").read_text()
    assert "from fedtailor.deploy.client_app import app" in app
    assert "not empty" in refused("init", operator)


def test_init_shows_what_crosses_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    shown = call("init", tmp_path / "a", "--method", "fedper", *INPUTS)
    assert "A client sends to the server, every round: 24,960 bytes" in shown and "head" not in shown
    assert "grows with their number" in call("init", tmp_path / "b", "--method", "apple", *INPUTS)
    assert "lenet5" in refused("init", tmp_path / "c", "--network", "lenet5", "--inputs.shape", "7")
    assert "nosuch" in refused("init", tmp_path / "d", "--method.nosuch", "1")
    assert not (tmp_path / "c").exists() and not (tmp_path / "d").exists()


def test_keys_enrol_clients_and_leave_lets_them_go(operator: Path) -> None:
    shown = call("keys", operator, "--clients", "a,b")
    assert "a.tar" in shown and "b.tar" in shown
    assert list(enrolled(operator)) == ["a", "b"]
    call("keys", operator, "--clients", "c")
    assert list(enrolled(operator)) == ["a", "b", "c"]
    assert "a" in refused("keys", operator, "--clients", "a")
    assert "whom to enrol" in refused("keys", operator)
    call("leave", operator, "b")
    assert enrolled(operator)["b"].left and not enrolled(operator)["a"].left
    assert "nobody" in refused("leave", operator, "nobody")


def test_a_command_without_a_server_says_how_to_start_it(operator: Path) -> None:
    assert "Nobody is enrolled" in refused("start", operator)
    call("keys", operator, "--clients", "a,b")
    assert f"fedtailor deploy server {operator}" in refused("start", operator)
    shown = call("status", operator)
    assert "Not started" in shown and "fedtailor deploy server" in shown and "not yet" in shown
    write_status(operator, {"state": "stopped", "why": "bob: late", "round": 3, "rounds": 7, "members": ["a"]})
    assert "Stopped, 3 of 7 rounds done: bob: late" in call("status", operator)
    write_status(operator, {"state": "running", "round": 3, "rounds": 7, "last_round": {"a": "late"}})
    shown = call("status", operator)
    assert "Stopped, 3 of 7 rounds done: its server is not there" in shown and "late" in shown
    assert "There is no deployment" in refused("server", operator.parent)


def save(path: Path, shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> Path:
    random = np.random.default_rng(0)
    np.savez(path, x=random.uniform(size=(40, *shape)).astype(np.float32), y=np.arange(40) % classes)
    return path


def test_a_client_is_shown_what_it_will_send_before_it_connects(
    operator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("keys", operator, "--clients", "a,b")
    connected: list[Path] = []
    monkeypatch.setattr(node, "keep_connected", lambda site, say: connected.append(site))
    words: list[str | Path] = ["--bundle", operator / "bundles" / "a.tar", "--folder", tmp_path / "site"]
    shown = call("client", "--name", "a", *words, "--data", save(tmp_path / "own.npz"))
    assert "a has 30 training, 10 test samples; they stay here." in shown
    assert "A client sends to the server" in shown and "conv1.weight" in shown and "head" not in shown
    assert connected == [tmp_path / "site"]
    assert "is a's, not b's" in refused("client", "--name", "b", *words, "--data", tmp_path / "own.npz")
    other: list[str | Path] = ["--bundle", operator / "bundles" / "b.tar", "--folder", tmp_path / "site"]
    refused("client", "--name", "b", *other, "--data", tmp_path / "own.npz")  # a folder is one client's
    odd = save(tmp_path / "odd.npz", (1, 8, 8))
    assert "(1, 8, 8), and this federation's are (1, 28, 28)" in refused("client", "--name", "a", *words, "--data", odd)
    many = save(tmp_path / "many.npz", classes=12)
    assert "label 1" in refused("client", "--name", "a", *words, "--data", many)
    assert "There is no file" in refused("client", "--name", "a", *words, "--data", tmp_path / "nothing.npz")
    assert connected == [tmp_path / "site"]


def test_a_slip_at_the_command_changes_nothing(operator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call("keys", operator, "--clients", "a,b")
    site, own, other = tmp_path / "site", save(tmp_path / "own.npz"), save(tmp_path / "other.npz")

    def words(name: str, bundle: str, data: Path) -> list[str | Path]:
        tar = operator / "bundles" / f"{bundle}.tar"
        return ["client", "--name", name, "--bundle", tar, "--folder", site, "--data", data]

    def again(where: Path, say: object) -> None:
        """While it is connected, somebody calls the command once more, with other data."""
        before = (where / "site.json").read_bytes()
        assert "connected already" in refused(*words("a", "a", other))
        assert (where / "site.json").read_bytes() == before

    monkeypatch.setattr(node, "keep_connected", again)
    assert "is b's, not a's" in refused(*words("a", "b", own))
    call(*words("a", "a", own))  # the folder is not b's for that


def test_follow_tells_every_change_and_asks_flower_seldom(operator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call("keys", operator, "--clients", "a")
    (operator / "home").mkdir()
    told = iter(
        [{"state": "running", "round": number // 50, "rounds": 7} for number in range(100)] + [{"state": "finished"}]
    )
    asked: list[int] = []
    monkeypatch.setattr(link, "submit", lambda folder: 17)

    def state(folder: Path, run: int) -> str:
        asked.append(run)
        return "running"

    monkeypatch.setattr(link, "run_state", state)
    now = iter(float(second) for second in range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    monkeypatch.setattr(time, "sleep", lambda seconds: write_status(operator, next(told)))
    shown = call("start", operator, "--follow")
    lines = [line for line in shown.splitlines() if line.startswith(("Starting", "Running", "Finished"))]
    assert lines == ["Starting", "Running, 0 of 7 rounds done", "Running, 1 of 7 rounds done", "Finished"]
    assert 2 <= len(asked) <= 5


def test_a_bundle_holds_nothing_of_others(operator: Path) -> None:
    call("keys", operator, "--clients", "a,b")
    with tarfile.open(operator / "bundles" / "a.tar") as bundle:
        held = b"".join(file.read() for member in bundle if (file := bundle.extractfile(member)))
    assert (operator / "keys" / "authority.key").read_bytes() not in held
    assert enrolled(operator)["b"].public_key.encode() not in held


def test_a_second_start_is_refused_in_words(operator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call("keys", operator, "--clients", "a")
    (operator / "home").mkdir()
    states = iter(["running", "running", "finished:failed", "finished:failed"])
    monkeypatch.setattr(link, "submit", lambda folder: 17)
    monkeypatch.setattr(link, "run_state", lambda folder, run: next(states))
    call("start", operator)
    assert "going on" in refused("start", operator)  # also while it waits for clients, when there is no run yet
    assert "going on" in refused("resume", operator)
    call("resume", operator)
    assert "No run" in refused("stop", operator)
    (operator / "run").mkdir()
    (operator / "run" / "experiment.toml").touch()
    assert "begun; resume it" in refused("start", operator)
