"""Personal models for other programs: what is loaded or exported answers as the run's own evaluation did."""

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
from conftest import refusal, same, tiny_federation
from exported import DEVIATION, MEAN, SHAPE, in_onnx, in_torch, loss, pictures, train
from fedtailor.intake import Intake
from fedtailor.methods import METHODS
from fedtailor.personal import export
from fedtailor.personal.export import export_command, export_model, export_models
from fedtailor.personal.module import Personal, assemble, load_everyone
from fedtailor.personal.origin import About
from fedtailor.simulate import describe
from fedtailor.trees import Tree

MORE = ("fedrod", "fedproto", "dbe", "gpfl", "fedcp")  # whose model is more than the network
SLOW = pytest.mark.slow
CORE = ("fedapa", "fedapm", "fedlag", "selffl")


@pytest.fixture(scope="module")
def proto(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of FedProto, whose model is the network and prototypes."""
    folder = tmp_path_factory.mktemp("runs") / "proto"
    train("fedproto", pictures(), folder, rounds=2)
    return folder


# ---- it answers as in the evaluation


@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW) if n in ("pfedhn", "pfedla") else n for n in METHODS])
def test_every_method_is_loaded_from_what_was_exported(name: str, tmp_path: Path) -> None:
    """The loss of the exported model on the client's test data is the one the run recorded."""
    fed = pictures(2)
    run = train(name, fed)
    named = {"method": describe(METHODS[name]()), "network": {"name": "mlp", "hidden": [8]}}
    about = About(run="here", client="1", moment="trained", inputs=Intake.of(fed), dtype="float32", **named)
    path = export_model(assemble(about, run.personal(1)), tmp_path / "model.safetensors")
    found = ft.load_personal(path)
    assert not found.training
    assert loss(found, fed, 1) == pytest.approx(run.scores("trained", score="loss")[1], rel=1e-5)
    assert same(load_file(path), run.personal(1))  # and the file is the run's own state_dict


@pytest.mark.parametrize("moment", ["trained", "received"])
def test_a_run_s_folder_is_all_that_is_needed(moment: str, tmp_path: Path) -> None:
    fed = ft.load("digits", clients=3)
    run = train("fedrod", fed, tmp_path / "run", model=ft.network("mlp", fed, hidden=(6,)), batch_size=64)
    wanted = run.scores(moment, score="loss")
    of_file = ft.load_personal(tmp_path / "run" / "personal" / moment / "002.safetensors")
    for client, model in enumerate(load_everyone(tmp_path / "run", moment)):
        assert loss(model, fed, client) == pytest.approx(wanted[client], rel=1e-5)
    assert torch.equal(of_file(fed.x[:4]), ft.load_personal(tmp_path / "run", 2, moment)(fed.x[:4]))


def test_of_an_older_run_that_does_not_describe_its_samples_the_data_do(tmp_path: Path) -> None:
    fed = pictures(2)
    run = train("dbe", fed, tmp_path / "run")
    said = json.loads((tmp_path / "run" / "run.json").read_text())
    del said["inputs"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(said))
    assert "fed=" in refusal(lambda: ft.load_personal(tmp_path / "run", 1))
    found = ft.load_personal(tmp_path / "run", 1, fed=fed)
    assert loss(found, fed, 1) == pytest.approx(run.scores("trained", score="loss")[1], rel=1e-5)


@pytest.mark.parametrize("kind", ["pt2", pytest.param("onnx", marks=SLOW)])
def test_inputs_are_prepared_inside(kind: str, tmp_path: Path) -> None:
    """By hand for a linear model: W((x / 255 − mean) / deviation) + b, from bytes, any number of them at once."""
    fed = pictures(2)
    run = train("fedavg", fed, tmp_path / "run", model=ft.network("logistic", fed))
    path = export_model(ft.load_personal(tmp_path / "run", 1), tmp_path / f"model.{kind}")
    read = in_torch if kind == "pt2" else in_onnx
    own = run.personal(1)
    for x in (fed.x[:1], fed.x[:9]):
        assert x.dtype == torch.uint8
        wanted = ((x.flatten(1) / 255 - MEAN) / DEVIATION) @ own["head.weight"].T + own["head.bias"]
        assert torch.allclose(read(path)(x), wanted, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MORE, *CORE])
@pytest.mark.parametrize("kind", ["pt2", "onnx"])
def test_graphs_answer_as_the_evaluation_did(kind: str, name: str, tmp_path: Path) -> None:
    fed = pictures(2)
    run = train(name, fed, tmp_path / "run", model=ft.network("cnn", fed, norm="batch"))
    path = export_model(ft.load_personal(tmp_path / "run", 1), tmp_path / f"model.{kind}")
    read = in_torch if kind == "pt2" else in_onnx
    assert loss(read(path), fed, 1) == pytest.approx(run.scores("trained", score="loss")[1], rel=1e-4)


@pytest.mark.parametrize("kind", [pytest.param("pt2", marks=SLOW), "onnx"])
def test_all_clients_share_a_graph_and_not_its_numbers(kind: str, proto: Path, tmp_path: Path) -> None:
    run, fed = ft.open(proto), pictures()
    made = export_models(load_everyone(proto), tmp_path / "all", kind)
    assert sorted(path.name for path in made.iterdir()) == [f"{client:03d}.{kind}" for client in range(3)]
    read, wanted = (in_torch if kind == "pt2" else in_onnx), run.scores("trained", score="loss")
    for client in range(3):
        assert loss(read(made / f"{client:03d}.{kind}"), fed, client) == pytest.approx(wanted[client], rel=1e-4)
    assert len({round(value, 5) for value in wanted.values()}) == 3


# ---- what is in a file


def test_a_state_dict_is_an_ordinary_one(tmp_path: Path) -> None:
    """A network written by somebody else takes it, and answers the same to prepared inputs."""
    fed = pictures(2)
    train("fedper", fed, tmp_path / "run")
    model = ft.load_personal(tmp_path / "run", 0)
    path = export_model(model, tmp_path / "model.safetensors")
    layers = {"flat": nn.Flatten(), "fc1": nn.Linear(16, 8), "relu": nn.ReLU(), "head": nn.Linear(8, 3)}
    plain = nn.Sequential(OrderedDict(layers))
    plain.load_state_dict(load_file(path))
    assert torch.allclose(plain((fed.x[:5] / 255 - MEAN) / DEVIATION), model(fed.x[:5]), atol=1e-6)
    with safe_open(path, framework="pt") as file:
        said = file.metadata()
    assert {"run": "run", "client": "0", "moment": "trained", "method": "fedper"}.items() <= said.items()


@pytest.mark.slow
def test_a_file_says_whose_it_is_and_not_where_it_was_made(proto: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = ft.load_personal(proto, 2)
    paths = [export_model(model, tmp_path / f"model.{kind}") for kind in export.FORMATS]
    for path in paths:
        assert str(Path(ft.__file__).parent).encode() not in path.read_bytes()
        assert str(Path(torch.__file__).parent).encode() not in path.read_bytes()
    graph = onnx.load(paths[1])
    onnx.checker.check_model(graph)
    said = {entry.key: entry.value for entry in graph.metadata_props}
    wanted = {"client": "2", "method": "fedproto", "run": "proto", "torch_version": torch.__version__}
    assert wanted.items() <= said.items() and said["opset"] == str(graph.opset_import[0].version)
    first = graph.graph.input[0].type.tensor_type
    assert first.shape.dim[0].dim_param == "batch" and first.elem_type == onnx.TensorProto.UINT8
    extra = {"fedtailor.json": ""}
    torch.export.load(paths[2], extra_files=extra)
    assert About.read(extra["fedtailor.json"]) == model.about


def test_no_sample_of_a_client_is_in_a_program(tmp_path: Path) -> None:
    """Torch keeps the samples that a program is traced with, so these are made up."""
    fed = pictures(2)
    train("local", fed, tmp_path / "run")
    model = ft.load_personal(tmp_path / "run", 0)
    kept = torch.export.load(export_model(model, tmp_path / "model.pt2")).example_inputs
    assert kept is not None
    assert not any(torch.equal(example, own) for example in kept[0][0] for own in fed.x)


@pytest.mark.slow
def test_an_onnx_file_is_loaded_as_a_module(proto: Path, tmp_path: Path) -> None:
    run, fed = ft.open(proto), pictures()
    path = export_model(ft.load_personal(proto, 1), tmp_path / "model.onnx")
    found = ft.load_personal(path)
    assert isinstance(found, nn.Module) and not found.training
    assert loss(found, fed, 1) == pytest.approx(run.scores("trained", score="loss")[1], rel=1e-4)
    assert "exported for samples of uint8, not float32" in refusal(lambda: found(fed.x[:2].float()))
    assert "cannot be exported" not in refusal(lambda: export_model(found, tmp_path / "again.pt2"))


@pytest.mark.slow
def test_a_graph_takes_another_dtype_if_told(tmp_path: Path) -> None:
    """Floats are taken as they are, from 0 to 1, where bytes are divided by 255; whole numbers stay what they are."""
    fed = pictures(2)
    train("local", fed, tmp_path / "run")
    model = ft.load_personal(tmp_path / "run", 0)
    path = export_model(model, tmp_path / "model.pt2", takes="float32")
    assert torch.allclose(in_torch(path)(fed.x[:4] / 255), model(fed.x[:4]), atol=1e-6)
    for odd in ("float23", "int64"):
        assert odd in refusal(lambda odd=odd: export_model(model, tmp_path / "b.pt2", takes=odd))  # type: ignore[misc]
    assert isinstance(model, Personal)
    model.about = replace(model.about, inputs=replace(model.about.inputs, parts={"": ("int64", SHAPE)}))
    assert "are int64" in refusal(lambda: export_model(model, tmp_path / "b.pt2", takes="float32"))


# ---- own networks, own methods


class TwoParts(nn.Module):
    """Takes a picture and a number; with batch normalisation, dropout and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(6, 6).requires_grad_(False)
        self.fc, self.norm, self.drop, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(9, 2)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        inner = self.drop(torch.relu(self.norm(self.fc(self.fixed(x["picture"])))))
        return self.head(torch.cat([inner, x["age"][:, None]], 1))  # type: ignore[no-any-return]


def two_parts() -> ft.Federation:
    random = np.random.default_rng(0)

    def samples(count: int) -> tuple[dict[str, Any], np.ndarray]:
        x = {"picture": random.integers(0, 256, (count, 6)).astype(np.uint8), "age": random.normal(size=count)}
        return x, random.integers(0, 2, count)

    return ft.Federation.from_arrays([(*samples(8), *samples(6)) for _ in range(2)])


@pytest.mark.parametrize("kind", ["safetensors", *(pytest.param(kind, marks=SLOW) for kind in ("pt2", "onnx"))])
def test_an_own_network_with_inputs_of_several_parts(kind: str, tmp_path: Path) -> None:
    fed, net = two_parts(), TwoParts()
    run = train("fedrod", fed, tmp_path / "run", model=ft.wrap(net))
    assert "model=" in refusal(lambda: ft.load_personal(tmp_path / "run", 1))
    other = TwoParts()  # with other weights, for all that count are in the run's file
    path = export_model(ft.load_personal(tmp_path / "run", 1, model=other), tmp_path / f"model.{kind}")
    x = {name: part[fed.test[1]] for name, part in fed.x.items()}
    reader = in_torch if kind == "pt2" else lambda path: ft.load_personal(path, model=other)
    with torch.no_grad():
        found = float(F.cross_entropy(reader(path)(x), fed.y[fed.test[1]]))  # type: ignore[arg-type]
    assert found == pytest.approx(run.scores("trained", score="loss")[1], rel=1e-4)


def test_an_own_method_answers_in_its_own_way(fed: ft.Federation, net: nn.Module, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Doubled(ft.methods.FedAvg):
        def logits(self, model: ft.Model, personal: Tree, x: Any) -> Tensor:
            return 2 * model.logits(personal, x)

    ft.simulate(Doubled(), net, fed, rounds=1, dtype=torch.float64, folder=tmp_path / "run")
    given: dict[str, Any] = {"model": net, "fed": fed}
    assert "method=" in refusal(lambda: ft.load_personal(tmp_path / "run", 0, **given))
    once = ft.load_personal(tmp_path / "run", 0, method=ft.methods.FedAvg(), **given)
    twice = ft.load_personal(tmp_path / "run", 0, method=Doubled(), **given)
    assert torch.allclose(twice(fed.x), 2 * once(fed.x), rtol=1e-12) and twice(fed.x).dtype == torch.float64
    assert torch.allclose(in_torch(export_model(twice, tmp_path / "model.pt2"))(fed.x), twice(fed.x), rtol=1e-12)


def test_a_network_that_counts_its_samples_is_refused_as_a_graph(fed: ft.Federation, tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.reshape(len(x), 4))  # type: ignore[no-any-return]

    ft.simulate(ft.methods.FedAvg(), Counting(), fed, rounds=1, folder=tmp_path / "run")
    model = ft.load_personal(tmp_path / "run", 0, model=Counting())
    assert "len(x)" in refusal(lambda: export_model(model, tmp_path / "model.pt2"))
    assert not list(tmp_path.glob("model*"))
    assert export_model(model, tmp_path / "model.safetensors").is_file()


def test_it_can_be_trained_further_and_moved(proto: Path) -> None:
    fed, model = pictures(), ft.load_personal(proto, 0)
    before = model(fed.x[:6])
    doubled = model.double()(fed.x[:6])
    assert doubled.dtype == torch.float64 and torch.allclose(doubled.float(), before, rtol=1e-4, atol=1e-5)
    F.cross_entropy(doubled, fed.y[:6]).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for name, p in model.named_parameters() if "fc1" in name)


# ---- a real client


def test_a_real_client_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folder, from a run in it and from the file: the model that a simulation gives."""
    from deployed import federate

    fed = replace(tiny_federation((9, 4)), names=("ann", "bob"))
    settings = {"network": "mlp", "rounds": 1, "batch_size": 4, "dtype": "float64", "method": "fedproto"}
    real = federate(tmp_path, fed, settings, monkeypatch)
    assert "no model yet" in refusal(lambda: ft.load_personal(real.sites["bob"]))
    real.conduct()
    run = ft.simulate(
        METHODS["fedproto"](), ft.network("mlp", fed), fed, rounds=1, batch_size=4, dtype=torch.float64, device="cpu"
    )
    folder = next((real.sites["bob"] / "runs").iterdir())
    for path in (real.sites["bob"], folder, folder / "models" / "trained.safetensors"):
        found = ft.load_personal(path)
        assert loss(found, fed, 1) == pytest.approx(run.scores("trained", score="loss")[1], rel=1e-9)
        assert isinstance(found, Personal) and found.about.client == "bob"
    received = ft.load_personal(real.sites["bob"], moment="received")
    assert loss(received, fed, 1) == pytest.approx(run.scores("received", score="loss")[1], rel=1e-9)
    assert "real one" in refusal(lambda: ft.load_personal(real.folder / "run", 0))


# ---- what is refused


@pytest.mark.parametrize("kind", ["safetensors", pytest.param("pt2", marks=SLOW)])
def test_a_file_that_answers_otherwise_is_not_left(
    kind: str, proto: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight of what is written is off by a thousandth."""
    given = Personal.tensors if kind == "safetensors" else Personal.state_dict

    def off(self: Personal, *args: Any, **named: Any) -> dict[str, Tensor]:
        found = dict(given(self, *args, **named))
        name = next(name for name in found if name.endswith("fc1.weight"))
        return found | {name: found[name] + 1e-3}

    model = ft.load_personal(proto, 0)
    monkeypatch.setattr(Personal, given.__name__, off)
    assert "answers otherwise" in refusal(lambda: export_model(model, tmp_path / f"model.{kind}"))
    assert "answers otherwise" in refusal(lambda: export_models([model], tmp_path / "all", kind))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [1e-3, 1e4])
def test_how_far_a_file_may_be_off_goes_by_the_size_of_the_outputs(
    size: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousandth of the largest output is too much, whether outputs are small or large; a millionth is not."""
    fed = pictures(1)
    train("local", fed, tmp_path / "run", model=ft.network("logistic", fed))
    model, given, off = ft.load_personal(tmp_path / "run", 0), Personal.tensors, 1e-3
    with torch.no_grad():
        for leaf in model.parameters():
            leaf.mul_(size)
    monkeypatch.setattr(Personal, "tensors", lambda self: {n: leaf * (1 + off) for n, leaf in given(self).items()})
    assert "answers otherwise" in refusal(lambda: export_model(model, tmp_path / "model.safetensors"))
    off = 1e-6
    assert export_model(model, tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["run 12:30", "..odd"])
def test_a_run_may_be_called_anything(name: str, proto: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its models are used and exported under a name that every system takes."""
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(proto, tmp_path / "runs" / name))
    export_command(folder, 1, False, None, "trained", None, None)
    (path,) = tmp_path.glob("*.safetensors")
    assert path.name == f"{name.replace(' ', '_').replace(':', '_').strip('.')}-client-001.safetensors"
    assert same(ft.load_personal(path).state_dict(), ft.load_personal(folder, 1).state_dict())


def test_a_name_in_a_file_leads_nowhere(proto: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that somebody else exported is exported again: here, whatever it calls its run and its client."""
    (here := tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(here)
    model = ft.load_personal(proto, 0)
    assert isinstance(model, Personal)
    said = json.loads(model.about.text()) | {"run": "../x", "client": "../../y"}
    save_file(model.tensors(), tmp_path / "model.safetensors", metadata={"fedtailor": json.dumps(said)})
    export_command(tmp_path / "model.safetensors", None, False, None, "trained", None, None)
    assert len([*here.iterdir()]) == 1 and len([*tmp_path.rglob("*.safetensors")]) == 2


def test_nothing_is_written_over(proto: Path, tmp_path: Path) -> None:
    model = ft.load_personal(proto, 0)
    (tmp_path / "model.pt2").write_text("mine")
    assert "is there already" in refusal(lambda: export_model(model, tmp_path / "model.pt2"))
    assert "is there already" in refusal(lambda: export_models([model], tmp_path, "pt2"))
    assert (tmp_path / "model.pt2").read_text() == "mine"
    assert "did you mean 'onnx'" in refusal(lambda: export_model(model, tmp_path / "model.onx"))
    assert "cannot be written" in refusal(lambda: export_model(model, tmp_path / "no" / "where.safetensors"))


def test_who_is_meant_must_be_clear(proto: Path, tmp_path: Path) -> None:
    assert "say whose" in refusal(lambda: ft.load_personal(proto))
    assert "no client 3" in refusal(lambda: ft.load_personal(proto, 3))
    assert "no moment 'train'" in refusal(lambda: ft.load_personal(proto, 0, "train"))
    assert "There is no model in" in refusal(lambda: ft.load_personal(tmp_path / "nowhere", 0))
    file = proto / "personal" / "trained" / "000.safetensors"
    own = export_model(ft.load_personal(file), tmp_path / "own.safetensors")
    (tmp_path / "own.onnx").touch()
    for path in (file, own, tmp_path / "own.onnx"):
        assert "clients by their numbers" in refusal(lambda path=path: ft.load_personal(path, 0))  # type: ignore[misc]
    for path in (file, own):
        assert "is of the moment trained" in refusal(lambda path=path: ft.load_personal(path, moment="received"))  # type: ignore[misc]
    away = tmp_path / "000.safetensors"
    away.write_bytes(file.read_bytes())
    assert "does not say of which network" in refusal(lambda: ft.load_personal(away))


def test_an_unfinished_or_damaged_run_is_refused(tmp_path: Path) -> None:
    fed = pictures(2)
    train("local", fed, tmp_path / "run")
    file = tmp_path / "run" / "personal" / "trained" / "001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "not as they were written; mend the run" in refusal(lambda: ft.load_personal(tmp_path / "run", 1))
    (tmp_path / "run" / "personal" / "models.json").unlink()
    assert "not finished" in refusal(lambda: ft.load_personal(tmp_path / "run", 1))


def test_a_program_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"anything")
    assert "unpickles" in refusal(lambda: ft.load_personal(tmp_path / "model.pt2"))


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no table": lambda said: [1],
    "no method": lambda said: said | {"method": {}},
    "unknown method": lambda said: said | {"method": {"name": "evil"}},
    "unknown field": lambda said: said | {"method": {"name": "fedavg", "__class__": 1}},
    "codes for a screen": lambda said: said | {"run": "\x1b[2J"},
    "odd dtype": lambda said: said | {"dtype": "load"},
    "odd inputs": lambda said: said | {"inputs": said["inputs"] | {"parts": {"": ["from_file", [3]]}}},
    "no inputs": lambda said: said | {"inputs": {}},
    "endless inputs": lambda said: said | {"inputs": said["inputs"] | {"parts": {"": ["uint8", [2**40, 2**40]]}}},
    "many classes": lambda said: said | {"inputs": said["inputs"] | {"classes": 10**9}},
    "another network": lambda said: said | {"network": {"name": "mlp", "hidden": [7]}},
    "a huge network": lambda said: said | {"network": {"name": "mlp", "hidden": [2**24, 2**24]}},
    "deep": lambda said: said | {"method": {"name": "lag", "inner": json.loads('{"inner":' * 90 + "{}" + "}" * 90)}},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_a_file_says_is_not_trusted(kind: str, proto: Path, tmp_path: Path) -> None:
    model = ft.load_personal(proto, 0)
    assert isinstance(model, Personal)
    said = HOSTILE[kind](json.loads(model.about.text()))
    save_file(model.tensors(), tmp_path / "model.safetensors", metadata={"fedtailor": json.dumps(said)})
    refusal(lambda: ft.load_personal(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["prototypes", "other/x", "/".join("a" * 50), "x" * 2000])
def test_odd_tensors_are_refused_or_harmless(name: str, proto: Path, tmp_path: Path) -> None:
    model = ft.load_personal(proto, 0)
    assert isinstance(model, Personal)
    more = model.tensors() | {name: torch.ones(1)}
    save_file(more, tmp_path / "model.safetensors", metadata={"fedtailor": model.about.text()})
    if name == "other/x":
        assert not ft.load_personal(tmp_path / "model.safetensors").training
    else:
        refusal(lambda: ft.load_personal(tmp_path / "model.safetensors"))


def test_broken_files_are_refused(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.onnx"):
        (tmp_path / name).write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}")
        refusal(lambda name=name: ft.load_personal(tmp_path / name))  # type: ignore[misc]


def test_without_the_libraries_it_is_said_what_to_install(
    proto: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    model = ft.load_personal(proto, 0)
    assert "fedtailor[export]" in refusal(lambda: export_model(model, tmp_path / "model.onnx"))
    (tmp_path / "other.onnx").write_bytes(b"")
    assert "fedtailor[export]" in refusal(lambda: ft.load_personal(tmp_path / "other.onnx"))


@pytest.mark.slow
def test_the_page_s_own_code_runs(tmp_path: Path) -> None:
    page = Path(__file__).parent.parent / "docs" / "models.md"
    blocks = re.findall(r"^```python\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, "page.py"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0 and len(blocks) == 2, done.stderr
