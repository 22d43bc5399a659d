"""Predictions for new samples match the evaluation, and invalid samples give clear errors."""

import csv
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import fedtailor as ft
from conftest import error_message
from fedtailor.cli.app import app
from fedtailor.export.personal_model import PersonalModel
from fedtailor.export.prediction import Predictions, predict
from fedtailor.export.writers import export_model
from support.exported_models import SHAPE, image_federation, load_pt2, train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """The first client's model, which takes small uint8 images."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train("fedavg", image_federation(), folder)
    return ft.load_personal(folder, 0)


def test_predict_reads_arrays_and_images(model: nn.Module, tmp_path: Path) -> None:
    x = image_federation().x[:5]
    (tmp_path / "images").mkdir()
    for number, image in enumerate(x):
        Image.fromarray(image[0].numpy()).save(tmp_path / "images" / f"{number}.png")
    np.savez(tmp_path / "x.npz", x=x.numpy())
    np.save(tmp_path / "x.npy", x.numpy())
    np.save(tmp_path / "floats.npy", x.numpy() / 255)
    with torch.no_grad():
        expected = model(x)
    for name in ("x.npz", "x.npy", "floats.npy", "images"):
        found = predict(model, tmp_path / name)
        assert found.classify and torch.allclose(found.outputs, expected, atol=1e-6)
    one = predict(model, tmp_path / "images" / "3.png")
    assert one.samples == ["3.png"] and torch.allclose(one.outputs, expected[3:4], atol=1e-6)


def test_saved_predictions_match(model: nn.Module, tmp_path: Path) -> None:
    x = image_federation().x
    np.save(tmp_path / "x.npy", x.numpy())
    found = predict(model, tmp_path / "x.npy")
    found.save(tmp_path / "p.csv")
    found.save(tmp_path / "p.npz")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "p.csv").read_text())))
    saved = np.load(tmp_path / "p.npz", allow_pickle=False)
    assert len(rows) == len(x) and saved["class"].tolist() == [int(row["class"]) for row in rows]
    for row in rows:
        probabilities = [float(row[f"probability_{k}"]) for k in range(3)]
        assert sum(probabilities) == pytest.approx(1, abs=1e-5) and max(probabilities) == float(row["probability"])
    assert np.allclose(saved["outputs"], found.outputs)
    assert ".csv or .npz" in error_message(lambda: found.save(tmp_path / "p.txt"))


def test_csv_escapes_formulas_in_names(tmp_path: Path) -> None:
    """A spreadsheet would execute names that look like formulas; image names are untrusted."""
    names = ["=HYPERLINK(1)", "+1", "-1", "@SUM(1)", "\tx", "cat.png", "a=b"]
    Predictions(names, -torch.ones(len(names), 1), classify=False).save(tmp_path / "p.csv")
    rows = list(csv.reader(io.StringIO((tmp_path / "p.csv").read_text())))[1:]
    assert [row[0] for row in rows] == [*(f"'{name}" for name in names[:5]), *names[5:]]
    assert {row[1] for row in rows} == {"-1.0"}  # values are not escaped


def test_predict_of_text_labels_gives_names_also_after_export(tmp_path: Path) -> None:
    x, y = np.tile(np.eye(3), (4, 1)), np.array(["cat", "=dog", "ant"] * 4)
    fed = ft.Federation.from_arrays([(x, y, x, y)])
    method = ft.methods.Local(lr=1.0, epochs=50)
    ft.simulate(method, ft.network("logistic", fed), fed, rounds=1, folder=tmp_path / "run")
    np.save(tmp_path / "x.npy", np.eye(3))
    exported = export_model(ft.load_personal(tmp_path / "run", 0), tmp_path / "model.safetensors")
    found = predict(ft.load_personal(exported), tmp_path / "x.npy")
    assert [row[1] for row in found.rows()[1]] == ["cat", "=dog", "ant"]
    found.save(tmp_path / "p.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "p.csv").read_text())))
    assert [row["class"] for row in rows] == ["cat", "'=dog", "ant"] and float(rows[0]["probability_cat"]) > 0.5


def test_predict_of_regression_gives_values(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(12, 3))
    y = x @ np.array([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    fed = ft.Federation.from_arrays([(x[:8], y[:8], x[8:], y[8:])])
    run = ft.simulate(ft.methods.Local(), ft.network("logistic", fed), fed, rounds=1, folder=tmp_path / "run")
    np.save(tmp_path / "x.npy", x)
    found = predict(model := ft.load_personal(tmp_path / "run", 0), tmp_path / "x.npy")
    columns, rows = found.rows()
    assert columns == ["sample", "prediction_0", "prediction_1"]
    mse = np.mean((np.array([row[1:] for row in rows[8:]]) - y[8:]) ** 2)
    assert mse == pytest.approx(run.scores("trained")[0], rel=1e-5)
    np.save(tmp_path / "bytes.npy", np.ones((2, 3), np.uint8))  # training would divide these by 255
    assert "must be float64" in error_message(lambda: predict(model, tmp_path / "bytes.npy"))


def test_predict_with_assumed_dtype_accepts_bytes_and_floats(tmp_path: Path) -> None:
    """A deployed client's folder does not record the dtype of its samples."""
    train("fedavg", fed := image_federation(), tmp_path / "run")
    model = ft.load_personal(tmp_path / "run", 0)
    assert isinstance(model, PersonalModel)
    inputs = replace(model.info.inputs, parts={"": ("float32", SHAPE)}, dtype_is_assumed=True)
    model.info = replace(model.info, inputs=inputs)
    loaded = ft.load_personal(export_model(model, tmp_path / "model.safetensors"))
    np.save(tmp_path / "bytes.npy", fed.x.numpy())
    np.save(tmp_path / "floats.npy", fed.x.numpy() / 255)
    found = [predict(loaded, tmp_path / name).outputs for name in ("bytes.npy", "floats.npy")]
    assert torch.allclose(found[0], found[1], atol=1e-5)


def test_predict_with_invalid_samples_raises_error(model: nn.Module, tmp_path: Path) -> None:
    def error_for(array: np.ndarray) -> str:
        np.save(tmp_path / "x.npy", array, allow_pickle=True)
        return error_message(lambda: predict(model, tmp_path / "x.npy"))

    assert "shape (1, 5, 5); the run's samples have shape (1, 4, 4)" in error_for(np.zeros((2, 1, 5, 5), np.uint8))
    for invalid in (np.full((2, *SHAPE), 200.0), np.full((2, *SHAPE), 200), np.full((2, *SHAPE), -0.5)):
        assert "must be uint8, or floats from 0 to 1" in error_for(invalid)
    with_nan = np.zeros((3, *SHAPE))
    with_nan[1, 0, 2, 2] = np.nan
    assert "sample 1" in error_for(with_nan) and "sample 0" in error_for(np.full((2, *SHAPE), -np.inf))
    assert "no samples" in error_for(np.zeros((0, *SHAPE), np.uint8)) and "no samples" in error_for(np.array(3))
    assert "numpy.save" in error_for(np.array([{}], dtype=object))
    assert "must be numeric" in error_for(np.full((2, *SHAPE), "a"))
    file = io.BytesIO()  # a false header
    claims = {"descr": "|u1", "fortran_order": False, "shape": (10**12, *SHAPE)}
    np.lib.format.write_array_header_1_0(file, claims)
    (tmp_path / "x.npy").write_bytes(file.getvalue() + b"123")
    assert "numpy.save" in error_message(lambda: predict(model, tmp_path / "x.npy"))
    Image.new("L", (5, 4)).save(tmp_path / "wide.png")
    assert "5×4 pixels" in error_message(lambda: predict(model, tmp_path / "wide.png"))
    Image.new("RGB", (4, 4)).save(tmp_path / "color.png")
    assert "in 3 channels" in error_message(lambda: predict(model, tmp_path / "color.png"))
    np.savez(tmp_path / "z.npz", z=np.zeros(3))
    assert "as x or x_test" in error_message(lambda: predict(model, tmp_path / "z.npz"))
    (tmp_path / "x.txt").write_text("1,2")
    assert "unsupported format" in error_message(lambda: predict(model, tmp_path / "x.txt"))


def test_predict_with_diverged_model_raises_error(tmp_path: Path) -> None:
    train("local", fed := image_federation(1), tmp_path / "run")
    model = ft.load_personal(tmp_path / "run", 0)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    np.save(tmp_path / "x.npy", fed.x.numpy())
    assert "diverged" in error_message(lambda: predict(model, tmp_path / "x.npy"))


# ---- commands


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run `fedtailor` in a temporary folder and return its output."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output.replace("\n", " ")

    return run


def test_export_and_predict_commands(call: Callable[..., str]) -> None:
    fed: Any = ft.load("digits", clients=3)
    run = train("ditto", fed, Path("run"), model=ft.network("logistic", fed))
    np.savez("samples.npz", x_test=fed.x[fed.test[2]].numpy())
    assert "client 2 (ditto, received)" in call("export", "run", "--client", "2", "--moment", "received")
    assert Path("run-client-002-received.safetensors").is_file()
    call("export", "run", "--client", "2", "-o", "two.pt2")
    assert torch.allclose(load_pt2(Path("two.pt2"))(fed.x[:3]), ft.load_personal("run", 2)(fed.x[:3]), atol=1e-6)
    assert "all 3 clients" in call("export", "run", "--all", "--format", "safetensors", "-o", "all-models")
    assert "--out saves all of them" in call("predict", "run", "samples.npz", "--client", "2")
    shown = call("predict", "run", "samples.npz", "--client", "2", "--out", "all.csv")
    rows = list(csv.DictReader(io.StringIO(Path("all.csv").read_text())))
    assert "probability" in shown and f"Saved {len(rows)} predictions to all.csv" in shown
    right = [int(row["class"]) == int(y) for row, y in zip(rows, fed.y[fed.test[2]], strict=True)]
    assert sum(right) / len(right) == pytest.approx(run.scores("trained")[2])
    call("predict", "all-models/002.safetensors", "samples.npz", "--out", "again.csv")
    assert Path("again.csv").read_text() == Path("all.csv").read_text()


def test_commands_with_contradictory_options_raise_error(call: Callable[..., str]) -> None:
    fed = image_federation(2)
    train("local", fed, Path("run"))
    np.savez("x.npz", x=fed.x.numpy())
    before = sorted(path.name for path in Path().iterdir())
    assert "not both" in error_message(lambda: call("export", "run", "--all", "--client", "1"))
    export = ["export", "run", "--client", "1", "-o"]
    assert "ends with .onnx" in error_message(lambda: call(*export, "model.onnx", "--format", "pt2"))
    assert "no format 'bin'" in error_message(lambda: call(*export, "model.bin"))
    assert "no input dtype" in error_message(lambda: call(*export, "model.pt2", "--inputs", "int64"))
    prediction = ["predict", "run", "x.npz", "--client", "0", "--out"]
    assert "contains the samples" in error_message(lambda: call(*prediction, f"../{Path.cwd().name}/x.npz"))
    assert sorted(path.name for path in Path().iterdir()) == before
