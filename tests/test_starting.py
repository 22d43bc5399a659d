"""Experiments started from the live page: the form, and processes that outlive the page."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from conftest import refusal
from fedtailor.channel import Channel
from fedtailor.data.datasets import Data
from fedtailor.experiment import Experiment
from fedtailor.methods import METHODS
from fedtailor.networks import NETWORKS
from fedtailor.reading import peek
from fedtailor.record import open_run
from fedtailor.see import form
from fedtailor.see.starting import NOTES, Starter
from fedtailor.unreliable import Unreliable
from live_page import end_all, made, page, rows, tell, until

# ---- the form


def test_the_form_has_every_field_there_is_and_no_other() -> None:
    found = form.form()
    parts = {part["key"]: [field["name"] for field in part["fields"]] for part in found["parts"]}
    tables = {"data": Data, "unreliable": Unreliable, "channel": Channel}
    assert set(parts.pop("")) | {"method", "network", *tables} == {f.name for f in fields(Experiment)}
    assert parts == {key: [f"{key}.{f.name}" for f in fields(kind)] for key, kind in tables.items()}
    for key, kinds in (("methods", METHODS), ("networks", NETWORKS)):
        own = {name: [field["name"] for field in one["fields"]] for name, one in found[key].items()}
        assert own == {name: [f.name for f in fields(kind)] for name, kind in kinds.items()}


def test_the_defaults_that_the_form_shows_are_those_of_the_library() -> None:
    shown = [field for part in form.form()["parts"] for field in part["fields"]]
    assert form.read({f["name"]: f["default"] for f in shown})[1] == Experiment()
    for name, one in form.form()["methods"].items():
        values = {f"method.{field['name']}": field["default"] for field in one["fields"]}
        assert form.read({"method": name, **values})[1].method == METHODS[name]()


def test_inputs_are_of_the_kinds_of_their_fields() -> None:
    kinds = {field["name"]: field for part in form.form()["parts"] for field in part["fields"]}
    assert kinds["rounds"]["kind"] == "whole" and kinds["validation"]["kind"] == "number"
    assert kinds["dtype"]["choices"] == ["float32", "float64"] and kinds["channel.trusted"]["kind"] == "choice"
    assert "digits" in kinds["data.name"]["choices"] and kinds["evaluate"]["choices"] == ["all", "participants"]
    inner = next(field for field in form.form()["methods"]["lag"]["fields"] if field["name"] == "inner")
    assert inner["kind"] == "method" and inner["choices"] == [*METHODS]


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
def test_what_the_library_refuses_is_said_before_anything_is_started(
    tmp_path: Path, values: dict[str, str], word: str
) -> None:
    with page(tmp_path) as live:
        status, _, told = tell(live, "start", values=values)
    assert status == 422 and word in told["refused"] and told["refused"][-1] in ".?"
    assert not list(tmp_path.iterdir())


def test_a_schedule_must_fit_the_clients_where_their_number_is_known() -> None:
    asked = {"schedule": "[[0,1],[1,9]]"}
    assert "client 9" in refusal(lambda: form.read(asked | {"data.clients": "3"}))
    assert form.read(asked | {"data.clients": "10"})[1].length == 2
    assert form.read(asked | {"data.name": "folder", "data.folder": "mine"})[1].length == 2  # nobody counted them yet
    assert "at least one client" in refusal(lambda: form.check({"data.clients": "0"}))


def test_the_form_and_the_command_are_one(tmp_path: Path) -> None:
    values = {"method": "lag", "method.inner": "ditto", "method.inner.lam": "0.5", "data.clients": "5", "rounds": " "}
    with page(tmp_path) as live:
        command = tell(live, "check", values=values)[2]["command"]
    assert "--method.inner.lam=0.5" in command and "rounds" not in command
    assert form.read(values)[1].method == METHODS["lag"](inner=METHODS["ditto"](lam=0.5))  # type: ignore[call-arg]


# ---- experiments as processes


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A folder for runs; what was started there and still goes on ends with the test."""
    yield tmp_path
    end_all(tmp_path)


SMALL = {"method": "fedavg", "data.clients": "3", "network": "logistic", "engine": "sequential"}


@pytest.mark.slow
def test_a_run_started_from_the_form_finishes_and_appears(root: Path) -> None:
    with page(root) as live:
        status, _, told = tell(live, "start", values=SMALL | {"rounds": "2"})
        assert status == 200
        row = until(live, told["run"], lambda row: row["state"] == "finished" and not row["reading"])
    run = open_run(root / told["run"])
    assert row["round"] == 2 and row["trained"] == pytest.approx(run.records[-1]["accuracy_trained"])
    assert run.experiment["method"]["name"] == "fedavg" and run.num_clients == 3


@pytest.mark.slow
def test_a_run_is_stopped_with_a_checkpoint_by_a_page_that_came_later_and_goes_on(root: Path) -> None:
    rounds = 2000
    with page(root) as live:
        name = tell(live, "start", values=SMALL | {"rounds": str(rounds), "evaluate_every": "500"})[2]["run"]
        until(live, name, lambda row: row["round"] > 5)
    with page(root) as live:  # the run outlived the page that started it
        row = until(live, name, lambda row: row["state"] == "running" and row["can_stop"])
        assert row["rounds"] == rounds
        assert "being worked on" in tell(live, "resume", run=name)[2]["refused"]
        assert tell(live, "stop", run=name)[0] == 200
        row = until(live, name, lambda row: row["state"] == "stopped")
        assert "resume" in row["words"] and 5 < row["round"] < rounds
        assert peek(root / name).records[-1]["round"] == row["round"]
        assert tell(live, "forget", run=name)[0] == 422  # no run is ever deleted here
        assert tell(live, "resume", run=name)[0] == 200
        until(live, name, lambda again: again["round"] > row["round"])
        tell(live, "stop", run=name)
        until(live, name, lambda row: row["state"] == "stopped")


@pytest.mark.slow
def test_last_words_are_shown_and_what_never_began_can_be_taken_from_the_list(tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    values = {"data.name": "folder", "data.folder": str(tmp_path / "clients")}
    with page(tmp_path / "runs") as live:
        name = tell(live, "start", values=values)[2]["run"]
        deadline = time.monotonic() + 120
        while rows(live).get(name, {}).get("state") != "failed" and time.monotonic() < deadline:
            threading.Event().wait(0.05)
        row = rows(live)[name]
        assert row["state"] == "failed" and "clients" in row["words"] and "Traceback" not in row["words"]
        assert not (tmp_path / "runs" / name).exists()
        assert tell(live, "forget", run=name)[0] == 200
        while name in rows(live) and time.monotonic() < deadline:
            threading.Event().wait(0.05)
        assert not list((tmp_path / "runs" / NOTES).iterdir())


@pytest.mark.slow
def test_a_killed_run_is_said_to_have_been_killed(root: Path) -> None:
    with page(root) as live:
        name = tell(live, "start", values=SMALL | {"rounds": "5000", "evaluate_every": "1000"})[2]["run"]
        until(live, name, lambda row: row["round"] > 2)
        pid = live.known.starter.process(name)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while rows(live)[name]["state"] != "failed" and time.monotonic() < deadline:
            threading.Event().wait(0.05)
        assert "without a word" in rows(live)[name]["words"]


@pytest.mark.slow
def test_the_command_serves_the_page_and_ctrl_c_ends_it_but_not_its_experiments(
    root: Path, hears_interrupts: None
) -> None:
    words = [sys.executable, "-m", "fedtailor.cli", "live", str(root), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        assert server.stdout is not None
        url = urlsplit(server.stdout.readline().split()[-1])
        connection = HTTPConnection(str(url.hostname), url.port or 0, timeout=60)
        connection.request("GET", f"/?{url.query}")
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read()
        own = {"Cookie": answer.headers["Set-Cookie"].partition(";")[0], "Content-Type": "application/json"}
        body = json.dumps({"values": SMALL | {"rounds": "2000", "evaluate_every": "500"}})
        connection.request("POST", "/api/start", body, own | {"Origin": f"http://{url.netloc}"})
        name = json.loads(connection.getresponse().read())["run"]
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    with page(root) as live:
        until(live, name, lambda row: row["state"] == "running" and row["round"] > 2)
        tell(live, "stop", run=name)
        until(live, name, lambda row: row["state"] == "stopped")


def test_runs_of_others_are_not_stopped_and_finished_ones_not_gone_on_with(tmp_path: Path) -> None:
    made(tmp_path / "run", 1)
    with page(tmp_path) as live:
        until(live, "run", lambda row: row["state"] == "finished")
        assert "Ctrl-C" in tell(live, "stop", run="run")[2]["refused"]
        assert "finished" in tell(live, "resume", run="run")[2]["refused"]
        (tmp_path / NOTES).mkdir(exist_ok=True)
        (tmp_path / NOTES / "run.pid").write_text(str(os.getpid()))  # a number that another process has now
        assert live.known.starter.process("run") is None


@pytest.mark.parametrize(
    "name", ["../outside", "..", "a/../../outside", "/outside", "a/b/c", ".", "a/", "", ".live", "a/.hidden"]
)
def test_notes_in_a_folder_from_elsewhere_lead_to_no_other_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "runs" / NOTES).mkdir(parents=True)
    for kept in (name, "own", "compare/own"):  # all of them failed, so they would be listed
        for ending, words in ((".toml", "rounds = 1"), (".pid", "1"), (".end", "1")):
            (tmp_path / "runs" / NOTES / f"{quote(kept, safe='')}{ending}").write_text(words)
    assert sorted(Starter(tmp_path / "runs").known()) == ["compare/own", "own"]


def test_a_process_is_known_by_all_its_words(tmp_path: Path) -> None:
    (tmp_path / NOTES).mkdir()
    starter = Starter(tmp_path)
    words = starter.words("resume", "run-2")
    waits = [sys.executable, "-c", "input()", *words[3:]]
    with subprocess.Popen(waits, stdin=subprocess.PIPE) as process:
        for name in ("run-2", "run", "run-22", "2", ""):
            (tmp_path / NOTES / f"{name}.pid").write_text(str(process.pid))
        until_there = time.monotonic() + 60
        while starter.process("run-2") is None and time.monotonic() < until_there:  # it is not yet what it will be
            threading.Event().wait(0.01)
        assert starter.process("run-2") == process.pid
        assert [starter.process(name) for name in ("run", "run-22", "2", "")] == [None] * 4
        process.communicate(b"\n")
    assert starter.process("run-2") is None


def ended(root: Path) -> tuple[Starter, str]:
    """An experiment that is refused as soon as its data are looked for, or that never gets so far, at its end."""
    (root / "clients").mkdir(parents=True)
    starter = Starter(root / "runs")
    settings, experiment = form.read({"data.name": "folder", "data.folder": str(root / "clients")})
    name = starter.start(experiment, settings)
    deadline = time.monotonic() + 120
    while starter.process(name) is not None and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    return starter, name


def test_files_where_the_page_was_started_are_no_part_of_what_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "torch.py").write_text("raise SystemExit('a torch of somebody else')")
    monkeypatch.chdir(tmp_path / "here")
    starter, name = ended(tmp_path)
    words = starter.last_words(name)
    assert "somebody else" not in words and "clients" in words
    assert (tmp_path / "runs" / NOTES / f"{name}.end").read_text() == "2"  # refused, in the library's own words


@pytest.mark.parametrize("torch", ["raise ImportError('a part of it is missing')", "import os; os._exit(9)"],
                         ids=["with words", "without"])  # fmt: skip
def test_a_process_that_ended_before_it_began_is_said_to_have_been_silent_only_if_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str
) -> None:
    (tmp_path / "torch.py").write_text(torch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    starter, name = ended(tmp_path)
    words = starter.last_words(name)
    assert starter.has_failed(name)
    if "ImportError" in torch:
        assert "a part of it is missing\nIt ended before it could say how." in words and "without a word" not in words
    else:
        assert words == "The process ended without a word: it was killed, perhaps for want of memory."


def test_two_starts_at_once_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starter = Starter(tmp_path)
    monkeypatch.setattr(starter, "_spawn", lambda what, name: None)
    settings, experiment = form.read(SMALL)
    assert [starter.start(experiment, settings) for _ in range(3)] == [
        "fedavg-seed0-digits", "fedavg-seed0-digits-2", "fedavg-seed0-digits-3",
    ]  # fmt: skip
