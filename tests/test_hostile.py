"""Settings that hostile hands would give, refused before anything is allocated; and code that runs nothing it reads."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor as ft
from conftest import refusal
from fedtailor import networks, room
from fedtailor.experiment import from_toml, make
from fedtailor.flags import read_flags
from fedtailor.method import Setup
from fedtailor.schedule import make_schedule
from peaks import at_most, peak, start_peak

MIB = 2**20


def of_toml(text: str, folder: Path) -> str:
    path = folder / "experiment.toml"
    path.write_text(text)
    return refusal(lambda: make(from_toml(path)))


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 MiB."""
    for module in (networks, room):
        monkeypatch.setattr(module, "total_memory", lambda device: 64 * MIB)


# ---- experiments


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schedule = " + "[" * 10_000 + "]" * 10_000, "lists within lists"),
        ("schedule = " + "[" * 40 + "]" * 40, "more than 32 tables and lists"),
        ("rounds = " + "1" * 5000, "too many digits"),
        ("rounds = 0x" + "f" * 5000, "more than 18 digits"),
        ("rounds = 1000000000000000", "rounds must be at most 1000000"),
        ('method = "\\u001b[2Jfedavg"', r"cannot be printed, '\x1b[2Jfedavg'"),
        ('"a\\nb" = 1', "cannot be printed"),
        (f'method = "{"fedavg" * 1000}"', "6,000 letters"),
        ('[method]\nname = "fedavg"\nepochs = 1000000000', "method.epochs must be at most 1000000"),
        ('[method]\nname = "lag"\n[method.inner]\nname = "pfedhn"\nhidden = 1000000000', "method.inner.hidden must be"),
        ("[network]\nname = 'mlp'\nhidden = [1000000000000]", "hidden of a network must be"),
        ("[unreliable]\ntrace = '/dev/zero'", "'/dev/zero' cannot be read"),
    ],
    ids=range(12),
)
def test_an_experiment_is_bounded(text: str, words: str, tmp_path: Path) -> None:
    assert words in of_toml(text, tmp_path)


def test_a_name_of_many_dots_is_refused_at_once(tmp_path: Path) -> None:
    """For tomllib the time grows with the square of the dots: these would take hours."""
    many = ".".join("a" * 200_000)
    for text in (f"{many} = 1", f"x = {{{many} = 1}}", f"[{many}]", '"#".' + many + " = 1", "1." * 200_000 + "1 = 1"):
        assert "more than 32 dots in line 1" in of_toml(text, tmp_path)


def test_honest_dots_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f"# {'.' * 100}\nparticipation = [{'0.5, ' * 2}]\nx = [{'0.25, ' * 500}]\n")
    assert len(from_toml(tmp_path / "a.toml")["x"]) == 500


def test_the_first_of_many_errors_is_enough(tmp_path: Path) -> None:
    """Pydantic would keep a note of a kilobyte for each."""
    wrong = [[1.5] * 100_000]
    with at_most(20 * MIB):
        assert "schedule cannot be [[1.5, 1.5" in refusal(lambda: make({"schedule": wrong}))


def test_an_experiment_is_a_file_of_a_sensible_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "it is no file" in refusal(lambda: from_toml(tmp_path / "pipe"))
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**40)  # a hole: it takes no room on the disk
    with at_most(MIB):
        assert "1,099,511,627,776 bytes" in refusal(lambda: from_toml(tmp_path / "large"))
    (tmp_path / "latin").write_bytes(b"# \xe9")
    assert "its byte 2 is no text" in refusal(lambda: from_toml(tmp_path / "latin"))


@pytest.mark.parametrize(
    "words",
    [
        ["--rounds", "1" * 5000], ["--schedule", "[" * 100_000], ["--" + ".".join("a" * 5000), "1"],
        ["--schedule", "[" * 900 + "]" * 900], ["--method.epochs", "1" + "0" * 4000], ["--device", "\x1b]0;title\x07"],
    ],
    ids=["digits", "brackets", "dots", "nested", "large", "escape"],
)  # fmt: skip
def test_flags_are_bounded(words: list[str]) -> None:
    refusal(lambda: make(read_flags(words).over({})))


@pytest.mark.parametrize("device", ["meta", "hpu", "privateuseone", "cuda:99", "cpu:-1", "nonsense"])
def test_a_device_without_numbers_is_refused(device: str) -> None:
    assert "is not to be had here" in refusal(lambda: make({"device": device}).torch_device)


def test_a_plan_is_bounded_before_it_is_made() -> None:
    assert "1000000000000 times" in refusal(lambda: make_schedule(10**6, rounds=10**6))
    assert len(make_schedule(100, rounds=2000)) == 2000


# ---- networks and methods


def data(labels: int = 3) -> ft.Federation:
    x, y = torch.zeros(4, 1, 28, 28), torch.arange(4) % 3
    return ft.Federation.from_arrays([(x, y, x, y)], classes=labels)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("mlp", {"hidden": [10**12]}, "hidden of a network must be"),
        ("mlp", {"hidden": [2**24, 2**24]}, "parameters for these data"),
        ("mlp", {"hidden": [8] * 10**6}, "at most 1000 whole numbers"),
        ("mlp", {"hidden": [-1]}, "from 1 to"),
        ("mlp", {"hidden": [0.5]}, "whole numbers"),
        ("mlp", {"hidden": "64"}, "whole numbers"),
        ("resnet9", {"blocks": [10**9] * 4}, "blocks of a network must be"),
        ("resnet9", {"blocks": [1000] * 4}, "4000 blocks"),
        ("resnet20", {"channels": [2**24] * 3}, "parameters for these data"),
        ("resnet20", {"channels": [2, 4, 8]}, "2 channels cannot be normalised"),
        ("resnet20", {"channels": [], "blocks": []}, "blocks must be 0 numbers"),
    ],
)
def test_a_network_is_measured_before_it_is_made(name: str, settings: dict[str, Any], words: str) -> None:
    fed = data()
    with at_most(20 * MIB):
        assert words in refusal(lambda: ft.network(name, fed, **settings))


@pytest.mark.parametrize("classes", [2**62, 10**12])
def test_a_head_for_classes_that_nobody_has_is_not_made(classes: int) -> None:
    with at_most(20 * MIB):
        assert "The network logistic would have" in refusal(lambda: ft.network("logistic", data(classes)))


@pytest.mark.usefixtures("little_memory")
def test_room_for_a_network_is_room_to_train_it() -> None:
    """64 MiB hold sixteen million numbers, or two million eight times over."""
    assert ft.network("mlp", data(), hidden=[2000])
    said = refusal(lambda: ft.network("mlp", data(), hidden=[4000]))
    assert f"{784 * 4000 + 4000 + 4000 * 3 + 3:,} parameters" in said and f"about {2 * MIB:,};" in said


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
def test_a_method_is_measured_before_its_server_is_made(method: ft.Method) -> None:
    fed = data()
    model = ft.network("mlp", fed)
    setup = Setup(model, model.init(0), 40, torch.ones(40), rounds=2, seed=0)
    room.check_method(ft.methods.PFedHN(), setup)
    before = start_peak()
    assert "=1000000" in refusal(lambda: room.check_method(method, setup))
    assert peak() - before < 200 * MIB


# ---- the code itself

SOURCES = sorted(Path(ft.__file__).parent.rglob("*.py"))
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.loads", "torch.load"}


def offences(tree: ast.AST) -> Iterator[str]:
    """What would let a file run code or write where it likes."""
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


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(Path(ft.__file__).parent)) for path in SOURCES])
def test_no_module_can_run_what_it_reads(path: Path) -> None:
    assert list(offences(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "import a, pickle as p", "from pickle import loads", "from joblib.x import y", "torch.load(f)",
        "torch.load(f, weights_only=False)", "from torch import load", "np.load(f)", "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=yes)", "eval('1')", "exec(x)", "subprocess.run(x, shell=True)", "os.system('x')",
        "archive.extractall(x)", "shutil.unpack_archive(x)", "import yaml",
    ],
)  # fmt: skip
def test_what_would_run_it_is_noticed(code: str) -> None:
    assert list(offences(ast.parse(code)))


def test_what_would_not_is_not() -> None:
    fine = ["torch.load(f, weights_only=True)", "np.load(f, allow_pickle=False)", "re.compile(x)", "model.eval()"]
    assert not list(offences(ast.parse("\n".join(fine))))
