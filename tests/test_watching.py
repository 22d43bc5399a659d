"""What the live page says of runs: as far as they are written, one, several, and their clients."""

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
from conftest import refusal
from fedtailor.files import locked
from fedtailor.lines import without_nan
from fedtailor.reading import Tail
from fedtailor.run import FORMAT, MOMENTS
from fedtailor.see import looking, one_client
from fedtailor.see.trail import Trail, wanted
from fedtailor.see.watched import Watched
from fedtailor.see.watching import Watcher, is_held
from live_page import ask, made, page, until, watched


def test_runs_one_and_two_levels_deep_are_listed_with_the_scores_of_their_records(tmp_path: Path) -> None:
    runs = {"one": made(tmp_path / "one"), "compare/two": made(tmp_path / "compare" / "two", seed=1)}
    (tmp_path / ".hidden").mkdir()
    shutil.copytree(tmp_path / "one", tmp_path / ".hidden" / "one")
    _, found = watched(tmp_path)
    assert found.keys() == runs.keys()
    for name, run in runs.items():
        row = found[name].row()
        assert (row["state"], row["round"], row["rounds"], row["seed"]) == ("finished", 3, 3, run.experiment["seed"])
        for moment in MOMENTS:
            numbers = run.numbers(moment)
            assert numbers is not None and row[moment] == pytest.approx(numbers["weighted"], abs=1e-12)


@pytest.mark.parametrize("how", [{}, {"evaluate": "participants", "participation": 0.5}, {"evaluate_every": 2}])
def test_what_is_kept_of_a_record_gives_everyones_score_as_the_whole_record_does(tmp_path: Path, how: Any) -> None:
    run = made(tmp_path / "run", rounds=5, **how)
    trail = watched(tmp_path)[1]["run"].trail
    assert trail is not None
    for moment in MOMENTS:
        assert trail.latest(moment) == pytest.approx(run.scores(moment), abs=1e-6)  # kept in 32 bits
        for client in range(run.num_clients):
            told = {r["round"]: r["per_client"].get(f"accuracy_{moment}", {}).get(client) for r in run.records[:-1]}
            known = dict(zip(*trail.history(client, moment), strict=True))
            known.pop(run.records[-1]["round"], None)
            assert known == pytest.approx({n: v for n, v in told.items() if v is not None}, abs=1e-6)
    assert trail.bytes[-1] == run.total("bytes_up") + run.total("bytes_down")


def test_a_line_counts_when_it_is_whole_and_only_what_was_appended_is_read(tmp_path: Path) -> None:
    made(tmp_path / "run", rounds=4)
    record = tmp_path / "run" / "rounds.jsonl"
    lines = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(lines[0] + lines[1][:40])
    tail = Tail(record, 4, wanted("accuracy"))
    again, found, more = tail.read(10)
    assert (again, [line["round"] for _, line in found], more) == (True, [1], False)
    with record.open("ab") as file:
        file.write(lines[1][40:] + lines[2])
    again, found, more = tail.read(1)
    assert (again, [line["round"] for _, line in found], more) == (False, [2], True)
    assert [line["round"] for _, line in tail.read(10)[1]] == [3]
    assert tail.read(10) == (False, [], False)


@pytest.mark.parametrize("kind", ["shorter", "other lines", "replaced"])
def test_a_record_that_is_written_anew_starts_over(tmp_path: Path, kind: str) -> None:
    made(tmp_path / "run", rounds=4)
    record = tmp_path / "run" / "rounds.jsonl"
    lines = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join(lines[:2]))
    tail = Tail(record, 4, wanted("accuracy"))
    assert len(tail.read(10)[1]) == 2
    other = [json.dumps(json.loads(line) | {"seconds": 123.0}).encode() + b"\n" for line in lines]
    if kind == "replaced":
        (tmp_path / "new").write_bytes(b"".join(lines[:2]))
        (tmp_path / "new").replace(record)
    else:
        record.write_bytes(lines[0] if kind == "shorter" else b"".join(other))
    again, found, _ = tail.read(10)
    assert again and [line["round"] for _, line in found] == {"shorter": [1], "other lines": [1, 2, 3, 4]}.get(
        kind, [1, 2]
    )


def test_a_broken_run_is_named_with_what_is_wrong_and_the_others_go_on(tmp_path: Path) -> None:
    made(tmp_path / "good", rounds=1)
    for name in ("no round", "no json", "no info"):
        shutil.copytree(tmp_path / "good", tmp_path / name)
    (tmp_path / "no round" / "rounds.jsonl").write_text('{"round": 7}\n')
    (tmp_path / "no json" / "rounds.jsonl").write_text("[" * 100_000 + "\n")
    (tmp_path / "no info" / "run.json").write_text("{}")
    _, found = watched(tmp_path)
    assert {name: run.state for name, run in found.items()} == {
        "good": "finished", "no round": "unreadable", "no json": "unreadable", "no info": "unreadable",
    }  # fmt: skip
    assert "line 1 of the record" in found["no round"].words and "format" in found["no info"].words


@pytest.mark.parametrize("broken", ["no JSON", '"seconds": 1e30'], ids=["line", "number"])
def test_a_broken_record_stays_broken_until_it_changes_and_is_then_read_from_its_beginning(
    tmp_path: Path, broken: str
) -> None:
    run = made(tmp_path / "run", rounds=4)
    record = tmp_path / "run" / "rounds.jsonl"
    lines = record.read_bytes().splitlines(keepends=True)
    third = json.loads(lines[2]) | {"seconds": 1e30}
    odd = json.dumps(third).encode() if "seconds" in broken else b"no JSON"
    record.write_bytes(b"".join([*lines[:2], odd + b"\n", lines[3]]))
    watcher, found = watched(tmp_path)
    words = found["run"].words
    version = watcher.changes("")["version"]
    for _ in range(3):
        assert not watcher.look()
        assert (found["run"].state, found["run"].words) == ("unreadable", words) and "line 3" in words
    assert watcher.changes(version)["runs"] == []  # nothing new is told of it
    record.write_bytes(b"".join(lines))
    while watcher.look():
        pass
    row = found["run"].row()
    assert (row["state"], row["round"]) == ("finished", 4)
    assert row["trained"] == pytest.approx(run.records[-1]["accuracy_trained"])


def test_a_record_that_could_not_be_opened_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "run", rounds=1)

    def away(tail: Tail, most: int = 0) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Tail, "read", away)
        watcher, found = watched(tmp_path)
        assert found["run"].state == "unreadable" and "Too many open files" in found["run"].words
    while watcher.look():
        pass
    assert found["run"].state == "finished"


def test_an_error_of_our_own_in_one_run_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "good", rounds=1), made(tmp_path / "odd", rounds=1)
    judge = Watcher._judge

    def judged(watcher: Watcher, run: Watched) -> None:
        if run.name == "odd":
            raise ZeroDivisionError("division by zero")
        judge(watcher, run)

    monkeypatch.setattr(Watcher, "_judge", judged)
    _, found = watched(tmp_path)
    assert found["good"].state == "finished"
    assert found["odd"].state == "unreadable" and "division by zero" in found["odd"].words


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
@pytest.mark.parametrize("place", ["run/rounds.jsonl", "run/lock", ".live/x.pid", ".live/x.end", ".live/x.log"])
def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(tmp_path: Path, place: str) -> None:
    made(tmp_path / "run", rounds=1), made(tmp_path / "x", rounds=1)
    for name in ("run", "x"):
        shutil.rmtree(tmp_path / name / "personal")
    (tmp_path / ".live").mkdir()
    for ending in ("pid", "end", "log"):
        (tmp_path / ".live" / f"x.{ending}").write_text("1")
    (tmp_path / place).unlink()
    os.mkfifo(tmp_path / place)
    found: dict[str, Watched] = {}
    thread = threading.Thread(target=lambda: found.update(watched(tmp_path)[1]), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and found.keys() == {"run", "x"}
    assert found["run"].state == ("unreadable" if "rounds" in place else "stopped")


@pytest.mark.parametrize("value", ["Infinity", "1" + "0" * 400, "null", "true", '"x"', "{}"], ids=str.__len__)
@pytest.mark.parametrize("place", ["seconds", "bytes_up", "accuracy_trained", "failed", "diverged", "epsilon"])
def test_odd_numbers_in_a_record_disturb_no_other_run(tmp_path: Path, place: str, value: str) -> None:
    line = {
        "round": 1, "clients": [0], "seconds": 1, "bytes_up": 1, "bytes_down": 1, "failed": {"0": "why"},
        "per_client": {"bytes_up": {}, "loss_trained": {"0": 1.0}, "accuracy_trained": {"0": 0.5}}, "diverged": [],
    }  # fmt: skip
    text = json.dumps(line | {"epsilon": 1.0})
    where = {"accuracy_trained": '"accuracy_trained": {"0": 0.5', "failed": '"failed": {"0": "why"}', "diverged": "[]"}
    old = where.get(place, f'"{place}": 1')
    assert old in text
    new = f"[{value}]" if place == "diverged" else old.rpartition(" ")[0] + f" {value}"
    clients = [{"name": "0", "train": 1, "validation": 0, "test": 1}]
    info = {"format": FORMAT, "clients": clients, "engine": "pool", "threads": 1, "chunk": None, "device": "cpu",
            "torch": "2", "score": "accuracy", "higher_is_better": True, "fingerprint": {}}  # fmt: skip
    asked = 'rounds = 1\nseed = 0\n[method]\nname = "local"\n[network]\nname = "mlp"\n[data]\nname = "d"\n[channel]\n'
    for name, record in (("odd", text.replace(old, new, 1)), ("good", text)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(info))
        (tmp_path / name / "rounds.jsonl").write_text(record + "\n")
        (tmp_path / name / "experiment.toml").write_text(asked)
    watcher, found = watched(tmp_path)
    assert found["good"].row()["trained"] == 0.5
    assert found["odd"].state in ("stopped", "unreadable")
    json.dumps(without_nan([watcher.changes(""), *(looking.opened(run) for run in found.values())]), allow_nan=False)


def test_only_what_changed_is_told_again(tmp_path: Path) -> None:
    made(tmp_path / "a", rounds=1)
    watcher, _ = watched(tmp_path)
    first = watcher.changes("")
    assert first["all"] and [row["name"] for row in first["runs"]] == ["a"]
    assert watcher.changes(first["version"])["runs"] == []
    made(tmp_path / "b", rounds=1)
    watcher.look()
    second = watcher.changes(first["version"])
    assert not second["all"] and {row["name"] for row in second["runs"]} == {"b"}
    shutil.rmtree(tmp_path / "a")
    watcher.look()
    assert watcher.changes(second["version"])["gone"] == ["a"]
    for odd in ("another.3", "x", f"{watcher.boot}.", f"{watcher.boot}.-1", "9" * 50):
        assert watcher.changes(odd)["all"]


def test_an_answer_that_is_known_already_has_no_body(tmp_path: Path) -> None:
    made(tmp_path / "a", rounds=1)
    with page(tmp_path) as live:
        until(live, "a", lambda row: row["state"] == "finished" and not row["reading"])
        _, headers, _ = ask(live, "GET", "/api/run?run=a")
        status, _, body = ask(live, "GET", "/api/run?run=a", If_None_Match=headers["ETag"])
        assert (status, body) == (304, b"")


def test_a_run_somebody_works_on_is_running_and_to_look_does_not_disturb_them(tmp_path: Path) -> None:
    made(tmp_path / "run", rounds=1)
    shutil.rmtree(tmp_path / "run" / "personal")
    assert not is_held(tmp_path / "run")
    with locked(tmp_path / "run"):
        assert is_held(tmp_path / "run") and watched(tmp_path)[1]["run"].state == "running"
    run = watched(tmp_path)[1]["run"]
    assert run.state == "stopped" and not run.can_stop


@pytest.mark.skipif(sys.platform == "win32", reason="locks in common are Unix's")
def test_who_only_looks_keeps_nobody_from_taking_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    with (tmp_path / "lock").open("wb") as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)  # as `is_held` has it for an instant
        monkeypatch.setattr("fedtailor.files.time.sleep", lambda seconds: fcntl.flock(looks, fcntl.LOCK_UN))
        with locked(tmp_path), (tmp_path / "lock").open("wb") as other:
            monkeypatch.setattr("fedtailor.files.time.sleep", lambda seconds: None)
            assert "at work" in refusal(lambda: locked(tmp_path).__enter__())
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_who_failed_and_who_was_away_is_named_with_the_reason(tmp_path: Path) -> None:
    made(tmp_path / "run", rounds=4)
    record = tmp_path / "run" / "rounds.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    lines[1]["failed"] = {"2": "its update is no number"}
    lines[3]["failed"] = {"2": "its update is no number again"}
    lines[2]["missed"] = {"1": "late"}
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = watched(tmp_path)[1]["run"]
    found = {(one["kind"], one["number"]): one for one in looking.opened(run)["lost"]}
    assert found.keys() == {("failed", 2), ("missed", 1)}
    assert (found["failed", 2]["times"], found["failed", 2]["round"]) == (2, 4)
    assert found["failed", 2]["why"].endswith("again") and found["missed", 1]["why"] == "late"
    assert "failed 2 times" in one_client.client(run, 2)["lost"][0]


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ([0.8, 0.6, 0.8], "; it never was better."),
        ([0.6, 0.7, 0.8], "; it never was better."),
        ([0.9, 0.6, 0.8], "; its best was 90.0 % in round 1."),
        ([0.8001, 0.6, 0.8], "as received."),  # no other to a reader
    ],
    ids=["as good", "best", "worse", "as good to the eye"],
)
def test_a_run_is_behind_its_best_only_if_its_score_is(tmp_path: Path, scores: list[float], said: str) -> None:
    made(tmp_path / "run")
    run = watched(tmp_path)[1]["run"]
    assert run.trail is not None
    run.trail.scores["trained"][:] = scores
    assert looking.opened(run)["figures"][0]["says"].endswith(said)


@pytest.mark.parametrize(("name", "said"), [("7", "Client 7"), ("hospital-a", "hospital-a"), ("client-b", "client-b")])
def test_a_client_with_a_name_of_its_own_keeps_it_where_a_sentence_begins(tmp_path: Path, name: str, said: str) -> None:
    made(tmp_path / "run")
    run = watched(tmp_path)[1]["run"]
    assert run.info is not None
    run.info["clients"][2]["name"] = name
    for figure in one_client.client(run, 2)["figures"]:
        assert figure["says"].startswith(f"{said} ")


def test_compared_runs_are_cut_to_the_rounds_that_all_have(tmp_path: Path) -> None:
    alone, fedavg = made(tmp_path / "local", 4, ft.methods.Local()), made(tmp_path / "fedavg", 4)
    record = tmp_path / "fedavg" / "rounds.jsonl"
    record.write_bytes(b"".join(record.read_bytes().splitlines(keepends=True)[:2]))
    shutil.rmtree(tmp_path / "fedavg" / "personal")
    _, found = watched(tmp_path)
    told = looking.compared(list(found.values()))
    assert "after round 2" in told["says"][1]
    figures = {figure["key"]: figure for figure in told["figures"]}
    rows = {row[0]: row[1] for row in figures["ranking"]["table"]["rows"]}
    for name, run in (("local", alone), ("fedavg", fedavg)):
        assert rows[name] == f"{100 * run.records[1]['accuracy_trained']:.1f}"
    for trace in figures["curves"]["data"]:
        assert trace["x"] == [1, 2]


def test_settings_of_one_method_are_compared_also_where_their_names_are_too_long_to_be_shown(tmp_path: Path) -> None:
    rates = {"lr": 0.0123456789, "momentum": 0.0123456789, "weight_decay": 0.0123456789, "mu": 0.0123456789}
    for place, factor in enumerate((1.0, 1.00001, 1.00002)):
        made(tmp_path / str(place), 1, ft.methods.FedProx(**{name: factor * value for name, value in rates.items()}))  # type: ignore[arg-type]
    told = looking.compared(list(watched(tmp_path)[1].values()))
    [ranking] = [figure for figure in told["figures"] if figure["key"] == "ranking"]
    labels = [row[0] for row in ranking["table"]["rows"]]
    assert len(set(labels)) == 3 and all("fedprox" in label for label in labels)


def test_what_cannot_be_compared_is_refused_in_words(tmp_path: Path) -> None:
    made(tmp_path / "a", 2), made(tmp_path / "b", 3, ft.methods.Local())
    _, found = watched(tmp_path)
    said = refusal(lambda: looking.compared(list(found.values())))
    assert "rounds = 2" in said and "rounds = 3" in said
    assert "two runs" in refusal(lambda: looking.check_ticked(["a"]))
    with page(tmp_path) as live:
        until(live, "b", lambda row: not row["reading"])
        status, _, told = ask(live, "GET", "/api/compared?run=a&run=b")
        assert status == 200 and told == {"refused": said}


def test_a_client_shows_its_data_its_scores_and_from_whom_it_learns(tmp_path: Path) -> None:
    run = made(tmp_path / "run", 3, ft.methods.FedAPA())
    found = one_client.client(watched(tmp_path)[1]["run"], 2)
    assert (found["train"], found["test"]) == (7, 5)
    figures = {figure["key"]: figure for figure in found["figures"]}
    trained = [record["per_client"]["accuracy_trained"][2] for record in run.records]
    assert figures["history"]["data"][0]["y"] == pytest.approx([100 * score for score in trained], abs=1e-3)
    assert figures["classes"]["data"][0]["y"] == run.info["clients"][2]["classes"]
    weights = np.asarray(run.monitor("weights")[3])[2]
    others = {client: weight / weights.sum() for client, weight in enumerate(weights) if client != 2 and weight}
    assert {one["number"]: one["share"] for one in found["neighbours"]["rows"]} == pytest.approx(others)


def test_where_nobody_is_weighed_neighbours_are_those_with_similar_data(tmp_path: Path) -> None:
    made(tmp_path / "run", 1)
    run = watched(tmp_path)[1]["run"]
    assert run.info is not None
    counts = np.array([client["classes"] for client in run.info["clients"]], dtype=float)
    parts = counts / counts.sum(1, keepdims=True)
    overlap = {client: np.minimum(parts[0], parts[client]).sum() for client in (1, 2, 3)}
    told = one_client.client(run, 0)["neighbours"]
    assert "weighs no clients" in told["says"]
    assert {one["number"]: one["alike"] for one in told["rows"]} == pytest.approx(
        {c: v for c, v in overlap.items() if v}
    )


def test_clients_come_in_pages_sorted_and_found_by_name(tmp_path: Path) -> None:
    made(tmp_path / "run", 1)
    run = watched(tmp_path)[1]["run"]
    assert run.info is not None
    run.info["clients"] = [run.info["clients"][0] | {"name": f"site {n}", "train": n % 7} for n in range(130)]
    run.__dict__.pop("names", None)
    run.trail = Trail([5] * 130, "accuracy")
    first = one_client.clients(run, "train", True, "", 0)
    assert (first["total"], first["pages"], len(first["rows"])) == (130, 3, 50)
    everyone = [row["train"] for page in range(3) for row in one_client.clients(run, "train", True, "", page)["rows"]]
    assert everyone == sorted((n % 7 for n in range(130)), reverse=True)
    assert [row["number"] for row in one_client.clients(run, "name", False, "SITE 12", 9)["rows"]] == [
        12,
        *range(120, 130),
    ]
    assert "sorted by" in refusal(lambda: one_client.clients(run, "shoe size", False, "", 0))
