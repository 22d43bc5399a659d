"""Untrusted settings are rejected before anything is allocated, and no module executes what it reads."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor as ft
from conftest import error_message
from fedtailor import networks
from fedtailor.core import memory_limits
from fedtailor.core.method import Setup
from fedtailor.experiments.experiment import make_experiment, read_experiment_file
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.training.participation import make_schedule
from support.memory import assert_memory_below, peak, start_peak

MIB = 2**20


def toml_error(text: str, folder: Path) -> str:
    path = folder / "experiment.toml"
    path.write_text(text)
    return error_message(lambda: make_experiment(read_experiment_file(path)))


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with 64 MiB of memory."""
    for module in (networks, memory_limits):
        monkeypatch.setattr(module, "total_memory", lambda device: 64 * MIB)


# experiments


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schedule = " + "[" * 10_000 + "]" * 10_000, "too many nested lists"),
        ("schedule = " + "[" * 40 + "]" * 40, "more than 32 nested tables and lists"),
        ("rounds = " + "1" * 5000, "too many digits"),
        ("rounds = 0x" + "f" * 5000, "more than 18 digits"),
        ("rounds = 1000000000000000", "rounds must be at most 1000000"),
        ('method = "\\u001b[2Jfedavg"', r"unprintable characters, '\x1b[2Jfedavg'"),
        ('"a\\nb" = 1', "unprintable characters"),
        (f'method = "{"fedavg" * 1000}"', "6,000 characters"),
        ('[method]\nname = "fedavg"\nepochs = 1000000000', "method.epochs must be at most 1000000"),
        ('[method]\nname = "lag"\n[method.inner]\nname = "pfedhn"\nhidden = 1000000000', "method.inner.hidden must be"),
        ("[network]\nname = 'mlp'\nhidden = [1000000000000]", "hidden of a network must be"),
        ("[unreliable]\ntrace = '/dev/zero'", "'/dev/zero' cannot be read"),
    ],
    ids=range(12),
)
def test_experiment_beyond_limits_raises(text: str, words: str, tmp_path: Path) -> None:
    assert words in toml_error(text, tmp_path)


def test_read_toml_with_many_dots_raises_immediately(tmp_path: Path) -> None:
    """The run time of tomllib is quadratic in the number of dots, so these would take hours."""
    many = ".".join("a" * 200_000)
    for text in (f"{many} = 1", f"x = {{{many} = 1}}", f"[{many}]", '"#".' + many + " = 1", "1." * 200_000 + "1 = 1"):
        assert "more than 32 dots in line 1" in toml_error(text, tmp_path)


def test_read_toml_with_dots_in_values_works(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f"# {'.' * 100}\nparticipation = [{'0.5, ' * 2}]\nx = [{'0.25, ' * 500}]\n")
    assert len(read_experiment_file(tmp_path / "a.toml")["x"]) == 500


def test_experiment_with_many_errors_uses_little_memory(tmp_path: Path) -> None:
    """Pydantic would store about a kilobyte per error."""
    wrong = [[1.5] * 100_000]
    with assert_memory_below(20 * MIB):
        assert "schedule cannot be [[1.5, 1.5" in error_message(lambda: make_experiment({"schedule": wrong}))


def test_read_experiment_file_with_invalid_file_raises(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "it is not a file" in error_message(lambda: read_experiment_file(tmp_path / "pipe"))
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**40)  # a sparse file, which takes no disk space
    with assert_memory_below(MIB):
        assert "1,099,511,627,776 bytes" in error_message(lambda: read_experiment_file(tmp_path / "large"))
    (tmp_path / "latin").write_bytes(b"# \xe9")
    assert "byte 2 is not UTF-8" in error_message(lambda: read_experiment_file(tmp_path / "latin"))


@pytest.mark.parametrize(
    "words",
    [
        ["--rounds", "1" * 5000], ["--schedule", "[" * 100_000], ["--" + ".".join("a" * 5000), "1"],
        ["--schedule", "[" * 900 + "]" * 900], ["--method.epochs", "1" + "0" * 4000], ["--device", "\x1b]0;title\x07"],
    ],
    ids=["digits", "brackets", "dots", "nested", "large", "escape"],
)  # fmt: skip
def test_overrides_beyond_limits_raise(words: list[str]) -> None:
    error_message(lambda: make_experiment(parse_overrides(words).apply_to({})))


@pytest.mark.parametrize("device", ["meta", "hpu", "privateuseone", "cuda:99", "cpu:-1", "nonsense"])
def test_unavailable_device_raises(device: str) -> None:
    assert "is not available" in error_message(lambda: make_experiment({"device": device}).torch_device)


def test_make_schedule_beyond_limits_raises() -> None:
    assert "1000000000000 times" in error_message(lambda: make_schedule(10**6, rounds=10**6))
    assert len(make_schedule(100, rounds=2000)) == 2000


# networks and methods


def data(labels: int = 3) -> ft.Federation:
    x, y = torch.zeros(4, 1, 28, 28), torch.arange(4) % 3
    return ft.Federation.from_arrays([(x, y, x, y)], classes=labels)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("mlp", {"hidden": [10**12]}, "hidden of a network must be"),
        ("mlp", {"hidden": [2**24, 2**24]}, "parameters for this data"),
        ("mlp", {"hidden": [8] * 10**6}, "at most 1000 integers"),
        ("mlp", {"hidden": [-1]}, "from 1 to"),
        ("mlp", {"hidden": [0.5]}, "integers"),
        ("mlp", {"hidden": "64"}, "integers"),
        ("resnet9", {"blocks": [10**9] * 4}, "blocks of a network must be"),
        ("resnet9", {"blocks": [1000] * 4}, "at most 1000 blocks, got 4000"),
        ("resnet20", {"channels": [2**24] * 3}, "parameters for this data"),
        ("resnet20", {"channels": [2, 4, 8]}, "2 channels cannot be normalized"),
        ("resnet20", {"channels": [], "blocks": []}, "blocks must have one number per group"),
    ],
)
def test_network_with_invalid_or_large_layers_raises_before_allocation(
    name: str, settings: dict[str, Any], words: str
) -> None:
    fed = data()
    with assert_memory_below(20 * MIB):
        assert words in error_message(lambda: ft.network(name, fed, **settings))


@pytest.mark.parametrize("classes", [2**62, 10**12])
def test_network_with_too_many_classes_raises_before_allocation(classes: int) -> None:
    with assert_memory_below(20 * MIB):
        assert "The network logistic has" in error_message(lambda: ft.network("logistic", data(classes)))


@pytest.mark.usefixtures("little_memory")
def test_network_memory_limit_includes_training() -> None:
    """64 MiB hold eight copies of two million float32 parameters."""
    assert ft.network("mlp", data(), hidden=[2000])
    message = error_message(lambda: ft.network("mlp", data(), hidden=[4000]))
    assert f"{784 * 4000 + 4000 + 4000 * 3 + 3:,} parameters" in message and f"about {2 * MIB:,};" in message


@pytest.mark.parametrize(
    "method",
    [
        ft.methods.PFedHN(hidden=10**6),
        ft.methods.PFedHN(hidden=10**11),
        ft.methods.PFedLA(embedding=10**6),
        ft.methods.LpProj(dimension=10**11),
        ft.methods.LAG(ft.methods.LpProj(dimension=10**11)),
    ],
)
def test_check_method_memory_raises_before_allocation(method: ft.Method) -> None:
    fed = data()
    model = ft.network("mlp", fed)
    setup = Setup(model, model.init(0), 40, torch.ones(40), rounds=2, seed=0)
    memory_limits.check_method_memory(ft.methods.PFedHN(), setup)
    before = start_peak()
    assert "=1000000" in error_message(lambda: memory_limits.check_method_memory(method, setup))
    assert peak() - before < 200 * MIB


# the source code

SOURCES = sorted(Path(ft.__file__).parent.rglob("*.py"))
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle", "yaml"}
# A process sends its task to the processes that it starts; nothing is read from a file or another party.
OWN_PROCESSES = {
    "tasks/child.py": ["pickle", "pickle.loads"],
    "tasks/processes.py": ["pickle"],
    "tasks/ray_cluster.py": ["pickle.PicklingError"],
    "training/ray_clients/worker.py": ["pickle", "pickle.loads"],
}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.loads", "torch.load"}


def unsafe_operations(tree: ast.AST) -> Iterator[str]:
    """Yield the imports and calls that would let a file execute code or write anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.partition(".")[0] in PICKLES)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name.name}" for name in node.names]
            yield from (name for name in names if name.partition(".")[0] in PICKLES or name in CALLS)
        elif isinstance(node, ast.Call):
            called, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            if called in CALLS and not (called == "torch.load" and given.get("weights_only") == "True"):
                yield called
            if called.rpartition(".")[2] in ("extract", "extractall", "unpack_archive"):
                yield called
            if given.get("allow_pickle", "False") != "False" or given.get("shell", "False") != "False":
                yield f"{called}({given})"
            if called in ("np.load", "numpy.load") and "allow_pickle" not in given:
                yield called


def test_source_has_no_unsafe_operations() -> None:
    folder = Path(ft.__file__).parent
    found = {path: list(unsafe_operations(ast.parse(path.read_text()))) for path in SOURCES}
    unsafe = {path.relative_to(folder).as_posix(): operations for path, operations in found.items() if operations}
    assert len(found) > 100 and unsafe == OWN_PROCESSES


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "import a, pickle as p", "from pickle import loads", "from joblib.x import y", "torch.load(f)",
        "torch.load(f, weights_only=False)", "from torch import load", "np.load(f)", "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=yes)", "eval('1')", "exec(x)", "subprocess.run(x, shell=True)", "os.system('x')",
        "archive.extractall(x)", "shutil.unpack_archive(x)", "import yaml",
    ],
)  # fmt: skip
def test_unsafe_operations_are_found(code: str) -> None:
    assert list(unsafe_operations(ast.parse(code)))


def test_safe_operations_are_not_reported() -> None:
    fine = ["torch.load(f, weights_only=True)", "np.load(f, allow_pickle=False)", "re.compile(x)", "model.eval()"]
    assert not list(unsafe_operations(ast.parse("\n".join(fine))))
