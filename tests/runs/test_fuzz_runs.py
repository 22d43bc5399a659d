"""Damaged run folders are either read or rejected; viewing also survives invalid values with valid checksums."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.analysis.tables import run_table
from fedtailor.data import datasets
from fedtailor.data.datasets import Dataset
from fedtailor.experiments import resume
from fedtailor.reporting.dashboard.client_view import client_details, client_list
from fedtailor.reporting.dashboard.views import run_details
from fedtailor.reporting.report import report
from fedtailor.reporting.trackers.track import track
from fedtailor.runs.records import nan_to_none
from fedtailor.runs.run import MOMENTS
from support.corrupted_runs import Change, changed_run, changes, run_files
from support.dashboard_client import read_runs
from support.fuzzing import Reader, fuzz

NO_CHANGE = (0, b"\7\0\0\0\0\0", True)  # inserts nothing and updates the checksums


def load_all(change: Change, folder: Path) -> None:
    """Load a finished run with all its states, models, and metrics."""
    with changed_run(run_files(finished=True), change, folder):
        run = ft.load_run(folder)
        run_table(run)
        for client in range(run.num_clients):
            run.client(client)
            for moment in MOMENTS:
                run.personal(client, moment)
        for name in {name for record in run.records for name in record["method_metrics"]}:
            run.metric(name)


def resume_run(change: Change, folder: Path) -> None:
    with changed_run(run_files(finished=False), change, folder):
        ft.resume(folder)


def make_report(change: Change, folder: Path) -> None:
    with changed_run(run_files(finished=True), change, folder):
        report([ft.load_run(folder)])


def show_on_dashboard(change: Change, folder: Path) -> None:
    """Build everything that the dashboard shows of a run and its clients."""
    with changed_run(run_files(finished=True), change, folder / "run"):
        _, found = read_runs(folder)
        for run in found.values():
            json.dumps(nan_to_none([run.row(), run_details(run)]), allow_nan=False)
            if run.state == "unreadable":
                raise ft.FedTailorError(run.message)
            client_list(run, "trained", True, "", 0)
            for client in range(len((run.info or {"clients": []})["clients"])):
                client_details(run, client)


def write_tensorboard(change: Change, folder: Path) -> None:
    shutil.rmtree(folder / "boards", ignore_errors=True)
    with changed_run(run_files(finished=True), change, folder / "run"):
        track([folder / "run"], tensorboard=folder / "boards")


VIEWERS = {"report": make_report, "dashboard": show_on_dashboard, "tensorboard": write_tensorboard}
READERS = {name: Reader(view, NO_CHANGE, changes(update_checksums=True)) for name, view in VIEWERS.items()}
for name, read in {"load": load_all, "resume": resume_run}.items():  # of a folder that may be damaged
    READERS[name] = Reader(read, NO_CHANGE, changes(update_checksums=False))


@pytest.fixture(autouse=True)
def tiny_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a data set of 80 tiny images, and disable warnings about damaged checkpoints."""
    x = np.random.default_rng(0).integers(0, 256, (80, 1, 4, 4)).astype(np.uint8)
    monkeypatch.setitem(datasets.DATASETS, "digits", Dataset(lambda folder: (x, np.arange(80) % 3), "mlp", "tiny"))
    monkeypatch.setattr(resume.log, "disabled", True)


def test_load_untrusted_run_is_read_or_rejected(tmp_path: Path) -> None:
    fuzz(READERS["load"], 1, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about overflow
@pytest.mark.parametrize("name", READERS)
def test_reader_many_untrusted_runs_are_read_or_rejected(name: str, tmp_path: Path) -> None:
    fuzz(READERS[name], 1, tmp_path)
