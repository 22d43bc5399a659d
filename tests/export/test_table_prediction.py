"""Models of tables predict raw files with the original columns, from run folders and from exported files."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedtailor as ft
from conftest import error_message
from fedtailor.data.input_spec import InputSpec
from fedtailor.export.client_predictions import predict_clients
from fedtailor.export.personal_model import PersonalModel, load_all_personal
from fedtailor.export.prediction import predict, read_samples
from fedtailor.export.writers import export_model, export_models


def patients(rows: int, seed: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    age = random.normal(60 + 10 * seed, 12, rows).round(1)
    frame = pd.DataFrame(
        {"age": age, "ward": random.choice(["A", "B", "C"], rows), "smoker": random.choice([0, 1], rows)}
    )
    frame["admitted"] = pd.Timestamp("2020-03-01") + pd.to_timedelta(random.integers(0, 99, rows), "D")
    frame["outcome"] = np.where(age > 60 + 10 * seed, "dead", "alive")
    frame.loc[::9, "age"] = np.nan
    return frame


def inputs_of(model: torch.nn.Module) -> InputSpec:
    assert isinstance(model, PersonalModel)
    return model.info.inputs


@pytest.fixture(params=["federation", "site"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ft.Federation, Path]:
    for seed, site in enumerate(("north", "south")):
        patients(40, seed).to_csv(tmp_path / f"{site}.csv", index=False)
    files = {site: tmp_path / f"{site}.csv" for site in ("north", "south")}
    fed = ft.Federation.from_tables(files, target="outcome", fit=request.param, missing_indicator=True)
    ft.simulate(ft.methods.FedAvg(), ft.network("mlp", fed), fed, rounds=3, folder=tmp_path / "run")
    return fed, tmp_path


def test_predictions_of_raw_file_are_those_of_preprocessed_rows(run: tuple[ft.Federation, Path]) -> None:
    fed, folder = run
    for client, site in enumerate(fed.names):
        model = ft.load_personal(folder / "run", client)
        found = predict(model, folder / f"{site}.csv")
        own = torch.cat([fed.train[client], fed.test[client]]).sort().values
        with torch.no_grad():
            assert torch.equal(found.outputs, model(fed.x[own]))
        frame = pd.read_csv(folder / f"{site}.csv", index_col=False).rename(index=lambda row: f"patient {row}")
        named = predict(model, frame)
        assert torch.equal(named.outputs, found.outputs) and named.samples[3] == "patient 3"
        labels = [row[1] for row in found.rows()[1]]
        assert set(labels) <= {"alive", "dead"} and len(labels) == 40


def test_exported_files_predict_raw_files(run: tuple[ft.Federation, Path]) -> None:
    fed, folder = run
    file = folder / "south.csv"
    expected = [predict(model, file).outputs for model in load_all_personal(folder / "run")]
    for kind in ("safetensors", "onnx"):
        export_models(load_all_personal(folder / "run"), folder / kind, kind)
        for client in range(2):
            found = predict(ft.load_personal(folder / kind / f"{client:03d}.{kind}"), file)
            torch.testing.assert_close(found.outputs, expected[client], atol=1e-5, rtol=1e-5)
    for one, outputs in zip(predict_clients(folder / "run", file), expected, strict=True):
        torch.testing.assert_close(one.predictions.outputs, outputs)
    for client, one in enumerate(predict_clients(folder / "run")):  # the tables are read again
        assert list(one.predictions.samples) == fed.test[client].tolist()


def test_exported_model_has_statistics_of_its_own_site_only(run: tuple[ft.Federation, Path]) -> None:
    fed, folder = run
    assert fed.table is not None
    path = export_model(ft.load_personal(folder / "run", 0), folder / "model.safetensors")
    table = inputs_of(ft.load_personal(path)).table
    assert table is not None and list(table.statistics) == (["north"] if len(fed.table.statistics) == 2 else [""])
    assert b"south" not in path.read_bytes()


def test_graph_takes_rows_with_one_number_per_column(run: tuple[ft.Federation, Path]) -> None:
    """For other programs: age, position of the category, 0 or 1, days since 1970; NaN is missing."""
    onnxruntime = pytest.importorskip("onnxruntime")
    _fed, folder = run
    model = ft.load_personal(folder / "run", 0)
    path = export_model(model, folder / "model.onnx")
    new = pd.DataFrame({"age": [70.5, None], "ward": ["B", "Z"], "smoker": [1, None], "admitted": ["1970-01-03", "NA"]})
    new.to_csv(folder / "new.csv", index=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    rows = np.array([[70.5, 1, 1, 2], [np.nan, -1, np.nan, np.nan]])
    outputs = session.run(None, {"inputs": rows})[0]
    np.testing.assert_allclose(outputs, predict(model, folder / "new.csv").outputs.numpy(), rtol=1e-4, atol=1e-5)


def test_unseen_category_is_no_category_and_is_reported(
    run: tuple[ft.Federation, Path], caplog: pytest.LogCaptureFixture
) -> None:
    fed, folder = run
    model = ft.load_personal(folder / "run", 1)
    patients(3, 0).assign(ward=["A", "Z", "Z"]).to_parquet(folder / "new.parquet")
    _, x = read_samples(folder / "new.parquet", inputs_of(model))
    assert fed.table is not None
    wards = [number for number, name in enumerate(fed.table.feature_names) if name.startswith("ward=")]
    assert isinstance(x, torch.Tensor) and x[:, wards].tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert "the column 'ward' has categories that the model does not know, such as 'Z', in 2 rows" in caplog.text


def test_column_that_is_missing_or_wrong_at_prediction_is_named(run: tuple[ft.Federation, Path]) -> None:
    _, folder = run
    model = ft.load_personal(folder / "run", 0)
    new = patients(4, 0).drop(columns="outcome")
    new.drop(columns="smoker").to_csv(folder / "new.csv", index=False)
    assert "lacks the column 'smoker'" in error_message(lambda: predict(model, folder / "new.csv"))
    new.assign(age=["71", "old", "70", "69"]).to_csv(folder / "new.csv", index=False)
    message = error_message(lambda: predict(model, folder / "new.csv"))
    assert "Row 3 of " in message and "has 'old' in the column 'age'" in message
    new.assign(smoker=[0, 1, 2, 1]).to_csv(folder / "new.csv", index=False)
    assert "has '2' in the column 'smoker', which must be a boolean" in error_message(
        lambda: predict(model, folder / "new.csv")
    )


def test_new_rows_that_can_be_read_in_two_ways_take_the_training_files_format(tmp_path: Path) -> None:
    """A file of many rows shows which number is the month; one row does not, and empty rows keep their number."""
    frame = patients(40, 0)
    frame["admitted"] = frame["admitted"].dt.strftime("%d/%m/%Y")
    frame["age"] = frame["age"].map(lambda age: "" if np.isnan(age) else f"{age:.3f}")
    frame.to_csv(tmp_path / "a.csv", index=False)
    fed = ft.Federation.from_tables({"a": tmp_path / "a.csv"}, target="outcome", decimal=".")
    ft.simulate(ft.methods.FedAvg(), ft.network("mlp", fed), fed, rounds=1, folder=tmp_path / "run")
    model = ft.load_personal(tmp_path / "run", 0)
    (tmp_path / "new.csv").write_text("age,ward,smoker,admitted\n,,,\n61.500,A,1,03/04/2020\n")
    assert "set decimal" in error_message(lambda: predict(model, tmp_path / "new.csv"))
    assert "set date_format" in error_message(lambda: predict(model, tmp_path / "new.csv", decimal="."))
    found = predict(model, tmp_path / "new.csv", decimal=".", date_format="%d/%m/%Y")
    plain = pd.DataFrame({"age": [61.5], "ward": ["A"], "smoker": [1], "admitted": [pd.Timestamp("2020-04-03")]})
    assert torch.equal(found.outputs, predict(model, plain).outputs) and found.samples == ["1"]
    [every] = predict_clients(tmp_path / "run", tmp_path / "new.csv", decimal=".", date_format="%d/%m/%Y")
    assert torch.equal(every.predictions.outputs, found.outputs)
