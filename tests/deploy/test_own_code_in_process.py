"""Own methods, networks, and loaders in a deployment: consent, hashes, and the same models as a simulation."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

import fedtailor as ft
from conftest import error_message
from fedtailor.cli import deploy
from fedtailor.cli.deployed_code import confirm_code
from fedtailor.deploy.client import supernode
from fedtailor.deploy.client.client_folder import ClientFolder
from fedtailor.deploy.client.worker_process import answer
from fedtailor.deploy.selftest import read_personal_model
from fedtailor.deploy.server.operator_folder import enroll, enrolled_clients, read_status
from fedtailor.experiments.deployed_code import format_consent
from fedtailor.experiments.deployment import read_deployment, read_deployment_file, read_operator_deployment
from fedtailor.runs.reader import load_run
from fedtailor.runs.toml import to_toml
from support.flower_in_process import APP, Grid, InProcessFederation
from support.own_package import CODE, NAME, forget_package, installed, is_imported

NAMES = ("ann", "bob")
SETTINGS = {
    **CODE, "method.mu": "0.5", "network.hidden": "6", "data.scale": "2.0", "inputs.shape": "1,3,3",
    "inputs.classes": "3", "rounds": "2", "batch-size": "4", "evaluate-every": "2", "retry": "0", "deadline": "60",
}  # fmt: skip


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Path]:
    with installed(tmp_path / "site") as folder:
        yield folder


@pytest.fixture
def operator(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An operator's folder with own code and two clients."""
    monkeypatch.setattr(supernode, "keep_connected", lambda folder, say: None)
    folder = tmp_path / "operator"
    run("init", folder, *(word for name, value in SETTINGS.items() for word in (f"--{name}", value)))
    run("keys", folder, "--clients", ",".join(NAMES))
    clients = enrolled_clients(folder)
    enroll(folder, {name: replace(clients[name], node_id=100 + i) for i, name in enumerate(NAMES)})
    for seed, name in enumerate(NAMES):
        random, count = np.random.default_rng(seed), 12 + 4 * seed
        (tmp_path / f"{name}-data").mkdir()
        pixels = random.uniform(size=(count, 1, 3, 3)).astype(np.float32)
        np.savez(tmp_path / f"{name}-data" / "scans.npz", pixels=pixels, diagnosis=np.arange(count) % 3)
    return folder


def run(*args: str | Path) -> str:
    """Run `fedtailor deploy` and return its output; errors are raised."""
    result = CliRunner().invoke(deploy.deploy, [str(arg) for arg in args], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def join(operator: Path, name: str, *more: str) -> str:
    """Run `fedtailor deploy client` until the client would connect."""
    root = operator.parent
    args = ["--name", name, "--bundle", str(operator / "bundles" / f"{name}.tar"), "--device", "cpu"]
    return run("client", *args, "--data", str(root / f"{name}-data"), "--folder", str(root / name), *more)


def join_all(operator: Path) -> InProcessFederation:
    for name in NAMES:
        join(operator, name, "--yes", "--allow-code", format_consent(NAME))
    folders = {name: operator.parent / name for name in NAMES}
    return InProcessFederation(operator, folders, Grid({100 + i: folders[name] for i, name in enumerate(NAMES)}))


def query(folder: Path) -> dict[str, Any]:
    return dict(json.loads(answer(folder, APP, "query", '{"index": 0}', b"")[0]))


def test_own_method_network_and_loader_give_same_models_as_simulation(operator: Path, package: Path) -> None:
    federation = join_all(operator)
    federation.run()
    deployment = read_operator_deployment(operator)
    parts = [ClientFolder.open(folder).fed for folder in federation.client_folders.values()]
    arrays = [tuple(t[i].numpy() for i in (f.train[0], f.test[0]) for t in (f.x, f.y)) for f in parts]
    assert parts[0].x.max() > 1, "the loader multiplied the pixels by data.scale"
    from ward_models import Proximal  # type: ignore[import-not-found]

    fed = ft.Federation.from_arrays(arrays, names=NAMES, classes=3)  # type: ignore[arg-type]
    expected = ft.simulate(
        Proximal(mu=0.5), deployment.model(), fed, rounds=2, batch_size=4, evaluate_every=2, engine="sequential"
    )
    assert "mu" in deployment.describe()["method"] and expected.personal(0, "trained")["body.1.weight"].shape == (6, 9)
    for client, folder in enumerate(federation.client_folders.values()):
        deployed, simulated = read_personal_model(folder, "trained"), expected.personal(client, "trained")
        assert deployed.keys() == simulated.keys()
        assert all(torch.equal(deployed[name], simulated[name]) for name in deployed)
    assert load_run(operator / "run").scores("trained") == pytest.approx(expected.scores("trained"))
    assert "is code that importing would execute" in error_message(lambda: ft.load_personal(operator.parent / "ann"))
    assert ft.load_personal(operator.parent / "ann", allow_code=True)(fed.x[:2]).shape == (2, 3)


def test_own_network_for_tokens_gets_integers(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supernode, "keep_connected", lambda folder, say: None)
    inputs = ["--inputs.shape", "5", "--inputs.classes", "3", "--inputs.tokens", "true"]
    run("init", tmp_path / "operator", "--method", "fedavg", "--network", f"{NAME}:Words", *inputs)
    run("keys", tmp_path / "operator", "--clients", "ann")
    x, y = np.random.default_rng(0).integers(0, 20, (12, 5)), np.arange(12) % 3
    np.savez(tmp_path / "words.npz", x=x, y=y)
    bundle = str(tmp_path / "operator" / "bundles" / "ann.tar")
    args = ["--name", "ann", "--bundle", bundle, "--folder", str(tmp_path / "ann")]
    allow = ["--yes", "--allow-code", format_consent(NAME), "--device", "cpu"]
    assert "ann has 9 training, 3 test samples" in run("client", *args, "--data", tmp_path / "words.npz", *allow)


def test_init_freezes_code_and_shows_what_clients_need(operator: Path, tmp_path: Path) -> None:
    frozen = read_deployment_file(operator)["code"]
    assert frozen.keys() == {NAME} and frozen[NAME]["version"] == "1.2" and len(frozen[NAME]["sha256"]) == 64
    assert f"`{NAME}` 1.2 (SHA-256 {frozen[NAME]['sha256'][:12]})" in (operator / "README.md").read_text()
    output = run("init", tmp_path / "again", "--method", CODE["method"])
    assert f"{NAME}.methods:Proximal" in output and "weights.bin" in output and "Every client needs" in output


def test_client_without_consent_imports_nothing(operator: Path) -> None:
    forget_package()
    for more in ([], ["--yes"]):
        message = error_message(lambda more=more: join(operator, "ann", *more))  # type: ignore[misc]
        assert "which --yes alone does not allow; look at it" in message
        assert message.endswith(f"--allow-code {format_consent(NAME)}.")
    assert "at least 12 digits" in error_message(lambda: join(operator, "ann", "--yes", "--allow-code", NAME))
    wrong = f"{NAME}@000000000000"
    assert f"You allow {wrong}, but" in error_message(lambda: join(operator, "ann", "--yes", "--allow-code", wrong))
    reply = query(operator.parent / "ann")  # a message of the server does not import it either
    assert reply["name"] == "ann" and reply["error"]
    assert not is_imported() and not (operator.parent / "ann" / "client.json").exists()


def test_consent_is_asked_once_and_kept_until_the_hash_changes(
    operator: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, answers, asked = operator.parent / "ann", iter([False, True]), list[str]()

    def confirm(question: str) -> bool:
        asked.append(question)
        return next(answers)

    monkeypatch.setattr(typer, "confirm", confirm)
    error_message(lambda: join(operator, "ann"))  # unpacks the bundle
    forget_package()
    with pytest.raises(typer.Exit):
        confirm_code(folder, [], may_ask=True)
    assert not (folder / "allowed_code.json").exists()
    confirm_code(folder, [], may_ask=True)
    confirm_code(folder, [], may_ask=False)  # as after a restart
    assert len(asked) == 2 and "Run this code on this machine" in asked[0] and not is_imported()
    assert "You have allowed this code before" in join(operator, "ann", "--yes")

    (package / "data.py").write_text((package / "data.py").read_text() + "# a fix\n")
    forget_package()
    run("keys", operator, "--allow-code", format_consent(NAME))  # the operator takes the new code
    run("renew", operator)
    message = error_message(lambda: join(operator, "ann", "--yes"))
    assert f"--allow-code {format_consent(NAME)}" in message


def test_package_that_differs_is_named_on_both_sides(operator: Path, package: Path) -> None:
    federation = join_all(operator)
    before, original = format_consent(NAME).partition("@")[2], (package / "methods.py").read_bytes()
    (package / "methods.py").write_bytes(original + b"# changed\n")
    after = format_consent(NAME).partition("@")[2]
    expected = f"on this machine is 1.2 (SHA-256 {after}), but the deployment needs 1.2 (SHA-256 {before})"
    assert expected in error_message(lambda: join(operator, "ann", "--yes"))
    assert expected in query(operator.parent / "ann")["error"], "which the server shows"
    assert expected in error_message(lambda: read_operator_deployment(operator))

    (package / "methods.py").write_bytes(original)
    federation.run()
    assert read_status(operator)["state"] == "finished"


def test_code_that_only_a_file_names_is_not_imported(operator: Path) -> None:
    forget_package()
    assert "is code that importing would execute" in error_message(lambda: read_deployment(operator))
    (operator / "allowed_code.json").unlink()  # as in a folder from someone else, whose hashes are others
    message = error_message(lambda: run("start", operator))
    assert f"if you trust it, run: fedtailor deploy keys {operator} --allow-code {format_consent(NAME)}" in message
    assert not is_imported()
    run("keys", operator, "--allow-code", format_consent(NAME))
    assert read_operator_deployment(operator).data is not None


def test_code_in_an_edited_file_is_frozen_by_keys(operator: Path) -> None:
    settings = read_deployment_file(operator)
    (operator / "deployment.toml").write_text(to_toml({k: v for k, v in settings.items() if k != "code"}))
    message = error_message(lambda: run("keys", operator, "--clients", "cleo"))
    assert f"does not contain the version and hash of '{NAME}'; add them with" in message
    run("keys", operator, "--allow-code", format_consent(NAME), "--clients", "cleo")
    assert read_deployment_file(operator) == settings
    plain = replace(read_operator_deployment(operator), rounds=3)
    assert plain.describe()["code"] == settings["code"]


@pytest.mark.parametrize(
    ("part", "name", "text"),
    [
        ("method", "my_module:MyMethod", "There is no package 'my_module' on this machine"),
        ("network", "os:system", "'os' is not an installed package"),
        ("data", "digits", "clients have their own data; it can only be a function"),
        ("data", f"{NAME}:nothing", None),  # found on the clients, because only they import it
    ],
)
def test_init_with_code_that_is_not_installed_is_rejected(
    part: str, name: str, text: str | None, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    if text is None:
        run("init", tmp_path / "operator", f"--{part}", name)
    else:
        assert text in error_message(lambda: run("init", tmp_path / "operator", f"--{part}", name))


_LOADERS = {
    "no samples": ("return 3", "must return (x, y)"),
    "an error": ("return 1 / 0", "failed: ZeroDivisionError: division by zero (data.py, line 3)"),
    "another shape": ("return np.zeros((9, 5)), np.zeros(9, int)", "have shape (5,), but this federation requires"),
    "unequal lengths": ("return np.zeros((9, 1, 3, 3)), np.zeros(8, int)", "must have one row per sample"),
    "an unknown class": ("return np.zeros((9, 1, 3, 3)), np.full(9, 7)", "label 7"),
}


@pytest.mark.parametrize("kind", _LOADERS)
def test_loader_with_invalid_result_gives_reason(kind: str, operator: Path, package: Path) -> None:
    body, text = _LOADERS[kind]
    (package / "data.py").write_text(f"import numpy as np\ndef load(path, scale):\n    {body}\n")
    forget_package()
    run("keys", operator, "--allow-code", format_consent(NAME))
    run("renew", operator)
    message = error_message(lambda: join(operator, "ann", "--yes", "--allow-code", format_consent(NAME)))
    assert text in message
