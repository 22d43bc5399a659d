"""The four hospitals: provenance, features, splits, and standardization by each hospital's own training samples."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedtailor as ft
from conftest import error_message
from fedtailor.data.clinical.heart import HOSPITALS, PUBLISHED_COLUMNS, SHIPPED, TABLE, read_shipped, read_uci_heart
from fedtailor.data.standardization import standardize_by_client
from fedtailor.export.prediction import predict

PUBLISHED_ROW = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0"  # the first of processed.cleveland.data
FIRST_PATIENT = [63, 1, 145, 233, 1, 150, 0, 2.3, 0, 0, 0, 0, 1]  # typical angina (cp 1), ECG with hypertrophy (2)


def write_published(folder: Path, **rows: list[str]) -> Path:
    for hospital in HOSPITALS:
        (folder / f"processed.{hospital}.data").write_text("\n".join(rows.get(hospital, [PUBLISHED_ROW])) + "\n")
    return folder


def test_heart_has_published_counts() -> None:
    fed = ft.load("heart")
    sizes = [len(train) + len(test) for train, test in zip(fed.train, fed.test, strict=True)]
    assert fed.names == ("Cleveland", "Hungary", "Switzerland", "Long Beach VA") and sizes == [303, 261, 46, 130]
    assert fed.shape == (13,) and len(TABLE.features) == 13
    owned = [torch.cat(pair) for pair in zip(fed.train, fed.test, strict=True)]
    assert [fed.class_counts(own) for own in owned] == [[164, 139], [163, 98], [1, 45], [29, 101]]


def test_heart_first_patient_is_that_of_publisher(tmp_path: Path) -> None:
    """By hand: PUBLISHED_ROW without slope, ca, and thal, one-hot without first levels."""
    for table in (read_shipped(), read_uci_heart(write_published(tmp_path))):
        assert isinstance(table.x, np.ndarray)
        np.testing.assert_array_equal(table.x[0], np.array(FIRST_PATIENT, np.float32))
        assert table.y[0] == 0 and table.class_names is not None and table.class_names[0] == "no disease"


def test_read_uci_heart_drops_incomplete_patients_and_unused_columns(tmp_path: Path) -> None:
    fields = PUBLISHED_ROW.split(",")

    def with_value(column: str, value: str) -> str:
        return ",".join(value if name == column else old for name, old in zip(PUBLISHED_COLUMNS, fields, strict=True))

    rows = [with_value("chol", "?"), with_value("thal", "?"), with_value("num", "3"), with_value("cp", "4")]
    table = read_uci_heart(write_published(tmp_path, va=rows))
    assert table.owner is not None and isinstance(table.x, np.ndarray)
    assert np.bincount(table.owner).tolist() == [1, 1, 1, 3], "only the patient without cholesterol is left out"
    own = table.owner == 3
    assert table.y[own].tolist() == [0, 1, 0]
    assert table.x[own][:, TABLE.feature_names.index("cp=4")].tolist() == [0, 0, 1]


def test_flamby_test_set_is_drawn_by_sklearn() -> None:
    """FLamby: 66 % for training, seed 43, stratified where both classes have more than two patients."""
    from sklearn.model_selection import train_test_split

    fed, table = ft.load("heart", test="publisher"), read_shipped()
    assert [len(train) for train in fed.train] == [199, 172, 30, 85], "as FLamby documents"
    for client in range(4):
        own = np.flatnonzero(table.owner == client)
        strata = table.y[own] if np.bincount(table.y[own], minlength=2).min() > 2 else None
        _, test = train_test_split(own, train_size=0.66, test_size=0.34, random_state=43, stratify=strata)
        assert sorted(test) == sorted(fed.test[client].tolist())


def test_heart_split_is_stratified_and_has_the_only_healthy_swiss_patient_on_either_side() -> None:
    sides = set()
    for seed in range(12):
        fed = ft.load("heart", seed=seed)
        assert all(abs(len(test) - 0.34 * n) < 1 for test, n in zip(fed.test, (303, 261, 46, 130), strict=True))
        counts = [fed.class_counts(test) or [] for test in fed.test]
        for (negatives, _), total in zip(counts, (164, 163, 1, 29), strict=True):
            assert abs(negatives - 0.34 * total) < 1
        sides.add(counts[2][0])
    assert sides == {0, 1}


def test_heart_is_standardized_by_own_training_samples_only() -> None:
    raw, fed = ft.load("heart", standardize=False), ft.load("heart")
    for train, test in zip(fed.train, fed.test, strict=True):
        x, spread = raw.x[train].double(), raw.x[train].double().std(0)
        expected = (raw.x[test].double() - x.mean(0)) / torch.where(spread > 0, spread, 1)
        torch.testing.assert_close(fed.x[test].double(), expected, rtol=1e-4, atol=1e-5)
    switzerland = torch.cat([fed.train[2], fed.test[2]])
    assert not fed.x[switzerland, TABLE.feature_names.index("chol")].any(), (
        "not measured there: 0 for everyone, so a constant"
    )


def test_standardization_ignores_test_samples_and_other_clients() -> None:
    raw = ft.load("heart", standardize=False)
    changed = raw.x.clone()
    changed[torch.cat([raw.train[1], raw.test[1], raw.test[0]])] *= 100
    before, after = (standardize_by_client(replace(raw, x=x)) for x in (raw.x, changed))
    for samples in (raw.train[0], raw.train[2], raw.test[2], raw.train[3], raw.test[3]):
        assert torch.equal(before.x[samples], after.x[samples])
    torch.testing.assert_close(before.x[raw.train[1]], after.x[raw.train[1]], rtol=1e-4, atol=1e-4)


def test_standardization_of_common_test_set_uses_all_training_samples() -> None:
    raw, fed = (ft.load("heart", common_test=0.2, standardize=standardize) for standardize in (False, True))
    assert raw.common_test is not None
    train = raw.x[torch.cat(raw.train)].double()
    expected = (raw.x[raw.common_test].double() - train.mean(0)) / train.std(0)
    torch.testing.assert_close(fed.x[raw.common_test].double(), expected, rtol=1e-4, atol=1e-5)


def test_heart_run_has_balanced_accuracy_and_undefined_auc_for_a_single_class() -> None:
    """Always predicting disease is right for the Swiss majority, and right for half of two classes."""
    fed = ft.load("heart", test="publisher")
    model = ft.network("logistic", fed)
    bias = {"head.weight": torch.zeros(2, 13), "head.bias": torch.tensor([0.0, 50.0])}
    run = ft.simulate(
        ft.methods.Local(lr=1e-9), model, fed, rounds=1, initial_weights=bias, engine="sequential",
        metrics=["accuracy", "balanced_accuracy", "auc"],
    )  # fmt: skip
    assert run.scores("trained", score="accuracy")[2] == pytest.approx(15 / 16)
    assert set(run.scores("trained", score="balanced_accuracy").values()) == {0.5}


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (["1,2,3"], "Row 1 of"),
        ([PUBLISHED_ROW, PUBLISHED_ROW.replace("63.0", "old")], "Row 2 of"),
        ([PUBLISHED_ROW.replace("145.0", "nan")], "Row 1 of"),
        ([PUBLISHED_ROW.replace("145.0", "?")], "no patient with all values"),
        ([PUBLISHED_ROW.replace("1.0,1.0,145", "1.0,7.0,145")], "The column cp"),
    ],
)
def test_read_uci_heart_with_damaged_file_names_problem(tmp_path: Path, rows: list[str], named: str) -> None:
    folder = write_published(tmp_path, hungarian=rows)
    assert named in error_message(lambda: ft.load("heart", folder=str(folder)))


def test_read_uci_heart_with_missing_file_names_it(tmp_path: Path) -> None:
    (write_published(tmp_path) / "processed.va.data").unlink()
    assert "lacks processed.va.data" in error_message(lambda: ft.load("heart", folder=str(tmp_path)))
    without_split = write_published(tmp_path)
    assert "no test set" in error_message(lambda: ft.load("heart", folder=str(without_split), test="publisher"))


def test_shipped_file_can_be_read_and_has_its_license_beside_it() -> None:
    with SHIPPED.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 740
    text = (SHIPPED.parent / "heart.LICENSE.txt").read_text()
    assert "Janosi" in text and "CC BY 4.0" in text


def test_model_of_heart_predicts_raw_rows_of_its_hospital(tmp_path: Path) -> None:
    """The shipped file has the original columns; its first 303 rows are Cleveland's, which it standardizes itself."""
    pytest.importorskip("pandas")
    fed = ft.load("heart")
    run = ft.simulate(ft.methods.FedAvg(), ft.network("logistic", fed), fed, rounds=1, folder=tmp_path / "run")
    assert run.folder is not None
    model = ft.load_personal(run.folder, 0)
    found = predict(model, SHIPPED)
    with torch.no_grad():
        torch.testing.assert_close(found.outputs[:303], model(fed.x[:303]))
    assert {row[1] for row in found.rows()[1]} == {"no disease", "disease"}
