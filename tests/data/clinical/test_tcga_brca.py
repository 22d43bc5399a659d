"""Fed-TCGA-BRCA: FLamby's layout, its test set, splits with events on both sides, and errors that name file and row."""

import csv
from pathlib import Path

import numpy as np
import pytest

import fedtailor as ft
from conftest import error_message
from fedtailor.data.clinical.tcga_brca import NUM_FEATURES, PATIENTS, REGIONS, SPLIT, read_tcga_brca

COLUMNS = ["pid", "age", *(f"stage, {number}" for number in range(1, NUM_FEATURES)), "E", "T"]  # a comma in a name
PER_REGION = 10  # patients; the last two are for testing, and every other one has an event


def write_files(
    folder: Path, changed: dict[tuple[int, str], str] | None = None, split: list[str] | None = None
) -> Path:
    """Write 60 patients of six regions and one without a region; `changed` has other cells, by row and column."""
    rows = []
    for patient in range(6 * PER_REGION + 1):
        values = [f"P{patient}", str(30 + patient), *["0"] * (NUM_FEATURES - 1), f"{patient % 2}.0", f"{patient}.0"]
        rows.append([(changed or {}).get((patient + 2, name), v) for name, v in zip(COLUMNS, values, strict=True)])
    with (folder / PATIENTS).open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    parts = ["train"] * (PER_REGION - 2) + ["test"] * 2
    lines = [f"P{p},{parts[p % PER_REGION]},{parts[p % PER_REGION]}_{p // PER_REGION}" for p in range(6 * PER_REGION)]
    (folder / SPLIT).write_text("\n".join(["pid,fold,fold2", *(lines if split is None else split)]) + "\n")
    return folder


def test_patients_have_the_events_times_regions_and_test_set_of_the_files(tmp_path: Path) -> None:
    fed = ft.load("tcga-brca", folder=str(write_files(tmp_path)), test="publisher", standardize=False)
    assert fed.names == REGIONS and fed.shape == (39,) and fed.task == "survival"
    assert "survival times with 30 events" in repr(fed)
    for region in range(6):
        train, test = fed.train[region], fed.test[region]
        first = region * PER_REGION
        assert fed.x[train, 0].tolist() == [30 + first + n for n in range(8)]
        assert fed.y[test].tolist() == [[0.0, first + 8.0], [1.0, first + 9.0]]  # event, time


def test_split_is_stratified_by_event_and_drawn_anew_for_every_seed(tmp_path: Path) -> None:
    folder = str(write_files(tmp_path))
    feds = [ft.load("tcga-brca", folder=folder, seed=seed) for seed in range(5)]
    for fed in feds:
        assert [len(test) for test in fed.test] == [2] * 6
        assert all(fed.y[test, 0].sum() == 1 for test in fed.test)
    assert len({tuple(fed.test[0].tolist()) for fed in feds}) > 1


def test_features_are_standardized_by_own_training_patients(tmp_path: Path) -> None:
    fed = ft.load("tcga-brca", folder=str(write_files(tmp_path)))
    for train in fed.train:
        age = fed.x[train, 0].double()
        assert float(age.mean()) == pytest.approx(0, abs=1e-6) and float(age.std()) == pytest.approx(1)
    assert not fed.x[:, 1:].any()  # constant: only shifted


def test_survival_data_can_be_partitioned_by_event(tmp_path: Path) -> None:
    fed = ft.load("tcga-brca", folder=str(write_files(tmp_path)), partition="iid", clients=3)
    assert fed.num_clients == 3 and all(fed.y[train, 0].any() for train in fed.train)


def test_folder_is_needed_because_the_data_cannot_be_downloaded() -> None:
    message = error_message(lambda: ft.load("tcga-brca"))
    assert "cannot be downloaded" in message and PATIENTS in message and "data.folder" in message


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({(5, "E"): "2"}, "Row 5 of"),
        ({(7, "T"): "-3"}, "a number of days in the column 'T', got '-3'"),
        ({(3, "age"): "old"}, "a number in the column 'age', got 'old'"),
        ({(3, "age"): ""}, "Row 3 of"),
        ({(3, "pid"): "P0"}, "lacks the patient P1"),
        ({(62, "pid"): "P0"}, "two rows"),
    ],
)
def test_damaged_patient_is_named(tmp_path: Path, changed: dict[tuple[int, str], str], named: str) -> None:
    assert named in error_message(lambda: read_tcga_brca(write_files(tmp_path, changed)))


@pytest.mark.parametrize(
    ("split", "named"), [(["P0,train,train_6"], "got fold2 'train_6'"), (["P0,train"], "Row 2"), ([], "no rows")]
)
def test_damaged_split_is_named(tmp_path: Path, split: list[str], named: str) -> None:
    assert named in error_message(lambda: read_tcga_brca(write_files(tmp_path, split=split)))


def test_file_without_expected_columns_or_with_other_bytes_is_named(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / PATIENTS).write_text("pid,age,E,T\nP0,50,1,3\n")
    assert "39 covariates" in error_message(lambda: read_tcga_brca(tmp_path))
    (tmp_path / PATIENTS).write_bytes(bytes(range(256)))
    assert "cannot be read" in error_message(lambda: read_tcga_brca(tmp_path))
    (tmp_path / PATIENTS).unlink()
    (tmp_path / PATIENTS).symlink_to(Path(__file__))
    assert "leads out of" in error_message(lambda: read_tcga_brca(tmp_path))


def test_data_set_trains_with_its_default_network(tmp_path: Path) -> None:
    fed = ft.load("tcga-brca", folder=str(write_files(tmp_path)))
    run = ft.simulate(ft.methods.FedAvg(), ft.network("logistic", fed), fed, rounds=1)
    assert run.info["score"] == "c_index" and np.isfinite(run.records[-1]["c_index_trained"])
