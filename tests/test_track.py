"""Trackers show the numbers of the record, each once."""

import json
import math
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

import fedtailor as ft
from conftest import Loud, TinyNet, refusal, tiny_federation, wait_until
from fedtailor.cli import main
from fedtailor.files import locked
from fedtailor.tracking.points import numbers
from fedtailor.tracking.track import track

ROUNDS = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training alone and FedAPA on the same clients, of whom some miss rounds."""
    folder = tmp_path_factory.mktemp("runs")
    for name, method in {"alone": ft.methods.Local(), "apa": ft.methods.FedAPA(lr=0.3)}.items():
        torch.manual_seed(0)
        ft.simulate(
            method,
            TinyNet().double(),
            tiny_federation(),
            rounds=ROUNDS,
            dtype=torch.float64,
            folder=folder / name,
            validation=0.3,
            evaluate_every=2,
            unreliable=ft.Unreliable(dropout=0.3),
        )
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An MLflow store in a file."""
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


def board(folder: Path) -> EventAccumulator:
    """What TensorBoard reads in a folder, all of it."""
    read = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0, "tensors": 0})
    read.Reload()
    return read


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    read = board(folder)
    return {tag: [(point.step, point.value) for point in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def all_runs(store: str, experiment: str) -> list[Any]:
    client = MlflowClient(tracking_uri=store)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return list(client.search_runs([found.experiment_id]))


def only_run(store: str, experiment: str) -> Any:
    (run,) = all_runs(store, experiment)
    return run


def metrics(store: str, run: Any) -> dict[str, list[tuple[int, float]]]:
    client = MlflowClient(tracking_uri=store)
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: sorted((point.step, point.value) for point in history) for name, history in histories.items()}


def shown(run: ft.Run, single: bool = False) -> dict[str, list[tuple[int, float]]]:
    """What of a record a tracker must show, and how it must call it, written out by hand."""
    names = {"cost/bytes_up": "bytes_up", "cost/seconds": "seconds", "loss/training": "loss"}
    names |= {"cost/bytes_down": "bytes_down", "cost/seconds_evaluating": "seconds_evaluating"}
    names |= {"loss/training_mean": "loss_mean"}
    for metric in ("accuracy", "loss", "macro_f1", "auc", "validation"):
        for moment in ("received", "trained"):
            names |= {f"{metric}/{moment}{kind}": f"{metric}_{moment}{kind}" for kind in ("", "_mean")}
    found = {}
    for name, key in names.items():
        values = [(line["round"], line[key]) for line in run.records if line.get(key) is not None]
        found[name] = [(number, float(np.float32(value)) if single else value) for number, value in values]
    return found


@pytest.fixture(scope="module")
def boards(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TensorBoard's folder of both runs."""
    track([runs], tensorboard=(folder := tmp_path_factory.mktemp("boards")))
    return folder


def test_tensorboard_shows_the_record(runs: Path, boards: Path) -> None:
    run, found = ft.open(runs / "apa"), scalars(boards / "apa")
    wanted = shown(run, single=True)
    assert len(wanted["accuracy/trained"]) == ROUNDS // 2 and len(wanted["cost/seconds"]) == ROUNDS
    assert {name: found[name] for name in wanted} == wanted
    missed = [len(line["missed"]) / 4 for line in run.records]
    assert any(missed) and found["clients/missed"] == [(n + 1, share) for n, share in enumerate(missed)]


def test_its_times_are_those_of_the_rounds(runs: Path, boards: Path) -> None:
    times = [point.wall_time for point in board(boards / "apa").Scalars("cost/seconds")]
    took = [line["seconds"] + line.get("seconds_evaluating", 0.0) for line in ft.open(runs / "apa").records]
    began = (runs / "apa" / "experiment.toml").stat().st_mtime
    assert np.diff([began, *times]) == pytest.approx(took, abs=1e-6)


def test_tensorboard_shows_how_clients_differ(runs: Path, boards: Path) -> None:
    run, read = ft.open(runs / "apa"), board(boards / "apa")
    last, seen = run.records[-1]["per_client"]["loss_received"], read.Histograms("per_client/loss_received")
    assert [point.step for point in seen] == [2, 4]
    found = seen[-1].histogram_value
    assert (found.num, found.min, found.max) == (4, min(last.values()), max(last.values()))
    assert sum(found.bucket) == 4 and found.sum == pytest.approx(sum(last.values()))
    weights = read.Histograms("monitor/weights")[-1].histogram_value
    assert weights.num == 16 and weights.sum == pytest.approx(float(run.monitor("weights")[ROUNDS].sum()))


def test_settings_are_hyperparameters(boards: Path) -> None:
    for name, method in {"alone": "local", "apa": "fedapa"}.items():
        content = board(boards / name).SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
        found = parse_session_start_info_plugin_data(content).hparams
        assert found["method.name"].string_value == found["fedtailor.method"].string_value == method
        assert found["unreliable.dropout"].number_value == 0.3 and found["rounds"].number_value == ROUNDS
        assert name == "alone" or found["method.lr"].number_value == 0.3
        assert name == "alone" or found["method.clip"].bool_value is True
        assert not [tag for tag in board(boards / name).Tags()["tensors"] if tag == "_hparams_/experiment"]


def test_mlflow_has_the_record_to_the_last_digit(runs: Path, store: str) -> None:
    track([runs / "apa"], mlflow=store, experiment="record")
    found, run = only_run(store, "record"), ft.open(runs / "apa")
    seen, wanted = metrics(store, found), shown(run)
    assert {name: seen[name] for name in wanted} == wanted
    assert found.data.params["method.lr"] == "0.3" and found.data.params["method.clip"] == "true"
    assert found.data.tags["fedtailor.method"] == "fedapa" and found.data.tags["fedtailor.data"] == "own data"
    assert found.data.tags["fedtailor.version"] == ft.__version__
    assert (found.info.run_name, found.info.status) == ("apa", "FINISHED")
    took = sum(line["seconds"] + line.get("seconds_evaluating", 0.0) for line in run.records)
    assert found.info.end_time - found.info.start_time == pytest.approx(1000 * took, abs=2)


def test_the_end_is_the_summary(runs: Path, store: str) -> None:
    """With training alone among the runs, it says how many gain over it; a run that was sent before gets that too."""
    run, alone = ft.open(runs / "apa"), ft.open(runs / "alone")
    track([runs / "apa"], mlflow=store, experiment="summary")
    before = only_run(store, "summary").data.metrics
    for moment, choices in run.summary().items():
        for choice, wanted in choices.items():
            start = f"final/{moment}/{choice}"
            assert before[f"{start}/accuracy/weighted"] == wanted["weighted"]
            assert before[f"{start}/accuracy/worst_tenth"] == wanted["worst_tenth"]
            assert before[f"{start}/loss/mean"] == wanted["metrics"]["loss"]["mean"]
            assert before[f"{start}/round"] == wanted["round"]
    assert before["final/bytes_up"] == run.total("bytes_up")
    assert "final/trained/last/better_than_alone" not in before
    track([runs], mlflow=store, experiment="summary")
    both = all_runs(store, "summary")
    (after,) = [found.data.metrics for found in both if found.info.run_name == "apa"]
    numbers = run.numbers("trained", alone=alone)
    assert numbers is not None
    assert after["final/trained/last/better_than_alone"] == numbers["better_than_alone"]


@pytest.mark.parametrize(("other", "rounds"), [(1, ROUNDS), (0, 1)], ids=["other data", "fewer rounds"])
def test_training_alone_elsewhere_is_not_compared_with(other: int, rounds: int, store: str, tmp_path: Path) -> None:
    """Own arrays are all called own data, but clients of other ones are others."""
    settings: dict[str, Any] = {"dtype": torch.float64, "engine": "sequential"}
    for name, method, seed, many in [
        ("alone", ft.methods.Local(), other, rounds),
        ("avg", ft.methods.FedAvg(), 0, ROUNDS),
    ]:
        torch.manual_seed(0)
        fed = tiny_federation(seed=seed)
        ft.simulate(method, TinyNet().double(), fed, rounds=many, folder=tmp_path / name, **settings)
    track([tmp_path], mlflow=store, experiment=f"elsewhere {other} {rounds}")
    for found in all_runs(store, f"elsewhere {other} {rounds}"):
        assert "final/trained/last/better_than_alone" not in found.data.metrics


def test_nothing_is_sent_twice(runs: Path, store: str, tmp_path: Path) -> None:
    """Not even of a run that has been moved since."""
    first, moved = tmp_path / "here" / "run", tmp_path / "there" / "another"
    shutil.copytree(runs / "apa", first)
    said: list[str] = []
    track([first], tensorboard=tmp_path / "boards", mlflow=store, experiment="twice", say=said.append)
    assert len(said) == 2 and all(f"run: up to round {ROUNDS} is in" in sentence for sentence in said)
    before, files = metrics(store, only_run(store, "twice")), sorted((tmp_path / "boards").rglob("*"))
    moved.parent.mkdir()
    first.rename(moved)
    said.clear()
    track([moved], tensorboard=tmp_path / "boards", mlflow=store, experiment="twice", say=said.append)
    assert len(said) == 2 and all("nothing new" in sentence for sentence in said)
    assert metrics(store, only_run(store, "twice")) == before
    assert sorted((tmp_path / "boards").rglob("*")) == files
    assert all(len({step for step, _ in points}) == len(points) for points in before.values())


def test_runs_of_one_name_lie_side_by_side(runs: Path, tmp_path: Path) -> None:
    """And what is not ours stays as it is."""
    shutil.copytree(runs / "alone", tmp_path / "other" / "apa")
    (tmp_path / "boards" / "apa").mkdir(parents=True)
    (tmp_path / "boards" / "apa" / "notes.txt").write_text("mine")
    for _ in range(2):
        track([runs / "apa", tmp_path / "other" / "apa"], tensorboard=tmp_path / "boards")
    assert [path.name for path in sorted((tmp_path / "boards" / "apa").iterdir())] == ["notes.txt"]
    assert sorted(path.name for path in (tmp_path / "boards").iterdir()) == ["apa", "apa-2", "apa-3"]
    wanted = [shown(ft.open(path), single=True)["cost/seconds"] for path in (runs / "apa", tmp_path / "other" / "apa")]
    assert [scalars(tmp_path / "boards" / name)["cost/seconds"] for name in ("apa-2", "apa-3")] == wanted


def begun(run: Path, folder: Path) -> tuple[Path, list[bytes]]:
    """A run that is not finished, without a round, and the lines that come."""
    shutil.copytree(run, folder)
    (folder / "personal").rename(folder.parent / "personal")
    lines = (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rounds.jsonl").unlink()  # settings are written first
    return folder, lines


def test_a_run_is_followed_to_its_end(runs: Path, store: str, tmp_path: Path) -> None:
    """Through half a line, and a stop after which the last rounds are written anew."""
    folder, (one, two, three, four) = begun(runs / "apa", tmp_path / "run")
    again = json.dumps(json.loads(two) | {"seconds": 12.0}).encode() + b"\n"
    writes = [one[:50], one + two, one, one + again + three[:-1], one + again + three, one + again + three + four]
    steps: list[Callable[[], object]] = [lambda w=w: (folder / "rounds.jsonl").write_bytes(w) for w in writes]  # type: ignore[misc]
    steps.append(lambda: (tmp_path / "personal").rename(folder / "personal"))
    coming, said = iter(steps), list[str]()
    track(
        [folder],
        tensorboard=tmp_path / "boards",
        mlflow=store,
        experiment="follow",
        follow=True,
        wait=lambda: next(coming)(),  # a further look would find nothing to do, and fail
        say=said.append,
    )
    assert "no round is written yet" in said[0] and len(said) == 5  # of each tracker, when it began and when it ended
    assert next(coming, None) is None  # all was looked at
    wanted = {name: [step for step, _ in points] for name, points in shown(ft.open(runs / "apa")).items()}
    for found in (scalars(tmp_path / "boards" / "run"), metrics(store, run := only_run(store, "follow"))):
        assert {name: [step for step, _ in found[name]] for name in wanted} == wanted
        assert "final/trained/last/round" in found
    assert run.info.status == "FINISHED"


def test_what_broke_off_is_completed(runs: Path, store: str, tmp_path: Path) -> None:
    """The process died while it wrote the third round; MLflow has a part of it, TensorBoard half an event."""
    folder, lines = begun(runs / "apa", tmp_path / "run")
    (folder / "rounds.jsonl").write_bytes(b"".join(lines[:3]))
    where: dict[str, Any] = {"tensorboard": tmp_path / "boards", "mlflow": store, "experiment": "broken"}
    track([folder], **where)
    half = only_run(store, "broken")
    assert half.info.status == "RUNNING" and "final/bytes_up" not in half.data.metrics
    assert [step for step, _ in metrics(store, half)["cost/seconds"]] == [1, 2, 3]
    MlflowClient(tracking_uri=store).log_metric(half.info.run_id, "cost/bytes_up", 1.0, step=4)
    (events,) = (tmp_path / "boards" / "run").glob("events*")
    events.write_bytes(events.read_bytes()[:-20])
    (folder / "rounds.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "personal").rename(folder / "personal")
    track([folder], **where)
    wanted = shown(ft.open(runs / "apa"), single=True)
    found = scalars(tmp_path / "boards" / "run")
    assert {name: found[name] for name in wanted} == wanted
    seen = metrics(store, only_run(store, "broken"))
    assert [step for step, _ in seen["cost/seconds"]] == [1, 2, 3, 4] == [step for step, _ in seen["cost/bytes_up"]]


def test_long_settings_and_files_in_mlflow(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule longer than MLflow takes is shortened; what MLflow keeps of a run opens like the run."""
    monkeypatch.chdir(tmp_path)
    files = (tmp_path / "files").as_uri()  # else MLflow keeps them where it was first asked
    MlflowClient(tracking_uri=store).create_experiment("files", artifact_location=files)
    schedule = [[0, 1, 2, 3]] * 60
    fed, model = tiny_federation(), TinyNet().double()
    ft.simulate(
        ft.methods.FedAvg(epochs=1), model, fed, schedule=schedule, dtype=torch.float64, folder="run", evaluate_every=60
    )
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("not the run's")
    Path("run", "key").symlink_to(tmp_path / "secrets" / "key")
    Path("run", "arrays").symlink_to(tmp_path / "secrets")
    said: list[str] = []
    for artifacts in (False, True, True):
        track(["run"], mlflow=store, experiment="files", artifacts=artifacts, say=said.append)
    assert ["nothing new" in sentence for sentence in said] == [False, False, True]  # files are news
    found = only_run(store, "files")
    assert found.data.params["schedule"].startswith("[[0, 1, 2, 3], [0,")
    assert found.data.params["schedule"].endswith(f"… ({len(json.dumps(schedule))} letters)")
    assert len(found.data.params["schedule"]) == 500
    copy = MlflowClient(tracking_uri=store).download_artifacts(found.info.run_id, "", str(tmp_path))
    assert not (Path(copy) / "lock").exists() and not list((tmp_path / "files").rglob("key"))  # links lead elsewhere
    assert torch.equal(ft.open(copy).personal(2)["fc.weight"], ft.open("run").personal(2)["fc.weight"])


def test_what_is_no_number_stays_none(store: str, tmp_path: Path) -> None:
    """A client whose loss is no number spoils the mean, and has no place in a histogram."""
    folder, fed = tmp_path / "run", tiny_federation()
    method = ft.methods.FedAvg(lr=1.0, epochs=1)
    ft.simulate(method, Loud().double(), fed, rounds=1, dtype=torch.float64, folder=folder)
    line = ft.open(folder).records[0]
    assert line["diverged"] and math.isnan(line["loss_trained"])
    track([folder], tensorboard=tmp_path / "boards", mlflow=store, experiment="diverged")
    found = scalars(tmp_path / "boards" / "run")
    assert math.isnan(found["loss/trained"][0][1]) and found["clients/diverged"] == [(1, len(line["diverged"]))]
    assert math.isnan(only_run(store, "diverged").data.metrics["loss/trained"])
    finite = sum(map(math.isfinite, line["per_client"]["loss_trained"].values()))
    drawn = board(tmp_path / "boards" / "run")
    assert ("per_client/loss_trained" in drawn.Tags()["histograms"]) == (finite > 0)
    assert drawn.Histograms("per_client/accuracy_trained")[0].histogram_value.num == 4


def test_numbers_go_to_any_tracker(fed: ft.Federation) -> None:
    """In a record function, for who keeps no folder: as in docs/trackers.md."""
    seen: list[tuple[int, dict[str, float]]] = []
    run = ft.simulate(
        ft.methods.FedAvg(),
        TinyNet(),
        fed,
        rounds=2,
        channel=ft.Channel(clip=1.0, noise=1.0),
        record=lambda line: seen.append((line["round"], numbers(line))),
    )
    assert [number for number, _ in seen] == [1, 2]
    assert [found["accuracy/trained"] for _, found in seen] == [line["accuracy_trained"] for line in run.records]
    assert [found["privacy/epsilon"] for _, found in seen] == [line["epsilon"] for line in run.records]


def test_shares_are_of_the_clients_that_were_asked() -> None:
    """Of four, two sent something, one was late, one failed; nobody was evaluated, and a monitor has two numbers."""
    line = {"round": 3, "clients": [0, 5], "missed": {1: "late"}, "failed": {2: "memory"}, "accuracy_trained": None}
    line |= {"monitor": {"residual": 0.25, "weights": [1.0]}, "per_client": {"drift": {0: 1.0, 5: 3.0}}}
    shares = {"clients/failed": 0.25, "clients/missed": 0.25}
    assert numbers(line) == shares | {"monitor/residual": 0.25, "monitor/drift_mean": 2.0}


def test_what_cannot_be_is_refused(runs: Path, tmp_path: Path) -> None:
    one = [runs / "apa"]
    assert "--tensorboard FOLDER" in refusal(lambda: track(one))
    assert "--mlflow URI" in refusal(lambda: track(one, tensorboard=tmp_path, artifacts=True))
    assert "sqlite:///" in refusal(lambda: track(one, mlflow=str(tmp_path / "mlruns")))
    assert "nonsense://" in refusal(lambda: track(one, mlflow="nonsense://there"))
    assert "no server answers there" in refusal(lambda: track(one, mlflow="http://127.0.0.1:1"))
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refusal(lambda: track(one, tensorboard=tmp_path / "file"))
    track(one, tensorboard=tmp_path / "boards")
    with locked(tmp_path / "boards" / "apa"):
        assert "Somebody is at work" in refusal(lambda: track(one, tensorboard=tmp_path / "boards"))
    shutil.copytree(runs / "apa", tmp_path / "damaged")
    (tmp_path / "damaged" / "rounds.jsonl").write_text('{"round": 1}\n')
    assert "not a round's" in refusal(lambda: track([tmp_path / "damaged"], tensorboard=tmp_path / "boards"))
    (tmp_path / "damaged" / "rounds.jsonl").unlink()
    assert "lost its rounds" in refusal(lambda: track([tmp_path / "damaged"], tensorboard=tmp_path / "boards"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "tracker"),
    [("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("sqlalchemy", "mlflow"), ("alembic", "mlflow")],
)
def test_a_library_that_is_missing_is_named(library: str, tracker: str, runs: Path, tmp_path: Path) -> None:
    """In a process of its own: here it may be imported already."""
    words = ["fedtailor", "track", str(runs / "apa"), f"--{tracker}", f"sqlite:///{tmp_path}/somewhere"]
    code = f"import sys; sys.modules[{library!r}] = None; sys.argv = {words!r}; from fedtailor.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and f"pip install 'fedtailor[{tracker}]'" in done.stderr


def test_the_command(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fedtailor", "track", str(runs / "apa"), "--tensorboard", str(tmp_path / "boards"), "--follow"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert capsys.readouterr().out.startswith(f"apa: up to round {ROUNDS} is in TensorBoard's folder")


@pytest.mark.slow
def test_tensorboard_itself_shows_it(runs: Path, boards: Path) -> None:
    """Its server, with the loader it takes by itself, which passes over what it does not know."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--logdir", str(boards), "--host", "127.0.0.1", "--port", str(port)]
    program = [sys.executable, "-m", "tensorboard.main", *words]
    with subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True) as server:

        def ask(path: str, body: bytes | None = None) -> Any:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/data/{path}", body)
            request.add_header("Content-Type", "application/json")
            with suppress(OSError), urllib.request.urlopen(request) as answer:
                return json.load(answer)

        try:
            wait_until(server, lambda: set(ask("runs") or []) == {"apa", "alone"})
            number = "plugin/scalars/scalars?run=apa&tag=accuracy/trained"
            wait_until(server, lambda: len(ask(number) or []) == ROUNDS // 2)
            seen = [(step, value) for _, step, value in ask(number)]
            assert seen == shown(ft.open(runs / "apa"), single=True)["accuracy/trained"]
            assert len(ask("plugin/histograms/histograms?run=apa&tag=per_client/accuracy_trained")) == ROUNDS // 2
            wanted = {"allowedStatuses": ["STATUS_SUCCESS"], "colParams": [], "startIndex": 0, "sliceSize": 10}
            rows = ask("plugin/hparams/session_groups", json.dumps(wanted).encode())["sessionGroups"]
            assert {row["hparams"]["fedtailor.method"] for row in rows} == {"local", "fedapa"}
        finally:
            server.terminate()
