"""The folder of a run may come from anybody, with right seals and lies under them: it is opened, resumed or refused."""

from pathlib import Path

import numpy as np
import pytest

import fedtailor as ft
from fedtailor import resuming
from fedtailor.data import datasets
from fedtailor.data.datasets import Dataset
from fedtailor.run import MOMENTS
from fedtailor.table import run_table
from fuzzing import Reader, fuzz
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


READERS = {"open": Reader(look_at, NOTHING, changes()), "resume": Reader(go_on, NOTHING, changes())}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set of eighty pictures of sixteen bytes, and no warnings of what was damaged."""
    x = np.random.default_rng(0).integers(0, 256, (80, 1, 4, 4)).astype(np.uint8)
    monkeypatch.setitem(datasets.DATASETS, "digits", Dataset(lambda folder: (x, np.arange(80) % 3), "mlp", "tiny"))
    monkeypatch.setattr(resuming.log, "disabled", True)


@pytest.mark.parametrize("name", ["open", pytest.param("resume", marks=pytest.mark.slow)])
def test_a_hostile_run_is_served_or_refused(name: str, tmp_path: Path) -> None:
    fuzz(READERS[name], 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_thousands_of_hostile_runs(name: str, tmp_path: Path) -> None:
    fuzz(READERS[name], 3, tmp_path)
