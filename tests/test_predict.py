"""What personal models say of new samples: those of the evaluation, and a sentence where samples do not fit."""

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
from conftest import refusal
from exported import SHAPE, in_torch, pictures, train
from fedtailor.cli import app
from fedtailor.personal.export import export_model
from fedtailor.personal.module import Personal
from fedtailor.personal.prediction import Predictions, predict


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """The first client's, which takes small pictures in bytes."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train("fedavg", pictures(), folder)
    return ft.load_personal(folder, 0)


def test_samples_are_read_from_arrays_and_pictures(model: nn.Module, tmp_path: Path) -> None:
    x = pictures().x[:5]
    (tmp_path / "shots").mkdir()
    for number, picture in enumerate(x):
        Image.fromarray(picture[0].numpy()).save(tmp_path / "shots" / f"{number}.png")
    np.savez(tmp_path / "x.npz", x=x.numpy())
    np.save(tmp_path / "x.npy", x.numpy())
    np.save(tmp_path / "floats.npy", x.numpy() / 255)
    with torch.no_grad():
        wanted = model(x)
    for name in ("x.npz", "x.npy", "floats.npy", "shots"):
        found = predict(model, tmp_path / name)
        assert found.classify and torch.allclose(found.outputs, wanted, atol=1e-6)
    one = predict(model, tmp_path / "shots" / "3.png")
    assert one.samples == ["3.png"] and torch.allclose(one.outputs, wanted[3:4], atol=1e-6)


def test_predictions_are_kept(model: nn.Module, tmp_path: Path) -> None:
    x = pictures().x
    np.save(tmp_path / "x.npy", x.numpy())
    found = predict(model, tmp_path / "x.npy")
    found.save(tmp_path / "p.csv")
    found.save(tmp_path / "p.npz")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "p.csv").read_text())))
    kept = np.load(tmp_path / "p.npz", allow_pickle=False)
    assert len(rows) == len(x) and kept["class"].tolist() == [int(row["class"]) for row in rows]
    for row in rows:
        shares = [float(row[f"probability_{k}"]) for k in range(3)]
        assert sum(shares) == pytest.approx(1, abs=1e-5) and max(shares) == float(row["probability"])
    assert np.allclose(kept["outputs"], found.outputs)
    assert ".csv or .npz" in refusal(lambda: found.save(tmp_path / "p.txt"))


def test_names_of_pictures_are_no_formulas(tmp_path: Path) -> None:
    """A spreadsheet computes what begins like one; who named the pictures need not be who opens the table."""
    names = ["=HYPERLINK(1)", "+1", "-1", "@SUM(1)", "\tx", "cat.png", "a=b"]
    Predictions(names, -torch.ones(len(names), 1), classify=False).save(tmp_path / "p.csv")
    rows = list(csv.reader(io.StringIO((tmp_path / "p.csv").read_text())))[1:]
    assert [row[0] for row in rows] == [*(f"'{name}" for name in names[:5]), *names[5:]]
    assert {row[1] for row in rows} == {"-1.0"}  # numbers stay numbers


def test_numbers_are_predicted_as_numbers(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(12, 3))
    y = x @ np.array([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    fed = ft.Federation.from_arrays([(x[:8], y[:8], x[8:], y[8:])])
    run = ft.simulate(ft.methods.Local(), ft.network("logistic", fed), fed, rounds=1, folder=tmp_path / "run")
    np.save(tmp_path / "x.npy", x)
    found = predict(own := ft.load_personal(tmp_path / "run", 0), tmp_path / "x.npy")
    heads, rows = found.rows()
    assert heads == ["sample", "prediction_0", "prediction_1"]
    mse = np.mean((np.array([row[1:] for row in rows[8:]]) - y[8:]) ** 2)
    assert mse == pytest.approx(run.scores("trained")[0], rel=1e-5)
    np.save(tmp_path / "bytes.npy", np.ones((2, 3), np.uint8))  # training would have divided these by 255
    assert "the run's are float64" in refusal(lambda: predict(own, tmp_path / "bytes.npy"))


def test_where_nobody_knows_the_dtype_bytes_are_as_good_as_floats(tmp_path: Path) -> None:
    """A real client's folder does not say what it trained on; for bytes it answers as training saw them."""
    train("fedavg", fed := pictures(), tmp_path / "run")
    known = ft.load_personal(tmp_path / "run", 0)
    assert isinstance(known, Personal)
    inputs = replace(known.about.inputs, parts={"": ("float32", SHAPE)}, guessed=True)
    known.about = replace(known.about, inputs=inputs)
    again = ft.load_personal(export_model(known, tmp_path / "model.safetensors"))  # the file says so too
    np.save(tmp_path / "bytes.npy", fed.x.numpy())
    np.save(tmp_path / "floats.npy", fed.x.numpy() / 255)
    found = [predict(again, tmp_path / name).outputs for name in ("bytes.npy", "floats.npy")]
    assert torch.allclose(found[0], found[1], atol=1e-5)


def test_samples_that_do_not_fit_are_refused(model: nn.Module, tmp_path: Path) -> None:
    def of(array: np.ndarray) -> str:
        np.save(tmp_path / "x.npy", array, allow_pickle=True)
        return refusal(lambda: predict(model, tmp_path / "x.npy"))

    assert "(1, 5, 5), and the run's are (1, 4, 4)" in of(np.zeros((2, 1, 5, 5), np.uint8))
    for odd in (np.full((2, *SHAPE), 200.0), np.full((2, *SHAPE), 200), np.full((2, *SHAPE), -0.5)):
        assert "the run's are bytes" in of(odd)
    holes = np.zeros((3, *SHAPE))
    holes[1, 0, 2, 2] = np.nan
    assert "sample 1" in of(holes) and "sample 0" in of(np.full((2, *SHAPE), -np.inf))
    assert "no sample" in of(np.zeros((0, *SHAPE), np.uint8)) and "no sample" in of(np.array(3))
    assert "numpy.save" in of(np.array([{}], dtype=object))
    assert "no numbers" in of(np.full((2, *SHAPE), "a"))
    Image.new("L", (5, 4)).save(tmp_path / "wide.png")
    assert "5×4 pixels" in refusal(lambda: predict(model, tmp_path / "wide.png"))
    Image.new("RGB", (4, 4)).save(tmp_path / "colour.png")
    assert "in 3 channels" in refusal(lambda: predict(model, tmp_path / "colour.png"))
    np.savez(tmp_path / "z.npz", z=np.zeros(3))
    assert "as x, or x_test" in refusal(lambda: predict(model, tmp_path / "z.npz"))
    (tmp_path / "x.txt").write_text("1,2")
    assert "not what samples are read from" in refusal(lambda: predict(model, tmp_path / "x.txt"))


def test_an_array_that_claims_more_than_it_holds_is_refused(model: nn.Module, tmp_path: Path) -> None:
    file = io.BytesIO()
    claims = {"descr": "|u1", "fortran_order": False, "shape": (10**12, *SHAPE)}
    np.lib.format.write_array_header_1_0(file, claims)
    (tmp_path / "x.npy").write_bytes(file.getvalue() + b"123")
    assert "numpy.save" in refusal(lambda: predict(model, tmp_path / "x.npy"))


def test_a_model_that_diverged_predicts_nothing(tmp_path: Path) -> None:
    """Its answers are no numbers, of which any class could be made."""
    train("local", fed := pictures(1), tmp_path / "run")
    model = ft.load_personal(tmp_path / "run", 0)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    np.save(tmp_path / "x.npy", fed.x.numpy())
    assert "diverged" in refusal(lambda: predict(model, tmp_path / "x.npy"))


# ---- the commands


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`fedtailor` in a folder of its own: what it says."""
    monkeypatch.chdir(tmp_path)

    def said(*words: str) -> str:
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output.replace("\n", " ")

    return said


def test_the_commands(call: Callable[..., str]) -> None:
    fed: Any = ft.load("digits", clients=3)
    run = train("ditto", fed, Path("run"), model=ft.network("logistic", fed))
    np.savez("own.npz", x_test=fed.x[fed.test[2]].numpy())
    assert "client 2 (ditto, received)" in call("export", "run", "--client", "2", "--moment", "received")
    assert Path("run-client-002-received.safetensors").is_file()
    call("export", "run", "--client", "2", "-o", "two.pt2")
    assert torch.allclose(in_torch(Path("two.pt2"))(fed.x[:3]), ft.load_personal("run", 2)(fed.x[:3]), atol=1e-6)
    assert "all 3 clients" in call("export", "run", "--all", "--format", "safetensors", "-o", "everyone")
    assert "--out keeps them all" in call("predict", "run", "own.npz", "--client", "2")
    shown = call("predict", "run", "own.npz", "--client", "2", "--out", "all.csv")
    rows = list(csv.DictReader(io.StringIO(Path("all.csv").read_text())))
    assert "probability" in shown and f"All {len(rows)} predictions lie in all.csv" in shown
    right = [int(row["class"]) == int(y) for row, y in zip(rows, fed.y[fed.test[2]], strict=True)]
    assert sum(right) / len(right) == pytest.approx(run.scores("trained")[2])
    call("predict", "everyone/002.safetensors", "own.npz", "--out", "again.csv")
    assert Path("again.csv").read_text() == Path("all.csv").read_text()


def test_commands_that_contradict_themselves_are_refused(call: Callable[..., str]) -> None:
    fed = pictures(2)
    train("local", fed, Path("run"))
    np.savez("x.npz", x=fed.x.numpy())
    before = sorted(path.name for path in Path().iterdir())
    assert "not both" in refusal(lambda: call("export", "run", "--all", "--client", "1"))
    ending = ["export", "run", "--client", "1", "-o"]
    assert "ends with .onnx" in refusal(lambda: call(*ending, "model.onnx", "--format", "pt2"))
    assert "no format 'bin'" in refusal(lambda: call(*ending, "model.bin"))
    assert "no dtype" in refusal(lambda: call(*ending, "model.pt2", "--inputs", "int64"))
    own = ["predict", "run", "x.npz", "--client", "0", "--out"]
    assert "holds the samples" in refusal(lambda: call(*own, f"../{Path.cwd().name}/x.npz"))
    assert sorted(path.name for path in Path().iterdir()) == before
