"""TensorBoard and MLflow show the values of the records, each once."""

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
from conftest import DivergingNet, TinyNet, error_message, tiny_federation, wait_until
from fedtailor.cli.main import main
from fedtailor.reporting.trackers.points import record_metrics
from fedtailor.reporting.trackers.track import track
from fedtailor.runs.files import folder_lock
from support.dashboard_client import make_run

ROUNDS = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local training and FedAPA on the same clients, some of which miss rounds."""
    folder = tmp_path_factory.mktemp("runs")
    for name, method in {"local": ft.methods.Local(), "apa": ft.methods.FedAPA(lr=0.3)}.items():
        unreliable = ft.Unreliable(dropout=0.3)
        make_run(folder / name, ROUNDS, method, validation=0.3, evaluate_every=2, unreliable=unreliable)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An MLflow store in a file."""
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


def read_board(folder: Path) -> EventAccumulator:
    """Read all events in a folder with TensorBoard's library."""
    events = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0, "tensors": 0})
    events.Reload()
    return events


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = read_board(folder)
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def get_runs(store: str, experiment: str) -> list[Any]:
    client = MlflowClient(tracking_uri=store)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return list(client.search_runs([found.experiment_id]))


def get_run(store: str, experiment: str) -> Any:
    (run,) = get_runs(store, experiment)
    return run


def metrics(store: str, run: Any) -> dict[str, list[tuple[int, float]]]:
    client = MlflowClient(tracking_uri=store)
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: sorted((point.step, point.value) for point in history) for name, history in histories.items()}


def expected_scalars(run: ft.Run, float32: bool = False) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars of a run that a tracker must show, by name, independently of the implementation."""
    names = {"cost/bytes_up": "bytes_up", "cost/seconds": "seconds", "loss/training": "loss"}
    names |= {"cost/bytes_down": "bytes_down", "cost/seconds_evaluating": "seconds_evaluating"}
    names |= {"loss/training_mean": "loss_mean"}
    for metric in ("accuracy", "loss", "macro_f1", "auc", "validation"):
        for moment in ("received", "trained"):
            names |= {f"{metric}/{moment}{kind}": f"{metric}_{moment}{kind}" for kind in ("", "_mean")}
    found = {}
    for name, key in names.items():
        values = [(line["round"], line[key]) for line in run.records if line.get(key) is not None]
        found[name] = [(number, float(np.float32(value)) if float32 else value) for number, value in values]
    return found


@pytest.fixture(scope="module")
def boards(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TensorBoard's folder of both runs."""
    track([runs], tensorboard=(folder := tmp_path_factory.mktemp("boards")))
    return folder


def test_tensorboard_matches_records(runs: Path, boards: Path) -> None:
    """Scalars, wall times, and histograms."""
    run, found, events = ft.load_run(runs / "apa"), scalars(boards / "apa"), read_board(boards / "apa")
    expected = expected_scalars(run, float32=True)
    assert len(expected["accuracy/trained"]) == ROUNDS // 2 and len(expected["cost/seconds"]) == ROUNDS
    assert {name: found[name] for name in expected} == expected
    missed = [len(line["missed"]) / 4 for line in run.records]
    assert any(missed) and found["clients/missed"] == [(n + 1, fraction) for n, fraction in enumerate(missed)]
    times = [point.wall_time for point in events.Scalars("cost/seconds")]
    took = [line["seconds"] + line.get("seconds_evaluating", 0.0) for line in run.records]
    began = (runs / "apa" / "experiment.toml").stat().st_mtime
    assert np.diff([began, *times]) == pytest.approx(took, abs=1e-6)
    last, points = run.records[-1]["per_client"]["loss_received"], events.Histograms("per_client/loss_received")
    assert [point.step for point in points] == [2, 4]
    drawn = points[-1].histogram_value
    assert (drawn.num, drawn.min, drawn.max) == (4, min(last.values()), max(last.values()))
    assert sum(drawn.bucket) == 4 and drawn.sum == pytest.approx(sum(last.values()))
    weights = events.Histograms("method_metrics/weights")[-1].histogram_value
    assert weights.num == 16 and weights.sum == pytest.approx(float(run.metric("weights")[ROUNDS].sum()))


def test_tensorboard_hyperparameters_match_settings(boards: Path) -> None:
    for name, method in {"local": "local", "apa": "fedapa"}.items():
        content = read_board(boards / name).SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
        found = parse_session_start_info_plugin_data(content).hparams
        assert found["method.name"].string_value == found["fedtailor.method"].string_value == method
        assert found["unreliable.dropout"].number_value == 0.3 and found["rounds"].number_value == ROUNDS
        assert name == "local" or found["method.lr"].number_value == 0.3
        assert name == "local" or found["method.clip"].bool_value is True
        assert not [tag for tag in read_board(boards / name).Tags()["tensors"] if tag == "_hparams_/experiment"]


def test_mlflow_metrics_match_records_exactly(runs: Path, store: str) -> None:
    track([runs / "apa"], mlflow=store, experiment="record")
    found, run = get_run(store, "record"), ft.load_run(runs / "apa")
    values, expected = metrics(store, found), expected_scalars(run)
    assert {name: values[name] for name in expected} == expected
    assert found.data.params["method.lr"] == "0.3" and found.data.params["method.clip"] == "true"
    assert found.data.tags["fedtailor.method"] == "fedapa" and found.data.tags["fedtailor.data"] == "own data"
    assert found.data.tags["fedtailor.version"] == ft.__version__
    assert (found.info.run_name, found.info.status) == ("apa", "FINISHED")
    took = sum(line["seconds"] + line.get("seconds_evaluating", 0.0) for line in run.records)
    assert found.info.end_time - found.info.start_time == pytest.approx(1000 * took, abs=2)


def test_mlflow_final_metrics_match_summary(runs: Path, store: str) -> None:
    """If the runs include local training, the fraction of clients that gain is added, also to a run sent before."""
    run, local = ft.load_run(runs / "apa"), ft.load_run(runs / "local")
    track([runs / "apa"], mlflow=store, experiment="summary")
    before = get_run(store, "summary").data.metrics
    for moment, choices in run.summary().items():
        for choice, expected in choices.items():
            start = f"final/{moment}/{choice}"
            assert before[f"{start}/accuracy/weighted"] == expected["weighted"]
            assert before[f"{start}/accuracy/worst_tenth"] == expected["worst_tenth"]
            assert before[f"{start}/loss/mean"] == expected["metrics"]["loss"]["mean"]
            assert before[f"{start}/round"] == expected["round"]
    assert before["final/bytes_up"] == run.total("bytes_up")
    assert "final/trained/last/better_than_local" not in before
    track([runs], mlflow=store, experiment="summary")
    both = get_runs(store, "summary")
    (after,) = [found.data.metrics for found in both if found.info.run_name == "apa"]
    summary = run.summarize("trained", local=local)
    assert summary is not None
    assert after["final/trained/last/better_than_local"] == summary["better_than_local"]


@pytest.mark.parametrize(("data_seed", "rounds"), [(1, ROUNDS), (0, 1)], ids=["other data", "fewer rounds"])
def test_local_training_on_other_data_or_rounds_is_not_a_baseline(
    data_seed: int, rounds: int, store: str, tmp_path: Path
) -> None:
    """All runs on arrays have the same data name, but clients with other data are different clients."""
    make_run(tmp_path / "local", rounds, ft.methods.Local(), data_seed=data_seed)
    make_run(tmp_path / "avg", ROUNDS)
    track([tmp_path], mlflow=store, experiment=f"baseline {data_seed} {rounds}")
    for found in get_runs(store, f"baseline {data_seed} {rounds}"):
        assert "final/trained/last/better_than_local" not in found.data.metrics


def test_second_call_sends_nothing_for_moved_run(runs: Path, store: str, tmp_path: Path) -> None:
    first, moved = tmp_path / "here" / "run", tmp_path / "there" / "another"
    shutil.copytree(runs / "apa", first)
    messages: list[str] = []
    track([first], tensorboard=tmp_path / "boards", mlflow=store, experiment="twice", echo=messages.append)
    assert len(messages) == 2 and all(f"run: sent all rounds up to {ROUNDS} to" in message for message in messages)
    before, files = metrics(store, get_run(store, "twice")), sorted((tmp_path / "boards").rglob("*"))
    moved.parent.mkdir()
    first.rename(moved)
    messages.clear()
    track([moved], tensorboard=tmp_path / "boards", mlflow=store, experiment="twice", echo=messages.append)
    assert len(messages) == 2 and all("nothing new" in message for message in messages)
    assert metrics(store, get_run(store, "twice")) == before
    assert sorted((tmp_path / "boards").rglob("*")) == files
    assert all(len({step for step, _ in points}) == len(points) for points in before.values())


def test_runs_with_same_name_get_different_folders(runs: Path, tmp_path: Path) -> None:
    """Files of others are not modified."""
    shutil.copytree(runs / "local", tmp_path / "other" / "apa")
    (tmp_path / "boards" / "apa").mkdir(parents=True)
    (tmp_path / "boards" / "apa" / "notes.txt").write_text("mine")
    for _ in range(2):
        track([runs / "apa", tmp_path / "other" / "apa"], tensorboard=tmp_path / "boards")
    assert [path.name for path in sorted((tmp_path / "boards" / "apa").iterdir())] == ["notes.txt"]
    assert sorted(path.name for path in (tmp_path / "boards").iterdir()) == ["apa", "apa-2", "apa-3"]
    expected = [
        expected_scalars(ft.load_run(path), float32=True)["cost/seconds"]
        for path in (runs / "apa", tmp_path / "other" / "apa")
    ]
    assert [scalars(tmp_path / "boards" / name)["cost/seconds"] for name in ("apa-2", "apa-3")] == expected


def unfinished_copy(run: Path, folder: Path) -> tuple[Path, list[bytes]]:
    """Copy a run as if it had just started; return the copy and the lines of its records."""
    shutil.copytree(run, folder)
    (folder / "personal").rename(folder.parent / "personal")
    lines = (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rounds.jsonl").unlink()  # the settings are written before the first record
    return folder, lines


def test_follow_sends_growing_run_until_finished(runs: Path, store: str, tmp_path: Path) -> None:
    """The records contain a partial line, and a resumed run rewrites its last rounds."""
    folder, (one, two, three, four) = unfinished_copy(runs / "apa", tmp_path / "run")
    again = json.dumps(json.loads(two) | {"seconds": 12.0}).encode() + b"\n"
    writes = [one[:50], one + two, one, one + again + three[:-1], one + again + three, one + again + three + four]
    steps: list[Callable[[], object]] = [lambda w=w: (folder / "rounds.jsonl").write_bytes(w) for w in writes]  # type: ignore[misc]
    steps.append(lambda: (tmp_path / "personal").rename(folder / "personal"))
    remaining, messages = iter(steps), list[str]()
    where: dict[str, Any] = {"tensorboard": tmp_path / "boards", "mlflow": store, "experiment": "follow"}
    # `wait` raises StopIteration if it is called too often
    track([folder], **where, follow=True, wait=lambda: next(remaining)(), echo=messages.append)
    assert "no round is finished yet" in messages[0]
    assert len(messages) == 5  # and for each tracker, one about the first rounds and one about the end
    assert next(remaining, None) is None
    expected = {
        name: [step for step, _ in points] for name, points in expected_scalars(ft.load_run(runs / "apa")).items()
    }
    for found in (scalars(tmp_path / "boards" / "run"), metrics(store, run := get_run(store, "follow"))):
        assert {name: [step for step, _ in found[name]] for name in expected} == expected
        assert "final/trained/last/round" in found
    assert run.info.status == "FINISHED"


def test_interrupted_call_is_completed_by_next_call(runs: Path, store: str, tmp_path: Path) -> None:
    """The process was killed in a round: MLflow has a part of it, and TensorBoard a partial event."""
    folder, lines = unfinished_copy(runs / "apa", tmp_path / "run")
    (folder / "rounds.jsonl").write_bytes(b"".join(lines[:3]))
    where: dict[str, Any] = {"tensorboard": tmp_path / "boards", "mlflow": store, "experiment": "broken"}
    track([folder], **where)
    partial = get_run(store, "broken")
    assert partial.info.status == "RUNNING" and "final/bytes_up" not in partial.data.metrics
    assert [step for step, _ in metrics(store, partial)["cost/seconds"]] == [1, 2, 3]
    MlflowClient(tracking_uri=store).log_metric(partial.info.run_id, "cost/bytes_up", 1.0, step=4)
    (events,) = (tmp_path / "boards" / "run").glob("events*")
    events.write_bytes(events.read_bytes()[:-20])
    (folder / "rounds.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "personal").rename(folder / "personal")
    track([folder], **where)
    expected = expected_scalars(ft.load_run(runs / "apa"), float32=True)
    found = scalars(tmp_path / "boards" / "run")
    assert {name: found[name] for name in expected} == expected
    values = metrics(store, get_run(store, "broken"))
    for name in ("cost/seconds", "cost/bytes_up"):
        assert [step for step, _ in values[name]] == [1, 2, 3, 4]


def test_mlflow_truncates_long_settings_and_stores_files(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule that is too long for MLflow is truncated; downloaded files load like the run folder."""
    monkeypatch.chdir(tmp_path)
    files = (tmp_path / "files").as_uri()  # by default, MLflow saves files in the working directory
    MlflowClient(tracking_uri=store).create_experiment("files", artifact_location=files)
    schedule = [[0, 1, 2, 3]] * 60
    fed, model = tiny_federation(), TinyNet().double()
    ft.simulate(
        ft.methods.FedAvg(epochs=1), model, fed, schedule=schedule, dtype=torch.float64, folder="run", evaluate_every=60
    )
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("secret")
    Path("run", "key").symlink_to(tmp_path / "secrets" / "key")
    Path("run", "arrays").symlink_to(tmp_path / "secrets")
    messages: list[str] = []
    for artifacts in (False, True, True):
        track(["run"], mlflow=store, experiment="files", artifacts=artifacts, echo=messages.append)
    assert ["nothing new" in message for message in messages] == [False, False, True]  # sent files count as new
    found = get_run(store, "files")
    assert found.data.params["schedule"].startswith("[[0, 1, 2, 3], [0,")
    assert found.data.params["schedule"].endswith(f"… ({len(json.dumps(schedule))} characters)")
    assert len(found.data.params["schedule"]) == 500
    copy = MlflowClient(tracking_uri=store).download_artifacts(found.info.run_id, "", str(tmp_path))
    assert not (Path(copy) / "lock").exists() and not list((tmp_path / "files").rglob("key"))  # links are not sent
    assert torch.equal(ft.load_run(copy).personal(2)["fc.weight"], ft.load_run("run").personal(2)["fc.weight"])


def test_diverged_client_gives_nan_mean_and_no_histogram_entry(store: str, tmp_path: Path) -> None:
    """The mean of the loss is NaN if one client diverged; histograms contain only finite values."""
    folder, fed = tmp_path / "run", tiny_federation()
    method = ft.methods.FedAvg(lr=1.0, epochs=1)
    ft.simulate(method, DivergingNet().double(), fed, rounds=1, dtype=torch.float64, folder=folder)
    line = ft.load_run(folder).records[0]
    assert line["diverged"] and math.isnan(line["loss_trained"])
    track([folder], tensorboard=tmp_path / "boards", mlflow=store, experiment="diverged")
    found = scalars(tmp_path / "boards" / "run")
    assert math.isnan(found["loss/trained"][0][1]) and found["clients/diverged"] == [(1, len(line["diverged"]))]
    assert math.isnan(get_run(store, "diverged").data.metrics["loss/trained"])
    finite = sum(map(math.isfinite, line["per_client"]["loss_trained"].values()))
    events = read_board(tmp_path / "boards" / "run")
    assert ("per_client/loss_trained" in events.Tags()["histograms"]) == (finite > 0)
    assert events.Histograms("per_client/accuracy_trained")[0].histogram_value.num == 4


def test_record_metrics_in_callback_match_records(fed: ft.Federation) -> None:
    """As in docs/trackers.md, for runs without a folder."""
    logged: list[tuple[int, dict[str, float]]] = []
    run = ft.simulate(
        ft.methods.FedAvg(),
        TinyNet(),
        fed,
        rounds=2,
        channel=ft.Channel(clip=1.0, noise=1.0),
        on_round_end=lambda record: logged.append((record["round"], record_metrics(record))),
    )
    assert [number for number, _ in logged] == [1, 2]
    assert [found["accuracy/trained"] for _, found in logged] == [line["accuracy_trained"] for line in run.records]
    assert [found["privacy/epsilon"] for _, found in logged] == [line["epsilon"] for line in run.records]


def test_record_metrics_group_common_and_held_out_metrics() -> None:
    record = {"round": 3, "clients": [], "common_accuracy_trained": 0.4, "held_out_loss_received_mean": 1.5}
    found = record_metrics(record | {"stopped_early": True})
    assert found == {"common_accuracy/trained": 0.4, "held_out_loss/received_mean": 1.5}


def test_record_metrics_fractions_count_selected_clients() -> None:
    """Of four selected clients, one was late and one failed; no client was evaluated."""
    line = {"round": 3, "clients": [0, 5], "missed": {1: "late"}, "failed": {2: "memory"}, "accuracy_trained": None}
    line |= {"method_metrics": {"residual": 0.25, "weights": [1.0]}, "per_client": {"drift": {0: 1.0, 5: 3.0}}}
    fractions = {"clients/failed": 0.25, "clients/missed": 0.25}
    assert record_metrics(line) == fractions | {"method_metrics/residual": 0.25, "method_metrics/drift_mean": 2.0}


def test_track_with_invalid_arguments_raises_error(runs: Path, tmp_path: Path) -> None:
    one = [runs / "apa"]
    assert "--tensorboard FOLDER" in error_message(lambda: track(one))
    assert "--mlflow URI" in error_message(lambda: track(one, tensorboard=tmp_path, artifacts=True))
    assert "sqlite:///" in error_message(lambda: track(one, mlflow=str(tmp_path / "mlruns")))
    assert "nonsense://" in error_message(lambda: track(one, mlflow="nonsense://there"))
    assert "the server does not respond" in error_message(lambda: track(one, mlflow="http://127.0.0.1:1"))
    (tmp_path / "file").write_text("")
    assert "cannot be written" in error_message(lambda: track(one, tensorboard=tmp_path / "file"))
    track(one, tensorboard=tmp_path / "boards")
    with folder_lock(tmp_path / "boards" / "apa"):
        assert "Another process is using" in error_message(lambda: track(one, tensorboard=tmp_path / "boards"))
    shutil.copytree(runs / "apa", tmp_path / "damaged")
    (tmp_path / "damaged" / "rounds.jsonl").write_text('{"round": 1}\n')
    assert "not the record of round 1" in error_message(
        lambda: track([tmp_path / "damaged"], tensorboard=tmp_path / "boards")
    )
    (tmp_path / "damaged" / "rounds.jsonl").unlink()
    assert "are missing" in error_message(lambda: track([tmp_path / "damaged"], tensorboard=tmp_path / "boards"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "tracker"),
    [
        ("tensorboard", "tensorboard"),
        ("mlflow", "mlflow"),
        ("wandb", "wandb"),
        ("sqlalchemy", "mlflow"),
        ("alembic", "mlflow"),
    ],
)
def test_missing_library_gives_installation_command(library: str, tracker: str, runs: Path, tmp_path: Path) -> None:
    """Use a new process, because the library may already be imported in this one."""
    command = ["fedtailor", "track", str(runs / "apa"), f"--{tracker}", f"sqlite:///{tmp_path}/somewhere"]
    setup = f"import sys; sys.modules[{library!r}] = None; sys.argv = {command!r}"
    code = f"{setup}; from fedtailor.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and f"pip install 'fedtailor[{tracker}]'" in done.stderr


def test_track_command_prints_progress(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["fedtailor", "track", str(runs / "apa"), "--tensorboard", str(tmp_path / "boards"), "--follow"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert capsys.readouterr().out.startswith(f"apa: sent all rounds up to {ROUNDS} to TensorBoard's folder")


@pytest.mark.slow
def test_tensorboard_server_shows_run(runs: Path, boards: Path) -> None:
    """Query TensorBoard's server, whose default loader ignores data that it does not support."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--logdir", str(boards), "--host", "127.0.0.1", "--port", str(port)]
    program = [sys.executable, "-m", "tensorboard.main", *options]
    with subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True) as server:

        def fetch(path: str, body: bytes | None = None) -> Any:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/data/{path}", body)
            request.add_header("Content-Type", "application/json")
            with suppress(OSError), urllib.request.urlopen(request) as response:
                return json.load(response)

        try:
            wait_until(server, lambda: set(fetch("runs") or []) == {"apa", "local"})
            scalars_path = "plugin/scalars/scalars?run=apa&tag=accuracy/trained"
            wait_until(server, lambda: len(fetch(scalars_path) or []) == ROUNDS // 2)
            values = [(step, value) for _, step, value in fetch(scalars_path)]
            assert values == expected_scalars(ft.load_run(runs / "apa"), float32=True)["accuracy/trained"]
            assert len(fetch("plugin/histograms/histograms?run=apa&tag=per_client/accuracy_trained")) == ROUNDS // 2
            query = {"allowedStatuses": ["STATUS_SUCCESS"], "colParams": [], "startIndex": 0, "sliceSize": 10}
            rows = fetch("plugin/hparams/session_groups", json.dumps(query).encode())["sessionGroups"]
            assert {row["hparams"]["fedtailor.method"] for row in rows} == {"local", "fedapa"}
        finally:
            server.terminate()
