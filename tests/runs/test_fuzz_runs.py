"""Damaged run folders are either read or rejected; viewing also survives invalid values with valid checksums."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.analysis.tables import run_table
from fedtailor.data.images.datasets import Digits
from fedtailor.data.sample_table import SampleTable
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


def load_all(folder: Path) -> None:
    """Load a finished run with all its states, models, and metrics."""
    run = ft.load_run(folder)
    run_table(run)
    for client in range(run.num_clients):
        run.client(client)
        for moment in MOMENTS:
            run.personal(client, moment)
    for name in {name for record in run.records for name in record["method_metrics"]}:
        run.metric(name)


def show_on_dashboard(folder: Path) -> None:
    """Build everything that the dashboard shows of a run and its clients."""
    _, found = read_runs(folder.parent)
    for run in found.values():
        json.dumps(nan_to_none([run.row(), run_details(run)]), allow_nan=False)
        if run.state == "unreadable":
            raise ft.FedTailorError(run.message)
        client_list(run, "trained", True, "", 0)
        for client in range(len((run.info or {"clients": []})["clients"])):
            client_details(run, client)


def write_tensorboard(folder: Path) -> None:
    shutil.rmtree(folder.parent / "boards", ignore_errors=True)
    track([folder], tensorboard=folder.parent / "boards")


def reader(use: Callable[[Path], object], finished: bool = True, is_viewer: bool = True) -> Reader:
    """Return a reader of runs that may be damaged; viewers also get invalid values with valid checksums."""

    def read(change: Change, folder: Path) -> None:
        with changed_run(run_files(finished), change, folder / "run") as changed:
            use(changed)

    return Reader(read, NO_CHANGE, changes(update_checksums=is_viewer))


READERS = {
    "report": reader(lambda folder: report([ft.load_run(folder)])),
    "dashboard": reader(show_on_dashboard),
    "tensorboard": reader(write_tensorboard),
    "load": reader(load_all, is_viewer=False),
    "resume": reader(ft.resume, finished=False, is_viewer=False),
}


@pytest.fixture(autouse=True)
def tiny_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a data set of 80 tiny images, and disable warnings about damaged checkpoints."""
    x = np.random.default_rng(0).integers(0, 256, (80, 1, 4, 4)).astype(np.uint8)
    monkeypatch.setattr(Digits, "read", lambda data: SampleTable(x, np.arange(80) % 3, 3))
    monkeypatch.setattr(resume.log, "disabled", True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about overflow
@pytest.mark.parametrize("name", ["load", *(pytest.param(n, marks=pytest.mark.slow) for n in READERS if n != "load")])
def test_reader_untrusted_run_is_read_or_rejected(name: str, tmp_path: Path) -> None:
    fuzz(READERS[name], 1, tmp_path)
