"""Experiments started from the dashboard: the form, and processes that continue when the dashboard ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from conftest import error_message
from fedtailor.core.augmentation import Augmentation
from fedtailor.core.robust import Robust
from fedtailor.data.datasets import DATASETS
from fedtailor.experiments.experiment import Experiment
from fedtailor.methods import METHODS
from fedtailor.networks import NETWORKS
from fedtailor.reporting.dashboard.form import check_form, form_schema, parse_form
from fedtailor.reporting.dashboard.launcher import LAUNCHER_FOLDER, Launcher
from fedtailor.reporting.dashboard.server import DashboardServer
from fedtailor.runs.reader import load_run
from fedtailor.runs.tail import read_partial_run
from fedtailor.training.channel.channel import Channel
from fedtailor.training.unreliable import Unreliable
from support.dashboard_client import dashboard, kill_all, make_run, post, read_runs, wait_for_row, wait_until_true

# ---- the form


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DashboardServer]:
    """The dashboard of an empty folder."""
    with dashboard(tmp_path_factory.mktemp("runs")) as found:
        yield found


def test_form_schema_has_all_fields_with_types_of_annotations() -> None:
    found = form_schema()
    sections = {one["key"]: [field["name"] for field in one["fields"]] for one in found["sections"]}
    tables = {"augmentation": Augmentation, "unreliable": Unreliable, "channel": Channel, "robust": Robust}
    assert set(sections.pop("")) | {"method", "data", "network", *tables} == {f.name for f in fields(Experiment)}
    assert sections == {key: [f"{key}.{f.name}" for f in fields(cls)] for key, cls in tables.items()}
    for key, classes in (("methods", METHODS), ("data", DATASETS), ("networks", NETWORKS)):
        names = {name: [field["name"] for field in one["fields"]] for name, one in found[key].items()}
        hidden = {name: set(getattr(cls, "fixed_settings", {})) for name, cls in classes.items()}
        shown = {n: [f.name for f in fields(cls) if f.name not in hidden[n]] for n, cls in classes.items()}
        assert names == shown
    inputs = {field["name"]: field for section in found["sections"] for field in section["fields"]}
    assert inputs["rounds"]["type"] == "integer" and inputs["validation"]["type"] == "number"
    assert inputs["dtype"]["choices"] == ["float32", "float64"] and inputs["channel.trusted"]["type"] == "choice"
    assert inputs["evaluate"]["choices"] == ["all", "participants"]
    inner = next(field for field in found["methods"]["lag"]["fields"] if field["name"] == "inner")
    assert inner["type"] == "method" and inner["choices"] == [*METHODS]


def test_form_schema_defaults_match_dataclasses() -> None:
    shown = [field for section in form_schema()["sections"] for field in section["fields"]]
    assert parse_form({f["name"]: f["default"] for f in shown})[1] == Experiment()
    for name, one in form_schema()["methods"].items():
        values = {f"method.{field['name']}": field["default"] for field in one["fields"]}
        assert parse_form({"method": name, **values})[1].method == METHODS[name]()


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"rounds": "0"}, "rounds"),
        ({"rounds": "many"}, "rounds"),
        ({"method": "fedprox", "method.mu": "a"}, "method.mu"),
        ({"method": "fedavg", "method.mu": "1"}, "mu"),
        ({"method": "nothing"}, "method"),
        ({"channel.noise": "1"}, "channel.clip"),
        ({"participation": "2"}, "participation"),
        ({"data.clients": "100000"}, "clients"),
        ({"out": "/tmp"}, "out"),
        ({"--out": "x"}, "--out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_start_with_invalid_values_returns_error_and_starts_nothing(
    server: DashboardServer, values: dict[str, str], word: str
) -> None:
    status, _, found = post(server, "start", values=values)
    assert status == 422 and word in found["error"] and found["error"][-1] in ".?"
    assert not list(server.context.root.iterdir())


def test_parse_form_checks_schedule_if_number_of_clients_is_known() -> None:
    values = {"schedule": "[[0,1],[1,9]]"}
    assert "client 9" in error_message(lambda: parse_form(values | {"data.clients": "3"}))
    assert parse_form(values | {"data.clients": "10"})[1].num_rounds == 2
    folder = {"data.name": "folder", "data.folder": "mine"}  # the number of clients is unknown
    assert parse_form(values | folder)[1].num_rounds == 2
    assert "at least one client" in error_message(lambda: check_form({"data.clients": "0"}))


def test_form_and_equivalent_command_agree(server: DashboardServer) -> None:
    values = {"method": "lag", "method.inner": "ditto", "method.inner.lam": "0.5", "data.clients": "5", "rounds": " "}
    command = post(server, "check", values=values)[2]["command"]
    assert "--method.inner.lam=0.5" in command and "rounds" not in command
    assert parse_form(values)[1].method == METHODS["lag"](inner=METHODS["ditto"](lam=0.5))  # type: ignore[call-arg]


# ---- processes


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A folder for runs; experiments that are still running are killed after the test."""
    yield tmp_path
    kill_all(tmp_path)


SMALL = {"method": "fedavg", "data.clients": "3", "network": "logistic", "engine": "sequential"}


@pytest.mark.slow
def test_started_run_finishes_and_is_listed(root: Path) -> None:
    with dashboard(root) as server:
        status, _, found = post(server, "start", values=SMALL | {"rounds": "2"})
        assert status == 200
        row = wait_for_row(server, found["run"], lambda row: row["state"] == "finished" and not row["reading"])
    run = load_run(root / found["run"])
    assert row["round"] == 2 and row["trained"] == pytest.approx(run.records[-1]["accuracy_trained"])
    assert run.experiment["method"]["name"] == "fedavg" and run.num_clients == 3


@pytest.mark.slow
def test_later_dashboard_stops_and_resumes_run(root: Path) -> None:
    rounds = 2000
    with dashboard(root) as server:
        name = post(server, "start", values=SMALL | {"rounds": str(rounds), "evaluate_every": "500"})[2]["run"]
        wait_for_row(server, name, lambda row: row["round"] > 5)
    with dashboard(root) as server:  # the run continues after the first dashboard ended
        row = wait_for_row(server, name, lambda row: row["state"] == "running" and row["can_stop"])
        assert row["rounds"] == rounds
        assert "already running" in post(server, "resume", run=name)[2]["error"]
        assert post(server, "stop", run=name)[0] == 200
        row = wait_for_row(server, name, lambda row: row["state"] == "stopped")
        assert "resume" in row["message"] and 5 < row["round"] < rounds
        assert read_partial_run(root / name).records[-1]["round"] == row["round"]
        assert post(server, "remove", run=name)[0] == 422  # runs are never deleted
        assert post(server, "resume", run=name)[0] == 200
        wait_for_row(server, name, lambda again: again["round"] > row["round"])
        post(server, "stop", run=name)
        wait_for_row(server, name, lambda row: row["state"] == "stopped")


@pytest.mark.slow
def test_live_command_ctrl_c_stops_server_but_not_experiments(root: Path, default_sigint: None) -> None:
    command = [sys.executable, "-m", "fedtailor.cli.main", "live", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        url = urlsplit(process.stdout.readline().split()[-1])
        connection = HTTPConnection(str(url.hostname), url.port or 0, timeout=60)
        connection.request("GET", f"/?{url.query}")
        response = connection.getresponse()
        assert response.status == 200 and response.read()
        headers = {"Cookie": response.headers["Set-Cookie"].partition(";")[0], "Content-Type": "application/json"}
        body = json.dumps({"values": SMALL | {"rounds": "2000", "evaluate_every": "500"}})
        connection.request("POST", "/api/start", body, headers | {"Origin": f"http://{url.netloc}"})
        name = json.loads(connection.getresponse().read())["run"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    with dashboard(root) as server:
        wait_for_row(server, name, lambda row: row["state"] == "running" and row["round"] > 2)
        post(server, "stop", run=name)
        wait_for_row(server, name, lambda row: row["state"] == "stopped")


def test_stop_and_resume_reject_foreign_and_finished_runs(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 1)
    with dashboard(tmp_path) as server:
        wait_for_row(server, "run", lambda row: row["state"] == "finished")
        assert "Ctrl-C" in post(server, "stop", run="run")[2]["error"]
        assert "finished" in post(server, "resume", run="run")[2]["error"]
        (tmp_path / LAUNCHER_FOLDER).mkdir(exist_ok=True)
        (tmp_path / LAUNCHER_FOLDER / "run.pid").write_text(str(os.getpid()))  # the ID of another process
        assert server.context.launcher.pid("run") is None


@pytest.mark.parametrize(
    "name", ["../outside", "..", "a/../../outside", "/outside", "a/b/c", ".", "a/", "", ".live", "a/.hidden"]
)
def test_names_ignores_untrusted_files_that_point_outside(tmp_path: Path, name: str) -> None:
    (tmp_path / "runs" / LAUNCHER_FOLDER).mkdir(parents=True)
    for listed in (name, "own", "compare/own"):  # failed experiments are listed
        for suffix, text in ((".toml", "rounds = 1"), (".pid", "1"), (".end", "1")):
            (tmp_path / "runs" / LAUNCHER_FOLDER / f"{quote(listed, safe='')}{suffix}").write_text(text)
    assert sorted(Launcher(tmp_path / "runs").names()) == ["compare/own", "own"]


def test_pid_requires_same_command_line(tmp_path: Path) -> None:
    (tmp_path / LAUNCHER_FOLDER).mkdir()
    launcher = Launcher(tmp_path)
    arguments = launcher.command("resume", "run-2")[3:]
    with subprocess.Popen([sys.executable, "-c", "input()", *arguments], stdin=subprocess.PIPE) as process:
        for name in ("run-2", "run", "run-22", "2", ""):
            (tmp_path / LAUNCHER_FOLDER / f"{name}.pid").write_text(str(process.pid))
        wait_until_true(lambda: launcher.pid("run-2") == process.pid)  # when exec has replaced the command line
        assert [launcher.pid(name) for name in ("run", "run-22", "2", "")] == [None] * 4
        process.communicate(b"\n")
    assert launcher.pid("run-2") is None


def failed_experiment(root: Path) -> tuple[Launcher, str]:
    """Start an experiment that fails when it loads its data, or before, and wait until it has ended."""
    (root / "clients").mkdir(parents=True)
    launcher = Launcher(root / "runs")
    settings, experiment = parse_form({"data.name": "folder", "data.folder": str(root / "clients")})
    name = launcher.start(experiment, settings)
    wait_until_true(lambda: launcher.pid(name) is None)
    return launcher, name


def test_failed_experiment_shows_log_and_can_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process does not import modules from the working directory."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "torch.py").write_text("raise SystemExit('the wrong torch')")
    monkeypatch.chdir(tmp_path / "here")
    launcher, name = failed_experiment(tmp_path)
    assert (tmp_path / "runs" / LAUNCHER_FOLDER / f"{name}.end").read_text() == "2"  # the exit code of a FedTailorError
    assert not (tmp_path / "runs" / name).exists()
    run = read_runs(tmp_path / "runs")[1][name]
    assert run.state == "failed" and run.message == launcher.log_tail(name)
    assert "wrong torch" not in run.message and "clients" in run.message and "Traceback" not in run.message
    launcher.remove(name)
    assert launcher.names() == [] and [path.name for path in (tmp_path / "runs").iterdir()] == [LAUNCHER_FOLDER]
    assert not list((tmp_path / "runs" / LAUNCHER_FOLDER).iterdir())


@pytest.mark.parametrize(
    ("torch", "log"),
    [
        ("raise ImportError('a part is missing')", "a part is missing\nThe process ended without an exit code."),
        ("import os; os._exit(9)", "The process was killed without any output; it may have run out of memory."),
    ],
    ids=["with output", "without output"],
)
def test_log_tail_of_process_without_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, log: str
) -> None:
    (tmp_path / "torch.py").write_text(torch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launcher, name = failed_experiment(tmp_path)
    assert launcher.has_failed(name) and launcher.log_tail(name).endswith(log)


def test_repeated_starts_use_different_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(tmp_path)
    monkeypatch.setattr(launcher, "_spawn", lambda action, name: None)
    settings, experiment = parse_form(SMALL)
    assert [launcher.start(experiment, settings) for _ in range(3)] == [
        "fedavg-seed0-digits", "fedavg-seed0-digits-2", "fedavg-seed0-digits-3",
    ]  # fmt: skip
