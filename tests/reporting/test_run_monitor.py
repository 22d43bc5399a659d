"""The dashboard's data: runs while they are written, run details, comparisons, and clients."""

import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtailor as ft
from conftest import error_message
from fedtailor.analysis.run_summary import compare_runs
from fedtailor.analysis.verdict import verdict_sentences
from fedtailor.reporting.dashboard.client_view import client_details, client_list
from fedtailor.reporting.dashboard.history import RunHistory, required_tables
from fedtailor.reporting.dashboard.launcher import Launcher
from fedtailor.reporting.dashboard.routes import POST_ROUTES, Context
from fedtailor.reporting.dashboard.run_monitor import RunMonitor, is_locked
from fedtailor.reporting.dashboard.run_view import RunView
from fedtailor.reporting.dashboard.views import check_selection, comparison, run_details
from fedtailor.runs.files import folder_lock
from fedtailor.runs.records import nan_to_none
from fedtailor.runs.run import MOMENTS
from fedtailor.runs.tail import RecordTail
from support.dashboard_client import dashboard, kill_all, make_run, read_runs, request, wait_for_row


@pytest.fixture
def run(tmp_path: Path) -> RunView:
    """A finished run of three rounds, which the dashboard has read."""
    make_run(tmp_path / "run")
    found = read_runs(tmp_path)[1]["run"]
    assert found.info is not None and found.history is not None
    return found


@pytest.fixture
def lines(tmp_path: Path) -> list[bytes]:
    """The records of a run of four rounds in the folder "run"."""
    make_run(tmp_path / "run", rounds=4)
    return (tmp_path / "run" / "rounds.jsonl").read_bytes().splitlines(keepends=True)


def test_monitor_lists_runs_in_folder_and_subfolders_with_scores(tmp_path: Path) -> None:
    runs = {"one": make_run(tmp_path / "one"), "compare/two": make_run(tmp_path / "compare" / "two", seed=1)}
    (tmp_path / ".hidden").mkdir()
    shutil.copytree(tmp_path / "one", tmp_path / ".hidden" / "one")
    _, found = read_runs(tmp_path)
    assert found.keys() == runs.keys()
    for name, run in runs.items():
        row = found[name].row()
        assert (row["state"], row["round"], row["rounds"], row["seed"]) == ("finished", 3, 3, run.experiment["seed"])
        assert row["ranked_by"] == run.info["ranked_by"]  # the score on the run's card
        for moment in MOMENTS:
            summary = run.summarize(moment)
            assert summary is not None and row[moment] == pytest.approx(summary["weighted"], abs=1e-12)


@pytest.mark.parametrize("options", [{}, {"evaluate": "participants", "participation": 0.5}, {"evaluate_every": 2}])
def test_history_gives_same_client_scores_as_records(tmp_path: Path, options: Any) -> None:
    run = make_run(tmp_path / "run", rounds=5, **options)
    history = read_runs(tmp_path)[1]["run"].history
    assert history is not None
    for moment in MOMENTS:
        assert history.latest_scores(moment) == pytest.approx(run.scores(moment), abs=1e-6)  # stored as float32
        for client in range(run.num_clients):
            expected = {r["round"]: r["per_client"].get(f"accuracy_{moment}", {}).get(client) for r in run.records[:-1]}
            actual = history.client_history(client, moment)
            actual.pop(run.records[-1]["round"], None)
            assert actual == pytest.approx({n: v for n, v in expected.items() if v is not None}, abs=1e-6)
    assert history.bytes[-1] == run.total("bytes_up") + run.total("bytes_down")


def test_tail_reads_complete_new_lines_only(tmp_path: Path, lines: list[bytes]) -> None:
    record = tmp_path / "run" / "rounds.jsonl"
    record.write_bytes(lines[0] + lines[1][:40])
    tail = RecordTail(record, (4, 0), required_tables("accuracy"))
    restarted, found, more = tail.read(10)
    assert (restarted, [line["round"] for _, line in found], more) == (True, [1], False)
    with record.open("ab") as file:
        file.write(lines[1][40:] + lines[2])
    restarted, found, more = tail.read(1)
    assert (restarted, [line["round"] for _, line in found], more) == (False, [2], True)
    assert [line["round"] for _, line in tail.read(10)[1]] == [3]
    assert tail.read(10) == (False, [], False)


@pytest.mark.parametrize(("kind", "rounds"), [("shorter", [1]), ("other lines", [1, 2, 3, 4]), ("replaced", [1, 2])])
def test_tail_of_rewritten_file_starts_over(tmp_path: Path, lines: list[bytes], kind: str, rounds: list[int]) -> None:
    record = tmp_path / "run" / "rounds.jsonl"
    record.write_bytes(b"".join(lines[:2]))
    tail = RecordTail(record, (4, 0), required_tables("accuracy"))
    assert len(tail.read(10)[1]) == 2
    if kind == "replaced":
        (tmp_path / "new").write_bytes(b"".join(lines[:2]))
        (tmp_path / "new").replace(record)
    else:
        other = [json.dumps(json.loads(line) | {"seconds": 123.0}).encode() + b"\n" for line in lines]
        record.write_bytes(lines[0] if kind == "shorter" else b"".join(other))
    restarted, found, _ = tail.read(10)
    assert restarted and [line["round"] for _, line in found] == rounds


def test_invalid_run_is_unreadable_and_others_are_not_affected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are invalid, or the dashboard has a bug."""
    make_run(tmp_path / "good", rounds=1)
    for name in ("no round", "no json", "no info", "bug"):
        shutil.copytree(tmp_path / "good", tmp_path / name)
    (tmp_path / "no round" / "rounds.jsonl").write_text('{"round": 7}\n')
    (tmp_path / "no json" / "rounds.jsonl").write_text("[" * 100_000 + "\n")
    (tmp_path / "no info" / "run.json").write_text("{}")
    update_state = RunMonitor._update_state

    def fail_for_one(monitor: RunMonitor, run: RunView) -> None:
        if run.name == "bug":
            raise ZeroDivisionError("division by zero")
        update_state(monitor, run)

    monkeypatch.setattr(RunMonitor, "_update_state", fail_for_one)
    _, found = read_runs(tmp_path)
    assert found.pop("good").state == "finished" and {run.state for run in found.values()} == {"unreadable"}
    words = {"no round": "line 1 is not the record", "no json": "JSON", "no info": "format", "bug": "division by zero"}
    assert {name: word for name, word in words.items() if word not in found[name].message} == {}


@pytest.mark.parametrize("seconds", [None, 1e30], ids=["line", "number"])
def test_invalid_record_stays_unreadable_until_file_changes(
    tmp_path: Path, lines: list[bytes], seconds: float | None
) -> None:
    invalid = json.dumps(json.loads(lines[2]) | {"seconds": seconds}).encode() if seconds else b"no JSON"
    record = tmp_path / "run" / "rounds.jsonl"
    record.write_bytes(b"".join([*lines[:2], invalid + b"\n", lines[3]]))
    monitor, found = read_runs(tmp_path)
    message = found["run"].message
    version = monitor.changes("")["version"]
    for _ in range(3):
        assert not monitor.poll()
        assert (found["run"].state, found["run"].message) == ("unreadable", message) and "line 3" in message
    assert monitor.changes(version)["runs"] == []
    record.write_bytes(b"".join(lines))
    while monitor.poll():
        pass
    row = found["run"].row()
    assert (row["state"], row["round"]) == ("finished", 4)
    assert row["trained"] == pytest.approx(json.loads(lines[3])["accuracy_trained"])


def test_record_that_cannot_be_opened_is_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run", rounds=1)

    def fail(tail: RecordTail, limit: int = 0) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(RecordTail, "read", fail)
        monitor, found = read_runs(tmp_path)
        assert found["run"].state == "unreadable" and "too many files and connections open" in found["run"].message
    while monitor.poll():
        pass
    assert found["run"].state == "finished"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are not available")
@pytest.mark.parametrize("place", ["run/rounds.jsonl", "run/lock", ".live/x.pid", ".live/x.end", ".live/x.log"])
def test_named_pipe_instead_of_file_does_not_block(tmp_path: Path, place: str) -> None:
    make_run(tmp_path / "run", rounds=1), make_run(tmp_path / "x", rounds=1)
    for name in ("run", "x"):
        shutil.rmtree(tmp_path / name / "personal")
    (tmp_path / ".live").mkdir()
    for suffix in ("pid", "end", "log"):
        (tmp_path / ".live" / f"x.{suffix}").write_text("1")
    (tmp_path / place).unlink()
    os.mkfifo(tmp_path / place)
    found: dict[str, RunView] = {}
    thread = threading.Thread(target=lambda: found.update(read_runs(tmp_path)[1]), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and found.keys() == {"run", "x"}
    assert found["run"].state == ("unreadable" if "rounds" in place else "stopped")


def test_started_run_is_known_before_the_next_poll(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    context = Context(tmp_path, "", launcher, RunMonitor(tmp_path, launcher))  # without a thread that polls
    values = {"data.clients": "2", "network": "logistic", "rounds": "1", "engine": "sequential"}
    try:
        name = POST_ROUTES["/api/start"](context, {"values": values})["run"]
        details = run_details(context.monitor.get(name))
        assert details["row"]["name"] == name and "ended" not in details["summary"]
    finally:
        kill_all(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of one round."""
    folder = tmp_path_factory.mktemp("trained")
    make_run(folder / "good", rounds=1)
    return folder / "good"


@pytest.mark.parametrize("value", ["Infinity", "1" + "0" * 400, "null", "true", '"x"', "{}"], ids=str.__len__)
@pytest.mark.parametrize("place", ["seconds", "bytes_up", "accuracy_trained", "failed", "diverged", "epsilon"])
def test_invalid_values_in_record_do_not_affect_other_runs(
    tmp_path: Path, trained: Path, place: str, value: str
) -> None:
    for name in ("good", "bad"):
        shutil.copytree(trained, tmp_path / name)
    record = json.loads((tmp_path / "bad" / "rounds.jsonl").read_text())
    if place == "accuracy_trained":
        record["per_client"][place]["0"] = "VALUE"
    else:
        record[place] = ["VALUE"] if place == "diverged" else "VALUE"
    (tmp_path / "bad" / "rounds.jsonl").write_text(json.dumps(record).replace('"VALUE"', value) + "\n")
    monitor, found = read_runs(tmp_path)
    assert found["good"].row()["trained"] == pytest.approx(ft.load_run(trained).records[0]["accuracy_trained"])
    assert found["bad"].state in ("finished", "unreadable")
    json.dumps(nan_to_none([monitor.changes(""), *(run_details(run) for run in found.values())]), allow_nan=False)


def test_changes_returns_only_changed_runs(tmp_path: Path) -> None:
    make_run(tmp_path / "a", rounds=1)
    monitor, _ = read_runs(tmp_path)
    first = monitor.changes("")
    assert first["complete"] and [row["name"] for row in first["runs"]] == ["a"]
    assert monitor.changes(first["version"])["runs"] == []
    make_run(tmp_path / "b", rounds=1)
    monitor.poll()
    second = monitor.changes(first["version"])
    assert not second["complete"] and {row["name"] for row in second["runs"]} == {"b"}
    shutil.rmtree(tmp_path / "a")
    monitor.poll()
    assert monitor.changes(second["version"])["removed"] == ["a"]
    for unknown in ("another.3", "x", f"{monitor.instance_id}.", f"{monitor.instance_id}.-1", "9" * 50):
        assert monitor.changes(unknown)["complete"]


def test_locked_run_is_running(tmp_path: Path) -> None:
    make_run(tmp_path / "run", rounds=1)
    shutil.rmtree(tmp_path / "run" / "personal")
    assert not is_locked(tmp_path / "run")
    with folder_lock(tmp_path / "run"):
        assert is_locked(tmp_path / "run") and read_runs(tmp_path)[1]["run"].state == "running"
    run = read_runs(tmp_path)[1]["run"]
    assert run.state == "stopped" and not run.can_stop


@pytest.mark.skipif(sys.platform == "win32", reason="shared locks are not available on Windows")
def test_shared_lock_of_is_locked_does_not_prevent_locking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    with (tmp_path / "lock").open("wb") as shared:
        fcntl.flock(shared, fcntl.LOCK_SH)  # as `is_locked` takes it briefly
        monkeypatch.setattr("fedtailor.runs.files.time.sleep", lambda seconds: fcntl.flock(shared, fcntl.LOCK_UN))
        with folder_lock(tmp_path), (tmp_path / "lock").open("wb") as other:
            monkeypatch.setattr("fedtailor.runs.files.time.sleep", lambda seconds: None)
            assert "Another process is using" in error_message(lambda: folder_lock(tmp_path).__enter__())
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_run_details_list_failed_and_missed_clients_with_reasons(tmp_path: Path, lines: list[bytes]) -> None:
    records = [json.loads(line) for line in lines]
    records[1]["failed"] = {"2": "its update is not finite"}
    records[3]["failed"] = {"2": "its update is not finite again"}
    records[2]["missed"] = {"1": "late"}
    (tmp_path / "run" / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run = read_runs(tmp_path)[1]["run"]
    failed, missed = run_details(run)["problems"]
    assert failed == {"number": 2, "name": "2", "kind": "failed", "count": 2, "last_round": 4,
                      "reason": "its update is not finite again"}  # fmt: skip
    assert (missed["kind"], missed["number"], missed["reason"]) == ("missed", 1, "late")
    assert "failed 2 times" in client_details(run, 2)["problems"][0]


@pytest.mark.parametrize(
    ("scores", "ending"),
    [
        ([0.8, 0.6, 0.8], "; this is its best score so far."),
        ([0.6, 0.7, 0.8], "; this is its best score so far."),
        ([0.9, 0.6, 0.8], "; its best score was 90.0 % in round 1."),
        ([0.8001, 0.6, 0.8], "(received)."),  # equal after rounding
    ],
    ids=["equal", "best", "worse", "equal after rounding"],
)
def test_progress_summary_compares_score_with_best(run: RunView, scores: list[float], ending: str) -> None:
    assert run.history is not None
    run.history.scores[run.ranked_by][:] = scores
    assert run_details(run)["figures"][0]["summary"].endswith(ending)


@pytest.mark.parametrize(("name", "start"), [("7", "Client 7"), ("hospital-a", "hospital-a"), ("client-b", "client-b")])
def test_client_summaries_start_with_client_name(run: RunView, name: str, start: str) -> None:
    assert run.info is not None
    run.info["clients"][2]["name"] = name
    for figure in client_details(run, 2)["figures"]:
        assert figure["summary"].startswith(f"{start} ")


def test_comparison_uses_last_common_round(tmp_path: Path) -> None:
    local, fedavg = make_run(tmp_path / "local", 4, ft.methods.Local()), make_run(tmp_path / "fedavg", 4)
    record = tmp_path / "fedavg" / "rounds.jsonl"
    record.write_bytes(b"".join(record.read_bytes().splitlines(keepends=True)[:2]))
    shutil.rmtree(tmp_path / "fedavg" / "personal")
    _, found = read_runs(tmp_path)
    result = comparison(list(found.values()))
    assert "after round 2" in result["summary"][1]
    figures = {figure["key"]: figure for figure in result["figures"]}
    rows = {row[0]: row[1] for row in figures["ranking"]["table"]["rows"]}
    for run in (local, fedavg):
        assert rows[run.method_title] == f"{100 * run.records[1]['accuracy_trained']:.1f}"
    for trace in figures["curves"]["data"]:
        assert trace["x"] == [1, 2]


def test_runs_that_stopped_early_with_held_out_clients_are_complete(tmp_path: Path) -> None:
    """The dashboard shows the clients that train, counts the rounds of the run, and has the verdict of `compare`."""
    options: dict[str, Any] = {"rounds": 30, "validation": 0.3, "patience": 2, "held_out_clients": [1]}
    methods = (ft.methods.Local(), ft.methods.FedPer(lr=1.0))
    runs = [make_run(tmp_path / type(method).__name__, method=method, **options) for method in methods]
    assert all(run.stopped_early for run in runs) and len({len(run.records) for run in runs}) == 2
    found = read_runs(tmp_path)[1]
    for run in runs:
        view = found[run.folder.name] if run.folder else None
        assert view is not None
        row = view.row()
        assert row["state"] == "finished" and row["round"] == row["rounds"] == len(run.records) < 30
        assert row["clients"] == client_list(view, "name", False, "", 0)["total"] == 3
        assert "stopped early, before round 30" in run_details(view)["summary"]
    sentences = verdict_sentences(compare_runs(runs))
    assert comparison(list(found.values()))["summary"][0] == sentences[0]


def test_comparison_of_one_method_has_unique_labels(tmp_path: Path) -> None:
    rates = {"lr": 0.0123456789, "momentum": 0.0123456789, "weight_decay": 0.0123456789, "mu": 0.0123456789}
    for number, factor in enumerate((1.0, 1.00001, 1.00002)):
        method = ft.methods.FedProx(**{name: factor * value for name, value in rates.items()})  # type: ignore[arg-type]
        make_run(tmp_path / str(number), 1, method)
    result = comparison(list(read_runs(tmp_path)[1].values()))
    [ranking] = [figure for figure in result["figures"] if figure["key"] == "ranking"]
    labels = [row[0] for row in ranking["table"]["rows"]]
    assert len(set(labels)) == 3 and all("FedProx" in label for label in labels)


def test_comparison_of_different_experiments_raises_error(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 2), make_run(tmp_path / "b", 3, ft.methods.Local())
    _, found = read_runs(tmp_path)
    message = error_message(lambda: comparison(list(found.values())))
    assert "rounds = 2" in message and "rounds = 3" in message
    assert "two runs" in error_message(lambda: check_selection(["a"]))
    with dashboard(tmp_path) as server:
        wait_for_row(server, "b", lambda row: not row["reading"])
        status, _, result = request(server, "GET", "/api/comparison?run=a&run=b")
        assert status == 200 and result == {"error": message}


def test_client_details_show_data_scores_and_mixing_weights(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3, ft.methods.FedAPA())
    found = client_details(read_runs(tmp_path)[1]["run"], 2)
    assert (found["train"], found["test"]) == (7, 5)
    figures = {figure["key"]: figure for figure in found["figures"]}
    trained = [record["per_client"]["accuracy_trained"][2] for record in run.records]
    assert figures["history"]["data"][0]["y"] == pytest.approx([100 * score for score in trained], abs=1e-3)
    assert figures["classes"]["data"][0]["y"] == run.info["clients"][2]["classes"]
    weights = np.asarray(run.metric("weights")[3])[2]
    others = {client: weight / weights.sum() for client, weight in enumerate(weights) if client != 2 and weight}
    assert {one["number"]: one["weight"] for one in found["neighbors"]["rows"]} == pytest.approx(others)


def test_neighbors_without_mixing_weights_have_similar_data(run: RunView) -> None:
    assert run.info is not None
    counts = np.array([client["classes"] for client in run.info["clients"]], dtype=float)
    parts = counts / counts.sum(1, keepdims=True)
    overlap = {client: np.minimum(parts[0], parts[client]).sum() for client in (1, 2, 3)}
    neighbors = client_details(run, 0)["neighbors"]
    assert "does not weight clients" in neighbors["summary"]
    assert {one["number"]: one["similarity"] for one in neighbors["rows"]} == pytest.approx(
        {c: v for c, v in overlap.items() if v}
    )


def test_client_list_is_paged_sorted_and_filtered(run: RunView) -> None:
    assert run.info is not None
    run.info["clients"] = [run.info["clients"][0] | {"name": f"client {n}", "train": n % 7} for n in range(130)]
    run.__dict__.pop("names", None)
    run.history = RunHistory([5] * 130, "accuracy")
    first = client_list(run, "train", True, "", 0)
    assert (first["total"], first["pages"], len(first["rows"])) == (130, 3, 50)
    all_rows = [row["train"] for page in range(3) for row in client_list(run, "train", True, "", page)["rows"]]
    assert all_rows == sorted((n % 7 for n in range(130)), reverse=True)
    found = client_list(run, "name", False, "CLIENT 12", 9)["rows"]
    assert [row["number"] for row in found] == [12, *range(120, 130)]
    assert "sorted by" in error_message(lambda: client_list(run, "size", False, "", 0))
