"""The folder of a run may come from anybody, with right seals and lies under them: it is served or refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import fedtailor as ft
from fedtailor import resuming
from fedtailor.data import datasets
from fedtailor.data.datasets import Dataset
from fedtailor.lines import without_nan
from fedtailor.run import MOMENTS
from fedtailor.see import looking, one_client
from fedtailor.see.report import report
from fedtailor.table import run_table
from fedtailor.tracking.track import track
from fuzzing import Reader, fuzz
from live_page import watched
from odd_runs import Change, changed, changes, whole_run

NOTHING = (0, b"\7\0\0\0\0\0", True)  # nothing is put in between, and the seals are as they should be


def look_at(change: Change, folder: Path) -> None:
    """Open a finished run and look at all there is."""
    with changed(whole_run(finished=True), change, folder):
        run = ft.open(folder)
        run_table(run)
        for client in range(run.num_clients):
            run.client(client)
            for moment in MOMENTS:
                run.personal(client, moment)
        for name in {name for record in run.records for name in record["monitor"]}:
            run.monitor(name)


def go_on(change: Change, folder: Path) -> None:
    with changed(whole_run(finished=False), change, folder):
        ft.resume(folder)


def report_on(change: Change, folder: Path) -> None:
    with changed(whole_run(finished=True), change, folder):
        report([ft.open(folder)])


def follow(change: Change, folder: Path) -> None:
    """All that the live page shows of a run and its clients."""
    with changed(whole_run(finished=True), change, folder / "run"):
        _, found = watched(folder)
        for run in found.values():
            json.dumps(without_nan([run.row(), looking.opened(run)]), allow_nan=False)
            if run.state == "unreadable":
                raise ft.Refused(run.words)
            one_client.clients(run, "trained", True, "", 0)
            for client in range(len((run.info or {"clients": []})["clients"])):
                one_client.client(run, client)


def put_into_tensorboard(change: Change, folder: Path) -> None:
    shutil.rmtree(folder / "boards", ignore_errors=True)
    with changed(whole_run(finished=True), change, folder / "run"):
        track([folder / "run"], tensorboard=folder / "boards")


WAYS = {
    "open": look_at,
    "resume": go_on,
    "report": report_on,
    "live": follow,
    "tensorboard": put_into_tensorboard,
}
READERS = {name: Reader(way, NOTHING, changes()) for name, way in WAYS.items()}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set of eighty pictures of sixteen bytes, and no warnings of what was damaged."""
    x = np.random.default_rng(0).integers(0, 256, (80, 1, 4, 4)).astype(np.uint8)
    monkeypatch.setitem(datasets.DATASETS, "digits", Dataset(lambda folder: (x, np.arange(80) % 3), "mlp", "tiny"))
    monkeypatch.setattr(resuming.log, "disabled", True)


def test_a_hostile_run_is_served_or_refused(tmp_path: Path) -> None:
    fuzz(READERS["open"], 1, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of sums of numbers as large as numbers can be
@pytest.mark.parametrize("name", READERS)
def test_thousands_of_hostile_runs(name: str, tmp_path: Path) -> None:
    fuzz(READERS[name], 3, tmp_path)
