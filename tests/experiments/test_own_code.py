"""Own methods, networks, and loaders by reference: when they are imported, how they are built, and what is recorded."""

import json
import logging
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from conftest import error_message, models, same
from fedtailor.cli.main import main
from fedtailor.experiments.deployment import make_deployment
from fedtailor.experiments.experiment import make_experiment
from fedtailor.experiments.own_code import CodeConsent
from fedtailor.experiments.own_parts import OwnNetwork
from fedtailor.experiments.sweep import parse_sweep, read_plan
from fedtailor.reporting import reproduce
from fedtailor.reporting.dashboard.form import parse_form
from fedtailor.reporting.dashboard.views import run_details
from support.dashboard_client import read_runs

PAGE = (Path(__file__).parents[2] / "docs" / "own_code.md").read_text()
EXECUTES = "is code that importing would execute"
OWN = {"method": "my_module:MyMethod", "network": "my_module:MyNet", "data": "my_module:load"}
ALLOW = CodeConsent(everything=True)
NET = """
import torch
from torch import nn
import fedtailor as ft

class Net(nn.Module):
    def __init__(self, fed, width=4):
        super().__init__()
        self.fc, self.head = nn.Linear(64, width), nn.Linear(width, fed.classes or 1)

    def forward(self, x):
        return self.head(self.fc(x.flatten(1)))

def module(fed, width: int): return Net(fed, width)
def fixed(fed, width: int): return ft.wrap(Net(fed, width))
def wrapped(fed, width: int): return ft.wrap(lambda: Net(fed, width))
"""
Fedtailor = Callable[..., int | str | None]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder with the module of the documentation, which other tests do not see."""
    (tmp_path / "my_module.py").write_text(PAGE.split("```python\n")[1].split("```")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield tmp_path
    forget(tmp_path)


def forget(folder: Path) -> None:
    """Forget the modules of a folder, as in a new process."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def fedtailor(monkeypatch: pytest.MonkeyPatch) -> Fedtailor:
    """Run the command in the current process, and return its exit code."""

    def run(*words: str) -> int | str | None:
        monkeypatch.setattr(sys, "argv", ["fedtailor", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code

    return run


def finished_run(path: Path) -> Path:
    """Return the folder of a run of own code, as another process left it."""
    make_experiment({"rounds": 1, **OWN}, ALLOW).run(folder=path)
    forget(Path.cwd())
    return path


def stopped_run(path: Path) -> Path:
    """Return the folder of a run of own code that stopped before its models were written."""
    shutil.rmtree(finished_run(path) / "personal")
    return path


# ---- using own code


def test_commands_of_the_documentation_run(
    folder: Path, fedtailor: Fedtailor, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = PAGE.split("```bash\n")[1].split("```")[0].splitlines()
    assert len(lines) == 8
    for line in lines:
        if line.startswith("fedtailor resume"):
            shutil.rmtree(folder / "runs" / "MyMethod-seed0-load" / "personal")
        assert fedtailor(*shlex.split(line)[1:]) == 0, f"{line}: {capfd.readouterr().err}"
        forget(folder)
    (folder / "exp.toml").write_text("rounds = 1\n" + PAGE.split("```toml\n")[1].split("```")[0])
    assert fedtailor("run", "exp.toml", "--allow-code") == 0
    found = {str(path.parent.relative_to(folder / "runs")) for path in folder.glob("runs/**/experiment.toml")}
    swept = [f"MyMethod-mu{mu}-hidden{hidden}-seed0" for mu in ("0.1", "1") for hidden in (16, 32)]
    assert found == {
        "MyMethod-seed0-load", "MyMethod-seed0-load-2", "lag-MyMethod-seed0-digits",
        *(f"compare-load/{name}-seed0" for name in ("local", "fedavg", "MyMethod")),
        *(f"sweep-MyMethod-digits/{label}" for label in swept),
    }  # fmt: skip


def test_own_parts_by_name_train_like_the_same_objects(folder: Path) -> None:
    parts = {"method": {"name": OWN["method"], "mu": 0.5}, "network": {"name": OWN["network"], "hidden": 8}}
    data = {"name": OWN["data"], "clients": 3}
    by_name = make_experiment({"rounds": 2, "seed": 3, "data": data, **parts}, ALLOW).run(folder=folder / "run")
    own: Any = sys.modules["my_module"]
    fed = own.load(clients=3, seed=3)  # the run's seed
    model = ft.wrap(lambda: own.MyNet(fed, hidden=8))
    by_object = ft.simulate(own.MyMethod(mu=0.5), model, fed, rounds=2, seed=3)
    assert all(same(a, b) for a, b in zip(models(by_name), models(by_object), strict=True))
    assert by_name.experiment["data"] == data | {"seed": 3} and by_name.method == by_object.method == "MyMethod"
    digest = sha256((folder / "my_module.py").read_bytes()).hexdigest()
    names = {part: reference.split(":") for part, reference in OWN.items()}
    recorded = {part: {"module": m, "qualname": q, "sha256": digest} for part, (m, q) in names.items()}
    assert json.loads((folder / "run" / "run.json").read_text())["code"] == recorded
    assert by_object.info["code"] == {part: recorded[part] for part in ("method", "network")}


@pytest.mark.parametrize("name", ["Net", "module", "fixed", "wrapped"])
def test_own_network_draws_its_weights_from_the_seed(name: str, folder: Path) -> None:
    (folder / "nets.py").write_text(NET)
    experiment = make_experiment({"network": {"name": f"nets:{name}", "width": 5}, "data": {"clients": 3}}, ALLOW)
    fed = experiment.load()
    model, again = experiment.model(fed), experiment.model(fed)
    assert isinstance(model, ft.Model) and isinstance(again, ft.Model)
    before = torch.random.get_rng_state()
    assert same(model.init(1), again.init(1)) and not same(model.init(1), model.init(2))
    experiment.model(fed)
    assert torch.equal(torch.random.get_rng_state(), before)
    own: Any = sys.modules["nets"]
    assert same(model.init(1), ft.wrap(lambda: own.Net(fed, 5)).init(1))
    assert model.description == {"name": f"nets:{name}", "width": 5}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "nowhere:X"}, "There is no module 'nowhere' in the current folder"),
        ({"method": "my_module:MyMetod"}, "named 'MyMetod'; did you mean 'MyMethod'?"),
        ({"method": "my_module:MyNet"}, "'my_module:MyNet' must be a class that inherits from ft.Method"),
        ({"method": "odd:Mutable"}, "Mutable is not a frozen dataclass"),
        ({"method": {"name": OWN["method"], "mue": 1}}, "no field of my_module:MyMethod 'mue'; did you mean 'mu'?"),
        ({"method": {"name": OWN["method"], "mu": -1}}, "mu must be at least 0, got -1"),
        ({"method": "broken:X"}, "cannot be imported: ZeroDivisionError: division by zero (broken.py, line 2)"),
        ({"method": "script:X"}, "The module 'script' cannot be imported: SystemExit"),
        ({"method": "a b:X"}, "must be written as module:name"),
        ({"method": "my_module:"}, "must be written as module:name"),
        ({"method": "__main__:Mine"}, "defined in a script or a notebook; put it into a module"),
        ({"network": "odd:f.<locals>.Net"}, "defined inside a function; put it into a module"),
        ({"network": {"name": OWN["network"], "hiden": 1}}, "of my_module:MyNet 'hiden'; did you mean 'hidden'?"),
        ({"network": {"name": OWN["network"], "hidden": "a"}}, "network.hidden cannot be 'a': input should be"),
        ({"network": "odd:number"}, "'odd:number' has the type int; it must be a class or a function"),
        ({"network": "odd:text"}, "'odd:text' must return an nn.Module or an ft.Model, got str"),
        ({"data": "odd:text"}, "'odd:text' returned str; return ft.Federation.from_arrays"),
        ({"data": "odd:missing"}, "'odd:missing' needs the argument 'path'; set it with --data.path"),
        ({"data": {"name": "odd:missing", "path": "x"}}, "FileNotFoundError: No such file or directory (odd.py,"),
    ],
)  # fmt: skip
def test_invalid_own_code_gives_one_sentence(settings: dict[str, Any], message: str, folder: Path) -> None:
    (folder / "broken.py").write_text("x = 1\nx / 0\n")
    (folder / "script.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "odd.py").write_text(
        "import fedtailor as ft\nnumber = 3\n"
        "class Mutable(ft.LocalTraining):\n    def train(self, ctx, state, message): return state, message\n"
        "def text(): return 'x'\n\ndef missing(path):\n    # reads a file\n    return open(path)\n"
    )

    def build() -> None:
        experiment = make_experiment({"data": {"clients": 3}} | settings, ALLOW)
        experiment.model(experiment.load())

    found = error_message(build)
    assert message in found and "\n" not in found


def test_own_methods_with_the_same_class_name_cannot_be_compared(
    folder: Path, fedtailor: Fedtailor, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their runs would have the same folder."""
    shutil.copy(folder / "my_module.py", folder / "other.py")
    assert fedtailor("compare", "my_module:MyMethod", "other:MyMethod") == 2
    assert fedtailor("sweep", "--method", "my_module:MyMethod,other:MyMethod") == 2
    assert capsys.readouterr().err.count("my_module:MyMethod and other:MyMethod have the same name") == 2


def test_sweep_passes_each_own_part_only_its_arguments(folder: Path) -> None:
    (folder / "nets.py").write_text(NET.replace("width=4", "width: list[int] = 4"))
    words = "--method fedavg,my_module:MyMethod --MyMethod.mu 0.1,1 --network nets:Net,my_module:MyNet"
    words += " --network.width 1,2 --network.hidden 8,9"
    points = parse_sweep(words.split(), ALLOW).points
    labels = [point.label for point in points]
    networks = ["networkNet", "networkMyNet-hidden8", "networkMyNet-hidden9"]
    assert points[0].experiment.network == OwnNetwork("nets:Net", {"width": [1, 2]}, dict)  # a list is one value
    assert labels == [f"{method}-{network}-seed0" for method in ("fedavg", "MyMethod-mu0.1", "MyMethod-mu1")
                      for network in networks]  # fmt: skip


# ---- consent


@pytest.mark.parametrize(
    "part", ['method = "evil:X"', '[method]\nname = "lag"\ninner = "evil:X"', 'network = "evil:X"', 'data = "evil:X"']
)
def test_code_that_only_a_file_names_needs_consent(
    part: str, folder: Path, fedtailor: Fedtailor, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "evil.py").write_text("open('imported', 'w')")
    (folder / "exp.toml").write_text(part)
    for words in (["run", "exp.toml"], ["sweep", "exp.toml", "--rounds", "1,2"]):
        assert fedtailor(*words) == 2
        command = f"fedtailor {shlex.join(words)} --allow-code"
        how = f"'evil:X' {EXECUTES}; if you trust it, name it in the command, or run: {command}."
        assert how in capsys.readouterr().err and not (folder / "imported").exists()
    assert fedtailor("run", "exp.toml", "--allow-code") == 2
    assert "no class or function in 'evil' named 'X'" in capsys.readouterr().err and (folder / "imported").exists()


def test_viewing_a_folder_never_imports_the_code_that_it_names(folder: Path, fedtailor: Fedtailor) -> None:
    run = finished_run(folder / "runs" / "one")
    assert fedtailor("sweep", "--method", OWN["method"], "--method.mu", "0.1,1", "--rounds", "1", "--out", "swept") == 0
    forget(folder)
    (folder / "my_module.py").write_text("open('imported', 'w')")
    assert fedtailor("show", str(run)) == fedtailor("show", "runs") == fedtailor("show", "swept") == 0
    assert fedtailor("report", "runs", "swept") == 0
    text = re.sub("</?span>", "", Path("report.html").read_text())
    assert "fedtailor sweep --method my_module:MyMethod" in text and "fedtailor run --method my_module:MyMethod" in text
    assert fedtailor("track", "runs", "--tensorboard", "logs") == 0
    _, views = read_runs(folder / "runs")
    assert run_details(views["one"]) and views["one"].row()["method"] == "MyMethod"
    assert EXECUTES in error_message(lambda: parse_form({"method": OWN["method"]}))
    assert EXECUTES in error_message(lambda: make_deployment({"method": OWN["method"]}))
    assert "my_module" not in sys.modules and not (folder / "imported").exists()


def test_resume_imports_code_that_is_named_again_or_allowed(
    folder: Path, fedtailor: Fedtailor, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = stopped_run(folder / "my run")
    hint = f"method 'my_module:MyMethod' {EXECUTES}; if you trust it, run: fedtailor resume 'my run' --allow-code"
    assert fedtailor("resume", "my run") == 2 and hint in capsys.readouterr().err
    assert fedtailor("resume", "my run", "--method", OWN["method"], "--data", OWN["data"]) == 2
    assert f"network 'my_module:MyNet' {EXECUTES}" in capsys.readouterr().err
    with caplog.at_level(logging.WARNING, "fedtailor"):
        assert fedtailor("resume", "my run", *(word for part, name in OWN.items() for word in (f"--{part}", name))) == 0
        assert not caplog.messages
        shutil.rmtree(run / "personal")
        forget(folder)
        with (folder / "my_module.py").open("a") as file:
            file.write("# fixed\n")
        assert len(ft.resume(run, allow_code=True).records) == 1
    changed = "The source of my_module:MyMethod, my_module:MyNet, my_module:load changed since the run was started."
    assert caplog.messages == [changed]


def test_own_data_is_split_anew_and_resumed(folder: Path) -> None:
    """The number of the split is a setting of any data; the function does not need to know it."""
    experiment = make_experiment({"rounds": 1, "data": {"name": OWN["data"], "repeat": 2, "folds": 3}}, ALLOW)
    fed = experiment.load()
    own: Any = sys.modules["my_module"]
    assert same({"test": torch.cat(fed.test)}, {"test": torch.cat(own.load().resplit(2, folds=3).test)})
    run = experiment.run(folder=folder / "run")
    shutil.rmtree(folder / "run" / "personal")
    assert ft.resume(folder / "run", allow_code=True).summary() == run.summary()


def test_resume_accepts_a_class_that_was_moved_from_a_notebook_to_a_module(folder: Path) -> None:
    make_experiment({"rounds": 1, **OWN}, ALLOW)
    own: Any = sys.modules["my_module"]
    for kind in (own.MyMethod, own.MyNet):
        kind.__module__ = "__main__"
    fed = replace(own.load(), settings={})
    ft.simulate(own.MyMethod(), ft.wrap(lambda: own.MyNet(fed)), fed, rounds=1, folder=folder / "run")
    shutil.rmtree(folder / "run" / "personal")
    forget(folder)
    cannot = "The method '__main__:MyMethod' was defined in a script or a notebook; put it into a module"
    assert cannot in error_message(lambda: ft.resume(folder / "run", allow_code=True, fed=fed))
    run = ft.resume(folder / "run", method=OWN["method"], model=OWN["network"], fed=OWN["data"])
    assert len(run.records) == 1
    assert ft.load_personal(folder / "run", 0, method=OWN["method"], model=OWN["network"])(fed.x[:2]).shape == (2, 10)


def test_export_and_predict_import_only_code_that_is_allowed(
    folder: Path, fedtailor: Fedtailor, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(folder / "run")
    assert EXECUTES in error_message(lambda: ft.load_personal(run, 0)) and "my_module" not in sys.modules
    own = ["--method", OWN["method"], "--network", OWN["network"]]
    assert fedtailor("export", "run", "--client", "0", "-o", "one.safetensors", *own) == 0
    fed = ft.load("digits", clients=4, partition="iid")
    np.save("x.npy", fed.x[:3].numpy())
    forget(folder)
    assert fedtailor("predict", "one.safetensors", "x.npy") == 2 and "my_module" not in sys.modules
    assert "name it in the command or add --allow-code" in capsys.readouterr().err
    assert fedtailor("predict", "one.safetensors", "x.npy", "--allow-code") == 0
    model = ft.load_personal(run, 0, allow_code=True)
    assert torch.equal(ft.load_personal("one.safetensors", allow_code=True)(fed.x[:3]), model(fed.x[:3]))


# ---- what a run records


def test_run_commands_of_own_code_reproduce_the_runs_without_importing_it(folder: Path, fedtailor: Fedtailor) -> None:
    words = (
        "--network my_module:MyNet --data my_module:load --data.clients 3 --method.lr 0.2 --MyMethod.mu 0.5 --rounds 1"
    )
    assert fedtailor("compare", "my_module:MyMethod", *words.split(), "--seeds", "0,1", "--out", "all") == 0
    forget(folder)
    runs = [ft.load_run(path) for path in sorted(folder.glob("all/*"))]
    (line,) = reproduce.run_commands(runs)
    assert "my_module" not in sys.modules
    assert fedtailor(*shlex.split(line)[1:], "--out", "again") == 0
    for run in runs:
        assert run.folder is not None
        assert ft.load_run(folder / "again" / run.folder.name).experiment == run.experiment
    unsafe = runs[0].experiment | {"method": {"name": OWN["method"], "text": "x\x1b[2J"}}
    assert reproduce.run_commands([replace(runs[0], experiment=unsafe)]) == []
    (line,) = reproduce.run_commands(runs[:1])
    assert fedtailor(*shlex.split(line)[1:], "--out", "single") == 0
    assert ft.load_run(next((folder / "single").iterdir())).experiment == runs[0].experiment
    words = "--method fedavg,my_module:MyMethod --MyMethod.mu 0.1,1 --data my_module:load --rounds 1 --seed 0,1"
    assert fedtailor("sweep", *words.split(), "--out", "swept") == 0
    plan = read_plan(folder / "swept")
    assert plan is not None and (found := reproduce.sweep_command(plan)) is not None
    assert parse_sweep(shlex.split(found)[2:], ALLOW).plan == plan


@pytest.mark.parametrize("options", [{"loss": lambda o, t: o.square().mean(1)}, {"parts": {"output": ["fc", "head"]}}])
def test_resume_by_name_needs_what_was_passed_to_wrap(options: dict[str, Any], folder: Path) -> None:
    """The folder names only the class, so the fingerprint covers the loss, the metrics, and the parts."""
    (folder / "nets.py").write_text(
        NET.replace("self, fed, width=4", "self, width=4").replace("fed.classes or 1", "10")
    )
    make_experiment({"network": "nets:Net", "data": OWN["data"]}, ALLOW)
    fed, net = sys.modules["my_module"].load(), sys.modules["nets"].Net
    ft.simulate(ft.methods.FedAvg(), ft.wrap(net, **options), fed, rounds=1, folder=folder / "run")
    shutil.rmtree(folder / "run" / "personal")
    assert "model differs" in error_message(lambda: ft.resume(folder / "run", fed=fed, allow_code=True))
    assert len(ft.resume(folder / "run", fed=fed, model=ft.wrap(net, **options)).records) == 1


def test_damaged_description_of_code_is_rejected(folder: Path) -> None:
    run = finished_run(folder / "run")
    info = json.loads((run / "run.json").read_text())
    long_name = {"method": info["code"]["method"] | {"module": "x" * 2000}}
    wrong: Any
    for wrong in (3, {"method": 3}, {"method": {}}, long_name):
        (run / "run.json").write_text(json.dumps(info | {"code": wrong}))
        assert re.search("cannot be read", error_message(lambda: ft.load_run(run)))
