"""Loaded and exported personal models give the outputs of the run's evaluation."""

import json
import re
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedtailor as ft
from conftest import error_message, same, tiny_federation
from fedtailor.cli.export import export
from fedtailor.core.trees import Tree
from fedtailor.data.input_spec import InputSpec
from fedtailor.export import writers
from fedtailor.export.model_source import ModelInfo
from fedtailor.export.personal_model import PersonalModel, build_personal_model, load_all_personal
from fedtailor.export.writers import export_model, export_models
from fedtailor.methods import METHODS
from fedtailor.training.simulate import describe_method
from support.exported_models import MEAN, READERS, SHAPE, STD, image_federation, load_pt2, loss_on_test_data, train

WITH_EXTRA_TENSORS = ("fedrod", "fedproto", "dbe", "gpfl", "fedcp")  # their personal model is more than the network
SLOW = pytest.mark.slow
CORE = ("fedapa", "fedapm", "fedlag", "selffl")


@pytest.fixture(scope="module")
def proto(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of FedProto, whose personal model is the network and prototypes."""
    folder = tmp_path_factory.mktemp("runs") / "proto"
    train("fedproto", image_federation(), folder, rounds=2)
    return folder


@pytest.fixture
def model(proto: Path) -> PersonalModel:
    """The model of its first client."""
    found = ft.load_personal(proto, 0)
    assert isinstance(found, PersonalModel)
    return found


def save_with(model: PersonalModel, path: Path, metadata: Any, **tensors: Tensor) -> Path:
    """Save a model as if it had been exported, with any metadata and more tensors."""
    save_file(model.tensors() | tensors, path, metadata={"fedtailor": json.dumps(metadata)})
    return path


# ---- outputs


@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW) if n in ("pfedhn", "pfedla") else n for n in METHODS])
def test_exported_safetensors_gives_recorded_loss_for_every_method(name: str, tmp_path: Path) -> None:
    """The exported model has the recorded loss on the client's test data."""
    fed = image_federation(2)
    run = train(name, fed)
    settings = {"method": describe_method(METHODS[name]()), "network": {"name": "mlp", "hidden": [8]}}
    info = ModelInfo(
        run="here", client="1", moment="trained", inputs=InputSpec.from_federation(fed), dtype="float32", **settings
    )
    path = export_model(build_personal_model(info, run.personal(1)), tmp_path / "model.safetensors")
    found = ft.load_personal(path)
    assert not found.training
    assert loss_on_test_data(found, fed, 1) == pytest.approx(run.scores("trained", score="loss")[1], rel=1e-5)
    assert same(load_file(path), run.personal(1))  # the file is the run's state_dict


@pytest.mark.parametrize("moment", ["trained", "received"])
def test_load_personal_from_run_folder_gives_recorded_loss(moment: str, tmp_path: Path) -> None:
    fed = ft.load("digits", clients=3)
    run = train("fedrod", fed, tmp_path / "run", model=ft.network("mlp", fed, hidden=(6,)), batch_size=64)
    expected = run.scores(moment, score="loss")
    of_file = ft.load_personal(tmp_path / "run" / "personal" / moment / "002.safetensors")
    for client, model in enumerate(load_all_personal(tmp_path / "run", moment)):
        assert loss_on_test_data(model, fed, client) == pytest.approx(expected[client], rel=1e-5)
    assert torch.equal(of_file(fed.x[:4]), ft.load_personal(tmp_path / "run", 2, moment)(fed.x[:4]))


def test_load_personal_without_input_format_needs_data(tmp_path: Path) -> None:
    fed = image_federation(2)
    run = train("dbe", fed, tmp_path / "run")
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    del info["inputs"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(info))
    assert "fed=" in error_message(lambda: ft.load_personal(tmp_path / "run", 1))
    found = ft.load_personal(tmp_path / "run", 1, fed=fed)
    assert loss_on_test_data(found, fed, 1) == pytest.approx(run.scores("trained", score="loss")[1], rel=1e-5)


@pytest.mark.parametrize("file_format", ["pt2", pytest.param("onnx", marks=SLOW)])
def test_exported_graph_includes_preprocessing(file_format: str, tmp_path: Path) -> None:
    """A linear model gives W((x / 255 − mean) / std) + b for bytes, in batches of any size."""
    fed = image_federation(2)
    run = train("fedavg", fed, tmp_path / "run", model=ft.network("logistic", fed))
    path = export_model(ft.load_personal(tmp_path / "run", 1), tmp_path / f"model.{file_format}")
    weights = run.personal(1)
    for x in (fed.x[:1], fed.x[:9]):
        assert x.dtype == torch.uint8
        expected = ((x.flatten(1) / 255 - MEAN) / STD) @ weights["head.weight"].T + weights["head.bias"]
        assert torch.allclose(READERS[file_format](path)(x), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WITH_EXTRA_TENSORS, *CORE])
@pytest.mark.parametrize("file_format", ["pt2", "onnx"])
def test_exported_graph_gives_recorded_loss(file_format: str, name: str, tmp_path: Path) -> None:
    fed = image_federation(2)
    run = train(name, fed, tmp_path / "run", model=ft.network("cnn", fed, norm="batch"))
    path = export_model(ft.load_personal(tmp_path / "run", 1), tmp_path / f"model.{file_format}")
    loss = loss_on_test_data(READERS[file_format](path), fed, 1)
    assert loss == pytest.approx(run.scores("trained", score="loss")[1], rel=1e-4)


@pytest.mark.parametrize("file_format", [pytest.param("pt2", marks=SLOW), "onnx"])
def test_export_models_writes_each_clients_weights(file_format: str, proto: Path, tmp_path: Path) -> None:
    run, fed = ft.load_run(proto), image_federation()
    folder = export_models(load_all_personal(proto), tmp_path / "all", file_format)
    assert sorted(path.name for path in folder.iterdir()) == [f"{client:03d}.{file_format}" for client in range(3)]
    expected = run.scores("trained", score="loss")
    for client in range(3):
        loss = loss_on_test_data(READERS[file_format](folder / f"{client:03d}.{file_format}"), fed, client)
        assert loss == pytest.approx(expected[client], rel=1e-4)
    assert len({round(value, 5) for value in expected.values()}) == 3


# ---- contents of files


def test_exported_safetensors_is_a_plain_state_dict(tmp_path: Path) -> None:
    """An ordinary network loads it, and gives the same outputs for preprocessed inputs."""
    fed = image_federation(2)
    train("fedper", fed, tmp_path / "run")
    model = ft.load_personal(tmp_path / "run", 0)
    path = export_model(model, tmp_path / "model.safetensors")
    layers = {"flat": nn.Flatten(), "fc1": nn.Linear(16, 8), "relu": nn.ReLU(), "head": nn.Linear(8, 3)}
    plain = nn.Sequential(OrderedDict(layers))
    plain.load_state_dict(load_file(path))
    assert torch.allclose(plain((fed.x[:5] / 255 - MEAN) / STD), model(fed.x[:5]), atol=1e-6)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert {"run": "run", "client": "0", "moment": "trained", "method": "fedper"}.items() <= metadata.items()


@pytest.mark.slow
def test_exported_metadata_has_origin_but_no_paths(proto: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = ft.load_personal(proto, 2)
    paths = [export_model(model, tmp_path / f"model.{file_format}") for file_format in writers.FORMATS]
    for path in paths:
        assert str(Path(ft.__file__).parent).encode() not in path.read_bytes()
        assert str(Path(torch.__file__).parent).encode() not in path.read_bytes()
    graph = onnx.load(paths[1])
    onnx.checker.check_model(graph)
    metadata = {entry.key: entry.value for entry in graph.metadata_props}
    expected = {"client": "2", "method": "fedproto", "run": "proto", "torch_version": torch.__version__}
    assert expected.items() <= metadata.items() and metadata["opset"] == str(graph.opset_import[0].version)
    first = graph.graph.input[0].type.tensor_type
    assert first.shape.dim[0].dim_param == "batch" and first.elem_type == onnx.TensorProto.UINT8
    extra = {"fedtailor.json": ""}
    torch.export.load(paths[2], extra_files=extra)
    assert ModelInfo.from_json(extra["fedtailor.json"]) == model.info


def test_exported_program_contains_no_client_data(tmp_path: Path) -> None:
    """A program contains the samples that it was traced with, so these must be random."""
    fed = image_federation(2)
    train("local", fed, tmp_path / "run")
    model = ft.load_personal(tmp_path / "run", 0)
    kept = torch.export.load(export_model(model, tmp_path / "model.pt2")).example_inputs
    assert kept is not None
    assert not any(torch.equal(example, sample) for example in kept[0][0] for sample in fed.x)


@pytest.mark.slow
def test_load_personal_from_onnx_gives_recorded_loss(proto: Path, tmp_path: Path) -> None:
    run, fed = ft.load_run(proto), image_federation()
    path = export_model(ft.load_personal(proto, 1), tmp_path / "model.onnx")
    found = ft.load_personal(path)
    assert isinstance(found, nn.Module) and not found.training
    assert loss_on_test_data(found, fed, 1) == pytest.approx(run.scores("trained", score="loss")[1], rel=1e-4)
    assert "exported for uint8 samples, got float32" in error_message(lambda: found(fed.x[:2].float()))
    assert "cannot be exported" not in error_message(lambda: export_model(found, tmp_path / "again.pt2"))


@pytest.mark.slow
def test_export_with_input_dtype_changes_inputs_of_graph(tmp_path: Path) -> None:
    """Float inputs have values from 0 to 1 instead of bytes; integer inputs cannot be changed."""
    fed = image_federation(2)
    train("local", fed, tmp_path / "run")
    model = ft.load_personal(tmp_path / "run", 0)
    path = export_model(model, tmp_path / "model.pt2", input_dtype="float32")
    assert torch.allclose(load_pt2(path)(fed.x[:4] / 255), model(fed.x[:4]), atol=1e-6)
    for invalid in ("float23", "int64"):
        message = error_message(lambda dtype=invalid: export_model(model, tmp_path / "b.pt2", input_dtype=dtype))  # type: ignore[misc]
        assert invalid in message
    assert isinstance(model, PersonalModel)
    model.info = replace(model.info, inputs=replace(model.info.inputs, parts={"": ("int64", SHAPE)}))
    message = error_message(lambda: export_model(model, tmp_path / "b.pt2", input_dtype="float32"))
    assert "(int64) cannot be changed" in message


# ---- custom networks and methods


class TwoParts(nn.Module):
    """Takes an image and a number; it has batch normalization, dropout and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(6, 6).requires_grad_(False)
        self.fc, self.norm, self.drop, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(9, 2)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        features = self.drop(torch.relu(self.norm(self.fc(self.fixed(x["image"])))))
        return self.head(torch.cat([features, x["age"][:, None]], 1))  # type: ignore[no-any-return]


def two_parts() -> ft.Federation:
    random = np.random.default_rng(0)

    def samples(count: int) -> tuple[dict[str, Any], np.ndarray]:
        x = {"image": random.integers(0, 256, (count, 6)).astype(np.uint8), "age": random.normal(size=count)}
        return x, random.integers(0, 2, count)

    return ft.Federation.from_arrays([(*samples(8), *samples(6)) for _ in range(2)])


@pytest.mark.parametrize(
    "file_format", ["safetensors", *(pytest.param(file_format, marks=SLOW) for file_format in ("pt2", "onnx"))]
)
def test_export_of_custom_network_with_several_inputs(file_format: str, tmp_path: Path) -> None:
    fed, net = two_parts(), TwoParts()
    run = train("fedrod", fed, tmp_path / "run", model=ft.wrap(net))
    assert "model=" in error_message(lambda: ft.load_personal(tmp_path / "run", 1))
    other = TwoParts()  # its weights do not matter: they are replaced by those in the run's file
    path = export_model(ft.load_personal(tmp_path / "run", 1, model=other), tmp_path / f"model.{file_format}")
    x = {name: part[fed.test[1]] for name, part in fed.x.items()}
    reader = load_pt2 if file_format == "pt2" else lambda path: ft.load_personal(path, model=other)
    with torch.no_grad():
        found = float(F.cross_entropy(reader(path)(x), fed.y[fed.test[1]]))  # type: ignore[arg-type]
    assert found == pytest.approx(run.scores("trained", score="loss")[1], rel=1e-4)


def test_export_of_custom_method_uses_its_logits(fed: ft.Federation, net: nn.Module, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Doubled(ft.methods.FedAvg):
        def logits(self, model: ft.Model, personal: Tree, x: Any) -> Tensor:
            return 2 * model.logits(personal, x)

    ft.simulate(Doubled(), net, fed, rounds=1, dtype=torch.float64, folder=tmp_path / "run")
    given: dict[str, Any] = {"model": net, "fed": fed}
    assert "method=" in error_message(lambda: ft.load_personal(tmp_path / "run", 0, **given))
    once = ft.load_personal(tmp_path / "run", 0, method=ft.methods.FedAvg(), **given)
    twice = ft.load_personal(tmp_path / "run", 0, method=Doubled(), **given)
    assert torch.allclose(twice(fed.x), 2 * once(fed.x), rtol=1e-12) and twice(fed.x).dtype == torch.float64
    assert torch.allclose(load_pt2(export_model(twice, tmp_path / "model.pt2"))(fed.x), twice(fed.x), rtol=1e-12)


def test_export_of_network_with_fixed_batch_size_raises_error(fed: ft.Federation, tmp_path: Path) -> None:
    class FixedBatchSize(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.reshape(len(x), 4))  # type: ignore[no-any-return]

    ft.simulate(ft.methods.FedAvg(), FixedBatchSize(), fed, rounds=1, folder=tmp_path / "run")
    model = ft.load_personal(tmp_path / "run", 0, model=FixedBatchSize())
    assert "len(x)" in error_message(lambda: export_model(model, tmp_path / "model.pt2"))
    assert not list(tmp_path.glob("model*"))
    assert export_model(model, tmp_path / "model.safetensors").is_file()


def test_personal_model_can_be_trained_and_converted(model: PersonalModel) -> None:
    fed = image_federation()
    before = model(fed.x[:6])
    doubled = model.double()(fed.x[:6])
    assert doubled.dtype == torch.float64 and torch.allclose(doubled.float(), before, rtol=1e-4, atol=1e-5)
    F.cross_entropy(doubled, fed.y[:6]).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for name, p in model.named_parameters() if "fc1" in name)


# ---- deployed clients


def test_load_personal_from_deployed_client_folder(tmp_path: Path) -> None:
    """The folder, a run in it, and the model file give the model of a simulation."""
    from support.flower_in_process import federate

    fed = replace(tiny_federation((9, 4)), names=("ann", "bob"))
    settings = {"network": "mlp", "rounds": 1, "batch_size": 4, "dtype": "float64", "method": "fedproto"}
    deployed = federate(tmp_path, fed, settings)
    assert "no model yet" in error_message(lambda: ft.load_personal(deployed.client_folders["bob"]))
    deployed.run()
    run = ft.simulate(
        METHODS["fedproto"](), ft.network("mlp", fed), fed, rounds=1, batch_size=4, dtype=torch.float64, device="cpu"
    )
    folder = next((deployed.client_folders["bob"] / "runs").iterdir())
    for path in (deployed.client_folders["bob"], folder, folder / "models" / "trained.safetensors"):
        found = ft.load_personal(path)
        assert loss_on_test_data(found, fed, 1) == pytest.approx(run.scores("trained", score="loss")[1], rel=1e-9)
        assert isinstance(found, PersonalModel) and found.info.client == "bob"
    received = ft.load_personal(deployed.client_folders["bob"], moment="received")
    assert loss_on_test_data(received, fed, 1) == pytest.approx(run.scores("received", score="loss")[1], rel=1e-9)
    assert "on the client's machine" in error_message(lambda: ft.load_personal(deployed.folder / "run", 0))


# ---- errors


@pytest.mark.parametrize("file_format", ["safetensors", pytest.param("pt2", marks=SLOW)])
def test_export_with_wrong_outputs_leaves_no_file(
    file_format: str, model: PersonalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One written weight is wrong by 0.001."""
    original = PersonalModel.tensors if file_format == "safetensors" else PersonalModel.state_dict

    def corrupted(self: PersonalModel, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        found = dict(original(self, *args, **kwargs))
        name = next(name for name in found if name.endswith("fc1.weight"))
        return found | {name: found[name] + 1e-3}

    monkeypatch.setattr(PersonalModel, original.__name__, corrupted)
    assert "outputs differ" in error_message(lambda: export_model(model, tmp_path / f"model.{file_format}"))
    assert "outputs differ" in error_message(lambda: export_models([model], tmp_path / "all", file_format))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [1e-3, 1e4])
def test_export_tolerance_is_relative_to_outputs(size: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of 0.001 of the largest output is too large, an error of 0.000001 is not, at any scale."""
    fed = image_federation(1)
    train("local", fed, tmp_path / "run", model=ft.network("logistic", fed))
    model, original, error = ft.load_personal(tmp_path / "run", 0), PersonalModel.tensors, 1e-3
    with torch.no_grad():
        for leaf in model.parameters():
            leaf.mul_(size)
    monkeypatch.setattr(
        PersonalModel, "tensors", lambda self: {n: leaf * (1 + error) for n, leaf in original(self).items()}
    )
    assert "outputs differ" in error_message(lambda: export_model(model, tmp_path / "model.safetensors"))
    error = 1e-6
    assert export_model(model, tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["run 12:30", "..odd"])
def test_export_command_makes_valid_file_name(
    name: str, proto: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(proto, tmp_path / "runs" / name))
    export(folder, client=1)
    (path,) = tmp_path.glob("*.safetensors")
    assert path.name == f"{name.replace(' ', '_').replace(':', '_').strip('.')}-client-001.safetensors"
    assert same(ft.load_personal(path).state_dict(), ft.load_personal(folder, 1).state_dict())


def test_export_command_ignores_paths_in_untrusted_names(
    model: PersonalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file name of a re-exported model stays in the working directory."""
    (here := tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(here)
    values = json.loads(model.info.to_json()) | {"run": "../x", "client": "../../y"}
    export(save_with(model, tmp_path / "model.safetensors", values))
    assert len([*here.iterdir()]) == 1 and len([*tmp_path.rglob("*.safetensors")]) == 2


def test_export_does_not_overwrite(model: PersonalModel, tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_text("mine")
    assert "already exists" in error_message(lambda: export_model(model, tmp_path / "model.pt2"))
    assert "already exists" in error_message(lambda: export_models([model], tmp_path, "pt2"))
    assert (tmp_path / "model.pt2").read_text() == "mine"
    assert "did you mean 'onnx'" in error_message(lambda: export_model(model, tmp_path / "model.onx"))
    assert "cannot be written" in error_message(lambda: export_model(model, tmp_path / "no" / "where.safetensors"))


def test_load_personal_with_wrong_client_or_moment_raises_error(proto: Path, tmp_path: Path) -> None:
    assert "choose one" in error_message(lambda: ft.load_personal(proto))
    assert "no client 3" in error_message(lambda: ft.load_personal(proto, 3))
    assert "no moment 'train'" in error_message(lambda: ft.load_personal(proto, 0, "train"))
    assert "There is no model in" in error_message(lambda: ft.load_personal(tmp_path / "nowhere", 0))
    file = proto / "personal" / "trained" / "000.safetensors"
    exported = export_model(ft.load_personal(file), tmp_path / "exported.safetensors")
    (tmp_path / "exported.onnx").touch()
    for path in (file, exported, tmp_path / "exported.onnx"):
        assert "leave out the client number" in error_message(lambda path=path: ft.load_personal(path, 0))  # type: ignore[misc]
    for path in (file, exported):
        assert "is the model 'trained'" in error_message(lambda path=path: ft.load_personal(path, moment="received"))  # type: ignore[misc]
    copied = tmp_path / "000.safetensors"
    copied.write_bytes(file.read_bytes())
    assert "no metadata" in error_message(lambda: ft.load_personal(copied))


def test_load_personal_from_unfinished_or_damaged_run_raises_error(tmp_path: Path) -> None:
    fed = image_federation(2)
    train("local", fed, tmp_path / "run")
    file = tmp_path / "run" / "personal" / "trained" / "001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "does not match its checksum; to repair the run" in error_message(
        lambda: ft.load_personal(tmp_path / "run", 1)
    )
    (tmp_path / "run" / "personal" / "models.json").unlink()
    assert "not finished" in error_message(lambda: ft.load_personal(tmp_path / "run", 1))


def nested(depth: int) -> Any:
    return {"inner": nested(depth - 1)} if depth else {}


HOSTILE_METADATA: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no object": lambda values: [1],
    "no method": lambda values: values | {"method": {}},
    "unknown method": lambda values: values | {"method": {"name": "evil"}},
    "unknown field": lambda values: values | {"method": {"name": "fedavg", "__class__": 1}},
    "control characters": lambda values: values | {"run": "\x1b[2J"},
    "invalid dtype": lambda values: values | {"dtype": "load"},
    "invalid inputs": lambda values: values | {"inputs": values["inputs"] | {"parts": {"": ["from_file", [3]]}}},
    "no inputs": lambda values: values | {"inputs": {}},
    "huge inputs": lambda values: values | {"inputs": values["inputs"] | {"parts": {"": ["uint8", [2**40, 2**40]]}}},
    "many classes": lambda values: values | {"inputs": values["inputs"] | {"classes": 10**9}},
    "another network": lambda values: values | {"network": {"name": "mlp", "hidden": [7]}},
    "huge network": lambda values: values | {"network": {"name": "mlp", "hidden": [2**24, 2**24]}},
    "deep": lambda values: values | {"method": {"name": "lag", "inner": nested(90)}},
}


@pytest.mark.parametrize("case", HOSTILE_METADATA)
def test_load_personal_with_hostile_metadata_raises_error(case: str, model: PersonalModel, tmp_path: Path) -> None:
    values = HOSTILE_METADATA[case](json.loads(model.info.to_json()))
    path = save_with(model, tmp_path / "model.safetensors", values)
    error_message(lambda: ft.load_personal(path))


@pytest.mark.parametrize("name", ["prototypes", "other/x", "/".join("a" * 50), "x" * 2000])
def test_load_personal_with_unexpected_tensors(name: str, model: PersonalModel, tmp_path: Path) -> None:
    values = json.loads(model.info.to_json())
    path = save_with(model, tmp_path / "model.safetensors", values, **{name: torch.ones(1)})
    if name == "other/x":
        assert not ft.load_personal(path).training
    else:
        error_message(lambda: ft.load_personal(path))


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("model.safetensors", b"\x08\x00\x00\x00\x00\x00\x00\x00{}", "is not a safetensors file"),
        ("model.onnx", b"\x08\x00\x00\x00\x00\x00\x00\x00{}", "is not a valid ONNX model"),
        ("model.pt2", b"anything", "unpickles"),
    ],
)
def test_load_personal_from_invalid_file_raises_error(name: str, content: bytes, word: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert word in error_message(lambda: ft.load_personal(tmp_path / name))


def test_missing_onnx_libraries_give_installation_command(
    model: PersonalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "fedtailor[export]" in error_message(lambda: export_model(model, tmp_path / "model.onnx"))
    (tmp_path / "other.onnx").write_bytes(b"")
    assert "fedtailor[export]" in error_message(lambda: ft.load_personal(tmp_path / "other.onnx"))


@pytest.mark.slow
def test_code_in_documentation_runs(tmp_path: Path) -> None:
    document = Path(__file__).parents[2] / "docs" / "models.md"
    blocks = re.findall(r"^```python\n(.*?)```", document.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "document.py").write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, "document.py"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0 and blocks, done.stderr
